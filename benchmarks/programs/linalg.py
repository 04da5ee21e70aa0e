"""Reports of linear algebra written in place on one matrix or basis."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs._program import normal, program


def forward_substitution_numpy(x, lower):
    for i in range(len(x)):
        x[i] = (x[i] - lower[i, :i] @ x[:i]) / lower[i, i]
    return x


@program(
    forward_substitution_numpy, "jax-ml/jax#15906", tolerance=1e-3, small={"n": 12, "sides": 5}
)
def forward_substitution(before, barrier, n=192, sides=1024):
    """Row i is solved from all rows written so far: the product reads the whole buffer."""

    def fun(x, lower):
        def body(i, x):
            solved = jnp.where(jnp.arange(n) < i, lower[i], 0.0) @ x  # <- read
            y = x[i]  # <- read
            x, solved, y = barrier((x, solved, y))
            new = x.at[i].set((y - solved) / lower[i, i])  # <- write
            before((solved, y), new)
            return new

        return lax.fori_loop(0, n, body, x)

    lower = jnp.tril(normal(n, n, seed=1, scale=1 / n)) + 3 * jnp.eye(n)
    return fun, (normal(n, sides), lower)


def pivoted_lu_numpy(a):
    steps = len(a) // 8
    pivots = np.empty(steps, np.int32)
    for k in range(steps):
        p = pivots[k] = k + np.abs(a[k:, k]).argmax()
        a[[k, p]] = a[[p, k]]
        a[k + 1 :, k] /= a[k, k]
        a[k + 1 :, k + 1 :] -= np.outer(a[k + 1 :, k], a[k, k + 1 :])
    return a, pivots


@program(pivoted_lu_numpy, "jax-ml/jax#2242", tolerance=2e-3, small={"n": 24})
def pivoted_lu(before, barrier, n=480):
    """LU with partial pivoting: search a column, swap two rows, subtract an outer product."""
    place = jnp.arange(n)

    def fun(a):
        def body(k, carry):
            a, pivots = carry
            p = jnp.where(place >= k, jnp.abs(a[:, k]), -1.0).argmax()  # <- read
            both = jnp.stack([k, p])
            pair = a[both]  # <- read
            a, pair, both = barrier((a, pair, both))
            swapped = a.at[both].set(pair[::-1])  # <- write
            before((pair, both), swapped)
            row, column = swapped[k], swapped[:, k]  # <- read
            factors = jnp.where(place > k, column / row[k], 0.0)
            row = jnp.where(place > k, row, 0.0)
            swapped, factors, row, column = barrier((swapped, factors, row, column))
            reduced = swapped - jnp.outer(factors, row)  # <- write
            before((factors, row, column), reduced)
            new = reduced.at[:, k].set(jnp.where(place > k, factors, column))
            return new, pivots.at[k].set(both[1])

        pivots = jnp.zeros(n // 8, jnp.int32)
        return lax.fori_loop(0, n // 8, body, (a, pivots))

    return fun, (normal(n, n),)


def arnoldi_numpy(basis, diagonal):
    steps = len(basis) - 1
    upper = np.zeros((steps + 1, steps), basis.dtype)
    for k in range(steps):
        w = diagonal * basis[k] + np.float32(0.3) * np.roll(basis[k], 1)
        for _ in range(2):
            along = basis[: k + 1] @ w
            upper[: k + 1, k] += along
            w = w - along @ basis[: k + 1]
        upper[k + 1, k] = np.sqrt(np.square(w).sum())
        basis[k + 1] = w / upper[k + 1, k]
    return basis, upper


@program(arnoldi_numpy, "jax-ml/jax#4175", tolerance=2e-3, small={"n": 64, "steps": 4})
def arnoldi(before, barrier, n=20_000, steps=16):
    """A Krylov basis is read whole for two projections, then gets its next row."""

    def fun(basis, diagonal):
        def body(carry):
            k, basis, upper = carry
            known = jnp.where(jnp.arange(steps + 1) <= k, 1.0, 0.0)
            w = diagonal * basis[k] + 0.3 * jnp.roll(basis[k], 1)  # <- read
            once = known * (basis @ w)  # <- read
            w = w - once @ basis  # <- read
            twice = known * (basis @ w)  # <- read
            w = w - twice @ basis  # <- read
            basis, once, twice, w = barrier((basis, once, twice, w))
            norm = jnp.sqrt(jnp.square(w).sum())
            new = basis.at[k + 1].set(w / norm)  # <- write
            before(w, new)
            return k + 1, new, upper.at[:, k].set((once + twice).at[k + 1].set(norm))

        upper = jnp.zeros((steps + 1, steps))
        start = jnp.int32(0), basis, upper
        return lax.while_loop(lambda c: c[0] < steps, body, start)[1:]

    first = normal(n)
    basis = jnp.zeros((steps + 1, n)).at[0].set(first / jnp.linalg.norm(first))
    return fun, (basis, normal(n, seed=1))


def lbfgs_step_numpy(history, gradient, start):
    s, y, rho = history["s"], history["y"], history["rho"]
    order = [(start - 1 - age) % len(rho) for age in range(len(rho))]
    direction, alphas = gradient, []
    for i in order:
        alphas.append(rho[i] * np.vdot(s[i], direction))
        direction = direction - alphas[-1] * y[i]
    for i, alpha in zip(order[::-1], alphas[::-1], strict=True):
        direction = direction + (alpha - rho[i] * np.vdot(y[i], direction)) * s[i]
    s[start], y[start] = np.float32(-0.2) * direction, np.float32(-0.1) * direction
    rho[start] = 1 / np.vdot(s[start], y[start])
    return history, direction


# A loop reads the histories, and its results are in memory before the write that needs them.
@program(
    lbfgs_step_numpy,
    "google/jaxopt#153",
    tolerance=1e-3,
    hazard=False,
    small={"memory": 4, "n": 50},
)
def lbfgs_step(before, barrier, memory=12, n=40_000):
    """The two loops of L-BFGS read a circular history, then the oldest pair is overwritten."""

    def fun(history, gradient, start):
        s, y, rho = history["s"], history["y"], history["rho"]

        def downwards(direction, i):
            alpha = rho[i] * jnp.vdot(s[i], direction)
            return direction - alpha * y[i], alpha

        def upwards(direction, step):
            i, alpha = step
            return direction + (alpha - rho[i] * jnp.vdot(y[i], direction)) * s[i], None

        order = jnp.mod(start - 1 - jnp.arange(memory, dtype=jnp.int32), memory)
        direction, alphas = lax.scan(downwards, gradient, order)  # <- read
        direction, _ = lax.scan(upwards, direction, (order, alphas), reverse=True)  # <- read
        (s, y, rho), direction = barrier(((s, y, rho), direction))
        ds, dy = -0.2 * direction, -0.1 * direction
        new = {
            "s": s.at[start].set(ds),  # <- write
            "y": y.at[start].set(dy),  # <- write
            "rho": rho.at[start].set(1 / jnp.vdot(ds, dy)),  # <- write
        }
        before(direction, new)
        return new, direction

    s = normal(memory, n, scale=0.01)
    y = s + normal(memory, n, seed=1, scale=0.002)
    history = {"s": s, "y": y, "rho": 1 / (s * y).sum(1)}
    return fun, (history, normal(n, seed=2, scale=0.1), jnp.int32(3))
