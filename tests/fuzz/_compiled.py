"""What has to hold for a program once XLA has compiled it."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched import scheduled
from jaxsched._hlo._copies import copied_bytes
from tests.fuzz._check import Failure, compare
from tests.fuzz._program import Program, Step, evaluate, function

__all__ = ["check_batched", "check_compiled", "check_gradient"]

# Copies of rows and counters are no concern: the buffers of the programs are all larger than this.
_BUFFER = 100


def _compile(fun: Any, program: Program) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        jitted = jax.jit(fun, donate_argnums=program.donated, keep_unused=True)
        return jitted.lower(*program.arguments()).compile()


def check_compiled(program: Program, *, copies: bool = True) -> None:
    """Right results, arguments left alone unless donated, no more bytes copied than plain jit."""
    wanted = evaluate(program.block, program.arguments())
    compiled = _compile(scheduled(function(program)), program)
    arguments = [jnp.array(each) for each in program.arguments()]
    compare("compiled", compiled(*arguments), wanted)
    for i, given in enumerate(program.arguments()):
        if i not in program.donated and not np.array_equal(arguments[i], given):
            raise Failure("argument changed", f"argument {i} was not donated")
    if copies:
        plain = _compile(function(program, declared=False), program)
        ours, theirs = (copied_bytes(each.as_text(), _BUFFER) for each in (compiled, plain))
        if ours > theirs:
            raise Failure("more copies", f"{ours} bytes, {theirs} under plain jit")


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
    if not floats or _has(program.block.steps, "while"):
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


def _has(steps: tuple[Step, ...], operation: str) -> bool:
    return any(
        step.operation == operation or any(_has(b.steps, operation) for b in step.blocks)
        for step in steps
    )
