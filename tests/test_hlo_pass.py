"""The HLO pass: control edges where a marked barrier asks for them, and harm nowhere."""

import re
import threading
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import backend, xla

from benchmarks.foreign_modules import (
    BUFFER,
    ROW,
    Computation,
    pinned_module,
    plain_module,
    shape,
    unwritten_module,
)
from jaxsched._hlo import _control, _hook, _wire
from jaxsched._hlo._control import MARK_KEY, PASS_VERSION, add_control_edges, mark
from jaxsched._hlo._hook import install

N, M = 37, 41  # the buffer's dimensions, which no other value has
BUFFER_TYPE = f"f32[{N},{M}]"


@pytest.fixture(scope="module", autouse=True)
def installed():
    install()


def pin(buffer, *reads):
    with set_xla_metadata(**{MARK_KEY: mark(1, 1 + len(reads))}):
        return lax.optimization_barrier((buffer, *reads))


### Programs: a read, then an in-place write, in every kind of scope


def element(x, i):
    x, y = pin(x, x[0, 0])
    return x.at[0, 0].add(1), y


def element_numpy(x, i):
    y = x[0, 0]
    x[0, 0] += 1
    return x, y


def row(x, i):
    x, y = pin(x, x[i])
    return x.at[i].set(0), y


def row_numpy(x, i):
    y = x[i].copy()
    x[i] = 0
    return x, y


def two_reads(x, i):
    x, y, z = pin(x, x[i], x[i + 1].max())
    return x.at[i].set(z), y, z


def two_reads_numpy(x, i):
    y, z = x[i].copy(), x[i + 1].max()
    x[i] = z
    return x, y, z


def gather(x, i):
    rows = jnp.array([5, 1, 3]) + i
    x, y = pin(x, x[rows])
    return x.at[rows].add(1), y


def gather_numpy(x, i):
    rows = np.array([5, 1, 3]) + i
    y = x[rows]
    x[rows] += 1
    return x, y


def scan(x, i):
    return lax.scan(row, x, jnp.arange(5) + i)


def scan_numpy(x, i):
    rows = [row_numpy(x, i + k)[1] for k in range(5)]
    return x, np.stack(rows)


def while_loop(x, i):
    def body(carry):
        x, i, total = carry
        x, y = pin(x, x[i])
        return x.at[i].set(total), i + 1, total + y

    x, _, total = lax.while_loop(lambda carry: carry[1] < 9, body, (x, i, jnp.zeros(M)))
    return x, total


def while_loop_numpy(x, i):
    total = np.zeros(M, np.float32)
    for k in range(i, 9):
        y = x[k].copy()
        x[k] = total
        total = total + y
    return x, total


def cond(x, i):
    x, y = pin(x, x[i])
    return lax.cond(i > 1, lambda x: x.at[i].set(0.0), lambda x: x, x), y


cond_numpy = row_numpy


def inside_cond(x, i):
    return lax.cond(i > 1, lambda x: row(x, i), lambda x: (x, x[0]), x)


inside_cond_numpy = row_numpy


def rank_one(x, i):
    x, r, c = pin(x, x[i], x[:, i])
    return x - jnp.outer(c, r)


def rank_one_numpy(x, i):
    return x - np.outer(x[:, i], x[i])


PROGRAMS = {
    fun.__name__: (fun, reference, edges)
    for fun, reference, edges in [
        (element, element_numpy, 1),
        (row, row_numpy, 1),
        (two_reads, two_reads_numpy, 2),
        (gather, gather_numpy, 1),
        (scan, scan_numpy, 1),
        (while_loop, while_loop_numpy, 1),
        (cond, cond_numpy, 1),
        (inside_cond, inside_cond_numpy, 1),
        (rank_one, rank_one_numpy, 2),
    ]
}


def buffer():
    return np.random.default_rng(0).uniform(1, 2, (N, M)).astype(np.float32)


