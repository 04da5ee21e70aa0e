"""A function in which no write can overtake a read is left exactly as it is."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import scheduled
from tests.hlo import compiled, temp_bytes

SIZE = 32


def square(seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=(SIZE, SIZE)), jnp.float32)


def elementwise(x):
    return jnp.tanh(x * 2 + 1) * x


def in_place_arithmetic(x, y):
    return x * 2 + y


def softmax(x):
    return jax.nn.softmax(x)


def softmax_by_hand(x):
    e = jnp.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def layer_norm(x):
    centred = x - x.mean(1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(1, keepdims=True) + 1e-5)


def mlp(x, a, b):
    return jax.nn.relu(x @ a) @ b


def matmul_chain(x, a, b):
    return x @ a @ b @ x


def attention(x, a, b):
    q, k, v = x @ a, x @ b, x @ (a + b)
    return jax.nn.softmax(q @ k.T / np.sqrt(SIZE).astype(np.float32)) @ v


def attention_block(x, a, b):
    y = x + attention(layer_norm(x), a, b)
    return y + mlp(layer_norm(y), a, b)


def scan_small_carry(x):
    def body(total, row):
        return total + row.sum(), jnp.sin(row)

    return lax.scan(body, jnp.float32(0), x)


def while_small_carry(x):
    return lax.while_loop(lambda c: c[1] < 4, lambda c: (c[0] + x.sum(), c[1] + 1), (x[0, 0], 0))


def newton(x, a):
    """Every element is read where it is written: arithmetic of one shape fuses without harm."""
    return lax.fori_loop(0, 5, lambda _, x: 0.5 * (x + a / x), x)


def newton_step(x, a):
    return 0.5 * (x + a / x)


def gate(x, a):
    return lax.scan(lambda x, row: (x * jnp.tanh(x) + row, None), x, a)


def branches(x):
    return lax.switch(x[0, 0].astype(jnp.int32), [jnp.sin, jnp.cos, lambda x: x * 2], x)


def sgd(x, a, b):
    """The gradient needs a product with the weights, which is in memory before their update."""
    value, gradient = jax.value_and_grad(lambda a: jnp.square(x @ a - b).mean())(a)
    return value, a - 0.1 * gradient


def momentum(x, a, b):
    """The momentum buffer is updated as a whole from values which do not read it otherwise."""
    gradient = jax.grad(lambda a: jnp.square(x @ a).mean())(a)
    b = 0.9 * b + gradient
    return a - 0.1 * b, b


def adam(x, a, b):
    gradient = jax.grad(lambda x: jnp.square(x).sum())(x)
    a = 0.9 * a + 0.1 * gradient
    b = 0.99 * b + 0.01 * gradient * gradient
    return x - 0.1 * a / (jnp.sqrt(jnp.abs(b)) + 1e-8), a, b


def append(x, row, i):
    return lax.dynamic_update_slice(x, row[None], (i, 0))


def append_and_attend(x, row, i):
    """The cache is read after the write only."""
    x = lax.dynamic_update_slice(x, row[None], (i, 0))
    return x, jax.nn.softmax(x @ row)


def appends_in_a_scan(x):
    def body(cache, i):
        return cache.at[i].set(jnp.float32(1) * i), None

    return lax.scan(body, x, jnp.arange(5))


def one_update(x):
    return x.at[3, 5].add(1)


def updates_only(x):
    return x.at[0].set(1).at[1].set(2).at[:, 3].multiply(2)


def update_of_a_new_array(x):
    return jnp.zeros_like(x).at[0].set(x[0])


def sort_and_cumsum(x):
    return jnp.sort(x), jnp.cumsum(x, axis=0), jnp.argsort(x)


def nested_jits(x):
    return jax.jit(jax.jit(elementwise))(x) + jax.jit(layer_norm)(x)


def custom_rules(x):
    return jax.nn.gelu(x) + jax.nn.silu(x) + jax.nn.logsumexp(x, axis=0) + jax.nn.relu6(x)


def checkpointed(x):
    return jax.grad(lambda x: jax.checkpoint(layer_norm)(x).sum())(x)


def random_numbers(x):
    key = jax.random.key(3)
    return x + jax.random.normal(key, x.shape), jax.random.split(key)


def scalars(x):
    """One element is read and written in one kernel; there is nothing to order."""
    y = x[:1, :1]
    return y.at[0, 0].set(y[0, 0] * 2), y[0, 0]


def nothing(x):
    return x


def constant(x):
    return 3.0, x


A, B, ROW, ROW_NUMBER = square(1), square(2), square(3)[0], jnp.int32(3)
CASES = [
    (elementwise,),
    (in_place_arithmetic, A),
    (softmax,),
    (softmax_by_hand,),
    (layer_norm,),
    (mlp, A, B),
    (matmul_chain, A, B),
    (attention, A, B),
    (attention_block, A, B),
    (scan_small_carry,),
    (while_small_carry,),
    (newton, A),
    (newton_step, A),
    (gate, A),
    (branches,),
    (sgd, A, B),
    (momentum, A, B),
    (adam, A, B),
    (append, ROW, ROW_NUMBER),
    (append_and_attend, ROW, ROW_NUMBER),
    (appends_in_a_scan,),
    (one_update,),
    (updates_only,),
    (update_of_a_new_array,),
    (sort_and_cumsum,),
    (nested_jits,),
    (custom_rules,),
    (checkpointed,),
    (random_numbers,),
    (scalars,),
    (nothing,),
    (constant,),
]
cases = pytest.mark.parametrize(
    ("fun", "args"),
    [pytest.param(fun, (square(), *args), id=fun.__name__) for fun, *args in CASES],
)


@cases
def test_the_jaxpr_is_the_same(fun, args):
    assert str(jax.make_jaxpr(scheduled(fun))(*args)) == str(jax.make_jaxpr(fun)(*args))


def test_what_becomes_a_constant_by_inlining_is_folded():
    @jax.jit
    def overwrite(x, value):
        return x.at[0].set(value.astype(x.dtype))

    def fun(x):
        return overwrite(x, jnp.int32(1)), x[0]

    jaxpr = str(jax.make_jaxpr(scheduled(fun))(square()))
    assert " pin[" in jaxpr
    assert "convert_element_type" not in jaxpr


@cases
def test_the_lowered_program_is_the_same(fun, args):
    def lowered(fun):
        return jax.jit(fun, donate_argnums=()).lower(*args).as_text()

    assert lowered(scheduled(fun)) == lowered(fun)


@cases
def test_eager_results_are_the_same(fun, args):
    given, expected = scheduled(fun)(*args), fun(*args)
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        if jnp.issubdtype(jax.typeof(a).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_eager_code_runs_the_equations_once_each():
    calls = []

    def count(x):
        calls.append(x)
        return x

    @scheduled
    def fun(x):
        y = jax.pure_callback(count, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])
        return x.at[0, 0].add(1), y

    x, y = fun(square())
    jax.block_until_ready((x, y))
    assert len(calls) == 1


def test_the_compiled_program_of_a_guard_is_no_larger():
    x = square()
    plain = compiled(layer_norm, x)
    ours = compiled(scheduled(layer_norm), x)
    assert ours.cost_analysis() == plain.cost_analysis()
    assert temp_bytes(ours) == temp_bytes(plain)


def test_the_name_the_signature_and_the_documentation_are_kept():
    @functools.partial(scheduled, infer=False)
    def documented(x: jax.Array, *, scale: float = 2.0) -> jax.Array:
        """Documented."""
        return x * scale

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "Documented."
    assert documented.__module__ == __name__
    assert list(inspect.signature(documented).parameters) == ["x", "scale"]
    assert inspect.unwrap(documented)(square()).shape == (SIZE, SIZE)
