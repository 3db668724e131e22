"""How far a unit of a parameter's gradient moves it in all, with an optimiser as it stands."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from diffshard.bilevel_search.space import Params

_STEPS = 8
"""Of the optimiser that are followed; momentum of 0.9 has shown more than half of an impulse by then."""


def step_sizes(
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    params: Params,
    gradients: Params,
    key: jax.Array,
) -> Params:
    """Minus the diagonal of the derivative of the next updates' sum with respect to the next gradient, 0 from below.

    Of gradient descent it is the rate, with momentum the rate over 1 - momentum as far as the steps show it, of adam
    about the rate over the root of the mean square. Estimated with random signs z as z ⊙ (derivative along z), which
    is exact for optimisers that treat each parameter by itself.

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

    def moved(first: Params) -> Params:
        def follow(carried: tuple[Params, optax.OptState], number: jax.Array) -> Any:
            total, now = carried
            given = jax.tree.map(lambda one, other: jnp.where(number == 0, one, other), first, gradients)
            updates, now = optimizer.update(given, now, params)
            return (jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, updates), now), None

        begin = jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), gradients), state
        return jax.lax.scan(follow, begin, jnp.arange(_STEPS))[0][0]

    total, along = jax.jvp(moved, (gradients,), (signs,))

    def size(gradient: jax.Array, sign: jax.Array, total: jax.Array, along: jax.Array) -> jax.Array:
        # The root in adam-like optimisers has no derivative where a gradient is exactly 0.
        found = -along * sign.astype(jnp.float32)
        found = jnp.where((found > 0) & jnp.isfinite(found), found, 0.0)
        rms, step_rms = (jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean()) for x in (gradient, total / _STEPS))
        by_steps = jnp.where(rms > 0, step_rms / jnp.where(rms > 0, rms, 1.0), 0.0)
        return jnp.where((found > 0).mean() > 0.5, found, by_steps)

    return jax.tree.map(size, gradients, signs, total, along)
