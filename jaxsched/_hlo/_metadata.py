"""Where an instruction comes from: its metadata, and the stack-frame tables of the module."""

import re
from functools import cached_property
from typing import NamedTuple

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class Source(NamedTuple):
    """A position in the user's program; `function` is None where the text does not tell it."""

    file: str
    line: int
    function: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Frames:
    """The stack-frame tables: `tables` holds their rows by title and number, unparsed."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, str]] = {title: {} for title in _TABLES}

    def stack(self, metadata: str) -> tuple[Source, ...]:
        """The frames that `metadata` tells of, innermost first."""
        file, line = quoted(metadata, "source_file"), number(metadata, "source_line")
        if file is not None and line is not None:
            return (Source(file, line),)
        frame = number(metadata, "stack_frame_id") or 0
        found: dict[int, Source] = {}
        while frame in self._frames and frame not in found:
            found[frame], frame = self._frames[frame]
        return tuple(found.values())

    @cached_property
    def _frames(self) -> dict[int, tuple[Source, int]]:
        """Per stack frame: its position and the frame around it, 0 if there is none."""
        names, functions, locations, frames = (self.tables[title] for title in _TABLES)
        sources = {
            location: Source(
                unquote(names.get(number(row, "file_name_id") or 0, "?")),
                number(row, "line") or 0,
                unquote(functions.get(number(row, "function_name_id") or 0, "")) or None,
            )
            for location, row in locations.items()
        }
        # XLA prints the number of the parent plus one, hence 1 for a frame without a parent.
        return {
            frame: (sources[location], (number(row, "parent_frame_id") or 1) - 1)
            for frame, row in frames.items()
            if (location := number(row, "file_location_id")) in sources
        }


def quoted(text: str, key: str) -> str | None:
    """The string in `key="..."`."""
    found = re.search(rf'\b{key}="((?:[^"\\]|\\.)*)"', text)
    return _unescape(found[1]) if found else None


def number(text: str, key: str) -> int | None:
    """The number in `key=...`."""
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else None


def unquote(text: str) -> str:
    return _unescape(text[1:-1]) if text[:1] == '"' else text


def _unescape(text: str) -> str:
    """Undo C escapes; XLA writes each byte of a non-ASCII character as an octal one."""
    if "\\" not in text:
        return text
    raw = text.encode("ascii", "backslashreplace").decode("unicode_escape")
    try:
        return raw.encode("latin-1").decode()
    except UnicodeError:
        return raw
