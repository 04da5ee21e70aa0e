"""JAX's primitives in NumPy: each takes (params, *arrays) and returns new arrays."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

__all__ = ["VIEWS", "apply"]

VIEWS = frozenset({"expand_dims", "reshape", "squeeze"})


def apply(name: str, params: dict[str, Any], arrays: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(_RULES[name](params, *arrays))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *arrays: function(*arrays)


def _reduction(function: Any) -> Callable[..., Any]:
    def rule(params: Any, x: np.ndarray) -> Any:
        if function is np.add:
            return np.add.reduce(x, axis=params["axes"], dtype=x.dtype)
        return function.reduce(x, axis=params["axes"])

    return rule


def _broadcast(params: Any, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for source, target in enumerate(params["broadcast_dimensions"]):
        shape[target] = x.shape[source]
    return np.broadcast_to(x.reshape(shape), params["shape"]).copy()


def _slice(params: Any, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*each) for each in bounds)].copy()


def _window(shape: Any, starts: Any, sizes: Any) -> tuple[slice, ...]:
    limits = zip(starts, shape, sizes, strict=True)
    places = [min(max(int(start), 0), size - part) for start, size, part in limits]
    return tuple(slice(place, place + part) for place, part in zip(places, sizes, strict=True))


def _dynamic_slice(params: Any, x: np.ndarray, *starts: Any) -> np.ndarray:
    return x[_window(x.shape, starts, params["slice_sizes"])].copy()


def _dynamic_update_slice(params: Any, x: np.ndarray, update: np.ndarray, *starts: Any) -> Any:
    new = x.copy()
    new[_window(x.shape, starts, update.shape)] = update
    return new


def _pad(params: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    config = params["padding_config"]
    assert all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in config)
    return np.pad(x, [(low, high) for low, high, _ in config], constant_values=value)


def _dot_general(params: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    assert not (*batch_a, *batch_b)
    return np.tensordot(a, b, (contract_a, contract_b)).astype(a.dtype)


def _iota(params: Any) -> np.ndarray:
    shape, axis = params["shape"], params["dimension"]
    column = [1] * len(shape)
    column[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis]).reshape(column), shape).astype(params["dtype"])


def _select(params: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if which.dtype != bool:
        return np.choose(which, cases)
    return np.where(which, cases[1], cases[0])


### gather and scatter


def _windows(
    shape: Any, indices: np.ndarray, sizes: Any, index_dims: Any, batching: Any, mode: Any
) -> np.ndarray:
    """Flat positions of each window, in the shape (batch..., *sizes); -1 where it is outside."""
    batch = indices.shape[:-1]
    starts = np.zeros((*batch, len(shape)), np.int64)
    for k, dimension in enumerate(index_dims):
        starts[..., dimension] = indices[..., k]
    for dimension, of_batch in batching:
        column = [1] * len(batch)
        column[of_batch] = batch[of_batch]
        starts[..., dimension] = np.arange(batch[of_batch]).reshape(column)
    last = np.array(shape) - np.array(sizes)
    if mode == GatherScatterMode.CLIP:
        starts = np.clip(starts, 0, last)
    outside = np.any((starts < 0) | (starts > last), axis=-1)
    starts = np.where(outside[..., None], 0, starts)
    strides = np.cumprod([1, *shape[:0:-1]])[::-1]
    within = np.tensordot(strides, np.indices(sizes), 1)
    flat = (starts @ strides).reshape(batch + (1,) * len(sizes)) + within
    return np.where(outside.reshape(batch + (1,) * len(sizes)), -1, flat)


def _arranged(windows: np.ndarray, batch: int, dropped: Any, window_dims: Any) -> np.ndarray:
    """Positions in the shape of a gather's result or a scatter's updates."""
    kept = np.squeeze(windows, tuple(batch + axis for axis in dropped))
    rest = [axis for axis in range(kept.ndim) if axis not in window_dims]
    return np.moveaxis(kept, range(kept.ndim), [*rest, *window_dims])


def _gather(params: Any, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    numbers, mode = params["dimension_numbers"], GatherScatterMode.from_any(params["mode"])
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    sizes, batch = params["slice_sizes"], indices.ndim - 1
    windows = _windows(x.shape, indices, sizes, numbers.start_index_map, batching, mode)
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    where = _arranged(windows, batch, dropped, numbers.offset_dims)
    fill = params["fill_value"]
    if fill is None:
        fill = np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).min if x.dtype != bool else 1
    return np.where(where >= 0, x.reshape(-1)[np.maximum(where, 0)], np.array(fill, x.dtype))


def _scatter(combine: Any) -> Callable[..., Any]:
    def rule(params: Any, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
        numbers, mode = params["dimension_numbers"], GatherScatterMode.from_any(params["mode"])
        batching = zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        )
        dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        window = iter(numbers.update_window_dims)
        sizes = [1 if axis in dropped else updates.shape[next(window)] for axis in range(x.ndim)]
        index_dims = numbers.scatter_dims_to_operand_dims
        windows = _windows(x.shape, indices, sizes, index_dims, batching, mode)
        where = _arranged(windows, indices.ndim - 1, dropped, numbers.update_window_dims)
        flat = x.reshape(-1).copy()
        inside = where >= 0
        if combine is None:
            flat[where[inside]] = updates[inside]
        else:
            combine.at(flat, where[inside], updates[inside])
        return flat.reshape(x.shape)

    return rule


_RULES: dict[str, Callable[..., Any]] = {
    **{
        name: _elementwise(function)
        for name, function in {
            "abs": np.abs,
            "add": np.add,
            "and": np.bitwise_and,
            "eq": np.equal,
            "exp": np.exp,
            "ge": np.greater_equal,
            "gt": np.greater,
            "le": np.less_equal,
            "lt": np.less,
            "max": np.maximum,
            "min": np.minimum,
            "mul": np.multiply,
            "ne": np.not_equal,
            "neg": np.negative,
            "not": np.invert,
            "or": np.bitwise_or,
            "pow": np.power,
            "sign": np.sign,
            "sin": np.sin,
            "square": np.square,
            "sub": np.subtract,
            "tanh": np.tanh,
            "xor": np.bitwise_xor,
            "copy": np.copy,
        }.items()
    },
    "broadcast_in_dim": _broadcast,
    "clamp": lambda params, low, x, high: np.clip(x, low, high),
    "concatenate": lambda params, *arrays: np.concatenate(arrays, params["dimension"]),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "cumsum": lambda params, x: _directed(np.cumsum, params, x),
    "div": lambda params, a, b: a / b if a.dtype.kind == "f" else _truncated(a, b),
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": lambda params, x: np.expand_dims(x, params["dimensions"]),
    "gather": _gather,
    "integer_pow": lambda params, x: x ** params["y"],
    "iota": _iota,
    "pad": _pad,
    "reduce_and": _reduction(np.logical_and),
    "reduce_max": _reduction(np.maximum),
    "reduce_min": _reduction(np.minimum),
    "reduce_or": _reduction(np.logical_or),
    "reduce_sum": _reduction(np.add),
    "rem": lambda params, a, b: np.fmod(a, b),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]).copy(),
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter-max": _scatter(np.maximum),
    "scatter-min": _scatter(np.minimum),
    "scatter-mul": _scatter(np.multiply),
    "select_n": _select,
    "slice": _slice,
    "sort": lambda params, x: np.sort(x, params["dimension"]),
    "squeeze": lambda params, x: x.reshape(np.squeeze(x, params["dimensions"]).shape),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]).copy(),
}


def _directed(function: Any, params: Any, x: np.ndarray) -> np.ndarray:
    assert not params["reverse"]
    return function(x, params["axis"], dtype=x.dtype)


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    b = np.where(b == 0, 1, b)
    return (np.sign(a) * np.sign(b) * operator.floordiv(np.abs(a), np.abs(b))).astype(a.dtype)
