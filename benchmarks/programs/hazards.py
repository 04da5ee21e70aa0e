"""Reports in which one version of a buffer has a use that an in-place write could spoil."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import integers, normal, program


def counter_bump_numpy(x):
    y = x[0, 0]
    x[0, 0] += 1
    return x, y


def counter_bump_ref(x):
    ref = jax.new_ref(x)
    y = ref[0, 0]
    ref[0, 0] = y + 1
    return jax.freeze(ref), y


@program(counter_bump_numpy, "jax-ml/jax#25399", ref=counter_bump_ref, small={"n": 8})
def counter_bump(before, barrier, n=2048):
    """A counter in a donated integer matrix is read and bumped: the whole matrix is copied."""

    def fun(x):
        y = x[0, 0]  # <- read
        x, y = barrier((x, y))
        new = x.at[0, 0].add(1)  # <- write
        before(y, new)
        return new, y

    return fun, (integers(100, n, n),)


def two_successors_numpy(x, i):
    y = x[i].copy()
    left, right = x, x.copy()
    left[i] = y * 2
    right[i + 1] = y - 1
    return left, right


@program(
    two_successors_numpy,
    "jax-ml/jax#39100",
    category="copy-unavoidable",
    unavoidable=1,
    small={"rows": 32, "cols": 4},
)
def two_successors(before, barrier, rows=6000, cols=80):
    """Two slices of one base are updated and both results returned: they need two buffers."""

    def fun(x, i):
        y = x[i]  # <- read
        x, y = barrier((x, y))
        left = lax.dynamic_update_slice(x, (y * 2)[None], (i, 0))  # <- write
        right = lax.dynamic_update_slice(x, (y - 1)[None], (i + 1, 0))  # <- write
        before(y, (left, right))
        return left, right

    return fun, (normal(rows, cols), jnp.int32(21))


def shift_reshaped_numpy(x):
    base = x + 1
    base[1:] = base[:-1].copy()
    return base.reshape(1, *x.shape)


@program(
    shift_reshaped_numpy,
    "openxla/xla#49176",
    category="correctness",
    miscompiled=True,
    small={"rows": 6, "cols": 4},
)
def shift_reshaped(before, barrier, rows=5000, cols=48):
    """A buffer is updated by a shifted slice of itself and reshaped: rows are read too late."""

    def fun(x):
        base = x + 1
        lead = base[:-1]  # <- read
        base, lead = barrier((base, lead))
        new = lax.dynamic_update_slice(base, lead, (1, 0))  # <- write
        before(lead, new)
        return new.reshape(1, rows, cols)

    return fun, (jnp.arange(rows * cols, dtype=jnp.int32).reshape(rows, cols),)


def accumulate_rows_numpy(table, ids, grads):
    norms = np.empty(len(ids), table.dtype)
    for k in range(len(ids)):
        norms[k] = np.square(table[ids[k]]).sum()
        np.add.at(table, ids[k], grads[k])
    return table, norms


@program(
    accumulate_rows_numpy,
    "openxla/xla#49143",
    tolerance=1e-3,
    small={"vocab": 60, "width": 4, "steps": 3, "batch": 8},
)
def accumulate_rows(before, barrier, vocab=10000, width=48, steps=10, batch=200):
    """Embedding gradients are scatter-added into a carried table, after the rows' norm is taken."""

    def fun(table, ids, grads):
        def body(table, step):
            index, grad = step
            norm = jnp.square(table[index]).sum()  # <- read
            table, norm = barrier((table, norm))
            new = table.at[index].add(grad)  # <- write
            before(norm, new)
            return new, norm

        return lax.scan(body, table, (ids, grads))

    ids = integers(vocab // 20, steps, batch)  # few of them, so that many repeat
    return fun, (jnp.zeros((vocab, width)), ids, normal(steps, batch, width, scale=0.25))
