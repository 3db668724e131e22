"""How far a unit of each gradient moves its parameter: derivatives through the optimiser of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from diffshard.bilevel_search.base import BilevelState
from search_spaces.base import Params

_NUM_STEPS = 8
"""Steps of the optimiser that are followed; momentum of 0.9 has shown more than half of an impulse by then."""


def params_after_step(
    optimizer: optax.GradientTransformation, state: BilevelState, gradients: Params
) -> tuple[Params, optax.OptState]:
    """Returns the parameters after a step of their optimiser, and its state."""
    updates, params_state = optimizer.update(gradients, state.params_state, state.params)
    return optax.apply_updates(state.params, updates), params_state


def step_sizes(
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    params: Params,
    gradients: Params,
    key: jax.Array,
) -> Params:
    """Returns how far a unit of each parameter's gradient moves it in all, with an optimiser as it stands.

    This is minus the diagonal of the derivative of the next updates' sum with respect to the next gradient, or 0 where
    that is negative. For gradient descent it is the rate, with momentum the rate over 1 - momentum as far as the steps
    show it, for adam about the rate over the root of the mean square. It is estimated with random signs z as
    z ⊙ (derivative along z), which is exact for optimisers that treat each parameter by itself.

    Optimisers that take the gradient's sign have no such derivative, nor has adam in its first step: where half a leaf
    has none, all of its sizes are the root mean square of a step, decay of weights included, over that of the gradient,
    which for adam is about the same.
    """
    signs: Any = optax.tree.random_like(key, gradients, sampler=jax.random.rademacher)

    def total_update(first: Params) -> Params:
        def follow(carry: tuple[Params, optax.OptState], number: jax.Array) -> Any:
            total, state = carry
            gradient = jax.tree.map(lambda one, other: jnp.where(number == 0, one, other), first, gradients)
            updates, state = optimizer.update(gradient, state, params)
            return (jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, updates), state), None

        begin = jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), gradients), state
        return jax.lax.scan(follow, begin, jnp.arange(_NUM_STEPS))[0][0]

    total, along = jax.jvp(total_update, (gradients,), (signs,))

    def size(gradient: jax.Array, sign: jax.Array, total: jax.Array, along: jax.Array) -> jax.Array:
        # The root in adam-like optimisers has no derivative where a gradient is exactly 0.
        slope = -along * sign.astype(jnp.float32)
        slope = jnp.where((slope > 0) & jnp.isfinite(slope), slope, 0.0)
        rms, step_rms = (jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean()) for x in (gradient, total / _NUM_STEPS))
        by_steps = jnp.where(rms > 0, step_rms / jnp.where(rms > 0, rms, 1.0), 0.0)
        return jnp.where((slope > 0).mean() > 0.5, slope, by_steps)

    return jax.tree.map(size, gradients, signs, total, along)
