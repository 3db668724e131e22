"""From rows of weights to one discrete choice."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cost.base import Problem, is_forbidden, num_memory_devices
from cost.evaluation import evaluate
from diffshard.bilevel_search.plan import BilevelPlan, groups_of
from diffshard.bilevel_search.space import Choice, is_lossless, reference_cost
from diffshard.solving.solve import solve

_UNITS = 1e6  # of a budget
_SOLVER_S = 20.0


class Prediction(NamedTuple):
    """The mean loss increase that a search saw, as a linear function of the rows, in units of the loss.

    Attributes:
      offset: at rows of zeros; 0 where the estimator itself is linear.
      slopes: V arrays `[S_v]`.
    """

    offset: float
    slopes: Sequence[np.ndarray]

    def increase(self, choice: Choice) -> float:
        """What a discrete choice adds to the loss."""
        return self.offset + float(sum(row[s] for row, s in zip(self.slopes, choice, strict=True)))


def proposals(
    problem: Problem,
    rows: Sequence[np.ndarray],
    prediction: Prediction,
    exact: Choice | None,
    most: float | None,
) -> dict[Choice, float]:
    """Choices that the search stands for, with their predicted increase.

    Args:
      problem: of the space.
      rows: V arrays `[S_v]`.
      prediction: of the loss.
      exact: the exact choice, which is there for the case that nothing else keeps the bound; None if there is none.
      most: the bound on the loss, or None.
    """
    found = [tuple(int(row.argmax()) for row in rows)]
    if most is not None:
        found.append(within(problem, prediction, most))
    increases = {choice: prediction.increase(choice) for choice in found}
    return increases if exact is None or most is None else {**increases, exact: 0.0}


def plan_of(
    space: Any, problem: Problem, increases: Mapping[Choice, float], most: float | None, note: str = ""
) -> BilevelPlan:
    """The cheapest choice that keeps the bound and the problem's limits, or else the one that breaks them least.

    Of choices of the same cost the one of least increase is taken. The note goes into the message.
    """
    allowed = np.inf if most is None else most * (1 + 1e-6)
    priced = {choice: evaluate(problem, choice) for choice in increases}
    choice = min(
        increases,
        key=lambda c: (
            max(increases[c] - allowed, 0.0),
            not priced[c].feasible,
            priced[c].excess,
            priced[c].cost,
            increases[c],
        ),
    )
    increase, found, message = increases[choice], priced[choice], ""
    if not increase <= allowed:
        message = (
            f"infeasible: the least increase of the loss that was reached is {increase:.4g}, above "
            f"`max_loss_increase` {most:.4g}; allow more, or give the space more exact strategies"
        )
    elif not found.feasible:
        message = f"infeasible: the memory limit is exceeded by {found.excess:,.0f} bytes; `diffshard.solve` keeps it"
    return BilevelPlan(
        choice=choice,
        groups=groups_of(space, problem, choice),
        seconds=float(found.cost),
        cost_ratio=float(found.cost) / reference_cost(space, problem),
        loss_increase=0.0 if is_lossless(space) else increase,
        feasible=not message,
        message="; ".join(filter(None, (message, note))),
        max_loss_increase=most,
        lossless=is_lossless(space),
        mesh_axes=dict(getattr(space, "mesh_axes", {})),
        hardware=getattr(space, "hardware", None),
        notes=tuple(getattr(space, "notes", ())),
    )


def dominates(problem: Problem, exact: Choice, choice: Choice, increase: float) -> bool:
    """Whether the exact choice is as cheap as another that does not lower the loss, and exceeds no memory more."""
    if choice == exact or increase < 0:
        return False
    here, there = evaluate(problem, exact), evaluate(problem, choice)
    return bool(here.cost <= there.cost and here.excess <= there.excess)


def unseen(plan: BilevelPlan, exact: Choice, slopes: Sequence[Any]) -> list[str]:
    """Names of nodes where the plan is not exact and all strategies have the same slope: the loss did not tell them."""
    rows = zip(plan.nodes, plan.choice, exact, slopes, strict=True)
    return [node for node, chosen, other, row in rows if chosen != other and np.ptp(np.asarray(row)) == 0]


def within(problem: Problem, prediction: Prediction, most: float) -> Choice:
    """The cheapest choice of predicted increase within the bound: a budget is a memory limit of one more device."""
    slopes = prediction.slopes
    least = tuple(
        int(np.where(is_forbidden(cost), np.inf, row).argmin())
        for cost, row in zip(problem.node_cost, slopes, strict=True)
    )
    room = most - prediction.increase(least)
    if room <= 0:
        return least
    spent = [np.maximum(row - row[s], 0.0) / room * _UNITS for row, s in zip(slopes, least, strict=True)]
    limit, usages = _finite_memory(problem)
    bounded = problem._replace(
        usage_node=np.concatenate([np.asarray(problem.usage_node, np.int64), np.arange(len(slopes))]),
        usage=[
            *(np.pad(u, ((0, 0), (0, 1))) for u in usages),
            *(np.pad(u[:, None], ((0, 0), (limit.size, 0))) for u in spent),
        ],
        usage_interval=np.concatenate(
            [np.asarray(problem.usage_interval, np.int64).reshape(-1, 2), np.tile([0, 1], (len(slopes), 1))]
        ),
        memory_limit=np.append(limit, _UNITS),
    )
    return tuple(int(s) for s in solve(bounded, time_limit_s=_SOLVER_S).choice)


def weighed(problem: Problem, prediction: Prediction, seconds_per_loss: float) -> Choice:
    """The choice of least cost, with what it is predicted to add to the loss at a price."""
    node_cost = [
        np.asarray(cost, float) + seconds_per_loss * row
        for cost, row in zip(problem.node_cost, prediction.slopes, strict=True)
    ]
    found = solve(problem._replace(node_cost=node_cost), time_limit_s=_SOLVER_S)
    return tuple(int(s) for s in found.choice)


def _finite_memory(problem: Problem) -> tuple[np.ndarray, list[np.ndarray]]:
    """Limits `[D]` of the devices that have one, and the usages `[S_v, D]` there."""
    devices = num_memory_devices(problem)
    limit = np.broadcast_to(np.asarray(problem.memory_limit, float), (devices,))
    usages = [np.asarray(usage, float).reshape(len(usage), -1) for usage in problem.usage]
    usages = [np.broadcast_to(usage, (len(usage), devices))[:, np.isfinite(limit)] for usage in usages]
    return limit[np.isfinite(limit)], usages
