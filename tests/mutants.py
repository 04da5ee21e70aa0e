"""`python -m tests.mutants --plans 150` and `--programs 2`: how many faults in a plan do the tests
without a golden text notice?

A mutant is one fault at one place of the plan of one program, in whatever scope of it:

- in the planned jaxpr a pin is dropped, a value is dropped from a pin, one equation takes a value
  from in front of the pin, or two equations that data and pins allow to change places do so;
- before pins are placed, one reader of a request for a pin, or one edge of the graph is dropped;
- one control edge is not added to the module.

`--plans N` takes random programs, and the checks that tests/test_fuzz.py has for them: the
interpreter in place, the declared orders, the compiled program. `--programs N` takes the benchmark
programs, N faults of each kind in each, and calls the tests of tests/test_patterns.py and
tests/test_explain_programs.py themselves. Only the tests that concern the one plan are called.

A mutant is not counted if XLA makes the same module of it ("same"): names, metadata and control
edges that only repeat another path set aside. Nor is it if nothing notices it and it is no worse
than the plan itself ("no worse"): right results, as many bytes copied or less, and as much
temporary memory or less, but for the 64 bytes that XLA may put between two arrays. (Every declared
order is held then, or the tests would have noticed it.)
All others are either "caught" or "missed"; each missed one is printed with the options that repeat
it. The caught ones that are worse in one of these respects are counted as "caught, harmful".
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.programs import ALL, select
from jaxsched import _api, _plan, scheduled
from jaxsched._graph import Graph
from jaxsched._hlo import _control
from jaxsched._hlo._copies import copied_bytes
from jaxsched._hlo._text import Module, parse
from jaxsched._hlo._wire import LENGTH, key, numbers, varint
from jaxsched._jax import Jaxpr, Literal, scopes_of
from jaxsched._lives import SMALL
from jaxsched._options import Options
from jaxsched._pins import Pins
from tests import test_explain_programs, test_patterns
from tests.fuzz import _check, _compiled
from tests.fuzz._check import Failure, compare
from tests.fuzz._generate import Generator
from tests.fuzz._program import evaluate, function
from tests.hlo import temp_bytes, text

### Faults in a planned jaxpr: each kind lists all the jaxprs with one such fault in their top scope


def drop_a_pin(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    for pin in _pins(jaxpr):
        taken = dict(zip(pin.outvars, pin.invars, strict=True))
        eqns = [_taking(eqn, taken) for eqn in jaxpr.eqns if eqn is not pin]
        yield _with(jaxpr, eqns, [_other(taken, v) for v in jaxpr.outvars])


def drop_a_value(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    for pin in _pins(jaxpr):
        for i, (value, source) in enumerate(zip(pin.outvars, pin.invars, strict=True)):
            if len(pin.outvars) > 1:
                buffers = pin.params["buffers"]
                kept = pin.replace(
                    invars=[v for j, v in enumerate(pin.invars) if j != i],
                    outvars=[v for j, v in enumerate(pin.outvars) if j != i],
                    params=pin.params | {"buffers": max(1, buffers - (i < buffers))},
                )
                eqns = [kept if e is pin else _taking(e, {value: source}) for e in jaxpr.eqns]
                yield _with(jaxpr, eqns, [_other({value: source}, v) for v in jaxpr.outvars])


def pass_by_a_pin(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    for pin in _pins(jaxpr):
        taken = dict(zip(pin.outvars, pin.invars, strict=True))
        for i, eqn in enumerate(jaxpr.eqns):
            if any(_is_var(v) and v in taken for v in eqn.invars):
                eqns = [*jaxpr.eqns[:i], _taking(eqn, taken), *jaxpr.eqns[i + 1 :]]
                yield _with(jaxpr, eqns, jaxpr.outvars)


def swap_two_equations(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    eqns = jaxpr.eqns
    for i, j in itertools.combinations(range(len(eqns)), 2):
        if eqns[i].effects or eqns[j].effects:
            continue
        made = {v for eqn in eqns[i:j] for v in eqn.outvars}
        needed = {v for eqn in eqns[i + 1 : j + 1] for v in eqn.invars if _is_var(v)}
        own = filter(_is_var, eqns[j].invars)
        if made.isdisjoint(own) and needed.isdisjoint(eqns[i].outvars):
            swapped = [*eqns[:i], eqns[j], *eqns[i + 1 : j], eqns[i], *eqns[j + 1 :]]
            yield _with(jaxpr, swapped, jaxpr.outvars)


def _pins(jaxpr: Jaxpr) -> list[Any]:
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pin"]


def _is_var(value: Any) -> bool:
    return not isinstance(value, Literal)


def _other(taken: dict[Any, Any], value: Any) -> Any:
    return taken.get(value, value) if _is_var(value) else value


def _taking(eqn: Any, taken: dict[Any, Any]) -> Any:
    return eqn.replace(invars=[_other(taken, v) for v in eqn.invars])


def _with(jaxpr: Jaxpr, eqns: list[Any], outvars: Any) -> Jaxpr:
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)


def at_any_depth(jaxpr: Jaxpr, kind: Callable[[Jaxpr], Iterator[Jaxpr]]) -> Iterator[Jaxpr]:
    yield from kind(jaxpr)
    for i, eqn in enumerate(jaxpr.eqns):
        for name, value in eqn.params.items():
            inner = scopes_of(value)
            for j in range(len(inner)):
                for new in at_any_depth(inner[j], kind):
                    several = (*inner[:j], new, *inner[j + 1 :])
                    param = several if isinstance(value, tuple) else new
                    changed = eqn.replace(params=eqn.params | {name: param})
                    yield _with(
                        jaxpr, [*jaxpr.eqns[:i], changed, *jaxpr.eqns[i + 1 :]], jaxpr.outvars
                    )


### Where a fault is put in


class Fault:
    """A fault of one kind at the place of one number; at none (-1) it only counts its places."""

    def __init__(self, kind: str, place: int = -1):
        self.kind, self.place = kind, place
        self.places = 0

    def is_here(self) -> bool:
        self.places += 1
        return self.places - 1 == self.place

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While this is active, every plan that is made has the fault, at the same place."""
        _plan._rewritten.clear()  # nested jaxprs that were planned without it
        with contextlib.ExitStack() as stack:
            for owner in (_api, _check, _compiled):
                stack.enter_context(mock.patch.object(owner, "plan", self._plan))
            if self.kind in _BEHIND_THE_PLAN:
                owner, name, leave_out = _BEHIND_THE_PLAN[self.kind]
                stack.enter_context(mock.patch.object(owner, name, leave_out(self)))
            yield
        _plan._rewritten.clear()

    def _plan(self, jaxpr: Jaxpr, options: Options, *, compiled: bool) -> Jaxpr:
        self.places = 0
        planned = _plan.plan(jaxpr, options, compiled=compiled)
        if self.kind in _IN_THE_PLAN and compiled != (self.kind == EAGER):
            for mutant in at_any_depth(planned, _IN_THE_PLAN[self.kind]):
                if self.is_here():
                    return mutant
        return planned


