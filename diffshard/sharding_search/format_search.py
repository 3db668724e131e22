"""Finds shardings and number formats together: the fastest step whose predicted increase of the loss is within a limit.

At a price λ, in seconds for a unit of the loss, a product costs the least over its formats of seconds + λ · increase.
So the problem has as many strategies as without formats, and its optimum D(λ) bounds the time of every plan within the
limit B from below: no such plan is faster than D(λ) - λ B. That is concave in λ, and its best λ is found by cutting
planes: each solution is a line, and the next λ is where the best lines on both sides of the limit meet. What a solution
on the wrong side exceeds, and one on the right side leaves unused, is settled by choosing whole groups for its
shardings (a knapsack).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cost.evaluation import evaluate
from diffshard.base import Deadline, InfeasibleError
from diffshard.sharding_search.number_formats import ProductGroup, kind_of, rows_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import start_of
from diffshard.sharding_search.planning import fastest_choice, make_plan, solve_problem_of
from diffshard.sharding_search.request import PlanRequest
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.format_gains import best_formats, gains_together_s, in_formats, in_own_formats
from search_spaces.sharding.space import ShardingSpace

_MOST_PRICES = 6
"""Prices of the loss that are tried at most, each by a search of its own."""
_MOST_CANDIDATES = 2
"""Sets of groups whose shardings are searched again in the end: the best by gains at known shardings, and the next."""
_SEARCH_SHARE = 0.15
"""The share of the time left that the search at one price may take, so that the last one has about a third of it."""


class _Priced(NamedTuple):
    """The solution at one price: the seconds of its step without the price, its loss, and what is in fewer bits."""

    seconds: float
    loss: float
    keys: frozenset[FormatKey]


class FoundFormats(NamedTuple):
    """The fastest plan that was found within a limit on the loss.

    Attributes:
      plan: with what is predicted of its formats.
      products: those that are in formats, and what else is in fewer bits.
      choice: `[V]` its strategies, in the space without formats.
      bound_s: no plan within the limit is faster, by the increases that it was found with.
      bound_of_any_s: no plan is faster, whatever it does to the loss.
    """

    plan: Plan
    products: frozenset[FormatKey]
    choice: np.ndarray
    bound_s: float
    bound_of_any_s: float

    @property
    def start(self) -> "Start":
        """Where another search may begin."""
        return Start(self.choice, kept_in(self.products))


class Start(NamedTuple):
    """Where a search begins.

    Attributes:
      choice: `[V]` strategies in the space without formats.
      kept: arrays that are kept as codes, which the memory limit may need.
    """

    choice: np.ndarray
    kept: frozenset[FormatKey]


def kept_in(keys: Iterable[FormatKey]) -> frozenset[FormatKey]:
    """Returns those of some keys that are arrays kept as codes."""
    return frozenset(key for key in keys if kind_of(key) == "kept")


def first_start(request: PlanRequest, groups: Sequence[ProductGroup], deadline: Deadline) -> Start:
    """Returns the fastest choice found in which nothing is in fewer bits; or only kept arrays, if no other fits memory.

    Raises:
      InfeasibleError: no plan fits the memory limit.
    """
    offered = kept_in(member for group in groups for member in group.members)
    earlier = request.options.start
    begin = None if earlier is None else start_of(earlier, request.space)
    try:
        solution = fastest_choice(request, deadline, None if begin is None else begin.choice)
        return Start(np.asarray(solution.choice), frozenset())
    except InfeasibleError:
        if not offered:
            raise
    _, products, choice = plan_with(request, offered, deadline)
    return Start(choice, products)


def fastest_within(
    request: PlanRequest,
    groups: Sequence[ProductGroup],
    increases: Mapping[str, float],
    limit: float,
    deadline: Deadline,
    start: Start,
) -> FoundFormats:
    """Returns the fastest plan found whose predicted increase of the loss is within a limit.

    Args:
      increases: of the loss, by the names of groups. Those that are not named or not finite stay as they are.
      limit: on the sum of the increases of those in float8.
      start: where it begins. What is found is not slower than that with the best formats.
    """
    groups = [group for group in groups if np.isfinite(increases.get(group.name, np.inf))]
    losses = np.array([increases[group.name] for group in groups])
    space = request.space.with_formats(_prices(groups, np.zeros(len(groups))))
    bound_s, bound_of_any_s, solutions, starts = -np.inf, 0.0, [], [start]
    price, tried = 0.0, set()
    while price not in tried and len(tried) < _MOST_PRICES and not (tried and deadline.is_over(0.6)):
        tried.add(price)
        priced = space.with_formats(_prices(groups, price * losses))
        limited = replace(request.options, time_limit_s=deadline.remaining_s(_SEARCH_SHARE))
        begin = _with_gains(priced, starts[-1])
        solution = solve_problem_of(limited, priced.problem, priced, begin, request.progress)
        bound_s = max(bound_s, solution.lower_bound - price * limit - space.most_preference_s)
        bound_of_any_s = bound_s if price == 0 else bound_of_any_s
        keys = priced.layout(solution.choice).in_fewer_bits
        loss = predicted_increase(groups, increases, keys)
        solutions.append(_Priced(solution.cost - price * loss, loss, frozenset(keys)))
        starts.append(Start(in_own_formats(priced, solution.choice), kept_in(keys)))
        price = _next_price(solutions, limit)
    sets = _candidates(space, groups, losses, starts, limit)
    allowed_sets = [(start.kept.union(*(groups[i].members for i in chosen)), start) for chosen, start in sets]
    within = [(s.seconds, i) for i, s in enumerate(solutions) if s.loss <= limit]
    if within:  # it knows which products share a rounding, and sums of gains do not
        index = min(within)[1]
        allowed_sets.append((solutions[index].keys, starts[index + 1]))
    best = None
    for allowed, start in allowed_sets:
        planned = plan_with(request, allowed, deadline, start)
        if best is None or planned[0].step_s < best[0].step_s:
            best = planned
        if len(allowed) == len(space.format_price_s):  # all are free, as at the price 0
            bound_of_any_s = max(bound_of_any_s, planned[0].lower_bound_s)
    if best is None:
        raise InfeasibleError(
            f"No plan was found within `memory_limit_bytes` whose kept arrays add at most {limit:g} to the loss. Allow "
            "more memory or a larger `Formats.max_loss_increase`."
        )
    return FoundFormats(*best, max(bound_s, bound_of_any_s), bound_of_any_s)


def plan_with(
    request: PlanRequest, allowed: Iterable[FormatKey], deadline: Deadline, start: Start | None = None
) -> tuple[Plan, frozenset[FormatKey], np.ndarray]:
    """Returns the fastest plan found that may have some products in formats, those that it has, and its choice."""
    fixed = request.space.with_formats(dict.fromkeys(sorted(allowed), 0.0))
    begin = None if start is None else _with_gains(fixed, start)
    solution = fastest_choice(request._replace(space=fixed), deadline, begin)
    products = fixed.layout(solution.choice).in_fewer_bits
    return make_plan(request._replace(space=fixed), solution), products, in_own_formats(fixed, solution.choice)


def _with_gains(space: ShardingSpace, start: Start) -> np.ndarray:
    """Returns a choice with what gains more than it costs in fewer bits, and what the start keeps as codes."""
    kept = start.kept & space.format_price_s.keys()
    return in_formats(space, start.choice, [*best_formats(space, start.choice)[0], *kept])


def predicted_increase(
    groups: Sequence[ProductGroup], increases: Mapping[str, float], products: Set[FormatKey]
) -> float:
    """Returns the sum of what groups add to the loss, of each the part of its products that are in its format."""
    shares = [(increases.get(group.name, 0.0), share_in(group, products)) for group in groups]
    return sum(increase * share for increase, share in shares if share)


def share_in(group: ProductGroup, products: Set[FormatKey]) -> float:
    """Returns the share of a group's products that are among some."""
    return len(group.members & products) / len(group.vertices)


