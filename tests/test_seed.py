"""The function of the README: read one element, then add to it in place.

On CPU plain `jit` copies the whole buffer for it (jax-ml/jax#25399, openxla/xla#20440).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import before, scheduled
from tests.hlo import compiled, control_edges, copied_bytes, temp_bytes

N = 1000
ROUNDS = 7
SCALARS = 1000  # bytes: the temporary memory of loops holds counters and indices


@scheduled(infer=False)
def declared(x):
    y = x[0, 0]
    x_new = x.at[0, 0].add(1)
    before(y, x_new)
    return x_new, y


@scheduled
def inferred(x):
    y = x[0, 0]
    return x.at[0, 0].add(1), y


@scheduled(infer=False)
def declared_slice(x):
    y = lax.dynamic_slice(x, (0, 0), (1, 1))
    x_new = lax.dynamic_update_slice(x, y + 1, (0, 0))
    before(y, x_new)
    return x_new, y[0, 0]


@scheduled
def inferred_slice(x):
    y = lax.dynamic_slice(x, (0, 0), (1, 1))
    return lax.dynamic_update_slice(x, y + 1, (0, 0)), y[0, 0]


@scheduled(infer=False)
def declared_loop(x):
    def body(i, carry):
        x, total = carry
        y = x[i, i]
        x_new = x.at[i, i].add(1)
        before(y, x_new)
        return x_new, total + y

    return lax.fori_loop(0, ROUNDS, body, (x, jnp.float32(0)))


@scheduled
def inferred_loop(x):
    def body(i, carry):
        x, total = carry
        y = x[i, i]
        return x.at[i, i].add(1), total + y

    return lax.fori_loop(0, ROUNDS, body, (x, jnp.float32(0)))


@scheduled(infer=False)
def declared_slice_loop(x):
    def body(i, carry):
        x, total = carry
        y = lax.dynamic_slice(x, (i, i), (1, 1))
        x_new = lax.dynamic_update_slice(x, y + 1, (i, i))
        before(y, x_new)
        return x_new, total + y[0, 0]

    return lax.fori_loop(0, ROUNDS, body, (x, jnp.float32(0)))


def once(x):
    y = x[0, 0]
    x[0, 0] += 1
    return x, y


def rounds(x):
    total = np.float32(0)
    for i in range(ROUNDS):
        total += x[i, i]
        x[i, i] += 1
    return x, total


CASES = [
    (declared, once, "slice"),
    (inferred, once, "slice"),
    (declared_slice, once, "dynamic_slice"),
    (inferred_slice, once, "dynamic_slice"),
    (declared_loop, rounds, "dynamic_slice"),
    (inferred_loop, rounds, "dynamic_slice"),
    (declared_slice_loop, rounds, "dynamic_slice"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0].__name__)
def case(request):
    fun, reference, read = request.param
    x = jax.ShapeDtypeStruct((N, N), jnp.float32)
    return compiled(fun, x, donate_argnums=0), reference, read


@pytest.fixture
def x():
    return np.arange(N * N, dtype=np.float32).reshape(N, N)


def test_no_copy_is_left(case, x):
    program, *_ = case
    assert copied_bytes(program, x) == 0


def test_no_temporary_memory_is_needed(case):
    program, reference, *_ = case
    if reference is once:
        assert temp_bytes(program) == 0
    else:
        assert temp_bytes(program) < SCALARS


def test_the_read_is_ordered_before_the_write(case):
    program, _, read = case
    writes = {"scatter-add", "dynamic_update_slice"}
    assert any(read in first and writes & second for first, second in control_edges(program))


def test_the_result_is_in_the_memory_of_the_argument(case, x):
    program, *_ = case
    given = jnp.array(x)
    address = given.unsafe_buffer_pointer()
    x_new, _ = program(given)
    assert given.is_deleted()
    assert x_new.unsafe_buffer_pointer() == address


def test_the_result_is_right(case, x):
    program, reference, *_ = case
    x_new, y = program(jnp.array(x))
    expected_x, expected_y = reference(x.copy())
    np.testing.assert_array_equal(x_new, expected_x)
    np.testing.assert_array_equal(y, expected_y)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_eager_code_computes_the_same(case, x):
    fun, reference, *_ = case
    x_new, y = fun(jnp.array(x))
    expected_x, expected_y = reference(x.copy())
    np.testing.assert_array_equal(x_new, expected_x)
    np.testing.assert_array_equal(y, expected_y)


def test_without_inference_an_undeclared_order_is_left_to_xla():
    def read_and_add(x):
        y = x[0, 0]
        return x.at[0, 0].add(1), y

    x = jnp.zeros((N, N))
    plain = jax.make_jaxpr(read_and_add)(x)
    assert str(jax.make_jaxpr(scheduled(read_and_add, infer=False))(x)) == str(plain)
