"""Every contact with JAX's private parts, and every branch on its version."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import compiler, config, core, effects, source_info_util, traceback_util
from jax._src import linear_util as lu
from jax._src.interpreters import mlir, partial_eval
from jax._src.named_sharding import UnspecifiedValue
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

from jaxsched._errors import ScheduleError, message

__all__ = [
    "INTERNAL",
    "DropVar",
    "Effect",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "SourceInfo",
    "Var",
    "allow_effect",
    "caller_line",
    "check_version",
    "eval_jaxpr",
    "hlo_text",
    "inline_name",
    "is_local",
    "is_plain_jit",
    "keyed_state",
    "leaks_as",
    "lower_barrier",
    "new_eqn",
    "on_compile_error",
    "rules_within",
    "scan_counts",
    "scopes_of",
    "tracing",
    "uncached_compilation",
    "user_line",
    "with_jaxpr",
    "with_name",
    "without_dead",
]

Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
Var = core.Var
DropVar = core.DropVar
Effect = effects.Effect
SourceInfo = source_info_util.SourceInfo

MINIMUM = (0, 11, 1)

INTERNAL = (os.path.dirname(__file__) + os.sep, os.path.dirname(jax.__file__) + os.sep)
"""Where the files are that no user's line is in."""

# Our own frames stay out of user tracebacks and source lines.
_PACKAGE = os.path.dirname(__file__) + os.sep
traceback_util.register_exclusion(_PACKAGE)
source_info_util.register_exclusion(_PACKAGE)


def check_version(version: str) -> None:
    """Raises ImportError for a jax whose compiler hook or barriers cannot carry a schedule.

    Up to jaxlib 0.11.0 the barrier is expanded before copy insertion, and on 0.10.2 the HLO hook
    loses donation (`input_output_alias`).
    """
    found = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])
    if found < MINIMUM:
        needed = ".".join(map(str, MINIMUM))
        raise ImportError(
            message(
                f"jaxsched needs jax >= {needed}, but jax {version} is installed.",
                "import jaxsched",
                f"pip install -U 'jax>={needed}' 'jaxlib>={needed}'",
            )
        )


def tracing() -> bool:
    """Whether a JAX transformation is tracing right now (false in plain eager code)."""
    return not core.trace_state_clean()