def lower(fun, *args):
    return jax.jit(lambda *args: fun(*args), donate_argnums=0).lower(*args)


def compile(fun, *args):
    return lower(fun, *args).compile()


def text_of(fun, *args):
    text = compile(fun, *args).as_text()
    assert text is not None
    return text


def serialized(fun, *args):
    """The module as JAX hands it to XLA: barriers, tuples and all."""
    ir: Any = lower(fun, *args).compiler_ir("hlo")
    return ir.as_serialized_hlo_module_proto()


class Instruction(NamedTuple):
    place: int
    type: str
    opcode: str
    operands: list[str]
    control: list[str]
    frame: int


def instructions(text):
    """The instructions of a module's text by name, with their place in the schedule."""
    found = {}
    line = r"%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)"
    for match in re.finditer(line, text):
        name, result, opcode, operands, rest = match.groups()
        control = re.search(r"control-predecessors=\{(.*?)\}", rest)
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        found[name] = Instruction(
            match.start(),
            result,
            opcode,
            re.findall(r"%([\w.-]+)", operands),
            re.findall(r"%([\w.-]+)", control[1]) if control else [],
            int(frame[1]) if frame else 0,
        )
    return found


def shared(module, source, target):
    """What both are computed from: all that `source` comes from, and the arguments of `target`."""
    above, todo = set(), [source]
    while todo:
        todo += (new := set(module[todo.pop()].operands) - above)
        above |= new
    through_tuples = {o for operand in target.operands for o in module[operand].operands}
    return above & {*target.operands, *through_tuples}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_edges_lead_from_the_reads_to_the_write_in_place(name):
    fun, reference, count = PROGRAMS[name]
    compiled = compile(fun, buffer(), 2)
    module = instructions(compiled.as_text())
    edges = [(source, target) for target in module.values() for source in target.control]
    assert len(edges) == count
    for source, target in edges:
        assert BUFFER_TYPE in target.type
        assert any(BUFFER_TYPE in module[each].type for each in shared(module, source, target))
        assert module[source].place < target.place
    for got, want in zip(
        jax.tree.leaves(compiled(jnp.array(buffer()), 2)),
        jax.tree.leaves(reference(buffer(), 2)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_edges_survive_vmap():
    def pair(x, i):
        return jax.vmap(row)(x, jnp.stack([i, i + 1]))

    x = np.stack([buffer(), buffer() + 1])
    assert text_of(pair, x, 2).count("control-predecessors") == 1
    got, rows = compile(pair, x, 2)(jnp.array(x), 2)
    np.testing.assert_array_equal(rows, [x[0, 2], x[1, 3]])
    x[0, 2] = x[1, 3] = 0
    np.testing.assert_array_equal(got, x)


### What the pass must not change


def text_without_pass(fun, *args):
    assert xla.clear_hlo_module_transformation(MARK_KEY, platforms="cpu")
    try:
        return text_of(fun, *args)
    finally:
        _hook._register("cpu")


def source_lines(text):
    """The user line of each instruction of a module's text, by name."""
    lines = dict(re.findall(r"^(\d+) \{.* line=(\d+) end_line", text, re.M))
    frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.M))
    return {
        name: int(lines[frames[str(each.frame)]])
        for name, each in instructions(text).items()
        if each.frame
    }


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_source_lines_stay(name):
    fun = PROGRAMS[name][0]
    text = text_of(fun, buffer(), 2)
    after = source_lines(text)
    assert after == source_lines(text_without_pass(fun, buffer(), 2))
    assert len(set(after.values())) > 1
    assert "jaxsched_frame" not in text  # nothing is left of the computation that keeps them


def test_unmarked_programs_compile_to_the_same_module():
    def foreign(x, i):
        with set_xla_metadata(other="pin:1:2:1"):
            x, y = lax.optimization_barrier((x, x[i]))
        return x.at[i].set(0), y

    def body(text):  # not the source lines: they tell from where this test calls
        return re.sub(r"stack_frame_id=\d+", "", text[text.index("\n\n%") :])

    text = text_of(foreign, buffer(), 2)
    assert body(text) == body(text_without_pass(foreign, buffer(), 2))
    assert "control-predecessors" not in text
    assert add_control_edges(serialized(foreign, buffer(), 2)) is None


