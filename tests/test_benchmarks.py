"""The benchmark suite runs, and says what it measured."""

import json
import os

import pytest

from benchmarks import __main__ as suite
from benchmarks._measure import Options, agree, is_slower, ratios, spread
from benchmarks._runner import run
from benchmarks._table import behind, cell, clean, row, summary

COLUMNS = "plain,barrier,scheduled,declared,numpy"


def aborting(fun):
    """A transformation that kills the process, as a failed check in the compiler does."""
    os.abort()


def failing(fun):
    raise NotImplementedError("no such transformation")


def test_two_programs_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "results.json"
    args = ["row_clear", "softmax", "--quick", "--columns", COLUMNS, "--json", str(path)]
    suite.main(args)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| program | source | plain | barrier | scheduled | declared | numpy |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| `row_clear`", "| `softmax`"]
    assert all(line.count("|") == lines[0].count("|") for line in lines[1:4])
    assert any(line.startswith("- scheduled: 2 of 2 clean") for line in lines)

    results = json.loads(path.read_text())
    assert set(results["environment"]) >= {"jax", "jaxlib", "python"}
    cells = results["programs"]["row_clear"]["cells"]
    assert list(cells) == COLUMNS.split(",")
    assert all(c["correct"] for c in cells.values())
    assert cells["barrier"]["copied"] == cells["scheduled"]["copied"] == 0
    for c in cells.values():
        assert 0 < c["time"]["q1"] <= c["time"]["median"] <= c["time"]["q3"]
    assert results["programs"]["softmax"]["cells"]["declared"] == {"skipped": "no order to declare"}


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib, of the extra `bench`")
    path = tmp_path / "times.png"
    suite.main(["row_swap", "--quick", "--columns", "plain,scheduled", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_crash_costs_one_cell():
    added = {name: f"tests.test_benchmarks:{name}" for name in ("aborting", "failing")}
    options = Options(["plain", "aborting", "failing"], added, repeat=1, compiles=1, small=True)
    records = dict(run(["row_clear", "row_swap"], options))
    assert list(records) == ["row_clear", "row_swap"]
    for record in records.values():
        assert list(record["cells"]) == ["plain", "aborting", "failing"]
        assert record["cells"]["plain"]["correct"]
        assert record["cells"]["aborting"] == {"error": "aborted with SIGABRT"}
        assert record["cells"]["failing"]["error"].endswith("no such transformation")


def test_unknown_names_are_refused(capsys):
    for args, message in (
        (["no_such_program"], "no program matches no_such_program; there are: element_add"),
        (["--columns", "plain,odd"], "no column odd; there are: plain"),
    ):
        with pytest.raises(SystemExit):
            suite.main(args)
        assert message in capsys.readouterr().err


def test_statistics():
    assert spread([3.0]) == {"q1": 3.0, "median": 3.0, "q3": 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"q1": 2.0, "median": 3.0, "q3": 4.0}
    assert ratios([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])["median"] == 2.0
    assert agree([1.0], [1.0 + 1e-7], 1e-5)
    assert not agree([1.0], [1.1], 1e-5)
    assert not agree([1.0, 2.0], [1.0], 1e-5)
    assert not agree((1.0,), [1.0], 1e-5)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.2] * 25, True),
        ([1.04] * 25, False),  # no more than we allow
        ([0.8] * 11 + [1.4] * 14, False),  # could be chance
        ([0.8] * 5 + [1.4] * 20, True),
    ],
)
def test_what_counts_as_slower(ratios, expected):
    assert is_slower(ratios, [1.0] * len(ratios)) is expected


def made(copied=0, temp=0, ratio=1.0, **more):
    of_time = {"q1": ratio, "median": ratio, "q3": ratio}
    facts = {"copied": copied, "in_loop": copied > 0, "temp": temp, "correct": True}
    return facts | {"time": of_time, "time_ratio": of_time} | more


def record(category="in-place", **cells):
    return {
        "source": "",
        "category": category,
        "buffer": 1 << 20,
        "unavoidable": int(category == "copy-unavoidable"),
        "cells": cells,
    }


def test_cells_read_as_the_legend_says():
    assert cell(made(2 << 20, 1 << 19, 0.25), 1 << 20) == "2* / 0.5 / 0.25x"
    assert cell(made() | {"correct": False}, 1 << 20) == "0 / 0 / 1.00x / **wrong**"
    assert cell(made(ordered=False), 1 << 20) == "0 / 0 / 1.00x / unordered"
    assert cell({"error": "aborted with SIGABRT"}, 1) == "aborted"
    assert cell({"error": "ValueError: no"}, 1) == "error"
    assert cell({"skipped": "not written"}, 1) == "-"
    assert row("demo", record(plain=made())) == "| `demo` | in-place | 0 / 0 / 1.00x |"


@pytest.mark.parametrize(
    ("category", "cells", "expected"),
    [
        ("in-place", {"scheduled": made()}, True),
        ("in-place", {"scheduled": made(1 << 20)}, False),
        ("in-place", {"scheduled": made() | {"correct": False}}, False),
        ("in-place", {"scheduled": {"error": "ValueError: no"}}, False),
        ("copy-unavoidable", {"scheduled": made(1 << 20)}, True),
        ("copy-unavoidable", {"scheduled": made(2 << 20)}, False),
        ("correctness", {"scheduled": made(2 << 20)}, True),
        ("ordering", {"scheduled": made(ordered=False)}, False),
        ("guard", {"plain": made(1 << 20), "scheduled": made(1 << 20)}, True),
        ("guard", {"plain": made(), "scheduled": made(temp=1 << 20)}, False),
    ],
)
def test_what_counts_as_clean(category, cells, expected):
    assert clean(record(category, **cells), "scheduled") is expected


def test_summary_lists_what_is_behind():
    good = record(plain=made(2 << 20), scheduled=made(ratio=0.5))
    assert list(behind("good", good)) == []
    times = {"q1": 1.1, "median": 1.2, "q3": 1.3}
    slow = made(1 << 20, 1 << 20, rival="region", rival_ratio=times, slower=True)
    bad = record(plain=made(1 << 20), region=made(), scheduled=slow)
    assert list(behind("bad", bad)) == [
        "- `bad`: scheduled copies 1,048,576 bytes, region 0",
        "- `bad`: scheduled takes temporary memory of 1,048,576 bytes, plain 0",
        "- `bad`: scheduled takes 1.20 (1.10 to 1.30) times as long as region",
    ]
    failed = record(plain=made(), scheduled={"error": "ValueError: no"})
    assert list(behind("failed", failed)) == ["- `failed`: scheduled fails: ValueError: no"]
    unordered = made(ordered=False, ratio=0.1)
    ordering = record("ordering", plain=unordered, barrier=made(temp=7), declared=made(1 << 20))
    assert list(behind("order", ordering)) == [
        "- `order`: declared copies 1,048,576 bytes, barrier 0",
    ]
    wrong = record(plain=made(), scheduled=made(), declared=made() | {"correct": False})
    assert list(behind("wrong", wrong)) == ["- `wrong`: declared gives a wrong answer"]
    lines = list(summary({"good": good, "fine": good}))
    assert lines == [
        "- plain: 0 of 2 clean; plain/plain time 1.00",
        "- scheduled: 2 of 2 clean; plain/scheduled time 2.00",
    ]
