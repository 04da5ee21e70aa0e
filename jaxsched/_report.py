"""What `explain` returns: facts about one compiled function, and their renderings."""

import dataclasses

from jaxsched import _render_data, _render_html, _render_text
from jaxsched._graph import Kind
from jaxsched._lines import Line
from jaxsched._lives import What
from jaxsched._program import Argument
from jaxsched._verdicts import Verdict

__all__ = ["Buffer", "Chart", "Copy", "Edge", "Report", "Row", "Totals"]


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """`first` has to be finished before `then`; `verdict` is what the optimized module makes of it.

    `declared_at` is the line of `before`, for a declared edge.
    """

    kind: Kind
    first: Line | None
    then: Line | None
    verdict: Verdict
    declared_at: Line | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory that is overwritten or copied, with its copies counted in.

    `born` is the line that computes it, None for an argument; `scope` the line of the loop, the
    branch or the call that it lives in, None at top level.
    """

    name: str
    nbytes: int
    argument: bool
    donated: bool
    born: Line | None
    scope: Line | None
    reads: tuple[Line, ...]
    writes: tuple[Line, ...]
    copied_bytes: int

    @property
    def in_place(self) -> bool:
        return not self.copied_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One copy in the optimized module.

    `nbytes` is what one execution copies and `trip_count` how often the program executes it, None
    where XLA does not know. `write` is the line of the write that it is made for, `forced_by` of
    what needs the old contents. `cause` is one of `reader-after-write`, `not-donated`,
    `also-returned`, `two-writes` and `compiler`; `reason` says it in a sentence, and `fix` names
    the shortest change that avoids the copy. `avoidable` is a copy that an order avoids.
    """

    nbytes: int
    trip_count: int | None
    in_loop: bool
    buffer: str
    write: Line | None
    forced_by: Line | None
    cause: str
    reason: str
    fix: str | None
    avoidable: bool

    @property
    def total_bytes(self) -> int | None:
        return None if self.trip_count is None else self.nbytes * self.trip_count


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """The bytes in copies, each copy counted once, and the temporary memory of one program."""

    copies: int
    copied_bytes: int
    temp_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A buffer in a chart: alive from instruction `start` to `end`; `copy_of` is another row.

    Each event is the number of an instruction, what that does to the buffer, and the user's line.
    """

    name: str
    nbytes: int
    start: int
    end: int
    copy_of: int | None
    events: tuple[tuple[int, What, Line | None], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """One computation: its instructions in final order (name, line) against its buffers.

    `scope` is the line of the loop, branch or call that runs it, None for the whole program;
    `control_edges` are pairs of instructions: the one in front and the one behind.
    """

    scope: Line | None
    instructions: tuple[tuple[str, Line | None], ...]
    rows: tuple[Row, ...]
    control_edges: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What became of a function's buffers in the module that XLA compiled.

    `print(report)` shows it as text, a notebook as a picture.

    Arguments:
        name: the name of the function.
        scheduled: whether the function, or one that it calls, is under `jaxsched.scheduled`.
        edges: the orders between reads and writes: those of the plan, or, for a function which is
            not scheduled, those that the plan would have. Each with both lines and a verdict.
        buffers: the memory that is overwritten or copied, each piece with its life.
        copies: the copies, the largest first, with what forces each and how to avoid it.
        temp_bytes: the temporary memory of the compiled function.
        arguments: the arrays among the arguments, and which of them are donated.
        rescheduled: copies and memory of the same function under `@scheduled`; None where it is.
        declarations: the inferred order as lines of code, for a function which is not scheduled.
        charts: the final order of instructions against the buffers.
    """

    name: str
    scheduled: bool
    edges: tuple[Edge, ...]
    buffers: tuple[Buffer, ...]
    copies: tuple[Copy, ...]
    temp_bytes: int
    arguments: tuple[Argument, ...] = ()
    rescheduled: Totals | None = None
    declarations: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()

    @property
    def copied_bytes(self) -> int:
        """The bytes of all copies, each counted once however often it runs."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def ok(self) -> bool:
        """Whether no order is lost and no copy is left that an order avoids."""
        lost = self.scheduled and any(edge.verdict is Verdict.LOST for edge in self.edges)
        return not lost and not any(copy.avoidable for copy in self.copies)

    def __str__(self) -> str:
        return _render_text.text(self)

    def __repr__(self) -> str:
        state = "ok" if self.ok else "not ok"
        return (
            f"<Report on {self.name}: {state}, {len(self.copies)} copies of"
            f" {self.copied_bytes:,} bytes, {self.temp_bytes:,} temporary bytes>"
        )

    def to_html(self) -> str:
        """A page of its own, without scripts and without anything from the network."""
        return _render_html.page(self)

    def _repr_html_(self) -> str:
        return _render_html.fragment(self)

    def to_dot(self) -> str:
        """The order as a graph in the language of Graphviz: one node a line, one edge a pair."""
        return _render_data.dot(self)

    def to_json(self) -> str:
        """The report as a JSON object."""
        return _render_data.json_text(self)


Report.__module__ = "jaxsched"
