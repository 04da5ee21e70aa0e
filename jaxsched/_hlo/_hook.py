"""What XLA calls while it compiles, and how it comes to do so."""

import contextlib
import re
import threading

from jax.extend import backend, xla

from jaxsched._errors import as_own_error
from jaxsched._hlo._control import MARK_KEY, PASS_VERSION, add_control_edges
from jaxsched._jax import on_compile_error

__all__ = ["install", "transform"]

_POLICY = re.compile(rb"pin:\d{1,9}:\d{1,9}:%d:(?:warn|error)" % PASS_VERSION)


def transform(module: bytes) -> bytes | None:
    """Adds the control edges; speaks up about copies where the marks of a module ask for it, by a
    warning or by an exception, which fails the compilation."""
    if _POLICY.search(module):
        from jaxsched import _copied  # most programs need nothing of it

        _copied.check(module)
    return add_control_edges(module)


_installing = threading.Lock()
_installed = False


def install() -> None:
    """Registers the pass in this process, for the CPU and for such GPU plugins as are loaded.

    Neither jit's cache nor the persistent one knows of registration, so this has to come before the
    first pin is compiled: pin's lowering rule calls it.
    """
    global _installed
    with _installing:
        if _installed:
            return
        _register("cpu")
        # Asking for a platform without a plugin raises, and so does a plugin without the extension
        # (as with `platforms=None`).  There, and on TPU, the barriers alone keep the order.
        for platform in {"cuda", "rocm"} & backend.backends().keys():
            with contextlib.suppress(RuntimeError):
                _register(platform)
        on_compile_error(as_own_error)
        _installed = True


def _register(platform: str) -> None:
    xla.register_hlo_module_transformation(
        transform,
        name=MARK_KEY,
        stage=xla.PipelineStage.PRE_SCHEDULER,
        platforms=platform,
    )
