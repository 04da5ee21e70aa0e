"""A report as HTML: one picture a computation, and the text; no script, nothing from elsewhere.

A picture has the instructions from top to bottom in their final order, the buffers from left to
right, and the life of each buffer as a bar.
"""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from jaxsched._lines import Line, short_names
from jaxsched._render_text import lines_of, text, where

if TYPE_CHECKING:
    from jaxsched._report import Chart, Report, Row

__all__ = ["fragment", "page"]

_STEP = 22  # pixels between two instructions
_COLUMN = 30  # pixels between two buffers
_GUTTER = 60  # left of the bars, for control edges
_LABELS = 640  # right of the bars, for instructions
_NAME = 14  # letters of a buffer's name

_STYLE = """
.jaxsched { font: 14px/1.4 system-ui, sans-serif; color: #1b1f24; background: #fff; padding: 8px }
.jaxsched h2 { font-size: 17px; margin: 0 0 4px }
.jaxsched h3 { font-size: 14px; margin: 18px 0 0 }
.jaxsched pre { font: 12px/1.45 ui-monospace, monospace; background: #f6f8fa; padding: 10px;
  overflow-x: auto }
.jaxsched svg { display: block; max-width: none }
.jaxsched svg text { font: 12px ui-monospace, monospace; fill: #1b1f24 }
.jaxsched svg text.code { fill: #57606a }
.jaxsched .plot { overflow-x: auto }
.jaxsched .bar { fill: #a8c7ee }
.jaxsched .bar.copy { fill: #f3b3a6 }
.jaxsched .row { stroke: #eaeef2 }
.jaxsched .read { fill: #fff; stroke: #0a3069; stroke-width: 2 }
.jaxsched .written { fill: #0a3069 }
.jaxsched .returned { fill: none; stroke: #0a3069; stroke-width: 2 }
.jaxsched .copied { stroke: #b3261e; stroke-width: 2; fill: none }
.jaxsched .control { stroke: #1a7f37; stroke-width: 2; fill: none }
.jaxsched .head.control { fill: #1a7f37; stroke: none }
.jaxsched .head.copied { fill: #b3261e; stroke: none }
.jaxsched .legend span { white-space: nowrap; margin-right: 14px }
.jaxsched .legend svg { display: inline-block; vertical-align: middle; margin-right: 3px }
"""


def page(report: "Report") -> str:
    """A whole document."""
    title = escape(f"{report.name}: buffers")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
        '\n<link rel="icon" href="data:,">\n</head>\n<body>\n'
        f"{fragment(report)}\n</body>\n</html>\n"
    )


def fragment(report: "Report") -> str:
    """The part of a document that a notebook shows in its cell."""
    short = short_names(lines_of(report))
    state = "scheduled" if report.scheduled else "not scheduled"
    parts = [
        f"<style>{_STYLE}</style>",
        f"<h2>{escape(report.name)}: {state}, {'ok' if report.ok else 'not ok'}</h2>",
        f"<div>{len(report.copies)} copies of {report.copied_bytes:,} bytes,"
        f" {report.temp_bytes:,} bytes of temporary memory</div>",
        _legend() if report.charts else "",
    ]
    for chart in report.charts:
        title = f"inside of {where(chart.scope, short)}" if chart.scope else "the whole program"
        parts.append(f"<h3>{escape(title)}</h3>")
        parts.append(f'<div class="plot">{_Plot(chart, short).svg()}</div>')
    body = escape(text(report))
    parts.append(f"<details open><summary>text</summary><pre>{body}</pre></details>")
    return f'<div class="jaxsched">{"".join(parts)}</div>'


def _legend() -> str:
    marks = {
        "alive": '<rect class="bar" x="4" y="1" width="10" height="14"/>',
        "alive, as a copy": '<rect class="bar copy" x="4" y="1" width="10" height="14"/>',
        "read": _mark("read", 9, 8),
        "written": _mark("written", 9, 8),
        "returned": _mark("returned", 9, 8),
        "copied": '<path class="copied" d="M1 8H13"/>' + _head("copied", 17, 8),
        "control edge": '<path class="control" d="M1 8H13"/>' + _head("control", 17, 8),
    }
    items = (
        f'<span><svg width="18" height="16" aria-hidden="true">{mark}</svg>{name}</span>'
        for name, mark in marks.items()
    )
    return f'<div class="legend">{"".join(items)}</div>'


