"""Buffers and charts: the lives of a module's arrays, under the user's names."""

from collections.abc import Iterable

from jaxsched._hlo._copies import control_edges, user_source
from jaxsched._hlo._flow import RUNS
from jaxsched._hlo._text import Computation, Instruction
from jaxsched._lines import Line
from jaxsched._lives import Life, lives
from jaxsched._program import Program
from jaxsched._record import Record, tags_of
from jaxsched._report import Buffer, Chart, Row

__all__ = ["buffers_and_charts"]

_ROWS = 40  # of the largest buffers a chart shows so many


def buffers_and_charts(
    program: Program, record: Record
) -> tuple[tuple[Buffer, ...], tuple[Chart, ...]]:
    """What is overwritten or copied, the largest first; and one chart a computation."""
    found: list[Buffer] = []
    charts: list[Chart] = []
    reads = {tag: order.source for order in record.orders for tag in tags_of(order.source)}

    def lines(instruction: Instruction) -> list[Line]:
        nodes = (reads[tag] for tag in program.instances.tags(instruction) if tag in reads)
        return sorted(line for n in nodes if (line := Line.of_equation(n.payload)) is not None)

    for name, alive in lives(program.flow, lines).items():
        computation = program.flow.module[name]
        scope = _scope(program, computation)
        families: dict[Life, list[Life]] = {}
        for life in alive:
            families.setdefault(life.original, []).append(life)
        chosen = []
        for original, family in families.items():
            if len(family) > 1 or _is_written(original, scope):
                found.append(_buffer(program, family, scope))
                chosen.append(family)
        if chosen:
            charts.append(_chart(program, computation, scope, chosen))
    found.sort(key=lambda buffer: -buffer.nbytes)
    return tuple(found), tuple(charts)


def _is_written(life: Life, scope: Line | None) -> bool:
    """Whether something here writes it; inside of a call, handing it to a loop does not count."""
    return any(
        event.what == "written" and (scope is None or event.instruction.opcode not in RUNS)
        for event in life.events
    )


def _scope(program: Program, computation: Computation) -> Line | None:
    """The line of what runs a computation; None for the whole program."""
    sites = program.flow.sites[computation.name]
    if not sites:
        return None
    _, caller = sites[0]
    return Line.of_source(user_source(program.flow.module, caller))


def _buffer(program: Program, family: list[Life], scope: Line | None) -> Buffer:
    original = family[0].original
    argument = program.arguments.get(original.instruction.op_name or "")
    events = sorted(
        (event for life in family for event in life.events), key=lambda event: event.position
    )
    copies = {life.instruction for life in family if life.source is not None}
    return Buffer(
        name=_name(program, family, scope),
        nbytes=original.array.nbytes,
        argument=original.argument,
        donated=original.argument and argument is not None and argument.donated,
        born=None if original.argument else original.line,
        scope=scope,
        reads=_lines(e.line for e in events if e.what == "read" and e.instruction not in copies),
        writes=_lines(e.line for e in events if e.what == "written"),
        copied_bytes=sum(life.array.nbytes for life in family if life.source is not None),
    )


def _lines(lines: Iterable[Line | None]) -> tuple[Line, ...]:
    return tuple(dict.fromkeys(line for line in lines if line is not None))


def _name(program: Program, family: list[Life], scope: Line | None) -> str:
    """The user's name for a buffer, as far as it is known."""
    original = family[0].original
    argument = program.arguments.get(original.instruction.op_name or "")
    if argument is not None:
        return argument.name
    uses = (e.line for life in family for e in life.events if e.line is not None)
    updated = next((line.updated for line in uses if line.updated), None)
    if original.argument:
        return updated or (scope and scope.updated) or "an operand"
    assigned = original.line.names if original.line is not None else ()
    return updated or next(iter(assigned), original.instruction.name)


def _chart(
    program: Program, computation: Computation, scope: Line | None, families: list[list[Life]]
) -> Chart:
    """The largest of these lives against the instructions that have to do with them."""
    names = {life: _name(program, family, scope) for family in families for life in family}
    alive = list(names)
    shown = sorted(alive, key=lambda life: -life.array.nbytes)[:_ROWS]
    shown.sort(key=alive.index)
    edges = [
        (before, after)
        for where, before, after in control_edges(program.flow.module)
        if where is computation
    ]
    touching = {life.instruction for life in shown}
    touching |= {event.instruction for life in shown for event in life.events}
    touching |= {instruction for edge in edges for instruction in edge}
    column: dict[int, int] = {}
    instructions: list[tuple[str, Line | None]] = []
    number = {}
    for position, instruction in enumerate(computation.instructions):
        if instruction in touching:
            number[instruction] = column[position] = len(instructions)
            line = Line.of_source(user_source(program.flow.module, instruction))
            instructions.append((instruction.name, line))
    rows = [
        Row(
            name=names[life],
            nbytes=life.array.nbytes,
            start=column[life.position],
            end=column[life.end],
            copy_of=shown.index(life.source) if life.source in shown else None,
            events=tuple((column[e.position], e.what, e.line) for e in life.events),
        )
        for life in shown
    ]
    return Chart(
        scope=scope,
        instructions=tuple(instructions),
        rows=tuple(rows),
        control_edges=tuple((number[before], number[after]) for before, after in edges),
    )
