"""Measure one program in every column: compile, check the answer, then time, columns in turn."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from benchmarks._columns import COLUMNS, Prepare, Ready, Unavailable, by_jit, under
from benchmarks.programs import Program
from benchmarks.programs._program import Category
from jaxsched._hlo._copies import copies
from jaxsched._hlo._text import parse

SAMPLE_SECONDS = 2e-3  # a sample repeats its call until it takes about this long ...
SAMPLE_BYTES = 64 << 20  # ... as far as the inputs of its calls fit here
RIVALS = ("plain", "region", "program_order", "barrier")  # means that ours is held against
SLOWER = 1.05  # ratio of medians from which it counts as slower

Cell = dict[str, Any]


@dataclass
class Options:
    """What to measure, and how thoroughly."""

    columns: Sequence[str] = tuple(COLUMNS)
    added: Mapping[str, str] = field(default_factory=dict)  # column -> "module:transformation"
    repeat: int = 15  # samples per cell
    compiles: int = 3  # compilations per cell
    small: bool = False  # programs in their small size, one call per sample


def prepares(options: Options) -> dict[str, Prepare]:
    """How each chosen column makes a program ready."""
    known = dict(COLUMNS)
    for name, path in options.added.items():
        module, _, attribute = path.partition(":")
        known[name] = by_jit(under(getattr(importlib.import_module(module), attribute)))
    unknown = [name for name in options.columns if name not in known]
    if unknown:
        raise ValueError(f"no column {' '.join(unknown)}; there are: {' '.join(known)}")
    return {name: known[name] for name in options.columns}


def measure(program: Program, options: Options, started: Callable[[str], None]) -> dict[str, Cell]:
    """The cell of each column; `started` is told the column that is made ready, "" at the end."""
    _, args = program.build(small=options.small)
    want, buffer = program.reference(*args), program.buffer_bytes(args)
    cells: dict[str, Cell] = {}
    ready: dict[str, Ready] = {}
    for name, prepare in prepares(options).items():
        started(name)
        try:
            one = prepare(program, options.small)
            correct = agree(one.call(*one.inputs()), want, program.tolerance)
        except Unavailable as e:
            cells[name] = {"skipped": str(e)}
        except Exception as e:  # whatever a compiler raises belongs in its cell
            cells[name] = {"error": f"{type(e).__name__}: {e}".split("\n")[0][:300]}
        else:
            ready[name] = one
            cells[name] = facts(program, one.compiled, buffer) | {"correct": correct}
    started("")
    compare(cells, compile_seconds(program, options, ready), "compile")
    most = 1 if options.small else SAMPLE_BYTES // buffer
    samples = sample(ready, most, options.repeat)
    compare(cells, samples, "time")
    ours = ours_for(program.category)
    fair = {name: samples[name] for name in RIVALS if does_its_job(cells.get(name, {}))}
    if fair and ours in ready:
        best = min(fair, key=lambda name: statistics.median(fair[name]))
        if is_slower(samples[ours], fair[best]):
            # The best of several noisy medians is too good to be true: compare with it alone.
            pair = {name: ready[name] for name in (best, ours)}
            samples = sample(pair, most, 3 * options.repeat)
        cells[ours]["rival"] = best
        cells[ours]["rival_ratio"] = ratios(samples[ours], samples[best])
        cells[ours]["slower"] = is_slower(samples[ours], samples[best])
    return cells


def ours_for(category: Category) -> str:
    """The column held against the rivals: an order that no buffer asks for must be declared."""
    return "declared" if category == "ordering" else "scheduled"


def does_its_job(cell: Cell) -> bool:
    """Whether the answer is right and the order, if the program is about one, is kept."""
    return cell.get("correct", False) and cell.get("ordered", True)


def facts(program: Program, compiled: jax.stages.Compiled | None, buffer: int) -> Cell:
    """What the optimized module says: bytes copied, temporary memory, whether order is kept."""
    if compiled is None:
        return {}
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    found = copies(parse(text), buffer // 2)
    cell = {
        "copied": sum(copy.nbytes for copy in found),
        "in_loop": any(copy.in_loop for copy in found),
        "temp": memory.temp_size_in_bytes,
    }
    if program.ordered:
        cell["ordered"] = program.ordered(text)
    if program.temp_goal:
        cell["ordered"] = cell["temp"] <= program.temp_goal * buffer
    return cell


def agree(got: Any, want: Any, tolerance: float) -> bool:
    """Whether two pytrees hold the same numbers, up to `tolerance`."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return False
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.allclose(g, w, rtol=tolerance, atol=tolerance) for g, w in pairs)


def compile_seconds(
    program: Program, options: Options, ready: dict[str, Ready]
) -> dict[str, list[float]]:
    """Seconds to lower and compile, several times for each column that compiles, in turns."""
    seconds = {n: [one.compile_seconds] for n, one in ready.items() if one.compile_seconds}
    for _ in range(options.compiles - 1):
        for name, values in seconds.items():
            again = prepares(options)[name](program, options.small).compile_seconds
            assert again is not None
            values.append(again)
    return seconds


def sample(ready: dict[str, Ready], most: int, repeat: int) -> dict[str, list[float]]:
    """Seconds per call, `repeat` times for each column, in turns, from up to `most` calls each."""
    calls = {}
    for name, one in ready.items():
        once = min(timed(one, 1) for _ in range(2))
        calls[name] = max(1, min(most, round(SAMPLE_SECONDS / once)))
    samples: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for turn in range(repeat):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(timed(ready[name], calls[name]))
    return samples


def timed(ready: Ready, calls: int) -> float:
    """Seconds per call; making the inputs and freeing the outputs does not count."""
    inputs = [ready.inputs() for _ in range(calls)]
    outputs = []
    gc.disable()
    start = time.perf_counter()
    for one in inputs:
        outputs.append(ready.call(*one))
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds / calls


def compare(cells: dict[str, Cell], samples: dict[str, list[float]], what: str) -> None:
    """Put the spread of each column's samples in its cell, in seconds and relative to plain."""
    for name, values in samples.items():
        cells[name][what] = spread(values)
        if "plain" in samples:
            cells[name][f"{what}_ratio"] = ratios(values, samples["plain"])


def ratios(these: Sequence[float], those: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of samples taken in the same turns."""
    return spread([a / b for a, b in zip(these, those, strict=True)])


def is_slower(these: Sequence[float], those: Sequence[float]) -> bool:
    """Whether the median ratio is above `SLOWER`, and above 1 by more than chance.

    The 95 % confidence interval of a median of n begins about sqrt(n) ranks below the middle.
    """
    found = sorted(a / b for a, b in zip(these, those, strict=True))
    low = found[max(0, int(len(found) / 2 - len(found) ** 0.5))]
    return statistics.median(found) > SLOWER and low > 1


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return dict.fromkeys(("q1", "median", "q3"), values[0])
    quartiles = statistics.quantiles(values, method="inclusive")
    return dict(zip(("q1", "median", "q3"), quartiles, strict=True))
