"""Small errors act on the loss through its second derivatives, and those can be had from the exact model's gradients.

The mean of g gᵀ over the data stands for the Hessian, as it may for log-likelihoods, so that one backward pass of the
exact model predicts the increase of every strategy at once.
"""

import jax
import jax.numpy as jnp

from diffshard.bilevel_search.base import TrainingProgress
from search_spaces.base import Batch, LossySpace, Params, RelaxedChoice


def curvature(
    space: LossySpace,
    params: Params,
    batch: Batch,
    relaxed_choice: RelaxedChoice,
    key: jax.Array,
    progress: TrainingProgress,
) -> jax.Array:
    """Returns Σ_v ⟨p_v, increases_v⟩: the space's predicted increases, linear in the relaxed choice p; see `Increase`.

    An error e of a result is predicted to increase the loss by ½ E[(g·e)²], an error of a gradient by ¼ Σ η e², with η
    the optimiser's step sizes. For cross-entropy the first is right to second order. Of other losses, such as a mean
    square, it can be far too small: it then ranks strategies, but only training (`prove`) can keep a bound.
    """
    increases = space.loss_increases(params, batch, key, step_sizes=progress.step_sizes, step=progress.step)
    terms = zip(relaxed_choice, jax.lax.stop_gradient(increases), strict=True)
    return sum((weights @ increase for weights, increase in terms), start=jnp.zeros(()))
