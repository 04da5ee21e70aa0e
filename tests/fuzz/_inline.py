"""Nested jitted functions put in line, as the planner and XLA do it."""

from typing import Any

from jaxsched._jax import Jaxpr, Literal, Var, is_plain_jit, scopes_of

__all__ = ["inlined"]


def inlined(jaxpr: Jaxpr) -> Jaxpr:
    """The same program without plain `jit` equations, in every scope of it."""
    eqns: list[Any] = []
    known: dict[Any, Any] = {}
    _add(jaxpr, known, eqns, top=True)
    outvars: Any = [_read(known, v) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)


def _add(jaxpr: Jaxpr, known: dict[Any, Any], eqns: list[Any], *, top: bool) -> None:
    for eqn in jaxpr.eqns:
        inputs = [_read(known, v) for v in eqn.invars]
        if is_plain_jit(eqn) and not eqn.params["jaxpr"].consts:
            callee = eqn.params["jaxpr"]
            inner = dict(zip(callee.invars, inputs, strict=True))
            # What the caller calls a result keeps that name.
            names = {}
            if top:
                made = {v for each in callee.eqns for v in each.outvars}
                names = {
                    v: w for v, w in zip(callee.outvars, eqn.outvars, strict=True) if v in made
                }
            inner |= {("name", v): w for v, w in names.items()}
            _add(callee, inner, eqns, top=False)
            for v, w in zip(callee.outvars, eqn.outvars, strict=True):
                found = _read(inner, v)
                if found is not w:
                    known[w] = found
            continue
        outputs = eqn.outvars
        if not top:
            outputs = [known.get(("name", v)) or Var(v.aval) for v in eqn.outvars]
            known |= zip(eqn.outvars, outputs, strict=True)
        params = {name: _param(value) for name, value in eqn.params.items()}
        eqns.append(eqn.replace(invars=inputs, outvars=outputs, params=params))


def _param(value: Any) -> Any:
    inner = tuple(map(inlined, scopes_of(value)))
    if not inner:
        return value
    return inner if isinstance(value, tuple) else inner[0]


def _read(known: dict[Any, Any], value: Any) -> Any:
    return value if isinstance(value, Literal) else known.get(value, value)
