"""Programs of any size, for measuring how planning and compiling grow."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import Built, integers, normal


def straight_line(equations: int) -> Built:
    """A chain of `equations` equations: read a slice, eight steps on it, write it back, repeat."""
    steps = (lax.sin, lax.neg, lax.tanh, lax.abs, lax.cos, lax.exp, lax.log1p, lax.sqrt)
    width, slots = 8, 128
    zero = np.int32(0)

    def fun(x):
        for k in range(equations // 10):
            slot = k * 37 % slots
            y = lax.slice(x, (slot, 0), (slot + 1, width))
            for step in steps:
                y = step(y)
            x = lax.dynamic_update_slice(x, y, (np.int32((slot + 1) % slots), zero))
        return x

    return fun, (normal(slots, width),)


def nested_loops(depth: int = 6, trips: int = 2) -> Built:
    """`depth` loops inside each other; the innermost reads a slot and overwrites it."""

    def loop(levels):
        def body(i, carry):
            if levels > 1:
                return lax.fori_loop(0, trips, loop(levels - 1), carry)
            x, total = carry
            y = x[0]
            return x.at[0].set(y + 1), total + y

        return body

    def fun(x):
        return loop(depth + 1)(0, (x, jnp.int32(0)))

    return fun, (integers(100, 1 << 18),)


def train_step(
    layers: int = 12, width: int = 64, heads: int = 4, length: int = 32, vocab: int = 128
) -> Built:
    """An Adam step of a decoder-only transformer; parameters and moments are to be donated."""
    size, scale = width // heads, width**-0.5

    def norm(x):
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)

    def attention(x, weights):
        q, k, v = (jnp.einsum("btd,dhe->bhte", x, weights[name]) for name in ("q", "k", "v"))
        scores = jnp.einsum("bhte,bhse->bhts", q, k) / size**0.5
        scores = jnp.where(jnp.tri(length, dtype=bool)[None, None], scores, -1e9)
        mixed = jnp.einsum("bhts,bhse->bhte", jax.nn.softmax(scores), v)
        return jnp.einsum("bhte,hed->btd", mixed, weights["out"])

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for weights in params["layers"]:
            x = x + attention(norm(x), weights)
            x = x + jax.nn.relu(norm(x) @ weights["up"]) @ weights["down"]
        logits = jax.nn.log_softmax(norm(x) @ params["embed"].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    def fun(state, tokens):
        params, means, squares, count = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        count = count + 1
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
        squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, squares, grads)
        decay = 1 - 0.9**count, 1 - 0.99**count

        def update(p, m, s):
            return p - 1e-2 * (m / decay[0]) / (jnp.sqrt(s / decay[1]) + 1e-6)

        return (jax.tree.map(update, params, means, squares), means, squares, count), value

    def layer(seed):
        projections = {
            name: normal(width, heads, size, seed=seed + i, scale=scale)
            for i, name in enumerate(("q", "k", "v"))
        }
        return {
            **projections,
            "out": normal(heads, size, width, seed=seed + 3, scale=scale / layers),
            "up": normal(width, 4 * width, seed=seed + 4, scale=scale),
            "down": normal(4 * width, width, seed=seed + 5, scale=scale / layers),
        }

    params = {
        "embed": normal(vocab, width, scale=scale),
        "layers": [layer(10 * i) for i in range(1, layers + 1)],
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.float32(0)
    return fun, (state, integers(vocab, 4, length + 1))
