"""One strategy of each node is drawn and its result goes on; the slopes are those of a softened draw.

Source: Jang, Gu and Poole, "Categorical Reparameterization with Gumbel-Softmax" (ICLR 2017), section 2.2.
"""

import jax
import jax.numpy as jnp

from diffshard.bilevel_search.base import Estimator, TrainingProgress
from diffshard.bilevel_search.estimators.mixture import mixed_increase
from search_spaces.base import Batch, LossySpace, Params, RelaxedChoice, Selection


def sampled(temperature: float = 1.0) -> Estimator:
    """Returns the estimator that draws.

    Training runs the drawn strategies alone; validation runs all, because each one's result is part of the slope.

    Args:
      temperature: of the softened draw; lower is closer to the draw and noisier.

    Raises:
      ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")

    def draw(relaxed_choice: RelaxedChoice, key: jax.Array) -> RelaxedChoice:
        keys = jax.random.split(key, len(relaxed_choice))
        return [_straight_through(weights, k, temperature) for weights, k in zip(relaxed_choice, keys, strict=True)]

    def increase(
        space: LossySpace,
        params: Params,
        batch: Batch,
        relaxed_choice: RelaxedChoice,
        key: jax.Array,
        progress: TrainingProgress,
    ) -> jax.Array:
        draw_key, run_key = jax.random.split(key)
        return mixed_increase(space, params, batch, draw(relaxed_choice, draw_key), run_key, progress)

    def selection(relaxed_choice: RelaxedChoice, key: jax.Array) -> Selection:
        return [weights.argmax() for weights in draw(relaxed_choice, key)]

    return Estimator(increase, selection, draw)


def _straight_through(weights: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Returns a one-hot draw `[S]` whose derivative is that of softmax((log p + Gumbel noise) / temperature)."""
    noisy = jnp.log(jnp.maximum(weights, 1e-20)) + jax.random.gumbel(key, weights.shape)
    soft = jax.nn.softmax(noisy / temperature)
    hard = jax.nn.one_hot(noisy.argmax(), weights.size)
    return hard + soft - jax.lax.stop_gradient(soft)


EXAMPLE = sampled
