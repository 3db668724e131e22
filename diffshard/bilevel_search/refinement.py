"""Predictions of the loss, corrected by what training measured, propose choices that are worth a training of their own.

A prediction is off by a factor that depends on where a strategy is and on what it does, so measurements of some choices
correct the predictions of others.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from cost.evaluation import evaluate
from diffshard.bilevel_search.base import LossPrediction, Objective
from diffshard.bilevel_search.candidates import described
from diffshard.bilevel_search.plans.base import Candidate, Measurement
from search_spaces.base import LossySpace

_RELATIVE_NOISE = 0.25
"""Standard deviation of an increase that a whole training measured, as a share of it, beside that which does not shrink
with it."""


def refined(
    space: LossySpace,
    prediction: LossPrediction,
    measurements: Sequence[Measurement],
    objective: Objective,
    *,
    noise: float,
) -> list[Candidate]:
    """Returns what the prediction proposes, once it is corrected by measurements, and was not measured yet.

    Under a bound on the loss these are the cheapest choices within it and within shares of it; under a weight of the
    cost the choice of least loss and cost.

    Args:
      space: strategies that change the loss.
      prediction: of the search.
      measurements: by training.
      objective: what decides.
      noise: standard deviation of a measured increase near 0, in units of the loss.
    """
    problem, exact = space.problem, tuple(space.exact_choice())
    names = [space.strategy_names(v) for v in range(len(exact))]
    fitted = calibrated(prediction, names, exact, measurements, noise)
    choices = objective.choices(problem, fitted, float(evaluate(problem, exact).cost))
    known = {exact, *(measurement.choice for measurement in measurements)}
    return [
        Candidate(f"refined, {described(space, choice)}", choice)
        for choice in dict.fromkeys(choices)
        if choice not in known
    ]


def calibrated(
    prediction: LossPrediction,
    names: Sequence[Sequence[str]],
    exact: Sequence[int],
    measurements: Sequence[Measurement],
    noise: float,
) -> LossPrediction:
    """Returns the prediction with each slope multiplied by a factor, so that it meets measured increases.

    Slopes are over the exact choice's, and what is predicted to lower the loss counts as 0: no factor mends a sign.

    A slope's factor is the sum of its node's and of its strategy's, which nodes that choose from the same names share.
    The factors are the least squares of (Σ_v factor · predicted_v - measured) / noise, none negative, and each is drawn
    to what all share as if that were measured to 100%: what no candidate tells apart stays there. What was measured
    after a share of the training is taken to grow with the steps, and its noise with the share's inverse.

    Args:
      prediction: of the search; returned as it is where it says nothing of what was measured.
      names: of each node's strategies.
      exact: the exact choice, which adds nothing.
      measurements: by training; those that are not finite are left out.
      noise: standard deviation of a measured increase near 0, in units of the loss.

    Raises:
      ValueError: the noise is not positive.
    """
    if not noise > 0:
        raise ValueError(f"`noise` must be positive, in units of the loss; got {noise}.")
    over_exact = [np.maximum(row - row[s], 0.0) for row, s in zip(prediction.slopes, exact, strict=True)]
    finite = [measurement for measurement in measurements if np.isfinite(measurement.increase)]
    terms, columns = _terms(over_exact, [tuple(row) for row in names], finite)
    if not terms.any():
        return prediction
    shares = np.array([measurement.share for measurement in finite])
    increases = np.array([measurement.increase for measurement in finite]) / shares
    deviation = (noise + _RELATIVE_NOISE * np.abs(increases)) / shares
    terms, targets = terms / deviation[:, None], increases / deviation
    shared = nnls(terms.sum(axis=1, keepdims=True), targets)[0][0]
    if not shared:  # nothing raised the loss: that is no reason to believe that nothing can
        return prediction
    count = terms.shape[1]
    factors = shared * nnls(np.vstack([terms * shared, np.eye(count)]), np.concatenate([targets, np.ones(count)]))[0]
    slopes = [
        row * (factors[v] + factors[column]) for v, (row, column) in enumerate(zip(over_exact, columns, strict=True))
    ]
    return LossPrediction(0.0, slopes)


def _terms(
    over_exact: Sequence[np.ndarray], names: Sequence[tuple[str, ...]], measurements: Sequence[Measurement]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The least squares' matrix `[measurements, factors]`, and for each node its strategies' columns `[S_v]`.

    The first V factors are the nodes', the others those of strategies of nodes that choose from the same names.
    """
    strategies = dict.fromkeys((row, name) for row in names for name in row)
    column_of = {strategy: len(over_exact) + i for i, strategy in enumerate(strategies)}
    columns = [np.array([column_of[row, name] for name in row], np.int64) for row in names]
    terms = np.zeros((len(measurements), len(over_exact) + len(column_of)))
    for row, measurement in zip(terms, measurements, strict=True):
        for v, s in enumerate(measurement.choice):
            row[v] += over_exact[v][s]
            row[columns[v][s]] += over_exact[v][s]
    return terms, columns
