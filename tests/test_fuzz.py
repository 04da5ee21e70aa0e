"""Random programs, a few of them: `python -m tests.fuzz` runs as many as there is time for."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxsched import scheduled
from tests.fuzz.__main__ import check_illegal
from tests.fuzz._check import Failure, check_plan, trace_and_plan
from tests.fuzz._compiled import check_batched, check_compiled, check_copies, check_gradient
from tests.fuzz._generate import Generator, forbid
from tests.fuzz._inplace import Machine
from tests.fuzz._program import source

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


@pytest.mark.parametrize("check", [check_compiled, check_copies, check_batched, check_gradient])
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


def test_failures_of_the_checks_name_their_kind():
    program = Generator(random.Random(0)).program()
    trace_and_plan(program)
    with pytest.raises(Failure, match="illegal order accepted"):
        check_illegal(program, "cycle")
