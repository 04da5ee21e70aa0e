"""The results as a picture: time of every column relative to plain jit, program by program."""

from __future__ import annotations

from typing import Any

SHOWN = ("region", "program_order", "barrier", "new_ref", "scheduled")


def plot(records: dict[str, dict[str, Any]], path: str) -> None:
    """Write a PNG: a row per program, a dot per column at its median, a bar over the quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.22 * len(records)), layout="constrained")
    for column in SHOWN:
        points = [
            (y, c["time_ratio"])
            for y, r in enumerate(records.values())
            if "time_ratio" in (c := r["cells"].get(column, {})) and c["correct"]
        ]
        if not points:
            continue
        middle = [ratio["median"] for _, ratio in points]
        reach = [
            [ratio["median"] - ratio["q1"] for _, ratio in points],
            [ratio["q3"] - ratio["median"] for _, ratio in points],
        ]
        mine = column == "scheduled"
        axes.errorbar(
            middle,
            [y for y, _ in points],
            xerr=reach,
            fmt="o" if mine else ".",
            alpha=1 if mine else 0.6,
            elinewidth=1,
            label=column,
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("time relative to plain jit (median and quartiles; left is faster)")
    axes.set_yticks(range(len(records)), list(records), fontsize=7)
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
