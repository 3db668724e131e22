"""What a bilevel search carries from step to step, and what it reports of each."""

from typing import NamedTuple

import jax
import optax

from diffshard.bilevel_search.space import Params, Residuals, Rows


class BilevelState(NamedTuple):
    """What a search carries from step to step; a pytree of arrays, so it can be checkpointed.

    Attributes:
      params: θ, trained as they are searched with.
      weights_state: of the optimiser of θ.
      residuals: what the exact choice's strategies carry.
      logits: A, V arrays `[S_v]`.
      choice_state: of the optimiser of A.
      multiplier: of the bound on the loss, 0 without one.
      offset: running mean of the loss increase less ⟨slopes, rows⟩.
      slopes: V arrays `[S_v]`, running mean of the increase's slope in the rows: what a strategy adds to the loss.
      step: how many steps were taken.
      num_refused: how many were refused.
      key: consumed by every step.
    """

    params: Params
    weights_state: optax.OptState
    residuals: Residuals
    logits: Rows
    choice_state: optax.OptState
    multiplier: jax.Array
    offset: jax.Array
    slopes: Rows
    step: jax.Array
    num_refused: jax.Array
    key: jax.Array


class BilevelMetrics(NamedTuple):
    """What one step saw; scalars.

    Attributes:
      train_loss: of θ before the step, as training runs under the estimator.
      loss_increase: what the rows add to the loss of this validation batch, by the estimator; 0 in a lossless space. In
        steps that leave A as it is: by the mean slopes.
      cost_ratio: relaxed cost of the rows to the exact choice's.
      multiplier: of the bound on the loss.
      loss_slope: norm of the weighed slope of the loss in A; 0 in steps that leave A as it is, as is `cost_slope`.
      cost_slope: norm of the weighed slope of the cost: beside `loss_slope` it tells which of the two decides.
      entropy: mean over nodes, as a share of uniform rows': 1 is undecided, 0 is decided.
      undershoot: share of the allowed loss increase that the mean of late steps does not use, negative above it; 0
        without a bound.
      collapsed: the rows are decided, so that no gradient moves them, with over half of the allowed loss unused
        although there is a cheaper choice.
      refused: the step gave a number that is not finite; the state stayed what it was, but for its key.
    """

    train_loss: jax.Array
    loss_increase: jax.Array
    cost_ratio: jax.Array
    multiplier: jax.Array
    loss_slope: jax.Array
    cost_slope: jax.Array
    entropy: jax.Array
    undershoot: jax.Array
    collapsed: jax.Array
    refused: jax.Array
