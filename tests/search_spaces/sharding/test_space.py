"""A function's problem says what its layouts cost: the same sums, reached from both ends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import num_strategies
from cost.evaluation import evaluate
from cost.quantities import with_weights
from cost.validation import validate
from search_spaces.sharding.base import Coded
from search_spaces.sharding.edge_costs import read_spec
from search_spaces.sharding.graph import Value
from search_spaces.sharding.product_formats import takes
from search_spaces.sharding.reshard_costs import CollectiveShares
from search_spaces.sharding.spec import divides
from tests.search_spaces.sharding.small_spaces import EXAMPLES, array, hardware_of, mlp_arguments, mlp_step, space_of


def random_choices(problem, count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(num_strategies(problem)).tolist() for _ in range(count)]


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request):
    fn, args = EXAMPLES[request.param]
    return space_of(fn, *args)


def test_the_problem_is_valid(example):
    validate(example.problem)
    assert len(example.problem.node_cost) == len(example.nodes)


def test_the_cost_of_a_choice_is_the_sum_of_what_its_layout_does(example):
    problem = example.problem
    for choice in random_choices(problem, 25):
        prediction = example.predict(choice)
        seconds = prediction.compute_s.sum() + prediction.preference_s.sum()
        seconds += sum(transfer.seconds for transfer in prediction.transfers)
        assert evaluate(problem, choice).cost == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["mlp_step", "scan_backward"])
def test_of_collectives_that_run_beside_arithmetic_only_the_exposed_part_costs(name):
    fn, args = EXAMPLES[name]
    space = space_of(fn, *args, hardware=replace(hardware_of("xy"), exposed_share=0.25))
    exposed_shares = set()
    for choice in random_choices(space.problem, 10):
        prediction = space.predict(choice)
        seconds = prediction.compute_s.sum() + prediction.preference_s.sum()
        seconds += sum(transfer.seconds for transfer in prediction.transfers)
        assert evaluate(space.problem, choice).cost == pytest.approx(seconds, rel=1e-9)
        exposed_shares |= {round(t.seconds / t.link_s, 9) for t in prediction.transfers}
    assert exposed_shares == {0.25, 1.0}


def test_whole_arrays_everywhere_move_nothing(example):
    choice = [0] * len(example.nodes)
    assert example.predict(choice).transfers == ()
    assert all(spec == ((),) * len(spec) for spec in example.layout(choice).value_specs)


def test_every_spec_of_even_dimensions_divides_its_array(example):
    for node in example.nodes:
        for strategy in node.strategies:
            if node.shared_value is not None:
                assert divides(strategy.results[0], node.shared_value.shape, example.axis_sizes)
                continue
            arrays = [*node.vertex.operands, *node.vertex.results, *node.vertex.results]
            specs = (*strategy.operands, *strategy.results, *strategy.unreduced)
            for value, spec in zip(arrays, specs, strict=True):
                assert not isinstance(value, Value) or divides(spec, value.shape, example.axis_sizes)


def test_the_first_strategy_of_every_node_is_whole(example):
    for node in example.nodes:
        assert not any(axes for spec in (*node.strategies[0].operands, *node.strategies[0].results) for axes in spec)


def test_what_a_vertex_hands_to_itself_is_free(example):
    """Such links are no edges: a carry that its body leaves as it is, an argument that is returned."""
    for node, result, reader, operand, _, _ in example.edges:
        if node == reader:
            for s, strategy in enumerate(example.nodes[node].strategies):
                path = example.reshard_costs.path(
                    strategy.results[result], read_spec(example.nodes[reader], operand, s)
                )
                assert all(step.kind == "slice" for step in path)


def test_shared_reshards_stand_between_a_value_and_its_several_readers(example):
    readers = {}
    for node, _, reader, _, value, _ in example.edges:
        readers.setdefault((node, value.id), []).append(reader)
    for value_id, shared in example.shared_reshards.items():
        value = example.graph.values[value_id]
        assert readers[value.vertex, value_id] == [shared]
        assert len(readers[shared, value_id]) > 1


def test_an_argument_comes_back_as_it_is_stored():
    space = space_of(mlp_step, *mlp_arguments())
    for node, result, reader, operand, value, weight in space.edges:
        if space.nodes[reader].shared_value is None and space.nodes[reader].vertex.kind == "input":
            assert (operand, weight) == (0, 1.0)
            assert value in space.graph.outputs
            assert space.graph.feedback[space.graph.outputs.index(value)] == reader
            for s, strategy in enumerate(space.nodes[reader].strategies):
                assert read_spec(space.nodes[reader], 0, s) == strategy.unreduced[0]
            assert space.nodes[node].strategies[0].results[result] == ((),) * len(value.shape)
    returned = [i for i in space.graph.feedback if i is not None]
    assert returned == [0, 1, 2, 3]


def test_a_loop_s_inside_costs_as_often_as_it_runs():
    def scanned(trips):
        def fn(x, w):
            return jax.lax.fori_loop(0, trips, lambda _, c: jnp.tanh(c @ w), x)

        return space_of(fn, array(8, 8), array(8, 8), sizes=(2,))

    one, ten = scanned(2), scanned(20)  # a loop of one trip has none that waits for it
    (dot,) = [v.index for v in one.graph.operations() if v.primitive == "dot_general"]
    np.testing.assert_allclose(ten.problem.node_cost[dot], 10 * one.problem.node_cost[dot])


def test_given_specs_are_kept():
    space = space_of(lambda x, w: x @ w, array(8, 8), array(8, 8), given={0: [(0,), None], 1: [(), (1, 0)]})
    found = [{s.unreduced[0] for s in space.nodes[i].strategies} for i in (0, 1)]
    assert found == [{((0,), ()), ((0,), (1,))}, {((), (1, 0))}]


def test_a_memory_limit_is_the_problem_s():
    space = space_of(mlp_step, *mlp_arguments(), memory_limit_bytes=1000.0)
    assert space.problem.memory_limit == 1000.0
    assert not evaluate(space.problem, np.zeros(len(space.nodes), int)).feasible


def test_donated_arguments_free_their_memory():
    kept = space_of(mlp_step, *mlp_arguments())
    donated = space_of(mlp_step, *mlp_arguments(), donated=range(4))
    choice = np.zeros(len(kept.nodes), int)
    assert evaluate(donated.problem, choice).peak < evaluate(kept.problem, choice).peak


def test_sharded_arrays_take_their_part_of_the_memory():
    space = space_of(lambda x: jnp.sin(x), array(8, 8), sizes=(4,))
    choices = {space.nodes[0].strategies[s].unreduced[0]: s for s in range(len(space.nodes[0].strategies))}
    results = {space.nodes[1].strategies[s].results[0]: s for s in range(len(space.nodes[1].strategies))}
    whole, rows = ((), ()), ((0,), ())
    assert evaluate(space.problem, [choices[whole], results[whole]]).peak == 2 * 256
    assert evaluate(space.problem, [choices[rows], results[rows]]).peak == 2 * 64
    assert evaluate(space.problem, [choices[rows], results[whole]]).peak >= 64 + 256


def test_latency_of_parameters_is_shared_and_of_activations_is_not():
    """Compilers combine the collectives of parameters and gradients; those between layers wait for each other."""
    space = space_of(mlp_step, *mlp_arguments(), hardware=hardware_of("xy", latency_s=1.0))
    shares = CollectiveShares(space.graph, exposed_share=0.25)
    stored = sum(v.results[0].num_bytes for v in space.graph.inputs)
    for vertex in space.graph.inputs:
        assert shares.latency(vertex.results[0]) == vertex.results[0].num_bytes / stored
    dots = [v for v in space.graph.operations() if v.primitive == "dot_general"]
    assert shares.latency(dots[0].results[0]) == 1.0
    assert shares.exposed(dots[0].results[0]) == 1.0
    (updated, *_) = space.graph.outputs
    assert isinstance(updated, Value)
    assert 0 < shares.latency(updated) < 1
    assert shares.exposed(updated) == 0.25


def test_every_axis_has_its_price():
    """The same plan costs twice as much on a link of half the speed."""
    space = space_of(lambda x, w: x @ w, array(8, 8), array(8, 8), hardware=hardware_of("xy", latency_s=0.0))
    (dot,) = space.graph.operations()
    strategies = space.nodes[dot.index].strategies
    reduced = {s.operands[0][1][0]: i for i, s in enumerate(strategies) if s.reductions[0] and s.parts == 2
               and s.reductions[0][0].kind == "all_reduce"}  # fmt: skip
    seconds = [space.node_costs.reduction_s(dot, strategies[reduced[axis]]) for axis in (0, 1)]
    assert seconds == pytest.approx([2 * 256 / 2 * 1e-9, 2 * 256 / 2 * 0.5e-9])


def test_copies_of_one_number_take_no_memory():
    def fn(x):
        return jnp.where(x > 0, x, jnp.full(x.shape, -7.0)).sum(), jnp.where(x > 1, jnp.full(x.shape, -7.0), x).sum()

    space = space_of(fn, array(64, 64))
    broadcasts = [v.results[0].id for v in space.graph.operations() if v.primitive == "broadcast_in_dim"]
    assert broadcasts
    assert not space.lifetimes.is_written[broadcasts].any()


def test_a_value_may_be_rounded_for_several_products_or_exchanged_as_codes():
    """Its shared reshard has strategies for both, and the quantities add up to the problem."""

    def step(x, first, second, third):
        hidden = jnp.tanh(x @ first)
        return hidden @ second, hidden @ third

    space = space_of(step, array(64, 32), *[array(32, 32)] * 3)
    prices = {(v.index, "float8"): 0.0 for v in space.graph.operations() if takes(v, "float8")}
    free = space.with_formats(prices | {Coded(v.index, "int8", "exchange"): 0.0 for v in space.exchangeable})
    assert free.shared_formats
    weights = {name: np.ones(quantity.shape) for name, quantity in free.quantities.items()}
    weights |= {name: np.zeros_like(weights[name]) for name in ("overlapped_s", "memory_bytes")}
    problem = with_weights(free.preference_problem, free.quantities, weights)
    for found, expected in zip(problem.edge_cost, free.problem.edge_cost, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
