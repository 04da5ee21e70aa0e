"""Where to pin: the values that must be in memory before a buffer is overwritten."""

from collections.abc import Collection

from jaxsched._cut import FOREVER, Network
from jaxsched._graph import SEARCH, Graph, Node, Value
from jaxsched._updates import is_materialized, updates

__all__ = ["Cut", "choose_cut"]

# How far from its readers the planner looks for a cheaper cut: enough for what users write between
# a read and the write, and a bound that keeps planning linear.
_REGION = 64


class Cut:
    """The values to pin, what that costs, and the users that must take the pinned values."""

    def __init__(self, values: dict[Value, list[Node]], cost: int):
        self.values = values
        self.cost = cost


def choose_cut(
    graph: Graph,
    readers: Collection[Node],
    needed: Collection[Node],
    later: Collection[Node],
) -> Cut | None:
    """The cheapest set of values, by bytes, through which all that is read reaches the rest.

    Every node that `readers` feed is put on one of two sides: finished before the pin, or started
    after it. Before are the readers and what is `needed` for the pin itself; after are `later` (the
    write), all that depends on it and the outputs of the scope; what a node before needs is before.
    The cut is made of the values that are produced before and used after. What is in memory anyway
    (an output, or an operand or result of a product or a loop) costs nothing, but for an output
    that is updated after the cut. None where there is no such cut.
    """
    finished, cost = _before_side(graph, readers, needed, later)
    if finished is None:
        return None
    before = set(finished)
    values: dict[Value, list[Node]] = {}
    for node in finished:  # not the set, whose order is another one in each process
        for value in node.outputs:
            after = [user for user in value.users if user not in before]
            if (after or value.is_output) and value.nbytes:
                values[value] = after
    return Cut(values, cost)


def _before_side(
    graph: Graph,
    readers: Collection[Node],
    needed: Collection[Node],
    later: Collection[Node],
) -> tuple[list[Node] | None, int]:
    first = min(node.rank for node in readers)
    if _is_free(graph, readers, needed, later, first):
        return list(readers), 0
    region, truncated = _derived(graph, readers, later)
    network = Network()
    for node in [*readers, *needed]:
        if node in region:
            network.add_edge("source", node, FOREVER)
    for node in region:
        for previous in graph.predecessors(node):
            if previous in region:
                network.add_edge(node, previous, FOREVER)
            elif previous in later or (truncated and previous.rank > first):
                network.add_edge(node, "sink", FOREVER)
        for value in node.outputs:
            network.add_edge(node, value, _cost(node, value))
            if value.is_output:
                network.add_edge(value, "sink", FOREVER)
            for user in value.users:
                network.add_edge(value, user if user in region else "sink", FOREVER)
            for user in _copying(node, value):
                network.add_edge(node, user if user in region else "sink", value.nbytes)
    cost, side = network.minimum_cut("source", "sink")
    if cost >= FOREVER:
        return None, cost
    return [node for node in region if node in side], cost


def _is_free(
    graph: Graph,
    readers: Collection[Node],
    needed: Collection[Node],
    later: Collection[Node],
    first: float,
) -> bool:
    """Whether the cut behind the readers themselves costs nothing, and no other node comes before
    it: the cheapest one then, and nearest to the readers, with no search."""
    made = [(node, value) for node in readers for value in node.outputs]
    if any(_cost(node, value) or _copying(node, value) for node, value in made):
        return False
    before = {*needed, *(each for node in readers for each in graph.predecessors(node))}
    return all(node in readers or (node.rank < first and node not in later) for node in before)


def _derived(
    graph: Graph, readers: Collection[Node], later: Collection[Node]
) -> tuple[dict[Node, None], bool]:
    """The readers and what they feed without `later`; whether the search was cut off."""
    region: dict[Node, None] = dict.fromkeys(readers)
    truncated = False
    todo = list(region)
    for node in todo:
        for edge in graph.successors(node):
            user = edge.target
            if user in region or user in later:
                continue
            if len(region) >= _REGION + len(readers):
                return region, True
            depends = [graph.depends_on(user, each, SEARCH) for each in later]
            truncated |= None in depends
            if not any(each is None or each for each in depends):
                region[user] = None
                todo.append(user)
    return region, truncated


def _cost(producer: Node, value: Value) -> int:
    if value.nbytes >= FOREVER:
        return value.nbytes
    # An update may be one that writes a copy, which XLA would rather fuse into what takes it.
    takers = [] if updates(producer.payload) else value.users
    in_memory = value.is_output or any(is_materialized(n.payload) for n in [producer, *takers])
    return 0 if in_memory else value.nbytes


def _copying(producer: Node, value: Value) -> list[Node]:
    """The updates of a value that the scope returns too. Behind a pin they write a copy; in front
    of it XLA may compute the value once more for them, unless that has a kernel of its own."""
    if not value.is_output or is_materialized(producer.payload):
        return []
    return [
        user
        for user in value.users
        if any(user.inputs[operand] is value for operand, _ in updates(user.payload))
    ]
