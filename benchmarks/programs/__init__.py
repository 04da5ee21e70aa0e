"""Read-then-write programs: behaviours, programs from public reports, and guards.

`ALL` maps a name to a `Program`; `select("row_*")` gives the programs whose name matches.
"""

from fnmatch import fnmatchcase

from benchmarks.programs import (
    branches,
    elements,
    guards,
    hazards,
    histories,
    linalg,
    loops,
    ordering,
    rows,
    sweeps,
    whole,
)
from benchmarks.programs._program import Program as Program
from benchmarks.programs._program import fresh as fresh
from benchmarks.programs._program import host as host

MODULES = (
    elements,
    rows,
    loops,
    whole,
    hazards,
    sweeps,
    branches,
    histories,
    linalg,
    ordering,
    guards,
)
ALL = {p.name: p for module in MODULES for p in vars(module).values() if isinstance(p, Program)}


def select(*patterns: str) -> list[Program]:
    """The programs whose name matches one of the shell-style `patterns`, all if there are none."""
    if not patterns:
        return list(ALL.values())
    chosen = [p for p in ALL.values() if any(fnmatchcase(p.name, pattern) for pattern in patterns)]
    if not chosen:
        raise ValueError(f"no program matches {' '.join(patterns)}; there are: {' '.join(ALL)}")
    return chosen
