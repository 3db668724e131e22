"""Equal layers are found in the traced program, whatever they are called and in whichever order they come."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from search_spaces.sharding.base import Rule
from search_spaces.sharding.nodes import nodes_of
from search_spaces.sharding.repetition import forms_of, repetitions
from search_spaces.sharding.space import ShardingSpace
from tests.search_spaces.sharding.small_spaces import array, graph_of, mlp_arguments, mlp_step, space_of


def test_stretches_that_repeat():
    layer = list("abacad")
    letters = [*"xy", *layer * 5, *"z", *"pq" * 4, *"w"]
    symbols = np.unique(letters, return_inverse=True)[1]
    assert repetitions(symbols) == [(2, 32, 6), (33, 41, 2)]
    assert repetitions(np.arange(20)) == []
    assert repetitions(np.zeros(0, int)) == []


def test_stretches_do_not_overlap_and_do_repeat():
    rng = np.random.default_rng(0)
    for _ in range(50):
        parts = [np.tile(rng.integers(0, 4, rng.integers(1, 9)), rng.integers(1, 5)) for _ in range(6)]
        symbols = np.concatenate(parts)
        taken = np.zeros(len(symbols), bool)
        for start, stop, period in repetitions(symbols):
            assert stop - start >= 2 * period
            assert (symbols[start + period : stop] == symbols[start : stop - period]).all()
            assert not taken[start:stop].any()
            taken[start:stop] = True


def _layer(params, x):
    up, query, key, down = params
    mixed = jax.nn.softmax((x @ query) @ (x @ key).T) @ x
    return x + jax.nn.relu(mixed @ up) @ down


def _training(num_layers: int, checkpoint: bool, width: int = 8) -> ShardingSpace:
    """The space of an Adam step on layers with two equal matrices each, without any names."""
    layer = jax.checkpoint(_layer) if checkpoint else _layer
    optimizer = optax.adam(1e-3)

    def loss(params, x):
        first, layers, last = params
        x = x @ first
        for own in layers:
            x = layer(own, x)
        return (x @ last).sum()

    def step(state, x):
        params, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(params, x), moments)
        return optax.apply_updates(params, updates), moments

    square = array(width, width)
    layers = [(array(width, 4 * width), square, square, array(4 * width, width)) for _ in range(num_layers)]
    params = array(6, width), layers, array(width, 2)
    return space_of(step, (params, jax.eval_shape(optimizer.init, params)), array(16, 6))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_arguments_of_all_layers_are_tied(checkpoint):
    space = _training(5, checkpoint)
    tied = space.tied
    per_layer = 4
    of_layers = np.concatenate([[0], np.ones(5 * per_layer), [0]]).astype(bool)
    inputs = [tied[v.index] for v in space.graph.inputs]
    params = np.array(inputs[:22])
    layers = params[of_layers].reshape(5, per_layer)
    assert (layers == layers[0]).all()
    assert len(set(layers[0].tolist())) == per_layer  # query and key of a layer are two
    assert params[0] not in layers
    assert params[-1] not in layers
    for moments in (np.array(inputs[23:45]), np.array(inputs[45:67])):
        own = moments[of_layers].reshape(5, per_layer)
        assert (own == own[0]).all()


def test_tied_nodes_have_the_same_strategies():
    space = _training(4, False)
    for number in np.unique(space.tied):
        members = np.flatnonzero(space.tied == number)
        assert len({space.nodes[v].strategies for v in members}) == 1
    assert len(np.unique(space.tied)) < 0.6 * len(space.nodes)


def test_what_is_built_once_for_equal_layers_is_what_each_needs():
    space = _training(3, True)
    for node, node_cost in zip(space.nodes, space.problem.node_cost, strict=True):
        assert node_cost.tolist() == space.node_costs.node_s(node).tolist()
    forms = range(len(space.graph.vertices))
    each_apart = nodes_of(space.graph, space.rules, forms, space.given, space.reshard_costs, False, {})
    assert [node.strategies for node in space.nodes] == [node.strategies for node in each_apart]
    assert len({id(node.strategies) for node in space.nodes}) < 0.5 * len(space.nodes)


def test_more_layers_make_no_more_kinds():
    few, many = _training(4, True), _training(9, True)
    assert len(np.unique(few.tied)) == len(np.unique(many.tied))


def test_what_does_not_repeat_is_tied_to_nothing():
    space = space_of(mlp_step, *mlp_arguments())
    inputs = [space.tied[v.index] for v in space.graph.inputs]
    assert len(set(inputs[:4])) == 4
    assert len(space.tied) == len(space.nodes)


def _layers(layer, num_layers, *args, scopes=(), given=None):
    """The space of equal layers; `args` are those of one layer, which come before x in the flat arguments."""

    def fn(layers, x):
        for i, own in enumerate(layers):
            with jax.named_scope(scopes[i] if scopes else "layer"):
                x = layer(x, *own)
        return x

    return space_of(fn, [args] * num_layers, array(8, 8), given=given)


def _argument_groups(space, per_layer):
    inputs = [space.tied[v.index] for v in space.graph.inputs]
    return np.array(inputs[:-1]).reshape(-1, per_layer)


def test_arguments_at_different_operands_of_one_operation_are_not_tied():
    groups = _argument_groups(_layers(lambda x, a, b: jnp.sin(jnp.tanh(a * b) @ x) + 1, 5, *[array(8, 8)] * 2), 2)
    assert (groups == groups[0]).all()
    assert groups[0, 0] != groups[0, 1]


def test_layers_with_other_names_or_given_shardings_are_not_tied():
    def layer(x, w):
        return jnp.sin(jnp.tanh(x @ w)) + 1

    weight = array(8, 8)
    assert len(np.unique(_argument_groups(_layers(layer, 6, weight), 1))) == 1
    numbered = [f"layer_{i}" for i in range(6)]
    assert len(np.unique(_argument_groups(_layers(layer, 6, weight, scopes=numbered), 1))) == 1
    named = ["encoder"] * 3 + ["decoder"] * 3
    groups = _argument_groups(_layers(layer, 6, weight, scopes=named), 1).ravel()
    assert (groups == groups[0]).tolist() == [True] * 3 + [False] * 3
    assert (groups[3:] == groups[3]).all()
    with_given = _layers(layer, 6, weight, given={2: [(0,), ()]})
    groups = _argument_groups(with_given, 1).ravel()
    assert (groups == groups[0]).tolist() == [True, True, False, True, True, True]


def test_shared_reshards_of_different_results_are_not_tied():
    def layer(x, w):
        first, second = jnp.split(x @ w, 2, axis=1)
        return jnp.concatenate([jnp.sin(first) + first, jnp.cos(second) * second], axis=1)

    space = _layers(layer, 5, array(8, 8))
    shared = {}
    for value_id, node in space.shared_reshards.items():
        value = space.graph.values[value_id]
        if space.graph.vertices[value.vertex].primitive == "split":
            shared.setdefault(value.result, []).append(int(space.tied[node]))
    assert [len(set(numbers)) for numbers in shared.values()] == [1, 1]
    assert shared[0][0] != shared[1][0]


X = array(8, 8)


def forms(fn, *args, primitive):
    """The forms of a function's operations of one kind, in order."""
    space = space_of(fn, *args)
    return [space.forms[v.index] for v in space.graph.operations() if v.primitive == primitive]


