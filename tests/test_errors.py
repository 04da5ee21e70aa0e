"""Every illegal use of the API says what is wrong, where, and what would be legal."""

import inspect
import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxsched
from jaxsched import CycleError, ScheduleError, before, scheduled
from jaxsched._jax import check_version

X = np.arange(12, dtype=np.float32).reshape(3, 4)
HERE = __file__


def line_of(fun, text):
    """The line number of the line of `fun` that holds `text`."""
    lines, start = inspect.getsourcelines(fun)
    [offset] = [i for i, line in enumerate(lines) if text in line]
    return start + offset


def place(fun, text):
    """How an error points to that line of `fun`."""
    return rf"{re.escape(HERE)}:{line_of(fun, text)}\b"


class Raises:
    """Checks an error of ours: its type, and its three parts, each against a pattern."""

    def __init__(self, wrong, where, legal, kind=ScheduleError):
        self.patterns = {"wrong": wrong, "where": where, "legal": legal}
        self.kind = kind

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        assert kind is self.kind, f"{kind} instead of {self.kind}: {error}"
        assert (kind.__module__, issubclass(kind, ValueError)) == ("jaxsched", True)
        parts = re.fullmatch(
            r"(?P<wrong>.*)\n  where: (?P<where>.*)\n  legal: (?P<legal>.*)", str(error), re.DOTALL
        )
        assert parts is not None, error
        for part, pattern in self.patterns.items():
            assert re.search(pattern, parts[part], re.DOTALL), f"{part}: {parts[part]}"
        return True


@pytest.fixture(params=["eager", "jit"])
def call(request):
    """Calls a scheduled function on X in one of the two ways, with the given options."""

    def call(fun, **options):
        fun = scheduled(fun, **options)
        return (jax.jit(fun) if request.param == "jit" else fun)(jnp.array(X))

    return call


def test_the_public_errors_are_of_the_package():
    assert issubclass(CycleError, ScheduleError)
    assert issubclass(ScheduleError, ValueError)
    assert {ScheduleError.__module__, CycleError.__module__} == {"jaxsched"}
    assert jaxsched.ScheduleError.__qualname__ == "ScheduleError"


### `before` where nothing is scheduled

OUTSIDE = ("`before` was called outside of a scheduled function", "jaxsched.scheduled")


def test_before_outside_of_a_scheduled_function():
    def use(x):
        y = x[0]
        z = x + 1
        before(y, z)  # here

    with Raises(OUTSIDE[0], place(use, "# here"), OUTSIDE[1]):
        use(jnp.array(X))


def test_before_in_a_jitted_function_that_is_not_scheduled():
    @jax.jit
    def use(x):
        y = x[0]
        z = x + 1
        before(y, z)  # here
        return y

    with Raises(OUTSIDE[0], place(use, "# here"), OUTSIDE[1]):
        use(jnp.array(X))


def test_before_after_the_scheduled_function_is_over():
    kept = []

    @scheduled
    def fun(x):
        return x + 1

    def use(x):
        kept.append(fun(x))
        before(kept[0], kept[0] * 2)  # here

    with Raises(OUTSIDE[0], place(use, "# here"), OUTSIDE[1]):
        use(jnp.array(X))


def test_before_after_a_scheduled_function_failed():
    @scheduled
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails(jnp.array(X))
    with Raises(OUTSIDE[0], re.escape(HERE), OUTSIDE[1]):
        before(jnp.array(X), jnp.array(X))


@pytest.mark.parametrize("first", ["eager", "jit"])
def test_a_jitted_function_with_before_is_used_outside_once_it_was_scheduled(first):
    @jax.jit
    def push(x):
        y = x[0]
        x_new = x.at[0].set(1)
        before(y, x_new)
        return x_new, y

    fun = scheduled(push) if first == "eager" else jax.jit(scheduled(push))
    fun(jnp.array(X))
    with Raises(OUTSIDE[0], ".", OUTSIDE[1]):
        push(jnp.array(X))
    with Raises(OUTSIDE[0], ".", OUTSIDE[1]):
        jax.jit(lambda x: push(x)[0])(jnp.array(X))


