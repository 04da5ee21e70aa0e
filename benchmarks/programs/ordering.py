"""Reports in which order matters for peak memory or for overlap, and nothing is overwritten."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.programs._program import integers, normal, program

BINS = 12  # values per column


def pair_counts_numpy(total, columns):
    pairs = columns * BINS + np.roll(columns, -1, 0)
    counts = np.stack([np.bincount(pair, minlength=BINS * BINS) for pair in pairs])
    counts = counts.astype(np.int32)
    return total + counts[-1, 0], counts


@program(
    pair_counts_numpy,
    "openxla/xla#35719",
    category="ordering",
    hazard=False,
    temp_goal=4,
    small={"n": 400, "count": 3},
)
def pair_counts(before, barrier, n=300_000, count=5):
    """Unrolled histograms, each of a big temporary: built one by one they share its memory."""

    def fun(total, columns):
        done, counts = total.sum(), []
        for i in range(count):
            columns, done = barrier((columns, done))
            pairs = columns[i] * BINS + columns[(i + 1) % count]
            before(done, pairs)
            done = jnp.zeros(BINS * BINS, jnp.int32).at[pairs].add(1)
            counts.append(done)
        return total + counts[-1][0], jnp.stack(counts)

    return fun, (jnp.zeros(n, jnp.int32), integers(BINS, count, n))


DEVICES = 4


def ring_product_numpy(total, left, right):
    return total + left @ right


def sends_first(text: str) -> bool:
    """Whether each permute in the entry computation is listed before the product it overlaps."""
    entry = text[text.index("\nENTRY") :]
    sends = [m.start() for m in re.finditer(r" collective-permute(?:-start)?\(", entry)]
    products = [m.start() for m in re.finditer(r" dot\(|dot_general|matmul", entry)]
    enough = len(sends) >= DEVICES - 1 and len(products) >= DEVICES
    return enough and all(s < p for s, p in zip(sends, products, strict=False))


@program(
    ring_product_numpy,
    "jax-ml/jax#23436",
    category="ordering",
    hazard=False,
    tolerance=1e-3,
    devices=DEVICES,
    ordered=sends_first,
    small={"n": 32},
)
def ring_product(before, barrier, n=800):
    """A matrix product on a ring: send the next block on before multiplying by this one."""
    mesh = jax.make_mesh((DEVICES,), ("ring",), devices=jax.devices()[:DEVICES])
    rows = PartitionSpec("ring", None)
    block = n // DEVICES

    def local(total, left, right):
        here = lax.axis_index("ring")
        for k in range(DEVICES):
            this = right
            last = k == DEVICES - 1
            if not last:
                right = lax.ppermute(
                    right, "ring", [(j, (j - 1) % DEVICES) for j in range(DEVICES)]
                )
                right, this = barrier((right, this))
            part = lax.dynamic_slice_in_dim(left, (here + k) % DEVICES * block, block, 1) @ this
            if not last:
                before(right, part)
            total = total + part
        return total

    fun = jax.shard_map(
        local, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows, check_vma=False
    )
    args = (normal(n, n, seed=seed, scale=n**-0.5) for seed in range(3))
    return fun, tuple(jax.device_put(a, NamedSharding(mesh, rows)) for a in args)
