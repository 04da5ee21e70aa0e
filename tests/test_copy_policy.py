"""`scheduled(copies=...)`: it speaks up about each copy of what it claims, and about no other."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.programs import ALL
from jaxsched import CopyError, CopyWarning, ScheduleError, before, explain, scheduled
from tests.common import pins
from tests.hlo import compiled
from tests.reported import I, X, half_declared, kept, loop, old_and_new, seed

COPIED = "4,000,000 bytes are copied of what `scheduled` claims to update in place."
strict = scheduled(seed, copies="error")


def half(x, i):
    return inspect.unwrap(half_declared)(x, i)


### Errors


def test_the_error_of_a_copy():
    with pytest.raises(CopyError) as error:
        compiled(strict, X)
    assert str(error.value) == (
        f"{COPIED}\n"
        "  where: 4,000,000 bytes of x, once\n"
        "      for    reported.py:17  x_new = x.at[0, 0].add(1)\n"
        "      why    the argument x is not donated, so that its contents stay the caller's\n"
        "      fix    donate it: jax.jit(..., donate_argnames='x')\n"
        '  legal: the fix of each copy, an order declared with `before`, or copies="allow".'
    )
    assert isinstance(error.value, ScheduleError)
    assert CopyError.__module__ == CopyWarning.__module__ == "jaxsched"


def test_in_place_nothing_is_said():
    x = jnp.arange(100.0).reshape(10, 10)
    x_new, y = jax.jit(strict, donate_argnums=0)(x)
    assert (x_new[0, 0], y) == (1, 0)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: lambda x: jax.jit(f).lower(x).compile()])
def test_jit_and_ahead_of_time(wrap):
    fun = wrap(strict)
    for _ in range(2):  # what failed is not kept
        with pytest.raises(CopyError, match=r"^1,600 bytes are copied"):
            fun(jnp.ones((20, 20)))


def test_an_order_that_was_not_declared():
    fun = scheduled(half, infer=False, copies="error")
    with pytest.raises(CopyError, match=r"reported.py:32  z = x\[i \+ 1\].sum\(\)"):
        compiled(fun, X, I, donate_argnums=0)
    compiled(scheduled(half, copies="error"), X, I, donate_argnums=0)


def test_in_a_loop():
    def fun(x):
        def body(i, carry):
            x, total = carry
            y = x[i, i]
            x_new = x.at[i, i].multiply(2)
            z = x_new[i, 0]
            before(z, total + y)
            return x_new.at[i, 0].set(y), total + y

        return lax.fori_loop(0, 20, body, (x, jnp.float32(0)))

    with pytest.raises(CopyError, match="in a loop, 20 times: 80,000,000 bytes"):
        compiled(scheduled(fun, infer=False, copies="error"), X, donate_argnums=0)
    compiled(scheduled(fun, copies="error"), X, donate_argnums=0)
    compiled(scheduled(loop, copies="error"), X, donate_argnums=0)


def test_a_write_that_nothing_reads():
    """There is no hazard, so that nothing else would be pinned."""
    fun = scheduled(lambda x: x.at[0].set(1.0), copies="error")
    compiled(fun, X, donate_argnums=0)
    with pytest.raises(CopyError, match=COPIED):
        compiled(fun, X)


def test_what_is_no_claim():
    """A copy elsewhere in the program, and one of what the function makes itself."""

    def local(x):
        middle = x * 2
        changed = middle.at[0].set(1.0)
        return jnp.abs(changed - middle).sum()

    compiled(scheduled(local, copies="error"), X)

    def outside(x, v):
        x, y = strict(x)
        return x, y, v.at[0].set(0.0)

    compiled(outside, X, X, donate_argnums=0)


def test_a_part_of_a_larger_program():
    def around(x, i):
        x = jnp.sin(x) @ x
        x_new, y = strict(x)
        return x_new, y * i, x

    with pytest.raises(CopyError, match="4,000,000 bytes"):
        compiled(around, X, I)

    def alone(x, i):
        x_new, y = strict(jnp.sin(x) @ x)
        return x_new, y * i

    compiled(alone, X, I)


@pytest.mark.parametrize("wrap", [jax.vmap, jax.jit, lambda f: jax.vmap(jax.jit(f))])
def test_under_transformations(wrap):
    x = jax.ShapeDtypeStruct((8, 30, 30), jnp.float32)
    fun = wrap(scheduled(lambda x: (x.at[0, 0].add(1), x[0, 0]), copies="error"))
    compiled(fun, x, donate_argnums=0)
    with pytest.raises(CopyError, match=r"^28,800 bytes are copied"):
        compiled(fun, x)


def test_a_gradient():
    def loss(x):
        y = x[0]
        x = x.at[0].set(0.0)
        return (jnp.sin(x) * y).sum()

    x = jnp.arange(600.0).reshape(30, 20)
    found = jax.jit(jax.grad(scheduled(loss, copies="warn")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CopyWarning)
        np.testing.assert_allclose(found(x), jax.grad(loss)(x), rtol=1e-6)


CLEAN = [p.name for p in ALL.values() if p.hazard and not p.unavoidable]
UNDONATED = {"lbfgs_step", "replay_training"}  # they carry an argument that is not donated


@pytest.mark.parametrize("name", sorted({*CLEAN} - UNDONATED)[::2])
def test_programs_that_work_in_place_compile(name):
    program = ALL[name]
    fun, args = program.build(small=True)
    compiled(scheduled(fun, copies="error"), *args, donate_argnums=program.donate)


### What the program's own logic needs: told of while tracing


def test_two_writes_of_one_version():
    with pytest.raises(CopyError) as error:
        jax.eval_shape(jax.jit(scheduled(kept, copies="error")), X, X)
    first, where, legal = str(error.value).splitlines()
    assert first == (
        "a buffer of 4,000,000 bytes is copied in any order: another write keeps its memory."
    )
    assert "reported.py:56:" in where
    assert "reported.py:55:" in where
    assert legal.startswith("  legal: read what is needed before the write")


def test_a_read_that_needs_the_write():
    with pytest.raises(CopyError, match="its old value is read after the write"):
        jax.jit(scheduled(old_and_new, copies="error")).trace(X)


def test_an_old_value_that_is_returned():
    fun = scheduled(lambda x: (x, x.at[0].set(1.0)), copies="error")
    with pytest.raises(CopyError, match="its old value is returned"):
        jax.jit(fun).trace(X)


def test_arithmetic_on_the_old_value_is_in_place():
    """XLA computes the selection in the write's kernel."""

    @scheduled(copies="error")
    def fun(x, i):
        return jnp.where(i > 3, x.at[i].set(1.0), x)

    compiled(fun, X, I, donate_argnums=0)


