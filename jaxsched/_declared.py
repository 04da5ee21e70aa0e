"""The declared order: markers become edges, or errors that say why they cannot mean anything."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Never

from jax.core import Tracer

from jaxsched._errors import CycleError, ScheduleError, message
from jaxsched._graph import Edge, Graph, Node, Value
from jaxsched._jax import JaxprEqn, Literal, user_line
from jaxsched._scope import Marker, Scope
from jaxsched._updates import ScopeKind, is_view, updates
from jaxsched._writes import held_operands, root, updates_of

__all__ = ["TOP", "Declared", "declare"]

TOP = "scheduled function"

# How much of the work that only leads to a declared value is held back with it.
_CONE = 128


@dataclasses.dataclass(slots=True, eq=False)
class Declared:
    """`sources` are finished before `target` starts, which waits for the values it takes in
    through `held`: (node, operand)."""

    target: Node
    sources: dict[Node, None]
    held: list[tuple[Node, int]]


def declare(scope: Scope, kind: ScopeKind) -> list[Declared]:
    """Adds every declared edge to the graph; raises ScheduleError where one has no meaning.

    Then it drops what leads to no result, and keeps the orders that are declared through it.
    """
    sources: dict[Node, dict[Node, None]] = {}
    markers: dict[Node, Marker] = {}
    for marker in scope.markers:
        for earlier, later in itertools.pairwise(marker.groups):
            for first, second in itertools.product(earlier, later):
                source = _producer(scope, kind, marker, first)
                target = _producer(scope, kind, marker, second)
                if source is None or target is None:
                    continue
                path = scope.graph.add_edge(Edge("declared", source, target, marker.eqn))
                if path is not None:
                    raise CycleError(_cycle(source, target, path, marker.eqn))
                sources.setdefault(target, {})[source] = None
                markers[target] = marker
    if scope.dead:
        sources = _among_live(scope, sources, markers)
    overwriting = _overwriting(scope.graph) if sources else {}
    found = [
        Declared(target, before, _held(target, before, overwriting))
        for target, before in sources.items()
    ]
    # What is held back is ordered too: otherwise another pin might want it before the sources.
    # What the sources need cannot be held back: a slice of the very window that is written, say.
    for declared in found:
        if not declared.held and markers[declared.target].eqn.params["pristine"]:
            _reject(markers[declared.target], kind, "is a constant: it depends on no argument")
        declared.held = [
            (node, operand)
            for node, operand in declared.held
            if node is declared.target
            or all(
                scope.graph.add_edge(Edge("declared", source, node)) is None
                for source in declared.sources
            )
        ]
    return found


def _among_live(
    scope: Scope, sources: dict[Node, dict[Node, None]], markers: dict[Node, Marker]
) -> dict[Node, dict[Node, None]]:
    """Drops what leads to no result; an order through it becomes one of what is in front of it."""
    graph, dead = scope.graph, scope.dead
    reached = {
        target: _reached(graph, before, dead)
        for target, before in sources.items()
        if target not in dead
    }
    graph.drop(dead)
    live: dict[Node, dict[Node, None]] = {}
    for target, found in reached.items():
        for node in found:
            if node not in sources[target]:
                if graph.depends_on(target, node, len(graph.nodes)):
                    continue
                graph.add_edge(Edge("declared", node, target, markers[target].eqn))
            live.setdefault(target, {})[node] = None
    return live


def _reached(graph: Graph, before: dict[Node, None], dead: set[Node]) -> list[Node]:
    """The nodes that compute and are not dead: among these, or else in front of the others."""
    todo = list(before)
    seen = set(before)
    passed = set()
    for node in todo:
        if node in dead or is_view(node.payload):
            passed.add(node)
            new = [each for each in graph.predecessors(node) if each not in seen]
            seen.update(new)
            todo += dict.fromkeys(new)
    return [node for node in todo if node not in passed]


def _producer(scope: Scope, kind: ScopeKind, marker: Marker, value: Value) -> Node | None:
    """The equation that computes a declared value."""
    origin = root(value)
    if origin.producer is not None:
        if all(isinstance(each.key, Literal) for each in origin.producer.inputs):
            _reject(marker, kind, "is a constant: it depends on no argument")
        return origin.producer
    if not marker.eqn.params["pristine"]:
        return None
    if isinstance(origin.key, Literal):
        _reject(marker, kind, "is a constant")
    if origin in scope.constants:
        constant = scope.jaxpr.consts[scope.constants.index(origin)]
        # JAX takes the tracer of another trace, a live one or a leaked one, for a constant.
        traced = isinstance(constant, Tracer)
        _reject(marker, kind, "is of another scope" if traced else "is a constant")
    names = scope.jaxpr.debug_info.arg_names
    if kind.name == TOP and names is not None:
        name = names[scope.inputs.index(origin)]
        _reject(marker, kind, f"is the argument `{name}`" if name else "is an argument")
    if kind.name == TOP:
        _reject(marker, kind, "is an argument")
    _reject(marker, kind, f"comes into the {kind.name} from outside of it")


def _reject(marker: Marker, kind: ScopeKind, what: str) -> Never:
    raise ScheduleError(
        message(
            f"`before` was given a value that {what}; no equation of the {kind.name} computes it,"
            " so nothing can be ordered.",
            user_line(marker.eqn.source_info),
            f"values that the {kind.name} computes itself, all in the same scope.",
        )
    )


def _overwriting(graph: Graph) -> dict[Value, set[Node]]:
    """The buffers that are written, each with what writes it."""
    found: dict[Value, set[Node]] = {}
    for write in updates_of(graph):
        found.setdefault(root(write.node.inputs[write.operand]), set()).add(write.node)
    return found


def _held(
    target: Node, before: dict[Node, None], overwriting: dict[Value, set[Node]]
) -> list[tuple[Node, int]]:
    """What to pin so that `target` cannot start early: the buffers that it writes, or else the
    inputs of all the work that is done for it alone, up to reads of what something else writes:
    they might need a copy of it."""
    pairs = updates(target.payload)
    if pairs:
        return [held for operand, _ in pairs for held in held_operands(target, operand)]
    cone = {target: None}
    todo = [target]
    for node in todo:
        for value in node.inputs:
            producer = value.producer
            if producer is None or producer in cone or len(cone) >= _CONE:
                continue
            used_here = all(user in cone for out in producer.outputs for user in out.users)
            returned = any(out.is_output for out in producer.outputs)
            free = used_here and not returned and producer not in before
            if free and not _ordered(producer) and not _is_early(producer, overwriting):
                cone[producer] = None
                todo.append(producer)
    return [
        (node, i)
        for node in cone
        for i, value in enumerate(node.inputs)
        if value.producer not in cone and not isinstance(value.key, Literal)
    ]


def _is_early(node: Node, overwriting: dict[Value, set[Node]]) -> bool:
    """Whether the node reads what something else writes."""
    return any(overwriting.get(root(value), {node}) != {node} for value in node.inputs)


def _ordered(node: Node) -> bool:
    """Whether something besides data says when the node runs: an effect or a declaration."""
    return bool(node.payload.effects or node.outgoing or node.incoming)


def _cycle(source: Node, target: Node, path: Sequence[Edge], eqn: JaxprEqn) -> str:
    if source is target:
        wrong = "`before` was given one value twice, or two that one equation computes together."
        steps = [_describe(source)]
    else:
        wrong = "`before` contradicts an order that holds already; together they are a cycle."
        edges = [Edge("declared", source, target, eqn), *_visible(path)]
        steps = [
            f"{_describe(edge.source)} before {_describe(edge.target)}: {_kind(edge)}"
            for edge in edges
        ]
    lines = "".join(f"\n    {step}" for step in steps)
    return message(
        wrong,
        f"{user_line(eqn.source_info)}, with{lines}",
        "drop this declaration or one of the other declared steps, or compute the later value"
        " from something else.",
    )


def _visible(path: Sequence[Edge]) -> list[Edge]:
    """The steps of a path, with views left out."""
    steps: list[Edge] = []
    for edge in path:
        if steps and steps[-1].kind == edge.kind == "data" and is_view(edge.source.payload):
            steps[-1] = Edge("data", steps[-1].source, edge.target)
        else:
            steps.append(edge)
    return steps


def _kind(edge: Edge) -> str:
    if edge.origin is None:
        return edge.kind
    return f"{edge.kind} at {user_line(edge.origin.source_info)}"


def _describe(node: Node) -> str:
    return f"`{node.payload.primitive.name}` ({user_line(node.payload.source_info)})"
