"""Constraints: which reads of a buffer XLA might run after the write, or fuse into it."""

import dataclasses

from jaxsched._graph import SEARCH, Edge, Graph, Node, Value
from jaxsched._scope import Scope
from jaxsched._takeovers import passed_through, recycled
from jaxsched._updates import (
    ScopeKind,
    is_elementwise,
    is_materialized,
    is_view,
    keeps_position,
    same_shape,
    scopes,
    updates,
    window,
)
from jaxsched._writes import (
    Hazard,
    Write,
    find_writes,
    held_operands,
    is_a,
    is_same_window,
    root,
    uses_of,
)

__all__ = ["Findings", "Unavoidable", "find_hazards"]

_NEAR = 32  # as far as XLA may carry one read into later kernels; a longer chain is left alone


@dataclasses.dataclass(frozen=True, slots=True)
class Unavoidable:
    """A copy that no order of the program removes, and why."""

    write: Write
    buffer: Value
    why: str
    reader: Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What a scope needs beyond its order; `alone` are values to pin without any reads, `passed`
    are inputs that it returns as they are, each with what reads them."""

    hazards: list[Hazard]
    unavoidable: list[Unavoidable]
    alone: list[Value]
    passed: list[tuple[Value, list[Node]]]


def find_hazards(scope: Scope, kind: ScopeKind, *, infer: bool) -> Findings:
    """What has to be pinned in a scope; with `infer`, its inferred edges are added to the graph."""
    buffers, lineages = find_writes(scope, kind)
    found = Findings([], [], [], [])
    if infer:
        # The conflicts are what the data alone order; so all of them are found before any edge.
        for conflict in [_Conflict(scope.graph, *each) for each in buffers.items()]:
            _resolve(scope.graph, conflict, scope.fixed, found)
        found.hazards.extend(recycled(scope, kind, lineages))
        found.passed.extend(passed_through(scope, kind))
    alone = [*_viewed_operands(buffers), *_lingering(buffers, found.unavoidable)]
    found.alone.extend(dict.fromkeys(alone))
    return found


def _resolve(graph: Graph, conflict: "_Conflict", fixed: set[Value], found: Findings) -> None:
    """Orders the reads of one buffer before its write, or notes why that cannot be."""
    late: Node | None = None
    if conflict.buffer in fixed:
        why = "it must keep its value"
    elif conflict.returned:
        why = "its old value is returned"
    elif conflict.also_read:
        why = "the write itself reads it too"
    elif late := conflict.order(graph):
        why = "its old value is read after the write"
    else:
        why = None
        if conflict.risky and not _is_of_copy(conflict.keeper, found.unavoidable):
            found.hazards.append(conflict.hazard())
    for write in conflict.writes:
        if write.arithmetic:
            continue  # its result is a new array then, and no copy
        if why is not None:
            found.unavoidable.append(Unavoidable(write, conflict.buffer, why, late))
        elif write is not conflict.keeper:
            other = conflict.keeper.node
            why_not = "another write keeps its memory"
            found.unavoidable.append(Unavoidable(write, conflict.buffer, why_not, other))
        else:
            continue
        if fused := conflict.fused_into(write):
            found.hazards.append(Hazard(write.node, [], fused, conflict.buffer.nbytes))


class _Conflict:
    """The reads and writes of one buffer, as the data alone order them."""

    def __init__(self, graph: Graph, buffer: Value, writes: list[Write]):
        self.buffer = buffer
        self.writes = writes
        uses, self.returned = uses_of(buffer)
        self.keeper = _keeper(graph, writes)
        self.held = held_operands(self.keeper.node, self.keeper.operand)
        apart = {node for node, _ in self.held}
        self.readers = [node for node in uses if node not in apart]
        again = _is_computed_again(buffer, writes)
        self.risky = [
            node
            for node in self.readers
            if not (again and _has_its_own(node, writes)) and _is_hazard(graph, node, self.keeper)
        ]

    @property
    def also_read(self) -> bool:
        """Whether the write takes the buffer another time, and not to write it: a loop that
        carries an array and reads the old one."""
        node = self.keeper.node
        written = {write.operand for write in self.writes if write.node is node}
        others = (value for i, value in enumerate(node.inputs) if i not in written)
        return not self.keeper.arithmetic and any(root(value) is self.buffer for value in others)

    def hazard(self) -> Hazard:
        return Hazard(self.keeper.node, self.held, self.risky, self.buffer.nbytes)

    def fused_into(self, write: Write) -> list[Node]:
        """The readers that XLA would fuse into the write of a copy. That goes on in the copy's
        memory, so that these see elements which it has overwritten already (openxla/xla#49176).

        Where XLA computes the buffer once more for the write, there is no copy.
        """
        if scopes(write.node.payload) or _is_computed_anew(self.buffer):
            return []
        return [
            node
            for node in self.readers
            if node is not write.node
            and not is_same_window(node, write.node)
            and _fusible_path(node, write.node, line=_is_same_line(node, write.node))
        ]

    def order(self, graph: Graph) -> Node | None:
        """Orders every reader before the write, or returns one that has to run after it."""
        readers = self.risky if self.keeper.arithmetic else self.readers
        for reader in sorted(readers, key=lambda node: node.rank):
            if graph.add_edge(Edge("inferred", reader, self.keeper.node)) is not None:
                return reader
        self._order_windows(graph)
        return None

    def _order_windows(self, graph: Graph) -> None:
        """A slice of the window that is written starts with the write, unless a reader needs it."""
        held, self.held = self.held[1:], self.held[:1]
        for node, operand in held:
            edges = (Edge("inferred", reader, node) for reader in self.risky)
            if all(graph.add_edge(edge) is None for edge in edges):
                self.held.append((node, operand))
            else:
                self.risky.append(node)


def _keeper(graph: Graph, writes: list[Write]) -> Write:
    """The write that may keep the memory; to the others, the buffer is one that they only read.

    It is one that no other write waits for. Among these the one that reaches the earliest output:
    JAX gives a donated argument to the first output of its type, and a loop a carried value to the
    output with the same number, so that any other choice costs one more copy.
    """
    candidates = [write for write in writes if not write.arithmetic] or writes
    if len(candidates) == 1:
        return candidates[0]
    free = [
        write
        for write in candidates
        if not any(
            graph.depends_on(other.node, write.node, SEARCH) is not False
            for other in writes
            if other.node is not write.node
        )
    ]
    free = free or [max(candidates, key=lambda write: write.node.rank)]
    places = {value: i for i, value in reversed([*enumerate(graph.outputs)])}
    return min(free, key=lambda write: _destination(write, places))


def _destination(write: Write, places: dict[Value, int]) -> int:
    """The first output that the written buffer reaches by views and further updates."""
    best = len(places)
    todo = [write.node.outputs[write.result]]
    for value in todo:
        best = min(best, places.get(value, best))
        for user in value.users:
            if is_view(user.payload):
                todo.append(user.outputs[0])
            elif len(todo) < SEARCH:
                pairs = updates(user.payload)
                todo += [user.outputs[out] for i, out in pairs if user.inputs[i] is value]
    return best


def _is_hazard(graph: Graph, reader: Node, write: Write) -> bool:
    """Whether XLA may read the buffer late: after the write, or in one kernel with it.

    A result that the write needs is computed in time. But XLA computes what it can fuse once more
    for another user; and where all that lies between can be fused into the write, it reads the
    buffer while that is being overwritten.
    """
    if not graph.depends_on(write.last, reader, SEARCH) or _is_recomputed(graph, reader, write):
        return True
    return not is_materialized(write.last.payload) and _fusible_path(reader, write.last)


def _is_recomputed(graph: Graph, reader: Node, write: Write) -> bool:
    """Whether a read that the write needs can be fused into something that may run later."""
    todo = [reader]
    for node in todo:
        once = is_elementwise(node.payload) and not _is_duplicated(node)
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


def _fusible_path(reader: Node, last: Node, *, line: bool = False) -> bool:
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


def _is_same_line(reader: Node, write: Node) -> bool:
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


def _is_of_copy(write: Write, unavoidable: list[Unavoidable]) -> bool:
    """Whether this is arithmetic with an updated copy. Its result takes the memory of what was
    copied, so that nothing overwrites the copy."""
    source = root(write.node.inputs[write.operand]).producer
    return write.arithmetic and any(source is each.write.node for each in unavoidable)


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
        if not (part or updates(producer.payload) or _is_duplicated(producer)):
            continue
        uses, returned = uses_of(value)
        writes = buffers.get(value, ())
        overwriting = {each.node for each in writes if not _is_of_copy(each, unavoidable)}
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


def _is_duplicated(node: Node) -> bool:
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


def _is_computed_again(value: Value, writes: list[Write]) -> bool:
    """Whether XLA computes a value anew where that saves a copy: an array of one number, or
    arithmetic for each of several writes."""
    return _is_filled(value) or (len(writes) > 1 and _is_computed_anew(value))


def _is_computed_anew(value: Value) -> bool:
    """Whether XLA computes a value once more in each kernel that uses it."""
    return value.producer is not None and (_is_filled(value) or _is_duplicated(value.producer))


def _is_filled(value: Value) -> bool:
    """Whether it is an array of one number."""
    if value.producer is None or not _is_broadcast(value):
        return False
    return not value.producer.inputs[0].key.aval.shape


def _has_its_own(reader: Node, writes: list[Write]) -> bool:
    """Whether a reader gets what is computed again to itself: in its kernel, or to overwrite it, as
    a sort does too."""
    overwrites = is_a(reader, "sort") or any(reader is write.node for write in writes)
    return overwrites or not is_materialized(reader.payload)
