"""The HLO pass: the order that `pin` declares, as control edges in the module XLA compiles.

A pin reaches XLA as one optimization barrier over (buffers..., reads...), marked by a frontend
attribute.  After copy insertion and before scheduling this pass adds to all that uses a pinned
buffer, its in-place write above all, the producers of the pinned reads as control predecessors:

    read = fusion(x)                             read = fusion(x)
    pin = opt-barrier(tuple(x, read))       -->  pin = opt-barrier(tuple(x, read))
    x1 = get-tuple-element(pin), index=0         x1 = get-tuple-element(pin), index=0
    new = fusion(x1)                             new = fusion(x1), control-predecessors={read}

Every edge runs along a data path that is there already (read, barrier, write).  So it can close no
cycle, and the order in which the module lists its instructions, operands and control predecessors
first, stays valid.  The barrier alone gives the same order, but XLA drops it after scheduling; the
edges stay in the final module, where later passes obey them and readers see them.
"""

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxsched._hlo._wire import (
    LENGTH,
    VARINT,
    Edit,
    Field,
    Malformed,
    encode,
    fields,
    key,
    numbers,
    resize,
    splice,
    varint,
)

MARK_KEY = "jaxsched"

PASS_VERSION = 3  # to be raised with every change of the edges: the mark is part of JAX's cache key


def mark(buffers: int, operands: int, copies: str = "allow") -> str:
    """The frontend attribute's value for a barrier over `operands` values, the first `buffers` of
    which are the pinned buffers and the others the reads; `copies` says what to do where the
    buffers are copied all the same ("warn", "error")."""
    policy = "" if copies == "allow" else f":{copies}"
    return f"pin:{buffers}:{operands}:{PASS_VERSION}{policy}"


_MARK = re.compile(rb"pin:([1-9]\d{0,8}):([1-9]\d{0,8}):%d(?::(?:warn|error))?" % PASS_VERSION)
_NEEDLE = encode(1, MARK_KEY.encode())  # the attribute's key as a map entry has it on the wire

### The schema: field numbers from xla/service/hlo.proto and xla/xla_data.proto


def _repeated(number: int) -> tuple[int, int]:
    return key(number, LENGTH), key(number, VARINT)


_MODULE_COMPUTATION, _MODULE_STACK_FRAMES = key(3, LENGTH), key(17, LENGTH)
_STACK_FRAME = key(4, LENGTH)
_COMPUTATION_INSTRUCTION = key(2, LENGTH)
_COMPUTATION_ID = key(5, VARINT)
_OPCODE = key(2, LENGTH)
_SHAPE = key(3, LENGTH)
_TUPLE_INDEX = key(13, VARINT)
_ID = key(35, VARINT)
_OPERANDS = _repeated(36)
_CONTROL_PREDECESSORS = _repeated(37)
_FRONTEND_ATTRIBUTES = key(68, LENGTH)
_MAP_ENTRY, _MAP_KEY, _MAP_VALUE = key(1, LENGTH), key(1, LENGTH), key(2, LENGTH)
_ELEMENT_TYPE = key(2, VARINT)
_DIMENSIONS = _repeated(3)
_TUPLE_SHAPES = key(4, LENGTH)


### Reading instructions

type _Size = tuple[int, int]  # element type, number of elements


@dataclass(slots=True, eq=False)
class _Instruction:
    span: Field
    id: int = 0
    opcode: bytes = b""
    operands: list[int] = field(default_factory=list)
    tuple_index: int = 0
    shape: Field | None = None
    attributes: Field | None = None
    control_predecessors: set[int] = field(default_factory=set)
    inputs: list["_Value"] = field(default_factory=list)  # what the operands are, filled on the way
    added: dict[int, None] = field(default_factory=dict)  # new control predecessors, in order


@dataclass(slots=True, eq=False)
class _Pin:
    """A pinned buffer on its way from the barrier to its users, or to the next pin."""

    size: _Size
    reads: dict[int, None]
    parent: "_Pin | None"
    written: bool = False
    users: list[_Instruction] = field(default_factory=list)  # but for those that write it
    later_users: list[_Instruction] = field(default_factory=list)  # behind the next pins


