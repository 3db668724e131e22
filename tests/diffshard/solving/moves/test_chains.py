"""Chains beside prices that are computed anew, and beside the distribution that Metropolis's rule has."""

import itertools

import numpy as np
import pytest

from cost.base import Problem
from cost.evaluation import evaluate
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.moves import random_moves
from diffshard.solving.moves.random_moves import Chains
from tests.diffshard.solving.random_problems import EMPTY, KINDS, small_problem


def walkers(problem, count=6, seed=0):
    """Chains of a problem at random choices."""
    rng = np.random.default_rng(seed)
    sizes = [len(cost) for cost in problem.node_cost]
    return Chains(with_ceiling(to_csr(problem)), rng, np.stack([rng.integers(sizes) for _ in range(count)]))


@pytest.mark.parametrize("with_table", [True, False])
@pytest.mark.parametrize("kind", ["plain", "memory", "loads", "all"])
def test_what_is_kept_up_to_date_is_what_is_computed_anew(kind, with_table, monkeypatch):
    if not with_table:
        monkeypatch.setattr(random_moves, "_MOST_TABLE_NUMBERS", 0)
    for seed in range(8):
        problem = small_problem(seed, **KINDS[kind])
        chain, seen = walkers(problem, seed=seed), []
        for i in range(40):
            seen += [evaluate(problem, choice) for choice in chain.choice.tolist()]
            chain.step(8.0 * (1 - i / 40))
            if i % 10 == 9:
                chain.temper(np.linspace(1.0, 5.0, len(chain.choice)))
        seen += [evaluate(problem, choice) for choice in chain.choice.tolist()]
        anew = Chains(chain.csr, np.random.default_rng(0), chain.choice)
        for name in ("cost", "excess", "load"):
            np.testing.assert_allclose(getattr(chain, name), getattr(anew, name), atol=1e-9, err_msg=f"{name}, {seed}")
        for choice, cost, excess in zip(chain.choice.tolist(), chain.cost, chain.excess, strict=True):
            found = evaluate(problem, choice)
            assert (excess <= 1e-12) == found.feasible or not np.isfinite(found.cost)
            assert not np.isfinite(found.cost) or cost == pytest.approx(found.cost)
        least = min((found.cost for found in seen if found.feasible), default=np.inf)
        assert chain.best_cost == pytest.approx(least) or not np.isfinite(least)
        if np.isfinite(least):
            assert chain.best is not None
            assert evaluate(problem, chain.best.tolist()).cost == pytest.approx(chain.best_cost)


def test_every_step_offers_another_strategy_of_one_node_and_all_are_as_likely():
    problem = Problem([np.zeros(3), np.zeros(1), np.zeros(4)], EMPTY, [])
    chain, counts = walkers(problem, count=500), np.zeros((3, 4, 4))
    for _ in range(20):
        before = chain.choice.copy()
        chain.step(1.0)  # nothing costs anything, so that everything is accepted
        assert ((before != chain.choice).sum(axis=1) == 1).all()
        rows, nodes = np.nonzero(before != chain.choice)
        np.add.at(counts, (nodes, before[rows, nodes], chain.choice[rows, nodes]), 1)
    for node, size in ((0, 3), (2, 4)):
        share = counts[node, :size, :size] / 10_000
        expected = (1 - np.eye(size)) / (2 * size * (size - 1))  # a node of the two that can move, from and to any
        np.testing.assert_allclose(share, expected, atol=0.015)


def test_walks_visit_choices_as_often_as_boltzmann_says():
    problem = Problem([np.array([0.0, 1.0, 3.0]), np.array([2.0, 0.0])], np.array([[0, 1]]), [np.eye(3, 2) * 2.0])
    chain, temperature = walkers(problem, count=2000), 1.5
    visits = dict.fromkeys(itertools.product(range(3), range(2)), 0)
    for i in range(40):
        chain.step(temperature)
        if i >= 20:
            for choice in map(tuple, chain.choice.tolist()):
                visits[choice] += 1
    cost = np.array([evaluate(problem, choice).cost for choice in visits])
    weight = np.exp(-cost / temperature)
    np.testing.assert_allclose(np.array(list(visits.values())) / 40_000, weight / weight.sum(), atol=0.02)


def test_at_no_temperature_costs_only_fall():
    problem = small_problem(3)
    chain = walkers(problem, count=20)
    for _ in range(30):
        before = chain.cost.copy()
        chain.step(0.0)
        assert (chain.cost <= before).all()


def test_neighbours_in_temperature_exchange_places_where_the_colder_one_costs_more():
    problem = Problem([np.array([0.0, 1.0, 2.0, 3.0])], EMPTY, [])
    csr = to_csr(problem)
    chain = Chains(csr, np.random.default_rng(0), np.array([[3], [2], [1], [0]]))
    cold = np.array([1e-9, 2e-9, 4e-9, 8e-9])  # at these an exchange is certain, or never happens
    orders = []
    for _ in range(4):
        chain.temper(cold)
        orders.append(chain.choice[:, 0].tolist())
    assert orders == [[3, 1, 2, 0], [1, 3, 0, 2], [1, 0, 3, 2], [0, 1, 2, 3]]
    np.testing.assert_array_equal(chain.cost, chain.choice[:, 0])
    chain.temper(cold)
    assert chain.choice[:, 0].tolist() == [0, 1, 2, 3]
