"""The results as a Markdown table and a summary in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks._measure import RIVALS, does_its_job, ours_for

SLACK = 64 << 10  # bytes of copies or temporary memory that do not count

Record = dict[str, Any]

LEGEND = (
    "Each cell: buffers copied (`*` some of them in a loop) / buffers of temporary memory / "
    "time relative to plain jit."
)


def header(columns: Sequence[str]) -> str:
    names = ["program", "source", *columns]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def row(name: str, record: Record) -> str:
    cells = [cell(c, record["buffer"]) for c in record["cells"].values()]
    return f"| {' | '.join([f'`{name}`', record['source'] or record['category'], *cells])} |"


def cell(c: dict[str, Any], buffer: int) -> str:
    if "skipped" in c:
        return "-"
    if "error" in c:
        return "aborted" if c["error"].startswith("aborted") else "error"
    parts = []
    if "copied" in c:
        parts = [amount(c["copied"] / buffer) + "*" * c["in_loop"], amount(c["temp"] / buffer)]
    if "time_ratio" in c:
        ratio = c["time_ratio"]["median"]
        parts.append(f"{ratio:{'.2f' if ratio > 0.1 else '.1g'}}x")
    if not c["correct"]:
        parts.append("**wrong**")
    if c.get("ordered") is False:
        parts.append("unordered")
    return " / ".join(parts)


def amount(buffers: float) -> str:
    return f"{buffers:.1f}".removesuffix(".0")


def clean(record: Record, column: str) -> bool:
    """Whether a column reaches what the program is about."""
    c, plain = record["cells"][column], record["cells"].get("plain", {})
    if not does_its_job(c):
        return False
    if record["category"] in ("correctness", "ordering"):
        return True
    if record["category"] == "guard":
        return all(c[fact] <= plain.get(fact, c[fact]) + SLACK for fact in ("copied", "temp"))
    return c["copied"] <= record["unavoidable"] * record["buffer"]


def summary(records: dict[str, Record]) -> Iterator[str]:
    """Counts and means per column, then every program in which scheduling is not the best."""
    columns = list(next(iter(records.values()))["cells"])
    for column in columns:
        there = {n: r for n, r in records.items() if "skipped" not in r["cells"][column]}
        parts = []
        if any("copied" in r["cells"][column] for r in there.values()):
            parts.append(f"{sum(clean(r, column) for r in there.values())} of {len(there)} clean")
        for what, title in (("time", "time"), ("compile", "compile time")):
            right = [c for r in there.values() if does_its_job(c := r["cells"][column])]
            ratios = [c[key]["median"] for c in right if (key := f"{what}_ratio") in c]
            if ratios:
                parts.append(f"plain/{column} {title} {1 / geometric_mean(ratios):.2f}")
        if parts:
            yield f"- {column}: {'; '.join(parts)}"
    for name, record in records.items():
        yield from behind(name, record)


def behind(name: str, record: Record) -> Iterator[str]:
    """What scheduling does worse in one program than the best of the other means."""
    cells = record["cells"]
    for ours in ("scheduled", "declared"):
        if "error" in cells.get(ours, {}):
            yield f"- `{name}`: {ours} fails: {cells[ours]['error']}"
        if cells.get(ours, {}).get("correct") is False:
            yield f"- `{name}`: {ours} gives a wrong answer"
    ours = ours_for(record["category"])
    mine = cells.get(ours, {})
    if "correct" not in mine:
        return
    rivals = [n for n in RIVALS if does_its_job(cells.get(n, {}))]
    for fact, title in (("copied", "copies"), ("temp", "takes temporary memory of")):
        least = min((cells[n][fact] for n in rivals), default=mine[fact])
        if mine[fact] > least + SLACK:
            by = next(n for n in rivals if cells[n][fact] == least)
            yield f"- `{name}`: {ours} {title} {mine[fact]:,} bytes, {by} {least:,}"
    if mine.get("slower"):
        ratio = mine["rival_ratio"]
        yield (
            f"- `{name}`: {ours} takes {ratio['median']:.2f} "
            f"({ratio['q1']:.2f} to {ratio['q3']:.2f}) times as long as {mine['rival']}"
        )
