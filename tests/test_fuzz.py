"""Random programs, a few of them: `python -m tests.fuzz` runs as many as there is time for."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from jaxsched import ScheduleError, before, scheduled
from tests.fuzz.__main__ import check_illegal
from tests.fuzz._check import Failure, check_plan, trace_and_plan
from tests.fuzz._compiled import check_batched, check_compiled, check_gradient
from tests.fuzz._generate import Generator, forbid
from tests.fuzz._inplace import Machine
from tests.fuzz._program import source
from tests.hlo import compiled, copied_bytes

quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
choices = st.randoms(use_true_random=False)


@settings(quick, max_examples=60)
@given(choices)
def test_what_hypothesis_makes_of_the_generator(rng):
    check_plan(Generator(rng, size=5, depth=1).program())


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_plans_run_in_place(start):
    for seed in range(start, start + 50):
        check_plan(Generator(random.Random(seed)).program(), seed)


@pytest.mark.parametrize("start", range(0, 100, 50))
def test_illegal_declarations_are_refused(start):
    for seed in range(start, start + 50):
        rng = random.Random(seed)
        program = Generator(rng).program()
        if (illegal := forbid(rng, program)) is not None:
            check_illegal(*illegal)


@pytest.mark.parametrize("check", [check_compiled, check_batched, check_gradient])
def test_compiled_programs(check):
    for seed in range(12):
        check(Generator(random.Random(seed), size=5).program())


def test_programs_are_the_same_for_a_seed():
    first, second = (source(Generator(random.Random(3)).program()) for _ in range(2))
    assert first == second


### The oracle itself


def read_and_write(x, i):
    y = x[i]
    return x.at[i].set(0.0), y * 2


def run_in_place(jaxpr, fused):
    arguments = [np.arange(40, dtype=np.float32).reshape(4, 10) + 1, np.int32(2)]
    machine = Machine({}, random.Random(0), fused=fused)
    new, y = machine.run(jaxpr, arguments)
    assert machine.contested == 1
    assert not new[2].any()
    return y


@pytest.mark.parametrize("fused", [False, True])
def test_the_oracle_sees_a_read_that_comes_too_late(fused):
    jaxpr = jax.make_jaxpr(read_and_write)(jnp.ones((4, 10)), 2)
    assert not run_in_place(jaxpr, fused).any()
    planned = jax.make_jaxpr(jax.jit(scheduled(read_and_write)))(jnp.ones((4, 10)), 2)
    (inner,) = (eqn.params["jaxpr"] for eqn in planned.eqns)
    np.testing.assert_array_equal(run_in_place(inner, fused), 2 * np.arange(21, 31))


def test_the_oracle_sees_an_update_that_reads_what_it_overwrites():
    def shift(x):
        return x.at[1:].set(x[:-1] * 2)

    x = np.arange(40, dtype=np.float32)
    jaxpr = jax.make_jaxpr(shift)(x)
    (new,) = Machine({}, random.Random(0)).run(jaxpr, [x.copy()])
    assert not np.array_equal(new, np.asarray(shift(jnp.array(x))))


### What random programs found


def test_a_declared_read_of_the_very_window_that_is_written():
    """The read was held back with the write and wanted in front of it."""

    @scheduled
    def f(x, i):
        y = lax.dynamic_slice(x, (i,), (5,))
        x_new = lax.dynamic_update_slice(x, -y, (i,))
        before(y, x_new)
        return x_new, y

    x = np.arange(40, dtype=np.float32)
    x_new, y = jax.jit(f, donate_argnums=0)(jnp.array(x), 3)
    np.testing.assert_array_equal(y, x[3:8])
    np.testing.assert_array_equal(x_new, [*x[:3], *-x[3:8], *x[8:]])


def test_a_value_computed_from_constants_alone_cannot_be_ordered():
    """Nothing holds it back: the declaration was accepted, and had no effect."""

    @scheduled
    def f(x):
        y = x.sum()
        z = jnp.full(12, 2.0) + 1
        before(y, z)
        return y, z

    with pytest.raises(ScheduleError, match="it depends on no argument"):
        jax.jit(f)(jnp.ones(3))


def test_a_branch_with_pins_of_its_own_still_updates_its_operand():
    """The pin in the branch hid from the caller that the branch writes."""

    @scheduled
    def pop(x):
        y = x[0]
        return x.at[0].set(0.0), y

    @scheduled
    def f(flag, x):
        total = x * 2
        x, y = lax.cond(flag, pop, lambda x: (x, x[1]), x)
        return x, y, total[3]

    x = np.arange(1000, dtype=np.float32) + 1
    new, y, total = jax.jit(f, donate_argnums=1)(True, jnp.array(x))
    np.testing.assert_array_equal(new, [0, *x[1:]])
    assert (y, total) == (1, 8)


def test_failures_of_the_checks_name_their_kind():
    program = Generator(random.Random(0)).program()
    trace_and_plan(program)
    with pytest.raises(Failure, match="illegal order accepted"):
        check_illegal(program, "cycle")


def test_a_read_between_a_window_and_its_update():
    """The slice of the window was held back with the update, though a read waits for it."""

    @scheduled
    def f(x):
        y = lax.dynamic_slice(x, (0, 0), (2, 4))
        x_new = lax.dynamic_update_slice(x, y, (0, 0))
        z = x * 0.5
        before(y, z)
        return x_new, z

    x = np.arange(120, dtype=np.float32).reshape(10, 12)
    x_new, z = jax.jit(f, donate_argnums=0)(jnp.array(x))
    np.testing.assert_array_equal(x_new, x)
    np.testing.assert_array_equal(z, x * 0.5)


def read_through_a_sort(x):
    y = x[3] * 2
    return x.at[3].set(jnp.sort(y)), y[::-1] + 1


def read_through_a_sum(x):
    y = -x[5:]
    return x.at[3].set(jnp.sum(y)), y[::-1]


def read_through_a_loop(x):
    y = x ^ 3
    x = lax.fori_loop(0, 2, lambda i, x: x.at[i].set(y[i] + x[0]), x)
    return x, y[:, 3]


@pytest.mark.parametrize("fun", [read_through_a_sort, read_through_a_sum, read_through_a_loop])
def test_a_read_that_the_write_needs_and_others_too(fun):
    """XLA computed it again for the others, late, and copied the buffer for them."""
    x = jnp.arange(9000, dtype=jnp.int32).reshape(90, 100)
    wanted = [np.asarray(each) for each in fun(x)]
    plain, ours = (compiled(each, x, donate_argnums=0) for each in (fun, scheduled(fun)))
    assert copied_bytes(ours, x) < copied_bytes(plain, x)
    for result, expected in zip(ours(x), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_loop_that_reads_what_it_carries_leaves_other_buffers_in_place():
    """It cannot run in place; but to let it, an order was chosen which cost another copy."""

    def fun(x, z):
        def keep_adding(i, carry):
            return carry.at[i].add(z[0] + x.sum(0))

        z_new = lax.fori_loop(0, 3, keep_adding, z)
        x_new = x.at[0].set(z[5])
        return x_new, z_new

    x, z = (jnp.arange(9000.0).reshape(90, 100) + i for i in range(2))
    wanted = [np.asarray(each) for each in fun(x, z)]
    plain, ours = (compiled(f, x, z, donate_argnums=(0, 1)) for f in (fun, scheduled(fun)))
    assert copied_bytes(ours, x) <= 2 * x.nbytes < copied_bytes(plain, x)
    for result, expected in zip(ours(x, z), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)
