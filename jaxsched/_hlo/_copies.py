"""Which copies an optimized HLO module makes, how often, and what forces each of them.

A copy preserves one version of a buffer while another instruction overwrites the buffer. So its
cause is what needs the old version: a reader, the caller (whose argument it is), the program's
result, a second write. Where none of these exists the copy is XLA's own choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from jaxsched._hlo._flow import Flow, Kind, Place, Use
from jaxsched._hlo._text import Computation, Instruction, Module, Source, parse


class Cause(Enum):
    """Why a copy is there; `str()` of it is a sentence."""

    READER_AFTER_WRITE = "The old contents may still be read when the write happens."
    NOT_DONATED = "The buffer is an argument that the caller did not donate."
    ALSO_RETURNED = "The old contents are also a result of the program or of the loop's body."
    TWO_WRITES = "Two writes start from the same contents, and only one can be in place."
    COMPILER = "XLA's own choice: no reader, result or argument needs the old contents."

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy in the optimized module.

    `nbytes` is what one execution copies; `trip_count` how often the program executes it (the
    product of the loops around it, None if XLA does not know one; a branch counts as taken).
    `buffer` made the contents copied; `write` is the instruction the copy is made for, `forced_by`
    the one that makes it necessary, `later_readers` those that may read the old contents late.
    `source` and `forced_at` are the user's lines for the write and for what forces the copy.
    """

    instruction: Instruction
    computation: Computation
    nbytes: int
    in_loop: bool
    trip_count: int | None
    buffer: Instruction
    write: Instruction | None
    cause: Cause
    forced_by: Instruction | None
    later_readers: tuple[Instruction, ...]
    source: Source | None
    forced_at: Source | None

    @property
    def total_bytes(self) -> int | None:
        return None if self.trip_count is None else self.nbytes * self.trip_count

    @property
    def reason(self) -> str:
        """The cause in terms of this copy: which instruction forces it, and how."""
        name = self.forced_by.name if self.forced_by else ""
        match self.cause:
            case Cause.READER_AFTER_WRITE if self.forced_by is self.write:
                return f"{name} itself reads the old contents while it overwrites them"
            case Cause.READER_AFTER_WRITE:
                return f"{name} may still read the old contents when the write happens"
            case Cause.NOT_DONATED:
                argument = (self.forced_by and self.forced_by.op_name) or name
                return f"argument {argument} is not donated, its contents stay the caller's"
            case Cause.ALSO_RETURNED:
                return f"the old contents are returned too, by {name}"
            case Cause.TWO_WRITES:
                return f"{name} starts from the same contents, and only one write can be in place"
            case Cause.COMPILER:
                return "XLA's own choice" + (f", for {name}" if name else "")


def copies(module: Module, min_bytes: int = 0) -> list[Copy]:
    """The copies of at least `min_bytes`, in text order.

    An instruction counts if its opcode is `copy` or `copy-start`, or if it is a fusion of nothing
    else (see `Flow.is_copy`), in the entry or in any computation that runs as a part of it.
    """
    flow = Flow(module)
    runs = _Runs(flow)
    return [
        _explained(flow, computation, instruction, *runs[computation.name])
        for computation, instruction in _copying(flow)
        if _copied(instruction) >= min_bytes
    ]


def copied_bytes(module: Module | str, min_bytes: int = 0) -> int:
    """The bytes of all copies of at least `min_bytes`, each counted once however often it runs."""
    flow = Flow(parse(module) if isinstance(module, str) else module)
    sizes = (_copied(instruction) for _, instruction in _copying(flow))
    return sum(size for size in sizes if size >= min_bytes)


