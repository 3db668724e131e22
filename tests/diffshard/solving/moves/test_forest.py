"""Forests are maximal and have no cycle, and the strategies found for their nodes are the best of all."""

import itertools

import numpy as np
import pytest

from diffshard.solving.flat import chosen_cost, flatten, with_ceiling
from diffshard.solving.moves import forest as forest_moves
from diffshard.solving.moves.forest import best_choice, first_least, grow_forest
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
        flat = with_ceiling(flatten(problem))
        sizes = flat.sizes.tolist()
        order = rng.permutation(len(sizes))[: rng.integers(1, len(sizes) + 1)]
        forest = grow_forest(flat, order)
        nodes = nodes_of(forest)
        assert nodes <= set(order.tolist())
        assert not has_cycle(problem, nodes)
        assert all(has_cycle(problem, nodes | {v}) for v in set(order.tolist()) - nodes), f"seed {seed}"
        choice = rng.integers(flat.sizes)
        field = flat.cost.copy()
        for u, near in enumerate(flat.target):
            rows = flat.matrix[u] + np.arange(sizes[flat.source[u]]) * sizes[near] + choice[near]
            field[flat.start[flat.source[u]] : flat.start[flat.source[u] + 1]] += flat.entries[rows]
        found = best_choice(flat, forest, field, choice)
        inside = sorted(nodes)
        assert all(found[v] == choice[v] for v in set(range(len(sizes))) - nodes)
        costs = []
        for strategies in itertools.product(*(range(sizes[v]) for v in inside)):
            other = choice.copy()
            other[inside] = strategies
            costs.append(chosen_cost(flat, other))
        assert chosen_cost(flat, found) == pytest.approx(min(costs)), f"seed {seed}"
        depths.add(len(forest.levels))
    assert {0, 1, 2} <= depths


def test_the_first_of_the_smallest_numbers_of_each_run():
    numbers = np.array([3.0, 1.0, 1.0, 7.0, 2.0, 2.0, 5.0, 4.0, 4.0])
    assert first_least(numbers, np.array([3, 1, 3, 2])).tolist() == [1, 0, 0, 0]


def test_a_large_forest_keeps_no_entries_and_moves_alike(monkeypatch):
    """Where entries are laid out for each move, a few at a time, the choice is that of a forest which keeps them."""
    for seed in range(20):
        flat, rng = with_ceiling(flatten(small_problem(seed))), np.random.default_rng(seed)
        order, choice, field = rng.permutation(len(flat.sizes)), rng.integers(flat.sizes), rng.random(len(flat.cost))
        kept = grow_forest(flat, order)
        expected = best_choice(flat, kept, field.copy(), choice)
        with monkeypatch.context() as patch:
            patch.setattr(forest_moves, "_MOST_KEPT_ENTRIES", -1)
            patch.setattr(forest_moves, "_MOST_ENTRIES_AT_ONCE", 4)
            lean = grow_forest(flat, order)
            assert all(level.parts is None for level in lean.levels)
            assert best_choice(flat, lean, field.copy(), choice).tolist() == expected.tolist()
