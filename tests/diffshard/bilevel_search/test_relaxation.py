"""From predictions of the loss to choices: the cheapest within a limit, against all choices."""

import itertools

import numpy as np
import pytest

from cost.base import Problem
from cost.evaluation import evaluate
from diffshard.bilevel_search import relaxation
from diffshard.bilevel_search.base import LossPrediction
from diffshard.bilevel_search.relaxation import (
    best_of,
    cheapest_at_price,
    cheapest_within,
    dominates,
    marginal_logits,
)

EMPTY = np.zeros((0, 2), int)


def problem_of(*node_cost):
    return Problem([np.array(cost, float) for cost in node_cost], EMPTY, [])


def test_the_least_increase_is_a_part_of_what_is_allowed():
    """Of 0.65 the least choice takes 0.3, so that node 1, which would save more, has no room for another 0.4."""
    prediction = LossPrediction(0.0, [np.array([0.2, 0.5]), np.array([0.1, 0.5])])
    problem = problem_of([3, 2], [3, 1])
    assert cheapest_within(problem, prediction, 0.65) == (1, 0)
    assert cheapest_within(problem, prediction, 0.75) == (0, 1)
    assert cheapest_within(problem, prediction, 0.2) == (0, 0)  # none is within it


def test_first_logits_are_soft_minima_at_a_temperature_by_the_mean_range_of_what_differs():
    problem = problem_of([0, 0.1, 6], [5, 5], [1], [2, 2.3, 4, np.inf])
    found = [np.exp(np.array(row)) for row in marginal_logits(problem)]
    temperature = relaxation._TEMPERATURE * (6 + 2) / 2  # of the nodes whose costs differ
    for row, costs in zip(found, ([0, 0.1, 6], [5, 5], [1], [2, 2.3, 4]), strict=True):
        weights = np.exp(-np.array(costs) / temperature)
        expected = np.maximum(weights / weights.sum(), relaxation._LEAST_MARGINAL)
        np.testing.assert_allclose(row[: len(costs)], expected, rtol=1e-4)
    assert found[3][3] < 1e-3  # it is forbidden


@pytest.mark.parametrize("seed", range(5))
def test_choices_are_those_of_trying_all(seed):
    rng = np.random.default_rng(seed)
    problem = problem_of(*rng.integers(1, 20, (3, 4)))
    prediction = LossPrediction(0.05, list(rng.integers(0, 20, (3, 4)) / 16))
    choices = list(itertools.product(range(4), repeat=3))
    cost = {choice: evaluate(problem, choice).cost for choice in choices}
    increase = {choice: prediction.increase(choice) for choice in choices}
    limit = float(np.median(list(increase.values())))
    within = cheapest_within(problem, prediction, limit)
    assert increase[within] <= limit + 1e-9
    assert cost[within] == min(cost[c] for c in choices if increase[c] <= limit)
    at_price = cheapest_at_price(problem, prediction, 8.0)
    assert cost[at_price] + 8 * increase[at_price] == min(cost[c] + 8 * increase[c] for c in choices)


def test_the_best_keeps_the_bound_then_costs_least_then_loses_least():
    problem = problem_of([3, 1, 1, 0])
    increases = {(0,): 0.0, (1,): 0.4, (2,): 0.3, (3,): 0.9}
    assert best_of(problem, increases, 0.5).choice == (2,)
    assert best_of(problem, increases, None).choice == (3,)
    too_much = best_of(problem, {(1,): 0.4, (3,): 0.9}, 0.1)
    assert too_much.choice == (1,)
    assert "the least increase of the loss that was reached is 0.4, above `max_loss_increase` 0.1" in too_much.message


def test_the_exact_choice_dominates_what_is_not_cheaper_and_does_not_lower_the_loss():
    problem = problem_of([2, 2, 1])
    assert dominates(problem, (0,), (1,), 0.0)
    assert not dominates(problem, (0,), (1,), -0.1)
    assert not dominates(problem, (0,), (2,), 0.1)
    assert not dominates(problem, (0,), (0,), 0.0)
