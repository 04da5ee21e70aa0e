"""`python -m tests.mutants --plans 200`: how many faults in a plan do the tests without a golden
text notice?

Each mutant is a plan with one fault: a pin is dropped, a read is dropped from a pin, one user of a
pinned value takes the value from in front of the pin, or two values of a type change places in a
pin. (Where two equations stand in a plan says nothing to XLA: data and pins are all that orders
them, so that two equations that only change places are no mutant.)

What counts as caught is what the interpreter in place or the check of the declared orders notices,
with no compiler. A mutant changes nothing, and is not counted, if XLA makes of it a program with
right results that copies no more bytes than that of the plan itself (equal: "equivalent", fewer:
"better"), and the declared orders are there still.
"""

import argparse
import collections
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched._hlo._copies import copied_bytes
from jaxsched._jax import Jaxpr, JaxprEqn, Literal, eval_jaxpr, scopes_of
from jaxsched._plan import Options, plan
from tests.fuzz._check import Failure, check_orders, compare, declared, trace
from tests.fuzz._generate import Generator
from tests.fuzz._inplace import Machine
from tests.fuzz._program import Program, evaluate
from tests.hlo import text

KINDS = ("drop a pin", "drop a read", "pass by a pin", "swap two values")


def pins(jaxpr: Jaxpr) -> list[JaxprEqn]:
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pin"]
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in scopes_of(value):
                found += pins(inner)
    return found


def mutated(jaxpr: Jaxpr, pin: JaxprEqn, kind: str, rng: random.Random) -> Jaxpr | None:
    """The jaxpr with one fault at a pin; None where that pin has no place for it."""
    if pin not in jaxpr.eqns:
        for i, eqn in enumerate(jaxpr.eqns):
            for name, value in eqn.params.items():
                for number, inner in enumerate(scopes_of(value)):
                    if pin in pins(inner):
                        new = mutated(inner, pin, kind, rng)
                        if new is None:
                            return None
                        several = list(scopes_of(value))
                        several[number] = new
                        param = tuple(several) if isinstance(value, tuple) else new
                        changed = eqn.replace(params=eqn.params | {name: param})
                        eqns = [*jaxpr.eqns[:i], changed, *jaxpr.eqns[i + 1 :]]
                        return jaxpr.replace(eqns=eqns, debug_info=jaxpr.debug_info)
        raise AssertionError("the pin is in no scope")
    taken = dict(zip(pin.outvars, pin.invars, strict=True))
    buffers = pin.params["buffers"]
    by: dict[Any, Any] = {}
    only: JaxprEqn | None = None
    match kind:
        case "drop a pin":
            by = taken
        case "drop a read":
            reads = pin.outvars[buffers:]
            if not reads:
                return None
            read = rng.choice(reads)
            by = {read: taken[read]}
        case "pass by a pin":
            users = [e for e in jaxpr.eqns if any(v in taken for v in e.invars if _is_var(v))]
            if not users:
                return None
            only = rng.choice(users)
            by = taken
        case _:
            pairs = [
                (a, b)
                for a, b in itertools.combinations(pin.outvars, 2)
                if a.aval == b.aval and taken[a] is not taken[b]
            ]
            if not pairs:
                return None
            a, b = rng.choice(pairs)
            by = {a: b, b: a}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn is pin and kind == "drop a pin":
            continue
        if eqn is pin and kind == "drop a read":
            kept = [i for i, v in enumerate(pin.outvars) if v not in by]
            inputs, outputs = ([each[i] for i in kept] for each in (pin.invars, pin.outvars))
            eqn = pin.replace(invars=inputs, outvars=outputs)
        elif only is None or eqn is only:
            eqn = eqn.replace(invars=[by.get(v, v) if _is_var(v) else v for v in eqn.invars])
        eqns.append(eqn)
    outputs: Any = jaxpr.outvars
    if only is None:
        outputs = [by.get(v, v) if _is_var(v) else v for v in outputs]
    return jaxpr.replace(eqns=eqns, outvars=outputs, debug_info=jaxpr.debug_info)


def _is_var(value: Any) -> bool:
    return not isinstance(value, Literal)


def caught(program: Program, mutant: Jaxpr, orders: Any, runs: int = 6) -> bool:
    """Whether the interpreter in place, or the check of the declared orders, notices it."""
    wanted = evaluate(program.block, program.arguments())
    try:
        check_orders(mutant, orders)
        for run, fused in itertools.product(range(runs), (False, True)):
            machine = Machine(orders, random.Random(run), fused=fused)
            results = machine.run(mutant, [np.array(each) for each in program.arguments()])
            compare("in place", results, wanted)
    except Failure:
        return True
    return False


def outcome(program: Program, planned: Jaxpr) -> tuple[int, bool]:
    """The bytes that the compiled plan copies, and whether its results are right."""
    donated = tuple(i for i, (shape, _) in enumerate(program.types) if shape)
    fun = jax.jit(lambda *a: eval_jaxpr(planned, list(a)), donate_argnums=donated, keep_unused=True)
    arguments = program.arguments()
    compiled = fun.lower(*arguments).compile()
    copied = copied_bytes(text(compiled), 100)
    try:
        wanted = evaluate(program.block, arguments)
        compare("compiled", compiled(*map(jnp.array, arguments)), wanted)
    except Failure:
        return copied, False
    return copied, True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    seed, plans = options.seed, 0
    while plans < options.plans:
        rng = random.Random(seed)
        program = Generator(rng, size=6, depth=1).program()
        seed += 1
        jaxpr = trace(program)
        planned = plan(jaxpr, Options(), compiled=True)
        orders, complete = declared(jaxpr, planned)
        places = pins(planned)
        if not places or not complete:
            continue
        plans += 1
        for kind in KINDS:
            mutant = mutated(planned, rng.choice(places), kind, rng)
            if mutant is None:
                continue
            if caught(program, mutant, orders):
                counts[kind, "caught"] += 1
                continue
            (copied, right), (before, _) = outcome(program, mutant), outcome(program, planned)
            if right and copied <= before:
                counts[kind, "equivalent" if copied == before else "better"] += 1
            else:
                counts[kind, "missed"] += 1
                print(f"missed: seed {seed - 1}, {kind}", flush=True)
    for kind in KINDS:
        print(kind, {name: n for (k, name), n in sorted(counts.items()) if k == kind})
    total = {name: sum(n for (_, k), n in counts.items() if k == name) for _, name in counts}
    found, missed = total.get("caught", 0), total.get("missed", 0)
    print(f"caught {found} of {found + missed}: {found / max(1, found + missed):.1%}")


if __name__ == "__main__":
    main()
