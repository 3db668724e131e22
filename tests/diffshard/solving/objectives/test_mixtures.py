"""Descent by exact prices: changes add up, and what is left cannot be improved by one node or by two."""

import itertools

import numpy as np
import pytest

from cost.evaluation import Evaluator
from cost.quantities import amounts_of
from diffshard.solving.objectives.mixtures import Descent
from diffshard.solving.objectives.objective import Objective, PricedObjective
from tests.diffshard.solving.objectives.test_minimise import longest_path, peak, random_problem, slowest


@pytest.mark.parametrize("seed", range(5))
def test_changes_of_a_node_are_differences_of_amounts(seed):
    problem, quantities = random_problem(seed)
    generator = np.random.default_rng(seed)
    choice = np.array([generator.integers(len(cost)) for cost in problem.node_cost])
    before = amounts_of(quantities, problem, choice)
    for v in range(len(choice)):
        edges = np.flatnonzero((problem.edge_nodes == v).any(axis=1)).tolist()
        for name, quantity in quantities.items():
            changes = quantity.changes(problem, choice, v, edges)
            for s in range(len(problem.node_cost[v])):
                other = choice.copy()
                other[v] = s
                np.testing.assert_allclose(changes[s], quantity.amounts(problem, other) - before[name], atol=1e-12)


@pytest.mark.parametrize("function", [slowest, peak, longest_path], ids=lambda f: f.__name__)
@pytest.mark.parametrize("limit", [np.inf, 15.0])
def test_no_single_change_and_no_pair_that_is_apart_is_cheaper_afterwards(function, limit):
    problem, quantities = random_problem(3, limit=limit)
    priced, evaluate = PricedObjective(Objective(function, quantities), problem), Evaluator(problem)
    start = np.array([int(np.argmin(usage)) for usage in problem.usage])  # keeps the limit, and is expensive

    def price(choice):
        evaluation = evaluate(choice)
        return float(evaluation.cost) + priced.price(priced.amounts(choice)) if evaluation.feasible else np.inf

    found = Descent(problem, priced, evaluate)(start, np.arange(len(start)))
    assert price(found) <= price(start) < np.inf
    joined = {tuple(sorted(edge)) for edge in problem.edge_nodes.tolist()}
    for u, v in itertools.combinations_with_replacement(range(len(start)), 2):
        for s, t in itertools.product(range(3), repeat=2):
            other = found.copy()
            other[u], other[v] = s, t
            if (u, v) not in joined:
                assert price(other) >= price(found) * (1 - 1e-9)


def test_only_the_nodes_that_may_change_do():
    problem, quantities = random_problem(0)
    priced, evaluate = PricedObjective(Objective(slowest, quantities), problem), Evaluator(problem)
    start = np.zeros(7, np.int64)
    found = Descent(problem, priced, evaluate)(start, np.array([2, 5]))
    assert set(np.flatnonzero(found != start)) <= {2, 5}
    assert np.array_equal(Descent(problem, priced, evaluate)(start, np.zeros(0, np.int64)), start)
