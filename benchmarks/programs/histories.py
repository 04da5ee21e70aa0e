"""Reports of buffers that grow or wrap around: replay, caches, samples, stacked parameters."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import integers, normal, program


def replay_insert_numpy(replay, frames, rewards):
    at, n = replay["at"], len(rewards)
    slots = (at + np.arange(n)) % len(replay["rewards"])
    evicted = replay["frames"][slots], replay["rewards"][slots]
    replay["frames"][slots], replay["rewards"][slots] = frames, rewards
    at = np.int32((at + n) % len(replay["rewards"]))
    return {**replay, "at": at}, evicted


@program(
    replay_insert_numpy, "instadeepai/flashbax#6", small={"capacity": 32, "width": 4, "count": 4}
)
def replay_insert(before, barrier, capacity=20_000, width=16, count=12):
    """A batch goes into a circular replay buffer; what it evicts is returned."""

    def fun(replay, frames, rewards):
        at = replay["at"]
        slots = (at + jnp.arange(count, dtype=jnp.int32)) % capacity
        held = replay["frames"], replay["rewards"]
        evicted = held[0][slots], held[1][slots]  # <- read
        held, evicted = barrier((held, evicted))
        new = held[0].at[slots].set(frames), held[1].at[slots].set(rewards)  # <- write
        before(evicted, new)
        return {"frames": new[0], "rewards": new[1], "at": (at + count) % capacity}, evicted

    replay = {
        "frames": normal(capacity, width),
        "rewards": normal(capacity, seed=1),
        "at": jnp.int32(capacity - 2),
    }
    return fun, (replay, normal(count, width, seed=2), normal(count, seed=3))


def replay_training_numpy(buffer, picks, weights):
    losses = np.empty(len(picks), buffer.dtype)
    for t in range(len(picks)):
        batch = buffer[picks[t]]
        error = batch @ weights - batch[:, -1]
        losses[t] = np.square(error).mean()
        weights = weights - np.float32(0.1) * (error @ batch) / np.float32(len(error))
        buffer[t] = np.tanh(buffer[t] + weights)
    return buffer, weights, losses


@program(
    replay_training_numpy,
    "instadeepai/flashbax#17",
    tolerance=1e-4,
    small={"capacity": 40, "width": 4, "batch": 3, "steps": 8},
)
def replay_training(before, barrier, capacity=10_000, width=40, batch=24, steps=150):
    """A replay buffer carried by the training scan: sample, step, insert over the oldest row."""

    def fun(buffer, picks, weights):
        def body(carry, step):
            buffer, weights = carry
            t, pick = step
            sample = buffer[pick]  # <- read
            oldest = buffer[t]  # <- read
            buffer, sample, oldest = barrier((buffer, sample, oldest))
            error = sample @ weights - sample[:, -1]
            weights = weights - 0.1 * (error @ sample) / batch
            new = buffer.at[t].set(jnp.tanh(oldest + weights))  # <- write
            before((sample, oldest), new)
            return (new, weights), jnp.square(error).mean()

        steps_and_picks = jnp.arange(steps, dtype=jnp.int32), picks
        (buffer, weights), losses = lax.scan(body, (buffer, weights), steps_and_picks)
        return buffer, weights, losses

    picks = integers(capacity, steps, batch, seed=1)
    return fun, (normal(capacity, width), picks, jnp.zeros(width))


def stacked_cache_numpy(cache, x, at):
    for layer in cache:
        scores = np.einsum("shd,hd->sh", layer[0], x)
        layer[0, at], layer[1, at] = x, x * 2
        x = x + np.einsum("sh,shd->hd", scores, layer[1]) * np.float32(1e-3)
    return cache, x


@program(
    stacked_cache_numpy,
    "keras-team/keras-hub#2780",
    tolerance=1e-4,
    small={"layers": 2, "length": 16, "heads": 2, "width": 4},
)
def stacked_cache(before, barrier, layers=6, length=640, heads=4, width=32):
    """Decode with all layers' keys and values in one array: take out, write a token, put back."""

    def fun(cache, x, at):
        for i in range(layers):
            keys, values = cache[i, 0], cache[i, 1]  # <- read
            scores = jnp.einsum("shd,hd->sh", keys, x)
            cache, keys, values, scores = barrier((cache, keys, values, scores))
            keys, values = keys.at[at].set(x), values.at[at].set(x * 2)
            new = cache.at[i].set(jnp.stack([keys, values]))  # <- write
            before(scores, new)
            cache = new
            x = x + jnp.einsum("sh,shd->hd", scores, values) * 1e-3
        return cache, x

    cache = normal(layers, 2, length, heads, width, scale=1 / width)
    return fun, (cache, normal(heads, width, seed=1), jnp.int32(length // 2))


def thinned_samples_numpy(samples, noise):
    for t in range(len(noise)):
        if t % 3 == 2:
            slot = t // 3
            samples[slot] = np.float32(0.6) * samples[max(slot - 1, 0)] + noise[t]
    return samples


@program(
    thinned_samples_numpy,
    "pyro-ppl/numpyro#1802",
    numba=True,
    tolerance=1e-4,
    small={"count": 20, "width": 4, "steps": 18},
)
def thinned_samples(before, barrier, count=3000, width=200, steps=180):
    """MCMC: the last kept draw is read back and, every third step, the next slot is written."""

    def fun(samples, noise):
        def body(t, samples):
            slot = t // 3
            last = samples[jnp.maximum(slot - 1, 0)]  # <- read
            samples, last = barrier((samples, last))
            draw = 0.6 * last + noise[t]
            new = lax.cond(  # <- write
                t % 3 == 2, lambda s, draw: s.at[slot].set(draw), lambda s, draw: s, samples, draw
            )
            before(last, new)
            return new

        return lax.fori_loop(0, steps, body, samples)

    return fun, (normal(count, width), normal(steps, width, seed=1))


def layers_as_xs_numpy(weights, x):
    for w in weights:
        x = np.tanh(w @ x)
        w -= np.float32(1e-2) * np.outer(x, x)
    return weights, x


@program(
    layers_as_xs_numpy,
    "AI-Hypercomputer/maxtext#4405",
    category="copy-unavoidable",
    unavoidable=1,
    hazard=False,
    by_hand=False,
    tolerance=1e-4,
    small={"layers": 3, "width": 6},
)
def layers_as_xs(_before, _barrier, layers=12, width=300):
    """A scan takes stacked weights as xs and returns them as ys, which XLA keeps in two buffers."""

    def fun(weights, x):
        def body(x, w):
            x = jnp.tanh(w @ x)
            return x, w - 1e-2 * jnp.outer(x, x)

        x, weights = lax.scan(body, x, weights)
        return weights, x

    return fun, (normal(layers, width, width, scale=width**-0.5), normal(width, seed=1))