def _prices(groups: Sequence[ProductGroup], prices: np.ndarray) -> dict[FormatKey, float]:
    """Returns the price of each product: an equal part of its group's."""
    return {m: float(p) / len(g.vertices) for g, p in zip(groups, prices, strict=True) for m in sorted(g.members)}


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
    starts: Sequence[Start],
    limit: float,
) -> list[tuple[tuple[int, ...], Start]]:
    """Returns sets of groups that are worth a last search for their shardings, and where it begins.

    `space` has all groups free to be in their formats. What a start keeps as codes takes its part of the limit first:
    it gains no time, but memory. Others of its groups are free to be kept instead where the limit has room for them.
    """
    of_keys = [gains_together_s(space, start.choice) for start in starts]
    gains = [np.array([sum(max(0.0, of[m]) for m in group.members) for group in groups]) for of in of_keys]
    rows = rows_of(groups)
    exact_s = [float(evaluate(space.problem, start.choice.tolist()).cost) for start in starts]
    candidates: dict[tuple[int, ...], tuple[float, Start]] = {}
    for start, gain, seconds in zip(starts, gains, exact_s, strict=True):
        shares = np.array([share_in(group, start.kept) for group in groups])
        rest, rest_losses = limit - float(shares @ losses), (1 - shares) * losses
        if rest < 0:
            continue
        best = set(best_groups(gain, rest_losses, rest, rows))
        for i in np.flatnonzero(shares):
            if rest_losses[[*{*best, i}]].sum() <= rest:
                best.add(int(i))
        chosen = tuple(sorted(best))
        of_chosen = seconds - float(gain[list(chosen)].sum())
        if chosen not in candidates or of_chosen < candidates[chosen][0]:
            candidates[chosen] = of_chosen, start
    fastest = sorted(candidates.items(), key=lambda item: item[1][0])[:_MOST_CANDIDATES]
    return [(chosen, start) for chosen, (_, start) in fastest]