def message(data, numbers=None):
    """A message's fields as (number, payload)."""
    found = []
    for tag, value, _, end in _wire.fields(data, 0, len(data)):
        found.append((tag >> 3, data[value:end] if tag & 7 == _wire.LENGTH else value))
    return found if numbers is None else [value for n, value in found if n in numbers]


def integers(values):
    out = []
    for value in values:
        packed = isinstance(value, bytes)
        out += _wire.numbers(value, (2, 0, 0, len(value))) if packed else [value]
    return out


class Node(NamedTuple):
    opcode: str
    operands: list[int]
    control: list[int]
    shape: bytes
    element: int
    attributes: list[bytes]


def nodes(module):
    """{id: Node} of the computation named `main` in a generated module."""
    [main] = [c for c in message(module, {3}) if message(c, {1})[0] == b"main"]
    found = {}
    for instruction in message(main, {2}):
        [number] = message(instruction, {35})
        assert number not in found
        found[number] = Node(
            message(instruction, {2})[0].decode(),
            integers(message(instruction, {36})),
            integers(message(instruction, {37})),
            message(instruction, {3})[0],
            sum(message(instruction, {13})),
            message(instruction, {68}),
        )
    return found


def edges(module):
    """The control edges that the pass adds to a generated module."""
    result = add_control_edges(module)
    if result is None:
        return set()
    before = nodes(module)
    return {
        (source, target)
        for target, node in nodes(result).items()
        for source in node.control
        if source not in before[target].control
    }


def test_everything_else_is_kept_bit_for_bit():
    module = serialized(while_loop, buffer(), 2)
    result = add_control_edges(module)
    assert result is not None
    result = message(result)
    assert result.pop(0)[0] == 3  # the computation that keeps the source lines
    changed = 0
    for (number, old), (new_number, new) in zip(message(module), result, strict=True):
        assert number == new_number
        if number != 3:
            assert old == new
            continue
        for (number, was), (new_number, now) in zip(message(old), message(new), strict=True):
            assert number == new_number
            if was != now:
                assert number == 2
                [(appended, _)] = message(now[len(was) :])
                assert (now[: len(was)], appended) == (was, 37)
                changed += 1
    assert changed == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pass_is_idempotent_and_xla_reads_its_result(name):
    fun = PROGRAMS[name][0]
    once = add_control_edges(serialized(fun, buffer(), 2))
    assert once is not None
    assert add_control_edges(once) is None
    xla_computation: Any = type(lower(fun, buffer(), 2).compiler_ir("hlo"))
    assert "opt-barrier" in xla_computation(once).as_hlo_text()


### Which edges: on generated modules


def test_mark_names_buffers_operands_and_version():
    assert mark(2, 5) == f"pin:2:5:{PASS_VERSION}"


def read(main, of):
    return main.add("fusion", shape(ROW), [of])


def write(main, of):
    return main.add("fusion", shape(BUFFER), [of])


@pytest.fixture
def main():
    return Computation()


@pytest.fixture
def x(main):
    return main.add("parameter", shape(BUFFER))


def barrier(main, operands, shapes, attribute):
    of = shape(*shapes)
    held = main.add("opt-barrier", of, [main.add("tuple", of, operands)], attribute=attribute)
    return [
        main.add("get-tuple-element", shape(part), [held], index=i) for i, part in enumerate(shapes)
    ]


def test_all_that_is_behind_a_pin_waits_for_each_read(main, x):
    y, z = read(main, x), read(main, x)
    x1, *_ = main.pin(x, y, z)
    first, second, other = write(main, x1), write(main, x1), read(main, x1)
    assert edges(main.module()) == {(r, u) for r in (y, z) for u in (first, second, other)}
    assert other  # only reads the buffer, so nothing needs to wait for it or it for anything