def test_a_jitted_function_with_before_is_scheduled_once_it_failed_outside():
    @jax.jit
    def push(x):
        y = x[0]
        x_new = x.at[0].set(1)
        before(y, x_new)
        return x_new, y

    with Raises(OUTSIDE[0], ".", OUTSIDE[1]):
        push(jnp.array(X))
    assert "pin" in str(jax.make_jaxpr(scheduled(push, infer=False))(jnp.array(X)))


### What cannot be ordered

NOT_COMPUTED = r"no equation of the scheduled function computes"
COMPUTED = r"values (that the scheduled function computes itself|computed from the arguments)"


def test_an_argument_is_named(call):
    def fun(buffer):
        y = buffer + 1
        before(buffer, y)  # here
        return y

    with Raises(rf"the argument `buffer`.*{NOT_COMPUTED}", place(fun, "# here"), COMPUTED):
        call(fun)


def test_an_argument_within_a_pytree_is_named():
    @scheduled
    def fun(state, *, scale):
        y = state["x"] + scale
        before(state["x"], y)  # here
        return y

    with Raises(r"the argument `state\['x'\]`", place(fun, "# here"), COMPUTED):
        fun({"x": jnp.array(X), "n": 3}, scale=2.0)


def test_an_argument_behind_static_ones_is_named():
    @scheduled
    def fun(mode, x, scale):
        y = x * scale if mode == "scale" else x
        before(y, x)
        return y

    with Raises("the argument `x`", ".", COMPUTED):
        fun("scale", jnp.array(X), 2)


def test_a_view_of_an_argument_is_the_argument(call):
    def fun(x):
        y = x + 1
        before(x.reshape(4, 3), y)  # here
        return y

    with Raises("the argument `x`", place(fun, "# here"), COMPUTED):
        call(fun)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, "int"), (2.5, "float"), (True, "bool"), ("text", "str"), (object(), "object")],
    ids=["int", "float", "bool", "str", "object"],
)
def test_what_is_not_an_array(call, value, kind):
    def fun(x):
        y = x + 1
        before(value, y)  # here
        return y

    with Raises(rf"value 0: it is not an array \({kind}\)", place(fun, "# here"), COMPUTED):
        call(fun)


@pytest.mark.parametrize(
    "value", [np.ones(3), np.float32(1), jnp.ones(3)], ids=["ndarray", "numpy scalar", "jax array"]
)
def test_a_constant_array_from_outside(call, value):
    def fun(x):
        y = x + 1
        before(y, value)  # here
        return y

    with Raises(r"is a constant", place(fun, "# here"), COMPUTED):
        call(fun)


def test_a_constant_that_is_made_inside(call):
    def fun(x):
        y = x + 1
        before(jnp.zeros(3), y)  # here
        return y

    with Raises(r"is a constant", place(fun, "# here"), COMPUTED):
        call(fun)


@pytest.mark.parametrize("value", [None, [], (), {"a": None}], ids=repr)
def test_a_pytree_without_arrays(call, value):
    def fun(x):
        y = x + 1
        before(y, value)  # here
        return y

    with Raises(
        rf"value 1: {re.escape(repr(value))} holds no array", place(fun, "# here"), "pytrees"
    ):
        call(fun)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_values(call, count):
    def fun(x):
        y = x + 1
        before(*[y][:count])  # here
        return y

    with Raises(
        f"two or more values, but it was given {count}", place(fun, "# here"), r"before\(read"
    ):
        call(fun)


### Values of different scopes

SAME_SCOPE = "all in the same scope|that scope"


