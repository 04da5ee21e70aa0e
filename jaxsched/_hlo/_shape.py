"""The shapes of HLO values, read from their text."""

import math
import re
from functools import lru_cache
from typing import NamedTuple


class Array(NamedTuple):
    """One array of a shape; `layout` is the text in braces, `""` for a scalar."""

    dtype: str
    dims: tuple[int, ...]
    layout: str
    nbytes: int


class Shape(tuple[Array, ...]):
    """The arrays of a shape in order, tuples flattened; tokens and opaque values have no bytes."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


_ARRAY = re.compile(r"(pred|token|opaque|[a-z]+(\d+)\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_PACKED = re.compile(r"E\((\d+)\)")
COMMENT = re.compile(r"/\*.*?\*/")


@lru_cache(4096)  # few shapes make up a program
def parse_shape(text: str) -> Shape:
    """Parse a shape such as `(f32[2,3]{1,0:T(8,128)}, s4[8]{0:E(4)}, token[])`.

    Bytes are those of the elements without the padding of a tiled layout. A dimension `<=5` counts
    as 5. Types below eight bits take a byte each unless the layout packs them (`E(4)`).
    """
    return Shape(_array(match) for match in _ARRAY.finditer(COMMENT.sub("", text)))


def _array(match: re.Match[str]) -> Array:
    dtype, width, extents, layout = match.groups("")
    dims = tuple(int(n.removeprefix("<=")) for n in extents.split(",") if n)
    packed = _PACKED.search(layout)
    bits = int(packed[1]) if packed else 8 * (-(-int(width) // 8) if width else _BYTES[dtype])
    return Array(dtype, dims, layout, -(-math.prod(dims) * bits // 8))
