"""Reports of loops that walk over a buffer element by element or row by row."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import integers, normal, program


def window_slide_numpy(x, indices):
    ys = np.empty(len(indices), x.dtype)
    window = len(x) // 64
    for k in range(len(indices)):
        i = indices[k]
        ys[k] = x[i]
        for j in range(i, i + window):
            x[j] = x[j + 1]
    return x, ys


@program(window_slide_numpy, "jax-ml/jax#17845", numba=True, small={"n": 256, "steps": 10})
def window_slide(before, barrier, n=200_000, steps=200):
    """A scan takes an element out and slides the window behind it left by one."""
    window = n // 64

    def fun(x, indices):
        def body(x, i):
            y = x[i]  # <- read
            tail = lax.dynamic_slice(x, (i + 1,), (window,))  # <- read
            x, y, tail = barrier((x, y, tail))
            new = lax.dynamic_update_slice(x, tail, (i,))  # <- write
            before((y, tail), new)
            return new, y

        return lax.scan(body, x, indices)

    return fun, (normal(n), integers(n - window - 1, steps))


def overwrite_gradient_numpy(x, indices):
    x, read = x.copy(), []
    for i in indices:
        read.append(x[i])
        x[i] = np.sin(x[i])
    grad = np.zeros_like(x)
    grad[:50] = 1
    for i, y in zip(indices[::-1], read[::-1], strict=True):
        grad[i] = grad[i] * np.cos(y) + 2 * y
    return grad


@program(
    overwrite_gradient_numpy, "jax-ml/jax#17640", tolerance=1e-4, small={"n": 100, "steps": 10}
)
def overwrite_gradient(before, barrier, n=300_000, steps=50):
    """Gradient through a scan that overwrites elements: the backward loop writes a buffer too."""

    def loss(x, indices):
        def body(x, i):
            y = x[i]  # <- read
            x, y = barrier((x, y))
            new = x.at[i].set(jnp.sin(y))  # <- write
            before(y, new)
            return new, y

        x, ys = lax.scan(body, x, indices)
        return x[:50].sum() + jnp.square(ys).sum()

    return jax.grad(loss), (normal(n), integers(50, steps))


def relax_grid_numpy(u, f):
    change = np.float32(0)
    new = np.empty(u.shape[1], u.dtype)
    for _ in range(3):
        for j in range(1, u.shape[0] - 1):
            for i in range(1, u.shape[1] - 1):
                around = u[j - 1, i] + u[j + 1, i] + u[j, i - 1] + u[j, i + 1]
                new[i] = (around - f[j, i]) * np.float32(0.25)
            for i in range(1, u.shape[1] - 1):
                change += abs(new[i] - u[j, i])
                u[j, i] = new[i]
    return u, change


def relax_grid_ref(u, f):
    ref = jax.new_ref(u)

    def row(j, change):
        above, middle, below = ref[j - 1], ref[j], ref[j + 1]
        around = above[1:-1] + below[1:-1] + middle[:-2] + middle[2:]
        new = middle.at[1:-1].set((around - f[j, 1:-1]) * 0.25)
        ref[j] = new
        return change + jnp.abs(new - middle).sum()

    def sweep(_, change):
        return lax.fori_loop(1, u.shape[0] - 1, row, change)

    change = lax.fori_loop(0, 3, sweep, jnp.float32(0))
    return jax.freeze(ref), change


@program(
    relax_grid_numpy,
    "jax-ml/jax#1811",
    ref=relax_grid_ref,
    numba=True,
    tolerance=1e-3,
    miscompiled=True,  # as in openxla/xla#49176: the fused write reads what it has overwritten
    small={"rows": 12, "cols": 16},
)
def relax_grid(before, barrier, rows=200, cols=1200):
    """A finite-difference sweep in nested loops rewrites a row from itself and its neighbours."""

    def fun(u, f):
        def row(j, carry):
            u, change = carry
            above, middle, below = u[j - 1], u[j], u[j + 1]  # <- read
            u, above, middle, below = barrier((u, above, middle, below))
            around = above[1:-1] + below[1:-1] + middle[:-2] + middle[2:]
            changed = middle.at[1:-1].set((around - f[j, 1:-1]) * 0.25)
            new = u.at[j].set(changed)  # <- write
            before((above, middle, below), new)
            return new, change + jnp.abs(changed - middle).sum()

        def sweep(_, carry):
            return lax.fori_loop(1, rows - 1, row, carry)

        return lax.fori_loop(0, 3, sweep, (u, jnp.float32(0)))

    return fun, (normal(rows, cols), normal(rows, cols, seed=1))


def shuffle_numpy(x, others):
    for i in range(len(others)):
        j = others[i]
        held = x[i].copy()
        x[i] = x[j]
        x[j] = held
    return x


def shuffle_ref(x, others):
    ref = jax.new_ref(x)

    def body(i, _):
        j = others[i]
        a, b = ref[i], ref[j]
        ref[i] = b
        ref[j] = a

    lax.fori_loop(0, len(others), body, None)
    return jax.freeze(ref)


@program(
    shuffle_numpy,
    "jax-ml/jax#2301",
    ref=shuffle_ref,
    numba=True,
    small={"rows": 40, "cols": 4, "steps": 30},
)
def shuffle(before, barrier, rows=10_000, cols=24, steps=500):
    """Fisher-Yates: swap each row with a random later one."""

    def fun(x, others):
        def body(i, x):
            j = others[i]
            a, b = x[i], x[j]  # <- read
            x, a, b = barrier((x, a, b))
            first = x.at[i].set(b)  # <- write
            before((a, b), first)
            return first.at[j].set(a)

        return lax.fori_loop(0, steps, body, x)

    others = np.array([np.random.default_rng(i).integers(i, rows) for i in range(steps)])
    return fun, (normal(rows, cols), jnp.array(others, jnp.int32))


def rotate_numpy(x, steps):
    n = len(x)
    last = x[n - 1]
    for k in range(steps):
        x[n - 1 - k] = x[n - 2 - k]
    x[n - 1 - steps] = last
    return x


@program(rotate_numpy, "openxla/xla#20440", numba=True, small={"n": 64, "steps": 20})
def rotate(before, barrier, n=300_000, steps=1500):
    """Save the last element, shift those before it up in a loop, store the saved one below them."""

    def fun(x, steps):
        last = x[n - 1]  # <- read
        x, last = barrier((x, last))

        def body(k, x):
            y = x[n - 2 - k]  # <- read
            x, y = barrier((x, y))
            new = x.at[n - 1 - k].set(y)  # <- write
            before(y, new)
            return new

        moved = lax.fori_loop(0, steps, body, x)  # <- write
        before(last, moved)
        return moved.at[n - 1 - steps].set(last)

    return fun, (normal(n), jnp.int32(steps))


def simulate_path_numpy(x, shocks):
    y = x[0]
    for t in range(len(shocks)):
        y = np.float32(0.8) * y + shocks[t]
        x[t + 1] = y
    return x, y


@program(
    simulate_path_numpy,
    "jax-ml/jax#40101",
    numba=True,
    hazard=False,  # a scalar is carried, nothing is read back
    tolerance=1e-4,
    small={"n": 100, "steps": 60},
)
def simulate_path(before, barrier, n=800_000, steps=2500):
    """A long vector gets four bytes per step: slow once, with no copy to see in the HLO."""

    def fun(x, shocks):
        def body(t, carry):
            x, y = carry
            y = 0.8 * y + shocks[t]
            return x.at[t + 1].set(y), y

        first = x[0]  # <- read
        x, first = barrier((x, first))
        new, y = lax.fori_loop(0, steps, body, (x, first))  # <- write
        before(first, new)
        return new, y

    return fun, (normal(n), normal(steps, seed=1))
