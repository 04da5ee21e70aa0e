"""The order of a graph, against a model that knows nothing but which node reaches which."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsched._graph import Edge, Graph, Value


class Model:
    """The transitive closure, recomputed from the list of edges whenever it is asked for."""

    def __init__(self, size):
        self.size = size
        self.edges = set()

    def reaches(self, start, end):
        seen, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for first, second in self.edges:
                if first == here and second not in seen:
                    seen.add(second)
                    todo.append(second)
        return start != end and end in seen


@st.composite
def programs(draw, most=9):
    """A graph of nodes with one or two results each, and the model of its data edges."""
    graph = Graph()
    graph.inputs = [Value("input")]
    values = list(graph.inputs)
    size = draw(st.integers(2, most))
    model = Model(size)
    for number in range(size):
        inputs = draw(st.lists(st.sampled_from(values), max_size=3))
        outputs = [Value(f"v{number}.{i}") for i in range(draw(st.integers(1, 2)))]
        graph.add_node(number, inputs, outputs)
        model.edges |= {(v.producer.payload, number) for v in inputs if v.producer is not None}
        values += outputs
    return graph, model


def numbers(draw, model):
    return draw(st.integers(0, model.size - 1)), draw(st.integers(0, model.size - 1))


def assert_ordered(graph, edges):
    position = {node.payload: i for i, node in enumerate(graph.ordered())}
    assert sorted(position) == sorted(node.payload for node in graph.nodes)
    for first, second in edges:
        assert position[first] < position[second]


def assert_path(path, start, end, edges):
    """A chain of edges that exist, from `start` to `end`."""
    assert [path[0].source.payload, path[-1].target.payload] == [start, end]
    for edge, following in itertools.pairwise(path):
        assert edge.target is following.source
    assert {(edge.source.payload, edge.target.payload) for edge in path} <= edges


@given(programs())
def test_without_further_edges_the_order_is_the_source_order(program):
    graph, _ = program
    assert [node.payload for node in graph.ordered()] == list(range(len(graph.nodes)))


@given(st.data(), programs())
def test_an_edge_is_added_or_the_path_against_it_is_returned(data, program):
    graph, model = program
    for _ in range(data.draw(st.integers(1, 12))):
        first, second = numbers(data.draw, model)
        path = graph.add_edge(Edge("declared", graph.nodes[first], graph.nodes[second]))
        if first == second:
            assert path == []
        elif model.reaches(second, first):
            assert path is not None
            assert_path(path, second, first, model.edges)
        else:
            assert path is None
            model.edges.add((first, second))
        assert_ordered(graph, model.edges)


@given(st.data(), programs())
def test_an_edge_that_holds_already_moves_nothing(data, program):
    graph, model = program
    first, second = sorted(numbers(data.draw, model))
    if first != second:
        graph.add_edge(Edge("inferred", graph.nodes[first], graph.nodes[second]))
    assert [node.payload for node in graph.ordered()] == list(range(model.size))


@given(st.data(), programs())
def test_a_node_moves_only_if_the_new_edge_concerns_it(data, program):
    graph, model = program
    first, second = numbers(data.draw, model)
    old = graph.ordered()
    if graph.add_edge(Edge("declared", graph.nodes[first], graph.nodes[second])) is not None:
        return
    model.edges.add((first, second))

    def concerned(number):
        before = number == first or model.reaches(number, first)
        return before or number == second or model.reaches(second, number)

    def unconcerned(nodes):
        return [(i, n.payload) for i, n in enumerate(nodes) if not concerned(n.payload)]

    assert unconcerned(graph.ordered()) == unconcerned(old)


@given(st.data(), programs())
def test_successors_and_predecessors_are_the_edges(data, program):
    graph, model = program
    first, second = numbers(data.draw, model)
    if graph.add_edge(Edge("declared", graph.nodes[first], graph.nodes[second])) is None:
        model.edges.add((first, second))
    forwards = {(n.payload, e.target.payload) for n in graph.nodes for e in graph.successors(n)}
    backwards = {(p.payload, n.payload) for n in graph.nodes for p in graph.predecessors(n)}
    assert forwards == backwards == model.edges


@given(st.data(), programs(), st.integers(0, 12))
def test_depends_on_is_reachability_or_gives_up(data, program, budget):
    graph, model = program
    for _ in range(data.draw(st.integers(0, 5))):
        first, second = numbers(data.draw, model)
        if graph.add_edge(Edge("declared", graph.nodes[first], graph.nodes[second])) is None:
            model.edges.add((first, second))
    for first, second in itertools.product(graph.nodes, repeat=2):
        if first is second:
            continue
        expected = model.reaches(first.payload, second.payload)
        assert graph.depends_on(second, first, budget) in (expected, None)
        assert graph.depends_on(second, first, 1000) is expected


@given(st.data(), programs())
def test_an_inserted_node_stands_between_its_inputs_and_its_users(data, program):
    """A node in a slot takes over users of a value that are no ancestors of what it waits for."""
    graph, model = program
    first, second = numbers(data.draw, model)
    if graph.add_edge(Edge("declared", graph.nodes[first], graph.nodes[second])) is None:
        model.edges.add((first, second))
    value = data.draw(st.sampled_from([v for node in graph.nodes for v in node.outputs]))
    others = data.draw(st.lists(st.sampled_from(graph.nodes), max_size=2))
    waits = [value.producer.payload, *(node.payload for node in others)]
    users = [
        user
        for user in value.users
        if not any(user.payload == w or model.reaches(user.payload, w) for w in waits)
    ]
    kept = [user for user in value.users if user not in users]
    is_output = data.draw(st.booleans())
    graph.set_outputs([value, graph.inputs[0]] if is_output else [])

    pinned = Value("pinned")
    inputs = [value, *(node.outputs[0] for node in others)]
    pin = graph.add_node(model.size, inputs, [pinned], inserted=True)
    graph.rewire(value, pinned, users, outputs=is_output)

    model.edges -= {
        (value.producer.payload, user.payload)
        for user in users
        if not any(other in user.inputs for other in value.producer.outputs)
        and not any(e.target is user for e in value.producer.outgoing)
    }
    assert_ordered(
        graph,
        model.edges
        | {(waited, pin.payload) for waited in waits}
        | {(pin.payload, user.payload) for user in users},
    )
    assert pinned.users == users
    assert [user for user in value.users if user is not pin] == kept
    assert all(value not in user.inputs and pinned in user.inputs for user in users)
    assert all(value in user.inputs and pinned not in user.inputs for user in kept)
    assert (value.is_output, pinned.is_output) == (False, is_output)
    assert graph.outputs == ([pinned, graph.inputs[0]] if is_output else [])


def chain(length):
    graph = Graph()
    value = Value("input")
    for number in range(length):
        result = Value(number)
        graph.add_node(number, [value], [result])
        value = result
    return graph


def test_an_inserted_node_stands_right_behind_the_last_of_its_inputs():
    graph = chain(3)
    first, second, third = graph.nodes
    pin = graph.add_node("pin", [first.outputs[0]], [Value("pinned")], inserted=True)
    assert graph.ordered() == [first, pin, second, third]
    after = graph.add_node("after", pin.outputs, [Value("after")], inserted=True)
    assert graph.ordered() == [first, pin, after, second, third]
    free = graph.add_node("free", graph.inputs, [Value("free")], inserted=True)
    assert graph.ordered() == [free, first, pin, after, second, third]


def test_a_value_that_is_used_twice_by_a_node_has_one_user():
    graph = Graph()
    value = Value("input")
    node = graph.add_node("square", [value, value], [Value("result")])
    assert value.users == [node]
    new = Value("new")
    graph.add_node("pin", [value], [new], inserted=True)
    graph.rewire(value, new, [node], outputs=False)
    assert (node.inputs, new.users) == ([new, new], [node])
    assert node not in value.users


def test_rewiring_refuses_a_cycle():
    graph = chain(3)
    first, _, third = graph.nodes
    pinned = Value("pinned")
    pin = graph.add_node("pin", [third.outputs[0]], [pinned], inserted=True)
    with pytest.raises(AssertionError, match="cycle"):
        graph.rewire(first.inputs[0], pinned, [first], outputs=False)
    assert pin.outputs == [pinned]


def test_the_search_for_a_dependency_is_bounded():
    graph = chain(100)
    assert graph.depends_on(graph.nodes[-1], graph.nodes[0], 50) is None
    assert graph.depends_on(graph.nodes[-1], graph.nodes[60], 50) is True
    assert graph.depends_on(graph.nodes[0], graph.nodes[-1], 50) is False


def test_a_long_chain_turns_around():
    graph = Graph()
    for number in range(200):
        graph.add_node(number, [], [Value(number)])
    for later, earlier in itertools.pairwise(graph.nodes):
        assert graph.add_edge(Edge("declared", earlier, later)) is None
    assert [node.payload for node in graph.ordered()] == list(range(200))[::-1]
    path = graph.add_edge(Edge("declared", graph.nodes[0], graph.nodes[-1]))
    assert path is not None
    assert len(path) == 199