def test_where_nothing_writes_every_user_waits(main, x):
    y = read(main, x)
    x1, _ = main.pin(x, y)
    users = {read(main, x1), read(main, x1)}
    assert edges(main.module()) == {(y, user) for user in users}


def test_users_behind_the_next_pin_wait_where_there_are_no_others(main, x):
    first, second = read(main, x), read(main, x)
    x1, _ = main.pin(x, first)
    x2, _ = main.pin(x1, second)
    user = read(main, x2)
    assert edges(main.module()) == {(first, user), (second, user)}
    own = read(main, x1)
    assert edges(main.module()) == {(first, own), (second, user)}


def test_several_buffers(main, x):
    other = main.add("parameter", shape(ROW))
    y = read(main, x)
    x1, other1, _ = barrier(main, (x, other, y), (BUFFER, ROW, ROW), mark(2, 3))
    targets = {write(main, x1), main.add("fusion", shape(ROW), [other1])}
    assert edges(main.module()) == {(y, target) for target in targets}


def test_a_pin_without_reads_adds_nothing(main, x):
    write(main, *main.pin(x))
    y = read(main, x)
    write(main, y)
    assert add_control_edges(main.module()) is None


def test_parameters_and_constants_are_not_waited_for(main, x):
    x1, *_ = main.pin(x, main.add("parameter", shape(ROW)), main.add("constant", shape(ROW)))
    write(main, x1)
    assert add_control_edges(main.module()) is None


def test_edges_that_exist_are_not_repeated(main, x):
    y = read(main, x)
    x1, _ = main.pin(x, y)
    target = write(main, x1)
    main.instructions[-1] += _wire.encode(37, y)
    assert add_control_edges(main.module()) is None
    z = write(main, x1)
    assert edges(main.module()) == {(y, z)}
    assert target != z


def test_views_tuples_and_later_barriers_are_looked_through(main, x):
    loop = main.add("while", shape(BUFFER, ROW), [x])
    x = main.add("get-tuple-element", shape(BUFFER), [loop], index=0)
    y = read(main, x)
    view = main.add("bitcast", shape(ROW), [y])
    x1, y1 = main.pin(main.add("bitcast", shape(BUFFER), [x]), view)
    x2, _ = barrier(main, (x1, y1), (BUFFER, ROW), None)
    z = read(main, x2)
    x3, *_ = main.pin(x2, z)
    target = main.add("while", shape(ROW, BUFFER), [main.add("tuple", shape(ROW, BUFFER), (z, x3))])
    assert edges(main.module()) == {(y, z), (y, target), (z, target)}


def test_a_barrier_may_take_a_tuple_that_no_tuple_instruction_made(main, x):
    loop = main.add("while", shape(BUFFER, ROW), [x])
    held = main.add("opt-barrier", shape(BUFFER, ROW), [loop], attribute=mark(1, 2))
    target = write(main, main.add("get-tuple-element", shape(BUFFER), [held], index=0))
    assert edges(main.module()) == {(loop, target)}


def test_after_a_dropped_element_all_that_may_be_reads_count(main, x):
    other, y, foreign = (
        main.add("fusion", shape(BUFFER)),
        read(main, x),
        main.add("fusion", shape(ROW)),
    )
    x1, *_ = barrier(main, (x, other, y, foreign), (BUFFER, BUFFER, ROW, ROW), mark(3, 5))
    target = write(main, x1)
    assert edges(main.module()) == {(y, target), (foreign, target)}


def test_xla_dropping_an_unused_read_leaves_the_edge_of_the_other():
    def fun(x, i):
        x, y, _ = pin(x, x[i], x[i + 1].max())
        return x.at[i].set(0), y

    assert text_of(fun, buffer(), 2).count("control-predecessors") == 1


