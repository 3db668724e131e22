"""Derivatives through the optimiser of the parameters, which know how a step of it reacts to a change of the gradient.

Two things need them: how far a unit of each gradient moves its parameter, and the step of order 2, which looks at the
loss after one step of the parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from diffshard.bilevel_search.base import BilevelState
from search_spaces.base import Params, PerStrategy, RelaxedChoice

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

    Args:
      optimizer: of the parameters.
      state: of the optimiser.
      params: where it stands.
      gradients: which it gets in each of the steps.
      key: of the signs.
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


def unrolled_increase(
    increase: Callable[[Params, RelaxedChoice], jax.Array],
    train_loss: Callable[[Params, RelaxedChoice], jax.Array],
    step: Callable[[Params], Params],
    params: Params,
    relaxed_choice: RelaxedChoice,
    gradients: Params,
) -> tuple[jax.Array, PerStrategy]:
    """Returns the increase after the step that θ is about to take, and its slope in the relaxed choice through it.

    With θ' = step(g(θ, p)), g = ∇θ L_train, the slope is ∂p L_val(θ', p) + ∂p ⟨g(θ, p), u⟩, u = (∂step/∂g)ᵀ ∇θ' L_val.
    For gradient descent u = -ξ ∇θ' L_val. The second term is a difference of two slopes of the training loss, taken at
    θ + εu and θ - εu.

    Source: Liu, Simonyan and Yang, "DARTS" (ICLR 2019), equations 7 and 8, ε = 0.01 / |u|; here for any optimiser.

    Args:
      increase: of parameters and the relaxed choice.
      train_loss: of parameters and the relaxed choice, whose gradient in the parameters is `gradients` at `params`.
      step: new parameters of gradients.
      params: θ.
      relaxed_choice: p.
      gradients: g(θ, p).
    """
    next_params, pull_back = jax.vjp(step, gradients)
    value, (params_slope, slope) = jax.value_and_grad(increase, argnums=(0, 1))(next_params, relaxed_choice)
    (direction,) = pull_back(params_slope)
    # The root in adam-like optimisers has no derivative where a gradient is exactly 0.
    direction = jax.tree.map(lambda u: jnp.where(jnp.isfinite(u), u, 0.0), direction)
    norm = optax.tree.norm(direction)
    size = 0.01 / jnp.where(norm > 0, norm, 1.0)
    train_slope = jax.grad(train_loss, argnums=1)
    above = train_slope(_shifted_params(params, size, direction), relaxed_choice)
    below = train_slope(_shifted_params(params, -size, direction), relaxed_choice)
    return value, jax.tree.map(lambda s, a, b: s + (a - b) / (2 * size), slope, above, below)


def _shifted_params(params: Params, size: jax.Array, direction: Params) -> Params:
    return jax.tree.map(lambda p, u: p + (size * u).astype(p.dtype), params, direction)
