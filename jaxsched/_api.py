"""The decorator `scheduled`."""

import functools
from collections.abc import Callable
from typing import Any, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxsched._before import collecting
from jaxsched._errors import ScheduleError, message
from jaxsched._jax import eval_jaxpr, tracing
from jaxsched._options import CopyPolicy, Options
from jaxsched._plan import plan
from jaxsched._record import current_record

__all__ = ["scheduled"]


@overload
def scheduled[**P, R](
    fun: Callable[P, R], /, *, infer: bool = True, copies: CopyPolicy = "allow"
) -> Callable[P, R]: ...
@overload
def scheduled[**P, R](
    fun: None = None, /, *, infer: bool = True, copies: CopyPolicy = "allow"
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def scheduled(fun: Any = None, /, *, infer: bool = True, copies: CopyPolicy = "allow") -> Any:
    """Orders the reads and in-place writes of a function so that XLA does not copy its buffers.

    ```
    @partial(jax.jit, donate_argnums=0)       @partial(jax.jit, donate_argnums=0)
    @scheduled                                def f(x):
    def f(x):                                     y = x[0, 0]
        y = x[0, 0]                      -->      x, y = pin(x, y)
        x = x.at[0, 0].add(1)                     x = x.at[0, 0].add(1)
        return x, y                               return x, y
    ```

    The function is traced, its jaxpr gets an order, and that is evaluated in the function's place,
    under whatever transformation is at work: `jit` (around it or inside of it), `grad`, `vmap`,
    `scan`. A function without a read that a write could overtake is left exactly as it is.

    Arguments:
        fun: the function to transform, with any signature. Arrays in its arguments are traced;
            everything else (strings, Python numbers, objects) is seen by the function as it is.
        infer: also order every read of a buffer before the write that reuses its memory, where
            that is free to choose. With False only the orders declared by `before` are kept.
        copies: what to do where XLA copies an argument, or a value carried by a loop, that the
            function updates: "allow" it, "warn" with a `CopyWarning`, or raise an "error"
            (`CopyError`). It shows when the function is compiled; where the function's own logic
            needs the copy, when it is traced. A program from the persistent compilation cache was
            told of when it was compiled.

    Returns:
        A function with the signature, the name and the results of `fun`.

    Raises:
        ScheduleError: when `fun` is not callable or an option is none of those above; and, once the
            function is called, for declarations that have no meaning or contradict each other.
        CopyError: see `copies`.

    Example:

    >>> from functools import partial
    >>> import jax, jax.numpy as jnp
    >>> from jaxsched import scheduled
    >>> @partial(jax.jit, donate_argnums=0)
    ... @scheduled
    ... def f(x):
    ...     y = x[0, 0]
    ...     return x.at[0, 0].add(1), y
    >>> x, y = f(jnp.zeros((1000, 1000)))
    >>> x[0, 0].item(), y.item()
    (1.0, 0.0)
    >>> f.lower(x).compile().memory_analysis().temp_size_in_bytes < 1000
    True
    """
    if not isinstance(infer, bool):
        raise ScheduleError(
            message(
                f"`infer` must be True or False, but it is {infer!r}.",
                "scheduled(..., infer=...)",
                "infer=True (order what is free to order) or infer=False (declared orders only).",
            )
        )
    if not isinstance(copies, str) or copies not in get_args(CopyPolicy):
        raise ScheduleError(
            message(
                f'`copies` must be "allow", "warn" or "error", but it is {copies!r}.',
                "scheduled(..., copies=...)",
                'copies="allow" (as XLA does), copies="warn" (CopyWarning) or copies="error".',
            )
        )
    if fun is None:
        return functools.partial(scheduled, infer=infer, copies=copies)
    if not callable(fun):
        raise ScheduleError(
            message(
                f"`scheduled` transforms a function, but it was given {fun!r}.",
                "scheduled(fun)",
                "@scheduled or @scheduled(infer=False) on a function, or scheduled(f)(x) to call.",
            )
        )
    options = Options(infer=infer, copies=copies)

    @functools.wraps(fun)
    def scheduled_fun(*args: Any, **kwargs: Any) -> Any:
        (args, kwargs), call = _hold_static(fun, (args, kwargs))
        with collecting():
            jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(*args, **kwargs)
        asked = options
        if (record := current_record()) is not None:
            jaxpr, asked = record.numbered(jaxpr), record.options(options)
        try:
            planned = plan(jaxpr, asked, compiled=tracing())
        except ScheduleError as error:
            raise error.with_traceback(None) from None  # the user's lines are in the message
        leaves = eval_jaxpr(planned, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return scheduled_fun


class _Static:
    """Stands in the arguments for what is not traced; a pytree without leaves."""

    def __init__(self, value: Any):
        self.value = value


jax.tree_util.register_pytree_node(_Static, lambda static: ((), static), lambda static, _: static)


def _hold_static(fun: Any, arguments: Any) -> tuple[Any, Any]:
    """The arguments without what is not an array, and `fun` as a function of the rest.

    What `jit` calls static and what eager code passes as plain Python values arrive here alike.
    """
    leaves, tree = jax.tree.flatten(arguments)
    traced = [_is_array(leaf) for leaf in leaves]
    if all(traced):
        return arguments, fun
    held = [leaf if keep else _Static(leaf) for leaf, keep in zip(leaves, traced, strict=True)]

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(
            lambda leaf: leaf.value if isinstance(leaf, _Static) else leaf,
            (args, kwargs),
            is_leaf=lambda leaf: isinstance(leaf, _Static),
        )
        return fun(*args, **kwargs)

    return jax.tree.unflatten(tree, held), call


# Not whatever has a shape and a dtype: a user's class may have both and be no array.
_ARRAYS = (jax.Array, Tracer, jax.Ref, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def _is_array(leaf: Any) -> bool:
    kinds = (jnp.number, jnp.bool_, jax.dtypes.extended)
    return isinstance(leaf, _ARRAYS) and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)
