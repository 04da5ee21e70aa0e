"""A report as data for other programs: JSON, and the graph of its order for Graphviz."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jaxsched._lines import Line, short_names
from jaxsched._render_text import lines_of, where
from jaxsched._verdicts import Verdict

if TYPE_CHECKING:
    from jaxsched._report import Report

__all__ = ["dot", "json_text"]

_STYLES = {
    Verdict.CONTROL: 'color="#1a7f37"',
    Verdict.DATA: 'color="#57606a"',
    Verdict.KERNEL: 'color="#57606a", style=dotted',
    Verdict.UNSEEN: 'color="#57606a", style=dashed',
    Verdict.LOST: 'color="#b3261e", style=bold',
}


def json_text(report: "Report") -> str:
    """The fields of the report and what follows from them, as one JSON object."""
    fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    derived = {"ok": report.ok, "copied_bytes": report.copied_bytes}
    return json.dumps(fields | derived, default=_as_dict, indent=1)


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Line):
        return {
            "file": value.file,
            "line": value.number,
            "function": value.function,
            "statement": value.statement,
        }
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def dot(report: "Report") -> str:
    """The lines as nodes, the order between them as edges with their verdicts."""
    short = short_names(lines_of(report))
    lines = {line for edge in report.edges for line in (edge.first, edge.then) if line}
    numbers = {line: number for number, line in enumerate(sorted(lines))}
    text = [f"digraph {_quoted(report.name)} {{", '  node [shape=box, fontname="monospace"];']
    for line, number in numbers.items():
        label = f"{where(line, short)}\n{line.statement}"
        text.append(f"  n{number} [label={_quoted(label)}];")
    for edge in report.edges:
        if edge.first and edge.then:
            label = f"{edge.kind}: {edge.verdict}"
            style = f"label={_quoted(label)}, {_STYLES[edge.verdict]}"
            text.append(f"  n{numbers[edge.first]} -> n{numbers[edge.then]} [{style}];")
    return "\n".join([*text, "}", ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
