"""`explain`: compiles a function and says what became of its buffers."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxsched._causes import explained_copies
from jaxsched._charts import buffers_and_charts
from jaxsched._errors import ScheduleError, message
from jaxsched._jax import with_jaxpr
from jaxsched._lines import Line
from jaxsched._options import Options
from jaxsched._plan import plan
from jaxsched._program import Program
from jaxsched._record import Order, Record, recording
from jaxsched._report import Edge, Report, Totals
from jaxsched._verdicts import verdict

__all__ = ["explain"]


def explain(
    fun: Callable[..., Any],
    /,
    *,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    infer: bool = True,
) -> Callable[..., Report]:
    """Says what became of a function's buffers: what is copied, why, and how to avoid it.

    ```
    report = explain(f, donate_argnums=0)(x)
    ```

    The function is traced and compiled, and never run. For one that is not under
    `jaxsched.scheduled` the report also says what `scheduled` would change.

    Arguments:
        fun: a plain function, a jitted or a scheduled one, or one that calls such functions.
        donate_argnums, static_argnums, static_argnames: as for `jax.jit`, for a function which is
            not jitted; one that is brings its own.
        infer: for a function that is not scheduled, whether to compare it with the same function
            under `scheduled(infer=True)`, which takes a second compilation.

    Returns:
        A function that takes the arguments of `fun`, arrays or `jax.ShapeDtypeStruct`s, and returns
        a `Report`: `edges`, `buffers`, `copies`, `temp_bytes` and `ok`.

    Raises:
        ScheduleError: when `fun` is not callable, or is jitted and has its options given again.

    Example:

    >>> import jax, jax.numpy as jnp
    >>> from jaxsched import explain
    >>> def f(x):
    ...     y = x[0, 0]
    ...     return x.at[0, 0].add(1), y
    >>> x = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    >>> report = explain(f, donate_argnums=0)(x)
    >>> report.ok, report.temp_bytes, report.rescheduled.temp_bytes
    (False, 4000000, 0)
    >>> [(copy.nbytes, copy.cause, copy.fix) for copy in report.copies][0]
    (4000000, 'reader-after-write', '@scheduled')
    """
    options = {
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    given = {name: value for name, value in options.items() if value is not None}
    jitted = _jitted(fun, given)

    def report(*args: Any, **kwargs: Any) -> Report:
        with _progress(getattr(fun, "__name__", "function")):
            return _report(jitted, infer, args, kwargs)

    return report


def _jitted(fun: Any, options: dict[str, Any]) -> Any:
    if not callable(fun):
        raise ScheduleError(
            message(
                f"`explain` compiles a function, but it was given {fun!r}.",
                "explain(fun)",
                "explain(f)(x), for a function f of x.",
            )
        )
    if not hasattr(fun, "trace"):
        return jax.jit(fun, **options)
    if options:
        raise ScheduleError(
            message(
                "`explain` was given a jitted function together with options of `jax.jit`.",
                f"explain(..., {', '.join(f'{k}={v!r}' for k, v in options.items())})",
                "the options of the function's own `jax.jit`, or a function that is not jitted.",
            )
        )
    return fun


def _report(jitted: Any, infer: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    with recording() as record:
        traced = jitted.trace(*args, **kwargs)
        is_scheduled = record.is_used
        if not is_scheduled:
            traced = with_jaxpr(traced, record.numbered(traced.jaxpr))
    # The same function with every order that is free to choose.
    free, inferred = traced, record
    if infer and not is_scheduled:
        with recording() as inferred:
            free = with_jaxpr(traced, plan(traced.jaxpr, Options(), compiled=True))
    elif infer and record.is_restricted:
        with recording(infer=True) as inferred:
            free = jitted.trace(*args, **kwargs)
    program = Program.of(traced)
    other = program if free.jaxpr is traced.jaxpr else Program.of(free)
    known = record if is_scheduled else inferred
    edges = tuple(_edges(program, known))
    buffers, charts = buffers_and_charts(program, known)
    compared = infer and (record.is_restricted or not is_scheduled)
    return Report(
        name=traced.fun_name,
        scheduled=is_scheduled,
        edges=edges,
        buffers=buffers,
        copies=explained_copies(program, known, other if compared else None, is_scheduled),
        temp_bytes=program.temp_bytes,
        arguments=tuple(program.arguments.values()),
        rescheduled=_totals(other) if compared else None,
        declarations=tuple(_declarations(_edges(other, inferred))) if compared else (),
        charts=charts,
    )


def _totals(program: Program) -> Totals:
    copied = sum(copy.nbytes for copy in program.copies)
    return Totals(len(program.copies), copied, program.temp_bytes)


def _edges(program: Program, record: Record) -> Iterator[Edge]:
    seen = set()
    for order in record.orders:
        edge = Edge(
            order.kind,
            Line.of_equation(order.source.payload),
            Line.of_equation(order.target.payload),
            verdict(program.instances, order),
            _declared_at(order),
        )
        if edge not in seen:
            seen.add(edge)
            yield edge


def _declared_at(order: Order) -> Line | None:
    return None if order.origin is None else Line.of_equation(order.origin)


def _declarations(edges: Iterable[Edge]) -> Iterator[str]:
    """The inferred order as lines to paste, with what has no name yet as comments."""
    reads: dict[Line, dict[Line, None]] = {}
    for edge in edges:
        if edge.kind == "inferred" and edge.first is not None and edge.then is not None:
            reads.setdefault(edge.then, {})[edge.first] = None
    for write, lines in sorted(reads.items()):
        named = [line for line in lines if line.names and line.statement != write.statement]
        if named and write.names:
            groups = [name for line in sorted(named) for name in line.names]
            first = groups[0] if len(groups) == 1 else f"({', '.join(groups)})"
            yield f"before({first}, {_tuple(write.names)})  # behind line {write.last}"
        for line in sorted(lines):
            if line != write and (line not in named or not write.names):
                where = f"line {line.number} before line {write.number}"
                yield f"# {where}: the values need names first"


def _tuple(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


@contextlib.contextmanager
def _progress(name: str) -> Iterator[None]:
    """A line on a terminal once the work has taken a second."""
    timer = threading.Timer(1, _show, [f"explain: compiling {name} ..."])
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if sys.stderr.isatty():
            _show("")


def _show(text: str) -> None:
    print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
