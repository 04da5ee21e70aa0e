"""For which programs the compiled module can tell what has become of their copies and orders."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxsched._before import marker_p
from jaxsched._jax import Literal
from tests.fuzz._check import scopes, trace
from tests.fuzz._generate import uses
from tests.fuzz._inline import inlined
from tests.fuzz._program import LOOPS, Block, Program, Step, evaluate, function

__all__ = ["BUFFER", "steps", "tells_of_copies", "tells_of_orders"]

BUFFER = 100
"""Copies of rows and counters are no concern: the buffers of the programs have more bytes."""


def tells_of_copies(program: Program) -> bool:
    """Whether, with all arguments donated, the copies can be compared with those of plain jit.

    They cannot where XLA does away with a part of the program, and so with copies: what a pin is in
    front of, it leaves as it is. And each array has a size of its own: XLA may give the memory of
    another one of that size to an update, and then copies once more where the update waits for a
    read.
    """
    inner = list(steps(program.block))
    if any(_is_dissolved(step) or _is_merged(step) or _ignores_carry(step) for step in inner):
        return False
    sizes = [size for each in program.arguments() if (size := each.nbytes) > BUFFER]
    alike = len({*sizes}) < len(sizes)
    filled = any(_fills_for_many(block) for block in _blocks(program.block))
    return not (alike or filled or _has_known_result(program))


def tells_of_orders(program: Program) -> bool:
    """Whether the program declares orders, and the module says what became of them.

    XLA merges what is computed twice from the same operands. One instruction is then two equations,
    of which one may run at any time. And it drops from a pin what a loop carries and never reads.
    """
    if any(_is_dissolved(step) or _ignores_carry(step) for step in steps(program.block)):
        return False
    declared: set[int] = set()
    merged: set[int] = set()
    numbers: dict[Any, int] = collections.defaultdict(itertools.count().__next__)
    for scope in scopes(inlined(trace(function(program), program.arguments()))):
        known: dict[Any, list[int]] = {}
        for eqn in scope.eqns:
            operands = [
                (str(v.val), v.aval) if isinstance(v, Literal) else numbers[v] for v in eqn.invars
            ]
            if eqn.primitive is marker_p:
                declared.update(operand for operand in operands if isinstance(operand, int))
                continue
            key = eqn.primitive, str(eqn.params), *operands
            if key in known:
                numbers |= zip(eqn.outvars, known[key], strict=True)
                merged.update(known[key])
            else:
                known[key] = [numbers[v] for v in eqn.outvars]
    return bool(declared) and declared.isdisjoint(merged)


def _is_dissolved(step: Step) -> bool:
    """Whether it is a loop of one round."""
    match step.operation, step.static:
        case "for", (lower, upper):
            return upper - lower < 2
        case (("scan" | "while"), (rounds, *_)):
            return rounds < 2
    return False


def _is_merged(step: Step) -> bool:
    """Whether a loop or branch takes or returns something twice, in which case XLA makes one of it.

    A branch takes what it refers to; and so does a loop, which returns the same one unchanged.
    """
    if step.operation not in (*LOOPS, "switch"):
        return False
    names = [step.operands, *(block.results for block in step.blocks)]
    inside = {name for block in step.blocks for each in block.steps for name in uses(each)}
    kept = {*step.operands}
    if step.operation != "switch":
        (body,) = step.blocks
        carried = body.parameters[1:]
        passed = zip(step.operands[-len(carried) :], carried, body.results, strict=False)
        kept = {operand for operand, before, after in passed if before == after}
    return any(len({*each}) < len(each) for each in names) or not inside.isdisjoint(kept)


def _ignores_carry(step: Step) -> bool:
    """Whether a loop carries something that is of no use to it, but is returned unchanged."""
    if step.operation not in LOOPS:
        return False
    (body,) = step.blocks
    carried = body.parameters[1:]
    needed = {*body.results[len(carried) :]}
    needed |= {
        after for before, after in zip(carried, body.results, strict=False) if before != after
    }
    for each in reversed(body.steps):
        if not needed.isdisjoint(each.targets):
            needed |= uses(each)
    return not needed.issuperset(carried)


def _fills_for_many(block: Block) -> bool:
    """Whether an array of one number has several uses. XLA makes one for each, or none: a part of
    it is known, and writing that number into it does nothing."""
    named = [*block.results, *(name for step in block.steps for name in uses(step))]
    filled = (step.targets for step in block.steps if step.operation == "new")
    return any(named.count(name) > 1 for (name,) in filled)


def _has_known_result(program: Program) -> bool:
    """Whether a result is the same for other arguments: all that is read for it is outside of the
    arrays, say."""
    some, others = (evaluate(program.block, program.arguments(example)) for example in range(2))
    return any(a.size > 1 and np.array_equal(a, b) for a, b in zip(some, others, strict=True))


def steps(block: Block) -> Iterator[Step]:
    return (step for each in _blocks(block) for step in each.steps)


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for step in block.steps:
        for inner in step.blocks:
            yield from _blocks(inner)