def _leave_out_readers(fault: Fault) -> Callable[..., None]:
    original = Pins.want

    def want(self: Pins, target: Any, held: Any, readers: Any, **options: Any) -> None:
        if readers := [reader for reader in readers if not fault.is_here()]:
            original(self, target, held, readers, **options)

    return want


def _leave_out_edges(fault: Fault) -> Callable[..., Any]:
    original = Graph.add_edge

    def add_edge(self: Graph, edge: Any) -> Any:
        return None if edge.kind != "data" and fault.is_here() else original(self, edge)

    return add_edge


def _leave_out_control_edges(fault: Fault) -> Callable[..., bytes]:
    original = _control.encode

    def encode(number: int, payload: Any) -> bytes:
        if number == 37:  # control_predecessor_ids
            found = numbers(payload, (key(number, LENGTH), 0, 0, len(payload)))
            payload = b"".join(varint(each) for each in found if not fault.is_here())
        return original(number, payload)

    return encode


EAGER = "swap two equations (eager)"
_IN_THE_PLAN = {
    "drop a pin": drop_a_pin,
    "drop a value of a pin": drop_a_value,
    "pass by a pin": pass_by_a_pin,
    "swap two equations": swap_two_equations,
    EAGER: swap_two_equations,
}
_BEHIND_THE_PLAN = {
    "drop a reader": (Pins, "want", _leave_out_readers),
    "drop an edge": (Graph, "add_edge", _leave_out_edges),
    "drop a control edge": (_control, "encode", _leave_out_control_edges),
}
KINDS = (*_IN_THE_PLAN, *_BEHIND_THE_PLAN)


### What a mutant changes

