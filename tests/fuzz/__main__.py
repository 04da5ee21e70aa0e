"""`python -m tests.fuzz --minutes 30`: random programs until the time is over.

Every program's plans run in place on NumPy arrays; a share of the programs is compiled too. A
failure is printed as a small program that can be pasted, with its seed.
"""

import argparse
import collections
import functools
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from jaxsched import ScheduleError
from tests.fuzz._check import Failure, check_plan, trace_and_plan
from tests.fuzz._compiled import check_batched, check_compiled, check_copies, check_gradient
from tests.fuzz._generate import Generator, forbid
from tests.fuzz._program import Program, source
from tests.fuzz._shrink import shrink

_HEADER = """import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxsched import before, scheduled
"""


def main() -> int:
    options = _options()
    start = time.perf_counter()
    counts: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    seed = options.seed
    while time.perf_counter() - start < 60 * options.minutes and seed < options.stop:
        rng = random.Random(seed)
        program = Generator(rng).program()
        planned = functools.partial(check_plan, seed=seed, runs=options.runs)
        checks: list[tuple[str, Callable[[Program], Any]]] = [("plan", planned)]
        illegal = forbid(rng, program) if rng.random() < options.illegal_share else None
        if illegal is not None:
            checks.append(("illegal", lambda _, given=illegal: check_illegal(*given)))
        if rng.random() < options.compiled_share:
            checks += [("compiled", check_compiled), ("copies", check_copies)]
            if rng.random() < 0.5:
                checks.append(rng.choice([("vmap", check_batched), ("gradient", check_gradient)]))
        for name, check in checks:
            kind, found = _outcome(check, program)
            counts.update(found if isinstance(found, dict) else {name: found is not False})
            if isinstance(found, dict) and "refused" in found:
                break
            if kind is not None:
                faults[kind] += 1
                if faults[kind] <= options.show:
                    _report(
                        seed, kind, check, illegal[0] if illegal and name == "illegal" else program
                    )
        seed += 1
    seconds = time.perf_counter() - start
    print(f"seeds {options.seed} to {seed - 1}, {seconds:.0f} s")
    print(", ".join(f"{name}: {number}" for name, number in sorted(counts.items())))
    print("failures:", dict(faults) or "none")
    return 1 if faults else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--stop", type=int, default=sys.maxsize, help="the seed to stop before")
    parser.add_argument("--compiled-share", type=float, default=0.05)
    parser.add_argument("--illegal-share", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=3, help="of each plan in place, in two ways")
    parser.add_argument("--show", type=int, default=3, help="programs to print of each failure")
    return parser.parse_args()


def check_illegal(program: Program, kind: str) -> None:
    """A declaration without a meaning is refused, with the error that it deserves."""
    try:
        trace_and_plan(program)
    except ScheduleError as error:
        if "\n  where: " not in str(error) or "\n  legal: " not in str(error):
            raise Failure("illegal order, bad message", str(error)) from error
        return
    raise Failure(f"illegal order accepted: {kind}")


def _outcome(check: Callable[[Program], Any], program: Program) -> tuple[str | None, Any]:
    """The kind of the failure, if any; what the check tells: counts, or whether it applies."""
    try:
        return None, check(program)
    except Failure as failure:
        return failure.kind, None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}", None


def _report(seed: int, kind: str, check: Callable[[Program], Any], program: Program) -> None:
    small = program
    if "illegal" not in kind:
        small = shrink(program, lambda candidate: _outcome(check, candidate)[0] == kind, 400)
    print(f"# seed {seed}: {kind}\n{_HEADER}\n{source(small)}")
    arguments = [f"np.array({each.tolist()}, {each.dtype.str!r})" for each in small.arguments()]
    print(f"arguments = [{', '.join(arguments)}]")
    print(f"jax.jit(scheduled(f), donate_argnums={small.donated})(*arguments)")
    try:
        check(small)
    except Failure as failure:
        print(f"# {failure}".replace("\n", "\n# "))
    except Exception:
        print("# " + traceback.format_exc().replace("\n", "\n# "))
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
