"""Constraints: which reads of a buffer XLA might run after the write, or fuse into it."""

import dataclasses
from typing import Any

from jaxsched._graph import Edge, Graph, Node, Value
from jaxsched._jax import Literal
from jaxsched._scope import Scope
from jaxsched._updates import (
    SMALL,
    ScopeKind,
    is_elementwise,
    is_materialized,
    is_view,
    keeps_position,
    same_shape,
    same_type,
    updates,
)

__all__ = ["Findings", "Hazard", "Unavoidable", "Write", "find_hazards", "held_operands", "root"]

_SEARCH = 256  # steps after which a path counts as not found; keeps planning linear
_LINEAGES = 4


@dataclasses.dataclass(slots=True, eq=False)
class Write:
    """`node` reuses the memory of its operand `operand` for its result `result`.

    `last` is where that is sure to be done: `node` itself, or, where it is arithmetic that XLA may
    fuse with the arithmetic behind it, the last equation which can be fused.
    """

    node: Node
    operand: int
    result: int
    last: Node
    arithmetic: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Hazard:
    """`readers` read what `write` overwrites, and nothing makes XLA finish them first."""

    write: Write
    buffer: Value
    readers: list[Node]


@dataclasses.dataclass(frozen=True, slots=True)
class Unavoidable:
    """A copy that no order of the program removes, and why."""

    write: Write
    buffer: Value
    why: str
    reader: Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What a scope needs beyond its order; `alone` are values to pin without any reads."""

    hazards: list[Hazard]
    unavoidable: list[Unavoidable]
    alone: list[Value]


def root(value: Value) -> Value:
    """The value whose memory `value` only views."""
    while (node := value.producer) is not None and is_view(node.payload):
        value = node.inputs[0]
    return value


def find_hazards(scope: Scope, kind: ScopeKind, *, infer: bool) -> Findings:
    """What has to be pinned in a scope; with `infer`, its inferred edges are added to the graph."""
    buffers = _writes(scope, kind)
    alone = [*_viewed_operands(buffers), *_lingering(buffers)]
    found = Findings([], [], list(dict.fromkeys(alone)))
    if infer:
        fixed = {*scope.constants, *scope.inputs[: kind.fixed]}
        # The conflicts are what the data alone order; so all of them are found before any edge.
        for conflict in [_Conflict(scope.graph, *each) for each in buffers.items()]:
            _resolve(scope.graph, conflict, fixed, found)
    return found


def _resolve(graph: Graph, conflict: "_Conflict", fixed: set[Value], found: Findings) -> None:
    """Orders the reads of one buffer before its write, or notes why that cannot be."""
    late: Node | None = None
    if conflict.buffer in fixed:
        why = "it must keep its value"
    elif conflict.returned:
        why = "its old value is returned"
    elif late := conflict.order(graph):
        why = "its old value is read after the write"
    else:
        why = None
        if conflict.risky:
            found.hazards.append(Hazard(conflict.keeper, conflict.buffer, conflict.risky))
    for write in conflict.writes:
        if write.arithmetic:
            continue  # its result is a new array then, and no copy
        if why is not None:
            found.unavoidable.append(Unavoidable(write, conflict.buffer, why, late))
        elif write is not conflict.keeper:
            other = conflict.keeper.node
            why_not = "another write keeps its memory"
            found.unavoidable.append(Unavoidable(write, conflict.buffer, why_not, other))


class _Conflict:
    """The reads and writes of one buffer, as the data alone order them."""

    def __init__(self, graph: Graph, buffer: Value, writes: list[Write]):
        self.buffer = buffer
        self.writes = writes
        uses, self.returned = _uses(buffer)
        self.keeper = _keeper(graph, writes)
        apart = {node for node, _ in held_operands(self.keeper.node, self.keeper.operand)}
        self.readers = [node for node in uses if node not in apart]
        self.risky = [node for node in self.readers if _is_hazard(graph, node, self.keeper)]

    def order(self, graph: Graph) -> Node | None:
        """Orders every reader before the write, or returns one that has to run after it."""
        readers = self.risky if self.keeper.arithmetic else self.readers
        for reader in sorted(readers, key=lambda node: node.rank):
            if graph.add_edge(Edge("inferred", reader, self.keeper.node)) is not None:
                return reader
        return None


def held_operands(write: Node, operand: int) -> list[tuple[Node, int]]:
    """The operands (node, number) through which a write takes its buffer.

    A slice that only feeds the update of the very window it reads is one kernel with the update.
    """
    uses = write.inputs[operand].users
    return [(write, operand), *((node, 0) for node in uses if _is_same_window(node, write))]


def _is_same_window(reader: Node, write: Node) -> bool:
    """Whether a slice reads just the window that the write updates, and for that write alone."""
    if not (_is(reader, "dynamic_slice") and _is(write, "dynamic_update_slice")):
        return False
    starts = zip(reader.inputs[1:], write.inputs[2:], strict=True)
    window = write.inputs[1]
    if not all(_equal(a, b) for a, b in starts) or not same_type(reader.outputs[0].key, window.key):
        return False
    todo = [reader.outputs[0]]
    for value in todo:
        for user in value.users:
            if user is write and value is window and value is not write.inputs[0]:
                continue
            if not is_elementwise(user.payload) or not same_type(user.outputs[0].key, window.key):
                return False
            todo.append(user.outputs[0])
        if value.is_output or len(todo) > _SEARCH:
            return False
    return True


def _is(node: Node, primitive: str) -> bool:
    return node.payload.primitive.name == primitive


def _equal(a: Value, b: Value) -> bool:
    if isinstance(a.key, Literal) and isinstance(b.key, Literal):
        return bool(a.key.val == b.key.val)
    return a is b


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
            graph.depends_on(other.node, write.node, _SEARCH) is not False
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
            elif len(todo) < _SEARCH:
                pairs = updates(user.payload)
                todo += [user.outputs[out] for i, out in pairs if user.inputs[i] is value]
    return best


def _uses(buffer: Value) -> tuple[list[Node], bool]:
    """The equations that read a buffer, through views too; whether the scope returns it."""
    uses: dict[Node, None] = {}
    returned = False
    todo = [buffer]
    for value in todo:
        returned |= value.is_output
        for user in value.users:
            if is_view(user.payload):
                todo.extend(user.outputs)
            else:
                uses[user] = None
    return list(uses), returned


def _is_hazard(graph: Graph, reader: Node, write: Write) -> bool:
    """Whether XLA may read the buffer late: after the write, or in one kernel with it.

    A result that the write needs is computed in time; only where all that lies between can be
    fused into the write does XLA read the buffer while it is being overwritten.
    """
    if not graph.depends_on(write.last, reader, _SEARCH):
        return True
    return not is_materialized(write.last.payload) and _fusible_path(reader, write.last)


def _fusible_path(reader: Node, last: Node) -> bool:
    """Whether XLA could fuse a read into the write which does not read just what it overwrites.

    Arithmetic of one shape reads each element where it writes it, and does no harm.
    """
    if is_materialized(reader.payload):
        return False
    start = (reader, not keeps_position(reader.payload))
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
                step = (user, moved or not keeps_position(user.payload))
                if user.rank > last.rank or step in seen or is_materialized(user.payload):
                    continue
                seen.add(step)
                todo.append(step)
                if len(seen) > _SEARCH:
                    return True
    return False


def _writes(scope: Scope, kind: ScopeKind) -> dict[Value, list[Write]]:
    """Every buffer that is overwritten -> by what, in source order."""
    writes: dict[Value, list[Write]] = {}
    for write in [*_updates(scope.graph), *_arithmetic(scope, kind)]:
        buffer = root(write.node.inputs[write.operand])
        if buffer.nbytes > SMALL:
            writes.setdefault(buffer, []).append(write)
    return writes


def _updates(graph: Graph) -> list[Write]:
    return [
        Write(node, operand, result, node)
        for node in graph.nodes
        for operand, result in updates(node.payload)
    ]


def _arithmetic(scope: Scope, kind: ScopeKind) -> list[Write]:
    """The arithmetic that updates an input of the scope as a whole: x = x - outer(c, r).

    It counts only where the result leaves the scope in that input's place; otherwise the result of
    every sum would be taken for an update of one of its terms.
    """
    lineages = _lineages(scope)
    found: dict[int, Write] = {}
    claimed: set[int] = set()
    for result, value in enumerate(scope.graph.outputs):
        for source, write in lineages.get(value, ()):
            if source in claimed or not kind.may_become(source, result):
                continue
            claimed.add(source)
            if write is not None:
                if write.last is write.node:
                    write.last = root(value).producer or write.node
                found[id(write)] = write
            break
    return list(found.values())


def _lineages(scope: Scope) -> dict[Value, list[tuple[int, Write | None]]]:
    """Value -> the inputs whose memory it may have, each with the first arithmetic on the way."""
    lineages: dict[Value, list[tuple[int, Write | None]]] = {
        value: [(i, None)] for i, value in enumerate(scope.inputs) if value.nbytes > SMALL
    }
    for node in scope.graph.nodes:
        eqn = node.payload
        if is_view(eqn):
            _extend(lineages, node.inputs[0], node.outputs[0])
        elif is_elementwise(eqn):
            for i, value in enumerate(node.inputs):
                if value in lineages and same_type(value.key, node.outputs[0].key):
                    first = Write(node, i, 0, node, arithmetic=True)
                    _extend(lineages, value, node.outputs[0], first)
        else:
            for operand, result in updates(eqn):
                source = node.inputs[operand]
                for _, write in lineages.get(source, ()):
                    if write is not None and write.last is write.node:
                        write.last = node
                _extend(lineages, source, node.outputs[result])
    return lineages


def _extend(lineages: Any, source: Value, target: Value, first: Write | None = None) -> None:
    if source in lineages:
        known = lineages.setdefault(target, [])
        for origin, write in lineages[source][: _LINEAGES - len(known)]:
            known.append((origin, write or first))


def _lingering(buffers: dict[Value, list[Write]]) -> list[Value]:
    """Written values that stay in memory while something else reads them.

    XLA may fuse a second copy of the write into such a reader, which then needs the version from
    before the write. Readers whose results are not fused with their operands do no harm. A view
    of an updated buffer is fused into the update, which XLA then no longer sees as in place.
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
        if producer is None or not (updates(producer.payload) or _is_duplicated(producer)):
            continue
        uses, returned = _uses(value)
        overwriting = {each.node for each in buffers.get(value, ())}
        overwriting |= {user for user in uses for w in [*overwriting] if _is_same_window(user, w)}
        if not (returned or overwriting):
            continue
        readers = (user for user in uses if user not in overwriting)
        if any(not is_materialized(user.payload) for user in readers) or _is_viewed(value):
            found[value] = None
    return list(found)


def _is_viewed(value: Value) -> bool:
    """Whether an update is followed by a view of its result."""
    updated = value.producer is not None and bool(updates(value.producer.payload))
    return updated and any(is_view(user.payload) for user in value.users)


def _viewed_operands(buffers: dict[Value, list[Write]]) -> list[Value]:
    """The views through which updates that XLA could fuse overwrite their buffer."""
    views: list[Value] = []
    for write in (write for writes in buffers.values() for write in writes):
        if not write.arithmetic and not is_materialized(write.node.payload):
            value = write.node.inputs[write.operand]
            if value.producer is not None and is_view(value.producer.payload):
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
    return value.producer is not None and _is(value.producer, "broadcast_in_dim")
