"""The smoothed dual: bounds against exhaustive search, its limit, and its derivatives against finite differences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Problem
from diffshard.solving.dual.ascent import Prices
from diffshard.solving.dual.soft_dual import SoftProblem, dual_value, free_prices, soft_dual, soft_problem
from diffshard.solving.solve import solve
from tests.diffshard.solving.random_problems import small_problem

EMPTY = np.zeros((0, 2), int)
# Two nodes, one edge. At zero messages the minima are 0 + 0 + 0; the optimum is 2: both take 0, or both 1.
PAIR = Problem(
    [np.array([0.0, 2.0]), np.array([2.0, 0.0])],
    np.array([[0, 1]]),
    [np.array([[0.0, 9.0], [9.0, 0.0]])],
    EMPTY[:, 0],
    [],
    EMPTY,
)


def largest_gap(problem: SoftProblem, temperature: float) -> float:
    """Returns by how much min-plus can exceed D_t at the same messages: t · (Σ_v log S_v + Σ_e log(S_u · S_v))."""
    logs = np.log(np.asarray(problem.node_mask).sum(axis=1))
    return float(temperature * (logs.sum() + logs[np.asarray(problem.edge_nodes)].sum()))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _tree(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, 7)
    pairs = [(int(rng.integers(v)), v) for v in range(1, 7)]
    return Problem(
        [rng.uniform(0, 5, size) for size in sizes],
        np.array(pairs),
        [rng.uniform(0, 5, (sizes[u], sizes[v])) for u, v in pairs],
        EMPTY[:, 0],
        [],
        EMPTY,
    )


def _random_prices(problem: Problem, seed: int) -> Prices:
    rng = np.random.default_rng(seed)
    free = free_prices(problem)
    load = rng.uniform(0.1, 1.0, free.load.shape)
    memory = jnp.asarray(rng.uniform(0.0, 0.5, free.memory.shape))
    return Prices(memory, jnp.asarray(load / max(load.sum(), 1e-9)))  # pyright: ignore[reportArgumentType]


def test_worked_by_hand():
    soft, prices = soft_problem(PAIR), free_prices(PAIR)
    zero = jnp.zeros((2, 2))
    assert dual_value(soft, prices, zero, 0.0) == pytest.approx(0.0)
    # Each node: -log(1 + e^-2); the edge: -log(2 + 2 e^-9).
    expected = -2 * np.log1p(np.exp(-2)) - np.log(2 + 2 * np.exp(-9))
    assert dual_value(soft, prices, zero, 1.0) == pytest.approx(expected)
    assert soft_dual(soft, prices, temperature=0.0, sweeps=20).value == pytest.approx(2.0)
    assert soft_dual(soft, prices, temperature=1.0, sweeps=0).marginals[0] == pytest.approx(
        np.array([1, np.exp(-2)]) / (1 + np.exp(-2))
    )
    assert largest_gap(soft, 0.5) == pytest.approx(0.5 * 4 * np.log(2))


@pytest.mark.parametrize("kind", [{}, {"forbidden": 0.1}, {"memory": True}, {"memory": True, "devices": 2}])
def test_every_value_is_a_bound(kind):
    """At any temperature, for any prices and after any number of sweeps."""
    for seed in (1, 3, 5):
        problem = small_problem(seed, **kind)
        found = solve(problem, solver="exhaustive")
        if not found.feasible:
            continue
        soft = soft_problem(problem)
        for prices in (free_prices(problem), _random_prices(problem, seed)):
            for temperature in (0.0, 0.3, 3.0):
                value = soft_dual(soft, prices, temperature=temperature, sweeps=5).value
                assert value <= found.cost + 1e-9, f"seed {seed}"


def test_sweeps_only_climb():
    problem = small_problem(3)
    soft, prices = soft_problem(problem), free_prices(problem)
    start = jnp.zeros((2 * len(problem.edge_nodes), soft.node_cost.shape[1]))
    for temperature in (0.0, 1.0):
        values, messages = [float(dual_value(soft, prices, start, temperature))], start
        for _ in range(10):
            found = soft_dual(soft, prices, temperature=temperature, sweeps=1, messages=messages)
            messages = found.messages
            values.append(float(found.value))
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(values))
        assert values[-1] > values[0]


def test_cooling_down_tends_to_min_plus_and_on_trees_to_the_optimum():
    for seed in (0, 3):
        problem = _tree(seed)
        soft, prices = soft_problem(problem), free_prices(problem)
        optimum = solve(problem).cost
        found = soft_dual(soft, prices, temperature=2.0, sweeps=100)
        for temperature in 2.0 * 0.5 ** np.arange(13):
            found = soft_dual(soft, prices, temperature=temperature, sweeps=100, messages=found.messages)
            cold = dual_value(soft, prices, found.messages, 0.0)
            gap = largest_gap(soft, temperature)
            assert found.value <= cold + 1e-9
            assert cold <= found.value + gap + 1e-9
            assert optimum - gap - 0.01 <= cold <= optimum + 1e-9
        assert found.value == pytest.approx(optimum, rel=1e-3)
        rows = np.asarray(found.marginals).max(axis=1)
        assert (rows > 0.99).all()  # the optimum is unique, so the rows are it
        np.testing.assert_array_equal(np.asarray(found.marginals).argmax(axis=1), solve(problem).choice)


def test_gradients_are_the_marginals():
    """At fixed messages always; through the sweeps where these have converged."""
    problem = small_problem(3, memory=True, devices=2)
    soft, prices = soft_problem(problem), _random_prices(problem, 0)
    found = soft_dual(soft, prices, temperature=2.0, sweeps=300)

    def at_fixed(cost):
        return dual_value(soft._replace(node_cost=cost), prices, found.messages, 2.0)

    def through(cost):
        return soft_dual(soft._replace(node_cost=cost), prices, temperature=2.0, sweeps=300).value

    np.testing.assert_allclose(jax.grad(at_fixed)(soft.node_cost), found.marginals, atol=1e-12)
    np.testing.assert_allclose(jax.grad(through)(soft.node_cost), found.marginals, atol=1e-5)
    np.testing.assert_allclose(np.asarray(found.marginals).sum(axis=1), 1.0)


def test_the_gradient_of_memory_prices_is_the_expected_excess():
    problem = small_problem(4, memory=True)
    soft, prices = soft_problem(problem), _random_prices(problem, 1)
    assert prices.memory.size
    found = soft_dual(soft, prices, temperature=1.0, sweeps=20)
    slope = jax.grad(lambda m: dual_value(soft, Prices(m, prices.load), found.messages, 1.0))(prices.memory)
    times = np.unique(problem.usage_interval)
    expected = np.zeros((len(times) - 1, 1)) - problem.memory_limit
    for v, usage, (start, end) in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True):
        row = np.asarray(found.marginals)[v, : len(usage)]
        expected[np.searchsorted(times, start) : np.searchsorted(times, end)] += row @ usage
    np.testing.assert_allclose(slope, expected, atol=1e-9)


@pytest.mark.parametrize("seed", [3, 8])
def test_derivatives_of_values_and_marginals_against_finite_differences(seed):
    """Few sweeps, so that the messages still move: the derivative goes through them."""
    problem = small_problem(seed, memory=True, devices=2)
    soft, prices = soft_problem(problem), _random_prices(problem, seed)
    rng = np.random.default_rng(seed)
    weights = jnp.asarray(rng.normal(size=soft.node_cost.shape))

    @jax.jit
    def outcome(node, edge, memory, load):
        changed = soft._replace(node_cost=node, edge_cost=edge)
        found = soft_dual(changed, Prices(memory, load), temperature=1.5, sweeps=3)
        return found.value + jnp.sum(weights * found.marginals)

    point = (soft.node_cost, soft.edge_cost, prices.memory, prices.load)
    slopes = jax.jit(jax.grad(outcome, argnums=(0, 1, 2, 3)))(*point)
    for i, slope in enumerate(slopes):
        if not slope.size:
            continue
        direction = jnp.asarray(rng.normal(size=slope.shape))
        sides = [
            outcome(*(x + sign * 1e-5 * direction if i == j else x for j, x in enumerate(point))) for sign in (1, -1)
        ]
        assert jnp.sum(slope * direction) == pytest.approx(float(sides[0] - sides[1]) / 2e-5, rel=1e-5, abs=1e-7)
        assert jnp.abs(slope).max() > 0 or i == 2


def test_equal_shapes_compile_once():
    problem = _tree(1)
    other = problem._replace(node_cost=[cost + 1 for cost in problem.node_cost])
    first = soft_dual(soft_problem(problem), free_prices(problem), temperature=0.5, sweeps=7)
    before = soft_dual._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    second = soft_dual(soft_problem(other), free_prices(other), temperature=0.25, sweeps=7)
    assert soft_dual._cache_size() == before  # pyright: ignore[reportAttributeAccessIssue]
    assert second.value > first.value


def test_nodes_without_edges_and_of_one_strategy():
    alone = Problem([np.array([3.0, 1.0]), np.array([7.0])], EMPTY, [], EMPTY[:, 0], [], EMPTY)
    found = soft_dual(soft_problem(alone), free_prices(alone), temperature=0.0)
    assert found.value == 8.0
    np.testing.assert_array_equal(found.marginals, [[0, 1], [1, 0]])
