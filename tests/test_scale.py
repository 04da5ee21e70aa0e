"""Planning is linear in the size of a program, and no depth of it is too deep."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs.generated import nested_loops, straight_line
from jaxsched import scheduled
from jaxsched._plan import Options, plan


def planning_seconds(equations):
    function, arguments = straight_line(equations)
    jaxpr = jax.make_jaxpr(function)(*arguments)
    start = time.process_time()
    planned = plan(jaxpr, Options(), compiled=True)
    seconds = time.process_time() - start
    assert len(planned.eqns) > len(jaxpr.eqns) == equations
    return seconds


def test_planning_is_linear():
    planning_seconds(100)
    small = min(planning_seconds(1_000) for _ in range(3))
    # Twice the time of linear growth tells linear (1.0) from quadratic (10) on a busy machine.
    assert planning_seconds(10_000) < 2 * 10 * small


def test_loops_nested_six_deep():
    function, arguments = nested_loops(depth=6)
    for got, wanted in zip(
        jax.tree.leaves(jax.jit(scheduled(function))(*arguments)),
        jax.tree.leaves(function(*arguments)),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_jitted_functions_nested_a_hundred_deep():
    def step(x):
        return x.at[0].set(x[1]).at[1].set(x[0])

    function = step
    for _ in range(100):
        function = jax.jit(lambda x, inner=function: inner(x) + 1)
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(jax.jit(scheduled(function))(x), [101, 100, 102, 103])
