"""Constraints: which reads of a buffer XLA might run after the write, or fuse into it."""

import dataclasses

from jaxsched._alone import pinned_alone
from jaxsched._fusion import (
    fusible_path,
    has_its_own,
    is_computed_again,
    is_computed_anew,
    is_recomputed,
    is_same_line,
)
from jaxsched._graph import SEARCH, Edge, Graph, Node, Value
from jaxsched._scope import Scope
from jaxsched._takeovers import passed_through, recycled
from jaxsched._updates import ScopeKind, is_materialized, is_view, scopes, updates
from jaxsched._writes import (
    Hazard,
    Unavoidable,
    Write,
    find_writes,
    held_operands,
    is_of_copy,
    is_same_window,
    root,
    uses_of,
)

__all__ = ["Findings", "find_hazards"]


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
    found.alone.extend(pinned_alone(buffers, found.unavoidable))
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
        if conflict.risky and not is_of_copy(conflict.keeper, found.unavoidable):
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
        again = is_computed_again(buffer, writes)
        self.risky = [
            node
            for node in self.readers
            if not (again and has_its_own(node, writes)) and _is_hazard(graph, node, self.keeper)
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
        if scopes(write.node.payload) or is_computed_anew(self.buffer):
            return []
        return [
            node
            for node in self.readers
            if node is not write.node
            and not is_same_window(node, write.node)
            and fusible_path(node, write.node, line=is_same_line(node, write.node))
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
    if not graph.depends_on(write.last, reader, SEARCH) or is_recomputed(graph, reader, write):
        return True
    return not is_materialized(write.last.payload) and fusible_path(reader, write.last)
