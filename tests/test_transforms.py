"""Derivatives, batches and shards of scheduled functions, and scheduled functions of those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

from jaxsched import ScheduleError, before, scheduled
from jaxsched._pin import pin_p
from tests.common import V, X, assert_same, pins, plain_push, push, undeclared

### Derivatives and batches


def loss(fun):
    def loss(x, v):
        x, total = fun(x, v)
        return (x**2).sum() + total**3

    return loss


def custom_jvp(fun):
    wrapped = jax.custom_jvp(lambda x, v: fun(x, v))

    @wrapped.defjvp
    def rule(primals, tangents):
        return jax.jvp(fun, primals, jax.tree.map(lambda t: 2 * t, tangents))

    return wrapped


def custom_vjp(fun):
    wrapped = jax.custom_vjp(lambda x, v: fun(x, v))
    wrapped.defvjp(
        lambda x, v: jax.vjp(fun, x, v),
        lambda pull, cotangent: jax.tree.map(lambda c: 2 * c, pull(cotangent)),
    )
    return wrapped


DERIVATIVES = {
    "grad": lambda f: jax.grad(loss(f), (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(loss(f)),
    "jvp": lambda f: lambda x, v: jax.jvp(f, (x, v), (v * x, v)),
    "vjp": lambda f: lambda x, v: jax.vjp(f, x, v)[1]((x, v[0])),
    "linearize": lambda f: lambda x, v: jax.linearize(f, x, v)[1](v * x, v),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "hessian": lambda f: jax.hessian(loss(f), 1),
    "third derivative": lambda f: jax.jacfwd(jax.hessian(lambda v, x: loss(f)(x, v))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1)),
    "checkpoint with a policy": lambda f: jax.grad(
        jax.checkpoint(loss(f), policy=jax.checkpoint_policies.dots_saveable), (0, 1)
    ),
    "custom_jvp": lambda f: jax.grad(loss(custom_jvp(f)), (0, 1)),
    "custom_vjp": lambda f: jax.grad(loss(custom_vjp(f)), (0, 1)),
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "vmap of both": lambda f: lambda x, v: jax.vmap(f)(jnp.stack([x, -x]), jnp.stack([v, v])),
    "vmap twice": lambda f: jax.vmap(jax.vmap(f, (None, 0)), (0, None)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f), 1), (None, 0)),
    "grad of vmap": lambda f: jax.grad(
        lambda x, v: jax.vmap(lambda v: loss(f)(x, v))(jnp.stack([v, 2 * v])).sum(), (0, 1)
    ),
    "vmap with a name": lambda f: jax.vmap(
        lambda x, v: lax.psum(f(x, v)[1], "batch"), (None, 0), axis_name="batch"
    ),
    "map": lambda f: lambda x, v: lax.map(lambda v: f(x, v), v),
}


def batched(name):
    return ("vmap" in name and name not in ("vmap of both", "grad of vmap")) or name == "map"


@pytest.mark.parametrize("where", ["over", "inside", "jit over", "jit inside"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_and_batches(name, where):
    transform = DERIVATIVES[name]
    if "over" in where:
        fun = scheduled(transform(push))
    else:
        fun = transform(scheduled(push))
    if where == "jit over":
        fun = jax.jit(fun)
    if where == "jit inside":
        fun = transform(jax.jit(scheduled(push)))
    v = np.stack([V, V + 1, V * 2]) if batched(name) else V
    x = np.stack([X, X + 1]) if name == "vmap twice" else X
    # The first argument of the third derivative is the one which is differentiated.
    args = (v, x) if name == "third derivative" else (x, v)
    args = jax.tree.map(jnp.array, args)
    assert_same(fun(*args), transform(plain_push)(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
@pytest.mark.parametrize("where", ["over", "inside", "jit inside", "checkpoint inside"])
def test_before_in_a_rule_of_a_custom_derivative(rule, where):
    """Such a rule runs when the function is differentiated, which may be long after its plan."""

    def scale(x, order):
        y = x[0]
        x_new = x.at[0].set(y * 2)
        order(y, x_new)
        return x_new

    def build(order):
        if rule == "jvp":
            fun = jax.custom_jvp(lambda x: scale(x, order))
            fun.defjvp(lambda p, t: (fun(*p), scale(t[0], order)))
        else:
            fun = jax.custom_vjp(lambda x: scale(x, order))
            fun.defvjp(lambda x: (fun(x), None), lambda _, c: (scale(c, order),))
        return lambda x: (fun(x) ** 2).sum()

    fun = build(before)
    given = {
        "over": scheduled(jax.grad(fun)),
        "inside": jax.grad(scheduled(fun)),
        "jit inside": jax.grad(jax.jit(scheduled(fun))),
        "checkpoint inside": jax.grad(jax.checkpoint(scheduled(fun))),
    }[where]
    expected = jax.grad(build(undeclared))
    for _ in range(2):
        assert_same(given(jnp.array(X)), expected(jnp.array(X)))


def checked_push(x, v, order=before):
    checkify.check(v[0] < 0, "the first number is not negative")
    return push(x, v, order)


@pytest.mark.parametrize(
    "fun",
    [
        checkify.checkify(scheduled(checked_push)),
        checkify.checkify(jax.jit(scheduled(checked_push))),
        jax.jit(scheduled(checkify.checkify(checked_push))),
        checkify.checkify(scheduled(checked_push), errors=checkify.all_checks),
    ],
    ids=["over", "over jit", "inside", "all checks"],
)
def test_checkify(fun):
    error, result = fun(jnp.array(X), jnp.array(V))
    assert error.get() is None
    assert_same(result, plain_push(jnp.array(X), V))
    assert "not negative" in fun(jnp.array(X), jnp.array(-V))[0].get()


def test_a_declaration_is_kept_under_differentiation():
    assert pins(scheduled(jax.grad(loss(push)), infer=False), X, V) > 0
    assert pins(jax.grad(loss(scheduled(push, infer=False))), X, V) > 0


def test_a_declaration_is_kept_under_vmap():
    batch = np.stack([V, V])
    assert pins(scheduled(jax.vmap(push, (None, 0)), infer=False), X, batch) == 1
    assert pins(jax.vmap(scheduled(push, infer=False), (None, 0)), X, batch) == 1


def test_a_pin_is_nothing_but_a_primitive_of_the_jaxpr():
    jaxpr = jax.make_jaxpr(scheduled(push, infer=False))(X, V)
    assert [eqn.primitive for eqn in jaxpr.eqns].count(pin_p) == 1
    assert not jaxpr.effects


### Functions that jit has traced before


@jax.jit
def shared(x):
    y = x[0]
    x_new = x.at[0].set(y * 2)
    before(y, x_new)
    return x_new


def test_a_rule_that_was_run_again_leaves_no_trace_without_declarations():
    """What jit traced while a rule ran must not be taken for what is scheduled later."""
    jax.clear_caches()
    doubled = jax.custom_jvp(lambda x: shared(x))
    doubled.defjvp(lambda primals, tangents: (doubled(*primals), shared(tangents[0])))
    jax.jvp(scheduled(doubled), (X,), (X,))
    assert pins(scheduled(shared, infer=False), X) == 1


def test_a_rule_may_call_what_was_traced_with_declarations():
    jax.clear_caches()
    doubled = jax.custom_jvp(lambda x: shared(x))
    doubled.defjvp(lambda primals, tangents: (doubled(*primals), shared(tangents[0])))
    assert pins(scheduled(shared, infer=False), X) == 1
    _, tangent = jax.jvp(scheduled(doubled), (X,), (X,))
    expected = X.copy()
    expected[0] *= 2
    assert_same(tangent, expected)


def test_a_rule_alone_cannot_declare_an_order():
    doubled = jax.custom_jvp(lambda x: x * 2)
    doubled.defjvp(lambda primals, tangents: (doubled(*primals), shared(tangents[0])))
    with pytest.raises(ScheduleError, match="outside of a scheduled function") as caught:
        jax.jvp(scheduled(doubled), (X,), (X,))
    assert "test_transforms.py" in str(caught.value)


### Sharding


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = np.arange(64, dtype=np.float32).reshape(8, 8)


def rotate(x, order=before):
    y = x[0]
    x_new = x.at[0].set(x[1] * 2)
    order(y, x_new)
    return x_new, y


def rotate_numpy(x):
    x_new = x.copy()
    x_new[0] = x[1] * 2
    return x_new, x[0]


@pytest.mark.parametrize("infer", [True, False])
def test_shard_map_inside(mesh, infer):
    specs = {"in_specs": jax.P("i"), "out_specs": (jax.P("i"), jax.P("i"))}
    inner = jax.shard_map(rotate, mesh=mesh, **specs)
    given = jax.jit(scheduled(inner, infer=infer), donate_argnums=0)(jnp.array(ROWS))
    parts = [rotate_numpy(part) for part in np.split(ROWS, 4)]
    assert_same(
        given, (np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts]))
    )
    assert pins(scheduled(inner, infer=infer), ROWS) == 1


def test_shard_map_over(mesh):
    specs = {"in_specs": jax.P("i"), "out_specs": (jax.P("i"), jax.P("i"))}
    given = jax.jit(jax.shard_map(scheduled(rotate), mesh=mesh, **specs))(ROWS)
    parts = [rotate_numpy(part) for part in np.split(ROWS, 4)]
    assert_same(
        given, (np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts]))
    )


def test_collectives_in_shard_map(mesh):
    @scheduled
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    def shift(x):
        row = lax.ppermute(x[-1], "i", [(n, (n + 1) % 4) for n in range(4)])
        total = lax.psum(x[0].sum(), "i")
        x_new = x.at[0].set(row + total)
        before(total, x_new)
        return x_new

    expected = ROWS.copy()
    expected[::2] = np.roll(ROWS, 1, axis=0)[::2] + ROWS[::2].sum()
    assert_same(jax.jit(shift)(ROWS), expected)


@pytest.mark.parametrize("spec", [("i", None), (None, "i"), (None, None)])
def test_sharded_arguments(mesh, spec):
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    fun = jax.jit(scheduled(rotate), donate_argnums=0, in_shardings=sharding)
    x_new, y = fun(jax.device_put(ROWS, sharding))
    assert_same((x_new, y), rotate_numpy(ROWS))
    assert x_new.sharding.is_equivalent_to(sharding, 2)


def test_explicit_shardings():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(ROWS, jax.NamedSharding(mesh, jax.P(None, "i")))

        def fun(x, order):
            y = x.sum(0)
            x_new = x * 2
            order(y, x_new)
            return x_new, y

        given = jax.jit(scheduled(lambda x: fun(x, before)))(x)
        assert_same(given, (ROWS * 2, ROWS.sum(0)))
        expected = jax.jit(lambda x: fun(x, undeclared))(x)
        assert jax.tree.map(jax.typeof, given) == jax.tree.map(jax.typeof, expected)


def test_sharding_constraints_are_kept(mesh):
    sharding = jax.NamedSharding(mesh, jax.P("i"))

    @jax.jit
    @scheduled
    def fun(x):
        x = lax.with_sharding_constraint(x, sharding)
        return rotate(x)

    x_new, y = fun(jnp.array(ROWS))
    assert_same((x_new, y), rotate_numpy(ROWS))
    assert x_new.sharding.is_equivalent_to(sharding, 2)
