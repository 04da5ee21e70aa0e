"""What the plans of one traced program were: kept while `explain` runs, and at no other time.

Each equation gets a number into its name stack before it is planned. XLA carries the name stack
along as metadata, so that an instruction of the optimized module tells which equations it does.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax

from jaxsched._graph import Kind, Node
from jaxsched._hazards import Findings
from jaxsched._jax import Jaxpr, scopes_of, with_name
from jaxsched._options import Options
from jaxsched._pin import Pin
from jaxsched._scope import Scope
from jaxsched._updates import is_view, scopes
from jaxsched._writes import Unavoidable

__all__ = ["Order", "Record", "current_record", "named", "recording", "tags_in", "tags_of", "users"]

_TAG = re.compile(r"jaxsched_\d+_")
_SEARCH = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """`source` has to be finished before `target`; `origin` is the equation that declares it."""

    kind: Kind
    source: Node
    target: Node
    origin: Any = None


class Record:
    """The orders and the unavoidable copies in every scope that was planned."""

    def __init__(self, *, infer: bool):
        self.infer = infer
        self.is_used = False
        self.is_restricted = False
        self.orders: list[Order] = []
        self.unavoidable: list[Unavoidable] = []
        self._numbers = itertools.count()

    def options(self, asked: Options) -> Options:
        """What to plan with, where `scheduled` was asked for something."""
        self.is_used = True
        self.is_restricted |= not asked.infer
        return Options(infer=asked.infer or self.infer)  # the report is about copies anyway

    def numbered(self, jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr with a number in the name stack of every equation, at any depth."""
        known: dict[int, Jaxpr] = {}

        def visit(jaxpr: Jaxpr) -> Jaxpr:
            if id(jaxpr) not in known:
                eqns = []
                for eqn in jaxpr.eqns:
                    params = dict(eqn.params)
                    for name in scopes(eqn):
                        inner = tuple(visit(each) for each in scopes_of(params[name]))
                        params[name] = inner if isinstance(params[name], tuple) else inner[0]
                    eqns.append(with_name(eqn, f"jaxsched_{next(self._numbers)}_", params))
                known[id(jaxpr)] = jaxpr.replace(eqns=eqns, debug_info=jaxpr.debug_info)
            return known[id(jaxpr)]

        return visit(jaxpr)

    def add_scope(self, scope: Scope, found: Findings) -> None:
        """Takes down the orders of a scope, before its pins make data of them."""
        self.unavoidable += found.unavoidable
        for node in scope.graph.nodes:
            declared = {e.target: e for e in node.outgoing if e.kind == "declared"}
            for edge in node.outgoing:
                if edge.kind == "inferred" and edge.target not in declared:
                    by_data = _depends_by_data(edge.target, node)
                    self.orders.append(Order("data" if by_data else "inferred", node, edge.target))
            for target, edge in declared.items():
                if edge.origin is not None:
                    self.orders.append(Order("declared", node, target, edge.origin))


def _depends_by_data(node: Node, ancestor: Node) -> bool:
    seen = {node}
    todo = [node]
    while todo and len(seen) < _SEARCH:
        for value in todo.pop().inputs:
            previous = value.producer
            if previous is ancestor:
                return True
            if previous is not None and previous not in seen:
                seen.add(previous)
                todo.append(previous)
    return False


def tags_in(name: str) -> list[str]:
    """The numbers in a name stack or an `op_name`, from the outermost equation inwards."""
    return _TAG.findall(name)


def named(node: Node) -> Iterator[tuple[str, list[str]]]:
    """The names under which XLA knows a node: its own, and those of the views of its results.

    Each is what stands before the first number in its name stack, and the numbers: those of the
    jitted calls that were inlined around it, then its own.
    """
    todo = [node]
    for each in todo:
        stack = str(each.payload.source_info.name_stack)
        if tags := tags_in(stack):
            yield stack.partition(tags[0])[0], tags
        todo += (user for user in users(each) if is_view(user.payload))


def users(node: Node) -> list[Node]:
    """The equations that take a node's results; pins are looked through."""
    found: dict[Node, None] = {}
    values = list(node.outputs)
    for value in values:
        for user in value.users:
            if isinstance(user.payload, Pin):
                values += [b for a, b in zip(user.inputs, user.outputs, strict=True) if a is value]
            else:
                found[user] = None
    return list(found)


def tags_of(node: Node) -> set[str]:
    """The numbers under which XLA knows a node."""
    return {tags[-1] for _, tags in named(node)}


_record: contextvars.ContextVar[Record | None] = contextvars.ContextVar("record", default=None)


def current_record() -> Record | None:
    """The record to be filled, if `explain` is tracing."""
    return _record.get()


@functools.cache
def _tracing_apart() -> Any:
    return jax.make_user_context()


@contextlib.contextmanager
def recording(*, infer: bool = False) -> Iterator[Record]:
    """While this is active, everything is traced anew, and plans go to the record.

    With `infer` they infer what is free to order, also where `scheduled` was asked not to.
    """
    record = Record(infer=infer)
    token = _record.set(record)
    try:
        # The context is a part of the key under which jit keeps its traces.
        with _tracing_apart()(record):
            yield record
    finally:
        _record.reset(token)
