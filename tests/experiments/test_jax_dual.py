"""The dual as one function of JAX: values by hand, bounds at any temperature, gradients that are relaxed choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.base import Problem
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.dual.ascent import cost_at_prices, initial_prices, softmin_weights
from diffshard.solving.examples import coupled_ring
from diffshard.solving.solve import solve
from experiments import jax_dual
from tests.diffshard.solving.random_problems import small_problem

PAIR = Problem([np.array([0.0, 2.0]), np.array([2.0, 0.0])], np.array([[0, 1]]), [np.array([[0.0, 9.0], [9.0, 0.0]])])
ZERO = jnp.zeros(())


def at_zero(problem):
    """Returns the dual as a function of messages, prices and temperature, with zero messages and first prices."""
    csr = with_ceiling(to_csr(problem))
    padded, prices = jax_dual.dual_problem(csr, 1.0), initial_prices(csr)
    messages = tuple((jnp.zeros(g.first.shape), jnp.zeros(g.second.shape)) for g in padded.groups)
    value = jax.jit(functools.partial(jax_dual.dual_value, num_nodes=len(csr.sizes)))
    return csr, padded, value, messages, jnp.asarray(prices.memory, jnp.float32), jnp.asarray(prices.load, jnp.float32)


def test_worked_by_hand():
    _, padded, value, messages, memory, load = at_zero(PAIR)
    assert value(padded, messages=messages, memory=memory, load=load, temperature=ZERO) == pytest.approx(0.0)
    # Each node: -log(1 + e^-2); the edge: -log(2 + 2 e^-9).
    expected = -2 * np.log1p(np.exp(-2)) - np.log(2 + 2 * np.exp(-9))
    found = value(padded, messages=messages, memory=memory, load=load, temperature=jnp.ones(()))
    assert found == pytest.approx(expected, rel=1e-5)


def normal(rng, shape):
    return jnp.asarray(rng.normal(0, 3, shape), jnp.float32)


@pytest.mark.parametrize("kind", [{}, {"memory": True}, {"memory": True, "devices": 4, "groups": True}])
def test_every_value_is_a_bound(kind):
    for seed in (1, 3):
        problem = small_problem(seed, **kind)
        found = solve(problem, solver="exhaustive")
        _, padded, value, messages, memory, load = at_zero(problem)
        rng = np.random.default_rng(seed)
        for temperature in (0.0, 0.3, 3.0):
            shapes = [[m.shape for m in pair] for pair in messages]
            messages = tuple((normal(rng, first), normal(rng, second)) for first, second in shapes)
            memory = jnp.asarray(rng.uniform(0, 9, memory.shape), jnp.float32)
            bound = value(padded, messages=messages, memory=memory, load=load, temperature=jnp.float32(temperature))
            assert not found.feasible or bound <= found.cost + 1e-3


def test_its_gradient_is_the_relaxed_choice():
    csr, padded, value, messages, memory, load = at_zero(small_problem(3, memory=True, devices=2))

    def of_costs(cost):
        return value(
            padded._replace(cost=cost), messages=messages, memory=memory, load=load, temperature=jnp.float32(2)
        )

    weights = softmin_weights(csr, cost_at_prices(csr, initial_prices(csr)), 2.0)
    np.testing.assert_allclose(jax.grad(of_costs)(padded.cost), weights, rtol=1e-4)


def test_both_ascents_reach_the_optimum_of_a_chain_and_the_table_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(jax_dual, "problems", lambda *_: {"ring": coupled_ring})
    csr = with_ceiling(to_csr(PAIR))
    assert jax_dual.ascend_by_sweeps(csr, 0.1).bound == pytest.approx(2.0, rel=1e-4)
    assert jax_dual.ascend_by_gradient(csr, 0.3, 1.0).bound == pytest.approx(2.0, rel=1e-2)
    jax_dual.main(["--seconds", "0.1"])
    assert "bound by gradient" in capsys.readouterr().out
