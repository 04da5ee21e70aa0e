"""`assert_in_place`: for a test suite, that a function updates its donated arguments in place."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxsched._errors import ScheduleError, message
from jaxsched._explain import explain
from jaxsched._lines import short_names
from jaxsched._render_text import copies_text, lines_of
from jaxsched._report import Copy, Report

__all__ = ["assert_in_place"]


def assert_in_place(
    fun: Callable[..., Any],
    /,
    *args: Any,
    donate_argnums: int | Sequence[int] = 0,
    **kwargs: Any,
) -> None:
    """Asserts that a compiled function updates its donated arguments in place.

    It compiles the function, for the shapes of the arguments, and never runs it. It fails where
    XLA copies a donated array, at top level, in a loop or in a branch, or where the function needs
    as much temporary memory as the largest of them.

    Arguments:
        fun: a plain, a jitted or a scheduled function.
        *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        donate_argnums: the positions of the donated arguments; a jitted function has its own.

    Raises:
        AssertionError: with the bytes, the lines and the fix for each copy.
        ScheduleError: when no argument is donated.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> from jaxsched import assert_in_place, scheduled
    >>> @scheduled
    ... def f(x):
    ...     y = x[0, 0]
    ...     return x.at[0, 0].add(1), y
    >>> assert_in_place(f, jax.ShapeDtypeStruct((1000, 1000), jnp.float32))
    """
    __tracebackhide__ = True  # pytest: show the line of the test
    own = hasattr(fun, "trace")  # what `jit` returns
    report = explain(fun, donate_argnums=None if own else donate_argnums)(*args, **kwargs)
    donated = {each.name: each.nbytes for each in report.arguments if each.donated}
    if not donated:
        raise ScheduleError(
            message(
                f"`assert_in_place` was given `{report.name}`, which no argument is donated to.",
                "assert_in_place(fun, ...)",
                "donate_argnums=0 or other positions; in the `jax.jit` of a jitted function.",
            )
        )
    copies = [copy for copy in report.copies if _is_of(copy, report, donated)]
    largest = max(donated.values())
    if copies or report.temp_bytes >= largest:
        raise AssertionError(_failure(report, copies, donated, largest))


def _is_of(copy: Copy, report: Report, donated: dict[str, int]) -> bool:
    """Whether a copy is one of a donated array: by its name, or in a loop by its size."""
    if copy.buffer in donated:
        return True
    kept = {each.name for each in report.arguments if not each.donated}
    return copy.buffer not in kept and copy.nbytes in donated.values()


def _failure(report: Report, copies: list[Copy], donated: dict[str, int], largest: int) -> str:
    wrong = (
        f"`{report.name}` does not update its donated arguments in place:"
        f" {sum(copy.nbytes for copy in copies):,} bytes are copied,"
        f" {report.temp_bytes:,} bytes are temporary memory."
    )
    lines = copies_text(copies, short_names(lines_of(report)))
    where = "\n    ".join(lines) or "no copy; what XLA computes in between is as large"
    names = ", ".join(f"{name} ({nbytes:,} bytes)" for name, nbytes in donated.items())
    legal = f"no copy of {names}, and less than {largest:,} bytes of temporary memory."
    return message(wrong, where, legal)
