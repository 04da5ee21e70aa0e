"""Reports in which a branch or a mask decides whether a slot is written."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import integers, normal, program


def keep_or_store_numpy(x, choose):
    y = x[2]
    if choose[0]:
        x[2] = 5
    if not choose[1]:
        x[3] = 7
    return x, y


@program(keep_or_store_numpy, "jax-ml/jax#39449", small={"n": 16})
def keep_or_store(before, barrier, n=1_200_000):
    """Two conds, one with the write first and one with it second, follow a read."""

    def fun(x, choose):
        y = x[2]  # <- read
        x, y = barrier((x, y))
        first = lax.cond(choose[0], lambda x: x.at[2].set(5), lambda x: x, x)  # <- write
        before(y, first)
        return lax.cond(choose[1], lambda x: x, lambda x: x.at[3].set(7), first), y

    return fun, (normal(n), jnp.array([True, False]))


def checkpointed_walk_numpy(best, visits, steps):
    for k in range(steps):
        if k % 3 == 0:
            best[1] = k
        visits[k] = visits[k] * 2 if k % 3 == 0 else visits[k]
    return best, visits


@program(
    checkpointed_walk_numpy,
    "jax-ml/jax#16661",
    numba=True,
    donate=(0, 1),
    small={"n": 64, "steps": 20},
)
def checkpointed_walk(before, barrier, n=200_000, steps=300):
    """A cond in a while loop saves now and then; the index it gives selects a slot elsewhere."""

    def save(k, best):
        return jnp.bool_(True), k, best.at[1].set(k.astype(best.dtype))

    def leave(k, best):
        return jnp.bool_(False), k, best

    def fun(best, visits, steps):
        def body(carry):
            k, best, visits = carry
            saved, slot, best = lax.cond(k % 3 == 0, save, leave, k, best)
            y = visits[slot]  # <- read
            visits, y = barrier((visits, y))
            new = visits.at[slot].set(jnp.where(saved, y * 2, y))  # <- write
            before(y, new)
            return k + 1, best, new

        return lax.while_loop(lambda c: c[0] < steps, body, (jnp.int32(0), best, visits))[1:]

    return fun, (normal(n), normal(n, seed=1), jnp.int32(steps))


def mutate_sites_numpy(chain, sites, accept):
    states = np.empty(len(sites), np.int32)
    for t in range(len(sites)):
        states[t] = chain[sites[t]].argmax()
        if accept[t]:
            chain[sites[t]] = chain[sites[t]][::-1].copy()
    return chain, states


@program(mutate_sites_numpy, "jax-ml/jax#5986", small={"n": 30, "states": 5, "steps": 20})
def mutate_sites(before, barrier, n=9000, states=24, steps=250):
    """A Metropolis scan reads the state of a random site and a cond may change it."""

    def fun(chain, sites, accept):
        def body(chain, step):
            site, ok = step
            y = chain[site]  # <- read
            chain, y = barrier((chain, y))
            new = lax.cond(  # <- write
                ok, lambda c, y: c.at[site].set(y[::-1]), lambda c, y: c, chain, y
            )
            before(y, new)
            return new, y.argmax().astype(jnp.int32)

        return lax.scan(body, chain, (sites, accept))

    chain = jnp.eye(states, dtype=jnp.float32)[integers(states, n)]
    return fun, (chain, integers(n, steps, seed=1), integers(2, steps, seed=2) > 0)


def masked_trace_numpy(x, keep):
    for i in range(1, len(keep)):
        if keep[i]:
            x[i] = x[i - 1] * np.float32(0.25) + 1
    return x


@program(
    masked_trace_numpy,
    "jax-ml/jax#10197",
    numba=True,
    hazard=False,  # the select takes both versions, which XLA updates in place all the same
    small={"rows": 30, "cols": 4, "steps": 20},
)
def masked_trace(before, barrier, rows=5000, cols=48, steps=400):
    """A masked update written as where(keep, x.at[i].set(v), x) selects over the whole buffer."""

    def fun(x, keep):
        def body(i, x):
            y = x[i - 1]  # <- read
            x, y = barrier((x, y))
            new = jnp.where(keep[i], x.at[i].set(y * 0.25 + 1), x)  # <- write
            before(y, new)
            return new

        return lax.fori_loop(1, steps, body, x)

    return fun, (normal(rows, cols), integers(3, steps) > 0)


def lanes_apart_numpy(x, start, stop):
    for lane in range(x.shape[0]):
        for k in range(start[lane], stop[lane]):
            x[lane, k] = x[lane, k - 1] + 1
    return x


@program(
    lanes_apart_numpy,
    "jax-ml/jax#13522",
    category="copy-unavoidable",
    unavoidable=1,
    by_hand=False,
    numba=True,
    small={"lanes": 3, "n": 80},
)
def lanes_apart(before, barrier, lanes=4, n=50_000):
    """vmap of a while loop whose lanes stop apart: a select needs the old and the new buffer."""

    def fun(x, start, stop):
        def lane(x, start, stop):
            def body(carry):
                k, x = carry
                y = x[k - 1]  # <- read
                new = x.at[k].set(y + 1)  # <- write
                before(y, new)
                return k + 1, new

            return lax.while_loop(lambda c: c[0] < stop, body, (start, x))[1]

        return jax.vmap(lane)(x, start, stop)

    start = jnp.arange(1, lanes + 1, dtype=jnp.int32)
    return fun, (normal(lanes, n), start, start * 13 + 20)
