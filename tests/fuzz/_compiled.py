"""What has to hold for a program once XLA has compiled it."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched import explain, scheduled
from jaxsched._hlo._copies import copies
from jaxsched._hlo._text import parse
from jaxsched._jax import Jaxpr
from jaxsched._options import Options
from jaxsched._plan import plan
from jaxsched._report import Report
from jaxsched._verdicts import Verdict
from tests.fuzz._check import Failure, compare, declared, trace
from tests.fuzz._comparable import BUFFER, steps, tells_of_copies, tells_of_orders
from tests.fuzz._primitives import VIEWS
from tests.fuzz._program import Program, evaluate, function

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
    if strict or tells_of_orders(program):
        _check_orders_held(explained(program), inferred=strict)
    if strict:
        least = min(_copied_by_plain_jit(program), _copied_by_plain_jit(program, **_REGIONS))
        _check_no_more(_copied(made), least)


def check_copies(program: Program) -> bool:
    """No more bytes copied than by plain jit, where no declaration asks for an order; whether the
    two can be compared."""
    if not tells_of_copies(program):
        return False
    program = dataclasses.replace(program, donated=tuple(range(len(program.types))))
    made = compiled(scheduled(function(program, declared=False)), program)
    _check_no_more(_copied(made), _copied_by_plain_jit(program))
    return True


def _copied(made: Any) -> int:
    """The bytes copied from one place to another of the same layout. A change of the layout is a
    copy of its own where a pin is in front, and else a part of some kernel."""
    return sum(
        copy.nbytes
        for copy in copies(parse(made.as_text()), BUFFER)
        if copy.instruction.shape == copy.computation[copy.instruction.operands[0]].shape
    )


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
    jaxpr = trace(fun, arguments)
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
    if not floats or any(step.operation == "while" for step in steps(program.block)):
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
