"""Programs that plain jit compiles well: scheduling must leave them as they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import integers, normal, program

guard = functools.partial(program, category="guard", hazard=False, by_hand=False)


def elementwise_numpy(x):
    return np.tanh(x * 2 + 1) * x


@guard(elementwise_numpy, small={"n": 100})
def elementwise(_before, _barrier, n=1_000_000):
    """One fused elementwise expression on a donated vector."""
    return lambda x: jnp.tanh(x * 2 + 1) * x, (normal(n),)


def softmax_numpy(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@guard(softmax_numpy, small={"rows": 6, "cols": 5})
def softmax(_before, _barrier, rows=1000, cols=1000):
    """Softmax over rows of a donated matrix: reads of x come before an elementwise x - max."""

    def fun(x):
        e = jnp.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    return fun, (normal(rows, cols),)


def layer_norm_numpy(x, scale):
    centred = x - x.mean(1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(1, keepdims=True) + 1e-5) * scale


@guard(layer_norm_numpy, tolerance=1e-4, small={"rows": 6, "cols": 5})
def layer_norm(_before, _barrier, rows=1000, cols=1000):
    """Layer norm of a donated matrix."""

    def fun(x, scale):
        centred = x - x.mean(1, keepdims=True)
        return centred * lax.rsqrt(jnp.square(centred).mean(1, keepdims=True) + 1e-5) * scale[None]

    return fun, (normal(rows, cols), normal(cols, seed=1))


def products_numpy(x, a, b):
    return np.maximum(x @ a, 0) @ b


@guard(products_numpy, tolerance=1e-3, small={"n": 8})
def products(_before, _barrier, n=500):
    """Two matrix products in a row."""
    a, b = (normal(n, n, seed=seed, scale=n**-0.5) for seed in (1, 2))
    return lambda x, a, b: jnp.maximum(x @ a, 0) @ b, (normal(n, n), a, b)


def cache_append_numpy(cache, key, at):
    cache[at] = key
    scores = cache @ key
    return cache, scores


@guard(cache_append_numpy, tolerance=1e-3, small={"length": 16, "width": 4})
def cache_append(_before, _barrier, length=8000, width=128):
    """Append to a cache and attend over the new version: the old one has no reader."""

    def fun(cache, key, at):
        new = cache.at[at].set(key)
        return new, new @ key

    return fun, (normal(length, width), normal(width, seed=1), jnp.int32(9))


def histogram_numpy(counts, values):
    np.add.at(counts, values, 1)
    return counts


@guard(histogram_numpy, small={"bins": 16, "n": 40})
def histogram(_before, _barrier, bins=500_000, n=20_000):
    """Scatter-add into donated counts."""
    return lambda counts, values: counts.at[values].add(1), (
        jnp.zeros(bins, jnp.int32),
        integers(bins, n),
    )


def moving_average_numpy(state, xs):
    out = np.empty_like(xs)
    for t in range(len(xs)):
        state = np.float32(0.9) * state + np.float32(0.1) * xs[t]
        out[t] = state
    return state, out


@guard(moving_average_numpy, numba=True, tolerance=1e-4, small={"steps": 10, "width": 3})
def moving_average(_before, _barrier, steps=4000, width=64):
    """A scan with a small carry that is overwritten by arithmetic on itself."""

    def fun(state, xs):
        def body(state, x):
            state = 0.9 * state + 0.1 * x
            return state, state

        return lax.scan(body, state, xs)

    return fun, (normal(width), normal(steps, width, seed=1))


def sgd_numpy(weights, x, y):
    error = x @ weights - y
    weights -= np.float32(0.2 / error.size) * (x.T @ error)
    return weights, np.square(error).mean()


@guard(sgd_numpy, tolerance=1e-4, small={"batch": 4, "width": 6, "classes": 3})
def sgd(_before, _barrier, batch=64, width=512, classes=512):
    """A gradient step on a donated weight: the only read feeds the elementwise write already."""

    def loss(weights, x, y):
        return jnp.square(x @ weights - y).mean()

    def fun(weights, x, y):
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        return weights - 0.1 * gradient, value

    weights = normal(width, classes, scale=width**-0.5)
    return fun, (weights, normal(batch, width, seed=2), normal(batch, classes, seed=3))


def block_numpy(x, weights):
    def norm(x):
        return x / np.sqrt(np.square(x).mean(1, keepdims=True) + np.float32(1e-5))

    h = norm(x)
    q, k, v = (np.einsum("td,dhe->hte", h, w) for w in weights["qkv"])
    scores = q @ k.transpose(0, 2, 1) / np.float32(q.shape[-1] ** 0.5)
    scores = np.where(np.tri(len(x), dtype=bool)[None], scores, np.float32(-1e9))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores = scores / scores.sum(-1, keepdims=True)
    x = x + np.einsum("hte,hed->td", scores @ v, weights["out"])
    return x + np.maximum(norm(x) @ weights["up"], 0) @ weights["down"]


@guard(block_numpy, tolerance=1e-3, small={"length": 5, "width": 8, "heads": 2})
def block(_before, _barrier, length=256, width=256, heads=4):
    """A pre-norm transformer block on donated activations."""

    def norm(x):
        return x * lax.rsqrt(jnp.square(x).mean(1, keepdims=True) + 1e-5)

    def fun(x, weights):
        h = norm(x)
        q, k, v = (jnp.einsum("td,dhe->hte", h, w) for w in weights["qkv"])
        scores = jnp.einsum("hte,hse->hts", q, k) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tri(length, dtype=bool)[None], scores, -1e9)
        mixed = jnp.einsum("hts,hse->hte", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("hte,hed->td", mixed, weights["out"])
        return x + jnp.maximum(norm(x) @ weights["up"], 0) @ weights["down"]

    size, scale = width // heads, width**-0.5
    weights = {
        "qkv": [normal(width, heads, size, seed=seed, scale=scale) for seed in (1, 2, 3)],
        "out": normal(heads, size, width, seed=4, scale=scale),
        "up": normal(width, 4 * width, seed=5, scale=scale),
        "down": normal(4 * width, width, seed=6, scale=scale / 2),
    }
    return fun, (normal(length, width), weights)
