"""Finds shardings and number formats together: the fastest step whose predicted increase of the loss is within a limit.

At a price λ, in seconds for a unit of the loss, a product costs the least over its formats of seconds + λ · increase.
So the problem has as many strategies as without formats, and its optimum D(λ) bounds the time of every plan within the
limit B from below: no such plan is faster than D(λ) - λ B. That is concave in λ, and its best λ is found by cutting
planes: each solution is a line, and the next λ is where the best lines on both sides of the limit meet. What a solution
on the wrong side exceeds, and one on the right side leaves unused, is settled by choosing whole groups for its
shardings (a knapsack).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from cost.evaluation import evaluate
from diffshard.plans.base import FormatGroup, PlannedFormats
from diffshard.sharding_search.call import array_types, bound_arguments, split
from diffshard.sharding_search.layout import layout_of
from diffshard.sharding_search.number_formats import (
    Formats,
    ProductGroup,
    loss_increases,
    loss_result,
    product_groups,
)
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planning import fastest_choice, make_plan, solve_problem_of
from diffshard.sharding_search.request import PlanRequest
from search_spaces.sharding.space import ShardingSpace

_MOST_PRICES = 6
"""Prices of the loss that are tried at most, each by a search of its own."""
_MOST_CANDIDATES = 2
"""Sets of groups whose shardings are searched again in the end: the best by gains at known shardings, and the next."""
_SEARCH_SHARE = 0.15
"""The share of the time left that the search at one price may take, so that the last one has about a third of it."""


class _Priced(NamedTuple):
    """The solution at one price: its choice, the seconds of its step without the price, and its loss."""

    choice: np.ndarray
    seconds: float
    loss: float


def find_plan_with_formats(request: PlanRequest) -> Plan:
    """Returns the fastest plan found whose predicted increase of the loss is within that of the options.

    Raises:
      ValueError: the loss or the calls do not fit the function, the loss is not finite, or the function has an
        operation that only XLA's partitioner can split.
      InfeasibleError: no plan fits the memory limit.
    """
    formats, space = request.options.formats, request.space
    assert formats is not None
    if not space.as_program:
        raise ValueError("`formats` need an explicit program, and the function has operations that cannot be in one.")
    groups = product_groups(space)
    increases = _increases(formats, request, groups)
    offered = [(group, increases[group.name]) for group in groups if group.name in increases]
    groups, losses = [group for group, _ in offered], np.array([loss for _, loss in offered])
    limit, deadline = formats.max_loss_increase, request.options.deadline()
    bound_s, solutions = -np.inf, []
    price, tried = 0.0, set()
    while price not in tried and len(tried) < _MOST_PRICES and not (tried and deadline.is_over(0.6)):
        tried.add(price)
        priced = space.with_float8(_prices(groups, price * losses))
        limited = replace(request.options, time_limit_s=deadline.remaining_s(_SEARCH_SHARE))
        solution = solve_problem_of(limited, priced.problem, priced, None, request.progress)
        bound_s = max(bound_s, solution.lower_bound - price * limit - space.most_preference_s)
        layout = priced.layout(solution.choice)
        rounded = [sum(v.index in layout.rounded for v in g.vertices) / len(g.vertices) for g in groups]
        loss = float(losses @ rounded) if groups else 0.0
        solutions.append(_Priced(np.asarray(solution.choice), solution.cost - price * loss, loss))
        price = _next_price(solutions, limit)
    best = None
    for chosen, start in _candidates(space, groups, losses, [s.choice for s in solutions], limit):
        fixed = space.with_float8(_prices([groups[i] for i in chosen], np.zeros(len(chosen))))
        found = fastest_choice(request._replace(space=fixed), deadline, start)
        plan = make_plan(request._replace(space=fixed), found)
        if best is None or plan.step_s < best.step_s:
            best = plan
    assert best is not None
    bound_s = min(max(bound_s, 0.0), best.step_s)
    gap = (best.step_s - bound_s) / best.step_s if best.step_s else 0.0
    timeline = best.timeline
    if timeline is not None:  # the bound of the space with the chosen formats is none of other formats
        least_s = space.with_float8(_prices(groups, np.zeros(len(groups)))).least_compute_s
        timeline = replace(timeline, lower_bound_s=min(least_s, timeline.lower_bound_s))
    status = "finished" if gap > 1e-9 and best.status == "optimal" else best.status
    planned = _planned(formats, space, offered, best)
    return replace(best, lower_bound_s=bound_s, gap=gap, status=status, timeline=timeline, formats=planned)


def _increases(formats: Formats, request: PlanRequest, groups: Sequence[ProductGroup]) -> dict[str, float]:
    """Returns what each group adds to the loss, by its name."""
    if formats.increases is not None:
        return dict(formats.increases)
    traced_function = request.traced_function
    loss = loss_result(formats, request.space, traced_function.out_paths)
    calls, types = [], array_types(traced_function.call.arrays)
    for number, call in enumerate(formats.calls):
        arrays: list[Any] = split(bound_arguments(request.options, call, {}))[0]
        if array_types(arrays) != types:
            raise ValueError(f"`Formats.calls[{number}]` has other arrays than the arguments that are planned for.")
        calls.append(arrays)
    return dict(zip((g.name for g in groups), loss_increases(formats, request.space, groups, calls, loss), strict=True))


def _prices(groups: Sequence[ProductGroup], prices: np.ndarray) -> dict[int, float]:
    """Returns the price of each product: an equal part of its group's."""
    return {v.index: float(p) / len(g.vertices) for g, p in zip(groups, prices, strict=True) for v in g.vertices}


