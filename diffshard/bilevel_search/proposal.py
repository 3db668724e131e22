"""The end of a search: the plan that its mean slopes speak for, and the plan of the candidate that trained best."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diffshard.bilevel_search.base import BilevelState, LossPrediction, Objective
from diffshard.bilevel_search.plans.base import Proof
from diffshard.bilevel_search.plans.plan import BilevelPlan, lossy_plan
from diffshard.bilevel_search.rounding import best_of, dominates, proposals
from search_spaces.base import Choice, LossySpace


class Outcome(NamedTuple):
    """The end of a search.

    Attributes:
      state: the last one.
      relaxed: its relaxed choice, V arrays `[S_v]`.
      objective: how loss and cost are weighed.
      batch_shapes: shapes of batches that the search was made with, if any are known.
    """

    state: BilevelState
    relaxed: list[np.ndarray]
    objective: Objective
    batch_shapes: Sequence[Any]


def predicted(state: BilevelState, exact: Choice) -> LossPrediction:
    """Returns the mean slopes as a prediction under which the exact choice adds nothing."""
    mean = LossPrediction(float(state.offset), [np.asarray(slope, float) for slope in state.slopes])
    return mean._replace(offset=mean.offset - mean.increase(exact))


def proposed_plan(space: LossySpace, exact: Choice, outcome: Outcome) -> BilevelPlan:
    """Returns the plan that a search stands for, without training any candidate.

    Args:
      space: strategies that change the loss.
      exact: the exact choice.
      outcome: of the search.
    """
    state, problem, limit, note = outcome.state, space.problem, outcome.objective.limit, ""
    increases = {exact: 0.0}
    if int(state.step):
        proposed = proposals(problem, outcome.relaxed, predicted(state, exact), exact, limit)
        if all(dominates(problem, exact, *pair) for pair in proposed.items()):
            note = "what the search proposed costs no less than the exact choice and loses no less; this is exact"
        else:
            increases = proposed
    else:
        num_refused = int(state.num_refused)
        note = f"nothing was learnt: 0 updates were accepted, {num_refused} refused; this is the exact choice"
    plan = lossy_plan(space, best_of(problem, increases, limit), limit, note)
    if nodes := _unmeasured(plan, exact, state):
        note = f"not measured: the estimator's loss does not depend on {', '.join(nodes)}; training can tell (`prove`)"
        plan = plan._replace(message="; ".join(filter(None, (plan.message, note))))
    return plan


def proved_plan(space: LossySpace, exact_seconds: float, proof: Proof, limit: float | None) -> BilevelPlan:
    """Returns the plan of the candidate that won a proof.

    Args:
      space: strategies that change the loss.
      exact_seconds: of a step with the exact choice.
      proof: the table of candidates.
      limit: the bound on the increase of the loss, or None.
    """
    winner = proof.winner
    plan = lossy_plan(space, best_of(space.problem, {winner.choice: winner.loss_increase}, limit), limit)
    return plan._replace(
        seconds=winner.seconds,
        cost_ratio=winner.seconds / exact_seconds,
        exact_share=winner.exact_share,
        proof=proof,
    )


def _unmeasured(plan: BilevelPlan, exact: Choice, state: BilevelState) -> list[str]:
    """Names of nodes where the plan is not exact and all strategies have the same slope: the loss cannot tell them."""
    nodes = zip(plan.node_names, plan.choice, exact, state.slopes, strict=True)
    return [node for node, chosen, other, slope in nodes if chosen != other and np.ptp(np.asarray(slope)) == 0]
