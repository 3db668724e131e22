"""Repeated structure: what counts as equal, that tied choices cost what they cost, and that they are good starts."""

import functools
import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from cost.base import Problem, num_strategies
from cost.evaluation import evaluate
from diffshard.base import Proposal
from diffshard.solving.form import classes, identity, merge_classes, repeated_classes
from diffshard.solving.phases.starts import QuotientStart, best_equal_choice
from diffshard.solving.solve import solve
from diffshard.solving.solvers import gradient
from tests.diffshard.solving.random_problems import layered_problem, small_problem

KEY = jax.random.key(0)


def _repeated(seed: int, copies: int, **features) -> Problem:
    """Copies of a small problem, each live later than the one before, in a ring through one matrix of their first."""
    rng = np.random.default_rng(seed)
    one = small_problem(seed, **features)
    count = len(one.node_cost)
    ring = [(i * count, (i + 1) % copies * count) for i in range(copies)]
    onward = rng.integers(0, 30, (len(one.node_cost[0]),) * 2).astype(float)
    later = np.repeat(3 * np.arange(copies), len(one.usage))[:, None]
    nodes = [one.edge_nodes + i * count for i in range(copies)]
    return one._replace(
        node_cost=list(one.node_cost) * copies,
        edge_nodes=np.concatenate([*nodes, np.array(ring)]),
        edge_cost=[*one.edge_cost] * copies + [onward] * copies,
        usage_node=np.concatenate([one.usage_node + i * count for i in range(copies)]),
        usage=list(one.usage) * copies,
        usage_interval=np.tile(one.usage_interval, (copies, 1)) + later,
        load=list(one.load) * copies,
    )


@pytest.mark.parametrize("features", [{}, {"memory": True}, {"devices": 2}, {"forbidden": 0.2, "memory": True}])
def test_a_tied_choice_costs_and_uses_what_it_does_expanded(features):
    rng = np.random.default_rng(0)
    for seed in range(12):
        problem = _repeated(seed, 4, **features)
        for rounds in (0, 1, 3):
            node_class = repeated_classes(problem, rounds)
            assert node_class is not None
            tied = merge_classes(problem, node_class)
            assert len(tied.node_cost) <= len(problem.node_cost) // 4  # the copies of a ring are all alike
            for _ in range(5):
                choice = rng.integers(num_strategies(tied))
                assert evaluate(tied, choice) == evaluate(problem, choice[node_class])


def test_any_nodes_of_equally_many_strategies_can_be_tied():
    rng = np.random.default_rng(1)
    for seed in range(20):
        problem = small_problem(seed, memory=True, devices=2, forbidden=0.1)
        node_class = np.unique(num_strategies(problem), return_inverse=True)[1]
        tied = merge_classes(problem, node_class)
        assert len({tuple(sorted(pair)) for pair in tied.edge_nodes.tolist()}) == len(tied.edge_nodes)
        for _ in range(5):
            choice = rng.integers(num_strategies(tied))
            there, here = evaluate(tied, choice), evaluate(problem, choice[node_class])
            assert there[:1] + there[2:] == here[:1] + here[2:]
            np.testing.assert_array_equal(there.peak, here.peak)


def test_edges_inside_a_class_become_the_diagonal_of_its_cost():
    cost, matrix = np.array([1.0, 2.0]), np.array([[5.0, 7.0], [8.0, 3.0]])
    ring = Problem([cost] * 4, np.array([[0, 1], [1, 2], [2, 3], [3, 0]]), [matrix] * 4)
    tied = merge_classes(ring, classes(ring))
    assert [own.tolist() for own in tied.node_cost] == [[4 * 1 + 4 * 5, 4 * 2 + 4 * 3]]
    assert not len(tied.edge_nodes)


