"""Which updates of a planned jaxpr have to be in place, by an analysis that is not the planner's.

Pins are looked through, so that what is claimed does not depend on where the planner put them. A
version of a buffer is overwritten in place if exactly one equation updates it, nothing returns it,
and every other equation that reads it can run before that: none of them needs the update's result,
and all of these orders together with the declared ones have no cycle.
"""

import dataclasses
from collections import defaultdict
from typing import Any, cast

from jaxsched._jax import Jaxpr, JaxprEqn, Literal
from jaxsched._pin import pin_p
from jaxsched._updates import is_elementwise, is_materialized, updates
from tests.fuzz._primitives import VIEWS

__all__ = ["Facts", "repeated", "strict"]

# These are computed once, at one time, and their results kept; all other equations may be computed
# again inside of each of their users, whenever these run.
_CONTROL = frozenset({"cond"})


def strict(eqn: JaxprEqn) -> bool:
    return is_materialized(eqn) or eqn.primitive.name in _CONTROL or eqn.primitive is pin_p


def repeated(eqn: JaxprEqn) -> bool:
    """Whether XLA may compute it once for each user: arithmetic of two whole arrays it does not
    (`InstructionFusion::EffectivelyAtMostUnary`)."""
    if not is_elementwise(eqn):
        return True
    shape = cast(Any, eqn.outvars[0].aval).shape
    operands = (cast(Any, v.aval) for v in eqn.invars if not isinstance(v, Literal))
    return sum(aval.shape == shape for aval in operands) < 2


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """Equation `write` has to put its result `result` into the memory of its operand."""

    write: int
    operand: int
    result: int
    readers: frozenset[int]


