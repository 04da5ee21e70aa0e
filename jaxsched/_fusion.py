"""What XLA may fuse into something else, or compute once more, and so read late."""

from jaxsched._graph import SEARCH, Graph, Node, Value
from jaxsched._updates import (
    is_elementwise,
    is_materialized,
    is_view,
    keeps_position,
    same_shape,
    window,
)
from jaxsched._writes import Write, is_a

__all__ = [
    "fusible_path",
    "has_its_own",
    "is_computed_again",
    "is_computed_anew",
    "is_duplicated",
    "is_recomputed",
    "is_same_line",
]

_NEAR = 32  # as far as XLA may carry one read into later kernels; a longer chain is left alone


def is_recomputed(graph: Graph, reader: Node, write: Write) -> bool:
    """Whether a read that the write needs can be fused into something that may run later."""
    todo = [reader]
    for node in todo:
        once = is_elementwise(node.payload) and not is_duplicated(node)
        if once or is_materialized(node.payload) or len(todo) > _NEAR:
            continue
        for value in node.outputs:
            for user in value.users:
                if user in (write.node, write.last) or user in todo:
                    continue
                if not graph.depends_on(write.last, user, SEARCH):
                    return True
                todo.append(user)
            if value.is_output:
                return True
    return False


def fusible_path(reader: Node, last: Node, *, line: bool = False) -> bool:
    """Whether XLA could fuse a read into the write which does not read just what it overwrites.

    Arithmetic of one shape reads each element where it writes it, and does no harm. With `line`,
    the reader reads the line that is overwritten, or another one.
    """
    if is_materialized(reader.payload):
        return False
    start = (reader, not line and not keeps_position(reader.payload))
    seen = {start}
    todo = [start]
    while todo:
        node, moved = todo.pop()
        for value in node.outputs:
            for user in value.users:
                if user is last:
                    if moved:
                        return True
                    continue
                still = keeps_position(user.payload) or (line and _keeps_order(user))
                step = (user, moved or not still)
                if user.rank > last.rank or step in seen or is_materialized(user.payload):
                    continue
                seen.add(step)
                todo.append(step)
                if len(seen) > SEARCH:
                    return True
    return False


def is_same_line(reader: Node, write: Node) -> bool:
    """Whether one window is read and one written, of the same sizes, each 1 or all there is: they
    are the same elements, or none of them are."""
    sizes = window(write.payload)
    whole = write.inputs[0].key.aval.shape
    return (
        sizes is not None
        and sizes == window(reader.payload)
        and all(size in (1, full) for size, full in zip(sizes, whole, strict=True))
    )


def _keeps_order(node: Node) -> bool:
    """Whether the elements stay as many, in the same order."""
    moves_none = is_view(node.payload) or is_a(node, "broadcast_in_dim")
    return moves_none and node.inputs[0].nbytes == node.outputs[0].nbytes


def is_duplicated(node: Node) -> bool:
    """Whether XLA computes this arithmetic once more in each kernel that uses it.

    It does so where that reads no more memory than the result would: with one operand of full size
    (`InstructionFusion::EffectivelyAtMostUnary`).
    """
    if not is_elementwise(node.payload):
        return False
    full = {
        operand
        for operand in node.inputs
        if same_shape(operand.key, node.outputs[0].key) and not _is_broadcast(operand)
    }
    return len(full) == 1


def _is_broadcast(value: Value) -> bool:
    return value.producer is not None and is_a(value.producer, "broadcast_in_dim")


def is_computed_again(value: Value, writes: list[Write]) -> bool:
    """Whether XLA computes a value anew where that saves a copy: an array of one number, or
    arithmetic for each of several writes."""
    return _is_filled(value) or (len(writes) > 1 and is_computed_anew(value))


def is_computed_anew(value: Value) -> bool:
    """Whether XLA computes a value once more in each kernel that uses it."""
    return value.producer is not None and (_is_filled(value) or is_duplicated(value.producer))


def _is_filled(value: Value) -> bool:
    """Whether it is an array of one number."""
    if value.producer is None or not _is_broadcast(value):
        return False
    return not value.producer.inputs[0].key.aval.shape


def has_its_own(reader: Node, writes: list[Write]) -> bool:
    """Whether a reader gets what is computed again to itself: in its kernel, or to overwrite it, as
    a sort does too."""
    overwrites = is_a(reader, "sort") or any(reader is write.node for write in writes)
    return overwrites or not is_materialized(reader.payload)