def _next_price(solutions: Sequence[_Priced], limit: float) -> float:
    """Returns where the lines of the best solutions on both sides of the limit meet; a price that was tried ends it."""
    within = [s for s in solutions if s.loss <= limit]
    beyond = [s for s in solutions if s.loss > limit]
    if not beyond:
        return 0.0
    if not within:  # dear enough that the most harmful group is worth less than the whole step
        return max(s.seconds for s in beyond) / limit
    slow, fast = min(within, key=lambda s: s.seconds), max(beyond, key=lambda s: -s.loss)
    return max(0.0, (slow.seconds - fast.seconds) / (fast.loss - slow.loss))


def _candidates(
    space: ShardingSpace,
    groups: Sequence[ProductGroup],
    losses: np.ndarray,
    choices: Sequence[np.ndarray],
    limit: float,
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Returns sets of groups in float8 that are worth a last search for their shardings, and where it begins."""
    gains = [np.array([_gain_s(space, group, choice) for group in groups]) for choice in choices]
    exact_s = [float(evaluate(space.problem, choice.tolist()).cost) for choice in choices]

    def seconds(chosen: tuple[int, ...]) -> list[float]:
        return [exact - float(gain[list(chosen)].sum()) for exact, gain in zip(exact_s, gains, strict=True)]

    candidates = dict.fromkeys(_chosen(gain, losses, limit) for gain in gains)
    best = sorted(candidates, key=lambda chosen: min(seconds(chosen)))[:_MOST_CANDIDATES]
    return [(chosen, choices[int(np.argmin(seconds(chosen)))]) for chosen in best]


def _chosen(gains: np.ndarray, losses: np.ndarray, limit: float) -> tuple[int, ...]:
    """Returns the groups that gain most within the limit, by what each gains and costs."""
    if not np.any(gains > 0):
        return ()
    if losses.sum() <= limit:
        return tuple(np.flatnonzero(gains > 0).tolist())
    result = milp(
        -gains / gains.max(),
        integrality=np.ones(len(gains)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(losses[None] / limit, -np.inf, 1.0),
    )
    taken = [] if result.x is None else np.flatnonzero((result.x > 0.5) & (gains > 0)).tolist()
    while losses[taken].sum() > limit:  # by the tolerance of the solver
        taken.remove(min(taken, key=lambda i: gains[i] / max(losses[i], 1e-300)))
    return tuple(taken)


def _gain_s(space: ShardingSpace, group: ProductGroup, choice: np.ndarray) -> float:
    """Returns the seconds that a group gains in float8 at the shardings of a choice."""
    costs = space.with_float8({v.index: 0.0 for v in group.vertices}).node_costs
    strategies = [(v, (space.nodes[v.index].strategies[choice[v.index]],)) for v in group.vertices]
    return sum(max(0.0, float(costs.float8_gain_s(v, strategy)[0])) for v, strategy in strategies)


def _planned(
    formats: Formats, space: ShardingSpace, offered: Sequence[tuple[ProductGroup, float]], plan: Plan
) -> PlannedFormats:
    rows = []
    exact = space.with_float8({v.index: np.inf for g, _ in offered for v in g.vertices}).node_costs
    layout = layout_of(plan, space)
    for group, increase in offered:
        in_float8 = [v for v in group.vertices if v.index in layout.rounded]
        gain_s = sum(float(exact.float8_gain_s(v, (layout.strategies[v.index],))[0]) for v in in_float8)
        rows.append(FormatGroup(group.name, len(group.vertices), len(in_float8), increase, gain_s))
    rows.sort(key=lambda row: (-row.gain_s, row.name))
    increase = sum(row.loss_increase for row in rows if row.num_float8)
    return PlannedFormats(formats.max_loss_increase, increase, tuple(rows))
