"""The Problem's rules, its exact cost, and its relaxed cost against the exact one and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Problem
from cost.edges import distinct_arrays
from cost.evaluation import Evaluator, change_costs, chosen_costs, evaluate, relaxed_cost
from cost.validation import validate

# Five nodes, two edges, three usages: small enough to work out by hand.
SMALL = Problem(
    node_cost=[np.array(c) for c in ([15, 55, 65], [45, 50], [55, 60, 70], [95, 90], [10])],
    edge_nodes=np.array([[0, 1], [1, 2]]),
    edge_cost=[np.array([[2, 3], [4, 5], [6, 7]]), np.array([[10, 20, 30], [40, 50, 60]])],
    usage_node=np.array([0, 1, 2]),
    usage=[np.array(u) for u in ([10, 25, 25], [10, 15], [15, 20, 25])],
    usage_interval=np.array([[0, 2], [1, 3], [2, 4]]),
    memory_limit=30,
)


def _one_hot(problem: Problem, choice: list[int]) -> list[jax.Array]:
    return [jnp.eye(len(c))[s] for c, s in zip(problem.node_cost, choice, strict=True)]


def test_evaluate_is_the_sum_worked_by_hand():
    result = evaluate(SMALL, [0, 1, 0, 1, 0])
    assert result.cost == 15 + 50 + 55 + 90 + 10 + 3 + 40
    assert isinstance(result.cost, int)
    assert result.peak == 30  # at time 2: 15 of node 1 and 15 of node 2
    assert result.feasible
    assert result.excess == 0
    over = evaluate(SMALL, [1, 1, 2, 0, 0])
    assert (over.peak, over.excess, over.feasible) == (40, 10, False)
    times, usage = Evaluator(SMALL).live_usage(np.array([1, 1, 2, 0, 0]))
    np.testing.assert_array_equal(times, [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(usage[:, 0], [25, 40, 40, 25, 0])


def test_integer_costs_near_the_limit_sum_exactly():
    big = 10**18 - 1
    problem = Problem([np.array([big])] * 25, np.zeros((0, 2), int), [], np.zeros(0, int), [], np.zeros((0, 2), int))
    assert evaluate(problem, [0] * 25).cost == 25 * big  # beyond both float64 and int64


def test_largest_load_and_device_limits():
    problem = Problem(
        node_cost=[np.zeros(2), np.zeros(2)],
        edge_nodes=np.array([[0, 1]]),
        edge_cost=[np.array([[0.0, 1.0], [np.inf, 0.0]])],
        usage_node=np.array([0, 1]),
        usage=[np.array([[4, 0], [0, 4]])] * 2,
        usage_interval=np.array([[0, 1], [0, 1]]),
        memory_limit=np.array([8, 7]),
        load=[np.array([[3.0, 0.0], [0.0, 5.0]])] * 2,
    )
    validate(problem)
    assert evaluate(problem, [0, 0]).cost == 6.0
    assert evaluate(problem, [0, 1]).cost == 1.0 + 5.0
    both_on_second = evaluate(problem, [1, 1])
    np.testing.assert_array_equal(both_on_second.peak, [0, 8])
    assert both_on_second.excess == 1
    assert not both_on_second.feasible
    assert not evaluate(problem, [1, 0]).feasible  # forbidden


def test_arrays_are_shared_by_identity_not_by_value():
    first, equal, other = np.zeros(2), np.zeros(2), np.ones(3)
    distinct, which = distinct_arrays([other, first, equal, first, other])
    assert [id(array) for array in distinct] == [id(other), id(first), id(equal)]
    assert which.tolist() == [0, 1, 2, 1, 0]
    assert distinct_arrays([])[1].tolist() == []


def test_changes_are_the_differences_between_evaluations():
    rng = np.random.default_rng(0)
    problem = SMALL._replace(load=[rng.uniform(0, 50, (len(c), 2)) for c in SMALL.node_cost])
    choice = [1, 0, 2, 1, 0]
    nodes, edges, _ = chosen_costs(problem, choice)
    largest = np.sum([load[s] for load, s in zip(problem.load, choice, strict=True)], axis=0).max()
    before = evaluate(problem, choice).cost
    assert before == pytest.approx(nodes.sum() + edges.sum() + largest)
    for v, changes in enumerate(change_costs(problem, choice)):
        others = [[*choice[:v], s, *choice[v + 1 :]] for s in range(len(changes))]
        np.testing.assert_allclose(changes, [evaluate(problem, other).cost - before for other in others], atol=1e-12)


def test_relaxed_cost_is_exact_on_corners_and_below_the_mean_inside():
    rng = np.random.default_rng(0)
    problem = SMALL._replace(load=[rng.uniform(0, 50, (len(c), 3)) for c in SMALL.node_cost])
    corners = [[0, 0, 2, 1, 0], [1, 1, 0, 0, 0], [2, 1, 1, 1, 0]]
    for choice in corners:
        expected = evaluate(problem, choice).cost
        assert float(relaxed_cost(problem, _one_hot(problem, choice))) == pytest.approx(expected, rel=1e-6)
    weights = [jnp.full(len(c), 1 / len(c)) for c in problem.node_cost]
    mean = np.mean([evaluate(problem, c).cost for c in np.ndindex(*(len(c) for c in problem.node_cost))])
    assert float(relaxed_cost(problem, weights)) <= mean + 1e-3


def test_relaxed_gradient_against_finite_differences():
    rng = np.random.default_rng(1)
    problem = SMALL._replace(load=[rng.uniform(0, 50, (len(c), 2)) for c in SMALL.node_cost])
    weights = jnp.asarray(rng.dirichlet(np.ones(11)), jnp.float32)
    gradient = jax.grad(lambda w: relaxed_cost(problem, w))(weights)
    for i in range(11):
        step = 0.05 * jnp.eye(11)[i]
        slope = (relaxed_cost(problem, weights + step) - relaxed_cost(problem, weights - step)) / 0.1
        assert float(gradient[i]) == pytest.approx(float(slope), rel=1e-2)


def test_weight_on_a_forbidden_entry_is_infinite_with_a_finite_gradient():
    problem = SMALL._replace(edge_cost=[np.array([[2.0, np.inf], [4, 5], [6, 7]]), SMALL.edge_cost[1]])
    assert np.isfinite(relaxed_cost(problem, _one_hot(problem, [0, 0, 0, 0, 0])))
    weights = [jnp.full(len(c), 1 / len(c)) for c in problem.node_cost]
    assert np.isposinf(relaxed_cost(problem, weights))
    gradient = jax.grad(lambda w: relaxed_cost(problem, w))(jnp.concatenate(weights))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_cost": [*SMALL.node_cost[:4], np.zeros(0)]}, r"`node_cost\[4\]` is empty"),
        ({"node_cost": [np.array([1, np.nan, 2]), *SMALL.node_cost[1:]]}, r"`node_cost\[0\]` must not hold NaN"),
        ({"edge_nodes": np.array([[0, 1], [1, 7]])}, r"`edge_nodes\[1\]` is \[1, 7\].*0 to 4"),
        ({"edge_nodes": np.array([[0, 1], [2, 2]])}, "joins node 2 to itself"),
        ({"edge_nodes": np.array([[0, 1]])}, r"`edge_nodes` .* shape \(2, 2\), a pair for each array of `edge_cost`"),
        (
            {"edge_nodes": np.array([[1, 0], [1, 2]])},
            r"`edge_cost\[0\]` between nodes 1 and 0 must have shape \(2, 3\)",
        ),
        ({"usage_node": np.array([0, 1])}, "`usage_node` must have one node for each of 3 usages"),
        ({"usage_node": np.array([0, 1, 9])}, r"`usage_node\[2\]` is 9"),
        ({"usage_interval": np.array([[0, 2], [3, 3], [2, 4]])}, r"`usage_interval\[1\]` is \[3, 3\)"),
        ({"usage": [-SMALL.usage[0], *SMALL.usage[1:]]}, "must be finite and not negative, got -25"),
        ({"memory_limit": np.array([1.0, 2.0]), "usage": [np.ones((3, 3)), *SMALL.usage[1:]]}, "for 2 devices"),
        ({"usage": [np.full(3, np.inf), *SMALL.usage[1:]]}, r"`usage\[0\]`.*finite.*got inf; a strategy"),
        ({"usage_node": np.array([0.0, 1.0, 2.0])}, "`usage_node` must be integers, got float64"),
        ({"memory_limit": -1.0}, "`memory_limit` must be"),
        ({"memory_limit": "8"}, "`memory_limit` must be.*got '8'"),
        ({"memory_limit": None}, "`memory_limit` must be.*got None"),
        ({"node_cost": [np.float64(1), *SMALL.node_cost[1:]]}, r"`node_cost\[0\]` must have shape \(strategies,\)"),
        ({"memory_limit": [1, [2]]}, r"`memory_limit` must be a number or `\[D\]`, not negative, got \[1, \[2\]\]"),
        ({"memory_limit": np.zeros(0)}, r"`memory_limit` must be a number or `\[D\]`.*`np.inf` is no limit"),
        ({"load": [np.zeros(3)] * 5}, r"`load\[0\]` must have shape \(3, loads\), got \(3,\)"),
        ({"amount": [np.zeros(3)] * 5}, r"`amount\[0\]` must have shape \(3, amounts\), got \(3,\)"),
        ({"load_group": np.array(["a"])}, "`load_group` must be integers, got <U1"),
        ({"amount_limit": np.ones(1)}, r"`amount_limit` must be one number for each of the 0 .* give an array `\[0\]`"),
        ({"amount_limit": np.array("a")}, "`amount_limit` must be one number for each.*got array"),
        ({"load": [np.zeros((3, 2))]}, r"`load` must be \(\) or one array for each of the 5 nodes"),
        ({"load": [np.zeros((9, 2)) for _ in range(5)]}, r"`load\[0\]` must have shape \(3, 2\)"),
    ],
)
def test_validate_names_field_rule_and_value(change, message):
    validate(SMALL)
    with pytest.raises(ValueError, match=message):
        validate(SMALL._replace(**change))


def test_a_choice_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="takes strategy 2 of node 1, which has 2"):
        evaluate(SMALL, [0, 2, 0, 0, 0])
    with pytest.raises(ValueError, match="must be 5 integers"):
        evaluate(SMALL, [0, 1])
    with pytest.raises(ValueError, match=r"`choice` must be 5 integers, one for each node; got object \(5,\)"):
        evaluate(SMALL, [0, [1], 0, 0, 0])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("field", ["edge_nodes", "usage_node", "usage_interval"])
def test_lists_in_place_of_arrays_are_refused_by_name(field):
    with pytest.raises(ValueError, match=rf"`{field}` must be a NumPy array, got list; wrap it in `np.array`"):
        validate(SMALL._replace(**{field: getattr(SMALL, field).tolist()}))


@pytest.mark.parametrize("field", ["node_cost", "edge_cost", "usage"])
def test_lists_among_arrays_are_refused_by_place(field):
    arrays = list(getattr(SMALL, field))
    with pytest.raises(ValueError, match=rf"`{field}\[1\]`.* must be a NumPy array, got list"):
        validate(SMALL._replace(**{field: [arrays[0], arrays[1].tolist(), *arrays[2:]]}))


@pytest.mark.parametrize("field", ["node_cost", "edge_cost", "usage", "load", "edge_load", "amount", "edge_amount"])
@pytest.mark.parametrize("value", [None, np.ones((2, 2)), "ab", 3])
def test_what_is_no_list_of_arrays_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"`{field}` must be a list of NumPy arrays, got .*; write `\[np.array"):
        validate(SMALL._replace(**{field: value}))


def test_arrays_of_other_kinds_than_plain_numpy_are_refused_by_place():
    with pytest.raises(ValueError, match=r"`node_cost\[0\]` must be a NumPy array, got .*wrap it in `np.array`"):
        validate(SMALL._replace(node_cost=[jnp.array([3.0, 1.0, 2.0]), *SMALL.node_cost[1:]]))
    masked = np.ma.array([3.0, 1.0, 2.0], mask=[False, True, False])
    with pytest.raises(ValueError, match=r"`node_cost\[0\]` must be .* without a mask; fill it by `array.filled"):
        validate(SMALL._replace(node_cost=[masked, *SMALL.node_cost[1:]]))


def test_usages_are_for_the_same_devices():
    usage = [np.ones((3, 2)), np.ones(2), np.ones((3, 3))]
    with pytest.raises(ValueError, match=r"`usage\[2\]` is for 3 devices, but `usage\[0\]` for 2"):
        validate(SMALL._replace(usage=usage))
    validate(SMALL._replace(usage=[*usage[:2], np.ones((3, 2))]))


def test_an_edge_between_no_nodes_is_refused():
    with pytest.raises(ValueError, match=r"`edge_nodes\[0\]` is \[0, 1\], but there are no nodes"):
        validate(Problem([], np.array([[0, 1]]), [np.zeros((1, 1))]))
