"""Read the text of an optimized HLO module: what `compiled.as_text()` returns and XLA dumps.

One pass over the lines finds the computations and the instructions' names and opcodes; shapes,
operands and attributes stay in the line and are read when asked for, so that a dump of a hundred
megabytes fits in memory. Both styles of XLA are read: names with and without `%`, operands with
and without their type; source positions in the metadata (jax <= 0.7) or in stack-frame tables.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from jaxsched._errors import message
from jaxsched._hlo._metadata import Frames, Source, quoted, unquote
from jaxsched._hlo._shape import COMMENT, Shape, parse_shape

_LEGAL = "the optimized HLO text of one program, as compiled.as_text() or --xla_dump_to write it"


class HloTextError(ValueError):
    """Text that is not a whole HLO module: `what` is wrong, at `line`, and what is `legal`."""

    def __init__(self, what: str, line: int, legal: str = _LEGAL):
        super().__init__(message(what, f"line {line}", legal))
        self.what, self.line, self.legal = what, line, legal


class Instruction:
    """One line of a computation; everything but name and opcode is read from `raw` on demand."""

    __slots__ = ("_open", "name", "opcode", "raw")

    def __init__(self, name: str, opcode: str, raw: str, open_: int):
        self.name, self.opcode, self.raw, self._open = name, opcode, raw, open_

    def __repr__(self) -> str:
        return f"<{self.opcode} {self.name}>"

    @property
    def is_root(self) -> bool:
        return self.raw.lstrip().startswith("ROOT ")

    @property
    def shape(self) -> Shape:
        start = self.raw.index(" = ") + 3
        return parse_shape(self.raw[start : self._open - len(self.opcode)])

    @property
    def is_tuple(self) -> bool:
        return self.raw.startswith("(", self.raw.index(" = ") + 3)

    @property
    def operands(self) -> list[str]:
        if self.opcode in ("constant", "parameter"):
            return []
        text = self.raw[self._open + 1 : _closing(self.raw, self._open)]
        if "%" in text:
            return _PERCENT_NAME.findall(text)
        return [part.split()[-1] for part in _split(COMMENT.sub("", text)) if part]

    def attribute(self, key: str) -> str:
        """What stands after `key=` behind the operands, unparsed; empty if it is not there."""
        start = _closing(self.raw, self._open)
        found = self.raw.find(f", {key}=", start)
        if found == -1:
            return ""
        if '"' in self.raw[start:found]:
            # The key may be part of a string: look at every attribute.
            return _pairs(self.raw[start + 2 :]).get(key, "")
        return next(_split(self.raw, found + len(key) + 3))

    @property
    def control_predecessors(self) -> list[str]:
        if "control-predecessors=" not in self.raw:
            return []
        return _names(self.attribute("control-predecessors"))

    @property
    def called(self) -> list[str]:
        """The computations that the instruction calls."""
        keys = (key for key in _CALLS if key in self.raw)
        return [name for key in keys for name in _names(self.attribute(key))]

    @property
    def op_name(self) -> str | None:
        return quoted(self.attribute("metadata"), "op_name")

    @property
    def tuple_index(self) -> int | None:
        """The index of a `get-tuple-element`."""
        if self.opcode != "get-tuple-element":
            return None
        return int(self.attribute("index"))

    @property
    def parameter_number(self) -> int | None:
        if self.opcode != "parameter":
            return None
        return int(self.raw[self._open + 1 : self.raw.index(")", self._open)])

    @property
    def frontend_attributes(self) -> dict[str, str]:
        pairs = _pairs(self.attribute("frontend_attributes")[1:-1])
        return {key: unquote(value) for key, value in pairs.items()}

    @property
    def backend_config(self) -> str:
        return self.attribute("backend_config")

    @property
    def body(self) -> str:
        """The name of the computation that a `while` repeats."""
        return self.attribute("body").removeprefix("%")

    @property
    def known_trip_count(self) -> int | None:
        """How often a `while` runs its body, where XLA found it out."""
        found = _TRIP_COUNT.search(self.backend_config) if self.opcode == "while" else None
        return int(found[1]) if found else None


_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')
_PERCENT_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
    "select",
    "scatter",
)
# A quoted string, or one of the characters that structure an instruction.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\],]')


def _closing(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    end = text.find(")", start)
    if text.find("(", start + 1, end) == -1 and text.find('"', start, end) == -1:
        return end
    depth = 0
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        depth += (token in "{([") - (token in "})]")
        if not depth:
            return match.start()
    return len(text)


def _split(text: str, start: int = 0) -> Iterator[str]:
    """The parts between the commas that are in no bracket and no string."""
    depth, begin = 0, start
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token == "," and not depth:
            yield text[begin : match.start()].strip()
            begin = match.end()
        else:
            depth += (token in "{([") - (token in "})]")
    yield text[begin:].strip()


def _pairs(text: str) -> dict[str, str]:
    parts = (part.partition("=") for part in _split(text))
    return {key: value for key, equals, value in parts if equals}


def _names(text: str) -> list[str]:
    return [name.strip().removeprefix("%") for name in text.strip("{}").split(",") if name.strip()]


class Computation:
    """A named list of instructions in text order, which in a scheduled module is the schedule."""

    def __init__(self, name: str, line: int = 0):
        self.name, self.line = name, line
        self.instructions: list[Instruction] = []

    def __repr__(self) -> str:
        return f"<computation {self.name}: {len(self.instructions)} instructions>"

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    def __getitem__(self, name: str) -> Instruction:
        """The instruction of that name; raises `HloTextError` if the text lacks it."""
        if found := self.by_name.get(name):
            return found
        raise HloTextError(f"computation {self.name} lacks the instruction {name}", self.line)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        found = (i for i in self.instructions if i.opcode == "parameter")
        return {instruction.parameter_number or 0: instruction for instruction in found}

    def parameter(self, number: int) -> Instruction:
        """The parameter of that number; raises `HloTextError` if the text lacks it."""
        if found := self.parameters.get(number):
            return found
        raise HloTextError(f"computation {self.name} lacks its parameter {number}", self.line)

    @cached_property
    def root(self) -> Instruction:
        marked = (i for i in reversed(self.instructions) if i.is_root)
        return next(marked, self.instructions[-1])


class Module:
    """A parsed module: its computations by name, its entry, aliases and source positions."""

    def __init__(self, header: str):
        name, _, attributes = header.removeprefix("HloModule ").partition(",")
        self.name = name.strip()
        self.computations: dict[str, Computation] = {}
        self.entry = Computation("")
        facts = _pairs(attributes)
        self.is_scheduled = facts.get("is_scheduled") == "true"
        aliases = facts.get("input_output_alias", "")
        self.input_output_alias = {
            _index(output): (int(parameter), _index(index))
            for output, parameter, index in _ALIAS.findall(aliases)
        }
        """Donated buffers that become outputs: output index -> (parameter number, its index)."""
        self.buffer_donors = {
            (int(parameter), _index(index))
            for parameter, index in _DONOR.findall(facts.get("buffer_donor", ""))
        }
        """Donated buffers that XLA may use as it likes: (parameter number, its index)."""
        self.frames = Frames()

    def __repr__(self) -> str:
        return f"<module {self.name}: {len(self.computations)} computations>"

    def __getitem__(self, name: str) -> Computation:
        """The computation of that name; raises `HloTextError` if the text lacks it."""
        if found := self.computations.get(name):
            return found
        raise HloTextError(f"computation {name} is called but not there", 1)

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """The frames that the instruction was traced in, innermost first; empty if unknown."""
        return self.frames.stack(instruction.attribute("metadata"))

    def source(self, instruction: Instruction) -> Source | None:
        """The innermost frame of `stack`."""
        return next(iter(self.stack(instruction)), None)


_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_DONOR = re.compile(r"\((\d+), \{([\d, ]*)\}\)")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|[^\s(]\S*) ([\w\-]+)\(")
# What later steps rely on, so that a line which lost it is reported as such.
_REQUIRED = {"get-tuple-element": " index=", "while": " body=", "fusion": " calls="}
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)\s(?:.*\s)?\{$")


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def parse(text: str) -> Module:
    """Parse the text of one module; raises `HloTextError`."""
    return _one(_lines(text))


def parse_file(path: str | Path) -> Module:
    """Parse a file line by line; raises `HloTextError` or `OSError`."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return _one(file)


