"""The exceptions that users see; each says what is wrong, where, and what would be legal."""

__all__ = ["CycleError", "ScheduleError", "message"]


def message(wrong: str, where: str, legal: str) -> str:
    """The three-part text that every error of jaxsched carries."""
    return f"{wrong}\n  where: {where}\n  legal: {legal}"


class ScheduleError(ValueError):
    """A schedule cannot mean what was written: the base of every error that jaxsched raises.

    Example:

    >>> import jaxsched
    >>> jaxsched.before(1, 2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    jaxsched.ScheduleError: `before` was called outside of a scheduled function...
    """


class CycleError(ScheduleError):
    """A declared order contradicts the order that data and other declarations already force."""


for _error in (ScheduleError, CycleError):
    _error.__module__ = "jaxsched"