@pytest.mark.parametrize("loop", ["fori", "scan", "while"])
def test_a_value_from_outside_of_a_loop(call, loop):
    def fun(x):
        y = x[0].sum()

        def body(x):
            x_new = x.at[0].set(0)
            before(y, x_new)  # here
            return x_new

        if loop == "fori":
            return lax.fori_loop(0, 2, lambda i, x: body(x), x)
        if loop == "scan":
            return lax.scan(lambda x, _: (body(x), None), x, length=2)
        return lax.while_loop(lambda c: c[1] < 2, lambda c: (body(c[0]), c[1] + 1), (x, 0))

    name = "while body" if loop == "while" else "scan body"
    with Raises(f"comes into the {name} from outside", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_value_from_outside_in_the_condition_of_a_loop(call):
    def fun(x):
        y = x[0].sum()

        def go_on(carry):
            below = carry[1] < 2
            before(y, below)  # here
            return below

        return lax.while_loop(go_on, lambda c: (c[0] + y, c[1] + 1), (x, 0))

    with Raises("into the while condition from outside", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_carried_value_is_no_value_of_the_body(call):
    def fun(x):
        def body(i, x):
            y = x + 1
            before(x, y)  # here
            return y

        return lax.fori_loop(0, 2, body, x)

    with Raises("comes into the scan body", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_value_from_inside_of_a_loop(call):
    def fun(x):
        inside = []

        def body(i, x):
            inside.append(x.at[0].set(0))
            return inside[-1]

        x = lax.fori_loop(0, 2, body, x)
        before(inside[-1], x)  # here
        return x

    with Raises("of another scope", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_values_of_two_branches(call):
    def fun(x):
        taken = []

        def one(x):
            taken.append(x + 1)
            return taken[0]

        def other(x):
            y = x + 2
            before(taken[0], y)  # here
            return y

        return lax.cond(x[0, 0] > 0, one, other, x)

    with Raises("comes into the branch from outside", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_value_from_outside_of_a_branch(call):
    def fun(x):
        y = x[0].sum()

        def one(x):
            x_new = x.at[0].set(0)
            before(y, x_new)  # here
            return x_new

        return lax.cond(y > 0, one, lambda x: x, x)

    with Raises("comes into the branch from outside", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_value_from_outside_of_a_checkpoint(call):
    def fun(x):
        y = x[0].sum()

        def inner(x):
            x_new = x.at[0].set(0)
            before(y, x_new)  # here
            return x_new

        return jax.checkpoint(inner)(x)

    with Raises("from outside", place(fun, "# here"), SAME_SCOPE):
        call(fun)


@pytest.mark.parametrize("transform", [jax.vmap, jax.jacfwd, jax.jacrev], ids=lambda t: t.__name__)
def test_a_value_from_inside_of_a_transformed_function(call, transform):
    def fun(x):
        inside = []

        def inner(row):
            inside.append(row * 2)
            return inside[-1]

        y = transform(inner)(x[0])
        before(inside[-1], y)  # here
        return y

    with Raises("of another scope", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_value_of_a_call_that_is_over(call):
    kept = []

    def first(x):
        kept.append(x + 1)
        return kept[0]

    def fun(x):
        y = x * 2
        before(kept[0], y)  # here
        return y

    call(first)
    with Raises("of another scope", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_value_of_the_enclosing_scheduled_function(call):
    def fun(x):
        y = x + 1

        @scheduled
        def inner(x):
            z = x * 2
            before(y, z)  # here
            return z

        return inner(x) + y

    with Raises("of another scope", place(fun, "# here"), SAME_SCOPE):
        call(fun)


def test_a_value_of_a_function_around_the_scheduled_one():
    @jax.jit
    def fun(x):
        y = x + 1

        @scheduled
        def inner(x):
            z = x * 2
            before(y, z)  # here
            return z

        return inner(x) + y

    with Raises("of another scope", place(fun, "# here"), SAME_SCOPE):
        fun(jnp.array(X))


def test_a_batched_value_of_the_enclosing_vmap():
    @scheduled
    def fun(x):
        y = x.sum(1)

        def inner(row):
            z = row * 2
            before(y, z)  # legal: vmap is no scope of its own
            return z

        return jax.vmap(inner)(x), y

    z, y = jax.jit(fun)(X)
    np.testing.assert_array_equal(z, X * 2)
    np.testing.assert_array_equal(y, X.sum(1))


### Cycles

LEGAL_CYCLE = "drop this declaration or one of the other declared steps"


def cycle(fun, steps):
    """The pattern for a cycle through these (line, primitive, kind) steps, in this order."""
    described = [(place(fun, mark), primitive, kind) for mark, primitive, kind in steps]
    described.append(described[0])
    return r".*?\n.*?".join(
        rf"`{primitive}` \({line}[^\n]*\) before `{after}` \({behind}[^\n]*\): {kind}"
        for (line, primitive, kind), (behind, after, _) in itertools.pairwise(described)
    )


def test_an_order_against_the_data_shows_the_whole_cycle(call):
    def fun(x):
        y = x + 1  # add
        z = jnp.sin(y)  # sin
        w = z * 2  # mul
        before(w, y)  # here
        return w

    steps = [
        ("# mul", "mul", f"declared at {place(fun, '# here')}"),
        ("# add", "add", "data"),
        ("# sin", "sin", "data"),
    ]
    where = f"{place(fun, '# here')}.*{cycle(fun, steps)}"
    with Raises("contradicts an order that holds already", where, LEGAL_CYCLE, CycleError):
        call(fun)


def test_two_declarations_against_each_other(call):
    def fun(x):
        y = x + 1  # first
        z = x * 2  # second
        before(y, z)  # here
        before(z, y)  # there
        return y, z

    steps = [
        ("# second", "mul", f"declared at {place(fun, '# there')}"),
        ("# first", "add", f"declared at {place(fun, '# here')}"),
    ]
    where = f"{place(fun, '# there')}.*{cycle(fun, steps)}"
    with Raises("contradicts an order that holds already", where, LEGAL_CYCLE, CycleError):
        call(fun)


def test_declarations_and_data_against_each_other(call):
    def fun(x):
        a = x + 1  # a
        b = a * 2  # b
        c = x - 3  # c
        d = jnp.cos(c)  # d
        before(b, c)  # here
        before(d, a)  # there
        return b, d

    steps = [
        ("# d", "cos", f"declared at {place(fun, '# there')}"),
        ("# a", "add", "data"),
        ("# b", "mul", f"declared at {place(fun, '# here')}"),
        ("# c", "sub", "data"),
    ]
    where = f"{place(fun, '# there')}.*{cycle(fun, steps)}"
    with Raises("contradicts an order that holds already", where, LEGAL_CYCLE, CycleError):
        call(fun)


def test_a_cycle_within_one_declaration(call):
    def fun(x):
        y = x + 1
        z = x * 2
        before(y, z, y)  # here
        return y, z

    with Raises("contradicts", place(fun, "# here"), LEGAL_CYCLE, CycleError):
        call(fun)


def test_a_cycle_in_a_loop_body(call):
    def fun(x):
        def body(i, x):
            y = x + 1
            z = y * 2
            before(z, y)  # here
            return z

        return lax.fori_loop(0, 2, body, x)

    with Raises("contradicts", place(fun, "# here"), LEGAL_CYCLE, CycleError):
        call(fun)


def test_a_cycle_through_a_nested_jitted_function(call):
    def fun(x):
        y = x + 1
        z = jax.jit(lambda y: jnp.sin(y) * 2)(y)
        before(z, y)  # here
        return z

    with Raises("contradicts", place(fun, "# here"), LEGAL_CYCLE, CycleError):
        call(fun)


def test_the_same_value_twice(call):
    def fun(x):
        y = x + 1  # computed
        before(y, y)  # here
        return y

    where = f"{place(fun, '# here')}.*`add` .*{place(fun, '# computed')}"
    with Raises("given one value twice", where, "compute", CycleError):
        call(fun)


def test_a_value_and_its_view(call):
    def fun(x):
        y = x + 1
        before(y, y.reshape(4, 3))  # here
        return y

    with Raises("that one equation computes together", place(fun, "# here"), "compute", CycleError):
        call(fun)


def test_two_results_of_one_equation(call):
    def fun(x):
        values, indices = lax.top_k(x, 2)  # computed
        before(values, indices)  # here
        return values, indices

    where = f"{place(fun, '# here')}.*`top_k` .*{place(fun, '# computed')}"
    with Raises("or two that one equation computes together", where, "compute", CycleError):
        call(fun)


def test_two_results_of_one_loop(call):
    def fun(x):
        x, y = lax.scan(lambda x, i: (x + 1, x[i]), x, jnp.arange(3))
        before(y, x)  # here
        return x, y

    with Raises("one equation computes together", place(fun, "# here"), "compute", CycleError):
        call(fun)


### Scopes that have no order


def test_before_inside_of_a_primitive_that_is_not_looked_into(call):
    def fun(x):
        def solve(matvec, b):
            y = b + 1
            z = b * 2
            before(y, z)
            return y + z

        return lax.custom_linear_solve(lambda v: v * 3, x, solve)

    with Raises("no meaning inside of `", re.escape(HERE), "outside of it"):
        call(fun)


def test_before_inside_of_a_custom_vmap(call):
    """JAX keeps no line of the call itself."""

    def fun(x):
        y = x[0] + 1
        z = x * 2
        before(y, z)  # here
        return z

    batched = jax.custom_batching.custom_vmap(fun)
    batched.def_vmap(lambda size, axes, x: (x, *axes))
    with Raises("inside of `custom_vmap_call`", place(fun, "# here"), "outside of it"):
        call(batched)


### `scheduled`


@pytest.mark.parametrize("fun", [3, "f", np.ones(3), [len]], ids=["int", "str", "array", "list"])
def test_scheduled_of_what_is_no_function(fun):
    with Raises(r"transforms a function, but it was given", r"scheduled\(fun\)", "@scheduled"):
        scheduled(fun)


@pytest.mark.parametrize("infer", [1, 0, None, "yes", np.True_], ids=repr)
def test_infer_is_true_or_false(infer):
    with Raises(rf"it is {re.escape(repr(infer))}", "infer=", "infer=True .* infer=False"):
        scheduled(lambda x: x, infer=infer)


def test_an_unknown_option_is_no_argument():
    with pytest.raises(TypeError, match="unexpected keyword argument 'order'"):
        scheduled(order=True)  # pyright: ignore


### Versions


def test_a_jax_that_is_too_old_does_not_import():
    with pytest.raises(ImportError) as raised:
        check_version("0.10.2")
    wrong, where, legal = str(raised.value).split("\n")
    assert "jax >= 0.11.1" in wrong
    assert "0.10.2" in wrong
    assert where == "  where: import jaxsched"
    assert "pip install" in legal
    assert "0.11.1" in legal


@pytest.mark.parametrize("version", ["0.9.9", "0.11.0", "0.10.2.dev20250101", "0.11"])
def test_versions_before_the_first_supported_one(version):
    with pytest.raises(ImportError):
        check_version(version)


@pytest.mark.parametrize("version", ["0.11.1", "0.12.0.1", "0.12.1rc1", "1.0", "0.13.0.dev1"])
def test_supported_versions(version):
    check_version(version)


def test_the_version_is_checked_on_import():
    code = (
        "import jax; jax.__version__ = '0.10.2'\n"
        "try: import jaxsched\n"
        "except ImportError as error: assert 'jax 0.10.2 is installed' in str(error)\n"
        "else: raise SystemExit('imported')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


### Errors of the user's own


def test_an_error_while_tracing_names_the_function_and_the_argument(call):
    def halve(buffer):
        return buffer / int(buffer[0, 0])

    with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
        call(halve)
    assert f"halve at {HERE}" in str(raised.value)
    assert "depends on the value of the argument buffer" in str(raised.value)


def test_an_error_names_arguments_behind_those_that_are_not_traced():
    @scheduled
    def halve(mode, buffer, scale):
        return buffer / int(buffer[0, 0]) if mode == "half" else scale

    with pytest.raises(jax.errors.ConcretizationTypeError, match="of the argument buffer"):
        halve("half", jnp.array(X), 2.0)


def test_a_wrong_number_of_arguments_is_pythons_error():
    @scheduled
    def add(x, y):
        return x + y

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        add(jnp.array(X))  # pyright: ignore


def test_a_result_that_is_no_array():
    @scheduled
    def name(x):
        return "x"

    with pytest.raises(TypeError, match=r"name at .* returned a value of type <class 'str'>"):
        name(jnp.array(X))