def control_edges(module: Module) -> list[tuple[Computation, Instruction, Instruction]]:
    """Every control edge as (computation, the instruction before, the instruction after)."""
    return [
        (computation, computation[name], instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
        for name in instruction.control_predecessors
    ]


def user_source(module: Module, instruction: Instruction) -> Source | None:
    """The innermost frame outside of installed packages, of the instruction or what it fuses."""
    stack = module.stack(instruction)
    if not stack and instruction.opcode == "fusion":
        stack = module.stack(module[instruction.called[0]].root)
    return _own(stack)


def _own(stack: tuple[Source, ...]) -> Source | None:
    own = (frame for frame in stack if "-packages/" not in frame.file.replace("\\", "/"))
    return next(own, stack[0] if stack else None)


def _copying(flow: Flow) -> Iterator[tuple[Computation, Instruction]]:
    for computation in flow.module.computations.values():
        if computation.name in flow.sites:
            for instruction in computation.instructions:
                if flow.is_copy(instruction):
                    yield computation, instruction


def _copied(copy: Instruction) -> int:
    # The shape of copy-start is (destination, source, context).
    return copy.shape[0].nbytes if copy.opcode == "copy-start" else copy.shape.nbytes


class _Runs(dict[str, tuple[bool, int | None]]):
    """Per computation: whether it runs inside a loop, and how often it runs."""

    def __init__(self, flow: Flow):
        self._flow = flow

    def __missing__(self, name: str) -> tuple[bool, int | None]:
        sites = self._flow.sites[name]
        in_loop, count = not sites and False, 0 if sites else 1
        for caller, instruction in sites:
            caller_in_loop, times = self[caller.name]
            loop = instruction.opcode == "while"
            if loop and times is not None:
                trips = instruction.known_trip_count
                # The condition is asked once more than the body runs.
                last = instruction.attribute("condition").removeprefix("%") == name
                times = None if trips is None else times * (trips + last)
            in_loop |= caller_in_loop or loop
            count = None if count is None or times is None else count + times
        self[name] = in_loop, count
        return self[name]


class _Verdict(NamedTuple):
    cause: Cause
    forced_by: Instruction | None
    write: Instruction | None
    readers: tuple[Instruction, ...] = ()
    read: tuple[Computation, Place] | None = None
    """The version which the readers read, and the computation that it is in."""


def _forced_at(flow: Flow, verdict: _Verdict) -> Source | None:
    """The user's line of `forced_by`; of a fused reader, the line of what reads in it."""
    if verdict.forced_by is None:
        return None
    if verdict.read and verdict.forced_by.opcode == "fusion":
        fused = flow.fused(verdict.forced_by)
        computation, origin = verdict.read
        for position, name in enumerate(verdict.forced_by.operands):
            if flow.origin(computation, Place(name)) == origin:
                for use in flow.uses(fused, Place(fused.parameter(position).name)):
                    if source := _own(flow.module.stack(use.instruction)):
                        return source
    return user_source(flow.module, verdict.forced_by)


def _explained(
    flow: Flow, computation: Computation, copy: Instruction, in_loop: bool, count: int | None
) -> Copy:
    place = Place(copy.name)
    origin = flow.origin(computation, place)
    verdict = _verdict(flow, computation, origin, flow.uses(computation, place))
    if _layout(copy) != _layout(computation[copy.operands[0]]):
        verdict = _Verdict(Cause.COMPILER, verdict.write, verdict.write)
    buffer = computation[origin.name]
    located = (verdict.write, copy, *verdict.readers, verdict.forced_by, buffer)
    sources = (user_source(flow.module, i) for i in located if i is not None)
    return Copy(
        instruction=copy,
        computation=computation,
        nbytes=_copied(copy),
        in_loop=in_loop,
        trip_count=count,
        buffer=buffer,
        write=verdict.write,
        cause=verdict.cause,
        forced_by=verdict.forced_by,
        later_readers=verdict.readers,
        source=next((source for source in sources if source), None),
        forced_at=_forced_at(flow, verdict),
    )


def _layout(instruction: Instruction) -> str:
    shape = instruction.shape
    return shape[0].layout if shape else ""


def _verdict(flow: Flow, computation: Computation, origin: Place, mine: list[Use]) -> _Verdict:
    """What forces a copy of the value made at `origin`, if the copy serves the uses `mine`."""
    uses = flow.uses(computation, origin)
    own = next((use for use in mine if use.kind is Kind.WRITE), None)
    result = next((use for use in mine if use.kind is Kind.OUTPUT), None)
    if (own or result) and (argument := _kept_argument(flow, computation, origin)):
        return _Verdict(Cause.NOT_DONATED, argument, own and own.instruction)
    if own:
        write = own.instruction
    else:
        write = _other_write(flow, computation, origin, uses, mine)
    if write is None:
        return _made_elsewhere(flow, computation, origin, uses, result)
    if write.opcode == "parameter":
        # Loop carries that only change places: each gets its next contents from another one.
        return _Verdict(Cause.COMPILER, computation.root, None)
    # The copy serves either the write, and all other uses need the old version, or the old version.
    old = [use for use in uses if use[:3] != own[:3]] if own else mine
    for use in old:
        if use.kind is Kind.OUTPUT:
            return _Verdict(Cause.ALSO_RETURNED, computation.root, write)
    for use in old:
        if use.kind is Kind.WRITE:
            return _Verdict(Cause.TWO_WRITES, use.instruction, write)
    if late := _late(flow, computation, old, write):
        read = computation, origin
        return _Verdict(Cause.READER_AFTER_WRITE, late[-1], write, late, read)
    return _outside(flow, computation, origin) or _Verdict(Cause.COMPILER, write, write)


def _kept_argument(flow: Flow, computation: Computation, origin: Place) -> Instruction | None:
    """The entry parameter that `origin` is, if its memory stays the caller's."""
    instruction = computation[origin.name]
    if computation is not flow.module.entry or instruction.opcode != "parameter":
        return None
    index = () if origin.element is None else (origin.element,)
    buffer = (instruction.parameter_number, index)
    donated = {*flow.module.input_output_alias.values(), *flow.module.buffer_donors}
    return None if buffer in donated else instruction


def _other_write(
    flow: Flow, computation: Computation, origin: Place, uses: list[Use], mine: list[Use]
) -> Instruction | None:
    """What overwrites the buffer while the copy keeps its old contents."""
    for use in uses:
        if use.kind is Kind.WRITE and use not in mine:
            return use.instruction
    for output, argument in _homes(flow, computation):
        if argument == origin:
            made = flow.origin(computation, Place(computation.root.name, output))
            return computation[made.name] if made != origin else None
    return None


def _homes(flow: Flow, computation: Computation) -> Iterator[tuple[int | None, Place]]:
    """Which result has to be in the memory of which argument: loop carries, donated arguments."""
    sites = flow.sites[computation.name]
    if computation is flow.module.entry:
        for output, (number, index) in flow.module.input_output_alias.items():
            yield (
                output[0] if output else None,
                Place(computation.parameter(number).name, index[0] if index else None),
            )
    elif any(i.opcode == "while" and i.body == computation.name for _, i in sites):
        for index in range(len(computation.root.shape)):
            yield index, Place(computation.parameter(0).name, index)


def _made_elsewhere(
    flow: Flow, computation: Computation, origin: Place, uses: list[Use], result: Use | None
) -> _Verdict:
    """Why a value that nobody overwrites is copied: it is a result and not in its memory."""
    maker = computation[origin.name]
    if result is None:
        return _outside(flow, computation, origin) or _Verdict(Cause.COMPILER, None, None)
    if any(use.kind is Kind.OUTPUT and use != result for use in uses):
        return _Verdict(Cause.ALSO_RETURNED, computation.root, None)
    for output, argument in _homes(flow, computation):
        if output == result.element and maker.opcode != "parameter":
            readers = flow.uses(computation, argument)
            if late := _late(flow, computation, readers, maker):
                read = computation, argument
                return _Verdict(Cause.READER_AFTER_WRITE, late[-1], maker, late, read)
    return _outside(flow, computation, origin) or _Verdict(Cause.COMPILER, maker, None)


def _late(
    flow: Flow, computation: Computation, uses: Iterable[Use], write: Instruction
) -> tuple[Instruction, ...]:
    """The readers among `uses` which need not be done when `write` starts, in schedule order.

    The write counts as one only where there is no other: mostly it reads what it overwrites.
    """
    readers = dict.fromkeys(use.instruction for use in uses if use.kind is Kind.READ)
    early = flow.precedes(computation, readers, write)
    position = flow.positions(computation)
    late = sorted(readers.keys() - early, key=lambda reader: position[reader.name])
    return tuple(reader for reader in late if reader is not write) or tuple(late)


def _outside(flow: Flow, computation: Computation, origin: Place) -> _Verdict | None:
    """What needs the value outside of the branch or the call that got it as an argument."""
    sites = flow.sites[computation.name]
    number = computation[origin.name].parameter_number
    if number is None or len(sites) != 1 or sites[0][1].opcode not in ("call", "conditional"):
        return None
    caller, site = sites[0]
    branch = site.opcode == "conditional"
    position = site.called.index(computation.name) + 1 if branch else number
    place = flow.origin(caller, Place(site.operands[position], origin.element))
    passed = (1, None) if branch else (position, origin.element)
    mine = [
        use._replace(kind=Kind.WRITE)
        for use in flow.uses(caller, place)
        if use.instruction is site and (use.operand, use.element) == passed
    ]
    return _verdict(flow, caller, place, mine) if mine else None
