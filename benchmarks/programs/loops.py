"""Loops whose body reads a row of the carry and overwrites it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import normal, program


def pass_rows_on_numpy(x):
    held = np.zeros(x.shape[1], x.dtype)
    for i in range(x.shape[0] // 8):
        for j in range(x.shape[1]):
            held[j], x[i, j] = x[i, j], held[j]
    return x, held


def pass_rows_on_ref(x):
    ref = jax.new_ref(x)

    def body(i, held):
        y = ref[i]
        ref[i] = held
        return y

    held = lax.fori_loop(0, x.shape[0] // 8, body, jnp.zeros(x.shape[1], x.dtype))
    return jax.freeze(ref), held


@program(pass_rows_on_numpy, ref=pass_rows_on_ref, numba=True, small={"rows": 32, "cols": 8})
def pass_rows_on(before, barrier, rows=1000, cols=960):
    """Each step takes a row out and puts in the one taken out in the step before."""

    def fun(x):
        def body(i, carry):
            x, held = carry
            y = x[i]  # <- read
            x, y = barrier((x, y))
            new = x.at[i].set(held)  # <- write
            before(y, new)
            return new, y

        return lax.fori_loop(0, rows // 8, body, (x, jnp.zeros(cols)))

    return fun, (normal(rows, cols),)


def take_rows_numpy(x):
    n = x.shape[0] // 8
    ys = np.empty((n, x.shape[1]), x.dtype)
    for i in range(n):
        for j in range(x.shape[1]):
            ys[i, j] = x[i, j]
            x[i, j] = 0
    return x, ys


def take_rows_ref(x):
    ref = jax.new_ref(x)

    def body(_, i):
        y = ref[i]
        ref[i] = jnp.zeros_like(y)
        return None, y

    _, ys = lax.scan(body, None, jnp.arange(x.shape[0] // 8))
    return jax.freeze(ref), ys


@program(take_rows_numpy, ref=take_rows_ref, numba=True, small={"rows": 32, "cols": 8})
def take_rows(before, barrier, rows=960, cols=1000):
    """A scan stacks the rows it clears."""

    def fun(x):
        def body(x, i):
            y = x[i]  # <- read
            x, y = barrier((x, y))
            new = x.at[i].set(0.0)  # <- write
            before(y, new)
            return new, y

        return lax.scan(body, x, jnp.arange(rows // 8))

    return fun, (normal(rows, cols),)


def relax_rows_numpy(x):
    for i in range(1, x.shape[0] - 1):
        for j in range(x.shape[1]):
            x[i, j] = (x[i - 1, j] + x[i + 1, j]) * np.float32(0.5)
    return x


def relax_rows_ref(x):
    ref = jax.new_ref(x)

    def body(i, _):
        ref[i] = (ref[i - 1] + ref[i + 1]) * 0.5

    lax.fori_loop(1, x.shape[0] - 1, body, None)
    return jax.freeze(ref)


@program(relax_rows_numpy, ref=relax_rows_ref, numba=True, small={"rows": 16, "cols": 8})
def relax_rows(before, barrier, rows=800, cols=1000):
    """Gauss-Seidel: each row becomes the mean of its neighbours, the upper one already new."""

    def fun(x):
        def body(i, x):
            above, below = x[i - 1], x[i + 1]  # <- read
            x, above, below = barrier((x, above, below))
            new = x.at[i].set((above + below) * 0.5)  # <- write
            before((above, below), new)
            return new

        return lax.fori_loop(1, rows - 1, body, x)

    return fun, (normal(rows, cols),)


def reverse_rows_numpy(x, steps):
    n = len(x)
    for i in range(steps):
        held = x[i].copy()
        x[i] = x[n - 1 - i]
        x[n - 1 - i] = held
    return x


@program(reverse_rows_numpy, numba=True, small={"rows": 40, "cols": 4, "steps": 15})
def reverse_rows(before, barrier, rows=1024, cols=1000, steps=400):
    """Rows change places in a loop, the first with the last and so on."""

    def fun(x, steps):
        def body(i, x):
            j = rows - 1 - i
            a, b = x[i], x[j]  # <- read
            x, a, b = barrier((x, a, b))
            first = x.at[i].set(b)  # <- write
            before((a, b), first)
            return first.at[j].set(a)

        return lax.fori_loop(0, steps, body, x)

    return fun, (normal(rows, cols), jnp.int32(steps))


def givens_numpy(x, angles):
    for k in range(len(angles)):
        c, s = np.cos(angles[k]), np.sin(angles[k])
        for column in range(x.shape[1]):
            a, b = x[k, column], x[k + 1, column]
            x[k, column] = c * a - s * b
            x[k + 1, column] = s * a + c * b
    return x


@program(givens_numpy, numba=True, tolerance=1e-4, small={"rows": 20, "cols": 6})
def givens(before, barrier, rows=501, cols=1000):
    """Givens rotations of neighbouring rows: both are read, then both are written."""

    def fun(x, angles):
        def body(k, x):
            c, s = jnp.cos(angles[k]), jnp.sin(angles[k])
            a, b = x[k], x[k + 1]  # <- read
            x, a, b = barrier((x, a, b))
            first = x.at[k].set(c * a - s * b)  # <- write
            before((a, b), first)
            return first.at[k + 1].set(s * a + c * b)

        return lax.fori_loop(0, len(angles), body, x)

    return fun, (normal(rows, cols), normal(rows - 1, seed=1))
