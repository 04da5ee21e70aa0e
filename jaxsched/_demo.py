"""`python -m jaxsched demo`: an in-place update under plain jit and scheduled."""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched._api import scheduled
from jaxsched._before import before
from jaxsched._hlo._copies import control_edges, copied_bytes
from jaxsched._hlo._text import Module, parse

__all__ = ["main"]

_ROUNDS = 7


def read_then_add(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads an element, then adds to it in place (jax-ml/jax#25399)."""
    y = x[0, 0]
    x_new = x.at[0, 0].add(1)
    return x_new, y


def read_before_add(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, with the order declared."""
    y = x[0, 0]
    x_new = x.at[0, 0].add(1)
    before(y, x_new)
    return x_new, y


def main(argv: list[str]) -> int:
    """Prints copies, memory, HLO and times before and after; 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(prog="python -m jaxsched demo", description=__doc__)
    parser.add_argument(
        "--size", type=_size, default=10_000, help="rows and columns of x (default: 10000)"
    )
    size = parser.parse_args(argv).size
    x = np.zeros((size, size), np.float32)
    x[0, 0] = 41
    print(
        f"jax {jax.__version__} on {jax.devices()[0].platform}, x: float32[{size},{size}]"
        f" ({x.nbytes:,} bytes), donated\n\n"
        "    y = x[0, 0]\n    x_new = x.at[0, 0].add(1)\n    before(y, x_new)"
        "          # the scheduled one only\n    return x_new, y\n"
    )
    plain = _Run("jax.jit(f)", read_then_add, x)
    ordered = _Run("jax.jit(scheduled(f))", scheduled(read_before_add, infer=False), x)
    for run in (plain, ordered):
        print(run.report())
    times = _interleaved(plain, ordered)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    print(f"time, median of {_ROUNDS} interleaved calls:")
    for run, seconds in zip((plain, ordered), times, strict=True):
        print(f"    {run.title:24s}{1e3 * statistics.median(seconds):10.3f} ms")
    print(f"    plain / scheduled       {ratio:10.1f} times")
    held = ordered.copied == 0 and ordered.same_buffer and ordered.edges > 0
    correct = plain.correct and ordered.correct
    print(f"\nresults equal to NumPy's: {'yes' if correct else 'NO'}")
    return 0 if held and correct else 1


class _Run:
    """One compiled version of the function, with what its module and its results show."""

    def __init__(self, title: str, function: Any, x: np.ndarray):
        self.title = title
        self.compiled = jax.jit(function, donate_argnums=0).lower(x).compile()
        module = parse(self.compiled.as_text() or "")
        self.entry = _entry_text(module)
        self.copied = copied_bytes(module, x.nbytes // 2)
        self.edges = len(control_edges(module))
        memory = self.compiled.memory_analysis()
        self.temp = memory.temp_size_in_bytes if memory is not None else 0
        argument = _fresh(x)
        address = argument.unsafe_buffer_pointer()
        x_new, y = self.compiled(argument)
        self.same_buffer = x_new.unsafe_buffer_pointer() == address
        expected = x.copy()
        expected[0, 0] += 1
        self.correct = bool(y == x[0, 0] and np.array_equal(x_new, expected))
        self.array = x_new

    def report(self) -> str:
        """What a user would look for in the HLO."""
        same = "the same" if self.same_buffer else "ANOTHER"
        return (
            f"--- {self.title}\n"
            f"bytes copied: {self.copied:,}   temp bytes: {self.temp:,}   control edges:"
            f" {self.edges}   output address: {same} as the input's\n\n{self.entry}\n"
        )

    def timed_call(self) -> float:
        start = time.perf_counter()
        self.array, _ = jax.block_until_ready(self.compiled(self.array))
        return time.perf_counter() - start


def _interleaved(*runs: _Run) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, seconds in zip(runs, times, strict=True):
            seconds.append(run.timed_call())
    return times


def _fresh(x: np.ndarray) -> jax.Array:
    return jax.block_until_ready(jnp.array(x, copy=True))


def _entry_text(module: Module) -> str:
    """The instructions of the entry computation without metadata."""
    lines = []
    for instruction in module.entry.instructions:
        line = instruction.raw.strip()
        for noise in (", metadata={", ", backend_config={", ", frontend_attributes={"):
            line = _without(line, noise)
        lines.append(f"    {line}")
    return "\n".join(lines)


def _without(line: str, opening: str) -> str:
    """Cuts one `, name={...}` out of an instruction."""
    start = line.find(opening)
    if start < 0:
        return line
    depth, end = 1, start + len(opening)
    while depth and end < len(line):
        depth += {"{": 1, "}": -1}.get(line[end], 0)
        end += 1
    return line[:start] + line[end:]


def _size(text: str) -> int:
    value = int(text)
    if value < 2:  # a read of all of `x` is `x` itself, and nothing can be ordered
        raise argparse.ArgumentTypeError(f"the size must be at least 2, but it is {value}")
    return value
