"""Equinox's modules train, and their leaves that are no arrays are constants."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.diffshard.sharding_search.small_calls import Classifier, search
from tests.diffshard.sharding_search.small_searches import (
    assert_equal,
    weights,
)


class TrainState(NamedTuple):
    """A module beside the state of its optimiser."""

    model: Classifier
    opt_state: optax.OptState


def module_step(optimizer, state, x, key):
    def loss_of(model):
        return (jax.vmap(model, in_axes=(0, None))(x, key) ** 2).mean()

    loss, grads = eqx.filter_value_and_grad(loss_of)(state.model)
    updates, opt_state = optimizer.update(grads, state.opt_state, eqx.filter(state.model, eqx.is_inexact_array))
    return TrainState(eqx.apply_updates(state.model, updates), opt_state), loss


def test_equinox_modules_train_inside_and_outside_of_filter_jit():
    optimizer = optax.adam(1e-2)
    model = Classifier(jax.random.key(0))
    state = TrainState(model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)))
    x, key = weights(16, 8), jax.random.key(1)
    plain_step = functools.partial(module_step, optimizer)
    expected, expected_loss = plain_step(*plain_step(state, x, key)[:1], x, key)
    for wrap in (lambda step: step, eqx.filter_jit):
        step = search(plain_step)
        run = wrap(step)
        after, loss = run(run(state, x, key)[0], x, key)
        assert_equal(loss, expected_loss)
        assert_equal(eqx.filter(after, eqx.is_array), eqx.filter(expected, eqx.is_array))
        assert after.model.layers[1] is jax.nn.relu
        assert (after.model.slope, after.model.is_residual) == (0.5, True)
        assert len(step._prepared) == 1
        plan = step.plan(state, x, key)
        specs = {t.path.removeprefix("result[0]"): t.spec for t in plan.outputs}
        inside = [t for t in plan.arguments if t.path.startswith("state")]
        assert inside
        assert all(specs[t.path.removeprefix("state")] == t.spec for t in inside)


def test_a_flag_of_a_module_is_a_constant_of_its_plan():
    model = Classifier(jax.random.key(0))
    x, key = weights(16, 8), jax.random.key(1)
    step = search(lambda model, x: jax.vmap(model, in_axes=(0, None))(x, key))
    other = eqx.tree_at(lambda m: m.is_residual, model, False)
    for module in (model, other, model):
        np.testing.assert_allclose(step(module, x), jax.vmap(module, in_axes=(0, None))(x, key), rtol=1e-5, atol=1e-6)
    assert len(step._prepared) == 2


class Scaled(eqx.Module):
    """A module with a number that decides the type of its result."""

    weight: jax.Array
    power: float


def test_constants_of_other_types_are_other_constants():
    step = search(lambda module: module.weight**module.power)
    weight = jnp.arange(8)
    for power in (2, 2.0, 2):
        result = step(Scaled(weight, power))
        assert result.dtype == (weight**power).dtype
    assert len(step._prepared) == 2
