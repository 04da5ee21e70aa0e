"""What `explain` says of every benchmark program: the lines that force copies, and the orders."""

import pytest

from benchmarks.programs import ALL
from jaxsched import explain, scheduled
from jaxsched._verdicts import Verdict

HAZARDS = [p.name for p in ALL.values() if p.hazard]

# Where a marked line does not force the copy: what does.
OTHERWISE = {
    "lanes_apart": {"return lax.while_loop(lambda c: c[0] < stop, body, (start, x))[1]"},
    "overwrite_gradient": {"x, ys = lax.scan(body, x, indices)"},
    "pivoted_lu": {"new = reduced.at[:, k].set(jnp.where(place > k, factors, column))"},
}

# XLA drops a read that nothing uses, and does another in a way that leaves no trace of it.
UNSEEN = {"masked_trace", "overwrite_gradient", "pair_counts"}


def explained(program, wrap=lambda fun: fun):
    fun, args = program.build()
    found = explain(wrap(fun), donate_argnums=program.donate)(*args)
    size = program.buffer_bytes(args)
    return found, [copy for copy in found.copies if copy.nbytes >= size // 2]


@pytest.mark.parametrize("name", HAZARDS)
def test_each_copy_of_a_plain_program_names_the_line_that_forces_it(name):
    program = ALL[name]
    found, large = explained(program)
    marked = program.lines("read") + program.lines("write")
    assert len(marked) > 1
    for copy in large:
        line = copy.forced_by
        assert line is not None
        assert (line.file, line.number) in marked or line.statement in OTHERWISE[name]
    assert sum(not copy.avoidable for copy in large) == program.unavoidable
    assert found.ok == (not any(copy.avoidable for copy in found.copies))


@pytest.mark.parametrize("name", HAZARDS)
def test_a_scheduled_program_has_no_avoidable_copy_and_no_lost_edge(name):
    program = ALL[name]
    found, large = explained(program, scheduled)
    assert found.ok
    assert len(large) == program.unavoidable
    verdicts = {edge.verdict for edge in found.edges}
    assert verdicts
    held = {Verdict.CONTROL, Verdict.DATA}
    assert verdicts <= (held | {Verdict.UNSEEN} if name in UNSEEN else held)