@pytest.mark.parametrize(
    "value",
    [
        "pin:0:2:{v}", "pin:1:1:{v}", "pin:2:2:{v}", "pin:-1:2:{v}", "pin:a:2:{v}",
        "pin:1:2:{other}", "pin:1:2", "pin", "", "\n", "pin:1:2:{v} ", "pin:1:2:{v}:",
        "pin:1:" + "9" * 5000 + ":{v}",
    ],
)  # fmt: skip
def test_other_values_of_the_attribute_mean_nothing(main, x, value):
    value = value.format(v=PASS_VERSION, other=PASS_VERSION + 1)
    x1, _ = barrier(main, (x, read(main, x)), (BUFFER, ROW), value)
    write(main, x1)
    assert add_control_edges(main.module()) is None


def test_more_elements_than_the_mark_says_is_no_barrier_of_ours(main, x):
    x1, *_ = barrier(main, (x, read(main, x), read(main, x)), (BUFFER, ROW, ROW), mark(1, 2))
    write(main, x1)
    assert add_control_edges(main.module()) is None


def test_marks_on_other_instructions_mean_nothing(main, x):
    held = main.add("tuple", shape(BUFFER, ROW), (x, read(main, x)), attribute=mark(1, 2))
    x1 = main.add("get-tuple-element", shape(BUFFER), [held], index=0, attribute=mark(1, 2))
    main.add("fusion", shape(BUFFER), [x1], attribute=mark(1, 2))
    assert add_control_edges(main.module()) is None


def test_other_attributes_beside_the_mark_mean_nothing(main, x):
    loop = main.add("while", shape(BUFFER, ROW), [x])
    held = main.add("opt-barrier", shape(BUFFER, ROW), [loop])
    pairs = [(b"a", b"pin:1:9:1"), (MARK_KEY.encode(), mark(1, 2).encode()), (b"z", b"pin:0:0:0")]
    entries = [_wire.encode(1, k) + _wire.encode(2, value) for k, value in pairs]
    attributes = b"".join(_wire.encode(1, entry) for entry in entries)
    main.instructions[-1] += _wire.encode(68, attributes)
    target = write(main, main.add("get-tuple-element", shape(BUFFER), [held], index=0))
    assert edges(main.module()) == {(loop, target)}


### Which edges: on any module


KINDS = ["fusion", "fusion", "fusion", "pin", "pin", "bitcast", "while", "barrier"]


def random_module(seed):
    """A straight-line module over two shapes, with pins, views, tuples and loops."""
    random = Random(seed)
    main = Computation()
    values = [(main.add("parameter", shape(dims)), dims) for dims in (BUFFER, ROW, BUFFER)]
    for _ in range(random.randrange(5, 40)):
        kind = random.choice(KINDS)
        chosen = random.choices(values[-8:], k=random.randint(2, 4))
        ids, shapes = [i for i, _ in chosen], [part for _, part in chosen]
        if kind == "fusion":
            part = random.choice((BUFFER, ROW))
            values.append((main.add(kind, shape(part), ids), part))
        elif kind == "bitcast":
            values.append((main.add(kind, shape(shapes[0]), ids[:1]), shapes[0]))
        elif kind == "while":
            of = shape(*shapes)
            loop = main.add(kind, of, [main.add("tuple", of, ids)])
            last = main.add("get-tuple-element", shape(shapes[-1]), [loop], index=len(ids) - 1)
            values.append((last, shapes[-1]))
        else:
            operands = len(ids) + random.choice((0, 0, 0, 1))  # one that XLA has dropped
            attribute = mark(random.randint(1, 2), operands) if kind == "pin" else None
            values += zip(barrier(main, ids, shapes, attribute), shapes, strict=True)
    return main.module(frames=random.randrange(3))


