"""Which equations write, into which buffer, and through which operands."""

import dataclasses

from jaxsched._graph import SEARCH, Graph, Node, Value
from jaxsched._jax import Literal
from jaxsched._scope import Scope
from jaxsched._updates import (
    ScopeKind,
    is_buffer,
    is_elementwise,
    is_view,
    same_type,
    updates,
)

__all__ = [
    "Hazard",
    "Lineages",
    "Unavoidable",
    "Write",
    "find_writes",
    "held_operands",
    "is_a",
    "is_of_copy",
    "is_same_window",
    "root",
    "updates_of",
    "uses_of",
]

_LINEAGES = 4

# Value -> the inputs of the scope whose memory it may have, each with the first arithmetic on the
# way to it.
Lineages = dict[Value, list[tuple[int, "Write | None"]]]


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
    """`readers` read memory that `target` overwrites, and nothing makes XLA finish them first.

    `held` are the operands (node, number) through which `target` can be made to wait; there are
    none where it writes a copy. `nbytes` is what the copy costs that XLA makes otherwise.
    """

    target: Node
    held: list[tuple[Node, int]]
    readers: list[Node]
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unavoidable:
    """A copy that no order of the program removes, and why."""

    write: Write
    buffer: Value
    why: str
    reader: Node | None = None


def root(value: Value) -> Value:
    """The value whose memory `value` only views."""
    while (node := value.producer) is not None and is_view(node.payload):
        value = node.inputs[0]
    return value


def is_of_copy(write: Write, unavoidable: list[Unavoidable]) -> bool:
    """Whether this is arithmetic with an updated copy. Its result takes the memory of what was
    copied, so that nothing overwrites the copy."""
    source = root(write.node.inputs[write.operand]).producer
    return write.arithmetic and any(source is each.write.node for each in unavoidable)


def uses_of(buffer: Value) -> tuple[list[Node], bool]:
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


def held_operands(write: Node, operand: int) -> list[tuple[Node, int]]:
    """The operands (node, number) through which a write takes its buffer.

    A slice that only feeds the update of the very window it reads is one kernel with the update.
    """
    uses = write.inputs[operand].users
    return [(write, operand), *((node, 0) for node in uses if is_same_window(node, write))]


def is_same_window(reader: Node, write: Node) -> bool:
    """Whether a slice reads just the window that the write updates, and for that write alone."""
    if not (is_a(reader, "dynamic_slice") and is_a(write, "dynamic_update_slice")):
        return False
    if reader.inputs[0] is not write.inputs[0]:
        return False  # the same indices are another place in a view of it
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
        if value.is_output or len(todo) > SEARCH:
            return False
    return True


def is_a(node: Node, primitive: str) -> bool:
    return node.payload.primitive.name == primitive


def _equal(a: Value, b: Value) -> bool:
    if isinstance(a.key, Literal) and isinstance(b.key, Literal):
        return bool(a.key.val == b.key.val)
    return a is b


def find_writes(scope: Scope, kind: ScopeKind) -> tuple[dict[Value, list[Write]], Lineages]:
    """Every buffer that is overwritten -> by what; and where values may have their memory from."""
    writes: dict[Value, list[Write]] = {}
    lineages = _lineages(scope)
    for write in [*updates_of(scope.graph), *_arithmetic(scope, kind, lineages)]:
        buffer = root(write.node.inputs[write.operand])
        if is_buffer(buffer.key.aval):
            writes.setdefault(buffer, []).append(write)
    return writes, lineages


def updates_of(graph: Graph) -> list[Write]:
    """Every update of a graph, through whichever operand."""
    return [
        Write(node, operand, result, node)
        for node in graph.nodes
        for operand, result in updates(node.payload)
    ]


def _arithmetic(scope: Scope, kind: ScopeKind, lineages: Lineages) -> list[Write]:
    """The arithmetic that updates an input of the scope as a whole: x = x - outer(c, r).

    It counts only where the result leaves the scope in that input's place; otherwise the result of
    every sum would be taken for an update of one of its terms.
    """
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


def _lineages(scope: Scope) -> Lineages:
    lineages: Lineages = {
        value: [(i, None)] for i, value in enumerate(scope.inputs) if is_buffer(value.key.aval)
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


def _extend(lineages: Lineages, source: Value, target: Value, first: Write | None = None) -> None:
    if source in lineages:
        known = lineages.setdefault(target, [])
        for origin, write in lineages[source][: _LINEAGES - len(known)]:
            known.append((origin, write or first))
