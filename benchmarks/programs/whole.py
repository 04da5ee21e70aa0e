"""The whole buffer is overwritten by elementwise arithmetic that uses a part of it."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import normal, program


def scale_all_numpy(x, i):
    y = x[i].copy()
    x *= 2
    return x, y


@program(scale_all_numpy, small={"rows": 12, "cols": 10})
def scale_all(before, barrier, rows=1000, cols=1000):
    """Return a row and scale the whole."""

    def fun(x, i):
        y = x[i]  # <- read
        x, y = barrier((x, y))
        new = x * 2  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols), jnp.int32(8))


def subtract_outer_numpy(x):
    x -= np.outer(x[:, 0], x[0])
    return x


@program(subtract_outer_numpy, tolerance=1e-4, small={"n": 12})
def subtract_outer(before, barrier, n=1000):
    """Rank-one update by the buffer's own first column and row."""

    def fun(x):
        row, column = x[0], x[:, 0]  # <- read
        x, row, column = barrier((x, row, column))
        new = x - jnp.outer(column, row)  # <- write
        before((row, column), new)
        return new

    return fun, (normal(n, n),)


def eliminate_numpy(x):
    for k in range(x.shape[0] // 10):
        row = x[k].copy()
        column = x[:, k] / row[k]
        for i in range(x.shape[0]):
            x[i] -= column[i] * row
    return x


@program(eliminate_numpy, numba=True, tolerance=2e-3, small={"n": 30})
def eliminate(before, barrier, n=800):
    """A loop of rank-one updates, each by a row and a column of the matrix itself."""

    def fun(x):
        def body(k, x):
            row, column = x[k], x[:, k]  # <- read
            column = column / row[k]
            x, row, column = barrier((x, row, column))
            new = x - jnp.outer(column, row)  # <- write
            before((row, column), new)
            return new

        return lax.fori_loop(0, n // 10, body, x)

    return fun, (normal(n, n) + n**0.5 * 4 * jnp.eye(n),)


def orthogonalize_numpy(x):
    for i in range(x.shape[0] // 10):
        q = x[i] / np.sqrt((x[i] * x[i]).sum())
        p = x @ q
        for j in range(x.shape[0]):
            x[j] -= p[j] * q
        x[i] = q
    return x


@program(orthogonalize_numpy, numba=True, tolerance=2e-3, small={"n": 30})
def orthogonalize(before, barrier, n=640):
    """Modified Gram-Schmidt: project one direction out of all rows, then store it."""

    def fun(x):
        def body(i, x):
            q = x[i] / jnp.sqrt(jnp.square(x[i]).sum())  # <- read
            p = x @ q  # <- read
            x, p, q = barrier((x, p, q))
            new = x - jnp.outer(p, q)  # <- write
            before((p, q), new)
            return new.at[i].set(q)

        return lax.fori_loop(0, n // 10, body, x)

    return fun, (normal(n, n),)
