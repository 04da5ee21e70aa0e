"""From a jaxpr to a graph and back: nested jitted functions are inlined, markers are taken out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxsched._before import marker_effect, marker_p
from jaxsched._cut import FOREVER
from jaxsched._graph import Edge, Graph, Node, Value
from jaxsched._jax import DropVar, Jaxpr, JaxprEqn, Literal, Var, inline_name, is_plain_jit, new_eqn
from jaxsched._options import CopyPolicy
from jaxsched._pin import Pin, pin_p
from jaxsched._updates import is_array, nbytes, updates, weakly_cached
from jaxsched._window import as_window_update

__all__ = ["Marker", "Scope"]

# A jitted function without updates and declarations is inlined up to this many equations, since
# a read may hide in it; a longer one stays one node that reads all of its operands.
_SHORT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """One call of `before`: its values, each a group of arrays."""

    eqn: JaxprEqn
    groups: list[list[Value]]


class Scope:
    """The graph of one jaxpr and the declarations in it.

    The first `fixed` inputs must keep their values, as the constants do. With `inline`, nested
    jitted functions are inlined. With `rewrite`, updates are put in the form that XLA does in
    place, `rewritten` says whether there were any, and `dead` are the equations that lead to no
    result.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        fixed: int,
        *,
        inline: bool,
        rewrite: bool,
        copies: CopyPolicy = "allow",
    ):
        self.jaxpr = jaxpr
        self._copies: CopyPolicy = copies
        self.claimed: set[Value] = set()  # the buffers that are to be overwritten where they are
        self.rewritten = False
        self.graph = Graph()
        self.markers: list[Marker] = []
        self._inline = inline
        self._rewrite = rewrite
        self._last_effect: Node | None = None
        self.constants = [_value(var) for var in jaxpr.constvars]
        self.inputs = [_value(var) for var in jaxpr.invars]
        self.fixed = {*self.constants, *self.inputs[:fixed]}
        env = dict(zip(jaxpr.constvars, self.constants, strict=True))
        env |= zip(jaxpr.invars, self.inputs, strict=True)
        self.graph.set_outputs(self._add(jaxpr, env, None))
        self.dead = self._dead() if rewrite else set[Node]()

    def _add(self, jaxpr: Jaxpr, env: dict[Var, Value], caller: JaxprEqn | None) -> list[Value]:
        for eqn in jaxpr.eqns:
            inputs = [_read(env, atom) for atom in eqn.invars]
            if eqn.primitive is marker_p:
                self._add_marker(eqn, inputs)
                continue
            if caller is not None:
                name = caller.params["name"]
                source = inline_name(caller.source_info, name, eqn.source_info)
                eqn = eqn.replace(source_info=source)
            if self._inline and _may_inline(eqn):
                callee = eqn.params["jaxpr"]
                inner = dict(zip(callee.invars, inputs, strict=True))
                outputs = self._add(callee, inner, eqn)
                env |= zip(eqn.outvars, outputs, strict=True)
                continue
            window = None
            if self._rewrite and not self.fixed.issuperset(inputs[:1]):  # those are copied anyway
                window = as_window_update(eqn, inputs)
            if window is not None:
                inner = dict(zip(window.invars, [inputs[0], inputs[2]], strict=True))
                env |= zip(eqn.outvars, self._add_at(eqn, window, inner), strict=True)
                continue
            # An inlined function may be called twice, so that its variables need new names.
            fresh = caller is not None
            outputs = [_value(_renamed(var) if fresh else var) for var in eqn.outvars]
            node = self.graph.add_node(eqn, inputs, outputs)
            env |= zip(eqn.outvars, outputs, strict=True)
            if eqn.effects and eqn.effects - {marker_effect}:
                if self._last_effect is not None:
                    self.graph.add_edge(Edge("data", self._last_effect, node))
                self._last_effect = node
        return [_read(env, atom) for atom in jaxpr.outvars]

    def _dead(self) -> set[Node]:
        """The equations that only declarations kept from being dropped before."""
        dead: set[Node] = set()
        for node in reversed(self.graph.nodes):
            unused = not any(value.is_output for value in node.outputs) and all(
                dead.issuperset(value.users) for value in node.outputs
            )
            if unused and not node.payload.effects - {marker_effect}:
                dead.add(node)
        return dead

    def _add_at(self, like: JaxprEqn, jaxpr: Jaxpr, env: dict[Var, Value]) -> list[Value]:
        """Adds what stands in the place of the equation `like`."""
        for eqn in jaxpr.eqns:
            eqn = eqn.replace(source_info=like.source_info, ctx=like.ctx)
            outputs = [_value(var) for var in eqn.outvars]
            self.graph.add_node(eqn, [_read(env, atom) for atom in eqn.invars], outputs)
            env |= zip(eqn.outvars, outputs, strict=True)
        self.rewritten = True
        return [_read(env, atom) for atom in jaxpr.outvars]

    def _add_marker(self, eqn: JaxprEqn, inputs: list[Value]) -> None:
        groups, start = [], 0
        for size in eqn.params["groups"]:
            groups.append(inputs[start : start + size])
            start += size
        self.markers.append(Marker(eqn, groups))

    def insert_pin(self, buffers: Sequence[Value], reads: Sequence[Value], like: JaxprEqn) -> Node:
        """Adds a pin over `buffers` and `reads`, which has no users yet."""
        inputs = [*buffers, *reads]
        outputs = [Value(Var(value.key.aval), value.nbytes) for value in inputs]
        claims = not self.claimed.isdisjoint(buffers)
        self.claimed.update(b for a, b in zip(inputs, outputs, strict=True) if a in self.claimed)
        pin = Pin(len(buffers), like, self._copies if claims else "allow")
        return self.graph.add_node(pin, inputs, outputs, inserted=True)

    def to_jaxpr(self, nested: dict[Node, dict[str, Any]]) -> Jaxpr:
        """The planned jaxpr; `nested` has the new parameters of equations that hold jaxprs."""
        eqns = [_emit(node, nested.get(node)) for node in self.graph.ordered()]
        return self.jaxpr.replace(
            eqns=eqns,
            outvars=[value.key for value in self.graph.outputs],
            effects=self.jaxpr.effects - {marker_effect},
            debug_info=self.jaxpr.debug_info,
        )


