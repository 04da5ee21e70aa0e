"""`explain`: the facts of a report, on functions whose copies and orders are known."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import Report, ScheduleError, before, explain, scheduled
from jaxsched._lines import Line, short_names
from jaxsched._verdicts import Verdict
from tests.hlo import compiled, copied_bytes, text
from tests.reported import REPORTED, I, N, X, seed, seed_scheduled

SIZE = 4 * N * N


def report(name, **options):
    fun, args = REPORTED[name]
    return explain(fun, donate_argnums=0, **options)(*args)


def numbers(lines):
    return [line.number for line in lines]


### Edges


def test_an_edge_has_its_kind_its_lines_and_its_verdict():
    [edge] = report("seed_scheduled").edges
    assert (edge.kind, edge.verdict) == ("declared", Verdict.CONTROL)
    lines = (edge.first, edge.then, edge.declared_at)
    statements = [line.statement for line in lines if line is not None]
    assert statements == ["y = x[0, 0]", "x_new = x.at[0, 0].add(1)", "before(y, x_new)"]


def test_an_inferred_edge():
    [edge] = explain(scheduled(seed), donate_argnums=0)(X).edges
    assert (edge.kind, edge.verdict, edge.declared_at) == ("inferred", Verdict.CONTROL, None)


def test_an_order_that_holds_by_data():
    @scheduled
    def push(x):
        y = x[0] * 2
        return x.at[0].set(y), y

    [edge] = explain(push, donate_argnums=0)(X).edges
    assert (edge.kind, edge.verdict) == ("data", Verdict.DATA)


def test_without_scheduled_the_order_is_lost():
    found = report("seed")
    assert [edge.verdict for edge in found.edges] == [Verdict.LOST]
    assert not found.ok


def test_a_lost_edge_of_a_scheduled_function_is_not_ok():
    found = report("seed_scheduled")
    lost = dataclasses.replace(found.edges[0], verdict=Verdict.LOST)
    assert found.ok
    assert not dataclasses.replace(found, edges=(lost,)).ok


def test_edges_in_loops_branches_and_calls():
    @jax.jit
    def pop(x, i):
        y = x[i]
        return x.at[i].set(0.0), y

    @scheduled
    def fun(x, i):
        x, y = pop(x, i)
        x, ys = lax.scan(pop, x, jnp.arange(3))
        x, z = lax.cond(i > 3, pop, lambda x, i: (x, x[0]), x, i)
        return x, y, ys, z

    found = explain(fun, donate_argnums=0)(X, I)
    held = [edge for edge in found.edges if edge.first and edge.first.statement == "y = x[i]"]
    assert held
    assert {edge.verdict for edge in held} <= {Verdict.CONTROL, Verdict.DATA}
    assert Verdict.CONTROL in {edge.verdict for edge in held}


@pytest.mark.parametrize("wrap", [jax.vmap, lambda f: jax.vmap(jax.vmap(f)), jax.jit, lambda f: f])
def test_edges_under_transformations(wrap):
    fun = wrap(scheduled(seed))
    x = jax.ShapeDtypeStruct((3, 4, 50, 50), jnp.float32)
    found = explain(jax.jit(fun, donate_argnums=0))(x)
    assert [edge.verdict for edge in found.edges] == [Verdict.CONTROL]
    assert found.ok


def test_the_gradient_of_a_scheduled_function():
    @scheduled
    def loss(x):
        y = x[0]
        x = x.at[0].set(0.0)
        return (jnp.sin(x) * y).sum()

    found = explain(jax.value_and_grad(loss))(X)
    assert found.scheduled
    assert Verdict.LOST not in {edge.verdict for edge in found.edges}


def test_sharded_arguments():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("i"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    found = explain(scheduled(lambda x: (x.at[:, 0].add(1), x[:, 0])), donate_argnums=0)(x)
    assert found.ok
    assert not found.copies


### Buffers


def test_the_life_of_a_buffer():
    [buffer] = report("seed_scheduled").buffers
    assert (buffer.name, buffer.nbytes, buffer.argument, buffer.donated) == ("x", SIZE, True, True)
    assert [line.statement for line in buffer.reads] == ["y = x[0, 0]"]
    assert [line.statement for line in buffer.writes] == ["x_new = x.at[0, 0].add(1)"]
    assert buffer.in_place
    assert buffer.born is buffer.scope is None


def test_a_copied_buffer():
    [buffer] = report("seed").buffers
    assert not buffer.in_place
    assert buffer.copied_bytes == 2 * SIZE
    [line] = buffer.reads
    assert line.statement == "y = x[0, 0]"


def test_a_buffer_in_a_loop():
    outer, inner = report("loop_scheduled").buffers
    assert outer.scope is None
    assert inner.scope is not None
    assert inner.scope.statement.startswith("return lax.fori_loop")
    assert (inner.name, inner.nbytes, inner.in_place) == ("x", SIZE, True)


def test_a_buffer_that_the_function_makes():
    @scheduled
    def fun(v):
        x = jnp.outer(v, v)
        y = x[0]
        return x.at[0].set(2.0), y

    found = explain(fun)(jax.ShapeDtypeStruct((N,), jnp.float32))
    named = {buffer.name: buffer for buffer in found.buffers}
    assert not named["x"].argument
    assert named["x"].in_place


### Copies


def test_what_a_copy_says():
    found = report("seed")
    for copy in found.copies:
        assert (copy.nbytes, copy.trip_count, copy.total_bytes) == (SIZE, 1, SIZE)
        assert (copy.buffer, copy.cause, copy.in_loop) == ("x", "reader-after-write", False)
        assert copy.write is not None
        assert copy.forced_by is not None
        assert copy.write.statement == "x_new = x.at[0, 0].add(1)"
        assert copy.forced_by.statement == "y = x[0, 0]"
        assert copy.avoidable
        assert copy.fix == "@scheduled"
    assert found.copied_bytes == 2 * SIZE
    program = compiled(seed, X, donate_argnums=0)
    assert found.copied_bytes == copied_bytes(program, np.empty((N, N), np.float32))


def test_a_copy_in_a_loop_counts_its_trips():
    for copy in report("loop").copies:
        assert (copy.in_loop, copy.trip_count, copy.total_bytes) == (True, 20, 20 * SIZE)


def test_causes_that_no_order_removes():
    two_writes, not_donated = report("kept").copies
    assert (two_writes.cause, two_writes.buffer) == ("two-writes", "x")
    assert two_writes.fix == "start the second write from the result of the first"
    assert (not_donated.cause, not_donated.buffer) == ("not-donated", "v")
    assert "donate_argnames='v'" in (not_donated.fix or "")
    assert not two_writes.avoidable
    assert not not_donated.avoidable


def test_the_fixes_remove_the_copies():
    [copy] = explain(scheduled(seed))(X).copies
    assert copy.fix == "donate it: jax.jit(..., donate_argnames='x')"
    assert explain(jax.jit(scheduled(seed), donate_argnames="x"))(X).copies == ()


def test_a_read_that_needs_the_write():
    [copy, _] = report("old_and_new").copies
    assert copy.cause == "reader-after-write"
    assert copy.reason == "its old value is read after the write"
    assert copy.forced_by is not None
    assert copy.forced_by.number == REPORTED["old_and_new"][0].__code__.co_firstlineno + 5
    assert not copy.avoidable


def test_an_old_value_that_is_returned():
    @scheduled
    def fun(x):
        return x, x.at[0].set(1.0)

    [copy] = explain(fun, donate_argnums=0)(X).copies
    assert (copy.cause, copy.reason) == ("also-returned", "the old contents are returned too")
    assert not copy.avoidable


def test_a_name_in_a_pytree():
    @scheduled
    def fun(state):
        y = state["a"][0]
        return {"a": state["a"].at[0].set(1.0), "b": state["b"]}, y

    copies = explain(fun)({"a": X, "b": X}).copies
    assert [copy.buffer for copy in copies] == ["state['a']", "state['b']"]
    assert {copy.fix for copy in copies} == {"donate it: jax.jit(..., donate_argnames='state')"}


### What scheduled would change


def test_the_comparison_with_scheduled():
    found = report("seed")
    assert found.rescheduled is not None
    assert dataclasses.astuple(found.rescheduled) == (0, 0, 0)
    assert found.temp_bytes == SIZE
    assert report("seed_scheduled").rescheduled is None
    assert report("seed", infer=False).rescheduled is None


def test_an_order_that_was_not_declared():
    found = report("half_declared")
    assert found.scheduled
    assert not found.ok
    assert found.rescheduled is not None
    assert found.rescheduled.copies == 0
    assert found.declarations == ("before(z, x_new)  # behind line 33",)


def test_declarations_can_be_pasted(tmp_path):
    source = (
        "def fun(x, i):\n    y = x[i]\n    z = x[i + 1].sum()\n"
        "    x_new = x.at[i].set(\n        0.0\n    )\n    return x_new, y, z\n"
    )
    before_it = run(source, tmp_path / "plain.py")
    found = explain(before_it, donate_argnums=0)(X, I)
    assert found.declarations == ("before((y, z), x_new)  # behind line 6",)
    head, tail = source.split("    return")
    pasted = f"{head}    {found.declarations[0]}\n    return{tail}"
    pasted = scheduled(run(pasted, tmp_path / "pasted.py"), infer=False)
    assert explain(pasted, donate_argnums=0)(X, I).copies == ()


def run(source, path):
    path.write_text(source)
    names = {"before": before}
    exec(compile(source, str(path), "exec"), names)
    return names["fun"]


def test_values_without_names_are_said_to_need_them():
    def fun(x):
        return x.at[0].set(1.0), x[0]

    def two(x):
        out = [x[0]]
        return x.at[0].set(1.0), out

    assert explain(fun, donate_argnums=0)(X).declarations == ()  # one line: nothing to order
    [line] = explain(two, donate_argnums=0)(X).declarations
    assert re.fullmatch(r"# line \d+ before line \d+: the values need names first", line)


### The function, its arguments, what is left behind


def test_the_function_is_not_run():
    ran = []

    def fun(x):
        jax.debug.callback(lambda: ran.append(1))
        return x + 1

    explain(fun)(X)
    assert not ran


def test_arrays_static_arguments_and_keywords():
    def fun(x, axis, *, scale):
        y = x.sum(axis)
        return x.at[0].set(scale), y

    found = explain(fun, donate_argnums=0, static_argnums=1)(jnp.ones((30, 30)), 0, scale=2.0)
    assert isinstance(found, Report)
    jitted = jax.jit(fun, donate_argnums=0, static_argnames="axis")
    assert explain(jitted)(jnp.ones((30, 30)), axis=0, scale=2.0).copies == found.copies
    assert found.name == "fun"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, scheduled])
def test_methods_and_partial_functions(wrap):
    class Model:
        rows = 3

        def step(self, x, i):
            y = x[i]
            return x.at[i].set(float(self.rows)), y

    assert explain(wrap(Model().step))(X, I).edges
    assert explain(wrap(functools.partial(Model().step, i=3)))(X).edges


def test_what_cannot_be_explained():
    with pytest.raises(ScheduleError, match="`explain` compiles a function, but it was given 3"):
        explain(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScheduleError) as error:
        explain(jax.jit(seed), donate_argnums=0)
    assert str(error.value) == (
        "`explain` was given a jitted function together with options of `jax.jit`.\n"
        "  where: explain(..., donate_argnums=0)\n"
        "  legal: the options of the function's own `jax.jit`, or a function that is not jitted."
    )


def test_nothing_is_left_behind():
    """What is compiled after a report is what is compiled without one."""
    fun = jax.jit(seed_scheduled, donate_argnums=0)
    alone = text(fun.lower(X).compile())
    explain(fun)(X)
    assert text(fun.lower(X).compile()) == alone
    assert "jaxsched_0_" not in text(compiled(seed_scheduled, X))


def test_the_persistent_cache_is_left_alone(tmp_path):
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    old = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()  # type: ignore # no stub names it
        compiled(scheduled(seed), X, donate_argnums=0)
        kept = sorted(tmp_path.iterdir())
        found = explain(scheduled(seed), donate_argnums=0)(X)
        assert [edge.verdict for edge in found.edges] == [Verdict.CONTROL]
        assert sorted(tmp_path.iterdir()) == kept
        assert kept
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()  # type: ignore # no stub names it


def test_one_edge_a_pair_of_lines():
    @scheduled
    def fun(x):
        ys = []
        for i in range(25):
            ys.append(x[i])
            x = x.at[i].set(jnp.sin(ys[-1]) * 2)
        return x, ys

    found = explain(fun, donate_argnums=0)(X)
    assert len(found.edges) == 1
    assert found.ok


### Lines


def test_statements_and_names(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "def f(x):\n"
        "    a, b = x[0], 'ä'; c = 1  # comment\n"
        "    d = g(\n"
        "        x,  # first\n"
        "    )\n"
        "    if (\n"
        "        d\n"
        "    ):\n"
        "        x[0] = 1\n"
        "    e: int = 3\n"
    )
    line = functools.partial(Line, str(path))
    assert (line(2).statement, line(2).names) == ("c = 1", ("c",))
    assert (line(4).statement, line(4).names, line(4).last) == ("d = g( x, # first )", ("d",), 5)
    assert line(7).statement == "if ( d ):"
    assert (line(9).statement, line(9).names) == ("x[0] = 1", ())
    assert (line(10).names, line(1).statement) == (("e",), "def f(x):")
    assert line(11).statement == ""


@pytest.mark.parametrize("source", ["%magic\nx = 1\n", "", "\0"])
def test_a_file_that_is_no_python(tmp_path, source):
    path = tmp_path / "cell.py"
    path.write_text(source)
    line = Line(str(path), 2)
    assert (line.statement, line.names, line.updated) == ("", (), None)
    assert Line("<string>", 1).statement == ""


def test_short_names_tell_files_apart():
    files = ["/a/model/step.py", "/a/test/step.py", "/a/test/run.py", "<stdin>"]
    short = short_names(Line(file, 1) for file in files)
    assert list(short.values()) == sorted(short.values(), key=list(short.values()).index)
    assert {short[file] for file in files} == {"model/step.py", "test/step.py", "run.py", "<stdin>"}
