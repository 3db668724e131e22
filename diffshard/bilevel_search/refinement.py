"""What measured predictions propose: choices that are worth a training of their own."""

from collections.abc import Sequence

import jax.numpy as jnp

from diffshard.bilevel_search.calibration import Measured, calibrated
from diffshard.bilevel_search.candidates import Candidate, described
from diffshard.bilevel_search.objective import MaxLossIncrease, Objective
from diffshard.bilevel_search.rounding import Prediction, weighed, within
from diffshard.bilevel_search.space import Choice, Space

_SHARES = (1.0, 0.7, 0.4)
"""Of the bound, that refinements are proposed for: what was measured is noisy."""


def refined(
    space: Space,
    reference: Choice,
    prediction: Prediction,
    measured: Sequence[Measured],
    objective: Objective,
    *,
    noise: float,
) -> list[Candidate]:
    """What the prediction proposes, corrected by what was measured, and was not measured yet.

    Under a bound on the loss the cheapest choice within it, and within shares of it; under a weight of the cost the
    choice of least loss and cost.

    Args:
      space: strategies that change the loss.
      reference: the exact choice.
      prediction: of the search.
      measured: by training.
      objective: what decides.
      noise: standard deviation of a measured increase near 0, in units of the loss.
    """
    problem = space.problem
    names = [space.strategy_names(v) for v in range(len(reference))]
    fitted = calibrated(prediction, names, reference, measured, noise)
    if isinstance(objective, MaxLossIncrease):
        choices = [within(problem, fitted, share * objective.most) for share in _SHARES]
    else:
        weight = float(objective.weights(jnp.zeros(()), jnp.zeros(()), jnp.int32(0)).cost)
        choices = [weighed(problem, fitted, float(space.seconds(reference)) / weight)] if weight else []
    seen = {reference, *(found.choice for found in measured)}
    return [
        Candidate(f"refined, {described(space, problem, choice, reference)}", choice)
        for choice in dict.fromkeys(choices)
        if choice not in seen
    ]
