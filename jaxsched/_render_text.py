"""A report as text of at most a hundred columns."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jaxsched._lines import Line, short_names
from jaxsched._verdicts import Verdict

if TYPE_CHECKING:
    from jaxsched._report import Buffer, Copy, Edge, Report

__all__ = ["copies_text", "lines_of", "text", "where"]

_WIDTH = 100
_SHOWN = 20  # edges, buffers and copies: the rest is only counted


def text(report: "Report") -> str:
    """The report, section by section."""
    short = short_names(lines_of(report))
    lines = [*_summary(report)]
    for title, section in (
        ("copies", copies_text(report.copies, short)),
        ("buffers", _buffers(report, short)),
        ("order", _edges(report, short)),
        ("the inferred order, to paste", report.declarations),
    ):
        body = [*section]
        if body:
            lines += ["", title, *(f"  {line}" for line in body)]
    return "\n".join(_cut(line.rstrip(), _WIDTH) for line in lines)


def lines_of(report: "Report") -> Iterator[Line]:
    """Every line that a report names."""
    for edge in report.edges:
        yield from (line for line in (edge.first, edge.then, edge.declared_at) if line)
    for copy in report.copies:
        yield from (line for line in (copy.write, copy.forced_by) if line)
    for buffer in report.buffers:
        yield from (line for line in (buffer.born, buffer.scope) if line)
        yield from (*buffer.reads, *buffer.writes)
    for chart in report.charts:
        yield from (line for _, line in chart.instructions if line)


def where(line: Line | None, short: dict[str, str]) -> str:
    """`file:line`, with the shortest name of the file."""
    return "an unknown line" if line is None else f"{short[line.file]}:{line.number}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _summary(report: "Report") -> Iterator[str]:
    state = "scheduled" if report.scheduled else "not scheduled"
    yield f"{report.name}: {state}, {'ok' if report.ok else 'NOT OK'}"
    rows = [
        ("copies", _copied(len(report.copies), report.copied_bytes)),
        ("temporary memory", f"{report.temp_bytes:,} bytes"),
    ]
    then = ["", ""]
    if (other := report.rescheduled) is not None:
        then = [_copied(other.copies, other.copied_bytes), f"{other.temp_bytes:,} bytes"]
    width = max(len(value) for _, value in rows)
    for (name, value), after in zip(rows, then, strict=True):
        other_way = "with infer=True" if report.scheduled else "with @scheduled"
        suffix = f"   {other_way}: {after}" if after else ""
        yield f"  {name:18s}{value:{width}s}{suffix}"


def _copied(number: int, nbytes: int) -> str:
    return f"{number}, of {nbytes:,} bytes" if number else "none"


def copies_text(copies: Iterable["Copy"], short: dict[str, str]) -> Iterator[str]:
    """For each copy what it copies, for what, why and how to avoid it; equal ones are counted."""
    counted = Counter(copies)
    for copy in [*counted][:_SHOWN]:
        number = f"{counted[copy]} x " if counted[copy] > 1 else ""
        yield f"{number}{copy.nbytes:,} bytes of {copy.buffer}, {_times(copy)}"
        if copy.write is not None:
            yield f"  for    {_at(copy.write, short)}"
        for i, line in enumerate(textwrap.wrap(f"{copy.reason}", _WIDTH - 12)):
            yield f"  {'' if i else 'why':7s}{line}"
        if copy.forced_by is not None and copy.forced_by != copy.write:
            yield f"         {_at(copy.forced_by, short)}"
        yield f"  fix    {copy.fix or 'none is known'}"
    yield from _rest(len(counted), "more copies")


def _times(copy: "Copy") -> str:
    if not copy.in_loop:
        return "once"
    if copy.trip_count is None or copy.total_bytes is None:
        return "in a loop, trip count unknown"
    return f"in a loop, {copy.trip_count:,} times: {copy.total_bytes:,} bytes"


def _at(line: Line, short: dict[str, str]) -> str:
    return f"{where(line, short)}  {line.statement}"


def _buffers(report: "Report", short: dict[str, str]) -> Iterator[str]:
    for buffer in report.buffers[:_SHOWN]:
        copied = buffer.copied_bytes
        life = f"COPIED, {copied:,} bytes" if copied else "in place"
        yield f"{buffer.name}, {buffer.nbytes:,} bytes, {_origin(buffer, short)}: {life}"
        for name, lines in (("read", buffer.reads), ("written", buffer.writes)):
            for line in lines[:_SHOWN]:
                yield f"  {name:9s}{_at(line, short)}"
    yield from _rest(len(report.buffers), "more buffers")


def _origin(buffer: "Buffer", short: dict[str, str]) -> str:
    if buffer.scope is not None:
        inside = f"inside of {where(buffer.scope, short)}"
        return inside if buffer.argument else f"{inside}, from {where(buffer.born, short)}"
    if buffer.argument:
        return f"argument, {'donated' if buffer.donated else 'not donated'}"
    return f"from {where(buffer.born, short)}"


def _edges(report: "Report", short: dict[str, str]) -> Iterator[str]:
    edges = sorted(report.edges, key=lambda edge: edge.verdict is not Verdict.LOST)
    for edge in edges[:_SHOWN]:
        yield f"{_kind(edge, short)}, {edge.verdict}"
        for name, line in (("first", edge.first), ("then", edge.then)):
            if line is not None:
                yield f"  {name:7s}{_at(line, short)}"
    yield from _rest(len(edges), "more edges")


def _kind(edge: "Edge", short: dict[str, str]) -> str:
    if edge.declared_at is None:
        return edge.kind
    return f"{edge.kind} at {where(edge.declared_at, short)}"


def _rest(number: int, what: str) -> Iterable[str]:
    return [f"... and {number - _SHOWN:,} {what}"] if number > _SHOWN else []
