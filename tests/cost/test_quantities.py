"""Quantities: amounts add up by groups, mix like choices, and their weights are a problem's costs."""

import numpy as np
import pytest

from cost.base import Problem
from cost.evaluation import Evaluator, evaluate
from cost.quantities import LiveMemory, Quantity, amounts_of, with_weights
from cost.validation import validate_quantities

EDGES = np.array([[0, 1], [1, 2], [2, 0]])
NODE = [np.array([1.0, 2.0]), np.array([10.0, 20.0, 30.0]), np.array([100.0, 200.0])]
EDGE = [np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2), np.arange(4.0).reshape(2, 2)]
FREE = Problem([np.zeros(2), np.zeros(3), np.zeros(2)], EDGES, [np.zeros_like(matrix) for matrix in EDGE])


def test_a_quantity_without_groups_is_one_sum_over_nodes_and_edges():
    quantity = Quantity(NODE, EDGE)
    assert quantity.shape == ()
    # Nodes 2 + 30 + 100, edges EDGE[0][1, 2] = 5, EDGE[1][2, 0] = 4, EDGE[2][0, 1] = 1.
    assert quantity.amounts(FREE, np.array([1, 2, 0])) == 2 + 30 + 100 + 5 + 4 + 1


def test_groups_of_nodes_and_edges_are_summed_apart_and_further_dimensions_stay():
    pairs = Quantity([np.stack([cost, -cost], 1) for cost in NODE], (), np.array([0, 1, 1]), None, 3)
    assert pairs.shape == (3, 2)
    assert pairs.amounts(FREE, np.array([1, 2, 0])).tolist() == [[2, -2], [130, -130], [0, 0]]
    edges = Quantity((), EDGE, None, np.array([2, 0, 2]), 3)
    assert edges.amounts(FREE, np.array([1, 2, 0])).tolist() == [4, 0, 6]


@pytest.mark.parametrize("seed", range(10))
def test_weights_of_quantities_are_costs_of_a_problem(seed):
    generator = np.random.default_rng(seed)
    groups = generator.integers(0, 4, 3), generator.integers(0, 4, 3)
    quantities = {
        "total": Quantity(NODE, EDGE),
        "grouped": Quantity([np.stack([c, c**2], 1) for c in NODE], [np.stack([m, -m], 2) for m in EDGE], *groups, 4),
        "nodes": Quantity(NODE),
    }
    weights = {name: generator.normal(size=quantity.shape) for name, quantity in quantities.items()}
    base = FREE._replace(node_cost=[generator.uniform(size=len(cost)) for cost in NODE])
    problem = with_weights(base, quantities, weights)
    for choice in np.ndindex(2, 3, 2):
        amounts = amounts_of(quantities, base, choice)
        expected = evaluate(base, choice).cost + sum(np.sum(weights[n] * amounts[n]) for n in quantities)
        assert evaluate(problem, choice).cost == pytest.approx(expected)


def test_the_memory_in_use_is_a_quantity_whose_weights_are_costs_too():
    usage = [np.array([4.0, 1.0]), np.array([5.0, 6.0, 7.0]), np.array([2.0, 3.0])]
    problem = FREE._replace(
        usage_node=np.array([0, 1, 1]), usage=[usage[0], usage[1], usage[1]],
        usage_interval=np.array([[0, 3], [1, 2], [2, 5]]),
    )  # fmt: skip
    memory = LiveMemory(problem)
    weights = np.random.default_rng(0).normal(size=memory.shape)
    priced = with_weights(problem, {"memory": memory}, {"memory": weights})
    for choice in np.ndindex(2, 3, 2):
        amounts = memory.amounts(problem, np.array(choice))
        assert amounts.tolist() == Evaluator(problem).live_usage(np.array(choice))[1][:, 0].tolist()
        assert evaluate(priced, choice).cost == pytest.approx(float(weights @ amounts))


def test_equal_layers_go_on_to_share_their_arrays():
    node, matrix = np.ones(2), np.ones((2, 2))
    problem = Problem([np.zeros(2)] * 4, np.array([[0, 1], [1, 2], [2, 3]]), [np.zeros((2, 2))] * 3)
    shared = Problem([node] * 4, problem.edge_nodes, [matrix] * 3)
    quantity = Quantity(shared.node_cost, shared.edge_cost, np.array([0, 1, 1, 0]), np.array([0, 0, 1]), 2)
    found = with_weights(problem, {"one": quantity}, {"one": np.array([1.0, 2.0])})
    assert found.edge_cost[0] is found.edge_cost[1] is not found.edge_cost[2]
    other = with_weights(shared, {"one": quantity}, {"one": np.array([1.0, 1.0])})
    assert len({id(cost) for cost in other.node_cost}) == 1


