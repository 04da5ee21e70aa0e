"""Facts about primitives: which operand an equation overwrites, which it only views or reads.

A primitive that is in no table here writes nothing and reads all of its operands.
"""

import dataclasses
import functools
import math
import weakref
from typing import Any

from jax.core import ShapedArray

from jaxsched._jax import Jaxpr, JaxprEqn, Literal, Var, scan_counts, scopes_of
from jaxsched._pin import Pin

__all__ = [
    "ScopeKind",
    "is_array",
    "is_buffer",
    "is_elementwise",
    "is_materialized",
    "is_view",
    "keeps_position",
    "nbytes",
    "same_shape",
    "same_type",
    "scopes",
    "updates",
    "weakly_cached",
    "window",
]

_SYMBOLIC = 1 << 10

# No work of their own: the result is the operand's memory under another shape.
_VIEWS = frozenset({"expand_dims", "reshape", "squeeze"})

# These overwrite a part of operand 0.
_UPDATES = frozenset(
    {
        "dynamic_update_slice",
        "scatter",
        "scatter-add",
        "scatter-max",
        "scatter-min",
        "scatter-mul",
        "scatter-sub",
    }
)

# Same-shape arithmetic, which XLA may compute into the memory of an operand that dies there.
_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj cos cosh
    digamma div erf erf_inv erfc exp exp2 expm1 floor integer_pow lgamma log log1p log2
    logistic max min mul neg nextafter not or pow reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    xor""".split()
)

# Elementwise too, but with a result of another dtype.
_COMPARING = frozenset({"convert_element_type", "eq", "ge", "gt", "is_finite", "le", "lt", "ne"})

# Equations that call a jaxpr once with their operands; the parameter that holds it.
_CALLS = {
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
}

# Results of these are in memory before a consumer starts: XLA fuses none of them into a consumer,
# so none of them can read a buffer again in the middle of its update.
_MATERIALIZED = frozenset(
    """all_gather all_to_all argmax argmin cholesky conv_general_dilated custom_linear_solve
    dot_general eig eigh ffi_call fft geqrf householder_product lu ppermute psum pure_callback
    io_callback qr ragged_dot reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_scatter reduce_sum reduce_xor scan schur sort svd top_k triangular_solve
    tridiagonal_solve while""".split()
)


def weakly_cached(function: Any) -> Any:
    cache: weakref.WeakKeyDictionary[Jaxpr, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(jaxpr: Jaxpr) -> Any:
        if jaxpr not in cache:
            cache[jaxpr] = function(jaxpr)
        return cache[jaxpr]

    return cached


def is_array(aval: Any) -> bool:
    """Whether this is the type of an array: not of a token and not of a mutable reference."""
    return isinstance(aval, ShapedArray)


def is_buffer(aval: Any) -> bool:
    """Whether this is the type of an array with more than one element.

    Small arrays count too: XLA's in-place kernels can be wrong for them (openxla/xla#49176).
    """
    return is_array(aval) and 0 not in aval.shape and any(size != 1 for size in aval.shape)


def nbytes(aval: Any) -> int:
    """Bytes of an array; a symbolic dimension (`jax.export`) counts as one that is large."""
    size = math.prod(aval.shape)
    if not isinstance(size, int):
        size = math.prod(each if isinstance(each, int) else _SYMBOLIC for each in aval.shape)
    return size * aval.dtype.itemsize


def is_view(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _VIEWS


def is_materialized(eqn: Any) -> bool:
    """Whether XLA computes the results in a kernel of their own, or has them in memory at a pin."""
    if not isinstance(eqn, JaxprEqn):
        return isinstance(eqn, Pin)
    return eqn.primitive.name in _MATERIALIZED or eqn.primitive.name in _CALLS


def updates(eqn: Any) -> tuple[tuple[int, int], ...]:
    """The pairs (operand, result) where the result is written into the operand's memory."""
    if not isinstance(eqn, JaxprEqn):
        return ()
    name = eqn.primitive.name
    if name in _UPDATES:
        return ((0, 0),)
    if name == "scan":
        constants, carry = scan_counts(eqn)
        return _loop_updates(eqn.params["jaxpr"], constants, 0, carry)
    if name == "while":
        constants = eqn.params["body_nconsts"]
        skipped = eqn.params["cond_nconsts"]
        return _loop_updates(eqn.params["body_jaxpr"], constants, skipped, len(eqn.outvars))
    if name == "cond":
        return _branch_updates(eqn.params["branches"], 1)
    if name in _CALLS:
        return _branch_updates(scopes_of(eqn.params[_CALLS[name]]), 0)
    return ()


