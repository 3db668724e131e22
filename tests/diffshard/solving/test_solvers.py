"""One conformance suite for all solvers, and what each of them promises beyond it."""

import functools
import math

import jax
import numpy as np
import pytest

from cost.base import Problem, num_strategies
from cost.evaluation import evaluate
from diffshard.solving import presolve
from diffshard.solving.dual.ascent import Ascent
from diffshard.solving.flat import chosen_cost, chosen_memory, flatten, with_ceiling
from diffshard.solving.phases.annealing import Annealing
from diffshard.solving.phases.branches import Branches
from diffshard.solving.phases.climb import DualClimb
from diffshard.solving.phases.neighbourhoods import Neighbourhoods
from diffshard.solving.phases.quotient_start import QuotientStart
from diffshard.solving.phases.side_by_side import SideBySide
from diffshard.solving.phases.starts import DualStarts
from diffshard.solving.phases.walks import Walks
from diffshard.solving.solve import solve, solver_names
from diffshard.solving.solvers import gradient
from diffshard.solving.solvers.exhaustive import price
from tests.diffshard.solving.random_problems import layered_problem, small_problem

EMPTY = np.zeros((0, 2), int)
KINDS = {
    "plain": {},
    "forbidden": {"forbidden": 0.1},
    "memory": {"memory": True},
    "loads": {"devices": 3},
    "all": {"forbidden": 0.1, "memory": True, "devices": 2},
}
# These walk or pick at random, or keep a few candidates: they promise a feasible choice most of the time, not the best.
HEURISTICS = {"beam", "greedy", "mcmc", "primal", "random"}
# Its tables cannot follow what joins all nodes: there it only has a bound and a choice near it.
EXACT_UNCOUPLED = {"dynamic_programming"}

_short = functools.partial(
    gradient.solve,
    climb=DualClimb(num_sweeps=40),
    phases=(
        QuotientStart(gradient.solve, num_moves=5),
        DualStarts(num_starts=2, num_moves=5),
        Annealing(num_moves=20),
        SideBySide(
            (
                Neighbourhoods(num_rounds=5),
                Branches(num_branches=100),
                Walks(steps_per_node=1, steps_per_node_with_loads=5),
            )
        ),
    ),
)

SEEDS = {"primal": 2, "mcmc": 3}  # these take seconds, to compile or to walk


def _optimum(problem: Problem) -> float:
    sizes = num_strategies(problem).tolist()
    choices = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1)
    cost, excess = price(problem, choices)
    return float(np.where(excess > 0, np.inf, cost).min())


@pytest.mark.parametrize("name", solver_names())
@pytest.mark.parametrize("kind", KINDS)
def test_small_problems(name, kind):
    """Never better than the optimum, bounds below it, feasible where it says so, and exact solvers exact."""
    ratios = []
    for seed in range(SEEDS.get(name, 6)):
        problem = small_problem(seed, **KINDS[kind])
        expected = _optimum(problem)
        found = solve(problem, solver=name, key=seed, reduce=presolve.unchanged)
        checked = evaluate(problem, found.choice)
        assert (found.cost, found.feasible, found.excess) == (checked.cost, checked.feasible, checked.excess)
        assert found.lower_bound <= expected * (1 + 1e-9)
        if math.isinf(expected):
            assert not found.feasible
            continue
        assert not found.feasible or found.cost >= expected - 1e-9
        ratios.append(found.cost / max(expected, 1.0) if found.feasible else math.inf)
        if name not in HEURISTICS and (name not in EXACT_UNCOUPLED or kind in ("plain", "forbidden")):
            assert found.cost == pytest.approx(expected), f"seed {seed}"
            assert found.status == "optimal", f"seed {seed}"
    assert not ratios or np.median(ratios) < 1.3


@pytest.mark.parametrize("name", solver_names())
def test_corner_cases(name):
    single = Problem([np.array([3.0])], EMPTY, [], EMPTY[:, 0], [], EMPTY)
    apart = Problem([np.array([3.0, 1.0]), np.array([0.0, -2.0, 5.0])], EMPTY, [], EMPTY[:, 0], [], EMPTY)
    for problem, expected in ((single, 3.0), (apart, -1.0)):
        found = solve(problem, solver=name, reduce=presolve.unchanged)
        assert found.feasible
        assert found.cost == expected


def _tree(seed: int, count: int) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, count)
    edges = [(int(rng.integers(v)), v) for v in range(1, count) if rng.random() < 0.9]
    costs = [rng.integers(0, 30, (sizes[u], sizes[v])) for u, v in edges]
    nodes = [rng.integers(0, 30, size) for size in sizes]
    return Problem(nodes, np.array(edges, int).reshape(-1, 2), costs, EMPTY[:, 0], [], EMPTY)


def test_dynamic_programming_is_exact_on_forests():
    for seed in range(20):
        problem = _tree(seed, 7)
        found = solve(problem, solver="dynamic_programming", reduce=presolve.unchanged)
        assert found.cost == _optimum(problem)
        assert found.status == "optimal"
    large = _tree(0, 2000)
    found = solve(large, solver="dynamic_programming", reduce=presolve.unchanged)
    assert found.cost == solve(large).cost  # eliminated by presolve alone


