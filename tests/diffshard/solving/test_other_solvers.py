"""Every solver on each form of graph, its determinism and its time limit; descent; dynamic programming."""

import shutil
import time

import jax
import numpy as np
import pytest

from cost.base import Problem
from diffshard.base import Proposal
from diffshard.solving import presolve
from diffshard.solving.flat import chosen_cost, chosen_memory, flatten, with_ceiling
from diffshard.solving.moves.descent import Descent
from diffshard.solving.solve import solve, solver_names
from diffshard.solving.solvers import beam, dynamic_programming, exact, primal
from diffshard.solving.solvers.dynamic_programming import solve as dynamic
from tests.diffshard.solving.random_problems import layered_problem, small_problem

EMPTY = np.zeros((0, 2), int)
_STOPPED_S = 30.0  # that a solver stops, however busy the machine; how near its limit is measured, not tested
PROVING = {"dynamic_programming", "exact", "exhaustive", "gradient"}


def _graph(seed: int, pairs: list[tuple[int, int]], *, shared: bool = False) -> Problem:
    """Six nodes of three strategies."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 20, (3, 3)).astype(float)
    return Problem(
        [rng.integers(0, 20, 3).astype(float) for _ in range(6)],
        np.array(pairs, int).reshape(-1, 2),
        [common if shared else rng.integers(0, 20, (3, 3)).astype(float) for _ in pairs],
        EMPTY[:, 0],
        [],
        EMPTY,
    )


CHAIN = [(v, v + 1) for v in range(5)]
FORMS = {
    "chain": _graph(0, CHAIN),
    "chain against the order": _graph(1, [(v, u) for u, v in CHAIN]),
    "tree": _graph(2, [(0, 1), (0, 2), (3, 0), (3, 4), (5, 3)]),
    "ring": _graph(3, [*CHAIN, (5, 0)]),
    "one matrix for all edges": _graph(4, [*CHAIN, (5, 0), (0, 3)], shared=True),
    "complete": _graph(5, [(u, v) for v in range(6) for u in range(v)]),
    "no edges": _graph(6, []),
}


@pytest.mark.parametrize("name", solver_names())
def test_forms_of_graphs(name):
    for form, problem in FORMS.items():
        optimum = solve(problem, solver="exhaustive", reduce=presolve.unchanged).cost
        found = solve(problem, solver=name, reduce=presolve.unchanged)
        assert found.feasible
        assert found.lower_bound <= optimum
        assert optimum <= found.cost <= 1.15 * optimum, form
        if name in PROVING:
            assert (found.cost, found.status) == (optimum, "optimal"), form


@pytest.mark.parametrize("name", solver_names())
def test_negative_costs_and_parallel_edges(name):
    ring = _graph(7, [*CHAIN, (5, 0), (0, 5), (0, 1)])  # two edges join 5 and 0, in both directions, and 0 and 1
    problem = ring._replace(node_cost=[cost - 40 for cost in ring.node_cost], edge_cost=[c - 9 for c in ring.edge_cost])
    optimum = solve(problem, solver="exhaustive", reduce=presolve.unchanged).cost
    found = solve(problem, solver=name, reduce=presolve.unchanged)
    assert found.lower_bound <= optimum <= found.cost <= 0.9 * optimum < 0
    assert found.cost == optimum or name not in PROVING


@pytest.mark.parametrize("name", ["beam", "greedy", "primal", "random", "dynamic_programming"])
def test_equal_keys_give_equal_proposals(name):
    problem = layered_problem(2, 1, width=15, most=6, binding=0.8)
    runs = [solve(problem, solver=name, key=5, reduce=presolve.unchanged) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].choice, runs[1].choice)
    assert runs[0].feasible
    assert [cost for _, cost, _ in runs[0].history] == [cost for _, cost, _ in runs[1].history]


@pytest.mark.parametrize("name", ["beam", "greedy", "mcmc", "random"])
def test_time_limits_are_kept_and_used_for_better_choices(name):
    problem = layered_problem(1, 6, binding=0.7)
    start = time.perf_counter()
    found = solve(problem, solver=name, time_limit_s=1.0)
    assert time.perf_counter() - start < _STOPPED_S
    assert found.feasible
    assert found.history[-1][1] < found.history[0][1]  # inf before the first feasible choice


@pytest.mark.parametrize("name", ["exact", "primal"])
def test_time_limits_are_kept_where_others_do_the_work(name):
    problem = layered_problem(1, 40, binding=0.7)
    if name == "primal":  # the limit is without compilation
        solve(problem, solver=name, time_limit_s=1.0)
    start = time.perf_counter()
    solve(problem, solver=name, time_limit_s=2.0)
    assert 1.0 < time.perf_counter() - start < _STOPPED_S


def test_the_end_of_highs_is_noticed_and_the_lack_of_it_said(monkeypatch):
    monkeypatch.setattr(exact.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="HiGHS ended with exit code 1; take 'gradient'"):
        solve(FORMS["ring"], solver="exact", reduce=presolve.unchanged)
    monkeypatch.setattr(exact.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install highspy"):
        solve(FORMS["ring"], solver="exact", reduce=presolve.unchanged)


def test_descent_prices_moves_exactly_and_only_goes_down():
    for seed in range(10):
        problem = small_problem(seed, memory=True, devices=2)
        flat, rng = with_ceiling(flatten(problem)), np.random.default_rng(seed)
        descent = Descent(flat, rng.integers(flat.sizes, size=(4, len(flat.sizes))))
        start = descent.cost() + 10.0 * descent.excess()
        for v in range(len(flat.sizes)):
            price = descent.price(v, 10.0)
            for r, choice in enumerate(descent.choice):
                others = []
                for s in range(int(flat.sizes[v])):
                    moved = choice.copy()
                    moved[v] = s
                    over = 0.0
                    if flat.base.size:
                        over = (np.maximum(chosen_memory(flat, moved) - flat.limit, 0) / flat.limit).sum()
                    others.append(chosen_cost(flat, moved) + 10.0 * over)
                np.testing.assert_allclose(price[r] - price[r, 0], np.array(others) - others[0], atol=1e-9)
        for _ in descent.descend(np.arange(len(flat.sizes)), 10.0):
            pass
        end = descent.cost() + 10.0 * descent.excess()
        assert (end <= start + 1e-9).all()
        for v in range(len(flat.sizes)):  # no single move is better
            price = descent.price(v, 10.0)
            assert (price[np.arange(4), descent.choice[:, v]] <= price.min(axis=1) + 1e-9).all()
        np.testing.assert_allclose(descent.cost(), [chosen_cost(flat, choice) for choice in descent.choice])


def test_repaired_choices_fit_where_single_moves_can_make_them():
    problem = layered_problem(3, 2, binding=0.7)
    flat = with_ceiling(flatten(problem))
    descent = Descent(flat, np.stack([flat.sizes - 1, 0 * flat.sizes]))
    assert descent.excess().any()
    for _ in descent.repaired(np.arange(len(flat.sizes))):
        pass
    assert not descent.excess().any()
    assert (chosen_memory(flat, descent.choice[0]) <= flat.limit).all()


def test_a_beam_wide_enough_is_dynamic_programming():
    problem = layered_problem(4, 3, width=15, most=6)
    optimum = solve(problem, solver="dynamic_programming", reduce=presolve.unchanged)
    wide = solve(problem, solver="beam", reduce=presolve.unchanged)
    assert optimum.status == "optimal"
    assert optimum.cost == solve(problem).cost
    assert optimum.cost <= wide.cost <= 1.1 * optimum.cost
    flat = with_ceiling(flatten(problem))
    search = beam._Beam(flat, beam.narrow_order(flat), np.random.default_rng(0))
    for _ in search.run(1 << 14):
        pass
    assert chosen_cost(flat, search.choice) == pytest.approx(optimum.cost)


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
    found = solve(problem, solver="dynamic_programming", reduce=presolve.unchanged)
    assert found.status == "optimal"
    assert found.cost == pytest.approx(solve(problem).cost)  # presolve alone eliminates a chain


def test_dynamic_programming_gives_a_bound_where_memory_or_loads_join_all_nodes():
    for seed in range(10):
        problem = small_problem(seed, memory=True, devices=2)
        optimum = solve(problem, solver="exhaustive")
        bounds = [p.lower_bound for p in dynamic(problem) if isinstance(p, Proposal)]
        assert max(bounds) > -np.inf
        assert not optimum.feasible or max(bounds) <= optimum.cost


def test_dynamic_programming_says_when_tables_are_too_large(monkeypatch):
    monkeypatch.setattr(dynamic_programming, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"needs a table of 729 entries for node 0 .* at most 100 .* Take 'gradient'"):
        solve(FORMS["complete"], solver="dynamic_programming", reduce=presolve.unchanged)


def test_exhaustive_says_how_many_choices_however_many():
    problem = layered_problem(1, 20)
    with pytest.raises(ValueError, match=r"takes at most 10,000,000 choices; this problem has 10\^\d{3}\. Take"):
        solve(problem, solver="exhaustive", reduce=presolve.unchanged)


def test_primal_problems_of_like_size_share_one_program():
    def run(seed):
        list(primal.solve(_graph(seed, [*CHAIN, (5, 0)]), key=jax.random.key(0)))
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
        found = solve(problem, solver=solver, reduce=presolve.unchanged)
        assert (found.cost, found.choice.tolist()) == (2.0, [0, 1])