@dataclass(slots=True, eq=False)
class _Value:
    """What an instruction passes on: element `path` of what `producer` computes, or a tuple.

    Instructions that compute nothing (tuple, get-tuple-element, bitcast, barrier) pass on what
    others computed; so a value names the instruction that did, and the last pin it went through.
    """

    producer: _Instruction
    path: tuple[int, ...] = ()
    pin: _Pin | None = None
    parts: list["_Value"] | None = None

    def element(self, index: int) -> "_Value":
        if self.parts is not None:
            return self.parts[index]
        return _Value(self.producer, (*self.path, index))

    def leaves(self) -> Iterator["_Value"]:
        todo: list[_Value] = [self]
        seen: set[int] = set()  # a damaged module can nest tuples so that leaves double each time
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if value.parts is None:
                yield value
            else:
                todo += reversed(value.parts)


def _read_instruction(data: bytes, instruction: Field) -> _Instruction:
    read = _Instruction(instruction)
    for part in _message(data, instruction):
        tag, value, _, end = part
        if tag == _OPCODE:
            read.opcode = data[value:end]
        elif tag == _SHAPE:
            read.shape = part
        elif tag == _TUPLE_INDEX:
            read.tuple_index = value
        elif tag == _ID:
            read.id = value
        elif tag in _OPERANDS:
            read.operands += numbers(data, part)
        elif tag in _CONTROL_PREDECESSORS:
            read.control_predecessors.update(numbers(data, part))
        elif tag == _FRONTEND_ATTRIBUTES:
            read.attributes = part
    return read


def _read_mark(data: bytes, attributes: Field | None) -> tuple[int, int] | None:
    """The numbers of buffers and of operands in the mark, if there is one of this version."""
    value = b""
    for entry in _message(data, attributes):
        if entry[0] == _MAP_ENTRY:
            pair = {part[0]: data[part[1] : part[3]] for part in _message(data, entry)}
            if pair.get(_MAP_KEY) == MARK_KEY.encode():
                value = pair.get(_MAP_VALUE, b"")
    found = _MARK.fullmatch(value)
    return found and (int(found[1]), int(found[2]))


def _sizes(data: bytes, shape: Field | None) -> list[_Size]:
    """The sizes of the arrays in a shape, tuples flattened."""
    element_type, count, parts = 0, 1, list[_Size]()
    for part in _message(data, shape):
        if part[0] == _ELEMENT_TYPE:
            element_type = part[1]
        elif part[0] in _DIMENSIONS:
            for dimension in numbers(data, part):
                count = count * dimension & 0xFFFF_FFFF_FFFF_FFFF
        elif part[0] == _TUPLE_SHAPES:
            parts += _sizes(data, part)
    return parts or [(element_type, count)]


def _message(data: bytes, message: Field | None) -> Iterable[Field]:
    return fields(data, message[1], message[3]) if message else ()


### The pass over one computation, in its own order: operands come before their users


def _control_edges(data: bytes, computation: Field) -> list[Edit]:
    """The edits that add this computation's control edges."""
    instructions = [
        _read_instruction(data, part)
        for part in _message(data, computation)
        if part[0] == _COMPUTATION_INSTRUCTION
    ]
    values: dict[int, _Value] = {}
    pins: list[_Pin] = []
    for instruction in instructions:
        if instruction.id in values:
            raise Malformed(f"two instructions with id {instruction.id}")
        instruction.inputs = [values[operand] for operand in instruction.operands]
        values[instruction.id] = _value(data, instruction, pins)
    for pin in reversed(pins):  # the pins behind it come first, and hand up their users
        users = pin.users if pin.users or pin.written else pin.later_users
        for user in users:
            user.added |= pin.reads
        if pin.parent is not None:
            pin.parent.later_users += users
    edits: list[Edit] = []
    for instruction in instructions:
        new = [i for i in instruction.added if i not in instruction.control_predecessors]
        if new:
            end = instruction.span[3]
            packed = encode(37, b"".join(map(varint, new)))  # control_predecessor_ids
            edits += resize(instruction.span, [(end, end, packed)])
    return resize(computation, edits) if edits else []