def best_groups(
    gains: np.ndarray, losses: np.ndarray, limit: float, kinds: Sequence[int] | np.ndarray | None = None
) -> tuple[int, ...]:
    """Returns the groups that gain most within the limit, by what each gains and costs; all if that is within it.

    Args:
      gains: `[groups]` seconds.
      losses: `[groups]` what each adds to the loss.
      kinds: `[groups]` numbers, equal for groups of the same products in several formats, of which one is taken. None
        where all have others.

    Source: Nemhauser and Ullmann, Discrete dynamic programming and capital allocation (1969).
    """
    if losses.sum() <= limit:
        return tuple(range(len(gains)))  # all may be in float8, and the search says which are
    of_kind = np.arange(len(gains)) if kinds is None else np.asarray(kinds)
    useful = np.flatnonzero((gains > 0) & (losses <= limit))
    loss, gain, steps = np.zeros(1), np.zeros(1), []
    for kind in np.unique(of_kind[useful]):  # the sets that no other one beats in both, with one more kind each time
        own = useful[of_kind[useful] == kind]
        more_loss = np.add.outer(loss, [0.0, *losses[own]]).ravel()
        more_gain = np.add.outer(gain, [0.0, *gains[own]]).ravel()
        order = np.lexsort((-more_gain, more_loss))
        order = order[more_loss[order] <= limit]
        best = order[np.diff(np.maximum.accumulate(more_gain[order]), prepend=-1.0) > 0]
        loss, gain = more_loss[best], more_gain[best]
        steps.append((best // (1 + len(own)), np.array([-1, *own])[best % (1 + len(own))]))
    at, taken = -1, []  # the last set gains most
    for earlier, group in reversed(steps):
        taken.append(int(group[at]))
        at = earlier[at]
    return tuple(sorted(i for i in taken if i >= 0))
