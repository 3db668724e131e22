"""The default solver: exact where it searches, near the optimum where it cannot prove it, and deterministic."""

import functools
import math

import jax
import numpy as np
import pytest

from cost.base import Problem
from cost.evaluation import evaluate
from diffshard.solving.form import identity
from diffshard.solving.phases.improving import Annealing, Branches, Neighbourhoods, TemperedChains
from diffshard.solving.phases.starts import DualAscent, DualStarts, Phase, QuotientStart
from diffshard.solving.presolve.pipeline import presolve
from diffshard.solving.solve import solve
from diffshard.solving.solvers import gradient
from experiments.solver_variants import edited_phases, with_settings
from tests.diffshard.solving.random_problems import KINDS, layered_problem, optimum, small_problem


def _short_phases(problem: Problem) -> tuple[Phase, ...]:
    settings = {
        QuotientStart: {"num_moves": 5},
        DualStarts: {"num_starts": 2, "num_moves": 5},
        Annealing: {"num_moves": 20},
        Neighbourhoods: {"num_rounds": 5},
        Branches: {"num_branches": 100},
        TemperedChains: {"steps_per_node": 5 if len(problem.load) else 1},
    }
    return edited_phases(problem, functools.partial(with_settings, settings=settings))


_short = functools.partial(gradient.solve, dual_ascent=DualAscent(num_sweeps=40), phases=_short_phases)


@pytest.fixture(scope="module")
def layered() -> tuple[Problem, float]:
    """A problem of 160 nodes and its optimum by HiGHS."""
    problem = layered_problem(2, 4, most=12)
    solution = solve(problem, solver="exact", time_limit_s=60)
    assert solution.status == "optimal"
    return problem, solution.cost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", [identity, presolve])
def test_gradient_is_exact_where_it_searches_instead_of_enumerating(kind, reduce, monkeypatch):
    monkeypatch.setattr(gradient, "MOST_ENUMERATED", 0)
    for seed in range(20, 28):
        problem = small_problem(seed, **KINDS[kind])
        expected = optimum(problem)
        solution = solve(problem, solver=_short, key=seed, reduce=reduce)
        assert solution.lower_bound <= expected, f"seed {seed}"
        if math.isinf(expected):
            assert not solution.feasible
        else:
            assert solution.cost == expected, f"seed {seed}"
            assert solution.status == "optimal", f"seed {seed}"


@pytest.mark.parametrize("limit", [0.0, 1.0, 3e6, np.array([np.inf, 0.0]), np.array([3e6, np.inf])])
def test_gradient_says_by_how_much_nothing_fits(limit):
    """Without a warning, though prices of a limit that nothing keeps would rise for ever."""
    problem = layered_problem(0, 2, width=10, most=5)._replace(memory_limit=limit)
    if np.ndim(limit):
        problem = problem._replace(usage=[np.stack([row, row], axis=1) for row in problem.usage])
    cheapest = [np.argmin(cost) for cost in problem.node_cost]
    for reduce in (identity, presolve):
        solution = solve(problem, solver=_short, reduce=reduce)
        assert (solution.status, solution.feasible) == ("infeasible", False)
        assert 0 < solution.excess < evaluate(problem, np.array(cheapest)).excess


def test_gradient_is_near_the_optimum_of_a_layered_problem(layered):
    problem, least = layered
    solution = solve(problem)
    assert least - 1e-9 <= solution.cost <= 1.01 * least
    assert 0.85 * least < solution.lower_bound <= least


def test_gradient_keeps_a_binding_memory_limit():
    problem = layered_problem(1, 3, width=12, most=8, binding=0.7)
    free = solve(problem._replace(memory_limit=np.inf), solver="exact")
    exact = solve(problem, solver="exact", time_limit_s=60)
    assert exact.status == "optimal"
    assert exact.cost > 1.001 * free.cost  # or the limit would not bind
    solution = solve(problem)
    assert solution.feasible
    assert exact.cost - 1e-12 <= solution.cost <= 1.02 * exact.cost
    assert solution.lower_bound <= exact.cost


def test_gradient_is_deterministic_and_ends_by_itself(layered):
    problem, _ = layered
    proposals = [list(_short(problem, key=jax.random.key(7))) for _ in range(2)]
    assert len(proposals[0]) == len(proposals[1])
    for first, second in zip(*proposals, strict=True):
        assert first.lower_bound == second.lower_bound
        np.testing.assert_array_equal(first.choice, second.choice)


@pytest.mark.parametrize("name", ["exact", "gradient"])
@pytest.mark.parametrize("unit", [1e-9, 1e12])
def test_costs_below_zero_are_proven_in_any_unit(name, unit, monkeypatch):
    monkeypatch.setattr(gradient, "MOST_ENUMERATED", 0)
    for seed in (3, 5, 8):
        problem = small_problem(seed)
        nodes, edges = ([unit * (c - 100) for c in costs] for costs in (problem.node_cost, problem.edge_cost))
        problem = problem._replace(node_cost=nodes, edge_cost=edges)
        solution = solve(problem, solver=name, reduce=identity)
        assert solution.cost == pytest.approx(optimum(problem), rel=1e-12), f"seed {seed}"
        assert solution.lower_bound <= optimum(problem)
        assert solution.status == "optimal"


def test_prices_that_only_rise_make_a_choice_fit_at_all_of_many_times():
    """At prices that fall again, some of about 400 times is exceeded after every move."""
    problem = layered_problem(0, 10, binding=0.7)

    def solve_with(num_settling_moves):
        phases = (DualStarts(num_starts=1, num_moves=10, num_settling_moves=num_settling_moves),)
        return solve(problem, solver=functools.partial(gradient.solve, phases=lambda _: phases))

    assert not solve_with(0).feasible
    settled = solve_with(60)
    assert settled.feasible
    assert settled.gap < 0.5
