"""Predictions of the loss corrected by what training measured."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from diffshard.bilevel_search.rounding import Prediction
from diffshard.bilevel_search.space import Choice

_RELATIVE_NOISE = 0.25
"""Standard deviation of an increase that a whole training measured, as a share of it, beside that which does not shrink
with it."""


class Measured(NamedTuple):
    """What training said of a choice.

    Attributes:
      choice: V strategy indices.
      increase: of the loss over the exact choice.
      share: of the whole training after which it was measured.
    """

    choice: Choice
    increase: float
    share: float = 1.0


def calibrated(
    prediction: Prediction,
    names: Sequence[Sequence[str]],
    reference: Choice,
    measured: Sequence[Measured],
    noise: float,
) -> Prediction:
    """The prediction with each slope multiplied by a factor, so that it meets measured increases.

    Slopes are over the exact choice's, and what is predicted to lower the loss counts as 0: no factor mends a sign.

    A slope's factor is the sum of its node's and of its strategy's, which nodes that choose from the same names share:
    estimates are off by where a strategy is and by what it does. They are the least squares of
    (Σ_v factor · predicted_v - measured) / noise, none negative, and each is drawn to what all share as if that were
    measured to 100%: what no candidate tells apart stays there. What was measured after a share of the training is
    taken to grow with the steps, and its noise with the share's inverse.

    Args:
      prediction: of the search; returned as it is where it says nothing of what was measured.
      names: of each node's strategies.
      reference: the exact choice, which adds nothing.
      measured: by training; what is not finite is left out.
      noise: standard deviation of a measured increase near 0, in units of the loss.

    Raises:
      ValueError: the noise is not positive.
    """
    if not noise > 0:
        raise ValueError(f"`noise` must be positive, in units of the loss; got {noise}.")
    over = [np.maximum(row - row[s], 0.0) for row, s in zip(prediction.slopes, reference, strict=True)]
    known = [found for found in measured if np.isfinite(found.increase)]
    kinds = [tuple(row) for row in names]
    strategies = dict.fromkeys((kind, name) for kind in kinds for name in kind)
    column = {strategy: len(over) + i for i, strategy in enumerate(strategies)}
    parts = np.zeros((len(known), len(over) + len(column)))
    for row, found in zip(parts, known, strict=True):
        for v, s in enumerate(found.choice):
            row[v] += over[v][s]
            row[column[kinds[v], kinds[v][s]]] += over[v][s]
    if not parts.any():
        return prediction
    shares = np.array([found.share for found in known])
    increases = np.array([found.increase for found in known]) / shares
    deviation = (noise + _RELATIVE_NOISE * np.abs(increases)) / shares
    parts, targets = parts / deviation[:, None], increases / deviation
    shared = nnls(parts.sum(axis=1, keepdims=True), targets)[0][0]
    if not shared:  # nothing raised the loss: that is no reason to believe that nothing can
        return prediction
    count = parts.shape[1]
    factors = shared * nnls(np.vstack([parts * shared, np.eye(count)]), np.concatenate([targets, np.ones(count)]))[0]
    slopes = [
        row * (factors[v] + np.array([factors[column[kind, name]] for name in kind]))
        for v, (row, kind) in enumerate(zip(over, kinds, strict=True))
    ]
    return Prediction(0.0, slopes)
