"""The `pin` primitive: an identity at which what is behind waits for what is in front.

`pin(*buffers, *reads)` returns the same values. A write that takes its buffer from a pin cannot
start before the pinned reads are finished, whatever XLA fuses or reorders, and a consumer that
takes a read from the pin cannot compute it once more from the buffer. `copies` says what to do
about copies of the buffers, see `_policy`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxsched._hlo import _control, _hook
from jaxsched._jax import JaxprEqn, lower_barrier
from jaxsched._options import CopyPolicy

__all__ = ["Pin", "pin_p"]


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """What a pin node carries instead of an equation; it stands at the line of `like`."""

    buffers: int
    like: JaxprEqn
    copies: CopyPolicy


pin_p = Primitive("pin")
pin_p.multiple_results = True


@pin_p.def_impl
def _impl(*args: Any, **_: Any) -> list[Any]:
    # Outside of a compiled program there is nothing that could run too early.
    return [jnp.asarray(each) for each in args]


@pin_p.def_abstract_eval
def _abstract_eval(*avals: Any, **_: Any) -> list[Any]:
    return list(avals)


def _bind_nonzero(values: list[Any], buffers: int, **params: Any) -> list[Any]:
    """Pins tangents or cotangents alike; the symbolic zeros among them have nothing to wait for."""
    kept = [i for i, value in enumerate(values) if type(value) is not ad.Zero]
    kept_buffers = sum(i < buffers for i in kept)
    out = list(values)
    if kept_buffers:
        pinned = pin_p.bind(*(values[i] for i in kept), buffers=kept_buffers, **params)
        for i, value in zip(kept, pinned, strict=True):
            out[i] = value
    return out


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    return pin_p.bind(*primals, **params), _bind_nonzero(list(tangents), **params)


def _transpose(cotangents: Any, *_: Any, **params: Any) -> list[Any]:
    return _bind_nonzero(list(cotangents), **params)


def _batch(args: Any, dims: Any, **params: Any) -> tuple[list[Any], Any]:
    return pin_p.bind(*args, **params), dims


def _lower(ctx: Any, *args: Any, buffers: int, copies: CopyPolicy = "allow") -> Any:
    # Neither jit's memory nor the persistent cache knows of the pass, so it has to be installed
    # before anything that holds a pin is compiled: here, and in no process that never pins.
    _hook.install()
    return lower_barrier(ctx, args, (_control.MARK_KEY, _control.mark(buffers, len(args), copies)))


ad.primitive_jvps[pin_p] = _jvp
ad.primitive_transposes[pin_p] = _transpose
batching.primitive_batchers[pin_p] = _batch
mlir.register_lowering(pin_p, _lower)
