"""Faults that random programs found, each with the smallest program that shows it."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsched import ScheduleError, before, explain, scheduled
from jaxsched._plan import Options, plan
from tests.common import assert_same, undeclared
from tests.fuzz._check import trace
from tests.fuzz._inplace import Machine
from tests.hlo import compiled, copied_bytes


def assert_right_in_place(fun, *args, undeclared=None):
    """The plan of `fun` gives the results of `fun` where each update in place overwrites memory;
    those are told by `undeclared`, the same function, where `fun` declares an order."""
    wanted = [np.asarray(each) for each in (undeclared or fun)(*args)]
    planned = plan(trace(fun, args), Options(), compiled=True)
    contested = 0
    for run in range(6):
        machine = Machine({}, random.Random(run), fused=run % 2 == 0)
        given = machine.run(planned, [np.array(each) for each in args])
        contested += machine.contested
        assert_same(list(map(np.asarray, given)), wanted)
    assert contested


def moved(x, i):
    return x, x.at[6:].set(x[5:11])


def moved_twice(x, i):
    return x.at[1:7].set(x[:6]), x.at[6:].set(x[5:11])


def turned(x, i):
    return x, x.at[i].set(x[3, ::-1])


def spread(x, i):
    return x, x.at[i].set(x[3, 0] + 1)


def crossed(x, i):
    return x, x.at[i].set(x[:, 4] + 1)


def selected(x, i):
    return (jnp.where(i < 9, x.at[6:].set(x[5:11]), x),)


@pytest.mark.parametrize("fun", [moved, moved_twice, turned, spread, crossed, selected])
def test_a_window_that_is_moved_inside_of_an_array_which_is_kept(fun):
    """XLA copies the array and fuses read and write over the copy (openxla/xla#49176)."""

    def gathered(table, i):
        return fun(table[np.arange(12) * 2 % 11], i)

    table, i = np.arange(144, dtype=np.float32).reshape(12, 12), np.int32(3)
    program = compiled(scheduled(gathered), table, i)
    wanted = [np.asarray(each) for each in gathered(jnp.array(table), i)]
    for result, expected in zip(program(table, i), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_cheap_read_and_a_dear_one_of_two_buffers_of_a_loop():
    """Together they cost more to keep than the copies would; the cheap one alone does not."""

    def fun(k):
        x = jnp.full((10, 12), 1, jnp.int32)
        low = x.at[:, -10].min(-1, mode="clip")
        row = low[2]
        new = low.at[9].set(row)

        def body(carry):
            i, _, _ = carry
            added = lax.fori_loop(0, 2, lambda _, p: p.at[-1].add(row), low)
            return i + 1, added, added

        start = jnp.int32(0), x, new
        _, first, second = lax.while_loop(lambda carry: carry[0] <= k % 3, body, start)
        return jnp.max(new, 1), first, second

    assert_right_in_place(fun, np.int32(0))


def test_an_order_through_a_value_that_leads_to_no_result():
    """The value is not computed; what is before it is still before what is behind it."""

    @scheduled
    def fun(x, z):
        first = jnp.sin(z).sum()
        dropped = first * 2
        x_new = x.at[1].set(7.0)
        before(dropped, x_new)
        return x_new, first, z @ z

    x, z = jnp.arange(900.0).reshape(30, 30), jnp.ones((30, 30))
    planned = jax.make_jaxpr(fun)(x, z)
    [pin] = [eqn for eqn in planned.eqns if eqn.primitive.name == "pin"]
    [total] = [eqn for eqn in planned.eqns if eqn.primitive.name == "reduce_sum"]
    assert total.outvars[0] in pin.invars
    assert not any(eqn.primitive.name == "mul" for eqn in planned.eqns)
    x_new, first, _ = jax.jit(fun)(x, z)
    np.testing.assert_array_equal(x_new, x.at[1].set(7.0))
    np.testing.assert_allclose(first, np.sin(1) * 900, rtol=1e-5)


def test_a_declared_read_that_leads_to_no_result_asks_for_nothing():
    @scheduled
    def fun(x):
        y = x[0] * 2
        x_new = x.at[0].set(1.0)
        before(y, x_new)
        return x_new

    x = jnp.ones((30, 30))
    assert "pin" not in str(jax.make_jaxpr(fun)(x))
    assert copied_bytes(compiled(fun, x, donate_argnums=0), x) == 0


def assert_no_more_copies(fun, *args, undeclared=None):
    """Right results, and no more bytes copied than by plain `jit`."""
    wanted = [np.asarray(each) for each in (undeclared or fun)(*map(jnp.array, args))]
    donated = [i for i, each in enumerate(args) if each.ndim]
    plain, ours = (
        compiled(each, *args, donate_argnums=donated)
        for each in (undeclared or fun, scheduled(fun))
    )
    assert copied_bytes(ours, 400) <= copied_bytes(plain, 400)
    given = ours(*map(jnp.array, args))
    assert_same(list(map(np.asarray, given)), wanted)


def test_two_writes_of_an_array_of_one_number_need_no_copy():
    """Each of them starts from its own array of ones; one pinned array had to be copied."""

    def fun(k):
        ones = jnp.full((40, 25), 1, jnp.int32)
        low = ones.at[np.array([-11, -21])].min(k, mode="clip")
        return (lax.switch(k % 3, [lambda x: x, lambda x: x, lambda _: low], ones),)

    assert_no_more_copies(fun, np.int32(2))


def test_a_loop_that_carries_values_for_nothing_does_not_overwrite_them():
    """XLA takes them out of the loop; held for its sake they had to be copied."""

    def fun(k):
        x = jnp.full((12, 10), 1.0).at[k].max(3.0)
        first = x.at[6].set(x[10] + 1)
        second = first.at[10].set(x[6] + 2)

        def body(carry, _):
            return (carry[2], carry[2], carry[2]), None

        carry, _ = lax.scan(body, (first, second, x), length=3)
        return second, carry[1]

    assert_no_more_copies(fun, np.int32(1))


def test_a_constant_that_every_iteration_updates_is_copied_once():
    """XLA moves the update out of the loop, unless its start is pinned there."""

    def fun(k):
        ones = jnp.full((3, 8, 9), 1.0)

        def body(carry, _):
            new = ones.at[:2].multiply(2.0)
            return (new, new, new, carry[3]), new

        carry, _ = lax.scan(body, (ones, ones, ones, k), length=5)
        return (carry[2],)

    assert_no_more_copies(fun, np.float32(1))


@pytest.mark.parametrize("order", [before, lambda *values: None])
def test_a_branch_that_leads_to_no_result_reads_nothing(order):
    """It is kept for its declarations while these are checked, and only so long."""

    def build(order):
        def fun(x, k):
            new = x.at[5:9].add(-1.0)

            def branch(x, y):
                y = y.at[3].add(1.0)
                order(y, x_new := x.at[1].min(0.5))
                return x_new, y

            lax.cond(k > 3, branch, lambda x, y: (y, x), x, new)
            return new, new[:, 8::2]

        return fun

    x = np.arange(120, dtype=np.float32).reshape(12, 10)
    assert_no_more_copies(build(order), x, np.int32(5), undeclared=build(lambda *values: None))


def test_a_declaration_without_a_meaning_is_an_error_in_dead_code_too():
    @scheduled
    def fun(x):
        def branch(x):
            before(x, jnp.sin(x))
            return x

        lax.cond(x[0] > 3, branch, lambda x: x, x)
        return x * 2

    with pytest.raises(ScheduleError, match="comes into the branch from outside of it"):
        jax.jit(fun)(jnp.ones(3))


def test_a_declared_read_of_the_very_window_that_is_written():
    """The read was held back with the write and wanted in front of it."""

    @scheduled
    def f(x, i):
        y = lax.dynamic_slice(x, (i,), (5,))
        x_new = lax.dynamic_update_slice(x, -y, (i,))
        before(y, x_new)
        return x_new, y

    x = np.arange(40, dtype=np.float32)
    x_new, y = jax.jit(f, donate_argnums=0)(jnp.array(x), 3)
    np.testing.assert_array_equal(y, x[3:8])
    np.testing.assert_array_equal(x_new, [*x[:3], *-x[3:8], *x[8:]])


def test_a_value_computed_from_constants_alone_cannot_be_ordered():
    """Nothing holds it back: the declaration was accepted, and had no effect."""

    @scheduled
    def f(x):
        y = x.sum()
        z = jnp.full(12, 2.0) + 1
        before(y, z)
        return y, z

    with pytest.raises(ScheduleError, match="it depends on no argument"):
        jax.jit(f)(jnp.ones(3))


def test_a_branch_with_pins_of_its_own_still_updates_its_operand():
    """The pin in the branch hid from the caller that the branch writes."""

    @scheduled
    def pop(x):
        y = x[0]
        return x.at[0].set(0.0), y

    @scheduled
    def f(flag, x):
        total = x * 2
        x, y = lax.cond(flag, pop, lambda x: (x, x[1]), x)
        return x, y, total[3]

    x = np.arange(1000, dtype=np.float32) + 1
    new, y, total = jax.jit(f, donate_argnums=1)(True, jnp.array(x))
    np.testing.assert_array_equal(new, [0, *x[1:]])
    assert (y, total) == (1, 8)


def test_a_read_between_a_window_and_its_update():
    """The slice of the window was held back with the update, though a read waits for it."""

    @scheduled
    def f(x):
        y = lax.dynamic_slice(x, (0, 0), (2, 4))
        x_new = lax.dynamic_update_slice(x, y, (0, 0))
        z = x * 0.5
        before(y, z)
        return x_new, z

    x = np.arange(120, dtype=np.float32).reshape(10, 12)
    x_new, z = jax.jit(f, donate_argnums=0)(jnp.array(x))
    np.testing.assert_array_equal(x_new, x)
    np.testing.assert_array_equal(z, x * 0.5)


def read_through_a_sort(x):
    y = x[3] * 2
    return x.at[3].set(jnp.sort(y)), y[::-1] + 1


def read_through_a_sum(x):
    y = -x[5:]
    return x.at[3].set(jnp.sum(y)), y[::-1]


def read_through_a_loop(x):
    y = x ^ 3
    x = lax.fori_loop(0, 2, lambda i, x: x.at[i].set(y[i] + x[0]), x)
    return x, y[:, 3]


@pytest.mark.parametrize("fun", [read_through_a_sort, read_through_a_sum, read_through_a_loop])
def test_a_read_that_the_write_needs_and_others_too(fun):
    """XLA computed it again for the others, late, and copied the buffer for them."""
    x = jnp.arange(9000, dtype=jnp.int32).reshape(90, 100)
    wanted = [np.asarray(each) for each in fun(x)]
    plain, ours = (compiled(each, x, donate_argnums=0) for each in (fun, scheduled(fun)))
    assert copied_bytes(ours, x) < copied_bytes(plain, x)
    for result, expected in zip(ours(x), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_loop_that_reads_what_it_carries_leaves_other_buffers_in_place():
    """It cannot run in place; but to let it, an order was chosen which cost another copy."""

    def fun(x, z):
        def keep_adding(i, carry):
            return carry.at[i].add(z[0] + x.sum(0))

        z_new = lax.fori_loop(0, 3, keep_adding, z)
        x_new = x.at[0].set(z[5])
        return x_new, z_new

    x, z = (jnp.arange(9000.0).reshape(90, 100) + i for i in range(2))
    wanted = [np.asarray(each) for each in fun(x, z)]
    plain, ours = (compiled(f, x, z, donate_argnums=(0, 1)) for f in (fun, scheduled(fun)))
    assert copied_bytes(ours, x) <= 2 * x.nbytes < copied_bytes(plain, x)
    for result, expected in zip(ours(x, z), wanted, strict=True):
        np.testing.assert_array_equal(result, expected)


def column_and_half(x, k):
    column = x[:, k]
    half = column * 0.5
    before(column, half)
    return half, column


def updated_with_half(x, k):
    column = x[:, k]
    half = column * 0.5
    before(column, half)
    return half, x.at[:, 3].set(half)


@pytest.mark.parametrize("fun", [column_and_half, updated_with_half])
def test_a_value_that_the_later_one_needs_is_not_computed_once_more(fun):
    """XLA fused a second computation of it into the later one, or into what reads that, and ran
    its own at any time."""
    x, k = np.arange(12000, dtype=np.float32).reshape(1200, 10), np.int32(2)
    [edge] = [each for each in explain(scheduled(fun))(x, k).edges if each.kind == "declared"]
    assert edge.verdict == "held by data"
    half, other = jax.jit(scheduled(fun))(x, k)
    np.testing.assert_array_equal(half, x[:, 2] / 2)
    np.testing.assert_array_equal(other if other.ndim == 1 else other[:, 3] * 2, x[:, 2])


def test_arithmetic_that_is_returned_and_updated_is_computed_twice():
    """XLA fuses it into the update once more; as one pinned array it had to be copied."""

    def fun(x, k):
        high = jnp.maximum(x, 0)
        window = lax.dynamic_slice(high, (k, 0, 5), (1, 4, 4))
        return lax.dynamic_update_slice(high, window, (k, k, k)), high

    x = np.linspace(-1, 1, 432, dtype=np.float32).reshape(3, 16, 9)
    plain, ours = (compiled(each, x, np.int32(1)) for each in (fun, scheduled(fun)))
    assert copied_bytes(ours, x) <= copied_bytes(plain, x)
    given = ours(x, np.int32(1))
    assert_same(list(map(np.asarray, given)), [np.asarray(each) for each in fun(jnp.array(x), 1)])


def test_a_later_read_of_a_pinned_buffer_waits_too():
    """Next to an equation of the buffer's own size it had no control edge."""

    @scheduled
    def fun(x, v):
        turned = x.T
        kept, rows = lax.scan(lambda carry, _: (turned, turned), turned, length=4)
        row = turned[8]
        before(kept, row)
        return row, rows, turned - jnp.outer(v, row)

    x, v = np.arange(120, dtype=np.float32).reshape(10, 12), np.arange(12, dtype=np.float32)
    [edge] = explain(fun)(x, v).edges
    assert edge.verdict == "held by a control edge"
    row, rows, rest = jax.jit(fun)(x, v)
    np.testing.assert_array_equal(row, x[:, 8])
    np.testing.assert_array_equal(rows, np.stack([x.T] * 4))
    np.testing.assert_allclose(rest, x.T - np.outer(v, x[:, 8]), rtol=1e-6)


@pytest.mark.parametrize("through", [False, True])
def test_a_read_for_a_declared_value_is_not_held_back_behind_a_write(through):
    """With all that only leads to the value it waited too, until its buffer was overwritten."""

    def fun(order, x, v):
        y = jnp.sin(x[0]) * 2
        x = x.at[1].set(v)
        z = x[2] + 1
        order(z if through else x, y)
        return x, y, z

    x, v = jnp.arange(9000.0).reshape(90, 100), jnp.linspace(-1, 1, 100)
    wanted = [np.asarray(each) for each in fun(undeclared, x, v)]
    ours = compiled(scheduled(functools.partial(fun, before)), x, v, donate_argnums=0)
    assert copied_bytes(ours, x) == 0
    assert_same([np.asarray(each) for each in ours(x, v)], wanted)


def test_a_buffer_that_comes_from_a_pin_costs_nothing_at_the_next_one():
    """It counted as one more array to keep, and the read of all of it was not pinned."""

    def fun(order, x, i):
        x = x.at[i, 2].set(1, mode="drop")
        window = jnp.maximum(lax.dynamic_slice(x, (i, i, 2), (1, 3, 4)), 0)
        largest = jnp.max(x, 1)
        order(window, largest)
        return lax.dynamic_update_slice(x, window, (0, 3, 0)), largest

    x, i = jnp.linspace(-1, 1, 21600).reshape(3, 80, 90), jnp.int32(1)
    plain, ours = (functools.partial(fun, order) for order in (undeclared, before))
    assert_right_in_place(ours, x, i, undeclared=plain)


def test_a_read_that_is_carried_and_returned_waits_for_no_loop():
    """The copy that the loop makes of it was put down to the pin, which was left out then."""

    def fun(x, k):
        new = x.at[:, 1:6].set(k)
        ordered = jnp.sort(x, 0)

        def replace(carry):
            i, new, _ = carry
            return i + 1, new, new

        _, _, last = lax.while_loop(lambda c: c[0] <= k % 3, replace, (jnp.int32(0), new, ordered))
        return ordered, last

    assert_right_in_place(fun, jnp.linspace(1, -1, 120).reshape(10, 12), jnp.int32(1))


def twice_written(x, k):
    half = x * 0.5
    whole = lax.dynamic_update_slice(half, x, (k, k))
    return whole, half.at[k].set(half[3, 4])


def filled_and_twice_written(x, k):
    ones = jnp.ones_like(x)
    column = ones.at[:, k].set(ones[:, k])
    return lax.dynamic_update_slice(ones, column, (k, 0)), column


def filled_and_sorted(x, k):
    ones = jnp.ones_like(x)
    maybe = lax.cond(k == 1, lambda ones: ones.at[12].set(k), lambda ones: ones, ones)
    return maybe, jnp.sort(ones)


def part_of_an_update(x, k):
    part = x.at[:, 1].max(x[:, 11])[:, 9:]
    return (part.at[:, k].set(part[:, k]),)


def window_of_a_part_of_an_update(x, k):
    x = x - jnp.outer(x[:, 6], x[6]) * 0.125
    part = x.at[k].set(x[k])[2:]
    window = lax.dynamic_slice(part, (0, 0), (2, 4))
    return (lax.dynamic_update_slice(part, window, (0, 0)),)


def read_and_returned(x, k):
    columns = x[:, np.arange(30)]
    y = x.at[:, np.arange(30)[::-1]].add(columns)
    return columns, y, columns.at[np.array([2, -14, -3, -21])].min(k, mode="drop")


def filled_and_read_by_a_write(x, k):
    ones, columns = jnp.ones_like(x), np.array([4, 6, 9])
    return ones.at[k].set(k), ones.at[:, columns].min(ones[:, columns])


def gathered(x, k):
    """A gather ends in a view, which was fused into the update of the array behind it."""
    rows = x.at[np.arange(29)].get(mode="clip")
    return (rows.at[:, :24].max(0.0, mode="clip"),)


def updated_and_chosen_from(x, k):
    """The argument is needed to the end, so that its update writes a copy, if anything."""
    new = x.at[8, -4].max(1)
    return jnp.where(x[::-1] > k, x, new), new.at[np.array([1, 2, 4]), 1].get(mode="clip") // 2


@pytest.mark.parametrize(
    "fun",
    [twice_written, filled_and_twice_written, filled_and_sorted, filled_and_read_by_a_write]
    + [part_of_an_update, window_of_a_part_of_an_update, read_and_returned]
    + [gathered, updated_and_chosen_from],
)
def test_what_is_computed_once_more_for_each_write_is_not_copied(fun):
    x = jnp.linspace(-1, 1, 1200).reshape(30, 40)
    plain, ours = (compiled(each, x, jnp.int32(1)) for each in (fun, scheduled(fun)))
    assert copied_bytes(ours, x) <= copied_bytes(plain, x)
    given = ours(x, jnp.int32(1))
    assert_same([np.asarray(each) for each in given], [np.asarray(each) for each in fun(x, 1)])


def test_an_order_before_a_loop_that_ignores_what_it_carries():
    """XLA drops that from the pin, which told no longer a buffer from a read."""

    @scheduled
    def fun(z, x, k):
        columns = z.at[:, np.array([6, -2, 8])].get(mode="fill", fill_value=1)

        def move(i, carry):
            window = lax.dynamic_slice(carry[0], (8, 6), (2, 1))
            return lax.dynamic_update_slice(carry[0], window, (0, k)), k

        x, last = lax.fori_loop(0, 3, move, (x, k + 1))
        before(columns, last)
        return x, columns

    z, x = np.arange(240, dtype=np.float32).reshape(3, 8, 10), np.ones((10, 12), np.int16)
    [edge] = [each for each in explain(fun)(z, x, np.int32(1)).edges if each.kind == "declared"]
    assert edge.verdict == "held by a control edge"


def test_what_xla_moves_out_of_a_loop_is_not_the_loop():
    """The index of the update was computed in front of the loop, for something behind it too."""

    @scheduled
    def fun(x, k):
        rounds = (k + 9) % 12
        rows = np.array([2, -1, -3])

        def add(carry):
            i, x = carry
            return i + 1, x.at[rows, k, :].add(k.astype(x.dtype))

        _, x = lax.while_loop(lambda carry: carry[0] <= rounds % 2, add, (jnp.int32(0), x))
        before(rounds, x)
        return x.at[-3, k, k].max(0.5)

    [edge] = explain(fun)(np.ones((3, 8, 9), np.float32), np.int32(1)).edges
    assert edge.verdict in ("held by a control edge", "held by data")


def flat(x, k):
    window = lax.dynamic_slice(x.reshape(24, 1), (0, k), (16, 1))
    return lax.dynamic_update_slice(x, x, (0,)), window


def turned_over(x, k):
    x = x.reshape(6, 4)
    window = lax.dynamic_slice(x.reshape(4, 6), (k, k), (1, 2)) + 1
    return lax.dynamic_update_slice(x, window, (k, k)), x


@pytest.mark.parametrize("fun", [flat, turned_over])
def test_a_window_of_a_view_is_not_the_one_that_is_overwritten(fun):
    """With the same indices it was taken for that one, and with fewer of them planning failed."""
    x, k = jnp.arange(24.0), jnp.int32(1)
    given = jax.jit(scheduled(fun))(x, k)
    with jax.disable_jit():
        wanted = fun(x, k)
    assert_same([np.asarray(each) for each in given], [np.asarray(each) for each in wanted])
