"""Every strategy runs and the results are mixed by the relaxed choice, so that the loss is differentiable in it.

Source: Liu, Simonyan and Yang, "DARTS: Differentiable Architecture Search" (ICLR 2019), equation 2.
"""

import jax
from jax import lax

from diffshard.bilevel_search.base import Estimator, TrainingProgress
from diffshard.bilevel_search.relaxation import one_hot
from search_spaces.base import Batch, LossySpace, Params, RelaxedChoice


def mixture() -> Estimator:
    """Returns the estimator under which training and validation both run the mixture."""
    return Estimator(mixed_increase, _unchanged_choice, _unchanged_choice)


def mixed_increase(
    space: LossySpace,
    params: Params,
    batch: Batch,
    relaxed_choice: RelaxedChoice,
    key: jax.Array,
    progress: TrainingProgress,
) -> jax.Array:
    """Returns the loss of the mixture less that of the exact choice; see `Increase`."""
    exact = one_hot(space.problem, space.exact_choice())
    # The exact loss is a constant: what the choice does to the parameters must show in the loss, not cancel.
    exact_loss = lax.stop_gradient(space.loss(params, batch, exact, key, progress.step))
    return space.loss(params, batch, relaxed_choice, key, progress.step) - exact_loss


def _unchanged_choice(relaxed_choice: RelaxedChoice, key: jax.Array) -> RelaxedChoice:
    del key
    return relaxed_choice


EXAMPLE = mixture
