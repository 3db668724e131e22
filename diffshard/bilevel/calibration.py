"""Predictions of the loss corrected by what training measured."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from diffshard.bilevel.plan import Choice
from diffshard.bilevel.rounding import Prediction

_RELATIVE_NOISE = 0.25
"""Standard deviation of a measured increase, as a share of it, beside that which does not shrink with it."""


def calibrated(
    prediction: Prediction, reference: Choice, measured: Sequence[tuple[Choice, float]], noise: float
) -> Prediction:
    """The prediction with each node's slopes multiplied by a factor, so that it meets measured increases.

    Factors are the least squares of (Σ_v factor_v · predicted_v - measured) / noise, none negative, and each is drawn
    to one factor that all nodes share as if that were measured to 100%: nodes that no candidate tells apart keep it.

    Args:
      prediction: of the search; nodes whose slopes are all alike stay so.
      reference: the exact choice, which adds nothing.
      measured: choices and by how much training with them raised the loss; what is not finite is left out.
      noise: standard deviation of a measured increase near 0, in units of the loss.

    Raises:
      ValueError: the noise is not positive.
    """
    if not noise > 0:
        raise ValueError(f"`noise` must be positive, in units of the loss; got {noise}.")
    over = [np.maximum(row - row[s], 0.0) for row, s in zip(prediction.slopes, reference, strict=True)]
    known = [(choice, increase) for choice, increase in measured if np.isfinite(increase)]
    parts = np.array([[row[s] for row, s in zip(over, choice, strict=True)] for choice, _ in known])
    if not parts.size or not parts.any():
        return prediction
    increases = np.array([increase for _, increase in known])
    deviation = noise + _RELATIVE_NOISE * np.abs(increases)
    parts, targets = parts / deviation[:, None], increases / deviation
    shared = nnls(parts.sum(axis=1, keepdims=True), targets)[0][0]
    scale = shared or np.finfo(float).tiny
    drawn = np.vstack([parts * scale, np.eye(len(over))])
    factors = scale * nnls(drawn, np.concatenate([targets, np.full(len(over), shared / scale)]))[0]
    slopes = [factor * row for factor, row in zip(factors, over, strict=True)]
    return Prediction(0.0, slopes)
