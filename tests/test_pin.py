"""The rules of the `pin` primitive: under every transformation it is the identity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad

from jaxsched._hlo._control import MARK_KEY, mark
from jaxsched._pin import pin_p
from tests.hlo import compiled, text

X = np.arange(12, dtype=np.float32).reshape(3, 4)
V = np.linspace(-1, 1, 4, dtype=np.float32)


def pin(*values, buffers=1):
    return pin_p.bind(*values, buffers=buffers)


def identity(*values, buffers=1):
    return list(values)


def through(pin):
    """A function which uses both results of a pin in ways that tell them apart."""

    def fun(x, v):
        x, v = pin(x, v)
        return jnp.sin(x) * v, v @ v

    return fun


def assert_same(given, expected):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(a, b, rtol=1e-6)


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "jvp": lambda f: lambda x, v: jax.jvp(f, (x, v), (x + 1, v - 1)),
    "jvp of one": lambda f: lambda x, v: jax.jvp(lambda x: f(x, v), (x,), (x + 1,)),
    "jvp of the other": lambda f: lambda x, v: jax.jvp(lambda v: f(x, v), (v,), (v + 1,)),
    "linearize": lambda f: lambda x, v: jax.linearize(f, x, v)[1](x, v),
    "vjp": lambda f: lambda x, v: jax.vjp(f, x, v)[1]((x, jnp.float32(2))),
    "grad of one": lambda f: jax.grad(lambda x, v: f(x, v)[0].sum()),
    "grad of the other": lambda f: jax.grad(lambda x, v: f(x, v)[1], argnums=1),
    "grad without it": lambda f: jax.grad(lambda x, v: f(x, v)[1], argnums=0),
    "jacrev": lambda f: jax.jacrev(f, argnums=(0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, argnums=(0, 1)),
    "hessian": lambda f: jax.hessian(lambda x, v: f(x, v)[0].sum(), argnums=(0, 1)),
    "vmap": lambda f: lambda x, v: jax.vmap(f)(jnp.stack([x, x + 1]), jnp.stack([v, v * 2])),
    "vmap of one": lambda f: lambda x, v: jax.vmap(f, (1, None))(x[:, :, None] + x[0], v),
    "vmap of the other": lambda f: lambda x, v: jax.vmap(f, (None, 1), (1, 0))(x, v[:, None] * v),
    "vmap of grad": lambda f: lambda x, v: jax.vmap(jax.grad(lambda v: f(x, v)[1]))(v * x),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x, v: f(x, v)[0].sum()), (0, 1)),
    "scan": lambda f: lambda x, v: lax.scan(lambda c, _: (f(c, v)[0], None), x, length=3)[0],
    "grad of scan": lambda f: jax.grad(
        lambda x, v: lax.scan(lambda c, _: (f(c, v)[0], None), x, length=3)[0].sum(), (0, 1)
    ),
    "cond": lambda f: lambda x, v: lax.cond(v[0] < 0, f, lambda x, v: (x, v[0]), x, v),
    "export": lambda f: lambda x, v: jax.export.export(jax.jit(f))(x, v).call(x, v),
    "disable_jit": lambda f: lambda x, v: _without_jit(f, x, v),
}


def _without_jit(f, x, v):
    with jax.disable_jit():
        return jax.jit(f)(x, v)


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=list(TRANSFORMATIONS))
def test_a_pin_is_the_identity_under(transform):
    x, v = jnp.array(X), jnp.array(V)
    assert_same(transform(through(pin))(x, v), transform(through(identity))(x, v))


def test_linear_transpose():
    def fun(x, v):
        x, v = pin(x, v)
        return 2 * x, 3 * v

    given = jax.linear_transpose(fun, X, V)((jnp.array(X), jnp.array(V)))
    assert_same(given, (2 * X, 3 * V))


def test_linear_transpose_of_a_result_that_is_not_used():
    given = jax.linear_transpose(lambda x, v: pin(x, v)[0], X, V)(jnp.array(X))
    assert_same(given, (X, np.zeros_like(V)))


def pins(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive is pin_p]


def test_tangents_are_pinned_as_their_values_are():
    fun = functools.partial(jax.jvp, pin)
    jaxpr = jax.make_jaxpr(fun)((X, V), (X, V))
    assert [len(eqn.invars) for eqn in pins(jaxpr)] == [2, 2]
    assert [eqn.params["buffers"] for eqn in pins(jaxpr)] == [1, 1]


def test_zeros_among_the_tangents_are_not_pinned():
    jaxpr = jax.make_jaxpr(lambda x, v: jax.jvp(lambda x: pin(x, v), (x,), (x,)))(X, V)
    assert [len(eqn.invars) for eqn in pins(jaxpr)] == [2, 1]


def test_without_a_tangent_of_a_buffer_no_tangent_is_pinned():
    jaxpr = jax.make_jaxpr(lambda x, v: jax.jvp(lambda v: pin(x, v), (v,), (v,)))(X, V)
    assert [len(eqn.invars) for eqn in pins(jaxpr)] == [2]


def test_cotangents_are_pinned_as_their_values_are():
    def fun(x, v, cotangent):
        return jax.vjp(lambda x, v: pin(x, v, buffers=1), x, v)[1](cotangent)

    jaxpr = jax.make_jaxpr(fun)(X, V, [X, V])
    assert [len(eqn.invars) for eqn in pins(jaxpr)] == [2, 2]


def test_integers_are_pinned_and_have_no_tangent():
    def fun(x):
        x, i = pin(x, jnp.arange(3))
        return (x[i] * 2).sum()

    assert_same(jax.grad(fun)(jnp.array(X)), np.full_like(X, 2))


def test_zeros_stay_symbolic():
    zero = ad.Zero(jax.typeof(jnp.array(V)).to_tangent_aval())
    seen = []

    def fun(x, v):
        _, tangents = ad.primitive_jvps[pin_p]((x, v), (x, zero), buffers=1)
        seen.extend(map(type, tangents))
        return tangents[0]

    jax.make_jaxpr(fun)(X, V)
    assert seen[1] is ad.Zero
    assert seen[0] is not ad.Zero


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: jnp.array([True, False]), id="bool"),
        pytest.param(lambda: jnp.arange(3, dtype=jnp.uint8), id="uint8"),
        pytest.param(lambda: jnp.arange(3, dtype=jnp.int4), id="int4"),
        pytest.param(lambda: jnp.ones(3, jnp.bfloat16), id="bfloat16"),
        pytest.param(lambda: jnp.ones(3, jnp.float8_e4m3fn), id="float8"),
        pytest.param(lambda: jnp.ones(3, jnp.complex64) * 1j, id="complex64"),
        pytest.param(lambda: jnp.zeros((0, 4)), id="empty"),
        pytest.param(lambda: jnp.asarray(2.5), id="weak"),
        pytest.param(lambda: jax.random.key(0), id="key"),
        pytest.param(lambda: jax.random.split(jax.random.key(0), 3), id="keys"),
    ],
)
def test_every_kind_of_array_passes(value, transform):
    def plain(array):
        data = jax.random.key_data(array) if _is_key(array) else array
        return np.asarray(data).astype(np.complex64)

    value = value()
    results = transform(lambda value: pin(value, value[..., None]))(value)
    assert [jax.typeof(each) for each in results] == [
        jax.typeof(value),
        jax.typeof(value[..., None]),
    ]
    np.testing.assert_array_equal(plain(results[0]), plain(value))
    np.testing.assert_array_equal(plain(results[1]), plain(value[..., None]))


def _is_key(array):
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def test_a_pin_is_lowered_to_one_marked_barrier():
    lowered = jax.jit(lambda x, v: pin(x, v)).lower(X, V).as_text()
    [line] = [line for line in lowered.splitlines() if "optimization_barrier" in line]
    assert f'{MARK_KEY} = "{mark(1, 2)}"' in line
    assert "tensor<3x4xf32>, tensor<4xf32>" in line


def test_a_pinned_argument_keeps_its_sharding():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.NamedSharding(mesh, jax.P("rows"))
    x = jax.device_put(np.ones((8, 4), np.float32), rows)
    y, _ = jax.jit(lambda x, v: pin(x, v))(x, jax.device_put(V, jax.NamedSharding(mesh, jax.P())))
    assert y.sharding.is_equivalent_to(rows, 2)
    assert jax.typeof(y).sharding.spec == jax.P("rows", None)


def test_eager_results_are_the_given_arrays():
    x, v = jnp.array(X), jnp.array(V)
    y, w = pin(x, v)
    assert y is x
    assert w is v


def test_a_pin_without_users_is_removed():
    program = compiled(lambda x, v: (pin(x, v), x + 1)[1], X, V)
    assert "opt-barrier" not in text(program)
    np.testing.assert_array_equal(program(X, V), X + 1)


def test_references_beside_a_pin_are_discharged():
    @jax.jit
    def fun(x, v):
        reference = jax.new_ref(x)
        x, v = pin(reference[...], v)
        reference[0] = v
        return reference[...] + x

    expected = X + X
    expected[0] = X[0] + V
    assert_same(fun(X, V), expected)
