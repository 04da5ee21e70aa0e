"""The means that are compared, one column each: how a program is made ready to be called."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import overlap

import jaxsched
from benchmarks.programs import Program, fresh, host
from benchmarks.programs._program import Built, Fun


class Unavailable(Exception):
    """This column has nothing to run for this program; the message says why."""


@dataclass(frozen=True)
class Ready:
    """A program in one column, ready to be called on what `inputs` returns."""

    call: Fun  # returns when the outputs are there
    inputs: Callable[[], tuple[Any, ...]]  # fresh copies of what the call overwrites
    compiled: jax.stages.Compiled | None = None
    compile_seconds: float | None = None


Prepare = Callable[[Program, bool], Ready]  # of a program, in its small size or not


def copied(copy: Fun, program: Program, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a program, those that it overwrites copied."""
    return tuple(copy(a) if i in program.donate else a for i, a in enumerate(args))


def by_jit(build: Callable[[Program, bool], Built], **options: Any) -> Prepare:
    """Compile what `build` returns, its buffers donated."""

    def prepare(program: Program, small: bool) -> Ready:
        fun, args = build(program, small)
        start = time.perf_counter()
        jitted = jax.jit(fun, donate_argnums=program.donate, compiler_options=options or None)
        compiled = jitted.lower(*args).compile()
        seconds = time.perf_counter() - start
        return Ready(
            lambda *inputs: jax.block_until_ready(compiled(*inputs)),
            functools.partial(copied, fresh, program, args),
            compiled,
            seconds,
        )

    return prepare


def under(transform: Fun) -> Callable[[Program, bool], Built]:
    """Build the undeclared program under a function transformation."""

    def build(program: Program, small: bool) -> Built:
        fun, args = program.build(small=small)
        return transform(fun), args

    return build


def declared(program: Program, small: bool) -> Built:
    if not (program.hazard or program.category == "ordering"):
        raise Unavailable("no order to declare")
    fun, args = program.build(jaxsched.before, small=small)
    return jaxsched.scheduled(fun, infer=False), args


def barriers(program: Program, small: bool) -> Built:
    if not program.by_hand:
        raise Unavailable("no place for a barrier")
    return program.build_barrier(small=small)


def refs(program: Program, small: bool) -> Built:
    if program.ref is None:
        raise Unavailable("not written with jax.new_ref")
    fun, args = program.build_ref(small=small)
    return functools.partial(fun), args  # a new object each time: jit must not find it compiled


def in_numpy(program: Program, small: bool) -> Ready:
    args = host(program.build(small=small)[1])
    copy = functools.partial(jax.tree.map, np.copy)
    return Ready(program.numpy, functools.partial(copied, copy, program, args))


def in_numba(program: Program, small: bool) -> Ready:
    if not program.numba:
        raise Unavailable("no loop for numba")
    try:
        import numba
    except ImportError as e:
        raise Unavailable("numba is not installed") from e
    ready = in_numpy(program, small)
    return Ready(numba.njit(ready.call), ready.inputs)


COLUMNS: dict[str, Prepare] = {
    "plain": by_jit(under(lambda fun: fun)),
    "region": by_jit(under(lambda fun: fun), xla_cpu_copy_insertion_use_region_analysis=True),
    "program_order": by_jit(under(functools.partial(overlap.program_order, enforce=True))),
    "barrier": by_jit(barriers),
    "new_ref": by_jit(refs),
    "scheduled": by_jit(under(jaxsched.scheduled)),
    "declared": by_jit(declared),
    "numpy": in_numpy,
    "numba": in_numba,
}
