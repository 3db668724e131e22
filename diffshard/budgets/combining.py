"""The best outcome of all combinations of candidates for each phase, and weights that promise better candidates.

Costs are sums over phases in which each depends on its own candidate and the one before, so that dynamic programming
finds the best combination exactly.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from diffshard.budgets.job import Candidate, Job, Outcome


def best_combination(job: Job, candidates: Sequence[Sequence[Candidate]]) -> Outcome:
    """Returns the best outcome with one of several candidates in each phase; of equal ones the first."""
    costs = [job.cost(0, candidate, 0.0) for candidate in candidates[0]]
    origins = []
    for phase in range(1, len(candidates)):
        own_costs, own_origins = [], []
        for after in candidates[phase]:
            totals = [
                total + job.cost(phase, after, job.move(phase, before, after).seconds)
                for total, before in zip(costs, candidates[phase - 1], strict=True)
            ]
            own_origins.append(int(np.argmin(totals)))
            own_costs.append(min(totals))
        costs = own_costs
        origins.append(own_origins)
    place = [int(np.argmin(costs))]
    for own_origins in reversed(origins):
        place.insert(0, own_origins[place[0]])
    return job.outcome([own[k] for own, k in zip(candidates, place, strict=True)])


def priced_weights(job: Job, about: Outcome, outcomes: Sequence[Outcome]) -> list[float]:
    """Returns weights `[phases]` of the seconds as priced at which the least cost of the outcomes is the highest.

    A step takes the larger of two sums; each weighted mean of both is a bound. The next problem is that of the weights
    at which the bound by the outcomes so far is the best.

    Source: J. E. Kelley, "The Cutting-Plane Method for Solving Convex Programs" (1960).

    Args:
      job: the phases.
      about: the outcome whose numbers of steps count.
      outcomes: those that were found.
    """
    phases = job.weighted(about, [1.0] * len(job.phases))
    slopes, constants = [], []
    for outcome in outcomes:
        pairs = list(zip(phases, outcome.candidates, strict=True))
        moves_s = (0.0, *(move.seconds for move in outcome.moves))
        slopes.append([phase.step_weight * (c.sums_s[0] - c.sums_s[1]) for phase, c in pairs])
        links_s = sum(phase.step_weight * c.sums_s[1] for phase, c in pairs)
        constants.append(links_s + sum(p.move_weight * s for p, s in zip(phases, moves_s, strict=True)))
    scale = max(map(abs, constants)) or 1.0
    # Maximise t with t <= slopes @ weights + constants; the first term decides among equal ones for larger weights.
    number = len(phases)
    rows = np.hstack([-np.array(slopes) / scale, np.ones((len(outcomes), 1))])
    found = linprog(
        [*[-1e-9] * number, -1.0],
        A_ub=rows,
        b_ub=np.array(constants) / scale,
        bounds=[(0, 1)] * number + [(None, None)],
    )
    return [float(weight) for weight in found.x[:number]] if found.success else [1.0] * number
