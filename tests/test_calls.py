"""`scheduled` takes every function and every argument that `jit` takes, and more."""

import functools
import inspect
import pickle
import threading
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import ScheduleError, before, scheduled
from tests.common import V, X, assert_same, push, push_numpy, undeclared

### Calls

CALLS = {
    "eager": scheduled(push),
    "eager without inference": scheduled(push, infer=False),
    "jit": jax.jit(scheduled(push)),
    "jit without inference": jax.jit(scheduled(push, infer=False)),
    "of jit": scheduled(jax.jit(push)),
    "jit of jit": jax.jit(scheduled(jax.jit(push))),
    "scheduled twice": scheduled(scheduled(push)),
    "scheduled in scheduled": scheduled(lambda x, v: scheduled(push)(x, v)),
    "compiled": lambda x, v: jax.jit(scheduled(push)).lower(x, v).compile()(x, v),
    "traced": lambda x, v: jax.jit(scheduled(push)).trace(x, v).lower().compile()(x, v),
    "exported": lambda x, v: jax.export.export(jax.jit(scheduled(push)))(x, v).call(x, v),
    "of a partial": scheduled(functools.partial(push, order=before)),
    "with keywords": lambda x, v: scheduled(push)(v=v, x=x),
    "jit with keywords": lambda x, v: jax.jit(scheduled(push))(x, v=v),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_every_way_to_call_it_computes_the_same(call):
    x, v = jnp.array(X), jnp.array(V)
    assert_same(call(x, v), push_numpy(X, V))
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize(
    "fun",
    [
        jax.jit(scheduled(push), donate_argnums=0),
        scheduled(jax.jit(push, donate_argnums=0)),
        functools.partial(jax.jit, donate_argnames="x")(scheduled(push)),
        jax.jit(scheduled(jax.jit(push, donate_argnums=0)), donate_argnums=0),
    ],
    ids=["jit", "of jit", "by name", "both"],
)
def test_a_donated_argument_becomes_the_result(fun):
    x = jnp.array(X)
    address = x.unsafe_buffer_pointer()
    result = fun(x, jnp.array(V))
    assert x.is_deleted()
    assert result[0].unsafe_buffer_pointer() == address
    assert_same(result, push_numpy(X, V))


def test_numpy_arguments_are_traced():
    assert_same(scheduled(push)(X, V), push_numpy(X, V))
    assert_same(scheduled(lambda x, s: x * s)(X, np.float32(2)), X * 2)


def test_export_with_symbolic_shapes():
    def swaps(x):
        step = lambda i, x: x.at[i].set(x[i + 1]).at[i + 1].set(x[i])
        return lax.fori_loop(0, 2, step, x)

    rows, columns = jax.export.symbolic_shape("rows, columns")
    shape = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    exported = jax.export.export(jax.jit(scheduled(swaps)))(shape)
    for x in X, np.ones((7, 2), np.float32):
        assert_same(exported.call(x), np.concatenate([x[[1, 2, 0]], x[3:]]))


def test_export_for_other_platforms():
    exported = jax.export.export(jax.jit(scheduled(push)), platforms=["cpu", "cuda", "tpu"])(X, V)
    assert_same(exported.call(X, V), push_numpy(X, V))


def test_a_decorator_stack_as_in_the_readme():
    @functools.partial(jax.jit, donate_argnums=0)
    @scheduled
    def fun(x, v):
        return push(x, v)

    assert_same(fun(jnp.array(X), V), push_numpy(X, V))


def test_a_decorator_with_options():
    @jax.jit
    @scheduled(infer=False)
    def fun(x, v):
        return push(x, v)

    assert_same(fun(X, V), push_numpy(X, V))


### Arguments


def powers(x, n, *, mode="set", scale=1.0):
    row = x[0] * scale
    for _ in range(n):
        row = row * row
    return x.at[0].set(row) if mode == "set" else x.at[0].add(row)


def powers_numpy(x, n, mode="set", scale=1.0):
    x = x.copy()
    row = (x[0] * np.float32(scale)) ** (2**n)
    x[0] = row if mode == "set" else x[0] + row
    return x


def test_what_is_no_array_is_seen_by_the_function_as_it_is():
    fun = scheduled(powers)
    assert_same(fun(X, 2), powers_numpy(X, 2))
    assert_same(fun(X, n=1, mode="add", scale=0.5), powers_numpy(X, 1, "add", 0.5))
    assert_same(fun(X, 3, mode="add"), powers_numpy(X, 3, "add"))


def test_static_arguments_of_jit_by_number_and_by_name():
    fun = jax.jit(scheduled(powers), static_argnums=1, static_argnames="mode")
    assert_same(fun(X, 2, mode="add", scale=0.5), powers_numpy(X, 2, "add", 0.5))
    fun = scheduled(jax.jit(powers, static_argnums=1, static_argnames=("mode",)))
    assert_same(fun(X, 2, mode="add", scale=0.5), powers_numpy(X, 2, "add", 0.5))


def test_static_names_follow_the_signature():
    fun = jax.jit(scheduled(powers), static_argnames=("n", "mode"))
    assert_same(fun(X, 2, mode="add"), powers_numpy(X, 2, "add"))
    assert_same(fun(X, n=1), powers_numpy(X, 1))


class Settings(typing.NamedTuple):
    rate: typing.Any
    name: str


def test_pytrees_with_arrays_and_other_values():
    @scheduled
    def fun(state, settings, nothing=None):
        assert (settings.name, nothing, state["steps"]) == ("sgd", None, 3)
        y = state["x"][0]
        x_new = state["x"].at[0].set(y * settings.rate)
        before(y, x_new)
        return {"x": x_new, "rest": [state["other"], (y,)], "none": None}

    given = fun({"x": X, "other": (V, V * 2), "steps": 3}, Settings(jnp.float32(0.5), "sgd"))
    x = X.copy()
    x[0] *= 0.5
    assert_same(given, {"x": x, "rest": [(V, V * 2), (X[0],)], "none": None})


def test_variadic_arguments():
    @scheduled
    def fun(x, *rows, first=0, **more):
        y = x[first]
        for i, row in enumerate([*rows, *more.values()]):
            x = x.at[i].set(row + y)
        return x

    expected = np.stack([V + X[1], 2 * V + X[1], 3 * V + X[1]])
    assert_same(fun(X, V, 2 * V, first=1, last=3 * V), expected)
    assert_same(jax.jit(fun, static_argnames="first")(X, V, 2 * V, first=1, last=3 * V), expected)


def test_no_arguments_and_no_results():
    table = jnp.array(X)
    assert_same(scheduled(lambda: table.at[0].set(table[1]))(), X[[1, 1, 2]])
    assert scheduled(lambda x: None)(X) is None
    assert scheduled(lambda x: [(), {}])(X) == [(), {}]


class Model:
    def __init__(self, weights):
        self.weights = weights

    @scheduled
    def method(self, x):
        return push(x, self.weights)

    @classmethod
    @scheduled
    def of_class(cls, x):
        return push(x, jnp.array(V)), cls.__name__ == "Model" and x[0]

    @staticmethod
    @scheduled
    def static(x):
        return push(x, jnp.array(V))

    @scheduled
    def __call__(self, x):
        return push(x, self.weights)

    @functools.partial(jax.jit, static_argnums=0)
    @scheduled
    def jitted(self, x):
        return push(x, self.weights)


def test_methods():
    model, expected = Model(jnp.array(V)), push_numpy(X, V)
    assert_same(model.method(X), expected)
    assert_same(jax.jit(model.method)(X), expected)
    assert_same(Model.of_class(X)[0], expected)
    assert_same(model.static(X), expected)
    assert_same(model(X), expected)
    assert_same(model.jitted(X), expected)
    assert_same(scheduled(model)(X), expected)


@jax.tree_util.register_pytree_node_class
class Layer(Model):
    def tree_flatten(self):
        return (self.weights,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_methods_of_a_pytree_trace_what_it_holds():
    layer = Layer(jnp.array(V))
    assert_same(layer.method(X), push_numpy(X, V))
    assert_same(jax.jit(Layer.method)(layer, X), push_numpy(X, V))
    gradient = jax.grad(lambda layer: layer.method(X)[0].sum())(layer)
    np.testing.assert_allclose(gradient.weights, np.sin(X[0]), rtol=1e-6)


class Grid:
    """Has a shape and a dtype as an array has them, and is none."""

    def __init__(self, scale):
        self.shape, self.dtype, self.scale = (3, 4), np.dtype("float32"), scale

    @scheduled
    def fill(self, x):
        return jnp.full(self.shape, self.scale, self.dtype) + x


def test_an_object_with_a_shape_and_a_dtype_is_no_array():
    assert_same(Grid(2).fill(X), X + 2)


def test_the_signature_the_name_and_the_documentation_are_kept():
    def documented(x: jax.Array, *, scale: float = 2.0) -> jax.Array:
        """Documented."""
        return x * scale

    for fun in scheduled(documented), scheduled(documented, infer=False), scheduled()(documented):
        assert (fun.__name__, fun.__doc__) == ("documented", "Documented.")
        assert fun.__qualname__ == documented.__qualname__
        assert inspect.signature(fun) == inspect.signature(documented)
        assert inspect.unwrap(fun) is documented
        assert jax.jit(fun).lower(X).as_text().startswith("module @jit_documented")


@scheduled
def module_level(x):
    return push(x, V)


def test_a_scheduled_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(module_level)) is module_level


### Closures


def test_closures_over_arrays_of_every_kind():
    big, small, numpy = jnp.array(X), jnp.float32(3), np.arange(4, dtype=np.float32)

    @scheduled
    def fun(v):
        return push(big * small + numpy, v)

    expected = push_numpy(X * 3 + numpy, V)
    assert_same(fun(V), expected)
    assert_same(jax.jit(fun)(V), expected)


def test_a_closed_over_array_is_written_to_a_copy():
    table = jnp.array(X)

    @scheduled
    def fun(v):
        y = table[0]
        new = table.at[0].set(v)
        before(y, new)
        return new, y

    expected = X.copy()
    expected[0] = V
    for call in fun, jax.jit(fun):
        assert_same(call(V), (expected, X[0]))
        np.testing.assert_array_equal(table, X)


def test_a_closure_over_a_large_array_makes_no_second_constant():
    big = jnp.ones((1000, 1000))
    jaxpr = jax.make_jaxpr(scheduled(lambda v: push(big, v)))(jnp.ones(1000))
    assert [const is big for const in jaxpr.consts] == [True]


@pytest.mark.parametrize("over", [jax.jit, jax.vmap, jax.grad, jax.checkpoint])
def test_closures_over_tracers_of_an_outer_function(over):
    def outer(fun):
        def outer(v):
            w = v * 2
            inner = fun(lambda x: push(x, w, undeclared if fun is plain else before))
            return inner(jnp.array(X))[0].sum()

        return outer

    def plain(fun):
        return fun

    given = np.float32(2) if over is jax.grad else V
    assert_same(over(outer(scheduled))(given), over(outer(plain))(given))


### Modes


def test_it_leaks_no_tracer():
    with jax.checking_leaks():
        assert_same(jax.jit(scheduled(push))(X, V), push_numpy(X, V))
        assert_same(scheduled(push)(X, V), push_numpy(X, V))


def test_it_promotes_no_ranks_and_no_dtypes():
    def fun(x, v):
        y = x[0]
        x_new = x.at[0].set(y * v)
        before(y, x_new)
        return x_new, y

    expected = X.copy()
    expected[0] = X[0] * V
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert_same(jax.jit(scheduled(fun))(X, V), (expected, X[0]))
        assert_same(jax.vmap(scheduled(fun))(X[None], V[None]), (expected[None], X[:1]))


def test_it_looks_for_nan():
    with jax.debug_nans(True):
        assert_same(jax.jit(scheduled(push))(X, V), push_numpy(X, V))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(jax.jit(scheduled(lambda x: push(jnp.log(-x), V)))(X))


def test_without_jit():
    with jax.disable_jit():
        assert_same(jax.jit(scheduled(push))(X, V), push_numpy(X, V))


def test_it_is_traced_once_for_one_type():
    traces = []

    @jax.jit
    @scheduled
    def fun(x, v):
        traces.append(1)
        return push(x, v)

    fun(X, V)
    fun(X + 1, V)
    assert len(traces) == 1


def test_threads():
    results, errors = {}, []

    def work(n):
        try:
            fun = jax.jit(scheduled(lambda x, v: push(x * n, v)))
            results[n] = [np.asarray(each) for each in fun(X, V)]
            with pytest.raises(ScheduleError):
                before(results[n][0], results[n][1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for n in range(8):
        assert_same(tuple(results[n]), push_numpy(X * np.float32(n), V))


def test_before_in_a_thread_of_its_own_is_outside():
    errors = []

    @scheduled
    def fun(x):
        y, z = x * 2, x + 1

        def work():
            try:
                before(y, z)
            except ScheduleError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return y, z

    fun(X)
    assert "outside of a scheduled function" in str(errors[0])
