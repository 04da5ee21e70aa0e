"""What has to hold for a program once XLA has compiled it."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched import explain, scheduled
from jaxsched._before import collecting, marker_p
from jaxsched._hlo._copies import copies
from jaxsched._hlo._text import parse
from jaxsched._jax import Jaxpr, Literal
from jaxsched._options import Options
from jaxsched._plan import plan
from jaxsched._report import Report
from jaxsched._verdicts import Verdict
from tests.fuzz._check import Failure, compare, declared, scopes, trace
from tests.fuzz._generate import uses
from tests.fuzz._inline import inlined
from tests.fuzz._primitives import VIEWS
from tests.fuzz._program import LOOPS, Block, Program, Step, evaluate, function

__all__ = [
    "check_batched",
    "check_compiled",
    "check_copies",
    "check_eager",
    "check_eager_order",
    "check_gradient",
    "compiled",
    "explained",
]

# Copies of rows and counters are no concern: the buffers of the programs are all larger than this.
_BUFFER = 100
_REGIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}


def compiled(fun: Any, program: Program, **options: bool) -> Any:
    with _donating():
        return _jitted(fun, program).lower(*program.arguments()).compile(options)


def explained(program: Program) -> Report:
    with _donating():
        return explain(_jitted(scheduled(function(program)), program))(*program.arguments())


def _jitted(fun: Any, program: Program) -> Any:
    return jax.jit(fun, donate_argnums=program.donated, keep_unused=True)


@contextlib.contextmanager
def _donating() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        yield


def check_compiled(program: Program, *, strict: bool = False) -> None:
    """Right results, arguments left alone unless donated, and declared orders held.

    A `strict` check is more than what is promised of each program: that inferred orders are held
    too, and that it copies no more bytes than plain jit without its declarations, with XLA's
    region analysis for in-place updates or without it.
    """
    wanted = evaluate(program.block, program.arguments())
    made = compiled(scheduled(function(program)), program)
    arguments = [jnp.array(each) for each in program.arguments()]
    compare("compiled", made(*arguments), wanted)
    for i, given in enumerate(program.arguments()):
        if i not in program.donated and not np.array_equal(arguments[i], given):
            raise Failure("argument changed", f"argument {i} was not donated")
    if strict or _can_be_told(program):
        _check_orders_held(explained(program), inferred=strict)
    if strict:
        least = min(_copied_by_plain_jit(program), _copied_by_plain_jit(program, **_REGIONS))
        _check_no_more(_copied(made), least)


def check_copies(program: Program) -> bool:
    """No more bytes copied than by plain jit, where no declaration asks for an order; whether the
    two can be compared.

    They cannot where XLA does away with a part of the program, and so with copies: what a pin is in
    front of, it leaves as it is. Every array is donated, and each has a size of its own: XLA may
    give the memory of another one of that size to an update, and then copies once more where the
    update waits for a read; and the copy that it has to update where the array is to be kept, it
    may fuse into all that reads it.
    """
    steps = list(_steps(program.block))
    if any(_is_dissolved(step) or _is_merged(step) or _ignores_carry(step) for step in steps):
        return False
    if any(_fills_for_many(block) for block in _blocks(program.block)):
        return False
    sizes = [each.nbytes for each in program.arguments()]
    donated = tuple(i for i, size in enumerate(sizes) if sizes.count(size) == 1)
    if any(size > _BUFFER for i, size in enumerate(sizes) if i not in donated):
        return False
    program = dataclasses.replace(program, donated=donated)
    made = compiled(scheduled(function(program, declared=False)), program)
    _check_no_more(_copied(made), _copied_by_plain_jit(program))
    return True


def _is_dissolved(step: Step) -> bool:
    """Whether it is a loop of one round."""
    match step.operation, step.static:
        case "for", (lower, upper):
            return upper - lower < 2
        case (("scan" | "while"), (rounds, *_)):
            return rounds < 2
    return False


def _is_merged(step: Step) -> bool:
    """Whether a loop or branch takes or returns something twice, in which case XLA makes one of it.

    A branch takes what it refers to; and so does a loop, which returns the same one unchanged.
    """
    if step.operation not in (*LOOPS, "switch"):
        return False
    names = [step.operands, *(block.results for block in step.blocks)]
    inside = {name for block in step.blocks for each in block.steps for name in uses(each)}
    kept = {*step.operands}
    if step.operation != "switch":
        (body,) = step.blocks
        carried = body.parameters[1:]
        passed = zip(step.operands[-len(carried) :], carried, body.results, strict=False)
        kept = {operand for operand, before, after in passed if before == after}
    return any(len({*each}) < len(each) for each in names) or not inside.isdisjoint(kept)


def _ignores_carry(step: Step) -> bool:
    """Whether a loop carries something that is of no use to it, but is returned unchanged."""
    if step.operation not in LOOPS:
        return False
    (body,) = step.blocks
    carried = body.parameters[1:]
    needed = {*body.results[len(carried) :]}
    needed |= {
        after for before, after in zip(carried, body.results, strict=False) if before != after
    }
    for each in reversed(body.steps):
        if not needed.isdisjoint(each.targets):
            needed |= uses(each)
    return not needed.issuperset(carried)


def _fills_for_many(block: Block) -> bool:
    """Whether an array of one number has several uses. XLA makes one for each, or none: a part of
    it is known, and writing that number into it does nothing."""
    named = [*block.results, *(name for step in block.steps for name in uses(step))]
    filled = (step.targets for step in block.steps if step.operation == "new")
    return any(named.count(name) > 1 for (name,) in filled)


def _steps(block: Block) -> Iterator[Step]:
    return (step for each in _blocks(block) for step in each.steps)


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for step in block.steps:
        for inner in step.blocks:
            yield from _blocks(inner)


def _copied(made: Any) -> int:
    """The bytes copied from one place to another of the same layout. A change of the layout is a
    copy of its own where a pin is in front, and else a part of some kernel."""
    return sum(
        copy.nbytes
        for copy in copies(parse(made.as_text()), _BUFFER)
        if copy.instruction.shape == copy.computation[copy.instruction.operands[0]].shape
    )


def _can_be_told(program: Program) -> bool:
    """Whether the program declares orders, and the module says what became of them.

    XLA merges what is computed twice from the same operands. One instruction is then two equations,
    of which one may run at any time. And it drops from a pin what a loop carries and never reads.
    """
    if any(_is_dissolved(step) or _ignores_carry(step) for step in _steps(program.block)):
        return False
    declared: set[int] = set()
    merged: set[int] = set()
    numbers: dict[Any, int] = collections.defaultdict(itertools.count().__next__)
    for scope in scopes(inlined(trace(program))):
        known: dict[Any, list[int]] = {}
        for eqn in scope.eqns:
            operands = [
                (str(v.val), v.aval) if isinstance(v, Literal) else numbers[v] for v in eqn.invars
            ]
            if eqn.primitive is marker_p:
                declared.update(operand for operand in operands if isinstance(operand, int))
                continue
            key = eqn.primitive, str(eqn.params), *operands
            if key in known:
                numbers |= zip(eqn.outvars, known[key], strict=True)
                merged.update(known[key])
            else:
                known[key] = [numbers[v] for v in eqn.outvars]
    return bool(declared) and declared.isdisjoint(merged)


def _check_no_more(copied: int, least: int) -> None:
    if copied > least:
        raise Failure("more copies", f"{copied} bytes, {least} under plain jit")


def _check_orders_held(report: Report, *, inferred: bool) -> None:
    copied_for = {copy.write for copy in report.copies if copy.cause != "not-donated"}
    for edge in report.edges:
        if edge.first is None or edge.then is None:
            continue  # of a function that JAX traces once for all calls: which one is not known
        told = f"{edge.kind}: {edge.first} before {edge.then}"
        if edge.verdict is Verdict.LOST and (inferred or edge.kind == "declared"):
            raise Failure(f"{edge.kind} order is lost in the module", told)
        # Within a kernel the order may be right; a copy for the write says that it is not.
        if edge.verdict is Verdict.KERNEL and inferred and edge.then in copied_for:
            raise Failure("read and write in one kernel, and a copy", told)


@functools.lru_cache(maxsize=2)  # one program may be checked with many plans
def _copied_by_plain_jit(program: Program, **options: bool) -> int:
    return _copied(compiled(function(program, declared=False), program, **options))


def check_eager(program: Program) -> None:
    """Right results one equation at a time, in the declared order."""
    check_eager_order(function(program), program.arguments())
    given = scheduled(function(program))(*map(jnp.array, program.arguments()))
    compare("eager", given, evaluate(program.block, program.arguments()))


def check_eager_order(fun: Any, arguments: Any) -> None:
    """In the plan of eager code the equations stand in the declared order."""
    with collecting():
        jaxpr = jax.make_jaxpr(fun)(*arguments)
    planned = plan(jaxpr, Options(), compiled=False)
    orders, _ = declared(jaxpr, planned)
    place = {v: i for i, eqn in enumerate(planned.eqns) for v in eqn.outvars}
    for later in orders.keys() & place.keys():
        for earlier in place.keys() & {*orders[later]}:
            if not place[_viewed(planned, earlier)] < place[_viewed(planned, later)]:
                raise Failure("declared order is lost in eager code", f"{earlier}, {later}")


def _viewed(jaxpr: Jaxpr, value: Any) -> Any:
    """What a value is a view of: that is where its computation is done."""
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while producer[value].primitive.name in VIEWS and producer[value].invars[0] in producer:
        value = producer[value].invars[0]
    return value


def check_batched(program: Program) -> None:
    """The same results under `vmap`."""
    examples = [program.arguments(example) for example in range(2)]
    wanted = [evaluate(program.block, each) for each in examples]
    stacked = [np.stack(each) for each in zip(*examples, strict=True)]
    given = jax.jit(jax.vmap(scheduled(function(program))))(*stacked)
    compare("vmap", given, [np.stack(each) for each in zip(*wanted, strict=True)])


def check_gradient(program: Program) -> bool:
    """The same gradient as the plain function, where that has one; whether it has."""
    floats = tuple(i for i, (shape, dtype) in enumerate(program.types) if dtype == "float32")
    if not floats or any(step.operation == "while" for step in _steps(program.block)):
        return False

    def gradient(fun: Any) -> Any:
        def loss(*arguments: Any) -> Any:
            results = [r for r in fun(*arguments) if r.dtype == jnp.float32]
            return sum((jnp.sum(r * r) for r in results), jnp.float32(0))

        return jax.jit(jax.grad(loss, floats))

    arguments = program.arguments()
    try:
        wanted = gradient(function(program, declared=False))(*arguments)
    except NotImplementedError:  # of a scatter that multiplies
        return False
    given = gradient(scheduled(function(program)))(*arguments)
    compare("gradient", given, list(map(np.asarray, wanted)))
    return True