def without_dead(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without what leads to no result, in loops and branches too; the very same one where
    there is nothing of the kind."""
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return live


def eval_jaxpr(jaxpr: Jaxpr, args: list[Any]) -> list[Any]:
    """Evaluates under the caller's trace; keeps each equation's name stack, line and context."""
    trace = core.trace_ctx.trace
    pure = not (jaxpr.is_high or any(eqn.effects for eqn in jaxpr.eqns))
    if (
        pure
        and isinstance(trace, partial_eval.DynamicJaxprTrace)
        and not trace.requires_low
        and all(isinstance(arg, core.Tracer) for arg in args)
    ):
        return _stage(trace, jaxpr, args)
    return core.jaxpr_as_fun(jaxpr)(*args)


def _stage(trace: partial_eval.DynamicJaxprTrace, jaxpr: Jaxpr, args: list[Any]) -> list[Any]:
    """Adds the equations to the jaxpr that is being traced, as JAX does with those of an inlined
    `jit`: all types are known already, and evaluating would infer them once more."""
    env: dict[Any, Any] = dict(zip(jaxpr.all_invars, [*jaxpr.consts, *args], strict=True))
    outer = source_info_util.current_name_stack()
    for eqn in jaxpr.eqns:
        inner = eqn.source_info
        source = inner.replace(name_stack=outer + inner.name_stack)
        inputs = [
            partial_eval.DynamicJaxprTracer(trace, atom.aval, atom, source)
            if isinstance(atom, Literal)
            else trace.to_jaxpr_tracer(env[atom], source)
            for atom in eqn.invars
        ]
        avals = [var.aval for var in eqn.outvars]
        # What was the argument of a function that the plan has inlined may be a constant now.
        folded = partial_eval.try_constant_folding(eqn.primitive, inputs, eqn.params, avals)
        if folded is None:
            outputs = trace.emit_eqn(
                inputs, avals, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx
            )
        else:
            outputs = [
                trace.new_const(value, source, aval)
                for value, aval in zip(folded, avals, strict=True)
            ]
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]


def new_eqn(
    inputs: list[Any], outputs: list[Var], primitive: Any, params: dict[str, Any], like: JaxprEqn
) -> JaxprEqn:
    """An equation without effects that stands at the source line of `like`."""
    return core.new_jaxpr_eqn(
        inputs, outputs, primitive, params, core.no_effects, like.source_info, like.ctx
    )


def inline_name(outer: SourceInfo, name: str, inner: SourceInfo) -> SourceInfo:
    """The source info of an equation of the jitted function `name`, once it is inlined."""
    stack = outer.name_stack.extend(f"jit({name})") + inner.name_stack
    return inner.replace(name_stack=stack)


def with_name(eqn: JaxprEqn, name: str, params: dict[str, Any]) -> JaxprEqn:
    """The equation with other parameters, `name` in its name stack, and so in the HLO metadata."""
    source_info = eqn.source_info
    stack = source_info.name_stack.extend(name)
    return eqn.replace(source_info=source_info.replace(name_stack=stack), params=params)


def with_jaxpr(traced: Any, jaxpr: Jaxpr) -> Any:
    """What `jit(f).trace(...)` returned, with another jaxpr of the same signature in it."""
    other = copy.copy(traced)
    other._params = traced._params | {"jaxpr": jaxpr}
    other._lojax = other._closure_converted = None  # what was derived from the other jaxpr
    return other


@contextlib.contextmanager
def uncached_compilation() -> Iterator[None]:
    """Compiles without the persistent cache: the names in the metadata are not part of its key."""
    with (
        config.compilation_cache_include_metadata_in_key(True),
        config.persistent_cache_min_compile_time_secs(float("inf")),
    ):
        yield


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Whether this is a jitted call that may as well stand inline: nothing is asked of it."""
    params = eqn.params
    return eqn.primitive.name == "jit" and not (
        any(params["donated_invars"])
        or params["keep_unused"]
        or params["compiler_options_kvs"]
        or any(not isinstance(s, UnspecifiedValue) for s in params["in_shardings"])
        or any(not isinstance(s, UnspecifiedValue) for s in params["out_shardings"])
        or any(layout is not None for layout in (*params["in_layouts"], *params["out_layouts"]))
        or not (params["ctx_mesh"].empty or params["ctx_mesh"] is eqn.ctx.cur_abstract_mesh)
    )


def is_local(*avals: Any) -> bool:
    """Whether these types say nothing of a mesh (explicit sharding, `shard_map`)."""
    return all(aval.sharding.mesh.empty for aval in avals)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """The numbers of constants and of carried values of a `scan` equation."""
    # JAX >= 0.11.1: `num_consts` and `num_carry` gave way to the flat trees `ft_in` and `ft_out`.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def keyed_state(name: str, help: str) -> Any:
    """A thread-local number that is part of the key of all of JAX's trace caches.

    What is traced in one state is never taken for what another state would trace. Called with a
    number it is a context manager; `.value` is the number now.
    """
    return config.int_state(name, 0, help, include_in_jit_key=True, include_in_trace_context=True)


def rules_within(eqn: JaxprEqn, context: Callable[[], Any]) -> dict[str, Any]:
    """The functions among an equation's parameters (custom derivatives), to be run in `context`."""

    def within(rule: lu.WrappedFun) -> lu.WrappedFun:
        def run(*args: Any) -> Any:
            with context():
                return rule.call_wrapped(*args)

        return lu.wrap_init(run, debug_info=rule.debug_info)

    return {
        name: within(value)
        for name, value in eqn.params.items()
        if isinstance(value, lu.WrappedFun)
    }


def scopes_of(value: Any) -> tuple[Jaxpr, ...]:
    """The jaxprs which one parameter of an equation holds."""
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(each for each in values if isinstance(each, Jaxpr))


def user_line(source_info: SourceInfo) -> str:
    """`file:line (function)` of the user's code, as JAX prints it."""
    return source_info_util.summarize(source_info)


def caller_line() -> str:
    """The line of the user's code that is running right now."""
    # Not `current()`, which is the line of the equation that is evaluated, if one is.
    traceback = source_info_util.Traceback.get_traceback()
    return user_line(SourceInfo(traceback, source_info_util.new_name_stack()))


def allow_effect(kind: type[Effect]) -> None:
    """Lets equations with this effect pass through loops, branches, custom rules and remat."""
    effects.lowerable_effects.add_type(kind)
    effects.control_flow_allowed_effects.add_type(kind)
    effects.custom_derivatives_allowed_effects.add_type(kind)
    effects.remat_allowed_effects.add_type(kind)


def lower_barrier(ctx: Any, args: Any, attribute: tuple[str, str] | None) -> Any:
    """Lowers an identity to one `optimization_barrier`, marked with a frontend attribute."""
    flat_args, treedef = mlir.ir_tree_registry.flatten(list(args))
    barrier = stablehlo.OptimizationBarrierOp(flat_args)
    if attribute is not None:
        key, value = attribute
        barrier.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
            {key: ir.StringAttr.get(value)}
        )
    results = treedef.unflatten(list(barrier.results))
    return [
        mlir.lower_with_sharding_in_types(ctx, result, aval)
        if isinstance(aval, core.ShapedArray)
        else result
        for result, aval in zip(results, ctx.avals_out, strict=True)
    ]


def hlo_text(module: bytes) -> str:
    """The text of a serialized HLO module."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()


def on_compile_error(replace: Callable[[Exception], Exception | None]) -> None:
    """Lets `replace` put another exception in the place of XLA's when a compilation fails."""
    compiler.register_xla_runtime_error_handler(replace)


@contextlib.contextmanager
def leaks_as(error: Callable[[], ScheduleError]) -> Iterator[None]:
    """Turns JAX's report of a tracer that outlived its trace into our own."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as leak:
        raise error() from leak