@pytest.fixture(scope="module")
def layered() -> tuple[Problem, float]:
    """A problem of 160 nodes and its optimum by HiGHS."""
    problem = layered_problem(2, 4, most=12)
    found = solve(problem, solver="exact", time_limit_s=60)
    assert found.status == "optimal"
    return problem, found.cost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", [presolve.unchanged, presolve.reduce])
def test_gradient_is_exact_where_it_searches_instead_of_enumerating(kind, reduce, monkeypatch):
    monkeypatch.setattr(gradient, "MOST_ENUMERATED", 0)
    for seed in range(20, 28):
        problem = small_problem(seed, **KINDS[kind])
        expected = _optimum(problem)
        found = solve(problem, solver=_short, key=seed, reduce=reduce)
        assert found.lower_bound <= expected, f"seed {seed}"
        if math.isinf(expected):
            assert not found.feasible
        else:
            assert found.cost == expected, f"seed {seed}"
            assert found.status == "optimal", f"seed {seed}"


@pytest.mark.parametrize("limit", [0.0, 1.0, 3e6, np.array([np.inf, 0.0]), np.array([3e6, np.inf])])
def test_gradient_says_by_how_much_nothing_fits(limit):
    """Without a warning, though prices of a limit that nothing keeps would rise for ever."""
    problem = layered_problem(0, 2, width=10, most=5)._replace(memory_limit=limit)
    if np.ndim(limit):
        problem = problem._replace(usage=[np.stack([row, row], axis=1) for row in problem.usage])
    cheapest = [np.argmin(cost) for cost in problem.node_cost]
    for reduce in (presolve.unchanged, presolve.reduce):
        found = solve(problem, solver=_short, reduce=reduce)
        assert (found.status, found.feasible) == ("infeasible", False)
        assert 0 < found.excess < evaluate(problem, np.array(cheapest)).excess


def test_gradient_is_near_the_optimum_of_a_layered_problem(layered):
    problem, optimum = layered
    found = solve(problem)
    assert optimum - 1e-9 <= found.cost <= 1.01 * optimum
    assert 0.85 * optimum < found.lower_bound <= optimum


def test_gradient_keeps_a_binding_memory_limit():
    problem = layered_problem(1, 3, width=12, most=8, binding=0.7)
    free = solve(problem._replace(memory_limit=np.inf), solver="exact")
    exact = solve(problem, solver="exact", time_limit_s=60)
    assert exact.status == "optimal"
    assert exact.cost > 1.001 * free.cost  # or the limit would not bind
    found = solve(problem)
    assert found.feasible
    assert exact.cost - 1e-12 <= found.cost <= 1.02 * exact.cost
    assert found.lower_bound <= exact.cost


def test_gradient_is_deterministic_and_ends_by_itself(layered):
    problem, _ = layered
    proposals = [list(_short(problem, key=jax.random.key(7))) for _ in range(2)]
    assert len(proposals[0]) == len(proposals[1])
    for first, second in zip(*proposals, strict=True):
        assert first.lower_bound == second.lower_bound
        np.testing.assert_array_equal(first.choice, second.choice)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dual_bound_holds_against_exhaustive_search(kind):
    """At every moment of the climb, and tight where the graph is a tree without coupling."""
    for seed in range(20):
        problem = small_problem(seed, **KINDS[kind])
        optimum = _optimum(problem)
        ascent = Ascent(with_ceiling(flatten(problem)))
        for i in range(30):
            ascent.step(i / 30)
            if i % 10 == 9:
                assert ascent.certified() <= optimum + 1e-9, f"seed {seed}"
        if kind == "plain" and len(problem.edge_cost) < 2:
            assert ascent.certified() == pytest.approx(optimum, rel=1e-6, abs=1e-6)


def test_flat_costs_and_memory_are_those_of_the_problem():
    for seed in range(20):
        problem = small_problem(seed, memory=True, devices=2)
        flat, rng = flatten(problem), np.random.default_rng(seed)
        for _ in range(5):
            choice = rng.integers(num_strategies(problem))
            expected = evaluate(problem, choice)
            assert chosen_cost(flat, choice) == pytest.approx(expected.cost)
            assert chosen_memory(flat, choice).max() == pytest.approx(expected.peak)


@pytest.mark.parametrize("name", ["exact", "gradient"])
@pytest.mark.parametrize("unit", [1e-9, 1e12])
def test_costs_below_zero_are_proven_in_any_unit(name, unit, monkeypatch):
    monkeypatch.setattr(gradient, "MOST_ENUMERATED", 0)
    for seed in (3, 5, 8):
        problem = small_problem(seed)
        nodes, edges = ([unit * (c - 100) for c in costs] for costs in (problem.node_cost, problem.edge_cost))
        problem = problem._replace(node_cost=nodes, edge_cost=edges)
        found = solve(problem, solver=name, reduce=presolve.unchanged)
        assert found.cost == pytest.approx(_optimum(problem), rel=1e-12), f"seed {seed}"
        assert found.lower_bound <= _optimum(problem)
        assert found.status == "optimal"
