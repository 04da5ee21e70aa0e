"""Functions whose reports are kept as text in `golden/`: line numbers there are those of this file.

Update the texts with `pytest tests/test_render.py --update-golden` after a change here.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched import before, scheduled

N = 1000


def seed(x):
    y = x[0, 0]
    x_new = x.at[0, 0].add(1)
    return x_new, y


@scheduled
def seed_scheduled(x):
    y = x[0, 0]
    x_new = x.at[0, 0].add(1)
    before(y, x_new)
    return x_new, y


@scheduled(infer=False)
def half_declared(x, i):
    y = x[i]
    z = x[i + 1].sum()
    x_new = x.at[i].set(0.0)
    before(y, x_new)
    return x_new, y, z


def loop(x):
    def body(i, carry):
        x, total = carry
        y = x[i, i]
        x = x.at[i, i].multiply(2)
        return x, total + y

    return lax.fori_loop(0, 20, body, (x, jnp.float32(0)))


def branch(x, i):
    y = x[0]
    z = lax.cond(i > 3, lambda x: x.at[i].set(0.0), lambda x: x, x)
    return z, y


def kept(x, v):
    left = x.at[0].set(1.0)
    right = x.at[1].set(v.sum())
    return left, right, v.at[0].set(2.0)


def old_and_new(x):
    x_new = x.at[0, 0].set(5.0)
    return (
        x_new,
        x.sum(),
        x_new @ x,
    )


X = jax.ShapeDtypeStruct((N, N), jnp.float32)
I = jax.ShapeDtypeStruct((), jnp.int32)

REPORTED = {
    "seed": (seed, (X,)),
    "seed_scheduled": (seed_scheduled, (X,)),
    "half_declared": (half_declared, (X, I)),
    "loop": (loop, (X,)),
    "loop_scheduled": (scheduled(loop), (X,)),
    "branch": (branch, (X, I)),
    "kept": (scheduled(kept), (X, X)),
    "old_and_new": (old_and_new, (X,)),
}
