"""Forests are maximal and have no cycle, their strategies are the best, and prices of memory stay numbers."""

import itertools

import numpy as np
import pytest

from cost.base import Problem
from diffshard.solving.csr import chosen_cost, first_least, to_csr, with_ceiling
from diffshard.solving.dual.ascent import initial_prices
from diffshard.solving.moves import tree_moves
from diffshard.solving.moves.tree_moves import Polish, best_choice, grow_forest
from tests.diffshard.solving.random_problems import small_problem


def neighbours(problem):
    near = {v: set() for v in range(len(problem.node_cost))}
    for u, v in np.asarray(problem.edge_nodes).tolist():
        near[u].add(v)
        near[v].add(u)
    return near


def has_cycle(problem, nodes):
    """Tells whether nodes induce a cycle: more edges than a forest can have. Edges there and back are two."""
    pairs = [pair for pair in np.asarray(problem.edge_nodes).tolist() if set(pair) <= nodes]
    parent = {v: v for v in nodes}

    def root(v):
        return v if parent[v] == v else root(parent[v])

    for u, v in pairs:
        if root(u) == root(v):
            return True
        parent[root(u)] = root(v)
    return False


def nodes_of(forest):
    return {*forest.roots.tolist(), *(v for level in forest.levels for v in level.node.tolist())}


@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_a_forest_is_maximal_and_its_nodes_get_their_best_strategies_together(forbidden):
    depths = set()
    for seed in range(80):
        problem = small_problem(seed, forbidden=forbidden)
        rng = np.random.default_rng(seed)
        csr = with_ceiling(to_csr(problem))
        sizes = csr.sizes.tolist()
        order = rng.permutation(len(sizes))[: rng.integers(1, len(sizes) + 1)]
        forest = grow_forest(csr, order)
        nodes = nodes_of(forest)
        assert nodes <= set(order.tolist())
        assert not has_cycle(problem, nodes)
        assert all(has_cycle(problem, nodes | {v}) for v in set(order.tolist()) - nodes), f"seed {seed}"
        choice = rng.integers(csr.sizes)
        field = csr.cost.copy()
        for u, near in enumerate(csr.target):
            rows = csr.matrix[u] + np.arange(sizes[csr.source[u]]) * sizes[near] + choice[near]
            field[csr.start[csr.source[u]] : csr.start[csr.source[u] + 1]] += csr.entries[rows]
        found = best_choice(csr, forest, field, choice)
        inside = sorted(nodes)
        assert all(found[v] == choice[v] for v in set(range(len(sizes))) - nodes)
        costs = []
        for strategies in itertools.product(*(range(sizes[v]) for v in inside)):
            other = choice.copy()
            other[inside] = strategies
            costs.append(chosen_cost(csr, other))
        assert chosen_cost(csr, found) == pytest.approx(min(costs)), f"seed {seed}"
        depths.add(len(forest.levels))
    assert {0, 1, 2} <= depths


def test_the_first_of_the_smallest_numbers_of_each_run():
    numbers = np.array([3.0, 1.0, 1.0, 7.0, 2.0, 2.0, 5.0, 4.0, 4.0])
    assert first_least(numbers, np.array([3, 1, 3, 2])).tolist() == [1, 0, 0, 0]


def test_a_large_forest_keeps_no_entries_and_moves_alike(monkeypatch):
    """Where entries are laid out for each move, a few at a time, the choice is that of a forest which keeps them."""
    for seed in range(20):
        csr, rng = with_ceiling(to_csr(small_problem(seed))), np.random.default_rng(seed)
        order, choice, field = rng.permutation(len(csr.sizes)), rng.integers(csr.sizes), rng.random(len(csr.cost))
        kept = grow_forest(csr, order)
        expected = best_choice(csr, kept, field.copy(), choice)
        with monkeypatch.context() as patch:
            patch.setattr(tree_moves, "_MOST_KEPT_ENTRIES", -1)
            patch.setattr(tree_moves, "_MOST_ENTRIES_AT_ONCE", 4)
            lean = grow_forest(csr, order)
            assert all(level.parts is None for level in lean.levels)
            assert best_choice(csr, lean, field.copy(), choice).tolist() == expected.tolist()


def test_prices_rise_where_the_memory_is_exceeded_and_fall_elsewhere():
    """Two nodes that use memory at two times each."""
    usage = [np.array([1.0, 2.0])] * 2
    empty = np.zeros((0, 2), int)
    problem = Problem([np.ones(2)] * 2, empty, [], np.arange(2), usage, np.array([[0, 1], [1, 2]]), 1.5)
    csr = to_csr(problem)
    polish = Polish(csr, np.random.default_rng(0), np.zeros(2, int), initial_prices(csr), 2.0)
    polish.reprice(np.array([[True], [True]]), 1.0, 0.5)
    first = polish.memory.copy()
    assert first.shape == (2, 1)
    assert (first > 0).all()
    polish.reprice(np.array([[True], [False]]), 1.0, 0.25)
    np.testing.assert_allclose(polish.memory, first * [[2.0], [0.75]])


def test_prices_stay_numbers_where_nothing_ever_fits():
    usage = [np.array([1.0, 2.0]), np.array([2.0, 1.0])]
    problem = Problem(
        [np.ones(2)] * 2, np.array([[0, 1]]), [np.eye(2)], np.arange(2), usage, np.array([[0, 1], [0, 1]]), 0.5
    )
    csr = to_csr(problem)
    polish = Polish(csr, np.random.default_rng(0), np.zeros(2, int), initial_prices(csr), 2.0)
    with np.errstate(all="raise"):
        for _ in range(10_000):  # without a ceiling, 1.1 to this power is no float
            polish.reprice(np.ones_like(polish.memory, bool), 0.1, 0.02)
        polish.anneal(0.0, 0.1)
    assert np.isfinite(polish.memory).all()
    assert polish.choice.tolist() == [0, 1]  # at such prices the least memory


def test_the_best_choice_is_the_cheapest_of_those_that_fit_or_the_one_of_least_excess():
    """Two nodes of three strategies, which use a memory of 0, 2 or 4 at a time of their own."""
    usage = [np.array([0.0, 2.0, 4.0])] * 2
    empty = np.zeros((0, 2), int)
    cost = [np.array([9.0, 5.0, 1.0])] * 2
    problem = Problem(cost, empty, [], np.arange(2), usage, np.array([[0, 1], [1, 2]]), 2.0)
    csr = to_csr(problem)
    polish = Polish(csr, np.random.default_rng(0), np.array([2, 2]), initial_prices(csr), 2.0)
    assert (polish.best.tolist(), polish.best_rank) == ([2, 2], (2.0, np.inf))
    for choice, exceeds, best, rank in [
        ([2, 1], [True, False], [2, 2], (2.0, np.inf)),  # as much too much at the worst time
        ([0, 0], [False, False], [0, 0], (0.0, 18.0)),
        ([1, 2], [False, True], [0, 0], (0.0, 18.0)),  # cheaper, but it does not fit
        ([1, 1], [False, False], [1, 1], (0.0, 10.0)),
        ([0, 1], [False, False], [1, 1], (0.0, 10.0)),
    ]:
        assert polish.offer(np.array(choice)).ravel().tolist() == exceeds
        assert (polish.best.tolist(), polish.best_rank) == (best, rank)