def _emit(node: Node, params: dict[str, Any] | None) -> JaxprEqn:
    inputs = [value.key for value in node.inputs]
    outputs = [value.key for value in node.outputs]
    if isinstance(node.payload, Pin):
        pin = node.payload
        policy = {} if pin.copies == "allow" else {"copies": pin.copies}
        return new_eqn(inputs, outputs, pin_p, {"buffers": pin.buffers} | policy, pin.like)
    eqn: JaxprEqn = node.payload
    if eqn.invars != inputs or eqn.outvars != outputs:
        eqn = eqn.replace(invars=inputs, outvars=outputs)
    if params:
        eqn = eqn.replace(params=eqn.params | params)
    if marker_effect in eqn.effects:
        eqn = eqn.replace(effects=eqn.effects - {marker_effect})
    return eqn


def _value(var: Var) -> Value:
    return Value(var, nbytes(var.aval) if is_array(var.aval) else FOREVER)


def _renamed(var: Var) -> Var:
    return var if isinstance(var, DropVar) else Var(var.aval)


def _read(env: dict[Var, Value], atom: Var | Literal) -> Value:
    return Value(atom) if isinstance(atom, Literal) else env[atom]


def _may_inline(eqn: JaxprEqn) -> bool:
    if not is_plain_jit(eqn) or eqn.params["jaxpr"].consts:
        return False
    if eqn.effects - {marker_effect}:
        return False
    return len(eqn.params["jaxpr"].eqns) <= _SHORT or _matters(eqn.params["jaxpr"])


@weakly_cached
def _matters(jaxpr: Jaxpr) -> bool:
    """Whether the plan of the caller depends on what happens in this jaxpr."""
    return marker_effect in jaxpr.effects or any(
        updates(eqn) or (is_plain_jit(eqn) and _matters(eqn.params["jaxpr"])) for eqn in jaxpr.eqns
    )
