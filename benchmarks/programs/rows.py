"""Rows are read, alone or as part of the whole, and one of them is overwritten."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import normal, program

SMALL = {"rows": 12, "cols": 10}


def row_clear_numpy(x, i):
    y = x[i].copy()
    x[i] = 0
    return x, y


def row_clear_ref(x, i):
    ref = jax.new_ref(x)
    y = ref[i]
    ref[i] = jnp.zeros_like(y)
    return jax.freeze(ref), y


@program(row_clear_numpy, ref=row_clear_ref, small=SMALL)
def row_clear(before, barrier, rows=900, cols=1100):
    """Return a row and clear it."""

    def fun(x, i):
        y = x[i]  # <- read
        x, y = barrier((x, y))
        new = x.at[i].set(0.0)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols), jnp.int32(7))


def row_triple_numpy(x, i):
    y = x[i].copy()
    x[i] *= 3
    return x, y


def row_triple_ref(x, i):
    ref = jax.new_ref(x)
    y = ref[i]
    ref[i] = y * 3
    return jax.freeze(ref), y


@program(row_triple_numpy, ref=row_triple_ref, small=SMALL)
def row_triple(before, barrier, rows=1000, cols=1024):
    """Return a row and multiply it."""

    def fun(x, i):
        y = x[i]  # <- read
        x, y = barrier((x, y))
        new = x.at[i].multiply(3.0)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols), jnp.int32(4))


def sums_then_row_numpy(x):
    y = x.sum(0)
    x[2] = 1
    return x, y


def sums_then_row_ref(x):
    ref = jax.new_ref(x)
    y = ref[...].sum(0)
    ref[2] = jnp.ones_like(y)
    return jax.freeze(ref), y


@program(sums_then_row_numpy, ref=sums_then_row_ref, tolerance=1e-4, small=SMALL)
def sums_then_row(before, barrier, rows=1000, cols=1000):
    """Sum the columns, then overwrite a row."""

    def fun(x):
        y = x.sum(0)  # <- read
        x, y = barrier((x, y))
        new = x.at[2].set(1.0)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols),)


def product_into_row_numpy(x, v):
    y = x @ v
    x[1] = y
    return x, y


# The product is in memory before the write that needs it: nothing to order.
@program(product_into_row_numpy, tolerance=1e-3, hazard=False, small={"n": 12})
def product_into_row(before, barrier, n=960):
    """Multiply the matrix by a vector and store the product in one of its rows."""

    def fun(x, v):
        y = x @ v  # <- read
        x, y = barrier((x, y))
        new = x.at[1].set(y)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(n, n), normal(n, seed=1))


def row_and_total_numpy(x):
    y, z = x[0].copy(), x[3].sum()
    x[0] = -1
    return x, y, z


def row_and_total_ref(x):
    ref = jax.new_ref(x)
    y, z = ref[0], ref[3].sum()
    ref[0] = -jnp.ones_like(y)
    return jax.freeze(ref), y, z


@program(row_and_total_numpy, ref=row_and_total_ref, tolerance=1e-4, small=SMALL)
def row_and_total(before, barrier, rows=1000, cols=900):
    """Two reads of one version, a row and the total of another, come before one write."""

    def fun(x):
        y = x[0]  # <- read
        z = x[3].sum()  # <- read
        x, y, z = barrier((x, y, z))
        new = x.at[0].set(-1.0)  # <- write
        before((y, z), new)
        return new, y, z

    return fun, (normal(rows, cols),)


def use_then_write_numpy(x):
    y = np.cos(x[5]) + 2
    x[5] = 1
    return x, y


@program(use_then_write_numpy, small=SMALL)
def use_then_write(before, barrier, rows=1000, cols=1000):
    """A row is read and used up before the row is overwritten."""

    def fun(x):
        y = jnp.cos(x[5]) + 2  # <- read
        x, y = barrier((x, y))
        new = x.at[5].set(1.0)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols),)


@program(use_then_write_numpy, small=SMALL)
def write_then_use(before, barrier, rows=1000, cols=1000):
    """A row is read before it is overwritten, and used only afterwards."""

    def fun(x):
        y = x[5]  # <- read
        x, y = barrier((x, y))
        new = x.at[5].set(1.0)  # <- write
        before(y, new)
        return new, jnp.cos(y) + 2

    return fun, (normal(rows, cols),)


def row_relu_numpy(x, i):
    y = x[i].copy()
    x[i] = np.maximum(y, 0)
    return x, y.sum()


@program(row_relu_numpy, tolerance=1e-4, small=SMALL)
def row_relu(before, barrier, rows=1000, cols=1100):
    """A row replaces its negative entries and its sum is returned: the write uses the read."""

    def fun(x, i):
        y = x[i]  # <- read
        x, y = barrier((x, y))
        new = x.at[i].set(jnp.where(y > 0, y, 0))  # <- write
        before(y, new)
        return new, y.sum()

    return fun, (normal(rows, cols), jnp.int32(6))


def totals_into_row_numpy(x):
    y = (x * 3).sum(1)
    x[0] = y
    return x, y


# So is a sum.
@program(totals_into_row_numpy, tolerance=1e-3, hazard=False, small={"n": 12})
def totals_into_row(before, barrier, n=1024):
    """Row totals of a product become a row: what must exist early is small, the product is not."""

    def fun(x):
        y = (x * 3).sum(1)  # <- read
        x, y = barrier((x, y))
        new = x.at[0].set(y)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(n, n),)


def row_swap_numpy(x, i):
    a, b = x[i].copy(), x[i + 1].copy()
    x[i], x[i + 1] = b, a
    return x


def row_swap_ref(x, i):
    ref = jax.new_ref(x)
    a, b = ref[i], ref[i + 1]
    ref[i] = b
    ref[i + 1] = a
    return jax.freeze(ref)


@program(row_swap_numpy, ref=row_swap_ref, small=SMALL)
def row_swap(before, barrier, rows=1024, cols=1000):
    """Two rows change places."""

    def fun(x, i):
        a = x[i]  # <- read
        b = x[i + 1]  # <- read
        x, a, b = barrier((x, a, b))
        first = x.at[i].set(b)  # <- write
        before((a, b), first)
        return first.at[i + 1].set(a)

    return fun, (normal(rows, cols), jnp.int32(9))


def row_clear_if_numpy(x, i):
    y = x[i].copy()
    if i > 3:
        x[i] = 0
    return x, y


@program(row_clear_if_numpy, small=SMALL)
def row_clear_if(before, barrier, rows=1000, cols=1000):
    """Return a row; a branch may clear it."""

    def fun(x, i):
        y = x[i]  # <- read
        x, y = barrier((x, y))
        new = lax.cond(i > 3, lambda x: x.at[i].set(0.0), lambda x: x, x)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols), jnp.int32(5))


def shift_down_numpy(x):
    x[1:] = x[:-1].copy()
    return x


@program(shift_down_numpy, small=SMALL)
def shift_down(before, barrier, rows=1000, cols=1000):
    """Every row moves down by one: nearly the whole buffer must be read before it is written."""

    def fun(x):
        y = x[:-1]  # <- read
        x, y = barrier((x, y))
        new = x.at[1:].set(y)  # <- write
        before(y, new)
        return new

    return fun, (normal(rows, cols),)
