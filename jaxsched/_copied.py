"""`scheduled(copies=...)` while a program is compiled: the copies of claimed buffers in its module.

XLA calls this between copy insertion and scheduling, where the pins are still barriers: their marks
carry the policy, and the values they pin are the claims.
"""

import dataclasses
import re
from typing import Literal

from jaxsched._causes import explained_copies
from jaxsched._errors import message
from jaxsched._hlo._control import MARK_KEY
from jaxsched._hlo._copies import Copy as HloCopy
from jaxsched._hlo._copies import copies
from jaxsched._hlo._flow import Flow, Kind, Place
from jaxsched._hlo._text import Computation, Module, parse
from jaxsched._jax import hlo_text
from jaxsched._lines import short_names
from jaxsched._lives import SMALL
from jaxsched._policy import speak
from jaxsched._program import Argument, Program
from jaxsched._record import Record
from jaxsched._render_text import copies_text
from jaxsched._report import Copy
from jaxsched._verdicts import Instances

__all__ = ["check"]

_POLICIES: tuple[Literal["error", "warn"], ...] = ("error", "warn")

_MARK = re.compile(r"pin:(\d+):(\d+):\d+:(warn|error)")


def check(module: bytes) -> None:
    """Warns or raises CopyError where a claimed buffer is copied."""
    program = _program(parse(hlo_text(module)))
    claims: dict[tuple[str, Place], str] = {}
    for name in program.flow.sites:
        _claims(program.flow, program.flow.module[name], claims)
    for policy in _POLICIES:
        found = [
            copy
            for copy in program.copies
            if claims.get((copy.computation.name, _copied(program.flow, copy))) == policy
        ]
        if found:
            told = explained_copies(
                dataclasses.replace(program, copies=found), Record(infer=True), None, True
            )
            speak(policy, _message(told))


def _copied(flow: Flow, copy: HloCopy) -> Place:
    """Where the value was made that is copied."""
    return flow.origin(copy.computation, Place(copy.instruction.name))


def _program(module: Module) -> Program:
    flow = Flow(module)
    donated = {number for number, _ in module.input_output_alias.values()}
    donated |= {number for number, _ in module.buffer_donors}
    arguments = {
        each.op_name: Argument.of(each.op_name, each.shape.nbytes, donated=number in donated)
        for number, each in module.entry.parameters.items()
        if each.op_name is not None
    }
    return Program(flow, Instances(flow), copies(module, SMALL + 1), 0, arguments)


def _claims(flow: Flow, computation: Computation, claims: dict[tuple[str, Place], str]) -> None:
    """Adds the values in one computation that are claimed, and what is written in their place."""
    for barrier in computation.instructions:
        if barrier.opcode != "opt-barrier":
            continue
        mark = _MARK.fullmatch(barrier.frontend_attributes.get(MARK_KEY, ""))
        if mark is None:
            continue
        buffers, operands, policy = int(mark[1]), int(mark[2]), mark[3]
        number = len(barrier.shape)
        # XLA drops elements that nobody uses: then it cannot be told which are the buffers.
        elements = range(buffers if number == operands else number)
        for element in elements if barrier.is_tuple else [None]:
            value = flow.origin(computation, Place(barrier.name, element))
            claims.setdefault((computation.name, value), policy)
            for use in flow.uses(computation, value):
                if use.kind is Kind.WRITE:
                    inner = use.element if use.instruction.is_tuple else None
                    written = Place(use.instruction.name, inner)
                    claims.setdefault((computation.name, written), policy)


def _message(told: tuple[Copy, ...]) -> str:
    lines = {line for copy in told for line in (copy.write, copy.forced_by) if line}
    nbytes = sum(copy.nbytes for copy in told)
    return message(
        f"{nbytes:,} bytes are copied of what `scheduled` claims to update in place.",
        "\n    ".join(copies_text(told, short_names(lines))),
        'the fix of each copy, an order declared with `before`, or copies="allow".',
    )
