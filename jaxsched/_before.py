"""The declaration `before`: a marker equation that `scheduled` reads and removes again."""

import itertools
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxsched._errors import ScheduleError, message
from jaxsched._jax import Effect, allow_effect, caller_line, keyed_state, leaks_as

__all__ = ["before", "collecting", "in_rule", "marker_effect", "marker_p"]


class _OrderEffect(Effect):
    """Keeps the marker alive: JAX drops an equation without results and effects while tracing."""

    def __str__(self) -> str:
        return "Order"


marker_effect = _OrderEffect()
allow_effect(_OrderEffect)

marker_p = Primitive("before")
marker_p.multiple_results = True


# Outside of scheduled functions; while one is traced; while a derivative rule of one is run again.
_OUTSIDE, _COLLECTING, _RULE = range(3)
_state = keyed_state(
    "jaxsched_before", help="Whether jaxsched.before is called in a scheduled function."
)


def collecting() -> Any:
    """While a scheduled function is traced, `before` may be called."""
    return _state(_COLLECTING)


def in_rule() -> Any:
    """In a derivative rule that runs after the plan is made, `before` has nothing to act on."""
    return _state(_RULE)


def before(*values: Any) -> None:
    """Declares that each value is finished before the computation of the next one starts.

    ```
    y = x[0, 0]                               y = x[0, 0]
    x_new = x.at[0, 0].add(1)          -->    x, y = pin(x, y)
    before(y, x_new)                          x_new = x.at[0, 0].add(1)
    ```

    The declaration is about values that are computed already; it may stand anywhere after them in
    the same scope: at top level, in the body of a loop or a branch, in a nested jitted function,
    under `vmap`, `grad` or `checkpoint`. An order that holds by data anyway may be declared too.

    Arguments:
        *values: two or more arrays, or pytrees of arrays, of any shape and dtype. Every array of
            one value is finished before any array of the next one is started.

    Returns:
        None: the values themselves go on being used.

    Raises:
        ScheduleError: for fewer than two values, outside of a scheduled function, and for a value
            that no equation of this scope computes (an argument, a constant, a value of another
            scope or of another call).
        CycleError: once the function is traced, where the order contradicts the data.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> from jaxsched import before, scheduled
    >>> @scheduled
    ... def pop(x, i):
    ...     y = x[i]
    ...     x_new = x.at[i].set(0.0)
    ...     before(y, x_new)
    ...     return x_new, y
    >>> x_new, y = jax.jit(pop, donate_argnums=0)(jnp.arange(4.0), 2)
    >>> y.item(), x_new.tolist()
    (2.0, [0.0, 1.0, 0.0, 3.0])
    """
    where = caller_line()
    if len(values) < 2:
        raise ScheduleError(
            message(
                f"`before` orders two or more values, but it was given {len(values)}.",
                where,
                "before(read, update): the read is finished before the update starts.",
            )
        )
    if _state.value == _RULE:
        return
    if _state.value == _OUTSIDE:
        raise ScheduleError(_outside(where))
    groups = [jax.tree.leaves(value) for value in values]
    for i, group in enumerate(groups):
        if not group:
            raise ScheduleError(
                message(
                    f"`before` cannot order value {i}: {values[i]!r} holds no array.",
                    where,
                    "arrays, or pytrees of arrays, that the scheduled function has computed.",
                )
            )
        for leaf in group:
            _check_computed(i, leaf, where)
    with leaks_as(lambda: _leaked(where)):
        leaves = itertools.chain.from_iterable(groups)
        marker_p.bind(*leaves, groups=tuple(map(len, groups)), pristine=True)


def _check_computed(i: int, leaf: Any, where: str) -> None:
    if isinstance(leaf, Tracer):
        return
    kind = "a constant" if isinstance(leaf, jax.Array) or hasattr(leaf, "shape") else "not an array"
    raise ScheduleError(
        message(
            f"`before` cannot order value {i}: it is {kind} ({type(leaf).__name__});"
            " no equation of the scheduled function computes it.",
            where,
            "values computed from the arguments of the scheduled function.",
        )
    )


def _outside(where: str) -> str:
    return message(
        "`before` was called outside of a scheduled function, where it cannot order anything.",
        where,
        "call it in a function that `jaxsched.scheduled` transforms, or in one that it calls.",
    )


def _leaked(where: str) -> ScheduleError:
    return ScheduleError(
        message(
            "`before` was given a value of another scope: it was computed in a loop body, a branch"
            " or another call which is over, so nothing here can wait for it.",
            where,
            "return the value from that scope and order what it returned,"
            " or declare the order inside of that scope.",
        )
    )


### marker_p rules


@marker_p.def_impl
def _impl(*args: Any, **params: Any) -> list[Any]:
    raise ScheduleError(_outside(caller_line()))


@marker_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, **params: Any) -> tuple[list[Any], set[Effect]]:
    return [], {marker_effect}


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    marker_p.bind(*args, **params)
    return [], []


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    # Differentiation may split a scope, and a value that was computed in it becomes a residual
    # that comes in from outside: `pristine` says that this has not happened.
    marker_p.bind(*primals, **params | {"pristine": False})
    return [], []


def _lower(ctx: Any, *args: Any, **params: Any) -> list[Any]:
    # A jaxpr that was made inside of a scheduled function and is evaluated outside of one.
    raise ScheduleError(_outside("a jaxpr that was traced in a scheduled function"))


batching.primitive_batchers[marker_p] = _batch
ad.primitive_jvps[marker_p] = _jvp
mlir.register_lowering(marker_p, _lower)
