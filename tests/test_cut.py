"""The cut in front of a write, against every cut that there is."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

from jaxsched import scheduled
from jaxsched._cut import FOREVER, Network
from jaxsched._graph import Edge, Graph, Value
from jaxsched._region import choose_cut

# An equation which XLA computes in a kernel of its own, so that its result is in memory anyway.
[PRODUCT] = jax.make_jaxpr(jnp.dot)(jnp.ones(2), jnp.ones(2)).eqns

# One that updates its first operand.
*_, UPDATE = jax.make_jaxpr(lax.dynamic_update_slice)(jnp.ones(2), jnp.ones(1), (0,)).eqns


def subsets(items):
    items = list(items)
    sizes = range(len(items) + 1)
    return [set(some) for size in sizes for some in itertools.combinations(items, size)]


### Networks: maximum flow is minimum cut


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("sabcd"), st.sampled_from("abcdt")),
        st.one_of(st.integers(0, 9), st.just(FOREVER)),
        max_size=14,
    )
)
def test_the_cut_of_a_network_is_a_cheapest_one_and_nearest_to_the_source(capacities):
    network = Network()
    for (start, end), capacity in capacities.items():
        network.add_edge(start, end, capacity)
    cost, side = network.minimum_cut("s", "t")

    def cost_of(before):
        return sum(c for (a, b), c in capacities.items() if a in before and b not in before)

    sides = [{"s", *some} for some in subsets("abcd")]
    cheapest = min(map(cost_of, sides))
    if cheapest >= FOREVER:
        assert cost >= FOREVER
    else:
        assert cost == cheapest
        assert side == set.intersection(*(some for some in sides if cost_of(some) == cheapest))


def test_capacities_of_the_same_edge_add_up():
    network = Network()
    network.add_edge("s", "t", 2)
    network.add_edge("s", "t", 3)
    assert network.minimum_cut("s", "t") == (5, {"s"})


def test_capacities_are_not_limited_to_32_bits():
    network = Network()
    network.add_edge("s", "a", 1 << 40)
    network.add_edge("a", "t", (1 << 40) + 1)
    assert network.minimum_cut("s", "t") == (1 << 40, {"s"})


### Cuts of a graph


@st.composite
def scopes(draw):
    """A graph with outputs and declared edges, reads in it, and the nodes that are later."""
    graph = Graph()
    graph.inputs = [Value("input", 100)]
    values = list(graph.inputs)
    size = draw(st.integers(2, 8))
    sizes = st.sampled_from([0, 1, 1, 2, 3, 8, FOREVER])
    for number in range(size):
        inputs = draw(st.lists(st.sampled_from(values), max_size=3))
        outputs = [Value(f"v{number}.{i}", draw(sizes)) for i in range(draw(st.integers(1, 2)))]
        kinds = [number, number, PRODUCT, UPDATE] if inputs else [number, number, PRODUCT]
        graph.add_node(draw(st.sampled_from(kinds)), inputs, outputs)
        values += outputs
    graph.set_outputs(draw(st.lists(st.sampled_from(values), max_size=3)))
    numbers = st.integers(0, size - 1)
    for first, second in draw(st.lists(st.tuples(numbers, numbers), max_size=2)):
        if first < second:
            graph.add_edge(Edge("declared", graph.nodes[first], graph.nodes[second]))
    nodes = st.sampled_from(graph.nodes)
    later = draw(st.lists(nodes, min_size=1, max_size=2, unique=True))
    after = closure(graph, later)
    free = [node for node in graph.nodes if node not in after]
    assume(free)
    readers = draw(st.lists(st.sampled_from(free), min_size=1, max_size=2, unique=True))
    needed = draw(st.lists(st.sampled_from(free), max_size=1))
    return graph, readers, needed, later


def closure(graph, starts):
    """The nodes and all that runs after them by force."""
    seen = dict.fromkeys(starts)
    todo = list(starts)
    for node in todo:
        for user in graph.nodes:
            if user not in seen and node in graph.predecessors(user):
                seen[user] = None
                todo.append(user)
    return seen


def cuts(graph, readers, needed, later):
    """Every legal set of nodes that are finished before the pin, and what it costs."""
    after = closure(graph, later)
    region = [node for node in closure(graph, readers) if node not in after]
    forced = {node for node in [*readers, *needed] if node in region}
    for some in subsets(node for node in region if node not in forced):
        before = forced | some
        previous = {p for node in before for p in graph.predecessors(node)}
        if all(p in before or p not in region for p in previous):
            yield before, sum(map(cost_of, crossing(before))) + copied(before)


def cost_of(value):
    """What is in memory anyway costs nothing; what cannot be kept at all cannot be pinned."""
    payloads = [value.producer.payload]
    if value.producer.payload is not UPDATE:
        payloads += [user.payload for user in value.users]
    in_memory = value.is_output or any(payload is PRODUCT for payload in payloads)
    return 0 if in_memory and value.nbytes < FOREVER else value.nbytes


def copied(before):
    """Outputs are copied for the updates of them that come later."""
    return sum(
        value.nbytes
        for node in before
        for value in node.outputs
        for user in value.users
        if value.is_output and user.payload is UPDATE and user.inputs[0] is value
        if user not in before
    )


def crossing(before):
    """The values that are made before the pin and used after it, by a node or by the caller."""
    return [
        value
        for node in before
        for value in node.outputs
        if value.is_output or any(user not in before for user in value.users)
    ]


@given(scopes())
def test_the_cut_is_legal_and_no_cheaper_one_exists(scope):
    graph, readers, needed, later = scope
    every = [(before, cost) for before, cost in cuts(*scope) if cost < FOREVER]
    cut = choose_cut(graph, readers, needed, later)
    if not every:
        assert cut is None
        return
    assert cut is not None
    cheapest = min(cost for _, cost in every)
    assert cut.cost == cheapest
    # Of the cheapest cuts it is the one with the fewest nodes before: nearest to the reads.
    nearest = set.intersection(*(before for before, cost in every if cost == cheapest))
    assert set(cut.values) == {value for value in crossing(nearest) if value.nbytes}
    for value, users in cut.values.items():
        assert users == [user for user in value.users if user not in nearest]


@given(scopes())
def test_nothing_that_is_pinned_waits_for_the_pin(scope):
    """With the pin in place the graph has no cycle: its inputs need nothing that is later."""
    graph, readers, needed, later = scope
    cut = choose_cut(graph, readers, needed, later)
    if cut is None:
        return
    users = [user for after in cut.values.values() for user in after]
    assert not any(value.producer in closure(graph, users + later) for value in cut.values)


def line(*sizes):
    """input -> reader -> ... -> value, each node with one result of the given size."""
    graph = Graph()
    value = Value("input", 100)
    graph.inputs = [value]
    for number, size in enumerate(sizes):
        result = Value(number, size)
        graph.add_node(number, [value], [result])
        value = result
    write = graph.add_node("write", [graph.inputs[0]], [Value("written", 100)])
    return graph, value, write


def test_the_sums_are_pinned_and_not_the_product_that_they_came_from():
    graph, last, write = line(4_000_000, 4_000_000, 4_000, 4_000_000)
    graph.add_node("use", [last, write.outputs[0]], [Value("used", 1)])
    cut = choose_cut(graph, [graph.nodes[0]], [], [write])
    assert cut is not None
    assert (list(cut.values), cut.cost) == ([graph.nodes[2].outputs[0]], 4000)


def test_of_equal_cuts_the_one_nearest_to_the_reads_is_taken():
    graph, last, write = line(8, 8, 8)
    graph.add_node("use", [last, write.outputs[0]], [Value("used", 1)])
    cut = choose_cut(graph, [graph.nodes[0]], [], [write])
    assert cut is not None
    assert list(cut.values) == [graph.nodes[0].outputs[0]]


def test_an_output_costs_nothing():
    graph, last, write = line(1, 4000)
    graph.set_outputs([last])
    cut = choose_cut(graph, [graph.nodes[0]], [], [write])
    assert cut is not None
    assert (list(cut.values), cut.cost) == ([last], 0)


def test_an_update_of_an_output_comes_before_the_pin():
    graph, last, write = line(8)
    updated = graph.add_node(UPDATE, [last], [Value("updated", 8)]).outputs[0]
    graph.set_outputs([last, updated, write.outputs[0]])
    cut = choose_cut(graph, [graph.nodes[0]], [], [write])
    assert cut is not None
    assert (list(cut.values), cut.cost) == ([last, updated], 0)


@pytest.mark.parametrize("payload", ["row", PRODUCT])
def test_operands_and_results_of_a_kernel_of_its_own_cost_nothing(payload):
    graph = Graph()
    graph.inputs = [buffer := Value("buffer", 100)]
    first = graph.add_node(payload, [buffer], [Value("first", 4000)])
    other = PRODUCT if payload == "row" else "other"
    second = graph.add_node(other, [first.outputs[0]], [Value("second", 1)])
    write = graph.add_node("write", [buffer], [Value("written", 100)])
    graph.add_node("use", [second.outputs[0], write.outputs[0]], [Value("used", 1)])
    cut = choose_cut(graph, [first], [], [write])
    assert cut is not None
    assert (list(cut.values), cut.cost) == ([first.outputs[0]], 0)


def test_a_value_that_cannot_be_kept_is_not_pinned():
    graph, last, write = line(FOREVER, 4)
    graph.add_node("use", [last, write.outputs[0]], [Value("used", 1)])
    cut = choose_cut(graph, [graph.nodes[0]], [], [write])
    assert cut is not None
    assert list(cut.values) == [last]
    graph.set_outputs([graph.nodes[0].outputs[0]])
    assert choose_cut(graph, [graph.nodes[0]], [], [write]) is None


def test_a_read_that_feeds_the_write_is_cut_off_from_it():
    graph = Graph()
    graph.inputs = [buffer := Value("buffer", 100)]
    row = graph.add_node("row", [buffer], [Value("row", 10)])
    scaled = graph.add_node("scaled", [row.outputs[0]], [Value("scaled", 10)])
    write = graph.add_node("write", [buffer, scaled.outputs[0]], [Value("written", 100)])
    cut = choose_cut(graph, [row], [], [write])
    assert cut is not None
    assert cut.values == {row.outputs[0]: [scaled]}


def test_a_region_that_is_too_large_to_search_still_gets_a_legal_cut():
    graph, last, write = line(*[8] * 300, 1)
    graph.add_node("use", [last, write.outputs[0]], [Value("used", 1)])
    cut = choose_cut(graph, [graph.nodes[0]], [], [write])
    assert cut is not None
    assert list(cut.values) == [graph.nodes[0].outputs[0]]


def test_the_same_program_gets_the_same_pins_each_time():
    def fun(x):
        rows = [x[i] for i in range(8)]
        for i, row in enumerate(reversed(rows)):
            x = x.at[i].set(row)
        return x

    x = jnp.ones((8, 4))
    plans = {str(jax.make_jaxpr(scheduled(lambda x: fun(x)))(x)) for _ in range(10)}
    assert len(plans) == 1
