"""Costs of very different sizes, sums that reach what is forbidden, and memory at the edge of float64."""

import numpy as np
import pytest

from cost.base import FORBIDDEN, Problem
from cost.evaluation import evaluate
from diffshard.base import Proposal
from diffshard.solving.form import identity
from diffshard.solving.loop import Rounding, in_range
from diffshard.solving.solve import solve

NO_EDGES = np.zeros((0, 2), int)


def nodes(*costs, **options):
    return Problem([np.array(cost) for cost in costs], NO_EDGES, [], **options)


def test_large_parts_of_a_cost_cancel_without_rounding():
    problem = Problem([np.array([1e17]), np.array([0.25])], np.array([[0, 1]]), [np.array([[-1e17]])])
    assert evaluate(problem, (0, 0)).cost == 0.25


def test_integers_beside_floats_are_summed_exactly():
    assert evaluate(nodes([2**60 + 1], [-(2.0**60)]), (0, 0)).cost == 1.0


def test_sums_of_what_is_forbidden_may_be_too_large_for_a_float():
    problem = nodes([2**60 + 1, 5], [1.5e308, np.inf], [1.5e308, 0.5])
    assert evaluate(problem, (0, 0, 0)) == (np.inf, 0, 0.0, False)
    assert evaluate(problem, (1, 0, 1)) == (1.5e308, 0, 0.0, False)


@pytest.mark.parametrize("solver", ["exhaustive", "exact", "gradient", "dynamic_programming", "greedy"])
def test_costs_near_the_largest_float_are_never_chosen(solver):
    problem = nodes([2**60 + 1, 1.5e308], [1.5e308, 3.0], [1.5e308, 0.5])
    assert solve(problem, solver=solver, reduce=identity).choice == (0, 1, 1)
    solution = solve(nodes([1.5e308, 1e308], [1.5e308]), solver=solver, reduce=identity)
    assert (solution.feasible, solution.excess) == (False, 0)


def test_memory_sums_of_floats_are_told_from_the_limit():
    usages = {"usage_node": np.array([0, 1]), "usage": [np.array([1e17]), np.array([0.3])]}
    apart = nodes([0.0], [0.0], **usages, usage_interval=np.array([[0, 1], [1, 2]]), memory_limit=1e17)
    assert evaluate(apart, (0, 0)).feasible
    assert not evaluate(apart._replace(memory_limit=np.nextafter(1e17, 0)), (0, 0)).feasible
    together = apart._replace(usage_interval=np.array([[0, 2], [1, 2]]))
    assert not evaluate(together, (0, 0)).feasible
    assert evaluate(together, (0, 0)).excess > 0


def test_bounds_of_whole_numbers_stay_and_others_are_lowered():
    assert Rounding(nodes([3, 4], [2])).safe_bound(5.0) == 5.0
    bound = Rounding(nodes([0.3, 4.0], [0.2])).safe_bound(0.5)
    assert 0.5 - 1e-14 < bound < 0.5
    assert Rounding(nodes([-1e17, 1e17], [0.2])).safe_bound(0.5) < -100
    assert Rounding(nodes([3, 4], [2])).safe_bound(6.5) == np.inf  # above the most that a choice costs


@pytest.mark.parametrize("solver", ["exhaustive", "exact", "gradient", "dynamic_programming", "greedy"])
@pytest.mark.parametrize("options", [{}, {"reduce": identity}, {"tied": np.zeros(3, int)}])
def test_sums_above_what_is_forbidden_are_costs(solver, options):
    problem = nodes([9 * 10**17, FORBIDDEN], [8 * 10**17, FORBIDDEN], [7 * 10**17, 9 * 10**17])
    solution = solve(problem, solver=solver, **options)
    assert (solution.feasible, solution.cost) == (True, 24 * 10**17)
    assert solution.lower_bound <= solution.cost


def test_costs_in_range_stay_as_they_are():
    problem = nodes([1.0, np.inf], [2.0])
    assert in_range(problem) == (problem, 1.0)


def test_nothing_found_is_not_called_infeasible_without_a_proof():
    def finds_nothing(problem, *, time_limit_s, key):
        yield Proposal()

    usages = {"usage_node": np.array([0, 1]), "usage": [np.array([5, 1]), np.array([5, 1])]}
    problem = nodes([0, 9], [0, 9], **usages, usage_interval=np.array([[0, 1], [0, 1]]), memory_limit=5)
    solution = solve(problem, solver=finds_nothing, reduce=identity)
    assert (solution.status, solution.feasible) == ("finished", False)
    assert solve(problem._replace(memory_limit=1), solver=finds_nothing).status == "infeasible"
    excluded = Problem([np.zeros(2), np.zeros(2)], np.array([[0, 1]]), [np.full((2, 2), np.inf)])
    for solver in ("exhaustive", "dynamic_programming"):
        assert solve(excluded, solver=solver, reduce=identity).status == "infeasible"


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e15])
def test_exact_proves_optima_beside_costs_that_are_far_larger(unit):
    rng = np.random.default_rng(0)
    pairs = np.array([(u, v) for u in range(6) for v in range(u)])
    costs = [rng.integers(1, 9, 3).astype(float) for _ in range(6)]
    matrices = [rng.integers(1, 9, (3, 3)).astype(float) for _ in pairs]
    problem = Problem([cost * unit for cost in costs], pairs, [matrix * unit for matrix in matrices])
    for cost in problem.node_cost:
        cost[0] = 9e16  # as large as a window that holds it would be
    best = solve(problem, solver="exhaustive", reduce=identity)
    solution = solve(problem, solver="exact", reduce=identity)
    assert (solution.cost, solution.status) == (best.cost, "optimal")


def test_costs_and_usages_that_no_sum_can_hold_are_refused():
    with pytest.raises(ValueError, match="must be above -1e18"):
        solve(nodes([-2e18]))
    with pytest.raises(ValueError, match=r"must be at most 1e\+100"):
        solve(nodes([1.0], usage_node=np.array([0]), usage=[np.array([1e200])], usage_interval=np.array([[0, 1]])))
    with pytest.raises(ValueError, match=r"`memory_limit` must be below 2\^64"):
        solve(nodes([1.0], memory_limit=2**70))