def test_random_modules_have_edges_to_test():
    counts = [len(edges(random_module(seed))) for seed in range(50)]
    assert 0 in counts
    assert sum(counts) > 100


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_every_edge_follows_a_data_path_so_there_is_no_cycle(seed):
    module = random_module(seed)
    graph = nodes(module)
    above: dict[int, set[int]] = {}
    for number, node in graph.items():  # operands come first
        above[number] = {a for o in node.operands for a in (o, *above[o])}
    place = {number: position for position, number in enumerate(graph)}
    for source, target in edges(module):
        assert source in above[target]
        assert place[source] < place[target]
        assert graph[source].opcode not in ("parameter", "constant", "tuple", "bitcast")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_every_write_of_a_pinned_buffer_waits_for_the_reads(seed):
    """Compares with a walk from each barrier, upwards to what computes the reads and downwards to
    what writes the buffer, element by element and with nothing remembered."""
    module = random_module(seed)
    graph = nodes(module)
    users = defaultdict(list)
    for number, node in graph.items():
        for position, operand in enumerate(node.operands):
            users[operand].append((number, position))

    def up(number, path):
        node = graph[number]
        match node.opcode:
            case "get-tuple-element":
                return up(node.operands[0], (node.element, *path))
            case "tuple":
                return up(node.operands[path[0]], path[1:])
            case "bitcast" | "opt-barrier":
                return up(node.operands[0], path)
        return number

    def down(number, path):
        for user, position in users[number]:
            match graph[user].opcode:
                case "get-tuple-element":
                    if path[0] == graph[user].element:
                        yield from down(user, path[1:])
                case "tuple":
                    yield from down(user, (position, *path))
                case "bitcast" | "opt-barrier":
                    yield from down(user, path)
                case _:
                    yield user

    found = edges(module)
    for number, node in graph.items():
        attribute = b"".join(node.attributes).decode("latin1")
        if node.opcode != "opt-barrier" or not (marked := re.search(r"pin:(\d+):(\d+)", attribute)):
            continue
        parts = message(node.shape, {4})
        buffers, operands = int(marked[1]), int(marked[2])
        if operands != len(parts):
            continue
        reads = {up(number, (i,)) for i in range(buffers, operands)}
        reads = {r for r in reads if graph[r].opcode != "parameter"}
        for i in range(buffers):
            for user in set(down(number, (i,))):
                shapes = message(graph[user].shape, {4}) or [graph[user].shape]
                if parts[i] in shapes:
                    assert {(r, user) for r in reads} <= found


### Damage


SAMPLES = [
    serialized(scan, np.zeros((N, M), np.float32), 2),
    pinned_module(60),
    unwritten_module(60),
]


