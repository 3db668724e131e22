"""The vocabulary of the bilevel search: its state and metrics, objectives and predictions.

The records of candidates, their validation runs and plans are in `plans.base`.

Letters for sizes: V nodes of the space's problem, S_v strategies of node v.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax

from cost.base import Problem
from search_spaces.base import (
    Batch,
    Choice,
    LossySpace,
    Params,
    PerStrategy,
    RelaxedChoice,
    Residuals,
)

LossFn = Callable[[Params, Batch], jax.Array]
"""`loss_fn(params, batch)`: the loss of a model, a scalar."""


class TrainingProgress(NamedTuple):
    """How far training has come when an estimator looks at it.

    Attributes:
      step: how many steps were taken, an integer scalar.
      step_sizes: as `params`: how far a unit of each gradient moves its parameter in all.
    """

    step: jax.Array
    step_sizes: Params


Increase = Callable[[LossySpace, Params, Batch, RelaxedChoice, jax.Array, TrainingProgress], jax.Array]
"""`increase(space, params, batch, relaxed_choice, key, progress)`: by how much the relaxed choice raises the loss over
the exact choice, a scalar. It is differentiated with respect to `relaxed_choice`. `params` have been trained with the
strategies that had the largest weights."""


class ObjectiveScales(NamedTuple):
    """The numbers that slopes are multiplied by: of the loss (in its own unit) and of the cost ratio; scalars."""

    loss: jax.Array
    cost: jax.Array


class Objective(Protocol):
    """A rule that weighs a loss increase against a cost ratio; its multiplier `[]` is kept in the search's state.

    Attributes:
      limit: the largest allowed increase of the loss, or None.
    """

    @property
    def limit(self) -> float | None: ...  # noqa: D102

    def scales(self, multiplier: jax.Array, increase: jax.Array, step: jax.Array) -> ObjectiveScales:
        """Returns the scales of one step."""
        ...

    def next_multiplier(self, multiplier: jax.Array, increase: jax.Array) -> jax.Array:
        """Returns the multiplier of the next step."""
        ...

    def frozen_at(self, step: jax.Array) -> "Objective":
        """Returns the objective as it stands at a step, without schedules."""
        ...

    def score(self, increase: float, seconds: float, exact_seconds: float) -> Any:
        """Returns a number or a tuple of numbers that is smaller the better a trained candidate is.

        Args:
          increase: of the loss over the exact choice, infinite where training diverged.
          seconds: of a step.
          exact_seconds: of a step with the exact choice.
        """
        ...

    def noise(self, loss: float) -> float:
        """Returns the standard deviation of an increase near 0 that one training measured, in units of the loss.

        Args:
          loss: of the exact choice, positive.
        """
        ...

    def choices(self, problem: Problem, prediction: "LossPrediction", exact_seconds: float) -> list[Choice]:
        """Returns the choices that a prediction of the loss speaks for, which a training can then test."""
        ...


class BilevelState(NamedTuple):
    """The state of a search between steps; a pytree of arrays, so it can be checkpointed.

    Attributes:
      params: θ, trained as they are searched with.
      params_state: of the optimiser of θ.
      residuals: what strategies carry, such as those of error feedback.
      logits: A, V arrays `[S_v]`; the relaxed choice is their softmax.
      choice_state: of the optimiser of A.
      multiplier: of the bound on the loss, 0 without one.
      offset: running mean of the loss increase less ⟨slopes, relaxed choice⟩.
      slopes: V arrays `[S_v]`, running mean of the increase's slope: what a strategy adds to the loss.
      step: how many steps were taken.
      num_refused: how many were refused.
      key: consumed by every step.
    """

    params: Params
    params_state: optax.OptState
    residuals: Residuals
    logits: PerStrategy
    choice_state: optax.OptState
    multiplier: jax.Array
    offset: jax.Array
    slopes: PerStrategy
    step: jax.Array
    num_refused: jax.Array
    key: jax.Array


class BilevelMetrics(NamedTuple):
    """Measurements of one step; scalars.

    Attributes:
      train_loss: of θ before the step, with the strategies of largest weight.
      loss_increase: what the relaxed choice adds to the loss of this validation batch, by the estimator; 0 where the
        loss does not depend on the choice. In steps that leave A as it is: by the mean slopes.
      cost_ratio: relaxed cost as a ratio to the exact choice's.
      multiplier: of the bound on the loss.
      loss_slope: norm of the weighed slope of the loss in A; 0 in steps that leave A as it is, as is `cost_slope`.
      cost_slope: norm of the weighed slope of the cost: beside `loss_slope` it tells which of the two decides.
      entropy: mean over nodes, as a share of uniform weights': 1 is undecided, 0 is decided.
      undershoot: share of the allowed loss increase that the mean of late steps does not use, negative above it; 0
        without a bound.
      collapsed: the relaxed choice is decided, so that no gradient moves it, with over half of the allowed loss unused
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


class LossPrediction(NamedTuple):
    """The mean loss increase that a search measured, as a linear function of the relaxed choice, in units of the loss.

    Attributes:
      offset: at weights of zero; 0 where the estimator itself is linear.
      slopes: V arrays `[S_v]`.
    """

    offset: float
    slopes: Sequence[np.ndarray]

    def increase(self, choice: Sequence[int]) -> float:
        """Returns the predicted increase of the loss by a choice."""
        return self.offset + float(sum(row[s] for row, s in zip(self.slopes, choice, strict=True)))
