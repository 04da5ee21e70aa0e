"""Every kind of value passes: effects, references, dtypes, keys, weak types, empty arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata

from jaxsched import ScheduleError, before, scheduled
from tests.common import X, assert_same, undeclared
from tests.hlo import compiled, copied_bytes

### What a function does beside its results


def test_ordered_callbacks_keep_their_order():
    log = []

    @scheduled
    def fun(x):
        for i in range(3):
            y = x[i]
            io_callback(lambda y: log.append(float(y)), None, y[0], ordered=True)
            x = x.at[i].set(0)
            before(y, x)
        io_callback(lambda y: log.append(float(y)), None, x.sum(), ordered=True)
        return x

    for call in fun, jax.jit(fun):
        log.clear()
        assert_same(call(X), np.zeros_like(X))
        jax.effects_barrier()
        assert log == [*X[:, 0], 0.0]


def test_callbacks_that_must_happen_do_though_nobody_uses_their_result():
    log = []

    @scheduled
    def fun(x):
        y = x[0]
        jax.debug.callback(lambda y: log.append(float(y)), y[0])
        x = x.at[0].set(0)
        jax.debug.callback(lambda y: log.append(float(y)), x[0, 0])
        return x

    for call in fun, jax.jit(fun):
        log.clear()
        jax.block_until_ready(call(X))
        jax.effects_barrier()
        assert sorted(log) == [0.0, X[0, 0]]


def test_prints(capfd):
    @scheduled
    def fun(x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        x = x.at[0].set(x[1])
        jax.debug.print("then {}", x[0, 0], ordered=True)
        return x

    for call in fun, jax.jit(fun):
        call(X)
        jax.effects_barrier()
        assert capfd.readouterr().out == f"first {X[0, 0]}\nthen {X[1, 0]}\n"


def test_prints_in_loops_keep_their_order(capfd):
    @jax.jit
    @scheduled
    def fun(x):
        def body(i, x):
            jax.debug.print("{}", x[i, 0], ordered=True)
            return x.at[i].set(x[i + 1])

        return lax.fori_loop(0, 2, body, x)

    fun(X)
    jax.effects_barrier()
    assert capfd.readouterr().out == f"{X[0, 0]}\n{X[1, 0]}\n"


def test_a_callback_orders_nothing_that_is_pure():
    """The write may not be moved in front of the read though a callback stands between them."""

    def fun(x, order):
        y = x[0]
        jax.debug.callback(lambda _: None, y)
        x_new = x.at[0].set(1)
        order(y, x_new)
        return x_new, y

    program = compiled(scheduled(lambda x: fun(x, before), infer=False), X, donate_argnums=0)
    assert copied_bytes(program, X) == 0


def test_declared_order_of_callbacks_against_the_source_is_refused():
    @scheduled
    def fun(x):
        first = io_callback(lambda y: y, jax.typeof(x[0]), x[0], ordered=True)
        second = io_callback(lambda y: y, jax.typeof(x[1]), x[1], ordered=True)
        before(second, first)
        return first, second

    with pytest.raises(ScheduleError, match="contradicts"):
        fun(X)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_mutable_references(transform):
    @transform
    @scheduled
    def inside(x):
        reference = jax.new_ref(x)
        y = reference[0]
        reference[1] = y * 2
        x = reference[...]
        x_new = x.at[0].set(0)
        before(y, x_new)
        return x_new, y, reference[...]

    written = X.copy()
    written[1] = X[0] * 2
    cleared = written.copy()
    cleared[0] = 0
    assert_same(inside(X), (cleared, X[0], written))

    @transform
    @scheduled
    def argument(reference, x):
        y = x[0]
        reference[0] = y * 2
        x_new = x.at[0].set(reference[1])
        before(y, x_new)
        return x_new

    reference = jax.new_ref(jnp.array(X))
    expected = X.copy()
    expected[0] = X[1]
    assert_same(argument(reference, jnp.array(X)), expected)
    np.testing.assert_array_equal(reference[0], X[0] * 2)

    @transform
    @scheduled
    def closure(x):
        reference[2] = x[0]
        return x.at[0].set(reference[2] + 1)

    assert_same(closure(jnp.array(X))[0], X[0] + 1)
    np.testing.assert_array_equal(reference[2], X[0])


### Types


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "dtype",
    "bool int4 uint8 int16 int32 uint32 bfloat16 float16 float32 complex64 float8_e5m2".split(),
)
def test_dtypes(dtype, transform):
    x = (X > 2) if dtype == "bool" else X.astype(jnp.dtype(dtype))

    @transform
    @scheduled
    def swap(x):
        a, b = x[0], x[2]
        x_new = x.at[0].set(b).at[2].set(a)
        before((a, b), x_new)
        return x_new

    given = swap(x)
    assert given.dtype == x.dtype
    np.testing.assert_array_equal(given, x[[2, 1, 0]])


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_wide_dtypes(dtype):
    with jax.enable_x64(True):
        x = X.astype(dtype)
        y, x_new = jax.jit(scheduled(lambda x: (x[0], x.at[0].set(x[1] * 3))))(x)
        assert (y.dtype, x_new.dtype) == (x.dtype, x.dtype)
        np.testing.assert_array_equal(y, x[0])
        np.testing.assert_array_equal(x_new, np.stack([x[1] * 3, x[1], x[2]]))


def test_the_mode_of_wide_dtypes_may_change_between_calls():
    fun = scheduled(lambda x: (x[0], x.at[0].set(x[1] * 3)))
    assert fun(X)[0].dtype == np.float32
    with jax.enable_x64(True):
        assert fun(X.astype(np.float64))[0].dtype == np.float64
        assert jax.jit(fun)(X.astype(np.float64))[1].dtype == np.float64
    assert fun(X)[0].dtype == np.float32


def test_weak_types_are_kept():
    def fun(x, scale):
        y = x[0]
        x_new = x.at[0].set(y * scale)
        return x_new, y * 1.0, scale, scale * 2, 3.0, jnp.asarray(2) * scale

    scale = jnp.asarray(2.0)
    for transform in lambda f: f, jax.jit:
        given = transform(scheduled(fun))(jnp.array(X), scale)
        expected = transform(fun)(jnp.array(X), scale)
        assert jax.tree.map(jax.typeof, given) == jax.tree.map(jax.typeof, expected)


def test_weak_types_are_kept_through_a_pin():
    def fun(x):
        total = jnp.asarray(1.0)

        def body(carry, i):
            x, total = carry
            y = x[i, 0]
            return (x.at[i].set(0), total + y), total

        return lax.scan(body, (x, total), jnp.arange(3))

    given, expected = jax.jit(scheduled(fun))(X), jax.jit(fun)(X)
    assert jax.tree.map(jax.typeof, given) == jax.tree.map(jax.typeof, expected)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)])
def test_arrays_without_elements(shape):
    @jax.jit
    @scheduled
    def fun(x):
        y = x * 2
        x_new = x + 1
        z = x_new.sum()
        before(y, x_new, z)
        return x_new, y, z

    x = np.zeros(shape, np.float32)
    assert_same(fun(x), (x, x, np.float32(0)))
    assert_same(jax.jit(scheduled(lambda x: (x[:0], x.at[:0].set(1))))(X), (X[:0], X))


def test_random_keys():
    def fun(keys, order=before):
        key = keys[0]
        new = keys.at[0].set(jax.random.fold_in(keys[1], 3))
        order(key, new)
        return new, jax.random.normal(key, (3,)), key

    keys = jax.random.split(jax.random.key(7), 40)
    expected = fun(keys, undeclared)
    for call in scheduled(fun), jax.jit(scheduled(fun), donate_argnums=0):
        given = call(jax.random.clone(keys))
        assert jax.tree.map(jax.typeof, given) == jax.tree.map(jax.typeof, expected)
        for a, b in zip(given, expected, strict=True):
            data = jax.random.key_data if a.dtype == keys.dtype else np.asarray
            np.testing.assert_array_equal(data(a), data(b))


def test_results_may_be_the_same_value_several_times():
    @scheduled
    def fun(x):
        y = x[0]
        x_new = x.at[0].set(1)
        before(y, x_new)
        return x_new, x_new, y, y, x_new.reshape(-1), x, 3

    written = X.copy()
    written[0] = 1
    expected = written, written, X[0], X[0], written.reshape(-1), X, 3
    for call in fun, jax.jit(fun):
        given = call(jnp.array(X))
        assert_same(given[:-1], expected[:-1])
        assert given[-1] == 3


def test_metadata_of_the_users_operations_is_kept():
    def fun(x):
        y = x[0]
        with set_xla_metadata(mine="1"):
            z = jnp.sin(y)
        return x.at[0].set(z), y

    assert 'mine = "1"' in jax.jit(scheduled(fun)).lower(X).as_text()