class Facts:
    """What is known of a planned jaxpr whose first `fixed` inputs keep their values.

    `orders` are pairs of variables: the first is declared to be finished before the second starts.
    """

    def __init__(self, jaxpr: Jaxpr, fixed: int, orders: list[tuple[Any, Any]]):
        self.jaxpr = jaxpr
        self.eqns = jaxpr.eqns
        self.producer = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self._same: dict[Any, Any] = {}  # through pins
        self._root: dict[Any, Any] = {}  # through pins and views
        for eqn in self.eqns:
            if eqn.primitive is pin_p:
                for source, target in zip(eqn.invars, eqn.outvars, strict=True):
                    self._alias(source, target, view=False)
            elif eqn.primitive.name in VIEWS:
                self._alias(eqn.invars[0], eqn.outvars[0], view=True)
        # XLA drops what leads to no result, so that nothing is asked of it.
        made = (self._maker(value) for value in jaxpr.outvars)
        ends = [i for i in made if i is not None]
        self._live = {*ends}.union(*map(self._leads_to, ends))
        self.orders = [
            (self.producer[self.root(a)], self.producer[self.root(b)])
            for a, b in orders
            if {self.producer.get(self.root(a)), self.producer.get(self.root(b))} <= self._live
        ]
        self._successors: dict[int, set[int]] = defaultdict(set)
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive is not pin_p:
                for value in eqn.invars:
                    made = self._maker(value)
                    if made is not None:
                        self._successors[made].add(i)
        # The later value of a declaration may be held back with all that only leads to it.
        for a, b in self.orders:
            self._successors[a] |= {b} | (self._leads_to(b) - self._leads_to(a) - {a})
        self._possible: list[tuple[int, set[int]]] = []
        fixed_values = {*jaxpr.constvars, *jaxpr.invars[:fixed]}
        claims = list(self._candidates(fixed_values))
        self.claims = {(c.write, c.operand): c for c in self._consistent(claims)}

    def _leads_to(self, i: int) -> set[int]:
        found: set[int] = set()
        todo = [i]
        while todo:
            for value in self.eqns[todo.pop()].invars:
                made = self._maker(value)
                if made is not None and made not in found:
                    found.add(made)
                    todo.append(made)
        return found

    def _alias(self, source: Any, target: Any, *, view: bool) -> None:
        if isinstance(source, Literal):
            return
        self._root[target] = self.root(source)
        if not view:
            self._same[target] = self._same.get(source, source)

    def root(self, value: Any) -> Any:
        return self._root.get(value, value)

    def _maker(self, value: Any) -> int | None:
        if isinstance(value, Literal):
            return None
        return self.producer.get(self._same.get(value, value))

    def _candidates(self, fixed: set[Any]) -> Any:
        readers: dict[Any, set[int]] = defaultdict(set)
        writes: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive is pin_p or eqn.primitive.name in VIEWS:
                continue
            for value in eqn.invars:
                if not isinstance(value, Literal):
                    readers[self.root(value)].add(i)
            for operand, result in updates(eqn):
                if not isinstance(eqn.invars[operand], Literal):
                    writes[self.root(eqn.invars[operand])].append((i, operand, result))
        returned = {self.root(v) for v in self.jaxpr.outvars if not isinstance(v, Literal)}
        for version, found in writes.items():
            if version in fixed or version in returned or version.aval.size == 1:
                continue  # copies of counters and other single numbers cost nothing
            if self._is_filled(version):
                continue  # XLA makes another one for what is read late
            if len(found) > 1:
                # One of them may be in place, whichever: what stands against that is no claim.
                for write, _, _ in found:
                    if not (others := readers[version] - {write}) & self._reached(write):
                        self._possible.append((write, others))
                continue
            [(write, operand, result)] = found
            uses = [v for v in self.eqns[write].invars if not isinstance(v, Literal)]
            if sum(self.root(v) is version for v in uses) > 1:
                continue
            others = readers[version] - {write}
            if others & self._reached(write):
                continue
            yield Claim(write, operand, result, frozenset(others))

    def _is_filled(self, version: Any) -> bool:
        if version not in self.producer:
            return False
        eqn = self.eqns[self.producer[version]]
        return eqn.primitive.name == "broadcast_in_dim" and not cast(Any, eqn.invars[0].aval).shape

    def _reached(self, start: int) -> set[int]:
        seen: set[int] = set()
        todo = [start]
        while todo:
            for after in self._successors[todo.pop()]:
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    def _cheap(self, claim: Claim) -> bool:
        """Whether keeping what was read takes fewer bytes than a copy of the buffer.

        Where it does not, XLA's copy may be the better choice, and is the planner's to make.
        """
        readers = claim.readers
        version = self.eqns[claim.write].invars[claim.operand]
        derived = set(readers).union(*(self._reached(reader) for reader in readers))
        before, todo = set(readers), list(readers)
        while todo:
            for value in self.eqns[todo.pop()].invars:
                made = self._maker(value)
                if made is not None and made in derived and made not in before:
                    before.add(made)
                    todo.append(made)
        kept = 0
        for i in before:
            if not is_materialized(self.eqns[i]) or self.eqns[i].primitive.name == "jit":
                kept += sum(_nbytes(v) for v in self.eqns[i].outvars)
        return kept < _nbytes(version)

    def _consistent(self, claims: list[Claim]) -> list[Claim]:
        """The claims none of whose orders is part of a cycle with those of any other."""
        graph = {i: set(self._successors[i]) for i in range(len(self.eqns))}
        wanted = [(claim.write, claim.readers) for claim in claims]
        for write, readers in [*wanted, *self._possible]:
            for reader in readers:
                graph[reader].add(write)
        group = _components(graph)
        return [
            claim
            for claim in claims
            if claim.write in self._live
            and self._cheap(claim)
            and all(group[reader] != group[claim.write] for reader in claim.readers)
        ]


def _nbytes(value: Any) -> int:
    return value.aval.size * value.aval.dtype.itemsize


def _components(graph: dict[int, set[int]]) -> dict[int, int]:
    """Strongly connected components (Kosaraju): node -> a number of its component."""
    order: list[int] = []
    seen: set[int] = set()
    for start in graph:
        stack = [(start, iter(graph[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            after = next((n for n in rest if n not in seen), None)
            if after is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(after)
                stack.append((after, iter(graph[after])))
    back: dict[int, list[int]] = defaultdict(list)
    for node, targets in graph.items():
        for target in targets:
            back[target].append(node)
    group: dict[int, int] = {}
    for start in reversed(order):
        if start in group:
            continue
        todo = [start]
        group[start] = start
        while todo:
            for node in back[todo.pop()]:
                if node not in group:
                    group[node] = start
                    todo.append(node)
    return group
