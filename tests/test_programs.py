"""The benchmark programs compute what their NumPy forms compute, in every way they are written."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import ALL, MODULES, Program, fresh, select
from benchmarks.programs.generated import nested_loops, straight_line, train_step


def params(keep=lambda program: True):
    return [pytest.param(p, id=p.name) for p in ALL.values() if keep(p)]


def assert_matches(program: Program, fun, args):
    want = program.reference(*args)
    got = jax.jit(fun, donate_argnums=program.donate)(*fresh(args))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (np.shape(w), np.asarray(w).dtype)
        np.testing.assert_allclose(g, w, rtol=program.tolerance, atol=program.tolerance)


@pytest.fixture
def program(request):
    # The tests simulate devices on CPU; where another backend is asked for there may be fewer.
    if len(jax.devices()) < request.param.devices:
        pytest.skip(f"{request.param.name} needs {request.param.devices} devices")
    return request.param


@pytest.mark.parametrize("program", params(lambda p: not p.miscompiled), indirect=True)
def test_plain_jit_agrees_with_numpy(program):
    assert_matches(program, *program.build(small=True))


@pytest.mark.parametrize("program", params(lambda p: p.miscompiled), indirect=True)
def test_eager_agrees_with_numpy_where_jit_is_wrong(program):
    with jax.disable_jit():
        assert_matches(program, *program.build(small=True))


@pytest.mark.parametrize("program", params(lambda p: p.by_hand), indirect=True)
def test_barriers_by_hand_agree_with_numpy(program):
    assert_matches(program, *program.build_barrier(small=True))


@pytest.mark.parametrize(
    "program", params(lambda p: p.ref is not None and not p.miscompiled), indirect=True
)
def test_new_ref_agrees_with_numpy(program):
    assert_matches(program, *program.build_ref(small=True))


@pytest.mark.parametrize("program", params(), indirect=True)
def test_reference_leaves_its_arguments_alone(program):
    _, args = program.build(small=True)
    kept = [np.array(leaf) for leaf in jax.tree.leaves(args)]
    program.reference(*args)
    for before, after in zip(kept, jax.tree.leaves(args), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("program", params(lambda p: p.hazard), indirect=True)
def test_declared_reads_and_writes_are_marked(program):
    declared = []
    fun, args = program.build(lambda *values: declared.append(values), small=True)
    jax.eval_shape(fun, *args)
    assert declared
    assert all(len(values) == 2 for values in declared)
    for marker in ("read", "write"):
        for path, line in program.lines(marker):
            with open(path) as source:
                assert source.readlines()[line - 1].rstrip().endswith(f"# <- {marker}")
        assert program.lines(marker)


def test_register_is_sane():
    found = [p for m in MODULES for p in vars(m).values() if isinstance(p, Program)]
    assert len(ALL) == len(found)  # no two under one name
    assert {p.source for p in found if p.category == "guard"} == {""}
    for p in found:
        assert re.fullmatch(r"([\w-]+/[\w-]+#\d+)?", p.source)
        assert p.summary.endswith(".")
        assert p.small
        assert not (p.hazard and p.category == "guard")
        assert p.lines("write") or not p.hazard


def test_select_matches_names():
    assert select() == list(ALL.values())
    assert {p.name for p in select("row_*", "sgd")} > {"sgd", "row_clear", "row_swap"}
    with pytest.raises(ValueError, match="no program matches nothing; there are: "):
        select("nothing")


@pytest.mark.parametrize("equations", [100, 1000])
def test_straight_line_has_that_many_equations(equations):
    fun, args = straight_line(equations)
    jaxpr = jax.make_jaxpr(fun)(*args)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert len(names) == equations
    assert names.count("dynamic_update_slice") == equations // 10
    assert jnp.isfinite(jax.jit(fun)(*args)).all()


def test_nested_loops_count_their_steps():
    fun, args = nested_loops(depth=3, trips=2)
    x, total = jax.jit(fun)(*args)
    assert int(x[0]) == int(args[0][0]) + 8
    assert int(total) == sum(int(args[0][0]) + k for k in range(8))


def test_train_step_learns():
    fun, (state, tokens) = train_step(layers=2)
    step = jax.jit(fun, donate_argnums=0)
    losses = []
    for _ in range(5):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
