"""Run the measurements in a worker process, so that a compiler crash costs one cell.

All columns of a program are measured in the same worker.  When it dies, another takes over at
that program, without the column that was at work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax

from benchmarks._measure import Options, measure
from benchmarks.programs import ALL

DEVICES = 4  # simulated, for the programs on several devices


def run(names: Sequence[str], options: Options) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and record of each program as soon as it is measured."""
    todo = list(names)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # as this process imports
    lost: dict[str, dict[str, str]] = {}  # program -> column -> why it is left out
    while todo:
        job = json.dumps({"names": todo, "options": asdict(options), "lost": lost})
        column = ""
        command = [sys.executable, "-m", "benchmarks._runner", job]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                event = json.loads(line)
                column = event.get("column", "")
                if "record" in event:
                    yield todo.pop(0), event["record"]
        if worker.returncode < 0 and column:
            reason = f"aborted with {signal.Signals(-worker.returncode).name}"
            lost.setdefault(todo[0], {})[column] = reason
        elif todo:
            raise RuntimeError(f"the worker process ended with status {worker.returncode}")


def work(job: dict[str, Any]) -> None:
    """Measure the programs of a job; every step is printed as a line of JSON."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    options = Options(**job["options"])

    def emit(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    for name in job["names"]:
        program, lost = ALL[name], job["lost"].get(name, {})
        alive = replace(options, columns=[c for c in options.columns if c not in lost])
        cells = measure(program, alive, lambda column: emit(column=column))
        cells |= {column: {"error": reason} for column, reason in lost.items()}
        record = {
            "summary": program.summary,
            "source": program.source,
            "category": program.category,
            "unavoidable": program.unavoidable,
            "buffer": program.buffer_bytes(program.build(small=options.small)[1]),
            "cells": {column: cells[column] for column in options.columns},
        }
        emit(record=record)
        jax.clear_caches()


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
