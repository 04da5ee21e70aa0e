"""`assert_in_place`: what passes, what fails, and what the failure says."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import ALL
from jaxsched import ScheduleError, assert_in_place, explain, scheduled
from tests.reported import REPORTED, I, X, kept, loop, seed, seed_scheduled

UPDATES = [p.name for p in ALL.values() if p.hazard and p.category == "in-place"]


@functools.cache
def copies_much(name):
    program = ALL[name]
    fun, args = program.build()
    report = explain(fun, donate_argnums=program.donate, infer=False)(*args)
    return any(copy.nbytes >= program.buffer_bytes(args) // 2 for copy in report.copies)


@pytest.mark.parametrize("name", UPDATES[::2])
def test_scheduled_programs_pass(name):
    program = ALL[name]
    fun, args = program.build()
    assert_in_place(scheduled(fun), *args, donate_argnums=program.donate)


@pytest.mark.parametrize("name", UPDATES[1::2])
def test_plain_programs_fail_where_they_copy(name):
    program = ALL[name]
    fun, args = program.build()
    if not copies_much(name):
        return assert_in_place(fun, *args, donate_argnums=program.donate)
    with pytest.raises(AssertionError, match="does not update its donated arguments in place") as e:
        assert_in_place(fun, *args, donate_argnums=program.donate)
    file = program.lines("write")[0][0].rpartition("/")[2]
    assert re.search(rf"[\d,]+ bytes of .*\n +for +{file}:\d+  \S", str(e.value))
    assert "fix    @scheduled" in str(e.value)


def test_the_text():
    with pytest.raises(AssertionError) as error:
        assert_in_place(seed, X)
    assert str(error.value) == (
        "`seed` does not update its donated arguments in place: 8,000,000 bytes are copied,"
        " 4,000,000 bytes are temporary memory.\n"
        "  where: 2 x 4,000,000 bytes of x, once\n"
        "      for    reported.py:17  x_new = x.at[0, 0].add(1)\n"
        "      why    the old contents may be read after the write\n"
        "             reported.py:16  y = x[0, 0]\n"
        "      fix    @scheduled\n"
        "  legal: no copy of x (4,000,000 bytes), and less than 4,000,000 bytes of temporary"
        " memory."
    )


def test_the_text_of_a_loop():
    with pytest.raises(AssertionError, match="in a loop, 20 times: 80,000,000 bytes"):
        assert_in_place(loop, X)


def test_temporary_memory_of_the_buffers_size_fails():
    def softmax(x):
        e = jnp.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    with pytest.raises(AssertionError) as error:
        assert_in_place(softmax, X)
    assert "where: no copy; what XLA computes in between is as large\n" in str(error.value)


def test_copies_of_what_is_not_donated_do_not_count():
    @scheduled
    def fun(x, v):
        return x.at[0].set(1.0), v.at[0].set(2.0)

    assert_in_place(fun, X, X)
    with pytest.raises(AssertionError, match="bytes of x, once"):
        assert_in_place(scheduled(kept), X, X)


def test_forms_of_functions():
    assert_in_place(seed_scheduled, X)
    assert_in_place(jax.jit(seed_scheduled, donate_argnums=0), X)
    assert_in_place(lambda i, x: (x.at[i].set(0.0),), I, X, donate_argnums=1)
    assert_in_place(lambda x, *, n: x.at[n].set(0.0), X, n=I)
    assert_in_place(scheduled(lambda state: {"a": state["a"].at[0].set(0.0)}), {"a": X})


def test_nothing_donated():
    with pytest.raises(ScheduleError) as error:
        assert_in_place(jax.jit(seed), X)
    assert str(error.value) == (
        "`assert_in_place` was given `seed`, which no argument is donated to.\n"
        "  where: assert_in_place(fun, ...)\n"
        "  legal: donate_argnums=0 or other positions; in the `jax.jit` of a jitted function."
    )


def test_the_function_is_not_run():
    x = jnp.ones((30, 30))
    assert_in_place(seed_scheduled, x)
    assert not x.is_deleted()
    assert REPORTED["seed_scheduled"][0] is seed_scheduled
