"""Plans inside of loops, branches and nested functions: right results, and no copy of a buffer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import before, scheduled
from tests.common import assert_same, pins
from tests.hlo import compiled, copied_bytes

N = 64
X = np.random.default_rng(0).uniform(-1, 1, (N, N)).astype(np.float32)
I = 3


### Programs: each takes the buffer and a row number, and has a NumPy form with `_numpy` to its name


def read_then_branch(x, i):
    y = x[i]
    return lax.cond(i > 2, lambda x: x.at[i].set(0), lambda x: x, x), y


def read_then_branch_numpy(x, i):
    y = x[i].copy()
    x[i] = 0
    return x, y


def swap_in_branch(x, i):
    return lax.cond(i > 2, lambda x: x.at[0].set(x[i]).at[i].set(x[0]), lambda x: x, x)


def swap_in_branch_numpy(x, i):
    x[[0, i]] = x[[i, 0]]
    return x


def swap_in_other_branch(x, i):
    return lax.cond(i < 2, lambda x: x.at[0].set(x[i]).at[i].set(x[0]), lambda x: x, x)


def swap_in_other_branch_numpy(x, i):
    return x


def branches_that_read_and_write(x, i):
    def one(x):
        y = x[0]
        return x.at[0].set(1), y

    def two(x):
        y = x[1]
        return x.at[1].multiply(2), y * 3

    return lax.switch(i % 3, [one, two, lambda x: (x.at[2].set(0), x[2] + x[1])], x)


def branches_that_read_and_write_numpy(x, i):
    y = x[0].copy()
    x[0] = 1
    return x, y


def branch_that_only_reads(x, i):
    """One branch writes the buffer, the other one reads it and hands it on."""
    return lax.cond(i > 2, lambda x: (x.at[0].set(1), x[0]), lambda x: (x, x[2]), x)


def branch_that_only_reads_numpy(x, i):
    y = x[0].copy()
    x[0] = 1
    return x, y


def second_branch_only_reads(x, i):
    """The same with the branches the other way around, which is another program to XLA."""
    return lax.cond(i <= 2, lambda x: (x, x[2]), lambda x: (x.at[0].set(1), x[0]), x)


second_branch_only_reads_numpy = branch_that_only_reads_numpy


def branch_over_a_closure(x, i):
    y = x[i]

    def one():
        return x.at[i].set(x[0] + y)

    return lax.cond(i > 2, one, lambda: x), y


def branch_over_a_closure_numpy(x, i):
    y = x[i].copy()
    x[i] = x[0] + y
    return x, y


def while_with_captured_values(x, i):
    limit, scale = i + 4, jnp.tanh(x[0])

    def body(carry):
        x, k, total = carry
        y = x[k] * scale
        return x.at[k].set(total), k + 1, y

    return lax.while_loop(lambda carry: carry[1] < limit, body, (x, i, x[1]))


def while_with_captured_values_numpy(x, i):
    limit, scale, total = i + 4, np.tanh(x[0]), x[1].copy()
    while i < limit:
        y = x[i] * scale
        x[i] = total
        i, total = i + 1, y
    return x, np.int32(i), total


def while_whose_condition_reads(x, i):
    def body(carry):
        x, k = carry
        y = x[k]
        return x.at[k].set(x[k + 1]).at[k + 1].set(y), k + 1

    return lax.while_loop(lambda c: (c[0][c[1], 0] < 2) & (c[1] < 9), body, (x, i))


def while_whose_condition_reads_numpy(x, i):
    while x[i, 0] < 2 and i < 9:
        x[[i, i + 1]] = x[[i + 1, i]]
        i += 1
    return x, np.int32(i)


def scan_with_everything(x, i):
    """Constants, two carried values, scanned inputs and stacked outputs."""
    table = jnp.arange(N, dtype=jnp.float32)

    def body(carry, inputs):
        x, total = carry
        k, weight = inputs
        y = x[k]
        return (x.at[k].set(y * weight + table + total), total + y), y[:3]

    return lax.scan(body, (x, x[i]), (jnp.arange(5), jnp.linspace(0, 1, 5)))


def scan_with_everything_numpy(x, i):
    table, total, stacked = np.arange(N, dtype=np.float32), x[i].copy(), []
    for k, weight in enumerate(np.linspace(0, 1, 5, dtype=np.float32)):
        y = x[k].copy()
        x[k] = y * weight + table + total
        total = total + y
        stacked.append(y[:3])
    return (x, total), np.stack(stacked)


def reverse_scan(x, i):
    def body(x, k):
        y = x[k]
        return x.at[k].set(x[k + 1] + y), y[0]

    return lax.scan(body, x, jnp.arange(5), reverse=True)


def reverse_scan_numpy(x, i):
    firsts = np.zeros(5, np.float32)
    for k in reversed(range(5)):
        firsts[k] = x[k, 0]
        x[k] += x[k + 1]
    return x, firsts


def unrolled_scan(x, i):
    def body(x, k):
        y = x[k]
        return x.at[k].set(x[k + 1]), y

    return lax.scan(body, x, jnp.arange(6), unroll=3)


def unrolled_scan_numpy(x, i):
    old = x[:6].copy()
    x[:6] = x[1:7]
    return x, old


def three_loops(x, i):
    def outer(a, x):
        def middle(b, x):
            def inner(c, x):
                y, z = x[a], x[b + c]
                return x.at[a].set(z).at[b + c].set(y)

            return lax.fori_loop(0, 2, inner, x)

        return lax.fori_loop(0, 3, middle, x)

    return lax.fori_loop(0, i, outer, x)


def three_loops_numpy(x, i):
    for a in range(i):
        for b in range(3):
            for c in range(2):
                x[[a, b + c]] = x[[b + c, a]]
    return x


def branch_in_loop(x, i):
    def body(x, k):
        y = x[k]
        return lax.cond(y[0] > 0, lambda x: x.at[k].set(0), lambda x: x, x), y

    return lax.scan(body, x, jnp.arange(9))


def branch_in_loop_numpy(x, i):
    old = x[:9].copy()
    x[:9] = np.where(old[:, :1] > 0, 0, old)
    return x, old


def loop_in_branch(x, i):
    def swaps(x):
        return lax.fori_loop(0, 4, lambda k, x: x.at[k].set(x[k + 1]).at[k + 1].set(x[k]), x)

    return lax.cond(i > 2, swaps, lambda x: x, x)


def loop_in_branch_numpy(x, i):
    for k in range(4):
        x[[k, k + 1]] = x[[k + 1, k]]
    return x


def carry_passed_through(x, i):
    def body(carry, k):
        x, total = carry
        y = x[k]
        return (x, total + y), y[0]

    (x, total), firsts = lax.scan(body, (x, x[i]), jnp.arange(5))
    return x.at[0].set(total), firsts


def carry_passed_through_numpy(x, i):
    firsts = x[:5, 0].copy()
    x[0] = x[i] + x[:5].sum(0)
    return x, firsts


def two_buffers(x, i):
    def body(k, carry):
        a, b = carry
        row, other = a[k], b[k]
        return a.at[k].set(other), b.at[k].set(row)

    return lax.fori_loop(0, i, body, (x, x * 2))


def two_buffers_numpy(x, i):
    b = x * 2
    x[:i], b[:i] = b[:i].copy(), x[:i].copy()
    return x, b


def jit_in_loop(x, i):
    @jax.jit
    def step(x, k):
        y = x[k]
        return x.at[k].set(jnp.sin(y)), y

    def body(carry, k):
        x, total = carry
        x, y = step(x, k)
        return (x, total + y), None

    return lax.scan(body, (x, x[i]), jnp.arange(5))[0]


def jit_in_loop_numpy(x, i):
    total = x[i] + x[:5].sum(0)
    x[:5] = np.sin(x[:5])
    return x, total


def checkpoint_in_loop(x, i):
    def body(k, carry):
        @jax.checkpoint
        def inner(x, total):
            y = x[k]
            return x.at[k].set(jnp.sin(y)), total + y

        return inner(*carry)

    return lax.fori_loop(0, 5, body, (x, x[i]))


checkpoint_in_loop_numpy = jit_in_loop_numpy


def long_jit(x, i):
    """A nested function too long to be inlined without a reason, with an update as a reason."""

    @jax.jit
    def inner(x, row):
        for _ in range(30):
            row = jnp.sin(row) + 1
        return x.at[i].set(row)

    y = x[i]
    return inner(x, y), y


def long_jit_numpy(x, i):
    y = x[i].copy()
    for _ in range(30):
        x[i] = np.sin(x[i]) + 1
    return x, y


def read_in_a_long_jit(x, i):
    @jax.jit
    def inner(x):
        row = x[i]
        for _ in range(30):
            row = jnp.sin(row) + 1
        return row

    y = inner(x)
    return x.at[i].set(0), y


def read_in_a_long_jit_numpy(x, i):
    y = x[i].copy()
    for _ in range(30):
        y = np.sin(y) + 1
    x[i] = 0
    return x, y


def custom_rule_in_loop(x, i):
    @jax.custom_jvp
    def step(x, k):
        y = x[k]
        return x.at[k].set(x[k + 1]).at[k + 1].set(y)

    step.defjvp(lambda p, t: (step(*p), t[0]))
    return lax.fori_loop(0, 4, lambda k, x: step(x, k), x)


def custom_rule_in_loop_numpy(x, i):
    return loop_in_branch_numpy(x, i)


def rank_one_in_loop(x, i):
    def body(k, x):
        row, column = x[k], x[:, k]
        return x - jnp.outer(column, row) * 0.1

    return lax.fori_loop(0, 5, body, x)


def rank_one_in_loop_numpy(x, i):
    for k in range(5):
        x = x - np.outer(x[:, k], x[k]) * np.float32(0.1)
    return x


NAMES = [name.removesuffix("_numpy") for name in list(globals()) if name.endswith("_numpy")]
programs = pytest.mark.parametrize(
    ("fun", "reference"), [(globals()[n], globals()[f"{n}_numpy"]) for n in NAMES], ids=NAMES
)


@programs
def test_results_are_right_and_nothing_is_copied(fun, reference):
    expected = reference(X.copy(), I)
    assert_same(scheduled(fun)(jnp.array(X), jnp.int32(I)), expected, rtol=1e-5, atol=1e-5)
    program = compiled(scheduled(fun), X, jnp.int32(I), donate_argnums=0)
    assert copied_bytes(program, X) == 0
    assert_same(program(jnp.array(X), jnp.int32(I)), expected, rtol=1e-5, atol=1e-5)


@programs
def test_batches_of_it_are_right(fun, reference):
    x, i = np.stack([X, -X]), np.array([I, I], np.int32)
    expected = [reference(each.copy(), I) for each in x]
    stacked = jax.tree.map(lambda *each: np.stack(each), *expected)
    assert_same(jax.jit(jax.vmap(scheduled(fun)))(x, i), stacked, rtol=1e-5, atol=1e-5)


### Declarations inside of scopes


def walk(x, order, loop):
    """Swaps rows step by step, with the order of each step declared."""

    def step(k, x):
        a, b = x[k], x[k + 1]
        x_half = x.at[k].set(b)
        x_new = x_half.at[k + 1].set(a)
        order((a, b), x_half, x_new)
        return x_new

    if loop == "fori_loop":
        return lax.fori_loop(0, 4, step, x)
    if loop == "scan":
        return lax.scan(lambda x, k: (step(k, x), None), x, jnp.arange(4))[0]
    if loop == "while_loop":
        return lax.while_loop(lambda c: c[1] < 4, lambda c: (step(c[1], c[0]), c[1] + 1), (x, 0))[0]
    if loop == "cond":
        for k in range(4):
            x = lax.cond(x[0, 0] < 2, lambda x, k=k: step(k, x), lambda x: x, x)
        return x
    if loop == "switch":
        for k in range(4):
            others = [lambda x: x, lambda x, k=k: step(k, x), lambda x: x * 2]
            x = lax.switch(jnp.sign(jnp.abs(x[0, 0]) + 1).astype(int), others, x)
        return x
    if loop == "jit":
        for k in range(4):
            x = jax.jit(step)(k, x)
        return x
    if loop == "jit in jit":
        return jax.jit(lambda x: walk(x, order, "jit"))(x)
    if loop == "checkpoint":
        return lax.fori_loop(0, 4, lambda k, x: jax.checkpoint(step)(k, x), x)
    if loop == "map":
        return lax.map(lambda x: walk(x, order, "fori_loop"), x[None])[0]
    if loop == "vmap":
        return jax.vmap(lambda x: walk(x, order, "jit"), in_axes=2, out_axes=2)(x[:, :, None])[
            ..., 0
        ]
    raise AssertionError(loop)


LOOPS = "fori_loop scan while_loop cond switch jit checkpoint map vmap".split() + ["jit in jit"]


@pytest.mark.parametrize("infer", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_before_in_every_kind_of_scope(loop, infer):
    expected = X.copy()
    for k in range(4):
        expected[[k, k + 1]] = expected[[k + 1, k]]
    fun = scheduled(lambda x: walk(x, before, loop), infer=infer)
    assert pins(fun, X) > 0
    assert_same(fun(jnp.array(X)), expected)
    assert_same(jax.jit(fun)(X), expected)


@pytest.mark.parametrize("loop", ["fori_loop", "scan", "while_loop", "jit"])
def test_declared_orders_alone_save_the_copies(loop):
    fun = scheduled(lambda x: walk(x, before, loop), infer=False)
    assert copied_bytes(compiled(fun, X, donate_argnums=0), X) == 0


def test_the_last_of_many_values_waits_for_all_of_them():
    @scheduled(infer=False)
    def fun(x):
        reads = {"rows": [x[k] for k in range(5)], "sum": (x[9, 9],)}
        middle = jnp.tanh(x[7])
        x_new = x.at[:10].set(0)
        before(reads, middle, {"x": x_new})
        return x_new, reads, middle

    program = compiled(fun, X, donate_argnums=0)
    assert copied_bytes(program, X) == 0
    cleared = X.copy()
    cleared[:10] = 0
    rows = [X[k] for k in range(5)]
    expected = cleared, {"rows": rows, "sum": (X[9, 9],)}, np.tanh(X[7])
    assert_same(program(jnp.array(X)), expected)


def test_an_order_that_data_forces_may_be_declared():
    @scheduled
    def fun(x):
        y = x.sum(0)
        z = jnp.sin(y)
        x_new = x.at[0].set(z)
        before(y, z, x_new)
        before(y, x_new)
        return x_new

    expected = X.copy()
    expected[0] = np.sin(X.sum(0))
    assert_same(jax.jit(fun)(X), expected, rtol=1e-5, atol=1e-5)


def test_a_declaration_may_turn_the_source_order_around():
    @scheduled(infer=False)
    def fun(x):
        x_new = x.at[0].set(0)
        y = x[0]
        before(y, x_new)
        return x_new, y

    program = compiled(fun, X, donate_argnums=0)
    assert copied_bytes(program, X) == 0
    expected = X.copy()
    expected[0] = 0
    assert_same(program(jnp.array(X)), (expected, X[0]))


def test_values_of_a_nested_function_are_ordered_outside_of_it():
    @jax.jit
    def inner(x):
        return x[0], x.at[0].set(0)

    @scheduled(infer=False)
    def fun(x):
        y, x_new = inner(x)
        before(y, x_new)
        return x_new, y

    cleared = X.copy()
    cleared[0] = 0
    for call in jax.jit(fun), fun:
        assert_same(call(jnp.array(X)), (cleared, X[0]))


def test_a_value_from_outside_is_ordered_inside_of_a_nested_function():
    @scheduled(infer=False)
    def fun(x):
        y = x[0]

        @jax.jit
        def inner(x):
            x_new = x.at[0].set(0)
            before(y, x_new)
            return x_new

        return inner(x), y

    cleared = X.copy()
    cleared[0] = 0
    for call in jax.jit(fun), fun:
        assert_same(call(jnp.array(X)), (cleared, X[0]))


def test_one_nested_function_in_two_plans():
    """What `infer` says is no property of the nested function, which jit traces once."""

    @jax.jit
    def body(x):
        return lax.fori_loop(0, 3, lambda k, x: x.at[k].set(x[k + 1]).at[k + 1].set(x[k]), x)

    assert pins(scheduled(lambda x: body(x), infer=False), X) == 0
    assert pins(scheduled(lambda x: body(x)), X) > 0
    assert pins(scheduled(lambda x: body(x), infer=False), X) == 0


def test_a_plan_of_a_nested_function_is_made_once():
    """XLA compiles a loop once though it runs twice, if the plan of its body is one object."""

    @jax.jit
    def body(x):
        return lax.fori_loop(0, 3, lambda k, x: x.at[k].set(x[k + 1]).at[k + 1].set(x[k]), x)

    def loops(fun):
        jaxpr = jax.make_jaxpr(fun)(X)
        inner = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "scan"]
        assert len(inner) == 2
        return inner

    first, second = loops(scheduled(lambda x: body(body(x) + 1)))
    assert first is second


### Declarations whose pins once closed a cycle


def test_work_that_is_held_back_is_not_wanted_earlier_by_another_pin():
    @scheduled
    def fun(a, b):
        row = b[0]
        b_new = b.at[0, 0].add(row[0])
        product = a @ row * 0.1
        before(b_new, product)
        return b_new, product

    b_new = X.copy()
    b_new[0, 0] *= 2
    assert_same(jax.jit(fun)(X, X), (b_new, X @ X[0] * np.float32(0.1)), rtol=1e-4, atol=1e-5)


def test_a_held_buffer_may_have_been_pinned_before():
    @scheduled
    def fun(a, b):
        row = b[0]
        both = a.at[0].set(row) * 0.25 + a * 0.5
        before(row, both)
        return both, row

    written = X.copy()
    written[0] = -X[0]
    assert_same(jax.jit(fun)(X, -X), (written * 0.25 + X * 0.5, -X[0]))


def test_a_read_of_the_target_is_no_read_to_hold_back():
    @scheduled
    def fun(x):
        first, row = x[0], x[1]
        x_new = x - jnp.outer(x[:, 0], row) * 0.1
        before(first, x_new)
        return x_new, first

    expected = X - np.outer(X[:, 0], X[1]) * np.float32(0.1)
    assert_same(jax.jit(fun)(X), (expected, X[0]))
