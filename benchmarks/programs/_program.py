"""What a benchmark program is, and the register of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Category = Literal["in-place", "copy-unavoidable", "correctness", "ordering", "guard"]
Fun = Callable[..., Any]
Built = tuple[Fun, tuple[Any, ...]]


def undeclared(*values: Any) -> None:
    """The `before` of a program without declared order."""


def unordered[T](values: T) -> T:
    """The `barrier` of a program without barriers."""
    return values


@dataclass(frozen=True)
class Program:
    """A small JAX function, the same function in NumPy, and what is known about its buffers.

    `builder(before, barrier, **size)` returns the function and its arguments.  The function
    declares its order with `before`, and puts `barrier` where a person would put
    `lax.optimization_barrier`; in the plain program both do nothing.  In its source
    `# <- read` marks the lines that use a version of the buffer and `# <- write` those that
    overwrite it.
    """

    name: str
    builder: Fun
    numpy: Fun  # the same function, which may overwrite its arguments
    source: str = ""  # public report, owner/repository#number
    category: Category = "in-place"
    small: Mapping[str, int] = field(default_factory=dict)  # sizes for quick tests
    donate: tuple[int, ...] = (0,)
    tolerance: float = 1e-5  # relative and absolute
    hazard: bool = True  # XLA could read a buffer after its write, or in one kernel with it
    by_hand: bool = True  # the source says where barriers go
    ref: Fun | None = None  # the same function on jax.new_ref
    numba: bool = False  # `numpy` is a loop that numba compiles
    miscompiled: bool = False  # plain jit gives wrong values on some supported jaxlib
    devices: int = 1
    ordered: Callable[[str], bool] | None = None  # does the optimized HLO keep the order?
    temp_goal: float | None = None  # temporary memory that a good order needs, in buffers
    unavoidable: int = 0  # buffers that have to be copied in any order

    @property
    def summary(self) -> str:
        """What the program does, in one sentence."""
        return (inspect.getdoc(self.builder) or "").split("\n\n")[0].replace("\n", " ")

    def build(
        self, before: Fun = undeclared, *, barrier: Fun = unordered, small: bool = False
    ) -> Built:
        """The function and its arguments, with its order declared through `before`."""
        return self.builder(before, barrier, **(self.small if small else {}))

    def build_barrier(self, *, small: bool = False) -> Built:
        """The function with `lax.optimization_barrier` placed by hand, and its arguments."""
        return self.build(barrier=lax.optimization_barrier, small=small)

    def build_ref(self, *, small: bool = False) -> Built:
        """The function written with `jax.new_ref`, and its arguments."""
        if self.ref is None:
            raise ValueError(f"program {self.name} is not written with jax.new_ref")
        return self.ref, self.build(small=small)[1]

    def reference(self, *args: Any) -> Any:
        """The outputs that NumPy computes; `args` are left as they were."""
        return self.numpy(*host(args))

    def buffer_bytes(self, args: tuple[Any, ...]) -> int:
        """Size on one device of the largest donated array: what is too big to be copied."""
        leaves = jax.tree.leaves([args[i] for i in self.donate])
        return max(leaf.nbytes for leaf in leaves) // self.devices

    def lines(self, marker: Literal["read", "write"]) -> list[tuple[str, int]]:
        """File and line of each `# <- marker` in the program's source."""
        path = inspect.getsourcefile(self.builder)
        text, first = inspect.getsourcelines(self.builder)
        assert path is not None
        return [(path, first + i) for i, line in enumerate(text) if f"# <- {marker}" in line]


def program(numpy: Fun, source: str = "", **facts: Any) -> Callable[[Fun], Program]:
    """The program whose builder is decorated: the JAX form of `numpy`, under the builder's name."""
    return lambda builder: Program(builder.__name__, builder, numpy, source, **facts)


def host(args: Any) -> Any:
    """Copies of the arrays in `args` as NumPy arrays, 0-d ones as NumPy scalars."""
    return jax.tree.map(lambda a: np.array(a)[()], args)


def fresh(args: Any) -> Any:
    """Copies of the arrays in `args` on the same devices, so that they can be donated."""
    return jax.block_until_ready(jax.tree.map(lambda a: jnp.array(a, copy=True), args))


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Normally distributed float32 numbers."""
    return jnp.array(np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32))


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> jax.Array:
    """Uniform int32 numbers in [low, high)."""
    return jnp.array(np.random.default_rng(seed).integers(low, high, shape).astype(np.int32))