ALIGNMENT = 64  # bytes: XLA puts every array at a multiple of it


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a plan: the module, and what is promised of it."""

    jaxpr: str
    module: str
    right: bool
    copied: int = 0
    temporary: int = 0

    def is_worse(self, than: "Outcome") -> bool:
        more = self.copied > than.copied or self.temporary > than.temporary + ALIGNMENT
        return more or not self.right

    def __str__(self) -> str:
        if not self.right:
            return "wrong results"
        return f"{self.copied} bytes copied, {self.temporary} temporary"


def outcome(jaxpr: str, compiled: Any, *, right: bool) -> Outcome:
    module = parse(text(compiled))
    copied = copied_bytes(module, SMALL + 1)
    return Outcome(jaxpr, canonical(module), right, copied, temp_bytes(compiled))


_NAME = re.compile(r"%([\w.\-]+)")
_NO_MATTER = re.compile(
    r""", (?:metadata|frontend_attributes)=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}"""
    r"|, control-predecessors=\{[^}]*\}"
)


def canonical(module: Module) -> str:
    """The module without names, metadata and control edges that repeat another path."""
    lines: list[str] = []
    for computation in module.computations.values():
        lines.append(f"%{computation.name}:")
        before: dict[str, set[str]] = {}
        for instruction in computation.instructions:
            operands = set(instruction.operands)
            extra = set(instruction.control_predecessors) - operands
            direct = operands | extra
            reached = direct.union(*(before[name] for name in direct))
            edges = [e for e in extra if not any(e in before[other] for other in direct)]
            before[instruction.name] = reached
            order = [i.name for i in computation.instructions if i.name in edges]
            lines.append(f"{_NO_MATTER.sub('', instruction.raw)} after {_percent(order)}")
    numbers: dict[str, int] = {}
    return _NAME.sub(lambda m: f"%{numbers.setdefault(m[1], len(numbers))}", "\n".join(lines))


def _percent(names: list[str]) -> str:
    return " ".join(f"%{name}" for name in names)


### The plans that are mutated, each with the tests that concern it


class RandomPlan:
    """The plan of a random program."""

    source = "random"

    def __init__(self, seed: int):
        self.name = str(seed)
        self._seed = seed
        self._program = Generator(random.Random(seed), size=6, depth=1).program()

    def compile(self) -> Any:
        return _compiled.compiled(scheduled(function(self._program)), self._program)

    def trace(self) -> str:
        return str(jax.make_jaxpr(scheduled(function(self._program)))(*self._program.arguments()))

    def outcome(self) -> Outcome:
        made = self.compile()
        return outcome(self.trace(), made, right=self._is_right(made))

    def _is_right(self, made: Any) -> bool:
        wanted = evaluate(self._program.block, self._program.arguments())
        try:
            compare("compiled", made(*map(jnp.array, self._program.arguments())), wanted)
        except Failure:
            return False
        return True

    def tests(self) -> Iterator[Callable[[], Any]]:
        yield lambda: _check.check_plan(self._program, self._seed)
        yield lambda: _compiled.check_compiled(self._program, strict=True)

    def check_eagerly(self) -> None:
        _compiled.check_eager(self._program)


class BenchmarkPlan:
    """The plan of a benchmark program, with its orders inferred or declared."""

    source = "programs"

    def __init__(self, name: str, way: str):
        self.name = f"{name} {way}"
        self._program, self._way = ALL[name], way

    def compile(self) -> Any:
        test_patterns.run.cache_clear()
        return test_patterns.run(self._program.name, self._way)[0]

    def trace(self) -> str:
        fun, arguments = self._built()
        return str(jax.make_jaxpr(scheduled(fun))(*arguments))

    def _built(self) -> Any:
        return test_patterns.built(self._program.name, self._way)[:2]

    def outcome(self) -> Outcome:
        return outcome(self.trace(), self.compile(), right=True)

    def tests(self) -> Iterator[Callable[[], Any]]:
        name, way = self._program.name, self._way
        yield lambda: test_patterns.test_results_and_copies(name, way)
        if self._program.hazard:
            yield lambda: test_patterns.test_orders_are_held_and_copies_have_a_reason(name, way)
        if way == "declared":
            if self._program.ordered or self._program.temp_goal:
                yield lambda: test_patterns.test_a_declared_order_is_kept(name)
        elif self._program.hazard:
            yield lambda: test_patterns.test_an_edge_goes_from_a_read_to_the_write(name)
            yield (
                lambda: (
                    test_explain_programs.test_a_scheduled_program_has_no_avoidable_copy_and_no_lost_edge(
                        name
                    )
                )
            )

    def check_eagerly(self) -> None:
        if self._way == "declared":
            test_patterns.test_eager_code_keeps_the_declared_order(self._program.name)


### The figure

FOUND = ("caught, harmful", "caught", "missed", "same", "no worse")
Counts = collections.Counter[tuple[str, str, str]]


def verdict(plan: Any, fault: Fault, unchanged: Outcome) -> tuple[str, str]:
    """What became of a mutant, and what noticed it."""
    with fault.at_work():
        if fault.kind == EAGER:
            # Data and effects are respected: only an order that is declared can make a difference.
            noticed = _failure([plan.check_eagerly])
            return ("caught" if noticed else "same"), noticed
        try:
            if fault.kind != "drop a control edge" and plan.trace() == unchanged.jaxpr:
                return "same", ""
            changed = plan.outcome()
        except Exception as error:  # of the planner, or wrong results of a benchmark program
            changed = Outcome("", str(error), right=False)
        if changed.module == unchanged.module:
            return "same", ""
        noticed = _failure(plan.tests())
    worse = changed.is_worse(unchanged)
    if noticed:
        return ("caught, harmful" if worse else "caught"), noticed
    return ("missed" if worse else "no worse"), f"{changed}, not {unchanged}"


def _failure(tests: Iterable[Callable[[], Any]]) -> str:
    for test in tests:
        try:
            test()
        except Exception as error:
            return f"{type(error).__name__} {error}".partition("\n")[0]
    return ""


def places(plan: Any, kind: str) -> int:
    fault = Fault(kind)
    with fault.at_work():
        if kind == EAGER:
            plan.check_eagerly()
        elif kind == "drop a control edge":
            plan.compile()
        else:
            plan.trace()
    return fault.places


def examine(plan: Any, each: int, rng: random.Random, counts: Counts, *, verbose: bool) -> None:
    if not places(plan, "drop a pin"):
        return
    if failure := _failure(plan.tests()):
        print(f"left out, its tests fail without a fault: {plan.source} {plan.name}: {failure}")
        return
    unchanged = plan.outcome()
    for kind in KINDS:
        number = places(plan, kind)
        for place in sorted(rng.sample(range(number), min(each, number))):
            fault = Fault(kind, place)
            found, why = verdict(plan, fault, unchanged)
            counts[plan.source, kind, found] += 1
            if found == "missed" or verbose:
                where = f"--repeat '{plan.source}' '{plan.name}' '{kind}' {place}"
                print(f"{found}: {where}: {why}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--plans", type=int, default=0, help="number of random programs")
    parser.add_argument("--programs", type=int, default=0, help="faults of a kind in each program")
    parser.add_argument("--only", default="*", help="the benchmark programs, by name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--verbose", action="store_true", help="print every mutant")
    parser.add_argument("--repeat", nargs=4, metavar=("SOURCE", "PLAN", "KIND", "PLACE"))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # as in the tests
    counts: Counts = collections.Counter()
    if options.repeat:
        source, name, kind, place = options.repeat
        plan = RandomPlan(int(name)) if source == "random" else BenchmarkPlan(*name.split())
        print(*verdict(plan, Fault(kind, int(place)), plan.outcome()), sep=": ")
        return
    rng = random.Random(options.seed)
    plans: list[Callable[[], Any]] = [
        functools.partial(RandomPlan, seed)
        for seed in range(options.seed, options.seed + options.plans)
    ]
    programs = itertools.product(select(options.only), ("inferred", "declared"))
    if options.programs:
        plans += [functools.partial(BenchmarkPlan, each.name, way) for each, way in programs]
        rng.shuffle(plans)
    start = time.perf_counter()
    for number, plan in enumerate(plans):
        if time.perf_counter() - start > 60 * options.minutes:
            print(f"the time is over after {number} of {len(plans)} plans")
            break
        examine(plan(), max(1, options.programs), rng, counts, verbose=options.verbose)
    show(counts)


def show(counts: Counts) -> None:
    for source, kind in sorted({(source, kind) for source, kind, _ in counts}):
        row = {found: counts[source, kind, found] for found in FOUND}
        print(f"{source:10}{kind:30}", ", ".join(f"{n} {found}" for found, n in row.items()))
    total = {found: sum(n for (*_, f), n in counts.items() if f == found) for found in FOUND}
    caught = total["caught"] + total["caught, harmful"]
    counted = caught + total["missed"]
    print(f"caught {caught} of {counted}: {caught / max(1, counted):.1%};", total)


if __name__ == "__main__":
    main()