def test_what_differs_is_told_apart():
    cost, matrix = np.array([1.0, 2.0]), np.array([[5.0, 7.0], [8.0, 3.0]])
    chain = Problem([cost] * 4, np.array([[0, 1], [1, 2], [2, 3]]), [matrix] * 3)
    assert classes(chain, 0).tolist() == [0, 0, 0, 0]
    assert classes(chain, 1).tolist() == [0, 1, 1, 2]  # the ends see one neighbour, and from different sides
    assert classes(chain, 2).tolist() == [0, 1, 2, 3]
    turned = chain._replace(edge_nodes=np.array([[0, 1], [2, 1], [2, 3]]), edge_cost=[matrix, matrix.T, matrix])
    assert classes(turned, 1).tolist() == [0, 1, 1, 2]
    symmetric = chain._replace(edge_cost=[matrix + matrix.T] * 3)
    assert classes(symmetric, 5).tolist() == [0, 1, 1, 0]
    used = symmetric._replace(
        usage_node=np.array([0, 3]), usage=[np.array([1, 2]), np.array([1, 3])], usage_interval=np.array([[0, 1]] * 2)
    )
    assert classes(used, 0).tolist() == [0, 1, 1, 2]
    loaded = symmetric._replace(load=[np.eye(2), np.eye(2), np.eye(2), np.ones((2, 2))])
    assert classes(loaded, 0).tolist() == [0, 0, 0, 1]


def test_layers_are_tied_and_their_number_does_not_matter():
    few, many = repeated_classes(layered_problem(0, 10)), repeated_classes(layered_problem(0, 40))
    assert few is not None
    assert many is not None
    assert few.max() == many.max() < 2 * 40


def test_what_does_not_repeat_is_left():
    assert repeated_classes(layered_problem(0, 1)) is None
    assert best_equal_choice(layered_problem(0, 1), gradient.solve, KEY, 1.0) is None
    assert repeated_classes(Problem([], np.zeros((0, 2), int), [])) is None


def test_the_start_is_the_best_of_the_tied_choices():
    for seed in range(8):
        problem = _repeated(seed, 4, memory=True)
        node_class = classes(problem)
        options = itertools.product(*map(range, num_strategies(merge_classes(problem, node_class))))
        found = [evaluate(problem, np.array(choice)[node_class]) for choice in options]
        best = min((e.cost for e in found if e.feasible), default=None)
        start = best_equal_choice(problem, gradient.solve, KEY, None)
        assert start is not None
        if best is None:  # then the least excess
            assert evaluate(problem, start).excess == min(e.excess for e in found)
        else:
            assert evaluate(problem, start).cost == best


def test_there_is_no_start_where_equal_nodes_exclude_each_other():
    differ = np.array([[np.inf, 0.0], [0.0, np.inf]])
    ring = Problem([np.zeros(2)] * 4, np.array([[0, 1], [1, 2], [2, 3], [3, 0]]), [differ] * 4)
    assert solve(ring).feasible
    assert best_equal_choice(ring, gradient.solve, KEY, None) is None


def test_a_start_from_layers_is_close_to_what_the_whole_finds():
    problem = layered_problem(3, 8, width=12, most=6)
    start = best_equal_choice(problem, gradient.solve, KEY, None)
    assert start is not None
    assert evaluate(problem, start).cost <= 1.05 * solve(problem).cost


def test_fifty_thousand_nodes_are_tied():
    problem = layered_problem(0, 1250, binding=0.8)
    assert len(problem.node_cost) == 50_000
    assert repeated_classes(problem) is not None


def test_ctrl_c_in_the_quotient_stops_the_whole_search():
    def pressed(problem: Problem, *, time_limit_s, key) -> Iterator[Proposal]:
        raise KeyboardInterrupt
        yield Proposal()

    solver = functools.partial(gradient.solve, phases=lambda _: (QuotientStart(pressed),))
    found = solve(layered_problem(0, 12, width=12, most=6, binding=0.7), solver=solver, reduce=identity)
    assert found.status == "interrupted"
    assert found.lower_bound > 0  # from the dual, before
