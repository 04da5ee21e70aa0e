"""A program as data: rendered as JAX source, evaluated by NumPy with a fresh array per write."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsched import before
from tests.fuzz._index import positions, render_index

__all__ = [
    "BLOCKS",
    "LOOPS",
    "OPERATIONS",
    "Block",
    "Program",
    "Step",
    "evaluate",
    "function",
    "source",
]


@dataclasses.dataclass(frozen=True)
class Step:
    """`targets = operation(operands)`; `static` is what is no value, `blocks` the bodies."""

    targets: tuple[str, ...]
    operation: str
    operands: tuple[str, ...] = ()
    static: tuple[Any, ...] = ()
    blocks: tuple["Block", ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """A function: the program, a loop body, a branch. Bodies see the values around them too.

    `orders` are the declarations, each a tuple of names for one call of `before`.
    """

    parameters: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    orders: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A block whose parameters have the given shapes and dtypes; `donated` are their positions."""

    block: Block
    types: tuple[tuple[tuple[int, ...], str], ...]
    donated: tuple[int, ...] = ()
    seed: int = 0

    def arguments(self, example: int = 0) -> list[np.ndarray]:
        """Small integers and halves: most arithmetic on them is exact. Scalars are indices."""
        rng = np.random.default_rng((self.seed, example))
        return [
            np.array(rng.integers(0, 6), dtype)
            if shape == ()
            else (rng.integers(-8, 9, shape) / (2 if dtype == "float32" else 1)).astype(dtype)
            for shape, dtype in self.types
        ]


### What the operations compute, in NumPy


def _get(static: Any, buffer: np.ndarray, *dynamic: np.ndarray) -> np.ndarray:
    index, mode, fill = static
    where = positions(buffer.shape, index, dynamic, mode)
    found = buffer.reshape(-1)[np.maximum(where, 0)]
    return np.where(where >= 0, found, np.array(fill or 0, buffer.dtype))


def _update(static: Any, buffer: np.ndarray, *operands: np.ndarray) -> np.ndarray:
    method, index, mode, constant = static
    value = operands[0] if constant is None else np.array(constant)
    dynamic = operands[1:] if constant is None else operands
    where = positions(buffer.shape, index, dynamic, mode)
    value = np.broadcast_to(value.astype(buffer.dtype), where.shape)[where >= 0]
    where = where[where >= 0]
    flat = buffer.reshape(-1).copy()
    if method == "set":
        flat[where] = value
    else:
        _COMBINED[method].at(flat, where, value)
    return flat.reshape(buffer.shape)


_COMBINED = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}


def _window(shape: Any, starts: Any, sizes: Any) -> tuple[slice, ...]:
    """What `dynamic_slice` takes: it moves a window that sticks out to where it fits."""
    places = [
        min(max(int(start), 0), limit - size)
        for start, limit, size in zip(starts, shape, sizes, strict=True)
    ]
    return tuple(slice(place, place + size) for place, size in zip(places, sizes, strict=True))


def _starts(static: Any, dynamic: Any) -> list[Any]:
    """The starts of a window; None stands for the next of the dynamic ones."""
    dynamic = iter(dynamic)
    return [next(dynamic) if start is None else start for start in static]


def _slide(static: Any, buffer: np.ndarray, block: np.ndarray, *dynamic: Any) -> np.ndarray:
    new = buffer.copy()
    new[_window(buffer.shape, _starts(static, dynamic), block.shape)] = block
    return new


def _floats(x: np.ndarray) -> bool:
    return x.dtype.kind == "f"


_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "{} * 0.5": lambda x: x * np.float32(0.5),
    "jnp.tanh({})": np.tanh,
    "{} // 2": lambda x: x // x.dtype.type(2),
    "{} ^ 3": lambda x: x ^ x.dtype.type(3),
    "-{}": np.negative,
    "jnp.maximum({}, 0)": lambda x: np.maximum(x, x.dtype.type(0)),
    "{} + 1": lambda x: x + x.dtype.type(1),
    "jnp.abs({})": np.abs,
}
_BINARY: dict[str, Callable[..., np.ndarray]] = {
    "{} + {}": np.add,
    "{} - {}": np.subtract,
    "jnp.minimum({}, {})": np.minimum,
    "jnp.maximum({}, {})": np.maximum,
    "{} * jnp.clip({}, -1, 1)": lambda a, b: a * np.clip(b, a.dtype.type(-1), a.dtype.type(1)),
}


