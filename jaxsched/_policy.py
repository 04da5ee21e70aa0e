"""`scheduled(copies=...)` while a function is planned: which writes it claims to do in place.

A claimed buffer goes through a pin whose mark carries the policy, so that XLA's copies of it are
seen when the program is compiled (`_copied`). A copy that the program's own logic needs is told of
right away.
"""

import warnings
from collections.abc import Sequence
from typing import Literal

from jaxsched._errors import CopyError, CopyWarning, message
from jaxsched._graph import Node, Value
from jaxsched._jax import INTERNAL, user_line
from jaxsched._options import CopyPolicy
from jaxsched._scope import Scope
from jaxsched._takeovers import first_written
from jaxsched._updates import ScopeKind, keeps_position
from jaxsched._writes import Unavoidable, find_writes

__all__ = ["claimed", "speak"]


def claimed(
    scope: Scope, kind: ScopeKind, unavoidable: Sequence[Unavoidable], copies: CopyPolicy
) -> list[tuple[Node, int]]:
    """The operands (node, number) that are to be overwritten where they are; they need a pin.

    It counts what comes into the scope, an argument or a carried value: a copy of what the scope
    computes itself costs no more than computing it.
    """
    forced = [each for each in unavoidable if _lives_on(each.buffer) and _is_read(each.reader)]
    if forced and copies != "allow":
        speak(copies, _unavoidable(forced[0]))
    left = {each.write.node for each in unavoidable}
    found = []
    for buffer, writers in find_writes(scope, kind)[0].items():
        for write in (write for write in writers if write.node not in left and _lives_on(buffer)):
            operand, result = write.node.inputs[write.operand], write.node.outputs[write.result]
            scope.claimed |= {buffer, operand, result}
            # Arithmetic that is not in place makes a new array, and no copy.
            found += [] if write.arithmetic else [(write.node, write.operand)]
    return found


def speak(copies: Literal["warn", "error"], text: str) -> None:
    """Says that there is a copy: by a warning at the user's line, or by an error."""
    if copies == "error":
        raise CopyError(text)
    # The frames between are JAX's and ours.
    warnings.warn(text, CopyWarning, stacklevel=2, skip_file_prefixes=INTERNAL)


def _lives_on(buffer: Value) -> bool:
    return first_written(buffer).producer is None


def _is_read(reader: Node | None) -> bool:
    """Whether a late reader needs all of the old contents: arithmetic is fused into the write."""
    return reader is None or not keeps_position(reader.payload)


def _unavoidable(copy: Unavoidable) -> str:
    where = f"the write at {user_line(copy.write.node.payload.source_info)}"
    if copy.reader is not None:
        where += f", which {user_line(copy.reader.payload.source_info)} keeps from being in place"
    return message(
        f"a buffer of {copy.buffer.nbytes:,} bytes is copied in any order: {copy.why}.",
        where,
        'read what is needed before the write and return only the new value; or copies="allow".',
    )
