"""What single solvers promise beyond the conformance suite: beam, exact, exhaustive and primal."""

import shutil

import jax
import numpy as np
import pytest

from cost.base import Problem
from diffshard.solving.flat import chosen_cost, flatten, with_ceiling
from diffshard.solving.presolve.base import identity
from diffshard.solving.solve import solve
from diffshard.solving.solvers import beam, exact, primal
from tests.diffshard.solving.random_problems import CHAIN, FORMS, layered_problem, optimum, random_graph, small_problem


def test_a_beam_wide_enough_is_dynamic_programming():
    problem = layered_problem(4, 3, width=15, most=6)
    best = solve(problem, solver="dynamic_programming", reduce=identity)
    wide = solve(problem, solver="beam", reduce=identity)
    assert best.status == "optimal"
    assert best.cost == solve(problem).cost
    assert best.cost <= wide.cost <= 1.1 * best.cost
    flat = with_ceiling(flatten(problem))
    search = beam._Beam(flat, beam.narrow_order(flat), np.random.default_rng(0))
    for _ in search.run(1 << 14):
        pass
    assert chosen_cost(flat, search.choice) == pytest.approx(best.cost)


def test_a_beam_without_memory_and_loads_that_keeps_everything_finds_the_best():
    for seed in range(40):
        problem = small_problem(seed)
        flat = with_ceiling(flatten(problem))
        search = beam._Beam(flat, beam.narrow_order(flat), np.random.default_rng(0))
        for _ in search.run(1 << 14):
            pass
        assert chosen_cost(flat, search.choice) == pytest.approx(optimum(problem)), f"seed {seed}"


def test_the_end_of_highs_is_noticed_and_the_lack_of_it_said(monkeypatch):
    monkeypatch.setattr(exact.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="HiGHS ended with exit code 1; take 'gradient'"):
        solve(FORMS["ring"], solver="exact", reduce=identity)
    monkeypatch.setattr(exact.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install highspy"):
        solve(FORMS["ring"], solver="exact", reduce=identity)


def test_exhaustive_says_how_many_choices_however_many():
    problem = layered_problem(1, 20)
    with pytest.raises(ValueError, match=r"takes at most 10,000,000 choices; this problem has 10\^\d{3}\. Take"):
        solve(problem, solver="exhaustive", reduce=identity)


def test_primal_problems_of_like_size_share_one_program():
    def run(seed):
        list(primal.solve(random_graph(seed, [*CHAIN, (5, 0)]), key=jax.random.key(0)))
        return primal._descend._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    assert run(7) == run(8)


def test_usages_alike_on_all_devices_and_of_each_device_go_together():
    problem = Problem(
        node_cost=[np.array([0.0, 3.0]), np.array([0.0, 2.0])],
        edge_nodes=np.zeros((0, 2), int),
        edge_cost=[],
        usage_node=np.array([0, 1]),
        usage=[np.array([4.0, 1.0]), np.array([[3.0, 1.0], [0.0, 2.0]])],
        usage_interval=np.array([[0, 2], [1, 3]]),
        memory_limit=np.array([5.0, 6.0]),
    )
    for solver in ("exhaustive", "gradient"):
        solution = solve(problem, solver=solver, reduce=identity)
        assert (solution.cost, solution.choice) == (2.0, (0, 1))
