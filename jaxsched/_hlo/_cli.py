"""`python -m jaxsched hlo FILE...`: the copies and control edges of optimized HLO text."""

import argparse
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass

from jaxsched._errors import message
from jaxsched._hlo._copies import Copy, control_edges, copies, user_source
from jaxsched._hlo._text import Computation, HloTextError, Instruction, Module, Source, modules

_WIDTH = 100
_GLUE = "\xa0"  # between words that stay on one line
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(argv: list[str]) -> int:
    """Print what the arguments ask for; 2 if an input could not be read, 0 otherwise."""
    options = _parser().parse_args(argv)
    reports, failed = [], False
    progress = _Progress()
    try:
        for path in options.files:
            name = "standard input" if path == "-" else path
            try:
                for module in modules(_lines(path, name, progress)):
                    progress.show(f"{name}: looking for what forces the copies")
                    report = _Report.of(name, module, options.min_bytes)
                    progress.clear()
                    if options.json:
                        reports.append(_as_json(report))
                    else:
                        print("\n".join(_as_text(report)), end="\n\n")
            except BrokenPipeError:
                raise
            except HloTextError as error:
                failed = True
                progress.clear()
                _complain(error.what, f"{name}, line {error.line}", error.legal)
            except (IndexError, ValueError) as error:
                # Shapes, operands and attributes are read late: a damaged one shows only here.
                failed = True
                progress.clear()
                legal = "text as XLA writes it, not edited and not damaged"
                _complain(f"the text contradicts itself: {error}", name, legal)
            except OSError as error:
                failed = True
                progress.clear()
                legal = "a readable file of optimized HLO text, or - for the standard input"
                _complain(f"the input cannot be read: {error.strerror}", name, legal)
        if options.json:
            print(json.dumps(reports, indent=1))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough, as `| head` has; spare the flush at exit the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxsched hlo",
        description="List the copies in optimized HLO text, the largest first: bytes, loop and trip"
        " count, user line, and what forces each; then the control edges.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="text from compiled.as_text() or --xla_dump_to, of any jax from 0.4.36 on; - is stdin",
    )
    parser.add_argument(
        "--min-bytes",
        type=_size,
        default=1024,
        metavar="N",
        help="leave out smaller copies; 1K is 1024, 4M is 4 * 1024 * 1024 (default: 1K)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list of modules")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; legal are 0, 512, 1K, 4M, 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


def _complain(wrong: str, where: str, legal: str) -> None:
    print(message(f"error: {wrong}", where, legal), file=sys.stderr)


class _Progress:
    """One line on a terminal, rewritten in place, for work that takes more than a second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 1 if sys.stderr.isatty() else float("inf")
        self._shown = False

    def show(self, text: str) -> None:
        if time.monotonic() >= self._next:
            print(f"\r{text[: _WIDTH - 1]}\x1b[K", end="", file=sys.stderr, flush=True)
            self._next = time.monotonic() + 0.2
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


def _lines(path: str, name: str, progress: _Progress) -> Iterator[str]:
    source = sys.stdin.fileno() if path == "-" else path
    with open(source, encoding="utf-8", errors="replace", closefd=path != "-") as file:
        read = 0
        for number, line in enumerate(file):
            read += len(line)
            if number % 4096 == 0:
                progress.show(f"{name}: {read / 1e6:.0f} MB read")
            yield line


@dataclass(frozen=True)
class _Report:
    name: str
    module: Module
    min_bytes: int
    copies: list[Copy]
    edges: list[tuple[Computation, Instruction, Instruction]]

    @classmethod
    def of(cls, name: str, module: Module, min_bytes: int) -> "_Report":
        found = copies(module, min_bytes)
        found.sort(key=lambda copy: (-copy.nbytes, -(copy.total_bytes or 0)))
        return cls(name, module, min_bytes, found, control_edges(module))


def _as_text(report: _Report) -> Iterator[str]:
    found = report.copies
    yield from _wrap(f"{report.module.name} in {report.name}")
    total = sum(copy.nbytes for copy in found)
    summary = f"{_count(len(found), 'copy', 'copies')} of at least {report.min_bytes:,} bytes"
    yield from _wrap(f"{summary}, {total:,} bytes together; --min-bytes sets the limit", "  ")
    for copy in found:
        yield ""
        yield from _wrap(f"{copy.nbytes:,} bytes, {_times(copy)}{_at(copy.source)}", "  ")
        made_for = f", made for {copy.write.name}" if copy.write else ""
        shape = ", ".join(f"{array.dtype}{[*array.dims]}" for array in copy.instruction.shape[:1])
        where = f"{copy.instruction.name}: {shape.replace(' ', '')} in {copy.computation.name}"
        yield from _wrap(where + made_for, "      ")
        yield from _wrap(f"because {copy.reason}{_at(copy.forced_at)}", "      ")
    yield ""
    yield f"  {_count(len(report.edges), 'control edge')}"
    for computation, before, after in report.edges:
        yield from _wrap(f"{before.name} before {after.name}, in {computation.name}", "      ")


def _wrap(text: str, indent: str = "") -> list[str]:
    if len(indent) + len(text) <= _WIDTH:
        return [indent + text.replace(_GLUE, " ")]
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in lines]


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _times(copy: Copy) -> str:
    if not copy.in_loop:
        return "not in a loop"
    if copy.trip_count is None or copy.total_bytes is None:
        return "in a loop, trip count unknown"
    return f"in a loop, {copy.trip_count:,} times: {copy.total_bytes:,} bytes"


def _at(source: Source | None) -> str:
    if source is None:
        return ""
    within = f"{_GLUE}in{_GLUE}{source.function}" if source.function else ""
    return f", at{_GLUE}{source}{within}"


def _as_json(report: _Report) -> dict[str, object]:
    def named(instruction: Instruction | None) -> dict[str, object] | None:
        if instruction is None:
            return None
        return {
            "name": instruction.name,
            "opcode": instruction.opcode,
            "source": as_dict(user_source(report.module, instruction)),
        }

    def as_dict(source: Source | None) -> dict[str, object] | None:
        return source and source._asdict()

    return {
        "file": report.name,
        "module": report.module.name,
        "min_bytes": report.min_bytes,
        "copied_bytes": sum(copy.nbytes for copy in report.copies),
        "copies": [
            {
                "name": copy.instruction.name,
                "computation": copy.computation.name,
                "arrays": [[array.dtype, [*array.dims]] for array in copy.instruction.shape[:1]],
                "bytes": copy.nbytes,
                "in_loop": copy.in_loop,
                "trip_count": copy.trip_count,
                "total_bytes": copy.total_bytes,
                "source": as_dict(copy.source),
                "cause": copy.cause.name,
                "reason": copy.reason,
                "forced_by": named(copy.forced_by),
                "forced_at": as_dict(copy.forced_at),
                "write": named(copy.write),
                "buffer": named(copy.buffer),
                "later_readers": [named(reader) for reader in copy.later_readers],
            }
            for copy in report.copies
        ],
        "control_edges": [
            {"computation": computation.name, "before": before.name, "after": after.name}
            for computation, before, after in report.edges
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