def _value(data: bytes, instruction: _Instruction, pins: list[_Pin]) -> _Value:
    """What `instruction` passes on.  If it writes a pinned buffer, it gets its new predecessors:
    the reads of the pin and of all pins before it on the same buffer."""
    match instruction.opcode:
        case b"tuple":
            return _Value(instruction, parts=instruction.inputs)
        case b"get-tuple-element":
            return instruction.inputs[0].element(instruction.tuple_index)
        case b"bitcast":
            return instruction.inputs[0]
        case b"opt-barrier":
            mark = _read_mark(data, instruction.attributes)
            return _pinned(data, instruction, *mark, pins) if mark else instruction.inputs[0]
    used = {
        leaf.pin: None
        for value in instruction.inputs
        if value.pin or value.parts
        for leaf in value.leaves()
        if leaf.pin
    }
    yields = set(_sizes(data, instruction.shape)) if used else set()
    for pin in used:
        if pin.size not in yields:
            pin.users.append(instruction)
            continue
        above: _Pin | None = pin
        while above is not None:
            above.written = True
            instruction.added |= above.reads
            above = above.parent
    return _Value(instruction)


def _pinned(
    data: bytes, barrier: _Instruction, buffers: int, operands: int, pins: list[_Pin]
) -> _Value:
    """What comes out of a marked barrier: the same values, the buffers with a pin."""
    [value] = barrier.inputs
    sizes = _sizes(data, barrier.shape)
    if not 1 < len(sizes) <= operands or operands <= buffers:  # no reads, or not our barrier
        return value
    parts = [value.element(index) for index in range(len(sizes))]
    # XLA drops elements that nobody uses and moves up the rest, so that some may be a buffer or a
    # read.  All of them count as reads: the barrier puts each one before what is behind it.
    dropped = operands - len(parts)
    out = list(parts)
    for index, part in enumerate(parts[:buffers]):
        reads = {
            leaf.producer.id: None
            for candidate in parts[max(index + 1, buffers - dropped) :]
            for leaf in candidate.leaves()
            if leaf.producer.opcode not in (b"parameter", b"constant")
        }
        if reads:
            pin = _Pin(sizes[index], reads, part.pin)
            pins.append(pin)
            out[index] = _Value(part.producer, part.path, pin)
    return _Value(barrier, parts=out)


### The pass over a module


def _rewritten(data: bytes) -> bytes | None:
    edits: list[Edit] = []
    frames = last_id = 0
    for part in fields(data, 0, len(data)):
        tag, payload, _, end = part
        if tag == _MODULE_STACK_FRAMES:
            frames = sum(entry[0] == _STACK_FRAME for entry in _message(data, part))
        elif tag == _MODULE_COMPUTATION:
            for entry in _message(data, part):
                if entry[0] == _COMPUTATION_ID:
                    last_id = max(last_id, entry[1])
            if data.find(_NEEDLE, payload, end) >= 0:
                edits += _control_edges(data, part)
    if not edits:
        return None
    mention = _mention_of_frames(frames, last_id + 1) if frames else b""
    return splice(data, [(0, 0, mention), *edits])


def _mention_of_frames(count: int, computation_id: int) -> bytes:
    """An unused first computation whose instructions mention stack frames 1 to `count` in order.

    XLA (jaxlib 0.11.1 to 0.12.0.1) renumbers the frames of a module that a transformation returns
    by first mention but keeps the old table of frames: without this, a third of the instructions
    point to wrong source lines.  XLA drops the computation right after reading it.
    """
    token = encode(2, 17)  # element_type: TOKEN, what after-all yields
    first = computation_id << 32  # instruction ids carry their computation's
    instructions = [
        encode(1, b"jaxsched_frame.%d" % frame)  # name
        + encode(2, b"after-all")  # opcode
        + encode(3, token)  # shape
        + encode(7, encode(15, frame))  # metadata.stack_frame_id
        + encode(35, first + frame)  # id
        for frame in range(1, count + 1)
    ]
    computation = (
        encode(1, b"jaxsched_frames")  # name
        + b"".join(encode(2, instruction) for instruction in instructions)
        + encode(4, encode(2, token))  # program_shape.result
        + encode(5, computation_id)  # id
        + encode(6, first + count)  # root_id
    )
    return encode(3, computation)


def add_control_edges(module: bytes) -> bytes | None:
    """The serialized HLO module with the marked barriers' control edges; None: leave it as it is.

    Never raises, whatever the bytes, since an exception would fail the compilation, while without
    edges the barriers keep the order: anything unexpected becomes a RuntimeWarning and None.
    """
    if _NEEDLE not in module:
        return None
    try:
        return _rewritten(module)
    except Exception as error:
        with contextlib.suppress(Exception):  # where warnings are errors, or a user's hook raises
            warnings.warn(
                "jaxsched added no control edges to a module that it could not read"
                f" ({type(error).__name__}: {error}). Its barriers keep the order all the same;"
                " results are not affected.",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
