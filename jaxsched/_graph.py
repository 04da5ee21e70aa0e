"""A program as nodes, values and edges, in a topological order kept while edges are added.

There is no JAX in this module: a node carries an opaque payload. The order starts as the order in
which the nodes were added (the user's source order) and changes only where an added edge forces it
to: Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs" (2006).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

__all__ = ["SEARCH", "Edge", "Graph", "Node", "Value"]

SEARCH = 256
"""Steps after which a search in the graph gives up; it keeps planning linear."""

# Ranks are exact in a float, for up to 16 million nodes.
_STEP = 2.0**-24

Kind = Literal["data", "declared", "inferred"]


class Value:
    """One array of the program: produced once, used by any number of nodes.

    `key` is opaque here (a variable or a literal); `nbytes` is what it costs to keep the value in
    memory, `FOREVER` for what cannot be kept (tokens, references).
    """

    __slots__ = ("is_output", "key", "nbytes", "producer", "users")

    def __init__(self, key: Any, nbytes: int = 0, producer: "Node | None" = None):
        self.key = key
        self.nbytes = nbytes
        self.producer = producer
        self.users: list[Node] = []
        self.is_output = False


class Node:
    """One equation."""

    __slots__ = ("incoming", "inputs", "outgoing", "outputs", "payload", "rank")

    def __init__(self, payload: Any, inputs: list[Value], outputs: list[Value], rank: float):
        self.payload = payload
        self.inputs = inputs
        self.outputs = outputs
        self.rank = rank
        self.incoming: list[Edge] = []
        self.outgoing: list[Edge] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """`source` runs before `target`; `origin` is whatever declared it."""

    kind: Kind
    source: Node
    target: Node
    origin: Any = None


class Graph:
    """The nodes of one scope (a function, a loop body or a branch) and the order between them."""

    def __init__(self):
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []

    def add_node(
        self, payload: Any, inputs: Sequence[Value], outputs: list[Value], *, inserted: bool = False
    ) -> Node:
        """Adds a node: at the end, or, if `inserted`, right behind the last of its inputs."""
        rank = float(len(self.nodes) + 1)
        if inserted:
            # Small enough steps to stay below the next node, and each larger than all before it.
            producers = [value.producer.rank for value in inputs if value.producer is not None]
            rank = int(max(producers, default=0)) + len(self.nodes) * _STEP
        node = Node(payload, list(inputs), outputs, rank)
        for value in dict.fromkeys(inputs):
            value.users.append(node)
        for value in outputs:
            value.producer = node
        self.nodes.append(node)
        return node

    def set_outputs(self, outputs: Sequence[Value]) -> None:
        self.outputs = list(outputs)
        for value in outputs:
            value.is_output = True

    def drop(self, dead: set[Node]) -> None:
        """Takes nodes out whose results no other node and no output uses."""
        self.nodes = [node for node in self.nodes if node not in dead]
        for value in {value for node in dead for value in node.inputs}:
            value.users = [user for user in value.users if user not in dead]
        for node in dead:
            for edge in node.outgoing:
                edge.target.incoming.remove(edge)
            for edge in node.incoming:
                if edge.source not in dead:
                    edge.source.outgoing.remove(edge)

    def ordered(self) -> list[Node]:
        """The nodes in an order that respects every edge."""
        return sorted(self.nodes, key=lambda node: node.rank)

    def successors(self, node: Node) -> Iterator[Edge]:
        for value in node.outputs:
            for user in value.users:
                yield Edge("data", node, user)
        yield from node.outgoing

    def predecessors(self, node: Node) -> Iterator[Node]:
        for value in node.inputs:
            if value.producer is not None:
                yield value.producer
        for edge in node.incoming:
            yield edge.source

    def add_edge(self, edge: Edge) -> list[Edge] | None:
        """Adds `edge`, or returns the path target -> ... -> source which forbids it."""
        path = self._raise(edge.source, edge.target)
        if path is None:
            edge.source.outgoing.append(edge)
            edge.target.incoming.append(edge)
        return path

    def depends_on(self, node: Node, ancestor: Node, budget: int) -> bool | None:
        """Whether `node` runs after `ancestor` by force; None where `budget` steps don't tell."""
        if node.rank < ancestor.rank:
            return False
        seen = {node}
        todo = [node]
        while todo:
            for previous in self.predecessors(todo.pop()):
                if previous is ancestor:
                    return True
                if previous.rank > ancestor.rank and previous not in seen:
                    seen.add(previous)
                    todo.append(previous)
                    if len(seen) > budget:
                        return None
        return False

    def rewire(self, old: Value, new: Value, users: Sequence[Node], *, outputs: bool) -> None:
        """Lets `users`, and the scope's outputs if asked, take `new` where they took `old`.

        None of the users may come before the producer of `new`.
        """
        assert new.producer is not None, "a new value is computed by a node"
        for user in users:
            self._follow(new.producer, user)
            user.inputs = [new if value is old else value for value in user.inputs]
            new.users.append(user)
        moved = set(users)
        old.users = [user for user in old.users if user not in moved]
        if outputs and old.is_output:
            old.is_output, new.is_output = False, True
            self.outputs = [new if value is old else value for value in self.outputs]

    def _follow(self, source: Node, target: Node) -> None:
        cycle = self._raise(source, target)
        assert cycle is None, "an inserted node closes a cycle"

    def _raise(self, source: Node, target: Node) -> list[Edge] | None:
        """Moves nodes so that `source` ranks below `target`, or returns the path against it."""
        if source is target:
            return []
        if source.rank < target.rank:
            return None
        came_from: dict[Node, Edge | None] = {target: None}
        todo = [target]
        while todo:
            for edge in self.successors(todo.pop()):
                after = edge.target
                if after is source:
                    path = [edge]
                    while (step := came_from[path[0].source]) is not None:
                        path.insert(0, step)
                    return path
                if after.rank < source.rank and after not in came_from:
                    came_from[after] = edge
                    todo.append(after)
        back = {source}
        todo = [source]
        while todo:
            for previous in self.predecessors(todo.pop()):
                if previous.rank > target.rank and previous not in back:
                    back.add(previous)
                    todo.append(previous)
        moved = sorted(back, key=lambda node: node.rank)
        moved += sorted(came_from, key=lambda node: node.rank)
        for node, rank in zip(moved, sorted(node.rank for node in moved), strict=True):
            node.rank = rank
        return None