def _cast(like: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x.astype(like.dtype)


def _outer(static: Any, x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = np.multiply.outer(_cast(x, a), _cast(x, b))
    return x - product * np.float32(0.125) if _floats(x) else x - product


### Operations: how each looks in JAX, and what it computes


def _render_get(static: Any, buffer: str, *dynamic: str) -> str:
    index, mode, fill = static
    text = render_index(index, dynamic)
    if mode is None:
        return f"{buffer}[{text}]"
    more = f", fill_value={fill!r}" if mode == "fill" else ""
    return f"{buffer}.at[{text}].get(mode={mode!r}{more})"


def _render_update(static: Any, buffer: str, *operands: str) -> str:
    method, index, mode, constant = static
    dynamic = operands[1:] if constant is None else operands
    value = f"{operands[0]}.astype({buffer}.dtype)" if constant is None else repr(constant)
    more = f", mode={mode!r}" if mode else ""
    return f"{buffer}.at[{render_index(index, dynamic)}].{method}({value}{more})"


def _tuple(parts: Any) -> str:
    return "(" + ", ".join(map(str, parts)) + ("," if len(parts) == 1 else "") + ")"


def _render_outer(static: Any, x: str, a: str, b: str) -> str:
    product = f"jnp.outer({a}.astype({x}.dtype), {b}.astype({x}.dtype))"
    return f"{x} - {product}{static[0]}"


@dataclasses.dataclass(frozen=True)
class Operation:
    """`render` gives its JAX text, `compute` its result: both of (static, *operands)."""

    render: Callable[..., str]
    compute: Callable[..., np.ndarray]


OPERATIONS = {
    "get": Operation(_render_get, _get),
    "update": Operation(_render_update, _update),
    "window": Operation(
        lambda s, x, *i: f"lax.dynamic_slice({x}, {_tuple(_starts(s[0], i))}, {s[1]})",
        lambda s, x, *i: x[_window(x.shape, _starts(s[0], i), s[1])].copy(),
    ),
    "slide": Operation(
        lambda s, x, block, *i: (
            f"lax.dynamic_update_slice({x}, {block}.astype({x}.dtype), {_tuple(_starts(s, i))})"
        ),
        _slide,
    ),
    "unary": Operation(lambda s, x: s[0].format(x), lambda s, x: _UNARY[s[0]](x)),
    "binary": Operation(
        lambda s, a, b: s[0].format(a, f"{b}.astype({a}.dtype)"),
        lambda s, a, b: _BINARY[s[0]](a, _cast(a, b)),
    ),
    "sum": Operation(
        lambda s, x: f"jnp.sum({x}, {s[0]}, dtype={x}.dtype)",
        lambda s, x: np.asarray(np.sum(x, s[0], dtype=x.dtype)),
    ),
    "largest": Operation(lambda s, x: f"jnp.max({x}, {s[0]})", lambda s, x: np.max(x, s[0])),
    "sort": Operation(lambda s, x: f"jnp.sort({x}, {s[0]})", lambda s, x: np.sort(x, s[0])),
    "cumsum": Operation(
        lambda s, x: f"jnp.cumsum({x}, {s[0]}, dtype={x}.dtype)",
        lambda s, x: np.cumsum(x, s[0], dtype=x.dtype),
    ),
    "product": Operation(
        lambda s, x, v: f"jnp.clip({x} @ {v}.astype({x}.dtype), -50, 50)",
        lambda s, x, v: np.clip(x @ _cast(x, v), -50, 50),
    ),
    "outer": Operation(_render_outer, _outer),
    "flip": Operation(lambda s, x: f"jnp.flip({x}, {s[0]})", lambda s, x: np.flip(x, s[0]).copy()),
    "roll": Operation(
        lambda s, x: f"jnp.roll({x}, {s[0]}, {s[1]})", lambda s, x: np.roll(x, s[0], s[1])
    ),
    "transpose": Operation(lambda s, x: f"{x}.T", lambda s, x: x.T.copy()),
    "reshape": Operation(lambda s, x: f"{x}.reshape({s[0]})", lambda s, x: x.reshape(s[0]).copy()),
    "where": Operation(
        lambda s, m, a, b: f"jnp.where({m} > {s[0]}, {a}, {b}.astype({a}.dtype))",
        lambda s, m, a, b: np.where(m > s[0], a, _cast(a, b)),
    ),
    "clear": Operation(
        lambda s, m, a: f"jnp.where({m} > {s[0]}, {s[1]}, {a})",
        lambda s, m, a: np.where(m > s[0], a.dtype.type(s[1]), a),
    ),
    "rows": Operation(
        lambda s, x, i: f"{x}[jnp.abs({i}) % {s[0]}]", lambda s, x, i: x[np.abs(i) % s[0]]
    ),
    "shifted": Operation(
        lambda s, i: f"({i} + {s[0]}) % {s[1]}", lambda s, i: ((i + s[0]) % s[1]).astype(i.dtype)
    ),
    "far": Operation(lambda s, i: f"{i} + {s[0]}", lambda s, i: i + i.dtype.type(s[0])),
    "new": Operation(
        lambda s: f"jnp.full({s[0]}, {s[2]}, jnp.{s[1]})", lambda s: np.full(s[0], s[2], s[1])
    ),
}


### Evaluation


def evaluate(block: Block, arguments: Any, around: dict[str, np.ndarray] | None = None) -> Any:
    """What the block returns, by NumPy; no write touches an array that exists already."""
    values = dict(around or {}) | dict(zip(block.parameters, arguments, strict=True))
    for step in block.steps:
        values |= zip(step.targets, evaluate_step(step, values), strict=True)
    return [values[name] for name in block.results]


def evaluate_step(step: Step, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    operands = [values[name] for name in step.operands]
    if step.operation in OPERATIONS:
        with np.errstate(over="ignore", invalid="ignore"):
            return [np.asarray(OPERATIONS[step.operation].compute(step.static, *operands))]
    match step.operation, step.static:
        case "for", (lower, upper):
            for i in range(lower, upper):
                operands = evaluate(step.blocks[0], [np.int32(i), *operands], values)
            return operands
        case "scan", (length, reverse):
            kept = []
            for i in range(length):
                i = length - 1 - i if reverse else i
                *operands, result = evaluate(step.blocks[0], [np.int32(i), *operands], values)
                kept.append(result)
            return [*operands, np.stack(kept[::-1] if reverse else kept)]
        case "while", (rounds,):
            limit, *carry = operands
            for i in range(int(limit) % rounds + 1):
                carry = evaluate(step.blocks[0], [np.int32(i), *carry], values)
            return carry
        case "switch", _:
            number, *operands = operands
            return evaluate(step.blocks[int(number) % len(step.blocks)], operands, values)
        case "jit", _:
            return evaluate(step.blocks[0], operands, values)
    raise AssertionError(step.operation)


### Source text


def function(program: Program, *, declared: bool = True) -> Any:
    """The JAX function that `source` is the text of, or the same without its declarations."""
    declare = before if declared else lambda *values: None
    scope = {"jax": jax, "jnp": jnp, "np": np, "lax": lax, "before": declare}
    exec(compile(source(program), "<fuzz>", "exec"), scope)
    return scope["f"]


def source(program: Program) -> str:
    """The program as a function `f`, to be pasted behind the usual imports."""
    block = program.block
    return "\n".join(_block("f", block.parameters, None, block, _tuple(block.results), 0))


def _block(
    name: str, parameters: Any, unpacked: Any, block: Block, results: str, depth: int
) -> list[str]:
    pad = "    " * (depth + 1)
    lines = [f"{'    ' * depth}def {name}({', '.join(parameters)}):"]
    if unpacked is not None:
        lines.append(f"{pad}{_tuple(unpacked)} = carry")
    for step in block.steps:
        lines += _step(step, depth + 1)
    lines += [f"{pad}before({', '.join(order)})" for order in block.orders]
    return [*lines, f"{pad}return {results}"]


def _step(step: Step, depth: int) -> list[str]:
    pad = "    " * depth
    targets = _tuple(step.targets)
    if step.operation in OPERATIONS:
        text = OPERATIONS[step.operation].render(step.static, *step.operands)
        return [f"{pad}{step.targets[0]} = {text}"]
    names = [f"{step.operation}_{step.targets[0]}_{i}" for i in range(len(step.blocks))]
    name, block = names[0], step.blocks[0]
    match step.operation, step.static:
        case "for", (lower, upper):
            i, *carry = block.parameters
            body = _block(name, [i, "carry"], carry, block, _tuple(block.results), depth)
            call = f"{targets} = lax.fori_loop({lower}, {upper}, {name}, {_tuple(step.operands)})"
        case "scan", (length, reverse):
            i, *carry = block.parameters
            results = f"{_tuple(block.results[:-1])}, {block.results[-1]}"
            body = _block(name, ["carry", i], carry, block, results, depth)
            call = (
                f"{_tuple(step.targets[:-1])}, {step.targets[-1]} = lax.scan({name},"
                f" {_tuple(step.operands)}, jnp.arange({length}), reverse={reverse})"
            )
        case "while", (rounds,):
            i = block.parameters[0]
            results = _tuple([f"{i} + 1", *block.results])
            body = _block(name, ["carry"], block.parameters, block, results, depth)
            limit, *carry = step.operands
            call = (
                f"{_tuple(['_', *step.targets])} = lax.while_loop(lambda carry: carry[0] <="
                f" {limit} % {rounds}, {name}, {_tuple(['jnp.int32(0)', *carry])})"
            )
        case "switch", _:
            body = [
                line
                for name, block in zip(names, step.blocks, strict=True)
                for line in _block(
                    name, block.parameters, None, block, _tuple(block.results), depth
                )
            ]
            number, *operands = step.operands
            branches = f"{number} % {len(names)}, [{', '.join(names)}]"
            if len(names) == 2:
                branches = f"{number} % 2 == 1, {names[1]}, {names[0]}"
            call = (
                f"{targets} = lax.{'cond' if len(names) == 2 else 'switch'}({branches},"
                f" {', '.join(operands)})"
            )
        case _:
            body = _block(name, block.parameters, None, block, _tuple(block.results), depth)
            call = f"{targets} = jax.jit({name})({', '.join(step.operands)})"
    return [*body, pad + call]


LOOPS = ("for", "scan", "while")
BLOCKS = (*LOOPS, "switch", "jit")
