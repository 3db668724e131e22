"""What single solvers promise beyond the conformance suite: beam, exact, exhaustive and primal."""

import shutil

import jax
import numpy as np
import pytest

from cost.base import Problem
from cost.evaluation import evaluate
from diffshard import child_processes
from diffshard.base import OPTIMAL_GAP
from diffshard.solving.csr import chosen_cost, to_csr, with_ceiling
from diffshard.solving.dual.ascent import softmin_weights
from diffshard.solving.form import identity
from diffshard.solving.solve import solve
from diffshard.solving.solvers import beam, exact, greedy, primal
from experiments.fuzzing import __main__ as command
from experiments.fuzzing.outcomes import HELD
from tests.diffshard.solving.random_problems import FORMS, layered_problem, optimum, small_problem


def test_a_beam_wide_enough_is_dynamic_programming():
    problem = layered_problem(4, 3, width=15, most=6)
    best = solve(problem, solver="dynamic_programming", reduce=identity)
    wide = solve(problem, solver="beam", reduce=identity)
    assert best.status == "optimal"
    assert best.cost == solve(problem).cost
    assert best.cost <= wide.cost <= 1.1 * best.cost
    csr = with_ceiling(to_csr(problem))
    search = beam._Beam(csr, beam.narrow_order(csr), np.random.default_rng(0))
    for _ in search.run(1 << 14):
        pass
    assert chosen_cost(csr, search.choice) == pytest.approx(best.cost)


def test_a_beam_without_memory_and_loads_that_keeps_everything_finds_the_best():
    for seed in range(40):
        problem = small_problem(seed)
        csr = with_ceiling(to_csr(problem))
        search = beam._Beam(csr, beam.narrow_order(csr), np.random.default_rng(0))
        for _ in search.run(1 << 14):
            pass
        assert chosen_cost(csr, search.choice) == pytest.approx(optimum(problem)), f"seed {seed}"


def test_the_end_of_highs_is_noticed_and_the_lack_of_it_said(monkeypatch):
    monkeypatch.setattr(child_processes.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="HiGHS ended with exit code 1; take 'gradient'"):
        solve(FORMS["ring"], solver="exact", reduce=identity)
    monkeypatch.setattr(exact.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install highspy"):
        solve(FORMS["ring"], solver="exact", reduce=identity)


@pytest.mark.parametrize("seed", [75, 127, 180])
def test_exact_proves_its_optimum_where_no_first_choice_is_feasible(seed):
    """Greedy fails on these colourings, whose optima are more than one window above the sum of the least entries."""
    rng = np.random.default_rng(seed)
    colour = rng.integers(0, 3, 9)
    pairs = [(u, v) for u in range(9) for v in range(u + 1, 9) if colour[u] != colour[v] and rng.random() < 0.8]
    differ = np.where(np.eye(3, dtype=bool), np.inf, 0.0)
    node_cost = [np.array([1.0, 1.3, 1.7]) + rng.random(3) * 0.2 for _ in range(9)]
    problem = Problem(node_cost, np.array(pairs), [differ] * len(pairs))
    first = next(p.choice for p in greedy.solve(problem, key=jax.random.key(0)) if p.choice is not None)
    assert not evaluate(problem, first).feasible
    solution = solve(problem, solver="exact", reduce=identity)
    best = optimum(problem)
    assert solution.status == "optimal"
    assert solution.cost == pytest.approx(best, rel=1e-12)
    assert best * (1 - OPTIMAL_GAP) <= solution.lower_bound <= best


def test_exact_prints_nothing(capfd):
    assert solve(small_problem(0), solver="exact", reduce=identity).status == "optimal"
    assert "HiGHS" not in "".join(capfd.readouterr())


def test_exact_has_a_true_bound_where_the_largest_load_is_thousands_of_units():
    """What HiGHS's reduced cost of the largest load may be off counts as often as the load is large."""
    with command.outcomes("no-greedy") as outcome:
        assert outcome(21267) == HELD


def test_exhaustive_says_how_many_choices_however_many():
    problem = layered_problem(1, 20)
    with pytest.raises(ValueError, match=r"takes at most 10,000,000 choices; this problem has 10\^\d{3}\. Take"):
        solve(problem, solver="exhaustive", reduce=identity)


def test_the_gradient_of_primal_is_that_of_finite_differences():
    problem = small_problem(3, memory=True, devices=2)._replace(memory_limit=np.array([4.0, np.inf]))
    problem = problem._replace(usage=[np.stack([usage, usage + 1], axis=1) for usage in problem.usage])
    csr = to_csr(problem)
    energy, rng = primal._energy(csr), np.random.default_rng(0)
    logits, multiplier = rng.normal(size=(2, len(csr.cost))), rng.random((2, *csr.base.shape))

    def parts(logits):
        """Cost, negative entropy, penalty in parts of the cost, gradient: [R] each, the last [R, N]."""
        total, gradient, excess = primal.objective(energy, logits, multiplier, 0.5)
        penalty = (multiplier * excess + 0.15 * np.maximum(excess, 0.0) ** 2).sum(axis=(1, 2))
        rows = softmin_weights(csr, -logits, 1.0)
        entropy = (rows * np.log(rows)).sum(axis=1)
        return (total - 0.5 * entropy) / (1 + penalty), entropy, penalty, gradient

    scale, _, _, gradient = parts(logits)  # the scale of the penalty is a constant to the gradient

    def value(logits):
        cost, entropy, penalty, _ = parts(logits)
        return cost + 0.5 * entropy + scale * penalty

    for i in range(len(csr.cost)):
        step = np.zeros_like(logits)
        step[:, i] = 1e-5
        difference = (value(logits + step) - value(logits - step)) / 2e-5
        np.testing.assert_allclose(gradient[:, i], difference, rtol=1e-4, atol=1e-6)


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
