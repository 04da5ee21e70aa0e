"""Lines, names and tracebacks point to the user's code, not to the transformation."""

import inspect
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import before, scheduled
from jaxsched._hlo._text import parse
from jaxsched._jax import user_line
from tests.hlo import compiled, text

X = np.arange(400, dtype=np.float32).reshape(20, 20)


def straight(x):
    y = jnp.sin(x[0])  # read
    x = x.at[0].set(2)  # write
    return x, y


def declared(x):
    y = jnp.sin(x[0])  # read
    x_new = x.at[0].set(2)  # write
    before(y, x_new)
    return x_new, y


def loop(x):
    def body(i, carry):
        x, y = carry
        y = y + jnp.sin(x[i])  # read
        x = x.at[i].set(2)  # write
        return x, y

    return lax.fori_loop(0, 3, body, (x, x[0]))


def while_loop(x):
    def body(carry):
        x, y, i = carry
        y = y + jnp.sin(x[i])  # read
        x = x.at[i].set(2)  # write
        return x, y, i + 1

    return lax.while_loop(lambda carry: carry[2] < 3, body, (x, x[0], 0))


def branch(x):
    def one(x):
        y = jnp.sin(x[0])  # read
        x = x.at[0].set(2)  # write
        return x, y

    return lax.cond(jnp.arange(3).sum() > 0, one, lambda x: (x, jnp.zeros(20)), x)


@jax.jit
def inner(x):
    y = jnp.sin(x[0])  # read
    x = x.at[0].set(2)  # write
    return x, y


def nested(x):
    x, y = inner(x)
    return x, y


def nested_twice(x):
    return jax.jit(lambda x: inner(x))(x)


PROGRAMS = [straight, declared, loop, while_loop, branch, nested, nested_twice]
programs = pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)


def line_of(fun, mark):
    """The number of the line of a program, or of the function that it calls, with this mark."""
    fun = inspect.unwrap(inner if fun in (nested, nested_twice) else fun)
    lines, start = inspect.getsourcelines(fun)
    [offset] = [i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return start + offset


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda each: hasattr(each, "eqns")
        ):
            if hasattr(value, "eqns"):
                yield from equations(value)


def lines(fun, primitive):
    """Where the equations with this primitive stand."""
    jaxpr = jax.make_jaxpr(fun)(X)
    return [user_line(e.source_info) for e in equations(jaxpr) if e.primitive.name == primitive]


@programs
@pytest.mark.parametrize(("primitive", "mark"), [("sin", "read"), ("scatter", "write")])
def test_equations_keep_their_lines(fun, primitive, mark):
    found = lines(scheduled(fun), primitive)
    assert found
    for place in found:
        assert place.startswith(f"{__file__}:{line_of(fun, mark)}:")


@programs
def test_a_pin_stands_at_the_line_of_its_write(fun):
    found = lines(scheduled(fun), "pin")
    assert found
    for place in found:
        assert place.startswith(f"{__file__}:{line_of(fun, 'write')}:")


@programs
def test_no_line_points_into_the_package(fun):
    package = inspect.getfile(scheduled).rpartition("/")[0]
    for eqn in equations(jax.make_jaxpr(scheduled(fun))(X)):
        assert package not in user_line(eqn.source_info)


@programs
def test_the_compiled_program_names_the_lines_of_the_user(fun):
    program = compiled(scheduled(fun), X, donate_argnums=0)
    module = parse(text(program))
    places = set()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            source = module.source(instruction)
            if source is not None:
                assert source.file == __file__
                places.add(source.line)
    assert {line_of(fun, "read"), line_of(fun, "write")} <= places


def stacks(fun):
    lowered = jax.jit(fun).lower(X).as_text(debug_info=True)
    names = re.findall(r'loc\("([^"]*)"\(', lowered)
    return {name for name in names if not name.endswith(("/pin", "/jit"))}


def test_named_scopes_are_kept():
    def fun(x):
        with jax.named_scope("outer"):
            y = jnp.sin(x[0])
            with jax.named_scope("inner"):
                x = x.at[0].set(2)
        return x, y

    names = stacks(scheduled(fun))
    assert {"jit(fun)/outer/sin", "jit(fun)/outer/inner/scatter"} <= names
    assert names == stacks(fun)


def test_named_scopes_in_loops_are_kept():
    def fun(x):
        def body(i, carry):
            x, y = carry
            with jax.named_scope("read"):
                y = y + x[i]
            with jax.named_scope("write"):
                x = x.at[i].set(2)
            return x, y

        with jax.named_scope("loop"):
            return lax.fori_loop(0, 3, body, (x, x[0]))

    names = stacks(scheduled(fun))
    assert any(name.endswith("read/dynamic_slice") for name in names)
    assert names == stacks(fun)


def test_an_inlined_function_keeps_its_name():
    def fun(x):
        with jax.named_scope("outer"):
            return inner(x)

    assert "jit(fun)/outer/jit(inner)/scatter" in stacks(scheduled(fun))


def test_derivatives_keep_their_names():
    def loss(fun):
        def loss(x):
            x, y = fun(x)
            return (x.sum() + y.sum()) ** 2

        return jax.grad(loss)

    names = stacks(loss(scheduled(straight)))
    assert any("transpose(jvp())" in name and name.endswith("mul") for name in names)
    assert {name for name in stacks(loss(straight)) if "jvp" in name} <= names


### Tracebacks


class Mine(Exception):
    pass


def fails(x):
    y = x + 1
    if y.ndim == 2:
        raise Mine("two dimensions")  # raised
    return y


@pytest.mark.parametrize(
    "call",
    [
        scheduled(fails),
        jax.jit(scheduled(fails)),
        scheduled(jax.jit(fails)),
        jax.grad(lambda x: scheduled(fails)(x).sum()),
        scheduled(lambda x: lax.fori_loop(0, 2, lambda _, x: fails(x), x)),
    ],
    ids=["eager", "jit", "of jit", "grad", "loop"],
)
def test_an_exception_passes_with_the_line_that_raised_it(call):
    with pytest.raises(Mine) as raised:
        call(jnp.array(X))
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    [line] = [
        number
        for number, line in enumerate(inspect.getsource(fails).splitlines(), 1)
        if line.endswith("# raised")
    ]
    expected = inspect.getsourcelines(fails)[1] + line - 1
    assert (last.filename, last.lineno, last.name) == (__file__, expected, "fails")


@pytest.fixture
def filtered_tracebacks():
    mode = jax.config.jax_traceback_filtering  # pyright: ignore
    jax.config.update("jax_traceback_filtering", "remove_frames")
    yield
    jax.config.update("jax_traceback_filtering", mode)


def test_filtered_tracebacks_show_no_frame_of_the_package(filtered_tracebacks):
    package = inspect.getfile(scheduled).rpartition("/")[0]
    with pytest.raises(Mine) as raised:
        jax.jit(scheduled(fails))(jnp.array(X))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert not any(frame.filename.startswith(package) for frame in frames)


def test_an_error_of_before_ends_in_the_line_that_called_it():
    def fun(x):
        y = x + 1
        before(y)  # called
        return y

    with pytest.raises(ValueError, match="two or more values") as raised:
        jax.jit(scheduled(fun))(jnp.array(X))
    users = [f for f in traceback.extract_tb(raised.value.__traceback__) if f.filename == __file__]
    assert users[-1].line == "before(y)  # called"
