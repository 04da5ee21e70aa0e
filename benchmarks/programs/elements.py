"""Single elements and small windows are read, then overwritten."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import integers, normal, program


def element_add_numpy(x):
    y = x[3, 5]
    x[3, 5] += 1
    return x, y


def element_add_ref(x):
    ref = jax.new_ref(x)
    y = ref[3, 5]
    ref[3, 5] = y + 1
    return jax.freeze(ref), y


@program(element_add_numpy, ref=element_add_ref, small={"rows": 8, "cols": 8})
def element_add(before, barrier, rows=1200, cols=900):
    """Return one element and bump it."""

    def fun(x):
        y = x[3, 5]  # <- read
        x, y = barrier((x, y))
        new = x.at[3, 5].add(1)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols),)


def two_elements_numpy(x):
    y = x[0, 1]
    x[0, 1] *= 2
    z = x[2, 3]
    x[2, 3] -= 1
    return x, y, z


def two_elements_ref(x):
    ref = jax.new_ref(x)
    y = ref[0, 1]
    ref[0, 1] = y * 2
    z = ref[2, 3]
    ref[2, 3] = z - 1
    return jax.freeze(ref), y, z


@program(two_elements_numpy, ref=two_elements_ref, small={"rows": 8, "cols": 8})
def two_elements(before, barrier, rows=800, cols=1200):
    """Read and write one element, then another: the second read is of the middle version."""

    def fun(x):
        y = x[0, 1]  # <- read
        x, y = barrier((x, y))
        middle = x.at[0, 1].multiply(2)  # <- write
        before(y, middle)
        z = middle[2, 3]  # <- read
        middle, z = barrier((middle, z))
        new = middle.at[2, 3].add(-1)  # <- write
        before(z, new)
        return new, y, z

    return fun, (normal(rows, cols),)


def window_add_numpy(x):
    y = x[1:7, 2:8].copy()
    x[1:7, 2:8] += 0.5
    return x, y


def window_add_ref(x):
    ref = jax.new_ref(x)
    y = ref[1:7, 2:8]
    ref[1:7, 2:8] = y + 0.5
    return jax.freeze(ref), y


@program(window_add_numpy, ref=window_add_ref, small={"rows": 8, "cols": 9})
def window_add(before, barrier, rows=1100, cols=1000):
    """Return a window at a fixed place and add to it."""

    def fun(x):
        y = x[1:7, 2:8]  # <- read
        x, y = barrier((x, y))
        new = x.at[1:7, 2:8].add(0.5)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols),)


def gather_add_numpy(x, index):
    y = x[index]
    np.add.at(x, index, np.float32(1))
    return x, y


@program(gather_add_numpy, small={"rows": 30, "cols": 4})
def gather_add(before, barrier, rows=3000, cols=320):
    """Gather rows, some of them twice, and add to the same rows."""

    def fun(x, index):
        y = x[index]  # <- read
        x, y = barrier((x, y))
        new = x.at[index].add(1.0)  # <- write
        before(y, new)
        return new, y

    return fun, (normal(rows, cols), integers(rows // 10, 24))


def drain_diagonal_numpy(x):
    total = np.float32(0)
    for i in range(x.shape[0] // 8):
        total += x[i, i]
        x[i, i] = 0
    return x, total


def drain_diagonal_ref(x):
    ref = jax.new_ref(x)

    def body(i, total):
        total = total + ref[i, i]
        ref[i, i] = jnp.float32(0)
        return total

    total = lax.fori_loop(0, x.shape[0] // 8, body, jnp.float32(0))
    return jax.freeze(ref), total


@program(drain_diagonal_numpy, ref=drain_diagonal_ref, numba=True, tolerance=1e-4, small={"n": 32})
def drain_diagonal(before, barrier, n=1024):
    """A loop sums diagonal elements and clears each."""

    def fun(x):
        def body(i, carry):
            x, total = carry
            y = x[i, i]  # <- read
            x, y = barrier((x, y))
            new = x.at[i, i].set(0.0)  # <- write
            before(y, new)
            return new, total + y

        return lax.fori_loop(0, n // 8, body, (x, jnp.float32(0)))

    return fun, (normal(n, n),)


WINDOW = 64  # elements that move when one is removed


def remove_numpy(x, i):
    y = x[i]
    x[i : i + WINDOW] = x[i + 1 : i + 1 + WINDOW].copy()
    return x, y


@program(remove_numpy, small={"n": 200})
def remove(before, barrier, n=2048):
    """Remove one element of a short list: those behind it move up."""

    def fun(x, i):
        y = x[i]  # <- read
        tail = lax.dynamic_slice(x, (i + 1,), (WINDOW,))  # <- read
        x, y, tail = barrier((x, y, tail))
        new = lax.dynamic_update_slice(x, tail, (i,))  # <- write
        before((y, tail), new)
        return new, y

    return fun, (normal(n), jnp.int32(n // 3))


def remove_each_numpy(x, indices):
    ys = np.empty(len(indices), x.dtype)
    for k in range(len(indices)):
        i = indices[k]
        ys[k] = x[i]
        for j in range(i, i + WINDOW):
            x[j] = x[j + 1]
    return x, ys


@program(remove_each_numpy, numba=True, small={"n": 200, "steps": 20})
def remove_each(before, barrier, n=2048, steps=600):
    """A scan removes one element after another."""

    def fun(x, indices):
        def body(x, i):
            y = x[i]  # <- read
            tail = lax.dynamic_slice(x, (i + 1,), (WINDOW,))  # <- read
            x, y, tail = barrier((x, y, tail))
            new = lax.dynamic_update_slice(x, tail, (i,))  # <- write
            before((y, tail), new)
            return new, y

        return lax.scan(body, x, indices)

    return fun, (normal(n), integers(n - WINDOW - 1, steps))