@pytest.mark.parametrize(
    "quantity",
    [
        Quantity(NODE, EDGE, np.array([0, 1, 1]), np.array([2, 0, 2]), 3),
        Quantity([np.stack([cost, -cost], 1) for cost in NODE]),
        Quantity((), EDGE),
        Quantity(),
        LiveMemory(FREE),
    ],
)
def test_quantities_that_keep_the_rules_are_taken(quantity):
    validate_quantities({"busy": quantity}, FREE, "q")


@pytest.mark.parametrize("quantity", [NODE, None, LiveMemory(None)])  # pyright: ignore[reportArgumentType]
def test_what_is_no_quantity_is_refused_by_name(quantity):
    with pytest.raises(TypeError, match=r"`q\['busy'\]` must be a Quantity\(node, edge\) or a LiveMemory"):
        validate_quantities({"busy": quantity}, FREE, "q")


def test_the_memory_in_use_is_that_of_the_problem_itself():
    other = FREE._replace(usage_node=np.array([0]), usage=[np.ones(2)], usage_interval=np.array([[0, 1]]))
    validate_quantities({"bytes": LiveMemory(other)}, other, "q")
    with pytest.raises(ValueError, match=r"`q\['bytes'\]` must be the LiveMemory of the problem; .* other usages"):
        validate_quantities({"bytes": LiveMemory(other)}, FREE, "q")


@pytest.mark.parametrize("quantities", [[Quantity(NODE)], None, {}])
def test_quantities_are_a_dict_of_one_or_more(quantities):
    with pytest.raises(TypeError, match="`q` must be a dict of one Quantity or more by their names, not "):
        validate_quantities(quantities, FREE, "q")


@pytest.mark.parametrize(
    ("quantity", "message"),
    [
        (Quantity(None), r"\.node` must be a list of NumPy arrays, got NoneType"),  # pyright: ignore[reportArgumentType]
        (Quantity(NODE[:2]), r"\.node` must be \(\) or one array for each of the 3 nodes, got 2"),
        (Quantity((), EDGE[:2]), r"\.edge` must be \(\) or one array for each of the 3 edges, got 2"),
        (Quantity([NODE[1], *NODE[1:]]), r"\.node\[0\]` must have shape \(2,\), got \(3,\)"),
        (Quantity((), [EDGE[0].T, *EDGE[1:]]), r"\.edge\[0\]` must have shape \(2, 3\), got \(3, 2\)"),
        (Quantity([np.ones((2, 2)), np.ones((3, 3)), np.ones((2, 2))]), r"\.node\[1\]` must have shape \(3, 2\)"),
        (Quantity(NODE, [np.stack([m, m], 2) for m in EDGE]), r"\.edge\[0\]` must have shape \(2, 3\), got \(2, 3, 2"),
        (Quantity([np.array(["a", "b"]), *NODE[1:]]), r"\.node\[0\]` must hold real numbers, got <U1"),
        (Quantity([NODE[0].tolist(), *NODE[1:]]), r"\.node\[0\]` must be a NumPy array, got list; wrap it"),
        (Quantity([np.array([np.nan, 1.0]), *NODE[1:]]), r"\.node\[0\]` must not hold NaN"),
        (Quantity([np.array([np.inf, 1.0]), *NODE[1:]]), r"\.node\[0\]` must be finite; .* an infinite `node_cost`"),
        (Quantity(NODE, (), np.array([0, 1, 5]), None, 2), r"\.node_group` must be None or 3 integers from 0 to 1"),
        (Quantity(NODE, (), np.array([0, 1]), None, 2), r"\.node_group` must be None or 3 integers from 0 to 1"),
        (Quantity((), EDGE, None, np.zeros(3), 2), r"\.edge_group` must be None or 3 integers.*got array\(\[0\., 0"),
        (Quantity(NODE, num_groups=0), r"\.num_groups` must be a whole number, 1 or more, not 0"),
    ],
)
def test_a_quantity_that_breaks_a_rule_is_named_with_its_field_and_place(quantity, message):
    with pytest.raises(ValueError, match=rf"`q\['busy'\]{message}"):
        validate_quantities({"busy": quantity}, FREE, "q")
