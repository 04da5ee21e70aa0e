"""Lines of the user's program: where they are, what stands there, and which names they assign."""

import ast
import dataclasses
import functools
import linecache
import re
from collections.abc import Iterable
from pathlib import PurePath

from jaxsched._hlo._metadata import Source
from jaxsched._jax import JaxprEqn, user_line

__all__ = ["Line", "short_names"]

_USER_LINE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)?(?: \((?P<function>.+)\))?")
_UPDATED = re.compile(r"([^\W\d]\w*)\.at\[")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Line:
    """A line of a source file, in a function where that is known."""

    file: str
    number: int
    function: str | None = None

    @classmethod
    def of_source(cls, source: Source | None) -> "Line | None":
        """The line that the metadata of an HLO instruction tells of."""
        return None if source is None else cls(source.file, source.line, source.function)

    @classmethod
    def of_equation(cls, eqn: JaxprEqn) -> "Line | None":
        """The line that an equation was traced from."""
        found = _USER_LINE.fullmatch(user_line(eqn.source_info))
        return found and cls(found["file"], int(found["line"]), found["function"])

    @property
    def statement(self) -> str:
        """The statement that this line is a part of, on one line; empty if it is not known."""
        lines, found = _statements(self.file)
        node = found.get(self.number)
        return "" if node is None else " ".join(_text(node, lines).split())

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that the statement assigns."""
        node = _statements(self.file)[1].get(self.number)
        return () if node is None else _assigned(node)

    @property
    def last(self) -> int:
        """The number of the statement's last line."""
        node = _statements(self.file)[1].get(self.number)
        return self.number if node is None else _last(node)

    @property
    def updated(self) -> str | None:
        """The `x` of a statement that has `x.at[...]` in it."""
        found = _UPDATED.search(self.statement)
        return found and found[1]


def short_names(lines: Iterable[Line]) -> dict[str, str]:
    """For each file the shortest end of its path that tells it from the others."""
    files = {line.file for line in lines}
    short = {}
    for file in files:
        parts = PurePath(file).parts
        sizes = range(1, len(parts) + 1)
        ends = ("/".join(parts[-size:]) for size in sizes)
        others = [f"/{other}" for other in files - {file}]
        unique = (end for end in ends if not any(each.endswith(f"/{end}") for each in others))
        short[file] = next(unique, file)
    return short


def _statements(file: str) -> tuple[tuple[str, ...], dict[int, ast.stmt]]:
    """The lines of a file, and for each line the innermost statement that stands on it."""
    lines = tuple(linecache.getlines(file))
    return lines, _parsed(lines)


@functools.lru_cache(64)
def _parsed(lines: tuple[str, ...]) -> dict[int, ast.stmt]:
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):  # a notebook's magic, or no Python at all
        return {}
    found: dict[int, ast.stmt] = {}
    # An outer statement is met before those in it.
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            found.update(dict.fromkeys(range(node.lineno, _last(node) + 1), node))
    return found


def _last(node: ast.stmt) -> int:
    """The last line of a statement; of one with a body, that of its head."""
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno


def _text(node: ast.stmt, lines: tuple[str, ...]) -> str:
    if getattr(node, "body", None):
        return "".join(lines[node.lineno - 1 : _last(node)])
    taken = [line.encode() for line in lines[node.lineno - 1 : node.end_lineno]]
    if taken:
        taken[-1] = taken[-1][: node.end_col_offset]  # counts bytes, as the next one does
        taken[0] = taken[0][node.col_offset :]
    return b"".join(taken).decode(errors="replace")


def _assigned(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return ()
    leaves = [leaf for t in targets for leaf in (t.elts if isinstance(t, ast.Tuple) else [t])]
    names = tuple(leaf.id for leaf in leaves if isinstance(leaf, ast.Name))
    return names if len(names) == len(leaves) else ()
