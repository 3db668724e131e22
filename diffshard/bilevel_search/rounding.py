"""From a relaxed choice to one discrete choice.

A bound on the predicted increase of the loss is linear in the choice, as a memory limit is; so the solver finds the
cheapest choice within the bound on a problem with one more device, whose memory is the allowed increase.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cost.base import Evaluation, Problem, is_forbidden, num_memory_devices
from cost.evaluation import Evaluator, evaluate
from diffshard.bilevel_search.base import LossPrediction
from diffshard.solving.solve import solve
from search_spaces.base import Choice

SOLVER_S = 20.0
"""Seconds for each call of the solver; problems of bilevel searches have tens of nodes and take less than one."""
_BUDGET_UNITS = 1e6
"""The allowed increase as a memory limit, in bytes: far above rounding errors, far below what a float can hold."""


class RoundedChoice(NamedTuple):
    """A discrete choice with what it costs and does.

    Attributes:
      choice: V strategy indices.
      evaluation: its exact cost and memory.
      increase: its predicted or measured increase of the loss.
      message: which bound or limit it breaks and by how much; empty if none.
    """

    choice: Choice
    evaluation: Evaluation
    increase: float
    message: str


def proposals(
    problem: Problem,
    relaxed: Sequence[np.ndarray],
    prediction: LossPrediction,
    exact: Choice,
    limit: float | None,
) -> dict[Choice, float]:
    """Returns choices that the search stands for, with their predicted increase.

    Args:
      problem: of the space.
      relaxed: V arrays `[S_v]`.
      prediction: of the loss.
      exact: the exact choice, which is among them under a bound, in case nothing else keeps it.
      limit: the bound on the increase of the loss, or None.
    """
    largest = largest_weights(relaxed)
    if limit is None:
        return {largest: prediction.increase(largest)}
    choices = (largest, within(problem, prediction, limit))
    return {**{choice: prediction.increase(choice) for choice in choices}, exact: 0.0}


def largest_weights(relaxed: Sequence[np.ndarray]) -> Choice:
    """Returns the strategy of largest weight at each node, `[V]`."""
    return tuple(int(weights.argmax()) for weights in relaxed)


def best_of(problem: Problem, increases: Mapping[Choice, float], limit: float | None) -> RoundedChoice:
    """Returns the cheapest choice that keeps the bound and the problem's limits, or the one that breaks them least.

    Among choices of the same cost it takes the one of least increase.

    Args:
      problem: prices the choices.
      increases: of the loss, by choice.
      limit: the bound on the increase, or None.
    """
    allowed = np.inf if limit is None else limit * (1 + 1e-6)
    evaluator = Evaluator(problem)
    evaluations = {choice: evaluator(choice) for choice in increases}

    def rank(choice: Choice) -> tuple[Any, ...]:
        increase, evaluation = increases[choice], evaluations[choice]
        over_limit = max(increase - allowed, 0.0)
        return over_limit, not evaluation.feasible, evaluation.excess, evaluation.cost, increase

    choice = min(increases, key=rank)
    increase, evaluation, message = increases[choice], evaluations[choice], ""
    if not increase <= allowed:
        message = (
            f"infeasible: the least increase of the loss that was reached is {increase:.4g}, above "
            f"`max_loss_increase` {limit:.4g}; allow more, or give the space more exact strategies"
        )
    elif not evaluation.feasible:
        message = (
            f"infeasible: the memory limit is exceeded by {evaluation.excess:,.0f} bytes; `diffshard.solve` keeps it"
        )
    return RoundedChoice(choice, evaluation, increase, message)


def dominates(problem: Problem, exact: Choice, choice: Choice, increase: float) -> bool:
    """Returns whether the exact choice is as cheap as another that does not lower the loss, and exceeds no memory more.

    Args:
      problem: prices both.
      exact: the exact choice.
      choice: the other.
      increase: of the loss by the other.
    """
    if choice == exact or increase < 0:
        return False
    exact_evaluation, other = evaluate(problem, exact), evaluate(problem, choice)
    return bool(exact_evaluation.cost <= other.cost and exact_evaluation.excess <= other.excess)


def within(problem: Problem, prediction: LossPrediction, limit: float) -> Choice:
    """Returns the cheapest choice whose predicted increase is within a limit, or the one of least increase."""
    slopes = prediction.slopes
    least = tuple(
        int(np.where(is_forbidden(cost), np.inf, row).argmin())
        for cost, row in zip(problem.node_cost, slopes, strict=True)
    )
    budget = limit - prediction.increase(least)
    if budget <= 0:
        return least
    increases = [np.maximum(row - row[s], 0.0) / budget * _BUDGET_UNITS for row, s in zip(slopes, least, strict=True)]
    memory_limit, usages = _finite_memory(problem)
    bounded = problem._replace(
        usage_node=np.concatenate([np.asarray(problem.usage_node, np.int64), np.arange(len(slopes))]),
        usage=[
            *(np.pad(u, ((0, 0), (0, 1))) for u in usages),
            *(np.pad(u[:, None], ((0, 0), (memory_limit.size, 0))) for u in increases),
        ],
        usage_interval=np.concatenate(
            [np.asarray(problem.usage_interval, np.int64).reshape(-1, 2), np.tile([0, 1], (len(slopes), 1))]
        ),
        memory_limit=np.append(memory_limit, _BUDGET_UNITS),
    )
    return cheapest(bounded)


def weighed(problem: Problem, prediction: LossPrediction, seconds_per_loss: float) -> Choice:
    """Returns the choice of least cost, with its predicted increase of the loss at a price."""
    node_cost = [
        np.asarray(cost, float) + seconds_per_loss * row
        for cost, row in zip(problem.node_cost, prediction.slopes, strict=True)
    ]
    return cheapest(problem._replace(node_cost=node_cost))


def cheapest(problem: Problem) -> Choice:
    """Returns the solver's choice."""
    return tuple(int(s) for s in solve(problem, time_limit_s=SOLVER_S).choice)


def _finite_memory(problem: Problem) -> tuple[np.ndarray, list[np.ndarray]]:
    """Limits `[D]` of the devices that have one, and the usages `[S_v, D]` there."""
    devices = num_memory_devices(problem)
    limit = np.broadcast_to(np.asarray(problem.memory_limit, float), (devices,))
    usages = [np.asarray(usage, float).reshape(len(usage), -1) for usage in problem.usage]
    usages = [np.broadcast_to(usage, (len(usage), devices))[:, np.isfinite(limit)] for usage in usages]
    return limit[np.isfinite(limit)], usages