def _loop_updates(body: Jaxpr, constants: int, skipped: int, carry: int) -> Any:
    """Every carried value that an iteration may replace; one that is passed through is not."""
    return tuple(
        (skipped + constants + i, i)
        for i in range(carry)
        if body.outvars[i] is not body.invars[constants + i]
    )


def _branch_updates(branches: tuple[Jaxpr, ...], skipped: int) -> Any:
    """The operands that a branch returns, overwritten in one branch or more."""
    carried_by = [carried(branch) for branch in branches]
    pairs = []
    taken = set()
    for result in range(len(branches[0].outvars) if branches else 0):
        sources = [each.get(result) for each in carried_by]
        operand = next((source[0] for source in sources if source is not None), None)
        # With the same operand passed through in every branch there is nothing to overwrite.
        if operand is None or operand in taken or all(s == (operand, False) for s in sources):
            continue
        taken.add(operand)
        pairs.append((skipped + operand, result))
    return tuple(pairs)


@weakly_cached
def carried(jaxpr: Jaxpr) -> dict[int, tuple[int, bool]]:
    """Result -> (input, written): the results that live in the memory of an input."""
    origin: dict[Var, tuple[int, bool]] = {v: (i, False) for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if is_view(eqn):
            _follow(origin, eqn, 0, 0, written=False)
        elif eqn.primitive.name == "pin":  # of a scheduled function inside of this one
            for number in range(len(eqn.outvars)):
                _follow(origin, eqn, number, number, written=False)
        else:
            for operand, result in updates(eqn):
                _follow(origin, eqn, operand, result, written=True)
    return {
        i: origin[v]
        for i, v in enumerate(jaxpr.outvars)
        if not isinstance(v, Literal) and v in origin
    }


def _follow(origin: Any, eqn: JaxprEqn, operand: int, result: int, *, written: bool) -> None:
    source = eqn.invars[operand]
    target = eqn.outvars[result]
    if not isinstance(source, Literal) and source in origin and target not in origin:
        index, before = origin[source]
        origin[target] = (index, before or written)


def same_shape(a: Any, b: Any) -> bool:
    """Whether two operands or results have the same shape."""
    return a.aval.shape == b.aval.shape


def same_type(a: Any, b: Any) -> bool:
    """Whether two operands or results have the same shape and dtype."""
    return same_shape(a, b) and a.aval.dtype == b.aval.dtype


def window(eqn: Any) -> tuple[int, ...] | None:
    """The sizes of the one window of operand 0 that an equation reads or writes."""
    name = eqn.primitive.name
    if name in ("dynamic_slice", "slice"):
        return None if eqn.params.get("strides") else eqn.outvars[0].aval.shape
    if name == "dynamic_update_slice":
        return eqn.invars[1].aval.shape
    if name not in _UPDATES:
        return None
    operand, _, update = (atom.aval for atom in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    if len(numbers.update_window_dims) != update.ndim:
        return None  # several windows
    sizes = iter(update.shape)
    return tuple(
        1 if i in numbers.inserted_window_dims else next(sizes) for i in range(operand.ndim)
    )


def keeps_position(eqn: JaxprEqn) -> bool:
    """Whether each element of the result is computed from the same elements of the operands."""
    return eqn.primitive.name in _ELEMENTWISE or eqn.primitive.name in _COMPARING


def is_elementwise(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _ELEMENTWISE


@dataclasses.dataclass(frozen=True, slots=True)
class ScopeKind:
    """How a jaxpr is used: the first `fixed` inputs must keep their values, and in a loop each of
    the `carry` inputs behind them is replaced by the output with the same number. In a branch, the
    inputs `overwritten` are overwritten by this branch or by another one."""

    name: str
    fixed: int = 0
    carry: int | None = None
    overwritten: frozenset[int] = frozenset()

    def may_become(self, source: int, result: int) -> bool:
        """Whether input `source` and output `result` may share memory."""
        number = source - self.fixed
        if self.carry is None:
            return number >= 0
        return 0 <= number < self.carry and number == result


def scopes(eqn: JaxprEqn) -> dict[str, ScopeKind]:
    """The parameters of an equation that hold jaxprs which run as part of it."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return {"jaxpr": ScopeKind("scan body", *scan_counts(eqn))}
    if name == "while":
        return {
            "cond_jaxpr": ScopeKind("while condition", len(params["cond_jaxpr"].invars)),
            "body_jaxpr": ScopeKind("while body", params["body_nconsts"], len(eqn.outvars)),
        }
    if name == "cond":
        overwritten = frozenset(operand - 1 for operand, _ in updates(eqn))
        return {"branches": ScopeKind("branch", overwritten=overwritten)}
    if name in _CALLS:
        return {_CALLS[name]: ScopeKind(f"function under `{name}`")}
    return {}
