"""Just enough of the protobuf wire format to read a message and to insert bytes into it.

The schema stays with the caller, who looks for keys: field number and wire type in one number, as
on the wire.  A field of unexpected number or wire type is thus passed over, as by protobuf itself,
and `splice` copies whatever it is not told to change: no field is lost, known or unknown.
"""

from collections.abc import Iterable, Iterator

VARINT, LENGTH = 0, 2  # the wire types of numbers, and of strings, messages and packed lists

type Field = tuple[int, int, int, int]
"""(key, value, start, end): value is the number itself for a varint, else where the payload begins;
a payload ends where its field does."""

type Edit = tuple[int, int, bytes]
"""(start, end, new): replace data[start:end] by new."""


class Malformed(ValueError):
    """These bytes are not the message they are taken for."""


def key(number: int, wire: int) -> int:
    """The varint that introduces field `number` with wire type `wire`."""
    return number << 3 | wire


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:  # ten bytes hold 64 bits
            raise Malformed("number longer than 64 bits")


def fields(data: bytes, start: int, end: int) -> Iterator[Field]:
    """The fields of the message in data[start:end], in wire order."""
    at = start
    try:
        while at < end:
            begin = at
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = read_varint(data, begin)
            match tag & 7:
                case 0:  # VARINT
                    value, at = read_varint(data, at)
                case 2:  # LENGTH
                    size, value = read_varint(data, at)
                    at = value + size
                case 1:  # FIXED64
                    value, at = at, at + 8
                case 5:  # FIXED32
                    value, at = at, at + 4
                case wire:  # 3 and 4 open and close a group; 6 and 7 do not exist
                    raise Malformed(f"wire type {wire}")
            if at > end:
                break
            yield tag, value, begin, at
    except IndexError:
        at = end + 1
    if at != end:
        raise Malformed("field runs past the end of its message")


def numbers(data: bytes, field: Field) -> Iterator[int]:
    """The values of a repeated integer field, packed or one by one."""
    tag, value, _, end = field
    if tag & 7 == VARINT:
        yield value
        return
    while value < end:
        number, value = read_varint(data, value)
        yield number
    if value > end:
        raise Malformed("number runs past the end of its list")


def varint(number: int) -> bytes:
    """`number` in the wire's base 128, low digits first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode(number: int, payload: int | bytes) -> bytes:
    """Field `number` holding a varint (int) or a string, message or packed list (bytes)."""
    if isinstance(payload, int):
        return varint(key(number, VARINT)) + varint(payload)
    return varint(key(number, LENGTH)) + varint(len(payload)) + payload


def resize(field: Field, edits: list[Edit]) -> list[Edit]:
    """`edits` inside the payload of `field`, preceded by the one that makes its length right."""
    tag, payload, start, end = field
    size = end - payload + sum(len(new) - (stop - begin) for begin, stop, new in edits)
    return [(start, payload, varint(tag) + varint(size)), *edits]


def splice(data: bytes, edits: Iterable[Edit]) -> bytes:
    """`data` with `edits`, which are in order and do not overlap, carried out."""
    pieces: list[bytes] = []
    done = 0
    for start, end, new in edits:
        pieces += data[done:start], new
        done = end
    return b"".join((*pieces, data[done:]))
