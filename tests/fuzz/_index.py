"""Indices of `.at[...]` as data: their text, and the positions in the buffer that they mean.

An index is a tuple with an entry for each dimension: ("at", n), ("slice", a, b, step),
("array", numbers), ("mask", booleans), or ("dynamic",), which takes the next of the step's further
operands: a scalar or a vector of integers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["positions", "render_index"]

type Index = tuple[tuple[Any, ...], ...]


def render_index(index: Index, dynamic: Sequence[str]) -> str:
    names = iter(dynamic)
    parts = []
    for kind, *numbers in index:
        match kind:
            case "at":
                parts.append(str(numbers[0]))
            case "slice":
                parts.append(":".join("" if n is None else str(n) for n in numbers))
            case "array" | "mask":
                parts.append(f"np.array({list(numbers[0])})")
            case "dynamic":
                parts.append(next(names))
    return ", ".join(parts)


def positions(
    shape: tuple[int, ...], index: Index, dynamic: Sequence[np.ndarray], mode: str | None
) -> np.ndarray:
    """The flat positions that an index takes, in its result's shape; -1 for what is outside.

    NumPy resolves the index, in an array of positions with a border of -1 at each far end.
    """
    inside = np.arange(np.prod(shape)).reshape(shape)
    bordered = np.pad(inside, [(0, 1)] * len(shape), constant_values=-1)
    values = iter(dynamic)
    entries = []
    for size, (kind, *numbers) in zip(shape, index, strict=True):
        if kind == "slice":
            start, stop, step = slice(*numbers).indices(size)
            entries.append(slice(start, None if stop < 0 else stop, step))
            continue
        if kind == "mask":
            numbers = [np.flatnonzero(numbers[0])]
        place = np.asarray(next(values) if kind == "dynamic" else numbers[0]).astype(np.int64)
        place = np.where(place < 0, place + size, place)
        if mode == "clip":
            place = np.clip(place, 0, size - 1)
        place = np.where((place < 0) | (place >= size), size, place)
        entries.append(int(place) if place.ndim == 0 else place)
    return bordered[tuple(entries)]