def scan(trips, x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=trips)[0]


def test_equal_operations_have_one_form_whatever_they_read():
    one, other = forms(lambda a, b: jnp.sin(a) @ jnp.sin(b), X, X, primitive="sin")
    assert one == other
    one, other = forms(lambda a, b: jnp.sin(a).sum() + jnp.sin(b).sum(), X, array(8, 4), primitive="sin")
    assert one != other


def test_operations_that_run_more_often_have_another_form():
    one, other, again = forms(lambda x, w: scan(3, scan(5, scan(3, x, w), w), w), X, X, primitive="dot_general")
    assert one == again
    assert one != other


def test_operations_without_operands_that_run_more_often_have_another_form():
    def counted(trips, x):
        return jax.lax.scan(lambda c, _: (c + jax.lax.broadcasted_iota(jnp.float32, (8, 8), 0), None), x, length=trips)[
            0
        ]

    one, other, again = forms(lambda x: counted(3, counted(5, counted(3, x))), X, primitive="iota")
    assert one == again
    assert one != other


def test_carries_of_longer_loops_have_another_form():
    space = space_of(lambda x, w: scan(3, scan(5, scan(3, x, w), w), w), X, X)
    one, other, again = (space.forms[v.index] for v in space.graph.vertices if v.kind == "carry")
    assert one == again  # its body reads it three times, and leaves it once
    assert one != other


def test_arrays_of_other_types_and_literals_are_told_apart():
    graph = graph_of(lambda a, b, s: (a.astype(jnp.float32) + b) * 2.0 * s, array(8, 8, dtype=jnp.bfloat16), X, array())
    rule = Rule((), (), ())
    numbers = forms_of(graph, [rule] * len(graph.vertices))
    a, b, _ = (numbers[v.index] for v in graph.inputs)
    assert a != b
    by_literal, by_scalar = (numbers[v.index] for v in graph.operations() if v.primitive == "mul")
    assert by_literal != by_scalar


def test_an_operation_without_a_rule_has_a_form_of_its_own():
    graph = graph_of(lambda a: jnp.sin(jnp.sin(a)), X)
    one, other = (forms_of(graph, [None] * len(graph.vertices))[v.index] for v in graph.operations())
    assert one != other