class _Plot:
    """One chart as SVG."""

    def __init__(self, chart: "Chart", short: dict[str, str]):
        self._chart = chart
        self._short = short
        longest = max((len(row.name) for row in chart.rows), default=0)
        self._head = 24 + 5 * min(longest, _NAME)  # above the bars, for their names

    def svg(self) -> str:
        chart = self._chart
        right = _GUTTER + _COLUMN * len(chart.rows)
        height = self._y(len(chart.instructions))
        parts = [f'<svg width="{right + _LABELS}" height="{height}" role="img">']
        for number, (name, line) in enumerate(chart.instructions):
            y, place = self._y(number), escape(self._place(line))
            parts.append(
                f'<line class="row" x1="{_GUTTER - 6}" x2="{right}" y1="{y}" y2="{y}"/>'
                f'<text x="{right + 8}" y="{y + 4}">{escape(name)}'
                f'<tspan class="code" dx="10">{place}</tspan><title>{place}</title></text>'
            )
        for number, row in enumerate(chart.rows):
            parts += self._row(number, row)
        for before, after in chart.control_edges:
            parts.append(self._control(before, after))
        return "".join([*parts, "</svg>"])

    def _row(self, number: int, row: "Row") -> Iterator[str]:
        x, top, bottom = _x(number), self._y(row.start), self._y(row.end)
        what = f"{row.name}, {row.nbytes:,} bytes"
        born = self._place(self._chart.instructions[row.start][1])
        kind = "bar" if row.copy_of is None else "bar copy"
        foot = self._head - 14
        turned = f' transform="rotate(-45 {x} {foot})"' if len(row.name) > 3 else ""
        yield (
            f'<text x="{x - 4}" y="{foot}"{turned}>'
            f"{escape(row.name[:_NAME])}<title>{escape(what)}</title></text>"
            f'<rect class="{kind}" x="{x - 7}" y="{top - 7}" width="14"'
            f' height="{bottom - top + 14}" rx="3">'
            f"<title>{escape(f'{what}, from {born}' if born else what)}</title></rect>"
        )
        if row.copy_of is not None:
            start = _x(row.copy_of)
            tip = x - 4 if start < x else x + 4
            yield (
                f'<g><path class="copied" d="M{start} {top}H{tip}"/>'
                f"{_head('copied', tip, top, leftwards=start > x)}"
                f"<title>{escape(f'copy of {what}')}</title></g>"
            )
        for position, event, line in row.events:
            title = f"{row.name}: {event} by {self._chart.instructions[position][0]}"
            if line is not None:
                title += f", {self._place(line)}"
            yield f"<g>{_mark(event, x, self._y(position))}<title>{escape(title)}</title></g>"

    def _control(self, before: int, after: int) -> str:
        first, then = (self._chart.instructions[number][0] for number in (before, after))
        top, bottom, x = self._y(before), self._y(after), _GUTTER - 12
        bend = max(6, x - 10 - 4 * (after - before))
        return (
            f'<g><path class="control" d="M{x} {top}C{bend} {top} {bend} {bottom} {x} {bottom}"/>'
            f"{_head('control', x + 6, bottom)}"
            f"<title>{escape(f'control edge: {first} before {then}')}</title></g>"
        )

    def _place(self, line: Line | None) -> str:
        return f"{where(line, self._short)}  {line.statement}" if line else ""

    def _y(self, instruction: int) -> int:
        return self._head + _STEP * instruction + _STEP // 2


def _mark(event: str, x: int, y: int) -> str:
    if event == "written":
        return f'<rect class="written" x="{x - 5}" y="{y - 5}" width="10" height="10"/>'
    if event == "returned":
        return f'<path class="returned" d="M{x - 5} {y - 2}L{x} {y + 4}L{x + 5} {y - 2}"/>'
    return f'<circle class="read" cx="{x}" cy="{y}" r="4"/>'


def _head(kind: str, x: int, y: int, *, leftwards: bool = False) -> str:
    back = x + 7 if leftwards else x - 7
    return f'<path class="head {kind}" d="M{x} {y}L{back} {y - 4}L{back} {y + 4}Z"/>'


def _x(row: int) -> int:
    return _GUTTER + _COLUMN * row + _COLUMN // 2
