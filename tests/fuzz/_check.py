"""What has to hold for a program: its plan without a compiler, and its compiled form."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxsched import ScheduleError
from jaxsched._before import collecting, marker_p
from jaxsched._jax import Jaxpr, Literal, is_plain_jit, scopes_of, without_dead
from jaxsched._plan import Options, plan
from tests.fuzz._inline import inlined
from tests.fuzz._inplace import Machine
from tests.fuzz._primitives import VIEWS
from tests.fuzz._program import Program, evaluate, function

__all__ = [
    "Failure",
    "check_plan",
    "compare",
    "declared",
    "scopes",
    "trace",
    "trace_and_plan",
]

LARGE = 1e5  # beyond it the rounding of one more addition is no longer small


class Failure(AssertionError):
    """A program does not do what it has to do; `kind` tells one fault from another."""

    def __init__(self, kind: str, text: str = ""):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Unorderable(Exception):
    """A declared value is a constant, which jaxsched refuses rightly."""


def compare(kind: str, given: Any, wanted: Any) -> None:
    """Raises unless the results are equal, floats up to rounding."""
    for number, (a, b) in enumerate(zip(given, wanted, strict=True)):
        a = np.asarray(a)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise Failure(f"{kind}: type", f"result {number} is {a.dtype}{a.shape}, not {b.dtype}")
        if b.dtype.kind != "f":
            same = np.array_equal(a, b)
        else:
            largest = np.abs(b).max(initial=1)
            if not largest < LARGE:
                continue
            same = np.allclose(a, b, rtol=1e-5, atol=1e-5 * largest)
        if not same:
            raise Failure(kind, f"result {number} is wrong")


def trace(fun: Callable[..., Any], arguments: Any) -> Jaxpr:
    """The jaxpr of a function, with its declarations in it."""
    with collecting():
        return jax.make_jaxpr(fun)(*arguments)


def trace_and_plan(program: Program, *, infer: bool = True) -> Jaxpr:
    return plan(trace(function(program), program.arguments()), Options(infer=infer), compiled=True)


def check_plan(program: Program, seed: int = 0, runs: int = 3) -> dict[str, int]:
    """The plans of a program, with and without inference; raises Failure, or counts.

    Then those of the same program where it returns only some of its results, or only the others.
    """
    wanted = evaluate(program.block, program.arguments())
    jaxpr = trace(function(program), program.arguments())
    rng = random.Random(seed)
    every = range(len(wanted))
    counts = defaultdict(int)
    some = sorted(rng.sample(every, len(wanted) // 2))
    others = [i for i in every if i not in some]
    for chosen in [every, some, others] if some else [every]:
        # What leads to no result is not planned, and nothing is claimed of it.
        part = without_dead(_returning(jaxpr, chosen))
        try:
            _planned(part, False, counts)
        except Unorderable:
            if chosen is every:
                return {"refused": 1}
            continue
        arguments = program.arguments()
        _check_in_place(part, arguments, [wanted[i] for i in chosen], seed, runs, counts)
    return counts


def _returning(jaxpr: Jaxpr, chosen: Sequence[int]) -> Jaxpr:
    info = jaxpr.debug_info
    if isinstance(info.result_paths, tuple):
        info = info._replace(result_paths=tuple(info.result_paths[i] for i in chosen))
    return jaxpr.replace(outvars=[jaxpr.outvars[i] for i in chosen], debug_info=info)


def _check_in_place(
    jaxpr: Jaxpr, arguments: Any, wanted: Any, seed: int, runs: int, counts: dict[str, int]
) -> None:
    planned, orders, complete = _planned(jaxpr, True, counts)
    if not complete:
        # The planner names the results of inlined functions anew; here they are inlined before.
        planned, orders, complete = _planned(inlined(jaxpr), True, counts)
    planned = inlined(planned)
    # What only declarations kept alive is planned as if it were needed, but XLA drops it.
    if not complete or _sizes(planned) != _sizes(without_dead(planned)):
        counts["unmapped"] += 1
        return
    counts["interpreted"] += 1
    for run, fused in itertools.product(range(runs), (False, True)):
        machine = Machine(orders, random.Random(f"{seed} {run}"), fused=fused)
        results = machine.run(planned, [np.array(each) for each in arguments])
        counts["contested"] += machine.contested
        compare(f"in place, {'fused' if fused else 'in order'}", results, wanted)


def _planned(
    jaxpr: Jaxpr, infer: bool, counts: dict[str, int]
) -> tuple[Jaxpr, dict[Any, list[Any]], bool]:
    try:
        planned = plan(jaxpr, Options(infer=infer), compiled=True)
    except ScheduleError as error:
        if "it depends on no argument" in str(error) and _orders_constants(jaxpr):
            raise Unorderable from error
        raise Failure("plan refuses a legal order", str(error)) from error
    except Exception as error:
        raise Failure(f"plan raises {type(error).__name__}", str(error)) from error
    counts["plans"] += 1
    orders, complete = declared(jaxpr, planned)
    check_orders(planned, orders)
    return planned, orders, complete


def _orders_constants(jaxpr: Jaxpr) -> bool:
    """Whether a declared value turns out to depend on no input, once dead code is dropped."""
    for scope in scopes(inlined(jaxpr)):
        producer = {v: eqn for eqn in scope.eqns for v in eqn.outvars}
        for eqn in scope.eqns:
            for value in eqn.invars if eqn.primitive is marker_p else ():
                if _needed([value], producer).isdisjoint(scope.invars):
                    return True
    return False


def _sizes(jaxpr: Jaxpr) -> list[tuple[int, ...]]:
    return [(len(s.eqns), len(s.invars), len(s.outvars)) for s in scopes(jaxpr)]


def scopes(jaxpr: Jaxpr) -> Any:
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in scopes_of(value):
                yield from scopes(inner)


def declared(jaxpr: Jaxpr, planned: Jaxpr) -> tuple[dict[Any, list[Any]], bool]:
    """Later variable -> earlier ones, as declared; whether the plan still has them all.

    Values that lead to no result are not computed; what is ordered through them stays ordered.
    """
    known = {v for scope in scopes(planned) for eqn in scope.eqns for v in eqn.outvars}
    found: dict[Any, list[Any]] = {}
    complete = True
    for scope in scopes(jaxpr):
        producer = {v: eqn for eqn in scope.eqns for v in eqn.outvars}
        live = _needed(scope.outvars, producer)
        live |= {v for eqn in scope.eqns if not live.isdisjoint(eqn.outvars) for v in eqn.outvars}
        orders: dict[Any, list[Any]] = defaultdict(list)
        for eqn in scope.eqns:
            if eqn.primitive is marker_p:
                values = iter(eqn.invars)
                groups = [list(itertools.islice(values, n)) for n in eqn.params["groups"]]
                for earlier, later in itertools.pairwise(groups):
                    for a, b in itertools.product(earlier, later):
                        orders[b].append(a)
        for later in live.intersection(orders):
            todo = list(orders[later])
            for value in todo:
                if value not in live and value in producer:
                    # Which of the inputs an inlined function needs for it is not to be seen here.
                    complete &= not is_plain_jit(producer[value])
                    if not complete:
                        continue
                    inputs = [v for v in producer[value].invars if not isinstance(v, Literal)]
                    todo += {*inputs, *orders.get(value, ())}.difference(todo)
            found[later] = [value for value in todo if value in live and value in producer]
            complete &= known.issuperset([later, *found[later]])
    return found, complete


def check_orders(planned: Jaxpr, orders: dict[Any, list[Any]]) -> None:
    """Every declared order between values that are used is one of data and pins in the plan."""
    for scope in scopes(planned):
        producer = {v: eqn for eqn in scope.eqns for v in eqn.outvars}
        used = _needed(scope.outvars, producer, through_pins=False)
        for later in producer.keys() & orders.keys() & used:
            reached = _needed(producer[later].invars, producer)
            for earlier in used.intersection(orders[later]):
                made = earlier
                while made in producer and producer[made].primitive.name in {*VIEWS, "pin"}:
                    eqn = producer[made]
                    made = eqn.invars[eqn.outvars.index(made)]
                if made in producer and reached.isdisjoint(producer[made].outvars):
                    raise Failure("declared order is lost", f"{earlier} before {later}")


def _needed(values: Any, producer: Any, *, through_pins: bool = True) -> set[Any]:
    """The values and all that they are computed from, or wait for at a pin."""
    reached: set[Any] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if not isinstance(value, Literal) and value not in reached:
            reached.add(value)
            if value in producer:
                eqn = producer[value]
                if eqn.primitive.name == "pin" and not through_pins:
                    todo.append(eqn.invars[eqn.outvars.index(value)])
                else:
                    todo += eqn.invars
    return reached
