"""Placing pins: each write that needs one gets one, over its buffers and the values of its cut."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from jaxsched._cut import FOREVER
from jaxsched._graph import Node, Value
from jaxsched._pin import Pin
from jaxsched._region import choose_cut
from jaxsched._scope import Scope
from jaxsched._updates import is_materialized

__all__ = ["Pins"]


@dataclasses.dataclass(slots=True, eq=False)
class _Wanted:
    """A pin in front of a node: `readers` are finished before any of the `held` operands
    (node, number) can be used, or where there are none, before their own results can. It is left
    out where it does not cost less than `limit` bytes."""

    held: dict[tuple[Node, int], None]
    readers: dict[Node, None]
    limit: int | None


def _merged(requests: list[_Wanted]) -> _Wanted:
    """One request for all; it is worth what they are worth together."""
    held, readers = {}, {}
    limits = []
    for each in requests:
        held |= each.held
        readers |= each.readers
        limits.append(each.limit)
    return _Wanted(held, readers, None if None in limits else sum(limits))


def _is_repeated(value: Value) -> bool:
    """Whether XLA may compute a value once more, and so too late: for one of its uses, or for one
    of the only result that is computed from it."""
    while value.producer is not None and not is_materialized(value.producer.payload):
        if value.is_output + len(value.users) > 1:
            return True
        results = [result for user in value.users for result in user.outputs]
        if len(results) != 1:
            return False
        (value,) = results
    return False


class Pins:
    """The pins of one scope: first collected, then placed in the order of the program."""

    def __init__(self, scope: Scope):
        self._scope = scope
        self._wanted: dict[tuple[Node, frozenset[Node]], list[_Wanted]] = {}
        self._alone: list[Value] = []
        self._returned: dict[Value, list[Node]] = {}

    def want(
        self,
        target: Node,
        held: Iterable[tuple[Node, int]],
        readers: Iterable[Node],
        *,
        limit: int | None,
    ) -> None:
        """Asks for a pin in front of `target`; requests that hold the same nodes become one pin."""
        wanted = _Wanted(dict.fromkeys(held), dict.fromkeys(readers), limit)
        nodes = frozenset(node for node, _ in wanted.held)
        self._wanted.setdefault((target, nodes), []).append(wanted)

    def want_alone(self, values: Iterable[Value]) -> None:
        """Asks for pins over single values, which everything that uses them has to wait for."""
        self._alone.extend(values)

    def want_returned(self, value: Value, readers: Iterable[Node]) -> None:
        """Asks for a pin at which `value` waits for its readers before the scope returns it."""
        self._returned[value] = list(readers)

    def place(self) -> bool:
        """Inserts the pins into the graph; says whether there are any."""
        placed = False
        for key in sorted(self._wanted, key=lambda key: key[0].rank):
            requests = self._wanted[key]
            done = self._place(key[0], _merged(requests))
            if not done and len(requests) > 1:
                # Together they cost more than the copies; some of them may be cheap.
                for each in requests:
                    done |= self._place(key[0], each)
            placed |= done
        for value in self._alone:
            self._place_alone(value)
        for value, readers in self._returned.items():
            placed |= self._place_returned(value, readers)
        return placed or bool(self._alone)

    def place_claims(self, claims: Iterable[tuple[Node, int]]) -> bool:
        """Lets each of these operands (node, number) come from a pin; says if any did not."""
        added = False
        for node, operand in claims:
            value = node.inputs[operand]
            pinned = value.producer is not None and isinstance(value.producer.payload, Pin)
            if not pinned and 0 < value.nbytes < FOREVER:
                self._insert({value: [node]}, {}, outputs=(), like=node)
                added = True
        return added

    def _place(self, target: Node, wanted: _Wanted) -> bool:
        graph = self._scope.graph
        later = {node: None for node, _ in wanted.held} or {target: None}
        holders: dict[Value, dict[Node, None]] = {}
        for node, operand in wanted.held:
            value = node.inputs[operand]
            if 0 < value.nbytes < FOREVER and not self._waits(value, later):
                holders.setdefault(value, {})[node] = None
        needed = [value.producer for value in holders if value.producer is not None]
        cut = choose_cut(graph, wanted.readers, needed, later)
        if cut is None or (wanted.limit is not None and cut.cost >= wanted.limit):
            return False
        reads = {value: users for value, users in cut.values.items() if value not in holders}
        if not wanted.held and reads:
            self._insert(reads, {}, outputs=reads, like=target)
            return True
        if not holders:
            return False
        if len(holders) + len(reads) < 2 and not (
            wanted.limit is None and any(_is_repeated(value) for value in cut.values)
        ):
            return False
        for value, users in holders.items():
            users.update(dict.fromkeys(cut.values.get(value, ())))
        self._insert(holders, reads, outputs=cut.values, like=target)
        return True

    def _waits(self, value: Value, later: Iterable[Node]) -> bool:
        """Whether a value waits for one of the nodes behind the pin, by now maybe through a pin."""
        graph, producer = self._scope.graph, value.producer
        if producer is None:
            return False
        return any(graph.depends_on(producer, node, len(graph.nodes)) for node in later)

    def _place_returned(self, value: Value, readers: list[Node]) -> bool:
        graph = self._scope.graph
        cut = choose_cut(graph, readers, [], [])
        if cut is None or not cut.values or cut.cost > value.nbytes or value in cut.values:
            return False
        self._insert({value: []}, cut.values, outputs=[value, *cut.values], like=readers[0])
        return True

    def _place_alone(self, value: Value) -> None:
        producer = value.producer
        assert producer is not None, "only the result of a write is pinned alone"
        self._insert({value: list(value.users)}, {}, outputs=[value], like=producer)

    def _insert(
        self,
        buffers: Mapping[Value, Collection[Node]],
        reads: Mapping[Value, Collection[Node]],
        *,
        outputs: Collection[Value],
        like: Node,
    ) -> None:
        """Adds a pin over these values. The nodes given with each take it from the pin, and so does
        the scope where it returns one of `outputs`."""
        pin = self._scope.insert_pin(list(buffers), list(reads), like.payload)
        users = [*buffers.values(), *reads.values()]
        for value, pinned, some in zip(pin.inputs, pin.outputs, users, strict=True):
            self._scope.graph.rewire(value, pinned, list(some), outputs=value in outputs)
