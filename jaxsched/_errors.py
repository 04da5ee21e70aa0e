"""The exceptions that users see; each says what is wrong, where, and what would be legal."""

__all__ = ["CopyError", "CopyWarning", "CycleError", "ScheduleError", "as_own_error", "message"]


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


class CopyError(ScheduleError):
    """A buffer is copied in a function under `scheduled(copies="error")`."""


class CopyWarning(UserWarning):
    """A buffer is copied in a function under `scheduled(copies="warn")`."""


def as_own_error(error: Exception) -> Exception | None:
    """The error of ours that XLA's report of a failed compilation quotes, if there is one."""
    for kind in (CopyError, CopyWarning):
        _, found, text = str(error).partition(f"{kind.__name__}: ")
        if found:
            return kind(text)
    return None


for _error in (ScheduleError, CycleError, CopyError, CopyWarning):
    _error.__module__ = "jaxsched"
