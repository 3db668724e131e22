"""Neighbourhoods that no edge joins: their changes add up, and what is accepted is cheaper and fits."""

import numpy as np
import pytest

from cost.evaluation import evaluate
from diffshard.solving.csr import chosen_cost, to_csr, with_ceiling
from diffshard.solving.dual.ascent import initial_prices
from diffshard.solving.moves import random_moves
from diffshard.solving.moves.random_moves import perturb, split
from diffshard.solving.moves.tree_moves import Polish
from tests.diffshard.solving.random_problems import KINDS, layered_problem, small_problem


@pytest.mark.parametrize("num_neighbourhoods", [1, 2, 5, 40])
def test_no_edge_joins_two_neighbourhoods_and_every_node_is_in_one_or_frozen(num_neighbourhoods):
    csr = with_ceiling(to_csr(layered_problem(1, 3, width=12, most=5)))
    for seed in range(5):
        partition = split(csr, np.random.default_rng(seed), num_neighbourhoods)
        label = partition.label
        assert 1 <= partition.num_neighbourhoods <= len(csr.sizes)
        assert set(label[label >= 0].tolist()) == set(range(partition.num_neighbourhoods))
        source, target = label[csr.source], label[csr.target]
        assert ((source == target) | (source < 0) | (target < 0)).all()
        for neighbourhood in range(partition.num_neighbourhoods):
            own = partition.node[partition.first[neighbourhood] : partition.first[neighbourhood + 1]]
            assert sorted(own.tolist()) == np.flatnonzero(label == neighbourhood).tolist()
        assert (label >= 0).all() if num_neighbourhoods == 1 else (label >= 0).mean() > 0.3
        for forest in partition.forests:
            assert all(label[v] >= 0 for v in forest.roots)


def test_the_changes_of_balls_are_those_of_the_whole_cost():
    csr = with_ceiling(to_csr(layered_problem(2, 3, width=10, most=5)))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        partition = split(csr, rng, 6)
        start, other = rng.integers(csr.sizes), rng.integers(csr.sizes)
        other = np.where(partition.label >= 0, other, start)
        found = random_moves._change(csr, partition, start, other, csr.cost)
        before = chosen_cost(csr, start)
        for neighbourhood in range(partition.num_neighbourhoods):
            one = np.where(partition.label == neighbourhood, other, start)
            assert found[neighbourhood] == pytest.approx(chosen_cost(csr, one) - before)
        assert found.sum() == pytest.approx(chosen_cost(csr, other) - before)


@pytest.mark.parametrize("kind", ["plain", "memory", "forbidden"])
def test_the_best_choice_never_gets_worse_and_stays_inside_the_memory(kind):
    improved = 0
    for seed in range(30):
        problem = small_problem(seed, **KINDS[kind])
        csr = with_ceiling(to_csr(problem))
        rng = np.random.default_rng(seed)
        start = rng.integers(csr.sizes)
        if not evaluate(problem, start.tolist()).feasible:
            continue
        polish = Polish(csr, rng, start, initial_prices(csr), 10.0)
        for _ in range(4):
            before = polish.best_cost
            perturb(polish, split(csr, rng, 2), 4, 5.0, 0.2)
            found = evaluate(problem, polish.best.tolist())
            assert found.feasible
            assert polish.best_cost == pytest.approx(found.cost)
            assert polish.best_cost <= before
            improved += polish.best_cost < before
    assert improved > 5
