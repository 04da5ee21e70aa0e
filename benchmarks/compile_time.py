"""What scheduling costs before and around the run: `python -m benchmarks.compile_time --help`."""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable

import jax

from benchmarks._measure import ratios, spread
from benchmarks._runner import DEVICES
from benchmarks.programs import select
from benchmarks.programs._program import Built, Fun
from benchmarks.programs.generated import nested_loops, straight_line, train_step
from jaxsched import scheduled
from jaxsched._plan import Options, plan

MEANS: dict[str, Fun] = {"plain": lambda fun: fun, "scheduled": scheduled}


def interleaved(
    build: Callable[[], Built], seconds: Callable[[Fun, tuple], float], repeat: int
) -> dict[str, list[float]]:
    """`seconds(fun, args)` of the plain and the scheduled function, in turns.

    Each time on a function built anew, so that no cache of JAX knows it.
    """
    samples: dict[str, list[float]] = {name: [] for name in MEANS}
    for turn in range(repeat):
        for name in list(MEANS)[:: 1 if turn % 2 else -1]:
            fun, args = build()
            gc.collect()  # nobody's time is spent on what the one before left behind
            samples[name].append(seconds(MEANS[name](fun), args))
    return samples


def to_trace(fun: Fun, args: tuple) -> float:
    start = time.perf_counter()
    jax.make_jaxpr(fun)(*args)
    return time.perf_counter() - start


def to_plan(fun: Fun, args: tuple) -> float:
    """Seconds of CPU time, of which a busy machine takes no more."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    gc.collect()
    start = time.process_time()
    plan(jaxpr, Options(), compiled=True)
    return time.process_time() - start


def to_compile(fun: Fun, args: tuple, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    jax.jit(fun, donate_argnums=0).lower(*args).compile()
    return clock() - start


def to_call(fun: Fun, args: tuple) -> float:
    jitted = jax.jit(fun)
    jax.block_until_ready(jitted(*args))
    calls = 1000
    start = time.perf_counter()
    for _ in range(calls):
        jitted(*args)
    seconds = time.perf_counter() - start
    return seconds / calls


def line(title: str, samples: dict[str, list[float]], unit: float = 1e3) -> str:
    plain, mine = (statistics.median(samples[name]) * unit for name in MEANS)
    return f"| {title} | {plain:.3g} | {mine:.3g} | {inner(samples)} |"


def inner(samples: dict[str, list[float]]) -> str:
    return between(ratios(samples["scheduled"], samples["plain"]))


def between(s: dict[str, float]) -> str:
    return f"{s['median']:.3f} ({s['q1']:.3f} to {s['q3']:.3f})"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="programs to compile (all)")
    parser.add_argument("--repeat", type=int, default=7, help="samples (%(default)s)")
    parser.add_argument(
        "--equations",
        type=int,
        nargs="*",
        default=[1_000, 10_000, 100_000],
        help="sizes of the straight-line programs that are planned (%(default)s)",
    )
    opts = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", DEVICES)

    print("| what | plain | scheduled | ratio: median (quartiles) |\n|---|---|---|---|")
    medians = []
    for program in select(*opts.globs):
        _, args = program.build(small=True)

        def build(program=program, args=args) -> Built:
            return program.build(small=True)[0], args

        interleaved(build, to_compile, 1)  # fills the caches of what all programs share
        samples = interleaved(build, to_compile, opts.repeat)
        print(line(f"compile `{program.name}`, ms", samples), flush=True)
        medians.append(ratios(samples["scheduled"], samples["plain"])["median"])
    print(f"| compile: median of {len(medians)} programs | | | {between(spread(medians))} |")

    for equations in opts.equations:
        few = max(2, opts.repeat // 2) if equations > 10_000 else opts.repeat
        samples = interleaved(lambda n=equations: straight_line(n), to_trace, few)
        print(line(f"trace {equations:,} equations, ms", samples), flush=True)
        planning = statistics.median(to_plan(*straight_line(equations)) for _ in range(few))
        print(f"| of this, plan them, ms of CPU | | {planning * 1e3:.3g} | |", flush=True)
    print(
        line("compile loops nested 6 deep, ms", interleaved(nested_loops, to_compile, opts.repeat))
    )
    samples = interleaved(train_step, to_trace, opts.repeat)
    print(line("trace 12-layer train step, ms", samples), flush=True)
    for unit, clock in {"ms": time.perf_counter, "ms of CPU": time.process_time}.items():
        compiling = functools.partial(to_compile, clock=clock)
        samples = interleaved(train_step, compiling, opts.repeat)
        print(line(f"lower and compile 12-layer train step, {unit}", samples), flush=True)
    (tiny,) = select("remove")
    samples = interleaved(lambda: tiny.build(small=True), to_call, 3 * opts.repeat)
    print(line("call `remove` of 200 elements, us", samples, 1e6))


if __name__ == "__main__":
    main()
