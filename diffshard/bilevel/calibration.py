"""Predictions of the loss corrected by what training measured."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from diffshard.bilevel.plan import Choice
from diffshard.bilevel.rounding import Prediction

_RELATIVE_NOISE = 0.25
"""Standard deviation of a measured increase, as a share of it, beside that which does not shrink with it."""


def calibrated(
    prediction: Prediction,
    names: Sequence[Sequence[str]],
    reference: Choice,
    measured: Sequence[tuple[Choice, float]],
    noise: float,
) -> Prediction:
    """The prediction with each slope multiplied by a factor, so that it meets measured increases.

    Slopes are over the exact choice's, and what is predicted to lower the loss counts as 0: no factor mends a sign.

    A slope's factor is the sum of its node's and of its strategy's name, which nodes share: estimates are off by where
    a strategy is and by what it does. They are the least squares of (Σ_v factor · predicted_v - measured) / noise, none
    negative, and each is drawn to what all share as if that were measured to 100%: what no candidate tells apart stays
    there.

    Args:
      prediction: of the search; returned as it is where it says nothing of what was measured.
      names: of each node's strategies.
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
    column = {name: len(over) + i for i, name in enumerate(dict.fromkeys(name for row in names for name in row))}
    parts = np.zeros((len(known), len(over) + len(column)))
    for row, (choice, _) in zip(parts, known, strict=True):
        for v, s in enumerate(choice):
            row[v] += over[v][s]
            row[column[names[v][s]]] += over[v][s]
    if not parts.any():
        return prediction
    increases = np.array([increase for _, increase in known])
    deviation = noise + _RELATIVE_NOISE * np.abs(increases)
    parts, targets = parts / deviation[:, None], increases / deviation
    shared = nnls(parts.sum(axis=1, keepdims=True), targets)[0][0]
    scale = shared or np.finfo(float).tiny
    count = parts.shape[1]
    drawn = np.vstack([parts * scale, np.eye(count)])
    factors = scale * nnls(drawn, np.concatenate([targets, np.full(count, shared / scale)]))[0]
    slopes = [row * (factors[v] + np.array([factors[column[name]] for name in names[v]])) for v, row in enumerate(over)]
    return Prediction(0.0, slopes)
