"""Random programs. Whatever offers `random.Random`'s methods can choose: a seed, or Hypothesis."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.fuzz._index import positions
from tests.fuzz._program import BLOCKS, LOOPS, Block, Program, Step, evaluate_step

__all__ = ["Generator", "forbid"]

_SHAPES = [(10, 12), (10, 12), (10, 12), (12, 10), (12,), (40,), (3, 8, 9)]
_DTYPES = ["float32", "float32", "float32", "int32", "int16"]
_INDEX = "int32"


class _Scope:
    """A block while it grows: all values by name, with an example of each."""

    def __init__(self, outer: "_Scope | None" = None):
        self.values: dict[str, np.ndarray] = dict(outer.values) if outer else {}
        # Scalars that are valid as an index, and the numbers that they stay below.
        self.bounds: dict[str, int] = dict(outer.bounds) if outer else {}
        self.steps: list[Step] = []
        # The step of this block that computes a value, where one equation is sure to do so.
        self.computed: dict[str, int] = {}
        # Values that depend on no argument: no order has a meaning for them.
        self.constant: set[str] = set()


class Generator:
    """Makes programs of about `size` steps."""

    def __init__(self, rng: random.Random, size: int = 7, depth: int = 2, *, orders: bool = True):
        self._rng = rng
        self._size = size
        self._depth = depth
        self._with_orders = orders
        self._names = itertools.count()

    def program(self) -> Program:
        rng = self._rng
        scope = _Scope()
        types = [self._type() for _ in range(rng.randint(1, 3))]
        types += [((), _INDEX)] * rng.randint(1, 2)
        program = Program(Block((), (), ()), tuple(types), seed=rng.randint(0, 1 << 30))
        parameters = tuple(f"{'x' if shape else 'k'}{i}" for i, (shape, _) in enumerate(types))
        for name, value in zip(parameters, program.arguments(), strict=True):
            scope.values[name] = value
            if value.ndim == 0:
                scope.bounds[name] = 6
        self._grow(scope, rng.randint(2, self._size), self._depth)
        names = self._results(scope)
        block = self._finish(scope, parameters, names)
        donated = tuple(i for i in range(len(types)) if rng.random() < 0.7 and types[i][0])
        return Program(block, tuple(types), donated, program.seed)

    def _type(self) -> tuple[tuple[int, ...], str]:
        return self._rng.choice(_SHAPES), self._rng.choice(_DTYPES)

    def _results(self, scope: _Scope) -> tuple[str, ...]:
        """Mostly late values, now and then an early one or an argument."""
        late = list(scope.values)[-6:]
        names = [name for name in late if self._rng.random() < 0.5]
        if self._rng.random() < 0.3:
            names.append(self._rng.choice(list(scope.values)))
        self._rng.shuffle(names)
        return tuple(dict.fromkeys(names)) or (late[-1],)

    def _finish(self, scope: _Scope, parameters: Any, results: Any) -> Block:
        declared = self._with_orders and self._rng.random() < 0.35
        chosen = self._orders(scope) if declared else ()
        return Block(tuple(parameters), tuple(scope.steps), tuple(results), chosen)

    def _orders(self, scope: _Scope) -> tuple[tuple[str, ...], ...]:
        """Declarations that some order of the steps fulfils: a random one that the data allow."""
        rank = {number: i for i, number in enumerate(self._extension(scope))}
        names = list(scope.computed)
        found = []
        for _ in range(self._rng.randint(1, 3)):
            some = self._rng.choices(names, k=self._rng.randint(2, 3)) if names else []
            picked = list({scope.computed[name]: name for name in some}.values())
            picked.sort(key=lambda name: rank[scope.computed[name]])
            if len(picked) > 1:
                found.append(tuple(picked))
        return tuple(found)

    def _extension(self, scope: _Scope) -> list[int]:
        made = {name: i for i, step in enumerate(scope.steps) for name in step.targets}
        needed = [uses(step) & made.keys() for step in scope.steps]
        waits = {i: {made[name] for name in names} for i, names in enumerate(needed)}
        order: list[int] = []
        while len(order) < len(scope.steps):
            ready = [i for i in waits if i not in order and waits[i] <= set(order)]
            order.append(ready[0] if self._rng.random() < 0.5 else self._rng.choice(ready))
        return order

    ### Steps

    def _grow(self, scope: _Scope, size: int, depth: int) -> None:
        kinds: list[tuple[Callable[..., Any], float]] = [
            (self._update, 5),
            (self._read, 3),
            (self._slide, 2),
            (self._reduce, 2),
            (self._arithmetic, 3),
            (self._rearrange, 1),
            (self._swap, 1),
            (self._where, 1),
            (self._new, 0.3),
        ]
        choices = [kind for kind, _ in kinds]
        weights = [weight for _, weight in kinds]
        for _ in range(size):
            if depth and self._rng.random() < 0.2:
                self._nested(scope, depth - 1)
            else:
                self._rng.choices(choices, weights)[0](scope)

    def _name(self, prefix: str) -> str:
        return f"{prefix}{next(self._names)}"

    def _add(
        self,
        scope: _Scope,
        operation: str,
        operands: Any,
        static: Any = (),
        blocks: tuple[Block, ...] = (),
        targets: tuple[str, ...] = (),
    ) -> str:
        targets = targets or (self._name("v"),)
        step = Step(targets, operation, tuple(operands), tuple(static), blocks)
        scope.values |= zip(targets, evaluate_step(step, scope.values), strict=True)
        scope.steps.append(step)
        if operation not in BLOCKS and scope.constant.issuperset(operands):
            scope.constant |= {*targets}
            return targets[0]
        sizes = [scope.values[name].size for name in (targets[0], *operands[:1])]
        is_view = operation == "reshape" or (operation == "get" and sizes[0] == sizes[1])
        if operation not in BLOCKS and not is_view:
            scope.computed[targets[0]] = len(scope.steps) - 1
        return targets[0]

    def _pick(self, scope: _Scope, fits: Callable[[np.ndarray], Any]) -> str | None:
        """Some value that fits, more often a late one."""
        names = [name for name, value in scope.values.items() if fits(value)]
        if not names:
            return None
        if self._rng.random() < 0.5:
            names = names[-3:]
        return self._rng.choice(names)

    def _buffer(self, scope: _Scope) -> str:
        name = self._pick(scope, lambda v: v.nbytes > 64)
        if name is None:
            shape, dtype = self._type()
            name = self._add(scope, "new", (), (shape, dtype, 1))
        return name

    def _like(self, scope: _Scope, shape: tuple[int, ...], dtype: Any) -> str | None:
        """A value that can be broadcast to `shape` and converted to `dtype` without a loss."""
        return self._pick(
            scope,
            lambda v: (
                (v.shape == shape or v.shape == () or (v.ndim and v.shape == shape[-v.ndim :]))
                and (v.dtype.kind == dtype.kind or dtype.kind == "f")
            ),
        )

    def _scalar(self, scope: _Scope, size: int) -> str:
        """A scalar that is a valid index into `size` places."""
        names = [name for name, bound in scope.bounds.items() if bound <= size]
        if not names or self._rng.random() < 0.2:
            some = self._rng.choice(list(scope.bounds))
            name = self._add(scope, "shifted", [some], [self._rng.randint(0, 9), size])
            scope.bounds[name] = size
            return name
        return self._rng.choice(names)

    def _index(self, scope: _Scope, shape: Any, mode: Any) -> tuple[Any, list[str]]:
        """An index, and the operands for its dynamic entries; inside, unless `mode` says what
        happens to the rest."""
        rng = self._rng
        entries: list[Any] = []
        dynamic: list[str] = []
        special = rng.randrange(len(shape))
        arrays = 0
        for axis, size in enumerate(shape):
            kind = "slice"
            if axis == special or rng.random() < 0.2:
                kind = rng.choice(["at", "slice", "slice", "array", "mask", "dynamic", "dynamic"])
            outside = mode in ("drop", "clip", "fill") and rng.random() < 0.5
            if (kind in ("array", "mask") and arrays) or size < 3:
                kind = "at" if axis == special else "slice"
            if kind == "slice" and axis == special:
                start = rng.randint(0, size - 2)
                stop = rng.randint(start + 1, size - (start == 0))
                step = rng.choice([None, None, None, 2])
                entries.append(("slice", start or None, stop if stop < size else None, step))
            elif kind == "slice":
                entries.append(("slice", None, None))
            elif kind == "at":
                entries.append(("at", rng.randint(-size, size - 1)))
            elif kind == "array":
                arrays += 1
                low, high = (-2 * size, 2 * size) if outside else (-size, size - 1)
                entries.append(
                    ("array", tuple(rng.randint(low, high) for _ in range(rng.randint(1, 4))))
                )
            elif kind == "mask":
                arrays += 1
                sure = rng.randrange(size)
                mask = tuple(rng.random() < 0.4 or place == sure for place in range(size))
                entries.append(("mask", mask))
            else:
                entries.append(("dynamic",))
                name = self._scalar(scope, size)
                if outside:
                    name = self._add(scope, "far", [name], [rng.choice([-30, -size, size, 7])])
                dynamic.append(name)
        return tuple(entries), dynamic

    def _read(self, scope: _Scope) -> str:
        rng = self._rng
        buffer = self._buffer(scope)
        x = scope.values[buffer]
        kind = rng.random()
        if kind < 0.2:
            sizes = tuple(rng.randint(1, max(1, size // 2)) for size in x.shape)
            starts, dynamic = self._window_starts(scope, x.shape)
            return self._add(scope, "window", [buffer, *dynamic], [starts, sizes])
        if kind < 0.3:
            vector = self._pick(scope, lambda v: v.ndim == 1 and v.dtype == _INDEX and v.size <= 12)
            if vector is not None:
                return self._add(scope, "rows", [buffer, vector], [x.shape[0]])
        mode = rng.choice([None, None, "clip", "fill"])
        index, dynamic = self._index(scope, x.shape, mode)
        return self._add(scope, "get", [buffer, *dynamic], [index, mode, rng.choice([0, 1, -2])])

    def _window_starts(self, scope: _Scope, shape: Any) -> tuple[tuple[Any, ...], list[str]]:
        starts: list[Any] = []
        dynamic: list[str] = []
        for size in shape:
            if self._rng.random() < 0.4:
                dynamic.append(self._scalar(scope, size))
                starts.append(None)
            else:
                starts.append(self._rng.choice([0, 0, self._rng.randint(0, size)]))
        return tuple(starts), dynamic

    def _constant(self, dtype: Any) -> Any:
        return self._rng.choice([0.5, -1.0, 2.0, 0.0] if dtype.kind == "f" else [0, 1, -1, 3])

    def _update(self, scope: _Scope) -> str:
        rng = self._rng
        buffer = self._buffer(scope)
        x = scope.values[buffer]
        mode = rng.choice([None, None, None, "drop", "clip", "promise_in_bounds"])
        index, dynamic = self._index(scope, x.shape, mode)
        method = rng.choice(["set", "set", "set", "add", "add", "multiply", "min", "max"])
        shape = positions(x.shape, index, [scope.values[n] for n in dynamic], mode).shape
        if method == "set" and _repeats(x.shape, index, mode):
            method = "add"  # which of several writes to one place wins is not defined
        kind = rng.random()
        value = None
        if method == "multiply" or kind < 0.3:
            pass
        elif kind < 0.65:
            other = self._shifted(index, x.shape)
            if other is not None:
                value = self._add(scope, "get", [buffer, *dynamic], [other, mode_for_get(mode), 0])
                if rng.random() < 0.3:
                    value = self._apply(scope, value)
                if scope.values[value].shape != shape:
                    value = None
        else:
            value = self._like(scope, shape, x.dtype)
        constant = self._constant(x.dtype) if value is None else None
        operands = [buffer, *([value] if value is not None else []), *dynamic]
        return self._add(scope, "update", operands, [method, index, mode, constant])

    def _shifted(self, index: Any, shape: Any) -> Any:
        """An index of the same form near by, as in x.at[1:].set(x[:-1])."""
        entries = []
        for size, (kind, *numbers) in zip(shape, index, strict=True):
            if kind == "slice" and numbers[:2] != [None, None]:
                start, stop, step = slice(*numbers).indices(size)
                by = self._rng.choice([-2, -1, 1, 2])
                if start + by < 0 or stop + by > size:
                    by = -by
                if start + by < 0 or stop + by > size:
                    return None
                entries.append(("slice", start + by, stop + by, step))
            elif kind == "at":
                entries.append(("at", self._rng.randint(-size, size - 1)))
            elif kind == "array":
                entries.append(("array", tuple(self._rng.sample(numbers[0], len(numbers[0])))))
            else:
                entries.append((kind, *numbers))
        return tuple(entries)

    def _slide(self, scope: _Scope) -> str:
        rng = self._rng
        buffer = self._buffer(scope)
        x = scope.values[buffer]
        block = self._pick(
            scope,
            lambda v: (
                v.ndim == x.ndim
                and v.shape != x.shape
                and all(a <= b for a, b in zip(v.shape, x.shape, strict=True))
                and (v.dtype.kind == x.dtype.kind or x.dtype.kind == "f")
            ),
        )
        starts, dynamic = self._window_starts(scope, x.shape)
        if block is None or rng.random() < 0.5:
            sizes = tuple(rng.randint(1, max(1, size // 2)) for size in x.shape)
            if rng.random() < 0.5:  # the same window, or another one
                block = self._add(scope, "window", [buffer, *dynamic], [starts, sizes])
            else:
                other, more = self._window_starts(scope, x.shape)
                block = self._add(scope, "window", [buffer, *more], [other, sizes])
            if rng.random() < 0.6:
                block = self._apply(scope, block)
        return self._add(scope, "slide", [buffer, block, *dynamic], starts)

    def _apply(self, scope: _Scope, name: str) -> str:
        unary = ["-{}", "jnp.maximum({}, 0)", "{} + 1", "jnp.abs({})"]
        if scope.values[name].dtype.kind == "f":
            unary += ["{} * 0.5", "jnp.tanh({})"]
        else:
            unary += ["{} // 2", "{} ^ 3"]
        return self._add(scope, "unary", [name], [self._rng.choice(unary)])

    def _arithmetic(self, scope: _Scope) -> str:
        rng = self._rng
        a = self._pick(scope, lambda v: v.ndim > 0) or self._buffer(scope)
        x = scope.values[a]
        b = self._like(scope, x.shape, x.dtype)
        if x.ndim == 2 and rng.random() < 0.25:
            column = self._pick(scope, lambda v: v.shape == x.shape[:1] and _casts(v, x))
            row = self._pick(scope, lambda v: v.shape == x.shape[1:] and _casts(v, x))
            if column is None:
                index = (("slice", None, None), ("at", rng.randrange(x.shape[1])))
                column = self._add(scope, "get", [a], [index, None, 0])
            if row is None:
                index = (("at", rng.randrange(x.shape[0])), ("slice", None, None))
                row = self._add(scope, "get", [a], [index, None, 0])
            scale = " * 0.125" if x.dtype.kind == "f" else ""
            return self._add(scope, "outer", [a, column, row], [scale])
        if b is None or b == a or rng.random() < 0.4:
            return self._apply(scope, a)
        binary = ["{} + {}", "{} - {}", "jnp.minimum({}, {})", "jnp.maximum({}, {})"]
        binary.append("{} * jnp.clip({}, -1, 1)")
        return self._add(scope, "binary", [a, b], [rng.choice(binary)])

    def _reduce(self, scope: _Scope) -> str:
        rng = self._rng
        name = self._buffer(scope)
        x = scope.values[name]
        axis = rng.randrange(x.ndim)
        kind = rng.choice(["sum", "sum", "largest", "sort", "cumsum", "product"])
        if kind == "product":
            fits = lambda v: v.shape == x.shape[-1:] and _casts(v, x)
            vector = self._pick(scope, fits)
            if vector is None or x.dtype == np.int16:
                kind = "sum"
            else:
                return self._add(scope, "product", [name, vector])
        return self._add(scope, kind, [name], [axis])

    def _rearrange(self, scope: _Scope) -> str:
        rng = self._rng
        name = self._buffer(scope)
        x = scope.values[name]
        axis = rng.randrange(x.ndim)
        match rng.choice(["flip", "roll", "transpose", "reshape"]):
            case "flip":
                return self._add(scope, "flip", [name], [axis])
            case "roll":
                return self._add(scope, "roll", [name], [rng.choice([-1, 1, 2]), axis])
            case "transpose" if x.ndim > 1:
                return self._add(scope, "transpose", [name])
        shape = rng.choice([(x.size,), (x.shape[0], x.size // x.shape[0]), (1, x.size)])
        return self._add(scope, "reshape", [name], [shape])

    def _swap(self, scope: _Scope) -> str:
        """Two rows change places; both are read first, or one of them late."""
        rng = self._rng
        name = self._buffer(scope)
        size = scope.values[name].shape[0]
        rest = [("slice", None, None)] * (scope.values[name].ndim - 1)
        entries, dynamic = [], []
        for _ in range(2):
            if rng.random() < 0.5:
                entries.append((("dynamic",), *rest))
                dynamic.append([self._scalar(scope, size)])
            else:
                entries.append((("at", rng.randrange(size)), *rest))
                dynamic.append([])
        (i, j), (di, dj) = entries, dynamic
        a = self._add(scope, "get", [name, *di], [i, None, 0])
        b = self._add(scope, "get", [name, *dj], [j, None, 0])
        name = self._add(scope, "update", [name, b, *di], ["set", i, None, None])
        return self._add(scope, "update", [name, a, *dj], ["set", j, None, None])

    def _where(self, scope: _Scope) -> str:
        rng = self._rng
        a = self._buffer(scope)
        x = scope.values[a]
        mask = self._pick(scope, lambda v: v.shape == x.shape and v.dtype.kind == "i")
        b = self._like(scope, x.shape, x.dtype)
        if mask is None or b is None:
            return self._update(scope)
        limit = rng.randint(-3, 4)
        if rng.random() < 0.5:
            return self._add(scope, "where", [mask, a, b], [limit])
        return self._add(scope, "clear", [mask, a], [limit, self._constant(x.dtype)])

    def _new(self, scope: _Scope) -> str:
        shape, dtype = self._type()
        return self._add(scope, "new", (), (shape, dtype, self._rng.randint(0, 2)))

    ### Loops, branches and jitted functions

    def _nested(self, scope: _Scope, depth: int) -> None:
        rng = self._rng
        kind = rng.choice(["for", "for", "scan", "while", "switch", "jit"])
        operands = list(dict.fromkeys(self._buffer(scope) for _ in range(rng.randint(1, 3))))
        if rng.random() < 0.4 and (more := self._pick(scope, lambda v: v.nbytes <= 64)):
            operands.append(more)
        operands = list(dict.fromkeys(operands))
        blocks, bodies = [], []
        for _ in range(rng.randint(2, 3) if kind == "switch" else 1):
            block, body = self._body(scope, kind, operands, depth)
            blocks.append(block)
            bodies.append(body)
        static: tuple[Any, ...] = ()
        first: list[str] = []
        number = len(blocks[0].results)
        if kind == "for":
            static = (rng.randint(0, 1), rng.randint(2, 5))
        elif kind == "scan":
            static = (rng.randint(1, 5), rng.random() < 0.2)
        elif kind == "while":
            static = (rng.randint(1, 4),)
            first = [self._scalar(scope, 12)]
        elif kind == "switch":
            first = [self._scalar(scope, 12)]
        targets = tuple(self._name("w") for _ in range(number))
        self._add(scope, kind, [*first, *operands], static, blocks=tuple(blocks), targets=targets)
        for i, name in enumerate(targets):
            results = [block.results[i] for block in blocks]
            # JAX passes a value on around the equation where no body changes it.
            if all(own in body.computed for own, body in zip(results, bodies, strict=True)):
                scope.computed[name] = len(scope.steps) - 1
            if all(own in body.constant for own, body in zip(results, bodies, strict=True)):
                scope.constant.add(name)

    def _body(
        self, outer: _Scope, kind: str, operands: Sequence[str], depth: int
    ) -> tuple[Block, _Scope]:
        rng = self._rng
        examples = [outer.values[name] for name in operands]
        scope = _Scope(outer)
        parameters = [self._name("p") for _ in examples]
        i = self._name("i")
        if kind in LOOPS:
            scope.values[i] = np.array(0, _INDEX)
            scope.bounds[i] = 5
        # JAX inlines a function and takes what is passed through out of loops and branches.
        pairs = zip(parameters, operands, strict=True)
        scope.constant |= {p for p, a in pairs if a in outer.constant}
        if kind == "jit":
            scope.constant |= outer.constant
        scope.values |= zip(parameters, examples, strict=True)
        self._grow(scope, rng.randint(1, max(1, self._size // 2)), depth)
        own = [name for step in scope.steps for name in step.targets]
        if kind == "jit":
            some = [name for name in own[-4:] if rng.random() < 0.6] or own[-1:] or parameters
            results = list(dict.fromkeys(some))
        else:
            results = [
                self._match(scope, p, own, example)
                for p, example in zip(parameters, examples, strict=True)
            ]
        if kind == "scan":
            results.append(rng.choice(own or parameters))
        header = [i, *parameters] if kind in LOOPS else parameters
        return self._finish(scope, header, results), scope

    def _match(self, scope: _Scope, parameter: str, own: list[str], like: np.ndarray) -> str:
        """What the carried value becomes: mostly the last value of its type, or another one."""
        fits = [
            name
            for name in own
            if scope.values[name].shape == like.shape and scope.values[name].dtype == like.dtype
        ]
        if not fits or self._rng.random() < 0.1:
            return parameter
        return fits[-1] if self._rng.random() < 0.7 else self._rng.choice(fits)


def mode_for_get(mode: str | None) -> str | None:
    return {"drop": "fill", "clip": "clip"}.get(mode or "")


def _casts(value: np.ndarray, like: np.ndarray) -> bool:
    return value.dtype.kind == like.dtype.kind or like.dtype.kind == "f"


def _repeats(shape: Any, index: Any, mode: Any) -> bool:
    """Whether an index array names one place twice."""
    for size, (kind, *numbers) in zip(shape, index, strict=True):
        if kind == "array":
            places = [n + size if n < 0 else n for n in numbers[0]]
            if mode == "clip":
                places = [min(max(n, 0), size - 1) for n in places]
            return len(set(places)) < len(places)
    return False


def uses(step: Step) -> set[str]:
    """The names from around a step that it needs."""
    needed = set(step.operands)
    for block in step.blocks:
        inner = {name for each in block.steps for name in uses(each)}
        inner |= {*block.results, *itertools.chain(*block.orders)}
        made = {name for each in block.steps for name in each.targets}
        needed |= inner - made - {*block.parameters}
    return needed


### Declarations that cannot mean anything


def forbid(rng: random.Random, program: Program) -> tuple[Program, str] | None:
    """The program with one illegal declaration more and what is wrong with it; None: no place."""
    block = program.block
    made = {name: i for i, step in enumerate(block.steps) for name in step.targets}
    sure = [step for step in block.steps if step.operation not in ("reshape", "new", *BLOCKS)]
    if not sure:
        return None
    kinds: list[tuple[str, tuple[tuple[str, ...], ...]]] = []
    some = rng.choice(sure).targets[0]
    kinds.append(("argument", ((rng.choice(block.parameters), some),)))
    kinds.append(("argument", ((some, rng.choice(block.parameters)),)))
    kinds.append(("cycle", ((some, some),)))
    other = rng.choice(sure).targets[0]
    if made[other] != made[some]:
        kinds.append(("cycle", ((some, other), (other, some))))
        third = rng.choice(sure).targets[0]
        if made[third] not in (made[other], made[some]):
            kinds.append(("cycle", ((some, other), (other, third), (third, some))))
    for step in sure:
        direct = [name for name in step.operands if any(name == s.targets[0] for s in sure)]
        if direct:
            kinds.append(("cycle", ((step.targets[0], rng.choice(direct)),)))
    kind, orders = rng.choice(kinds)
    changed = Block(block.parameters, block.steps, block.results, (*block.orders, *orders))
    return Program(changed, program.types, program.donated, program.seed), kind
