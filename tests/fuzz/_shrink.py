"""Smaller programs that still fail: steps, results, declarations and arguments are left out."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from tests.fuzz._generate import uses
from tests.fuzz._program import BLOCKS, Block, Program, Step

__all__ = ["shrink"]


def shrink(program: Program, fails: Callable[[Program], bool], attempts: int = 2000) -> Program:
    """The smallest program found for which `fails` is still true.

    `fails` has to say no to programs that make no sense: not every candidate does.
    """
    tried = itertools.count()
    improved = True
    while improved:
        improved = False
        for candidate in _candidates(program):
            if next(tried) >= attempts:
                return program
            if fails(candidate):
                program, improved = candidate, True
                break
    return program


def _candidates(program: Program) -> Iterator[Program]:
    for block in _smaller(program.block, top=True):
        yield dataclasses.replace(program, block=block)
    if program.donated:
        yield dataclasses.replace(program, donated=())
    for i in range(len(program.types)):
        block = program.block
        name = block.parameters[i]
        if any(name in uses(step) for step in block.steps) or name in block.results:
            continue
        block = dataclasses.replace(
            block, parameters=tuple(p for p in block.parameters if p != name)
        )
        donated = tuple(d - (d > i) for d in program.donated if d != i)
        types = program.types[:i] + program.types[i + 1 :]
        yield Program(block, types, donated, program.seed)


def _smaller(block: Block, *, top: bool) -> Iterator[Block]:
    for i in reversed(range(len(block.steps))):
        yield from _without(block, i, top=top)
    for i in range(len(block.orders)):
        yield dataclasses.replace(block, orders=block.orders[:i] + block.orders[i + 1 :])
    if top and len(block.results) > 1:
        for i in range(len(block.results)):
            yield dataclasses.replace(block, results=block.results[:i] + block.results[i + 1 :])
    for i, step in enumerate(block.steps):
        if step.operation == "jit":
            (inner,) = step.blocks
            names = dict(zip(inner.parameters, step.operands, strict=True))
            results = dict(zip(step.targets, inner.results, strict=True))
            steps = (*block.steps[:i], *inner.steps, *block.steps[i + 1 :])
            inlined = dataclasses.replace(block, steps=steps, orders=(*block.orders, *inner.orders))
            for old, new in [*names.items(), *results.items(), *names.items()]:
                inlined = _renamed(inlined, old, new)
            yield inlined
        if step.operation == "for" and step.static != (0, 2):
            yield _with_step(block, i, dataclasses.replace(step, static=(0, 2)))
        if step.operation in BLOCKS:
            yield from _fewer_carried(block, i)
            for j, inner in enumerate(step.blocks):
                for smaller in _smaller(inner, top=False):
                    blocks = step.blocks[:j] + (smaller,) + step.blocks[j + 1 :]
                    yield _with_step(block, i, dataclasses.replace(step, blocks=blocks))


def _with_step(block: Block, i: int, step: Step) -> Block:
    return dataclasses.replace(block, steps=block.steps[:i] + (step,) + block.steps[i + 1 :])


def _without(block: Block, i: int, *, top: bool) -> Iterator[Block]:
    """The block without a step: with an operand in its place, or without all that needs it."""
    step = block.steps[i]
    rest = dataclasses.replace(block, steps=block.steps[:i] + block.steps[i + 1 :])
    gone = {*step.targets}
    if not any(gone & uses(each) for each in rest.steps) and not gone & {*block.results}:
        yield _drop_orders(rest, gone)
        return
    if top:
        steps = []
        for each in rest.steps:
            if uses(each) & gone:
                gone |= {*each.targets}
            else:
                steps.append(each)
        results = tuple(name for name in block.results if name not in gone)
        if results:
            smaller = dataclasses.replace(block, steps=tuple(steps), results=results)
            yield _drop_orders(smaller, gone)
    for operand in step.operands:
        changed = _drop_orders(rest, {*step.targets})
        for target in step.targets:
            changed = _renamed(changed, target, operand)
        yield changed


def _fewer_carried(block: Block, i: int) -> Iterator[Block]:
    step = block.steps[i]
    if step.operation not in ("for", "while"):
        return
    first = len(step.operands) - len(step.targets)
    needed = {name for each in block.steps for name in uses(each)} | {*block.results}
    for j, target in enumerate(step.targets):
        if target in needed or len(step.targets) == 1:
            continue
        (body,) = step.blocks
        parameter = body.parameters[j + 1]
        if any(parameter in uses(each) for each in body.steps):
            continue
        smaller = dataclasses.replace(
            body,
            parameters=tuple(p for p in body.parameters if p != parameter),
            results=body.results[:j] + body.results[j + 1 :],
        )
        if parameter in smaller.results:
            continue
        operands = step.operands[: first + j] + step.operands[first + j + 1 :]
        targets = step.targets[:j] + step.targets[j + 1 :]
        new = dataclasses.replace(step, targets=targets, operands=operands, blocks=(smaller,))
        yield _drop_orders(_with_step(block, i, new), {target})


def _drop_orders(block: Block, gone: set[str]) -> Block:
    orders = [tuple(n for n in order if n not in gone) for order in block.orders]
    return dataclasses.replace(block, orders=tuple(o for o in orders if len(o) > 1))


def _renamed(block: Block, old: str, new: str) -> Block:
    def rename(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new if name == old else name for name in names)

    steps = (
        dataclasses.replace(
            step,
            operands=rename(step.operands),
            blocks=tuple(_renamed(inner, old, new) for inner in step.blocks),
        )
        for step in block.steps
    )
    return dataclasses.replace(
        block,
        steps=tuple(steps),
        results=rename(block.results),
        orders=tuple(map(rename, block.orders)),
    )
