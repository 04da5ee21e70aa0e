"""Memory that one value takes over from another without being updated in place."""

from collections import Counter
from typing import Any

from jaxsched._graph import SEARCH, Edge, Node, Value
from jaxsched._jax import Literal
from jaxsched._scope import Scope
from jaxsched._updates import ScopeKind, is_buffer, updates
from jaxsched._writes import Hazard, Lineages, root, uses_of

__all__ = ["first_written", "passed_through", "recycled"]


def recycled(scope: Scope, kind: ScopeKind, lineages: Lineages) -> list[Hazard]:
    """Inputs whose memory an output takes over that is not computed from them in place.

    XLA puts the output of a loop body, or the first output of a donated argument's type, into the
    input's memory. Where that output starts as a new array (the cotangent in a gradient), it may
    not be started while the input is still in use.
    """
    hazards = []
    for source, result in _takeovers(scope, kind, lineages):
        value, memory = scope.inputs[source], scope.graph.outputs[result]
        origin = first_written(memory).producer
        uses = _uses_of_memory(value)
        if origin is None or uses is None or origin in uses:
            continue
        held = [(origin, i) for i, v in enumerate(origin.inputs) if not isinstance(v.key, Literal)]
        readers = [node for node in uses if not scope.graph.depends_on(origin, node, SEARCH)]
        paths = (scope.graph.add_edge(Edge("inferred", reader, origin)) for reader in readers)
        if held and readers and all(path is None for path in paths):
            hazards.append(Hazard(origin, held, readers, value.nbytes))
    return hazards


def passed_through(scope: Scope, kind: ScopeKind) -> list[tuple[Value, list[Node]]]:
    """In a branch, the inputs that it returns and also reads, while another branch writes them.

    XLA sees one buffer for all branches only where each of them is done with the old value.
    """
    values = (scope.inputs[i] for i in sorted(kind.overwritten))
    passed = ((value, uses_of(value)[0]) for value in values if value.is_output)
    return [(value, readers) for value, readers in passed if readers]


def _takeovers(scope: Scope, kind: ScopeKind, lineages: Lineages) -> list[tuple[int, int]]:
    """The pairs (input, output) that share memory without being one buffer in the program."""
    outputs = scope.graph.outputs
    if kind.carry is not None:
        pairs = [(kind.fixed + i, i) for i in range(kind.carry)]
    else:
        inputs = scope.inputs[kind.fixed :]
        number_of_type = Counter(map(_type_of, inputs))
        first_of_type: dict[Any, int] = {}
        for i, value in enumerate(outputs):
            first_of_type.setdefault(_type_of(value), i)
        pairs = [
            (kind.fixed + i, first_of_type.get(_type_of(value), -1))
            for i, value in enumerate(inputs)
            if number_of_type[_type_of(value)] == 1
        ]
    return [
        (source, result)
        for source, result in pairs
        if result >= 0 and outputs[result] not in lineages and is_buffer(outputs[result].key.aval)
    ]


def _type_of(value: Value) -> Any:
    aval = value.key.aval
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


def first_written(value: Value) -> Value:
    """Where the memory of a value was first written."""
    while (node := (value := root(value)).producer) is not None:
        number = node.outputs.index(value)
        source = next((i for i, out in updates(node.payload) if out == number), None)
        if source is None:
            break
        value = node.inputs[source]
    return value


def _uses_of_memory(value: Value) -> list[Node] | None:
    """All that reads or overwrites a value's memory; None where an output still needs it."""
    uses: dict[Node, None] = {}
    todo = [value]
    for version in todo:
        here, returned = uses_of(version)
        if returned or len(todo) > SEARCH:
            return None
        uses.update(dict.fromkeys(here))
        todo += [
            node.outputs[result]
            for node in here
            for operand, result in updates(node.payload)
            if root(node.inputs[operand]) is version
        ]
    return list(uses)
