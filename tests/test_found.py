"""Faults that random programs found, each with the smallest program that shows it."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import before, scheduled
from jaxsched._before import collecting
from jaxsched._plan import Options, plan
from tests.common import assert_same
from tests.fuzz._inplace import Machine
from tests.hlo import compiled, copied_bytes


def assert_right_in_place(fun, *args):
    """The plan of `fun` gives the results of `fun` where each update in place overwrites memory."""
    wanted = [np.asarray(each) for each in fun(*args)]
    with collecting():
        planned = plan(jax.make_jaxpr(fun)(*args), Options(), compiled=True)
    contested = 0
    for run in range(6):
        machine = Machine({}, random.Random(run), fused=run % 2 == 0)
        given = machine.run(planned, [np.array(each) for each in args])
        contested += machine.contested
        assert_same(list(map(np.asarray, given)), wanted)
    assert contested


def moved(x, i):
    return x, x.at[6:].set(x[5:11])


def moved_twice(x, i):
    return x.at[1:7].set(x[:6]), x.at[6:].set(x[5:11])


def turned(x, i):
    return x, x.at[i].set(x[3, ::-1])


def spread(x, i):
    return x, x.at[i].set(x[3, 0] + 1)


def crossed(x, i):
    return x, x.at[i].set(x[:, 4] + 1)


def selected(x, i):
    return (jnp.where(i < 9, x.at[6:].set(x[5:11]), x),)


@pytest.mark.parametrize("fun", [moved, moved_twice, turned, spread, crossed, selected])
def test_a_window_that_is_moved_inside_of_an_array_which_is_kept(fun):
    """XLA copies the array and fuses read and write over the copy (openxla/xla#49176)."""

    def gathered(table, i):
        return fun(table[np.arange(12) * 2 % 11], i)

    table, i = np.arange(144, dtype=np.float32).reshape(12, 12), np.int32(3)
    program = compiled(scheduled(gathered), table, i)
    wanted = [np.asarray(each) for each in gathered(jnp.array(table), i)]
    for result, expected in zip(program(table, i), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_cheap_read_and_a_dear_one_of_two_buffers_of_a_loop():
    """Together they cost more to keep than the copies would; the cheap one alone does not."""

    def fun(k):
        x = jnp.full((10, 12), 1, jnp.int32)
        low = x.at[:, -10].min(-1, mode="clip")
        row = low[2]
        new = low.at[9].set(row)

        def body(carry):
            i, _, _ = carry
            added = lax.fori_loop(0, 2, lambda _, p: p.at[-1].add(row), low)
            return i + 1, added, added

        _, last, _ = lax.while_loop(lambda carry: carry[0] <= k % 3, body, (jnp.int32(0), x, new))
        return jnp.max(new, 1), last

    assert_right_in_place(fun, np.int32(0))


def test_an_order_through_a_value_that_leads_to_no_result():
    """The value is not computed; what is before it is still before what is behind it."""

    @scheduled
    def fun(x, z):
        first = jnp.sin(z).sum()
        dropped = first * 2
        x_new = x.at[1].set(7.0)
        before(dropped, x_new)
        return x_new, first, z @ z

    x, z = jnp.arange(900.0).reshape(30, 30), jnp.ones((30, 30))
    planned = jax.make_jaxpr(fun)(x, z)
    [pin] = [eqn for eqn in planned.eqns if eqn.primitive.name == "pin"]
    [total] = [eqn for eqn in planned.eqns if eqn.primitive.name == "reduce_sum"]
    assert total.outvars[0] in pin.invars
    assert not any(eqn.primitive.name == "mul" for eqn in planned.eqns)
    x_new, first, _ = jax.jit(fun)(x, z)
    np.testing.assert_array_equal(x_new, x.at[1].set(7.0))
    np.testing.assert_allclose(first, np.sin(1) * 900, rtol=1e-5)


def test_a_declared_read_that_leads_to_no_result_asks_for_nothing():
    @scheduled
    def fun(x):
        y = x[0] * 2
        x_new = x.at[0].set(1.0)
        before(y, x_new)
        return x_new

    x = jnp.ones((30, 30))
    assert "pin" not in str(jax.make_jaxpr(fun)(x))
    assert copied_bytes(compiled(fun, x, donate_argnums=0), x) == 0


def test_two_writes_of_an_array_of_one_number_need_no_copy():
    """Each of them starts from its own array of ones; one pinned array had to be copied."""

    def fun(k):
        ones = jnp.full((40, 25), 1, jnp.int32)
        low = ones.at[np.array([-11, -21])].min(k, mode="clip")
        return lax.switch(k % 3, [lambda x: x, lambda x: x, lambda _: low], ones)

    k = np.int32(2)
    plain, ours = (compiled(each, k) for each in (fun, scheduled(fun)))
    assert copied_bytes(ours, 4000) <= copied_bytes(plain, 4000)
    np.testing.assert_array_equal(ours(k), fun(k))
