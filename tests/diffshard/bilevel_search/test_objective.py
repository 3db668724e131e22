"""What objectives do with numbers that cannot be weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from diffshard.bilevel_search.base import LossPrediction
from diffshard.bilevel_search.objective import CostWeight, MaxLossIncrease
from tests.diffshard.bilevel_search.perturbed import Perturbed, batch_of, start


@pytest.mark.parametrize("late", [-1.0, np.inf, np.nan])
def test_a_schedule_that_leaves_its_range_gives_no_weight(late):
    objective = CostWeight(lambda step: jnp.where(step < 2, 0.5, late))
    assert [float(objective.scales(jnp.zeros(()), jnp.zeros(()), jnp.int32(n)).cost) for n in (0, 1)] == [0.5, 0.5]
    assert np.isnan(objective.scales(jnp.zeros(()), jnp.zeros(()), jnp.int32(2)).cost)


@pytest.mark.parametrize("late", [-1.0, np.inf])
def test_the_search_refuses_updates_under_a_schedule_that_has_left_its_range(late):
    search = diffshard.bilevel(
        None,
        space=Perturbed([[0.0, 0.1]], [[2.0, 1.0]]),
        weights_optimizer=optax.sgd(0.1),
        cost_weight=lambda step: jnp.where(step < 2, 0.5, late),
        choice_every=1,
    )
    state = search.init(jax.random.key(0), start(), batch_of(0))
    refused, before = [], state
    for step in range(4):
        before = state
        state, metrics = search.update(state, batch_of(step), batch_of(100 + step))
        refused.append(bool(metrics.refused))
    assert refused == [False, False, True, True]
    assert int(state.step) == 2
    assert int(state.num_refused) == 2
    np.testing.assert_array_equal(state.logits[0], before.logits[0])


def test_refinements_are_proposed_for_the_bound_and_for_shares_of_it():
    """One node whose strategies add up to 0.9 to the loss: within 1, 0.7 and 0.4 of it another one is the cheapest."""
    space = Perturbed([[0.0, 0.0, 0.0, 0.0]], [[4.0, 3.0, 2.0, 1.0]])
    prediction = LossPrediction(0.0, [np.array([0.0, 0.3, 0.6, 0.9])])
    assert MaxLossIncrease(1.0).choices(space.problem, prediction, 4.0) == [(3,), (2,), (1,)]
    assert MaxLossIncrease(0.5).choices(space.problem, prediction, 4.0) == [(1,), (1,), (0,)]


@pytest.mark.parametrize("name", ["rate", "penalty"])
@pytest.mark.parametrize("number", [0.0, -0.1, np.inf, np.nan, "0.1"])
def test_a_multiplier_needs_positive_finite_steps(name: str, number):
    with pytest.raises(ValueError, match=f"`{name}` of `MaxLossIncrease` must be a positive finite number, got"):
        MaxLossIncrease(0.1, **{name: number})
