"""The lives of buffers in an optimized module: born, read, written, copied, returned.

A life is one piece of memory in one computation. An instruction that writes in place goes on with
the life of its operand; whatever else computes an array starts a new one.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Literal

from jaxsched._hlo._copies import user_source
from jaxsched._hlo._flow import Flow, Kind, Place
from jaxsched._hlo._shape import Array
from jaxsched._hlo._text import Computation, Instruction
from jaxsched._lines import Line

__all__ = ["SMALL", "Event", "Life", "What", "lives"]

SMALL = 64
"""Arrays up to this many bytes, one cache line, are counters and indices: no report names them."""

# These pass on their operand's memory.
_VIEWS = {"bitcast", "copy-done", "get-tuple-element", "opt-barrier", "reshape", "tuple"}
_COPIES = {"copy", "copy-start"}

What = Literal["read", "written", "returned"]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What happens to a life at one place of the schedule, and at which line of the user's."""

    position: int
    what: What
    instruction: Instruction
    line: Line | None


@dataclasses.dataclass(eq=False, slots=True)
class Life:
    """One piece of memory; `source` is the life that it was born as a copy of."""

    computation: Computation
    instruction: Instruction
    array: Array
    position: int
    line: Line | None
    source: "Life | None" = None
    events: list[Event] = dataclasses.field(default_factory=list)

    @property
    def argument(self) -> bool:
        """Whether it comes into the computation from outside."""
        return self.instruction.opcode == "parameter"

    @property
    def end(self) -> int:
        return max([self.position, *(event.position for event in self.events)])

    @property
    def original(self) -> "Life":
        """The life at the head of the copies."""
        return self if self.source is None else self.source.original


def lives(flow: Flow, lines: Callable[[Instruction], Collection[Line]]) -> dict[str, list[Life]]:
    """Per computation that runs: the lives of all arrays larger than a cache line, by birth.

    `lines` gives the lines of the reads that an instruction is known to do.
    """
    return {name: _Lives(flow, flow.module[name], lines).found for name in flow.sites}


class _Lives:
    def __init__(
        self,
        flow: Flow,
        computation: Computation,
        lines: Callable[[Instruction], Collection[Line]],
    ):
        self._flow = flow
        self._lines = lines
        self._computation = computation
        self._at: dict[Place, Life] = {}
        self.found: list[Life] = []
        for position, instruction in enumerate(computation.instructions):
            if instruction.opcode not in _VIEWS:
                self._add(position, instruction)
        end = len(computation.instructions) - 1
        for place in self._elements(Place(computation.root.name)):
            if (life := self._life(place)) is not None:
                life.events.append(Event(end, "returned", computation.root, None))

    def _add(self, position: int, instruction: Instruction) -> None:
        continued: list[tuple[int | None, Life]] = []
        source = None
        for number, name in enumerate(instruction.operands):
            for place in self._elements(Place(name)):
                life = self._life(place)
                if life is None:
                    continue
                if self._flow.is_copy(instruction):
                    source = life
                use = self._flow.use(instruction, number, place.element)
                written = use.kind is Kind.WRITE
                what: What = "written" if written else "read"
                line = self._line(instruction, number, what)
                if what not in [e.what for e in life.events if e.instruction is instruction]:
                    life.events.append(Event(position, what, instruction, line))
                if written or instruction.opcode == "while":
                    continued.append((place.element, life))
        self._yield(position, instruction, continued, source)

    def _yield(
        self,
        position: int,
        instruction: Instruction,
        continued: list[tuple[int | None, Life]],
        source: Life | None,
    ) -> None:
        """Says whose memory each result is in."""
        is_tuple = instruction.is_tuple
        for index, array in enumerate(instruction.shape):
            if array.nbytes <= SMALL:
                continue
            element = index if is_tuple else None
            same = [each for each in continued if _alike(each[1].array, array)]
            # Of several operands of one type, the one in the same place.
            same.sort(key=lambda each: each[0] != element)
            if same:
                continued.remove(same[0])
                life = same[0][1]
            else:
                line = Line.of_source(user_source(self._flow.module, instruction))
                life = Life(self._computation, instruction, array, position, line, source)
                self.found.append(life)
            self._at[Place(instruction.name, element)] = life

    def _elements(self, place: Place) -> Iterator[Place]:
        instruction = self._computation[place.name]
        if not instruction.is_tuple:
            yield place
            return
        for element, array in enumerate(instruction.shape):
            if array.nbytes > SMALL:
                yield Place(place.name, element)

    def _life(self, place: Place) -> Life | None:
        """The life of what is at a place, through views and tuples."""
        while place not in self._at:
            instruction = self._computation[place.name]
            if instruction.opcode not in _VIEWS or not instruction.operands:
                return None
            operands = instruction.operands
            if instruction.opcode == "get-tuple-element":
                place = Place(operands[0], instruction.tuple_index)
            elif instruction.opcode == "tuple":
                if place.element is None or place.element >= len(operands):
                    return None
                place = Place(operands[place.element])
            else:
                place = Place(operands[0], place.element)
        return self._at[place]

    def _line(self, instruction: Instruction, operand: int, what: What) -> Line | None:
        """The user's line of a use; in a fusion that of what reads or writes the operand in it."""
        if instruction.opcode != "fusion" or self._flow.is_copy(instruction):
            return Line.of_source(user_source(self._flow.module, instruction))
        known = self._lines(instruction) if what == "read" else ()
        found = self._line_inside(instruction, operand, what)
        # XLA may have moved the read's own metadata to something else in the kernel.
        return next(iter(known)) if known and found not in known else found

    def _line_inside(self, fusion: Instruction, operand: int, what: What) -> Line | None:
        module = self._flow.module
        fused = self._flow.fused(fusion)
        inside = [fused.root]
        if what == "read":
            uses = self._flow.uses(fused, Place(fused.parameter(operand).name))
            inside = [use.instruction for use in uses]
        located = (each for each in inside if module.stack(each))
        return Line.of_source(user_source(module, next(located, fusion)))


def _alike(a: Array, b: Array) -> bool:
    return (a.dtype, a.nbytes) == (b.dtype, b.nbytes)  # a view may have come between
