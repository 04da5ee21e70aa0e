"""A small program with a declared order, what it should compute, and how results are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched import before

X = np.arange(12, dtype=np.float32).reshape(3, 4) / 4 + 1
V = np.linspace(-1, 1, 4, dtype=np.float32)


def undeclared(*values):
    """Stands in for `before` in a function that tells what is right."""


def push(x, v, order=before):
    """Reads a row, then overwrites it with something that is computed from it."""
    y = x[0]
    x_new = x.at[0].set(jnp.sin(y) * v)
    order(y, x_new)
    return x_new, y.sum()


plain_push = functools.partial(push, order=undeclared)


def push_numpy(x, v):
    x = x.copy()
    y = x[0].copy()
    x[0] = np.sin(y) * v
    return x, y.sum()


def assert_same(given, expected, rtol=2e-6, atol=1e-6):
    """Equal pytrees of arrays, up to rounding."""
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert (jnp.shape(a), jax.typeof(a).dtype) == (jnp.shape(b), jax.typeof(b).dtype)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def pins(fun, *args):
    """The number of pins in the jaxpr of a function, at any depth."""
    return str(jax.make_jaxpr(fun)(*args)).count(" pin[")
