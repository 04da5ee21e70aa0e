"""What became of an order in the optimized module: which instruction waits for which, and why."""

import enum
from collections import defaultdict
from collections.abc import Iterator

from jaxsched._graph import Node
from jaxsched._hlo._flow import RUNS, Flow
from jaxsched._hlo._text import Computation, Instruction
from jaxsched._record import Order, named, tags_in, users

__all__ = ["Instances", "Verdict", "verdict"]

# These compute nothing: the value is their operand's.
_IDLE = {
    "bitcast",
    "constant",
    "copy",
    "copy-done",
    "copy-start",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
}


class Verdict(enum.StrEnum):
    """How the optimized module keeps an order."""

    CONTROL = "held by a control edge"
    DATA = "held by data"
    KERNEL = "in one kernel"
    UNSEEN = "not seen in the module"
    LOST = "lost"


_NEAR = 16

# Of several pairs of instructions, the one that is held least decides.
_SEVERITY = [Verdict.UNSEEN, Verdict.DATA, Verdict.CONTROL, Verdict.KERNEL, Verdict.LOST]


class Instances:
    """Where a module computes the numbered equations.

    One equation may be computed by several instructions (XLA fuses a copy of it into each reader,
    a loop is unrolled), and one instruction computes many.
    """

    def __init__(self, flow: Flow):
        self.flow = flow
        self._needed: dict[Instruction, tuple[list[str], list[str]]] = {}
        self._tagged: dict[str, list[tuple[str, Computation, Instruction]]] = defaultdict(list)
        self._callers: dict[str, list[tuple[Computation, Instruction]]] = defaultdict(list)
        self._tags: dict[str, set[str]] = defaultdict(set)
        for computation in flow.module.computations.values():
            for instruction in computation.instructions:
                for name in instruction.called:
                    self._callers[name].append((computation, instruction))
                op_name = instruction.op_name or ""
                tags = tags_in(op_name)
                self._tags[computation.name].update(tags)
                # The transposed equation of a gradient is another one under the same number.
                skipped = "transpose(" in op_name or op_name.endswith("/pin")
                for tag in tags if not skipped else ():
                    self._tagged[tag].append((op_name, computation, instruction))

    def tags(self, instruction: Instruction) -> set[str]:
        """The numbers of all equations that an instruction computes, by itself or in a fusion."""
        found = set(tags_in(instruction.op_name or ""))
        if instruction.opcode == "fusion":
            found |= self._tags[self.flow.fused(instruction).name]
        return found

    def of(self, node: Node) -> dict[str, dict[str, set[Instruction]]]:
        """Context -> computation -> the instructions in it that compute the node.

        A context is one use of the node's scope. An instruction that runs a computation counts as
        computing what that one does.
        """
        found: dict[str, dict[str, set[Instruction]]] = defaultdict(lambda: defaultdict(set))
        # What else has the number only prepares the result: indices, bounds, a part of it.
        sizes = {value.nbytes for value in node.outputs}
        for own, tags in named(node):
            tagged = self._tagged.get(tags[-1], [])
            whole = [each for each in tagged if each[2].shape.nbytes in sizes]
            for op_name, computation, instruction in whole or tagged:
                context = op_name.partition(tags[0])[0].removesuffix(own)
                for where, acting in self._acting(computation, instruction):
                    found[context][where.name].add(acting)
        return found

    def _acting(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        """What computes the value of an instruction, then what runs that as a part of it."""
        seen = set()
        todo = [(computation, instruction)]
        while todo:
            where, acting = todo.pop()
            if acting in seen:
                continue
            seen.add(acting)
            runs = where.name in self.flow.sites
            if acting.opcode not in _IDLE:
                if runs:
                    yield where, acting
                todo += self._callers[where.name]
            elif acting.operands:
                todo.append((where, where[acting.operands[0]]))
            elif acting.opcode == "parameter" and not runs:
                for outer, caller in self._callers[where.name]:
                    if caller.opcode == "fusion":
                        operand = caller.operands[acting.parameter_number or 0]
                        todo.append((outer, outer[operand]))

    def waits(
        self, where: Computation, first: Instruction, then: Instruction, *, control: bool
    ) -> bool:
        """Whether `then` depends on `first`, by data or, if asked, by control edges too."""
        position = self.flow.positions(where)
        start = position[first.name]
        seen = {then.name}
        todo = [then.name]
        for name in todo:
            operands, predecessors = self._needs(where[name])
            for other in (*operands, *predecessors) if control else operands:
                if other == first.name:
                    return True
                # What an instruction needs stands in front of it.
                if other not in seen and position[other] > start:
                    seen.add(other)
                    todo.append(other)
        return False

    def _needs(self, instruction: Instruction) -> tuple[list[str], list[str]]:
        if instruction not in self._needed:
            needed = instruction.operands, instruction.control_predecessors
            self._needed[instruction] = needed
        return self._needed[instruction]


def verdict(instances: Instances, order: Order) -> Verdict:
    """What the module makes of an order."""
    found = _between(instances, order.source, order.target)
    if found is not Verdict.UNSEEN:
        return found
    # Where XLA left no trace of the source, what is computed from it comes later still.
    for later in _computed_from(order.source):
        found = _between(instances, later, order.target)
        if found in (Verdict.DATA, Verdict.CONTROL):
            return found
    return Verdict.UNSEEN


def _between(instances: Instances, source: Node, target: Node) -> Verdict:
    first, then = instances.of(source), instances.of(target)
    found = {
        each
        for context in first.keys() & then.keys()
        for each in _verdicts(instances, first[context], then[context])
    }
    return max(found, key=_SEVERITY.index, default=Verdict.UNSEEN)


def _computed_from(node: Node) -> list[Node]:
    """A few equations that need the node's results, nearest first."""
    found = [node]
    for each in found:
        if len(found) < _NEAR:
            found += (user for user in users(each) if user not in found)
    return found[1:]


def _verdicts(
    instances: Instances,
    first: dict[str, set[Instruction]],
    then: dict[str, set[Instruction]],
) -> Iterator[Verdict]:
    for name in first.keys() & then.keys():
        where = instances.flow.module[name]
        targets = _last(instances, where, then[name])
        held, turned = False, False
        for source in _last(instances, where, first[name]):
            for target in targets:
                if source is target:
                    # What a loop does inside is judged in its body.
                    if source.opcode in RUNS:
                        continue
                    yield Verdict.KERNEL
                elif instances.waits(where, source, target, control=False):
                    yield Verdict.DATA
                elif instances.waits(where, source, target, control=True):
                    yield Verdict.CONTROL
                elif instances.waits(where, target, source, control=True):
                    turned = True
                    continue
                else:
                    yield Verdict.LOST
                held = True
        # The wrong way round is right in an unrolled loop, whose next round comes later.
        if turned and not held:
            yield Verdict.LOST


def _last(instances: Instances, where: Computation, found: set[Instruction]) -> list[Instruction]:
    """Those whose results none of the others needs: they finish the equation.

    What XLA has moved out of a loop or branch only prepares it.
    """
    found = {each for each in found if each.opcode in RUNS} or found
    return [
        each
        for each in found
        if not any(
            instances.waits(where, each, other, control=False)
            for other in found
            if other is not each
        )
    ]
