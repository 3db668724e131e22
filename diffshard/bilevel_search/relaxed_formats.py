"""The relaxed choice of number formats while a training runs: its state, and its weights.

The weights are the least of seconds less entropy whose mean increase of the loss is within a limit.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

_BISECTIONS = 60
"""Steps that find the price of the loss to all digits of a double."""


class StepState(NamedTuple):
    """The state of a search between updates; a pytree.

    Attributes:
      arrays: the state of the training, by the numbers of the flat arguments, with residuals of formats.
      window: the batches of the last validation steps, by the numbers of the flat arguments.
      slopes: `[groups]` float64, the sum of what looks ahead have measured.
      num_looks: `[groups]` the number of looks that have measured each.
      step: how many updates were made.
      key: the random key from which formats are drawn.
    """

    arrays: Mapping[int, Any]
    window: tuple[Mapping[int, Any], ...]
    slopes: np.ndarray
    num_looks: np.ndarray
    step: int
    key: jax.Array


class StepMetrics(NamedTuple):
    """Measurements of one update.

    Attributes:
      train_loss: before its step, with the formats that were drawn.
      num_drawn: operations that were in fewer bits.
      loss_increase: what the relaxed choice is predicted to add to the loss of a whole training.
      cost_ratio: seconds of a step of the relaxed choice over those of the exact one, with the shardings of that one.
      entropy: of the rows of weights, as a share of that of uniform ones: 0 is decided.
      has_looked: whether it took a look ahead whose loss and slopes are finite; others do not count.
      refused: its loss or the new state was not finite, so that the state of the training stayed what it was.
    """

    train_loss: float
    num_drawn: int
    loss_increase: float
    cost_ratio: float
    entropy: float
    has_looked: bool
    refused: bool


class RelaxedFormats(NamedTuple):
    """A choice with weights for the formats of each operation.

    Attributes:
      weights: `[groups]` of each group in its format; what they lack to 1 is exact.
      price_s: λ, seconds for a unit of the loss.
    """

    weights: np.ndarray
    price_s: float


def relaxed_within(
    gains_s: np.ndarray, increases: np.ndarray, limit: float, temperature_s: float, rows: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns the weights of formats with the least seconds less entropy whose mean increase is within a limit.

    Args:
      gains_s: `[groups]` seconds; -inf for those that are never chosen.
      increases: `[groups]` of the loss, 0 or more; those of groups that are never chosen may be anything.
      temperature_s: of the entropy, seconds.
      rows: `[groups]` numbers of the rows: equal for formats of the same operations, of which one at most is taken.

    Returns:
      `[groups]` weights, and the price of the loss, seconds for a unit.
    """
    increases = np.where(np.isfinite(gains_s), increases, 0.0)

    def at(price_s: float) -> np.ndarray:
        scores = (gains_s - price_s * increases) / max(temperature_s, np.finfo(float).tiny)
        most = np.zeros(len(rows))
        np.maximum.at(most, rows, scores)
        weights, exact = np.exp(scores - most[rows]), np.exp(-most)
        np.add.at(exact, rows, weights)
        return weights / exact[rows]

    low, high = 0.0, 0.0
    if at(0.0) @ increases > limit:
        high = max(float(np.max(gains_s)), temperature_s) / limit
        while at(high) @ increases > limit:
            low, high = high, 2 * high
    for _ in range(_BISECTIONS if high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) @ increases > limit else (low, middle)
    return at(high), high


def entropy_of(weights: np.ndarray, rows: np.ndarray) -> float:
    """Returns the mean entropy of rows as a share of that of uniform ones."""
    shares = []
    for row in np.unique(rows):
        own = weights[rows == row]
        p = np.clip(np.array([1.0 - own.sum(), *own]), 0.0, 1.0)
        shares.append(-np.sum(p * np.log(np.where(p > 0, p, 1.0))) / np.log(len(p)))
    return mean_or_0(np.array(shares))


def mean_or_0(values: np.ndarray) -> float:
    """Returns the mean of some numbers, 0 of none."""
    return float(np.mean(values)) if len(values) else 0.0
