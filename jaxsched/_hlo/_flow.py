"""Where a value goes inside an HLO computation: which instructions read it, write it, return it.

A *place* is an instruction, or one element of its tuple. Copies, bitcasts, tuples and barriers
yield the same value at a new place; a loop yields the carries its body leaves alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from jaxsched._hlo._text import Computation, HloTextError, Instruction, Module


class Place(NamedTuple):
    name: str
    element: int | None = None


class Kind(Enum):
    READ = "read"
    WRITE = "write"
    OUTPUT = "output"


class Use(NamedTuple):
    """How `instruction` uses a value: as which operand, and as which element of it."""

    instruction: Instruction
    operand: int
    element: int | None
    kind: Kind


# Opcodes that yield their operand's value; the copies among them in memory of their own.
_SAME = {"bitcast", "reshape", "copy", "copy-start", "copy-done", "opt-barrier"}
_COPIES = {"copy", "copy-start"}
# Opcodes that run their computations as part of the program, instruction by instruction.
RUNS = {"while", "conditional", "call", "async-start", "call-start"}
_REACH = 20_000
_ALIASED_OPERAND = re.compile(r"\{[\d, ]*\}: \((\d+),")


class Flow:
    """The flow of values in every computation of a module; answers are kept."""

    def __init__(self, module: Module):
        self.module = module
        self._users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}
        self._positions: dict[str, dict[str, int]] = {}
        self._operands: dict[str, dict[int, tuple[int, ...]]] = {}
        self._writes: dict[tuple[str, int, int | None], bool] = {}
        self._updated: dict[Instruction, set[int]] = {}
        self._copying: dict[Instruction, bool] = {}

    @cached_property
    def sites(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """The computations that run, and the instructions that run them; the entry has none."""
        sites: dict[str, list[tuple[Computation, Instruction]]] = {self.module.entry.name: []}
        pending = [self.module.entry]
        while pending:
            caller = pending.pop()
            for instruction in caller.instructions:
                if instruction.opcode not in RUNS:
                    continue
                for name in dict.fromkeys(instruction.called):
                    if name not in sites:
                        pending.append(self.module[name])
                    sites.setdefault(name, []).append((caller, instruction))
        return sites

    def is_copy(self, instruction: Instruction) -> bool:
        """Whether the instruction does nothing but copy.

        XLA fuses copies with what they feed or follow: such a fusion writes its result anyway, so
        that only a fusion whose computation holds nothing but copies and views is one.
        """
        if instruction.opcode != "fusion":
            return instruction.opcode in _COPIES
        if instruction not in self._copying:
            opcodes = {i.opcode for i in self.fused(instruction).instructions}
            only = opcodes <= {"copy", "parameter", "bitcast"} and "copy" in opcodes
            self._copying[instruction] = only
        return self._copying[instruction]

    def fused(self, fusion: Instruction) -> Computation:
        """The computation that a fusion does at once."""
        return self.module[fusion.attribute("calls").removeprefix("%")]

    def positions(self, computation: Computation) -> dict[str, int]:
        """The place of each instruction in the text, which is the schedule if there is one."""
        if computation.name not in self._positions:
            self._positions[computation.name] = {
                instruction.name: n for n, instruction in enumerate(computation.instructions)
            }
        return self._positions[computation.name]

    def users(self, computation: Computation) -> dict[str, list[tuple[Instruction, int]]]:
        """Per instruction name: the instructions that have it as an operand, and as which one."""
        if computation.name not in self._users:
            users: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
            for instruction in computation.instructions:
                for position, operand in enumerate(instruction.operands):
                    users[operand].append((instruction, position))
            self._users[computation.name] = users
        return self._users[computation.name]

    def precedes(
        self, computation: Computation, candidates: Iterable[Instruction], last: Instruction
    ) -> set[Instruction]:
        """Those of `candidates` that `last` depends on, by data or by control edges.

        The search gives up after `_REACH` instructions: what it has not met by then counts as
        independent.
        """
        position = self.positions(computation)
        missing = {position[i.name] for i in candidates if position[i.name] < position[last.name]}
        found: set[Instruction] = set()
        # Operands stand before their users: what stands before all candidates leads to none.
        first = min(missing, default=0)
        pending = [position[last.name]]
        seen = {*pending}
        while pending and missing and len(seen) < _REACH:
            for operand in self._before(computation, pending.pop()):
                if operand not in seen and operand >= first:
                    seen.add(operand)
                    pending.append(operand)
                    if operand in missing:
                        missing.remove(operand)
                        found.add(computation.instructions[operand])
        return found

    def _before(self, computation: Computation, number: int) -> tuple[int, ...]:
        """The positions of an instruction's operands and control predecessors."""
        known = self._operands.setdefault(computation.name, {})
        if number not in known:
            position, instruction = self.positions(computation), computation.instructions[number]
            names = (*instruction.operands, *instruction.control_predecessors)
            known[number] = tuple(position[computation[name].name] for name in names)
        return known[number]

    def origin(self, computation: Computation, place: Place) -> Place:
        """The place where the value at `place` was made: a parameter, a constant, an operation."""
        for _ in computation.instructions:
            instruction = computation[place.name]
            operands = instruction.operands
            if instruction.opcode == "get-tuple-element":
                place = Place(operands[0], instruction.tuple_index)
            elif instruction.opcode == "tuple" and place.element is not None:
                place = Place(operands[place.element])
            elif instruction.opcode == "copy-done":
                place = Place(operands[0])
            elif instruction.opcode == "opt-barrier" or self._unchanged(instruction, place.element):
                place = Place(operands[0], place.element)
            elif instruction.opcode in _SAME or self.is_copy(instruction):
                place = Place(operands[0])
            else:
                return place
        what = f"the operands of {place.name} lead back to it in computation {computation.name}"
        raise HloTextError(what, computation.line)

    def uses(self, computation: Computation, start: Place) -> list[Use]:
        """Every use of the value at `start` that is no mere copy or view, in no special order."""
        uses: dict[Use, None] = {}
        seen, pending = {start}, [start]
        while pending:
            place = pending.pop()
            if place.name == computation.root.name:
                uses[Use(computation.root, 0, place.element, Kind.OUTPUT)] = None
            for user, position in self.users(computation).get(place.name, ()):
                after = self._after(user, position, place.element)
                if after is not None and after not in seen:
                    seen.add(after)
                    pending.append(after)
                if user.opcode == "while" or (after is None and user.opcode != "get-tuple-element"):
                    uses[self.use(user, position, place.element)] = None
        for use in [*uses]:
            if use.instruction.opcode == "conditional" and use.kind is Kind.WRITE:
                uses.pop(use._replace(kind=Kind.READ), None)
        return [*uses]

    def _after(self, user: Instruction, position: int, element: int | None) -> Place | None:
        """The place at which `user` yields the value it gets, if it only passes it on."""
        if user.opcode == "tuple":
            return Place(user.name, position)
        if user.opcode == "get-tuple-element" and element == user.tuple_index:
            return Place(user.name)
        if user.opcode in _SAME or self.is_copy(user) or self._unchanged(user, element):
            return Place(user.name, element)
        return None

    def use(self, user: Instruction, position: int, element: int | None) -> Use:
        """How `user` uses its operand at `position`, or the element `element` of it."""
        kind = Kind.WRITE if position in self._written(user, element) else Kind.READ
        # The branches of a conditional exclude each other, so together they are one use.
        shared = user.opcode == "conditional" and position > 0
        return Use(user, 1, None, kind) if shared else Use(user, position, element, kind)

    def _unchanged(self, instruction: Instruction, element: int | None) -> bool:
        return (
            instruction.opcode == "while"
            and element is not None
            and not self._written(instruction, element)
        )

    def _written(self, instruction: Instruction, element: int | None) -> Iterable[int]:
        """The operands whose element `element` the instruction overwrites."""
        match instruction.opcode:
            case "dynamic-update-slice":
                return (0,)
            case "scatter":
                return range((len(instruction.operands) - 1) // 2)
            case "fusion":
                return self._written_by_fusion(instruction)
            case "while":
                return (0,) if self._carry_changes(instruction, element) else ()
            case "call" | "conditional":
                return self._written_by_computations(instruction, element)
        aliasing = instruction.attribute("output_to_operand_aliasing")
        return [int(operand) for operand in _ALIASED_OPERAND.findall(aliasing)]

    def _written_by_fusion(self, fusion: Instruction) -> set[int]:
        """A fusion works in place if an update is what it returns."""
        if fusion not in self._updated:
            computation = self.fused(fusion)
            root = computation.root
            results = root.operands if root.opcode == "tuple" else [root.name]
            written = set()
            for result in results:
                update = computation[self.origin(computation, Place(result)).name]
                for operand in self._written(update, None) if update.opcode != "fusion" else ():
                    base = self.origin(computation, Place(update.operands[operand]))
                    written.add(computation[base.name].parameter_number)
            self._updated[fusion] = written - {None}
        return self._updated[fusion]

    def _carry_changes(self, loop: Instruction, element: int | None) -> bool:
        body = self.module[loop.body]
        parameter = body.parameter(0)
        key = (body.name, 0, element)
        if key not in self._writes:
            carry = Place(parameter.name, element)
            self._writes[key] = self.origin(body, Place(body.root.name, element)) != carry
        return self._writes[key]

    def _written_by_computations(self, caller: Instruction, element: int | None) -> Iterator[int]:
        for number, name in enumerate(caller.called):
            branch = caller.opcode == "conditional"
            computation = self.module[name]
            for position, parameter in computation.parameters.items():
                key = (name, position, element)
                if key not in self._writes:
                    uses = self.uses(computation, Place(parameter.name, element))
                    self._writes[key] = any(use.kind is Kind.WRITE for use in uses)
                if self._writes[key]:
                    yield number + 1 if branch else position
