"""Every benchmark program, scheduled: right results, no avoidable copy, edges held."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import ALL
from benchmarks.programs._program import fresh, undeclared
from jaxsched import before, explain, scheduled
from jaxsched._hlo._copies import control_edges
from jaxsched._hlo._text import parse
from jaxsched._verdicts import Verdict
from tests.fuzz._compiled import check_eager_order
from tests.hlo import compiled, copied_bytes, temp_bytes, text

HAZARDS = [p for p in ALL.values() if p.hazard]
_BUFFER = 1024  # bytes: copies of what is smaller are no concern
GUARDS = [p for p in ALL.values() if p.category == "guard"]


@functools.lru_cache(maxsize=2)
def built(name, way):
    """One program, its arguments and what it should compute."""
    program = ALL[name]
    function, arguments = program.build(before if way == "declared" else undeclared)
    return function, arguments, program.reference(*arguments)


@functools.cache
def run(name, way):
    """One program, compiled with its order inferred or declared, and run: its results are right."""
    program = ALL[name]
    function, arguments, expected = built(name, way)
    executable = compiled(scheduled(function), *arguments, donate_argnums=program.donate)
    results = executable(*fresh(arguments))
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(result), wanted, rtol=program.tolerance, atol=program.tolerance
        )
    size = program.buffer_bytes(arguments)
    donated = jax.tree.leaves([arguments[i] for i in program.donate])
    smallest = min((each.nbytes for each in donated if each.nbytes >= _BUFFER), default=size)
    return executable, copied_bytes(executable, smallest // program.devices), size


@pytest.mark.parametrize("way", ["inferred", "declared"])
@pytest.mark.parametrize("name", list(ALL))
def test_results_and_copies(name, way):
    _, copied, size = run(name, way)
    assert copied <= ALL[name].unavoidable * size


@pytest.mark.parametrize("name", [p.name for p in HAZARDS])
def test_an_edge_goes_from_a_read_to_the_write(name):
    executable, _, _ = run(name, "inferred")
    module = parse(text(executable))
    edges = control_edges(module)
    assert edges, "no control edge in the compiled module"
    for computation, read, write in edges:
        order = [instruction.name for instruction in computation.instructions]
        assert order.index(read.name) < order.index(write.name)


@pytest.mark.parametrize("name", [p.name for p in ALL.values() if p.ordered or p.temp_goal])
def test_a_declared_order_is_kept(name):
    executable, _, size = run(name, "declared")
    program = ALL[name]
    if program.ordered is not None:
        assert program.ordered(text(executable))
    if program.temp_goal is not None:
        assert temp_bytes(executable) <= program.temp_goal * size


# One loop copies its buffer in any order, the other the row that it hands on to its next round.
COPIED_IN_A_LOOP = {"lanes_apart", "pass_rows_on"}


@pytest.mark.parametrize("way", ["inferred", "declared"])
@pytest.mark.parametrize("name", [p.name for p in HAZARDS])
def test_orders_are_held_and_copies_have_a_reason(name, way):
    """Orders by data or by a control edge, as far as XLA left a trace of both ends. No copy that
    is left is XLA's own choice, or made for a read that is late."""
    function, arguments, _ = built(name, way)
    report = explain(scheduled(function), donate_argnums=ALL[name].donate)(*arguments)
    verdicts = {edge.verdict for edge in report.edges}
    assert verdicts
    assert verdicts <= {Verdict.CONTROL, Verdict.DATA, Verdict.UNSEEN}
    unexplained = [copy for copy in report.copies if copy.nbytes >= _BUFFER and copy.fix is None]
    assert not unexplained or name in COPIED_IN_A_LOOP


@pytest.mark.parametrize("name", [p.name for p in HAZARDS])
def test_eager_code_keeps_the_declared_order(name):
    check_eager_order(*ALL[name].build(before, small=True))


@pytest.mark.parametrize("name", [p.name for p in GUARDS])
def test_a_program_without_a_hazard_is_left_as_it_is(name):
    function, arguments = ALL[name].build(small=True)
    assert str(jax.make_jaxpr(scheduled(function))(*arguments)) == str(
        jax.make_jaxpr(function)(*arguments)
    )


def test_a_donated_train_step_copies_no_weights():
    """Plain jit copies every weight but the first: the backward pass reads them once more."""

    def loss(weights, x, y):
        for weight in weights[:-1]:
            x = jnp.maximum(x @ weight, 0)
        return jnp.square(x @ weights[-1] - y).mean()

    def step(weights, x, y):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    rng = np.random.default_rng(0)
    weights = [jnp.array(rng.normal(size=(256, 256)) / 16, jnp.float32) for _ in range(4)]
    x, y = (jnp.array(rng.normal(size=(32, 256)), jnp.float32) for _ in range(2))
    expected = step(weights, x, y)
    plain, ordered = (
        compiled(fun, weights, x, y, donate_argnums=0) for fun in (step, scheduled(step))
    )
    assert copied_bytes(ordered, weights[0].nbytes) == 0
    assert temp_bytes(ordered) <= temp_bytes(plain) + 64 * 1024
    for got, wanted in zip(
        jax.tree.leaves(ordered(fresh(weights), x, y)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_dead_read_is_no_read():
    """It would have to run after the write; XLA drops it, as it does what a gradient leaves."""

    def fun(x):
        y = x[0]
        x_new = x.at[0].set(1.0)
        jnp.sin(x * x_new.sum())
        return x_new, y

    x = jnp.full((256, 256), 2.0)
    program = compiled(scheduled(fun), x, donate_argnums=0)
    assert copied_bytes(program, x) == 0
    x_new, y = program(fresh(x))
    np.testing.assert_array_equal(x_new[:2, 0], [1, 2])
    np.testing.assert_array_equal(y, np.full(256, 2))
