"""Why each copy is there, in the user's terms, and the shortest change that avoids it."""

import dataclasses
from collections import Counter

from jaxsched._graph import Node
from jaxsched._hlo._copies import Cause
from jaxsched._hlo._copies import Copy as HloCopy
from jaxsched._hlo._text import Instruction
from jaxsched._lines import Line
from jaxsched._program import Program
from jaxsched._record import Record, tags_of
from jaxsched._report import Copy
from jaxsched._writes import Unavoidable

__all__ = ["explained_copies"]

_NAMES = {
    Cause.READER_AFTER_WRITE: "reader-after-write",
    Cause.NOT_DONATED: "not-donated",
    Cause.ALSO_RETURNED: "also-returned",
    Cause.TWO_WRITES: "two-writes",
    Cause.COMPILER: "compiler",
}


def explained_copies(
    program: Program, record: Record, rescheduled: Program | None, is_scheduled: bool
) -> tuple[Copy, ...]:
    """The copies of a program, the largest first.

    `rescheduled` is the same function with every order that can be inferred: a copy that is not
    there is one that an order avoids.
    """
    remedy = "infer=True, or this order declared" if is_scheduled else "@scheduled"
    plans = _Plans(program, record, remedy)
    left = Counter(map(_key, rescheduled.copies)) if rescheduled else None
    found = []
    # A copy that is in both stays in both; so those that nothing avoids are matched first.
    for copy in sorted(program.copies, key=lambda copy: copy.cause is Cause.READER_AFTER_WRITE):
        stays = False
        if left is not None:
            stays = left[_key(copy)] > 0
            left[_key(copy)] -= stays
        found.append((copy, _explained(plans, copy, gone=left is not None and not stays)))
    found.sort(key=lambda each: program.copies.index(each[0]))
    found.sort(key=lambda each: (-each[0].nbytes, -(each[0].total_bytes or 0)))
    return tuple(explained for _, explained in found)


def _key(copy: HloCopy) -> tuple[int, object]:
    return copy.nbytes, copy.source


class _Plans:
    """What the plans know about the writes that a module does."""

    def __init__(self, program: Program, record: Record, remedy: str):
        self.program = program
        self.remedy = remedy
        self._readers: dict[str, list[Node]] = {}
        self._unavoidable: dict[str, Unavoidable] = {}
        for order in record.orders:
            for tag in tags_of(order.target):
                self._readers.setdefault(tag, []).append(order.source)
        for each in record.unavoidable:
            for tag in tags_of(each.write.node):
                self._unavoidable[tag] = each

    def reader(self, copy: HloCopy) -> Line | None:
        """The line of a read that the plan puts before the write, and the module does not."""
        late = {tag for reader in copy.later_readers for tag in self._tags(reader)}
        planned = [n for tag in self._tags(copy.write) for n in self._readers.get(tag, ())]
        found = [node for node in planned if late & tags_of(node)]
        # XLA may have dropped the metadata of the read; where there is only one, it is that.
        if not found and copy.forced_at is None and len(planned) == 1:
            found = planned
        return Line.of_equation(found[0].payload) if found else None

    def unavoidable(self, copy: HloCopy) -> Unavoidable | None:
        """Why the plan leaves a copy to the write that this copy is made for."""
        known = (self._unavoidable.get(tag) for tag in sorted(self._tags(copy.write)))
        return next((each for each in known if each is not None), None)

    def _tags(self, instruction: Instruction | None) -> set[str]:
        return set() if instruction is None else self.program.instances.tags(instruction)


def _explained(plans: _Plans, copy: HloCopy, *, gone: bool) -> Copy:
    forced_by = Line.of_source(copy.forced_at)
    write = Line.of_source(copy.source)
    argument = plans.program.arguments.get(copy.buffer.op_name or "")
    buffer = _buffer(copy, argument.name if argument else None, write)
    explained = Copy(
        nbytes=copy.nbytes,
        trip_count=copy.trip_count,
        in_loop=copy.in_loop,
        buffer=buffer,
        write=write,
        forced_by=forced_by,
        cause=_NAMES[copy.cause],
        reason="XLA's own choice: nothing in the program needs the old contents",
        fix=plans.remedy if gone else None,
        avoidable=gone,
    )
    match copy.cause:
        case Cause.READER_AFTER_WRITE:
            return _read_late(plans, copy, explained)
        case Cause.NOT_DONATED:
            reason = f"the argument {buffer} is not donated, so that its contents stay the caller's"
            root = argument.root if argument else buffer
            fix = f"donate it: jax.jit(..., donate_argnames={root!r})"
            # Donation comes first: it is needed in any order.
            return dataclasses.replace(explained, reason=reason, fix=fix, avoidable=False)
        case Cause.ALSO_RETURNED:
            return _kept(explained, "the old contents are returned too", "return only what is new")
        case Cause.TWO_WRITES:
            reason = "two writes start from the same contents, and only one can be in place"
            return _kept(explained, reason, "start the second write from the result of the first")
        case Cause.COMPILER:
            return explained


def _read_late(plans: _Plans, copy: HloCopy, explained: Copy) -> Copy:
    unavoidable = None if explained.avoidable else plans.unavoidable(copy)
    if unavoidable is not None:
        late = unavoidable.reader
        forced_by = plans.reader(copy) if late is None else Line.of_equation(late.payload)
        explained = dataclasses.replace(explained, forced_by=forced_by or explained.forced_by)
        return _kept(explained, unavoidable.why, "read what is needed before the write")
    if copy.forced_by is copy.write:
        reason = "the write reads the old contents elsewhere than where it overwrites them"
    else:
        reason = "the old contents may be read after the write"
    forced_by = plans.reader(copy) or explained.forced_by
    return dataclasses.replace(explained, forced_by=forced_by, reason=reason)


def _kept(explained: Copy, reason: str, fix: str) -> Copy:
    """The copy, with a fix that changes the program unless an order is enough."""
    return dataclasses.replace(
        explained, reason=reason, fix=explained.fix if explained.avoidable else fix
    )


def _buffer(copy: HloCopy, argument: str | None, write: Line | None) -> str:
    """What the user calls the contents that are copied, as far as that is known."""
    if argument is not None:
        return argument
    if write is None:
        return "a buffer"
    return write.updated or (write.names[0] if write.names else "a buffer")
