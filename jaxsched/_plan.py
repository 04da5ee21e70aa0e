"""The plan of a program: every scope gets its constraints, its pins and its order."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from jaxsched._before import in_rule, marker_effect
from jaxsched._declared import TOP, declare
from jaxsched._errors import ScheduleError, message
from jaxsched._hazards import find_hazards
from jaxsched._jax import Jaxpr, JaxprEqn, rules_within, scopes_of, user_line, without_dead
from jaxsched._options import Options
from jaxsched._pins import Pins
from jaxsched._policy import claimed
from jaxsched._record import current_record
from jaxsched._scope import Scope
from jaxsched._updates import ScopeKind, scopes

__all__ = ["Options", "plan"]


def plan(jaxpr: Jaxpr, options: Options, *, compiled: bool) -> Jaxpr:
    """The same program with its schedule; the very same jaxpr where there is nothing to do.

    In eager code (not `compiled`) every equation is finished before the next one starts, so that
    only the order matters there; the bodies of loops and jitted functions are compiled.
    """
    top, planned = ScopeKind(TOP), None
    with _collector_paused():
        # XLA drops these too; a gradient, for one, leaves such reads of old values behind.
        live = without_dead(jaxpr) if compiled else jaxpr
        if not compiled:
            # Nested jitted functions stay whole here, unless a declaration reaches into one.
            with contextlib.suppress(ScheduleError):
                planned = _plan_scope(jaxpr, top, options, compiled=False, inline=False)
        if planned is None:
            planned = _plan_scope(live, top, options, compiled=compiled, inline=True)
        if planned is live:
            planned = jaxpr
    return _rules_apart(planned) if marker_effect in jaxpr.effects else planned


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A plan is many small objects that all live to its end; collections between would cost a
    third of the time for 100,000 equations, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# A jaxpr that JAX has cached is rewritten once, and the result is one object: XLA's compile caches
# depend on it. No entry refers to its own key, so nothing is kept alive here.
_rewritten: weakref.WeakKeyDictionary[Jaxpr, dict[Any, Jaxpr | None]] = weakref.WeakKeyDictionary()


def _once(jaxpr: Jaxpr, key: Any, rewrite: Callable[[], Jaxpr]) -> Jaxpr:
    known = _rewritten.setdefault(jaxpr, {})
    if key not in known:
        result = rewrite()
        known[key] = None if result is jaxpr else result
    return known[key] or jaxpr


def _with_nested(eqn: JaxprEqn, rewrite: Callable[[Jaxpr, ScopeKind], Jaxpr]) -> dict[str, Any]:
    """The parameters of an equation that change when the jaxprs in them are rewritten."""
    changed = {}
    for name, kind in scopes(eqn).items():
        before = scopes_of(eqn.params[name])
        after = tuple(rewrite(jaxpr, kind) for jaxpr in before)
        if any(a is not b for a, b in zip(after, before, strict=True)):
            changed[name] = after if isinstance(eqn.params[name], tuple) else after[0]
    return changed


def _rules_apart(jaxpr: Jaxpr) -> Jaxpr:
    """Lets the derivative rules in a jaxpr, which may run at any time, know that they are such."""
    changed = {}
    for i, eqn in enumerate(jaxpr.eqns):
        params = rules_within(eqn, in_rule)
        params |= _with_nested(
            eqn, lambda inner, _: _once(inner, "rules", lambda: _rules_apart(inner))
        )
        if params:
            changed[i] = eqn.replace(params=eqn.params | params)
    if not changed:
        return jaxpr
    eqns = [changed.get(i, eqn) for i, eqn in enumerate(jaxpr.eqns)]
    return jaxpr.replace(eqns=eqns, debug_info=jaxpr.debug_info)


def _plan_scope(
    jaxpr: Jaxpr, kind: ScopeKind, options: Options, *, compiled: bool, inline: bool
) -> Jaxpr:
    # Without inference a function without declarations is left as it is.
    active = compiled and (options.infer or marker_effect in jaxpr.effects)
    scope = Scope(jaxpr, kind.fixed, inline=inline, rewrite=active, copies=options.copies)
    nested = {}
    for node in scope.graph.nodes:
        if node in scope.dead and marker_effect not in node.payload.effects:
            continue  # but a declaration without a meaning is an error in dead code too
        params = _plan_params(node.payload, options)
        if params:
            nested[node] = params
    pins = Pins(scope)
    found = None
    for declared in declare(scope, kind):
        pins.want(declared.target, declared.held, declared.sources, limit=None)
    if active:
        found = find_hazards(scope, kind, infer=options.infer)
        for hazard in found.hazards:
            pins.want(hazard.target, hazard.held, hazard.readers, limit=hazard.nbytes)
        pins.want_alone(found.alone)
        for value, readers in found.passed:
            pins.want_returned(value, readers)
        if (record := current_record()) is not None:
            record.add_scope(scope, found)
    claims = []
    if compiled and options.copies != "allow":
        claims = claimed(scope, kind, found.unavoidable if found else [], options.copies)
    placed = active and pins.place()
    placed |= pins.place_claims(claims)
    if placed or nested or scope.markers or scope.rewritten:
        return scope.to_jaxpr(nested)
    return jaxpr


def _declaration_in(eqn: JaxprEqn) -> str:
    """The line of a declaration in the jaxprs of an equation that itself has none."""
    inner = (each for value in eqn.params.values() for each in scopes_of(value))
    found = (each for jaxpr in inner for each in jaxpr.eqns if marker_effect in each.effects)
    return next((user_line(each.source_info) or _declaration_in(each) for each in found), "")


def _plan_params(eqn: JaxprEqn, options: Options) -> dict[str, Any]:
    """The parameters of an equation that change because a jaxpr in them is planned."""
    if marker_effect in eqn.effects and not scopes(eqn):
        raise ScheduleError(
            message(
                f"`before` has no meaning inside of `{eqn.primitive.name}`, which jaxsched does"
                " not look into.",
                user_line(eqn.source_info) or _declaration_in(eqn),
                "declare the order outside of it, in a loop or branch, or in a jitted function.",
            )
        )

    def plan_nested(jaxpr: Jaxpr, kind: ScopeKind) -> Jaxpr:
        def rewrite() -> Jaxpr:
            return _plan_scope(jaxpr, kind, options, compiled=True, inline=True)

        return _once(jaxpr, (kind, options), rewrite)

    return _with_nested(eqn, plan_nested)
