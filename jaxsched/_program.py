"""A compiled function, as the parts of a report look at it."""

import dataclasses
import re
from typing import Any

import jax

from jaxsched._hlo._copies import Copy, copies
from jaxsched._hlo._flow import Flow
from jaxsched._hlo._text import Module, parse
from jaxsched._jax import uncached_compilation
from jaxsched._lives import SMALL
from jaxsched._verdicts import Instances

__all__ = ["Argument", "Program"]

_ROOT = re.compile(r"[^\W\d]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One array among the arguments: `name` as in `state['w']`, `root` as in `state`.

    `nbytes` is its size on one device, 0 where the function does not use it.
    """

    name: str
    root: str
    nbytes: int
    donated: bool

    @classmethod
    def of(cls, name: str, nbytes: int, *, donated: bool) -> "Argument":
        root = _ROOT.match(name)
        return cls(name, root[0] if root else name, nbytes, donated)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """The optimized module, where it computes the numbered equations, and its large copies."""

    flow: Flow
    instances: Instances
    copies: list[Copy]
    temp_bytes: int
    arguments: dict[str, Argument]

    @classmethod
    def of(cls, traced: Any) -> "Program":
        """Compiles what `jit(f).trace(...)` returned."""
        with uncached_compilation():
            compiled = traced.lower().compile()
        module: Module = parse(compiled.as_text() or "")
        flow = Flow(module)
        memory = compiled.memory_analysis()
        return cls(
            flow,
            Instances(flow),
            copies(module, SMALL + 1),
            memory.temp_size_in_bytes if memory is not None else 0,
            _arguments(traced, module),
        )


def _arguments(traced: Any, module: Module) -> dict[str, Argument]:
    """The arguments by the names under which XLA knows them."""
    sizes = {each.op_name: each.shape.nbytes for each in module.entry.parameters.values()}
    infos = jax.tree.leaves(traced.args_info)
    names: tuple[str | None, ...] = traced.jaxpr.debug_info.arg_names or ()
    found = {}
    # Values that the function has closed over may stand in front.
    for name, info in zip(names[len(names) - len(infos) :], infos, strict=False):
        if name is not None:
            found[name] = Argument.of(name, sizes.get(name, 0), donated=info.donated)
    return found