def _one(lines: Iterable[str]) -> Module:
    module, *others = modules(lines)
    if others:
        raise HloTextError(f"the text holds {len(others) + 1} modules", 1)
    return module


def _lines(text: str) -> Iterator[str]:
    start = 0
    while (end := text.find("\n", start)) != -1:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def modules(lines: Iterable[str]) -> Iterator[Module]:
    """The modules of a text, one after the other; at least one, or `HloTextError`."""
    module: Module | None = None
    computation: Computation | None = None
    table: dict[int, str] | None = None
    skipping = False
    number, begun = 0, 0
    numbered = enumerate(lines, 1)
    for number, line in numbered:
        line = line.rstrip()
        if computation is not None:
            match = _INSTRUCTION.match(line)
            if match and _REQUIRED.get(match[2], "") in line:
                opcode = sys.intern(match[2])
                computation.instructions.append(
                    Instruction(match[1], opcode, line, match.end() - 1)
                )
            elif line[:1] == "}" and computation.instructions:
                computation = None
            elif line:
                raise _unreadable("not an HLO instruction", number, line, numbered)
        elif skipping:
            skipping = line != "}"
        elif not line:
            table = None
        elif line.startswith("HloModule "):
            if module is not None:
                yield _whole(module, number)
            module, begun = Module(line), number
            skipping = line.endswith("={")
        elif module is None:
            raise HloTextError(_not_hlo(line), number)
        elif table is not None:
            key, _, row = line.partition(" ")
            if not (key.isdecimal() and row[-1:] in ('"', "}")):
                raise _unreadable("not a row of a stack-frame table", number, line, numbered)
            table[int(key)] = row
        elif line in module.frames.tables:
            table = module.frames.tables[line]
        elif match := _COMPUTATION.match(line):
            computation = module.computations[match[2]] = Computation(match[2], number)
            begun = number
            if match[1]:
                module.entry = computation
        elif line.endswith("={"):
            # debug_attributes={ and origin_recovery_table={ run up to a brace of their own.
            skipping, begun = True, number
        else:
            raise _unreadable("neither a computation nor a table", number, line, numbered)
    if computation is not None or skipping:
        what = f"the text is cut off inside the part that begins at line {begun}"
        raise HloTextError(what, number)
    if module is None:
        raise HloTextError("the text is empty", max(number, 1))
    yield _whole(module, number)


def _whole(module: Module, number: int) -> Module:
    if not module.entry.instructions:
        what = f"the text is cut off: the module {module.name!r} has no ENTRY computation yet"
        raise HloTextError(what, number)
    return module


def _unreadable(what: str, number: int, line: str, rest: Iterator[object]) -> HloTextError:
    what = what if next(rest, None) is not None else "the text is cut off"
    return HloTextError(f"{what}: {line.strip()[:60]!r}", number)


def _not_hlo(line: str) -> str:
    if "\0" in line or "\ufffd" in line:
        return "binary data, not HLO text"
    if line.startswith(("module @", "module attributes", "#loc", "func.func")):
        return "StableHLO of a lowered program, not the HLO of a compiled one"
    return f"not HLO text: it begins with {line[:40]!r}, not with 'HloModule'"
