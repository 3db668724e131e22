"""Dynamic programming: exact on forests of any size, a bound where memory or loads join all nodes."""

import numpy as np
import pytest

from cost.base import Problem
from diffshard.base import Proposal
from diffshard.solving.form import identity
from diffshard.solving.solve import solve
from diffshard.solving.solvers import dynamic_programming
from diffshard.solving.solvers.dynamic_programming import solve as dynamic
from tests.diffshard.solving.random_problems import EMPTY, FORMS, optimum, small_problem


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
        solution = solve(problem, solver="dynamic_programming", reduce=identity)
        assert solution.cost == optimum(problem)
        assert solution.status == "optimal"
    large = _tree(0, 2000)
    solution = solve(large, solver="dynamic_programming", reduce=identity)
    assert solution.cost == solve(large).cost  # eliminated by presolve alone


def test_dynamic_programming_of_ten_thousand_nodes_in_seconds():
    rng = np.random.default_rng(0)
    matrices = [rng.uniform(size=(5, 5)) for _ in range(7)]
    count = 10_000
    problem = Problem(
        [rng.uniform(size=5) for _ in range(count)],
        np.stack([np.arange(count - 1), np.arange(1, count)], axis=1),
        [matrices[i % 7] for i in range(count - 1)],
        EMPTY[:, 0],
        [],
        EMPTY,
    )
    solution = solve(problem, solver="dynamic_programming", reduce=identity)
    assert solution.status == "optimal"
    assert solution.cost == pytest.approx(solve(problem).cost)  # presolve alone eliminates a chain


def test_dynamic_programming_gives_a_bound_where_memory_or_loads_join_all_nodes():
    for seed in range(10):
        problem = small_problem(seed, memory=True, devices=2)
        best = solve(problem, solver="exhaustive")
        bounds = [p.lower_bound for p in dynamic(problem) if isinstance(p, Proposal)]
        assert max(bounds) > -np.inf
        assert not best.feasible or max(bounds) <= best.cost


def test_dynamic_programming_says_when_tables_are_too_large(monkeypatch):
    monkeypatch.setattr(dynamic_programming, "MOST_TABLE_ENTRIES", 100)
    with pytest.raises(ValueError, match=r"needs a table of 729 entries for node 0 .* at most 100 .* Take 'gradient'"):
        solve(FORMS["complete"], solver="dynamic_programming", reduce=identity)
