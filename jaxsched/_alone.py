"""Values to pin alone, which XLA would else fuse into an update, or into what reads them later."""

from jaxsched._fusion import is_duplicated
from jaxsched._graph import Node, Value
from jaxsched._updates import is_materialized, is_view, updates
from jaxsched._writes import Unavoidable, Write, is_a, is_of_copy, is_same_window, uses_of

__all__ = ["pinned_alone"]


def pinned_alone(buffers: dict[Value, list[Write]], unavoidable: list[Unavoidable]) -> list[Value]:
    """The values that everything which uses them has to take from memory."""
    return list(dict.fromkeys([*_viewed_operands(buffers), *_lingering(buffers, unavoidable)]))


def _viewed_operands(buffers: dict[Value, list[Write]]) -> list[Value]:
    """The views through which updates that XLA could fuse overwrite their buffer.

    A gather ends in one too, once XLA has simplified it (`GatherSimplifier`).
    """
    views: list[Value] = []
    for write in (write for writes in buffers.values() for write in writes):
        value = write.node.inputs[write.operand]
        producer = value.producer
        if producer is None or write.arithmetic or is_materialized(write.node.payload):
            continue
        window = is_a(write.node, "dynamic_update_slice") and not value.is_output
        if is_view(producer.payload) or (window and is_a(producer, "gather")):
            views.append(value)
    return views


def _lingering(buffers: dict[Value, list[Write]], unavoidable: list[Unavoidable]) -> list[Value]:
    """Written values that stay in memory while something else reads them.

    XLA may fuse a second copy of the write into such a reader, which then needs the version from
    before the write. Readers whose results are not fused with their operands do no harm. A view
    of an updated buffer is fused into the update, which XLA then no longer sees as in place. What
    reads a part of an updated buffer can have the update fused into it, too, once for each use.
    """
    written = [
        write.last.outputs[write.result]
        for writes in buffers.values()
        for write in writes
        if not is_materialized(write.last.payload)
    ]
    # What an update takes may have been computed in the memory of an operand, as an update would.
    written += buffers
    found: dict[Value, None] = {}
    for value in written:
        producer = value.producer
        if producer is None:
            continue
        part = _is_part_of_update(producer)
        if not (part or updates(producer.payload) or is_duplicated(producer)):
            continue
        uses, returned = uses_of(value)
        writes = buffers.get(value, ())
        overwriting = {each.node for each in writes if not is_of_copy(each, unavoidable)}
        if not (returned or overwriting):
            continue
        if returned + len(overwriting) > 1 and not updates(producer.payload):
            continue  # what XLA computes once more for each of them needs no copy
        if not part:
            overwriting |= {
                user for user in uses for w in [*overwriting] if is_same_window(user, w)
            }
        readers = (user for user in uses if user not in overwriting)
        if any(not is_materialized(user.payload) for user in readers) or _is_viewed(value):
            found[value] = None
    return list(found)


def _is_part_of_update(node: Node) -> bool:
    """Whether XLA could fuse an update into what reads a part of its result, once for each use."""
    return not is_materialized(node.payload) and any(
        value.producer is not None
        and updates(value.producer.payload)
        and not is_materialized(value.producer.payload)
        for value in node.inputs
    )


def _is_viewed(value: Value) -> bool:
    """Whether an update is followed by a view of its result."""
    updated = value.producer is not None and bool(updates(value.producer.payload))
    return updated and any(is_view(user.payload) for user in value.users)
