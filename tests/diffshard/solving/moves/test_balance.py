"""Moves that level loads: each lowers what it is compared by, and pairs get further than single nodes."""

import functools
import itertools

import numpy as np
import pytest

from cost.base import Problem
from cost.evaluation import evaluate
from diffshard.solving.csr import chosen_cost, to_csr, with_ceiling
from diffshard.solving.form import identity
from diffshard.solving.moves.single_nodes import Balance
from diffshard.solving.phases.improving import Balancing
from diffshard.solving.solve import solve
from diffshard.solving.solvers import gradient
from tests.diffshard.solving.random_problems import KINDS, optimum, small_problem


def _weights(*weights: float, limit: float = np.inf) -> Problem:
    """Nodes of given weights on two devices: the largest sum of weights counts; each also uses as many bytes."""
    return Problem(
        node_cost=[np.zeros(2) for _ in weights],
        edge_nodes=np.zeros((0, 2), np.int64),
        edge_cost=[],
        usage_node=np.arange(len(weights)),
        usage=[np.eye(2) for _ in weights],
        usage_interval=np.tile([0, 1], (len(weights), 1)),
        memory_limit=limit,
        load=[weight * np.eye(2) for weight in weights],
    )


def _cost_after(balance: Balance, problem: Problem, most_pairs: int) -> float:
    while balance.descend(None, most_pairs):
        pass
    return float(evaluate(problem, balance.choice).cost)


def test_an_exchange_levels_what_no_single_change_can():
    problem = _weights(5, 4, 4, 3)  # 5 + 4 on one device; moving either away makes the other one longer
    stuck = np.array([0, 0, 1, 1])
    balance = Balance(to_csr(problem), np.random.default_rng(0))
    balance.begin(stuck)
    assert _cost_after(balance, problem, most_pairs=0) == 9
    assert _cost_after(balance, problem, most_pairs=4) == 8  # 5 + 3 and 4 + 4


def test_a_greedy_start_keeps_the_memory_and_levels_the_loads():
    problem = _weights(6, 3, 3, 1, 1, limit=3)
    balance = Balance(to_csr(problem), np.random.default_rng(0))
    balance.begin_greedily(4)
    evaluation = evaluate(problem, balance.choice)
    assert evaluation.feasible
    assert evaluation.cost == 7


@pytest.mark.parametrize("kind", ["loads", "all"])
def test_each_descent_lowers_the_cost_or_the_excess(kind):
    for seed in range(6):
        problem = small_problem(seed, **KINDS[kind])
        rng = np.random.default_rng(seed)
        csr = with_ceiling(to_csr(problem))  # what is forbidden has a finite price there
        balance = Balance(csr, rng)
        balance.begin(rng.integers([len(cost) for cost in problem.node_cost]))
        cost, excess = chosen_cost(csr, balance.choice), evaluate(problem, balance.choice).excess
        while balance.descend(None, 3):
            new_cost, new_excess = chosen_cost(csr, balance.choice), evaluate(problem, balance.choice).excess
            assert new_cost < cost or new_excess < excess
            cost, excess = new_cost, new_excess


def test_memory_above_the_limit_is_given_up_from_any_start():
    problem = _weights(6, 3, 3, 1, 1, limit=3)
    csr = to_csr(problem)
    for choice in itertools.product(range(2), repeat=5):
        balance = Balance(csr, np.random.default_rng(0))
        balance.begin(np.array(choice))
        cost = _cost_after(balance, problem, most_pairs=5)
        assert evaluate(problem, balance.choice).feasible
        assert cost == 7  # 6 + 1 and 3 + 3 + 1


def test_balancing_reaches_the_optimum_of_problems_with_loads(monkeypatch):
    monkeypatch.setattr(gradient, "MOST_ENUMERATED", 0)
    solver = functools.partial(gradient.solve, phases=lambda problem: (Balancing(),))
    for seed in range(6):
        problem = small_problem(seed, **KINDS["loads"])
        solution = solve(problem, solver=solver, key=seed, reduce=identity)
        assert solution.lower_bound <= solution.cost
        assert solution.cost == pytest.approx(optimum(problem), abs=1e-9)