def survives(data):
    """None or a module; never an exception, also where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = add_control_edges(data)
    assert result is None or isinstance(result, bytes)
    return result


@settings(max_examples=200, deadline=2000)
@given(st.sampled_from(SAMPLES), st.data())
def test_truncated_modules_do_no_harm(module, data):
    survives(module[: data.draw(st.integers(0, len(module)))])


@settings(max_examples=400, deadline=2000)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=20),
)
def test_flipped_bytes_do_no_harm(module, flips):
    flipped = bytearray(module)
    for position, byte in flips:
        flipped[int(position * len(flipped))] ^= byte
    survives(bytes(flipped))


@settings(max_examples=200, deadline=2000)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_random_bytes_do_no_harm(before, after):
    survives(before + _control._NEEDLE + after)
    survives(before + after)


@settings(max_examples=200, deadline=2000)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=8), st.integers(0, 2**64 - 1), st.data())
def test_absurd_numbers_do_no_harm(dimensions, number, data):
    main = Computation()
    of = _wire.encode(2, number) + b"".join(_wire.encode(3, d) for d in dimensions)
    x = main.add("parameter", of)
    x1, _ = main.pin(x, main.add("fusion", of, [x]))
    main.add("fusion", of, [x1], index=number, frame=number)
    main.instructions[-1] += _wire.encode(data.draw(st.sampled_from((13, 35, 36, 37))), number)
    survives(main.module(frames=1))


def test_doubling_tuples_do_not_double_the_time(main, x):
    x1, _ = main.pin(x, read(main, x))
    for _ in range(200):
        x1 = main.add("tuple", shape(BUFFER), (x1, x1))
    write(main, x1)
    assert survives(main.module())


def test_a_hundred_thousand_dimensions_take_no_time(main, x):
    of = shape((2**63 - 1,) * 200_000)
    x1, _ = main.pin(x, main.add("fusion", of, [x]))
    main.add("fusion", of, [x1])
    start = time.process_time()
    survives(main.module())
    assert time.process_time() - start < 5


def test_deeply_nested_shapes_do_no_harm(main, x):
    of = shape(BUFFER)
    for _ in range(5000):
        of = _wire.encode(4, of)
    held = main.add("tuple", of, (x, read(main, x)))
    main.add("opt-barrier", of, [held], attribute=mark(1, 2))
    assert survives(main.module()) is None


DAMAGES = {
    "dangling operand": lambda main, x: write(main, 77),
    "operand of a later id": lambda main, x: write(main, write(main, x) + 2),
    "operand itself": lambda main, x: write(main, len(main.instructions) + 1),
    "id used twice": lambda main, x: main.instructions.append(main.instructions[0]),
    "element of nothing": lambda main, x: main.add("get-tuple-element", shape(ROW), index=0),
    "element too far": lambda main, x: main.add(
        "get-tuple-element", shape(ROW), [main.add("tuple", shape(ROW), [x])], index=1
    ),
    "barrier over nothing": lambda main, x: main.add(
        "opt-barrier", shape(BUFFER, ROW), attribute=mark(1, 2)
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_impossible_modules_are_reported_and_left_alone(main, x, damage):
    x1, _ = main.pin(x, read(main, x))
    write(main, x1)
    assert survives(main.module()) is not None
    damage(main, x)
    module = main.module()
    with pytest.warns(RuntimeWarning, match="added no control edges.*barriers keep the order"):
        assert add_control_edges(module) is None
    assert survives(module) is None


def test_unknown_opcodes_and_fields_are_taken_as_they_come(main, x):
    y = main.add("frobnicate", shape(ROW), [x])
    main.instructions[-1] += _wire.encode(9999, b"?") + _wire.varint(9998 << 3 | 1) + b"8" * 8
    x1, _ = main.pin(x, y)
    target = main.add("", shape(BUFFER), [x1])
    assert edges(main.module()) == {(y, target)}


### Registration


def test_a_failing_pass_fails_no_compilation(monkeypatch):
    def broken(data):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(_control, "_rewritten", broken)
    with pytest.warns(RuntimeWarning, match=r"added no control edges .*ZeroDivisionError: oops"):
        compiled = compile(row, buffer(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "control-predecessors" not in text_of(row, buffer(), 2)
    for got, want in zip(compiled(jnp.array(buffer()), 2), row_numpy(buffer(), 2), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.fixture
def registrations(monkeypatch):
    """A process in which nothing is installed yet; holds the platforms that get registered."""
    calls = []

    def register(callback, *, name, stage, platforms):
        assert callback is _hook.transform
        assert stage is xla.PipelineStage.PRE_SCHEDULER
        time.sleep(0.01)
        calls.append(platforms)
        if platforms == "rocm":
            raise RuntimeError("the plugin lacks the extension")

    monkeypatch.setattr(_hook, "_installed", False)
    monkeypatch.setattr(xla, "register_hlo_module_transformation", register)
    return calls


def test_install_registers_once_for_all_threads(registrations):
    start = threading.Barrier(8)

    def race():
        start.wait()
        install()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(race) for _ in range(8)]:
            done.result()
    assert registrations == ["cpu"]


def test_install_takes_the_gpu_plugins_that_are_there_and_can(registrations, monkeypatch):
    monkeypatch.setattr(backend, "backends", lambda: dict.fromkeys(["cpu", "cuda", "rocm", "tpu"]))
    install()
    install()
    assert sorted(registrations) == ["cpu", "cuda", "rocm"]


def test_installed_twice_is_registered_once():
    install()
    install()
    assert xla.clear_hlo_module_transformation(MARK_KEY, platforms="cpu")
    assert not xla.clear_hlo_module_transformation(MARK_KEY, platforms="cpu")
    _hook._register("cpu")


def test_threads_compile_at_the_same_time():
    def work(i):
        compiled = compile(lambda x, k: row(x + i, k), buffer(), 2)
        return str(compiled.as_text()), compiled(jnp.array(buffer()), 2)[1]

    with ThreadPoolExecutor(8) as pool:
        for i, (text, y) in enumerate(pool.map(work, range(8))):
            assert text.count("control-predecessors") == 1
            np.testing.assert_allclose(y, buffer()[2] + i, rtol=1e-6)


### Size


@pytest.mark.parametrize(
    ("generate", "size"), [(pinned_module, 100_000), (unwritten_module, 30_000)]
)
def test_large_modules_take_seconds(generate, size):
    module = generate(size)
    start = time.process_time()
    result = add_control_edges(module)
    assert result is not None
    assert len(result) > len(module)
    assert time.process_time() - start < 20  # two are usual; quadratic work would be minutes


def test_pins_in_a_row_on_one_buffer_all_reach_the_write():
    module = unwritten_module(2_000)
    graph = nodes(module)
    reads = {number for number, node in graph.items() if node.opcode == "fusion"}
    last = max(reads)
    assert edges(module) >= {(each, last) for each in reads - {last}}
    assert len(reads) > 300


def test_unmarked_modules_cost_one_search():
    module = plain_module(50_000)
    start = time.process_time()
    assert add_control_edges(module) is None
    assert time.process_time() - start < 0.5


### The wire format


def test_varints():
    for number in [0, 1, 127, 128, 300, 2**32, 2**64 - 1]:
        assert _wire.read_varint(_wire.varint(number), 0) == (number, len(_wire.varint(number)))
    assert _wire.varint(300) == b"\xac\x02"  # the example in protobuf's own documentation


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), st.integers(0, 2**64 - 1) | st.binary())))
def test_fields_come_back_as_encoded(pairs):
    assert message(b"".join(_wire.encode(number, payload) for number, payload in pairs)) == pairs


MALFORMED = {
    "no value": b"\x08",
    "unfinished number": b"\x08\x80",
    "number too long": b"\x08" + b"\xff" * 11 + b"\x01",
    "short string": b"\x0a\x05abc",
    "short 64 bits": b"\x09abc",
    "short 32 bits": b"\x0d",
    "group": b"\x0b",
    "no such wire type": b"\x0f",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_refused(data):
    with pytest.raises(_wire.Malformed):
        list(_wire.fields(data, 0, len(data)))


def test_numbers_may_be_packed_or_not():
    loose, packed = _wire.encode(5, 300) + _wire.encode(5, 7), _wire.encode(5, b"\xac\x02\x07")
    for data in loose, packed:
        read = [n for part in _wire.fields(data, 0, len(data)) for n in _wire.numbers(data, part)]
        assert read == [300, 7]
    [part] = _wire.fields(_wire.encode(5, b"\x80"), 0, 3)
    with pytest.raises(_wire.Malformed):
        list(_wire.numbers(_wire.encode(5, b"\x80") + b"\x01", part))


def test_edits_change_what_they_name_and_lengths_follow():
    inner = _wire.encode(1, b"x" * 120)
    data = _wire.encode(4, 9) + _wire.encode(3, inner) + _wire.encode(4, 8)
    _, outer, _ = _wire.fields(data, 0, len(data))
    end = outer[3]
    longer = _wire.splice(data, _wire.resize(outer, [(end, end, _wire.encode(2, 1) * 10)]))
    assert message(longer) == [(4, 9), (3, inner + _wire.encode(2, 1) * 10), (4, 8)]
    assert _wire.splice(data, []) == data