def test_a_warning_while_tracing():
    with pytest.warns(CopyWarning, match="is copied in any order") as found:
        jax.jit(scheduled(kept, copies="warn")).trace(X, X)
    assert [warning.filename for warning in found] == [__file__]


### Warnings


def test_a_warning_names_the_line_that_compiles():
    fun = jax.jit(scheduled(seed, copies="warn"))
    x = jnp.ones((20, 20))
    with pytest.warns(CopyWarning, match="^1,600 bytes are copied") as found:
        x_new, _ = fun(x)
    assert [warning.filename for warning in found] == [__file__]
    assert x_new[0, 0] == 2
    fun(x)  # compiled once, told of once


def test_a_warning_as_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CopyWarning, match=f"^{COPIED}"):
            compiled(scheduled(seed, copies="warn"), X)


### Caches, eager code, reports


def test_the_persistent_cache(tmp_path):
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    old = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        compiled(scheduled(seed), X)
        assert [*tmp_path.iterdir()]
        for _ in range(2):
            jax.clear_caches()
            with pytest.raises(CopyError, match=COPIED):
                compiled(strict, X)
        with pytest.warns(CopyWarning, match=COPIED):
            compiled(scheduled(seed, copies="warn"), X)
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_eager_code_is_not_compiled():
    x_new, y = strict(jnp.zeros((5, 5)))
    assert (x_new[0, 0], y) == (1, 0)


def test_a_report_says_it_in_its_own_way():
    found = explain(strict)(X)
    assert [copy.cause for copy in found.copies] == ["not-donated"]
    assert explain(scheduled(kept, copies="error"), donate_argnums=0)(X, X).copies


def test_without_a_policy_nothing_more_is_pinned():
    def fun(x):
        return x.at[1].set(1.0)

    assert pins(scheduled(fun), X) == 0
    assert pins(scheduled(fun, copies="allow"), X) == 0
    assert pins(scheduled(fun, copies="error"), X) == 1
    for copies in ("warn", "error"):
        x = jnp.ones((3, 4))
        np.testing.assert_array_equal(scheduled(fun, copies=copies)(x), fun(x))


@pytest.mark.parametrize("copies", ["never", "", None, True, 3, ["warn"], np.zeros(3)])
def test_values_that_are_no_policy(copies):
    with pytest.raises(ScheduleError) as error:
        scheduled(copies=copies)
    first, where, legal = str(error.value).splitlines()
    assert first == f'`copies` must be "allow", "warn" or "error", but it is {copies!r}.'
    assert where == "  where: scheduled(..., copies=...)"
    assert legal.startswith('  legal: copies="allow"')
