"""Plans take little memory, and none of them outlives its function."""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched import scheduled
from jaxsched._plan import Options, plan

N = 20_000


def test_a_plan_takes_a_few_kilobytes_for_each_equation():
    """100,000 equations in less than 1 GB."""

    def pops(x):
        for i in range(N // 2):
            y = lax.slice(x, (i % 90,), (i % 90 + 5,))
            x = lax.dynamic_update_slice(x, y, (i % 90 + 3,))
        return x

    jaxpr = jax.make_jaxpr(pops)(jnp.zeros(100))
    assert len(jaxpr.eqns) == N
    tracemalloc.start()
    try:
        planned = plan(jaxpr, Options(), compiled=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(planned.eqns) > N
    assert peak / N < 1e9 / 100_000


def objects():
    gc.collect()
    return len(gc.get_objects())


def test_calls_of_a_scheduled_function_leave_nothing_behind():
    @jax.jit
    @scheduled
    def pop(x):
        return x.at[0].add(1), x[0]

    x = jnp.zeros(100)
    for _ in range(100):
        pop(x)
    before = objects()
    for _ in range(10_000):
        pop(x)
    assert objects() - before < 100


def test_scheduled_functions_leave_no_more_behind_than_jitted_ones():
    x = jnp.zeros(100)

    def make(wrap, number):
        for i in range(number):
            jax.jit(wrap(lambda x, i=i: (x.at[0].add(i), x[1] * i)))(x)
        jax.clear_caches()

    def left(wrap):
        make(wrap, 3)
        before = objects()
        make(wrap, 40)
        return objects() - before

    plain = left(lambda fun: fun)
    assert left(scheduled) <= plain + 40


def test_eager_calls_leave_no_more_behind_than_their_tracing():
    """JAX keeps some thousand entries of a bounded cache of what `make_jaxpr` has traced."""

    def pop(x):
        return x.at[0].add(1), x[0]

    def left(fun):
        for _ in range(20):
            fun(x)
        before = objects()
        for _ in range(200):
            fun(x)
        return objects() - before

    x = jnp.zeros(100)
    assert left(scheduled(pop)) < left(lambda x: jax.make_jaxpr(pop)(x)) + 100
