"""Compare the means of updating in place: `python -m benchmarks --help`."""

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version

from benchmarks._columns import COLUMNS
from benchmarks._measure import Options, prepares
from benchmarks._plot import plot
from benchmarks._runner import run
from benchmarks._table import LEGEND, header, row, summary
from benchmarks.programs import select


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Run read-then-write programs under every means, side by side.",
    )
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="programs to run (all)")
    parser.add_argument(
        "--columns", metavar="A,B,...", help=f"means to compare, of {','.join(COLUMNS)} (all)"
    )
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME=MODULE:FUNCTION",
        help="one more column: a transformation that is put on the undeclared program",
    )
    parser.add_argument("--repeat", type=int, default=15, help="samples per cell (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small programs, three samples")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the times (needs matplotlib)")
    opts = parser.parse_args(argv)

    added = dict(item.split("=", 1) for item in opts.add)
    columns = opts.columns.split(",") if opts.columns else [*COLUMNS, *added]
    options = Options(columns, added, opts.repeat)
    if opts.quick:
        options = Options(columns, added, repeat=3, compiles=1, small=True)
    try:
        names = [program.name for program in select(*opts.globs)]
        prepares(options)
    except ValueError as e:
        parser.error(str(e))

    records = {}
    print(header(columns), flush=True)
    for name, record in run(names, options):
        records[name] = record
        print(row(name, record), flush=True)
    print(f"\n{LEGEND}\n", *summary(records), sep="\n")
    if opts.json:
        with open(opts.json, "w") as file:
            json.dump({"environment": environment(), "programs": records}, file, indent=1)
    if opts.plot:
        plot(records, opts.plot)


def environment() -> dict[str, str | int | None]:
    """What the numbers depend on."""
    return {
        **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    sys.exit(main())
