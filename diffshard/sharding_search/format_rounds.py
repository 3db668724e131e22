"""Chooses number formats in rounds: what a product does to the loss depends on which others are in float8.

The first round prices each group of products by what it adds to the loss alone. The formats that are found by these
prices are measured together, and simple rules, too. Each group is measured once more where these formats are: what the
loss falls by without it, or rises by with it. These prices are fitted to what was measured of all trials, and the
problem is solved again, until the formats have been measured before. The fastest plan whose own measured increase is
within the limit is returned.
"""

import math
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax.extend import core
from scipy.optimize import nnls

from diffshard.base import OPTIMAL_GAP, Deadline, InfeasibleError
from diffshard.plans.sections import FormatGroup, FormatTrial, PlannedFormats
from diffshard.plans.text import noise_words
from diffshard.sharding_search.call import array_types
from diffshard.sharding_search.carried import carrying_parameter
from diffshard.sharding_search.format_losses import Increase, MeasuredLosses
from diffshard.sharding_search.format_rules import simple_rules
from diffshard.sharding_search.format_search import (
    FoundFormats,
    fastest_within,
    first_start,
    plan_with,
    predicted_increase,
    share_in,
)
from diffshard.sharding_search.number_formats import (
    Formats,
    ProductGroup,
    all_groups,
    carried_formats,
    offered_groups,
)
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import earlier_plan_of
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import space_of, traced_measured_function
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.format_gains import gains_s, in_formats

_EXACT_SHARE = 0.2
"""The share of the time limit in which the shardings without float8 are searched, with which the others begin."""
_TRUSTED_SHARE = 0.1
"""By which share of a measured increase a sum of groups may differ from it: formats harm a little more together."""
_MOST_DAMAGE = 10.0
"""The increase that counts for formats whose loss is not finite, in limits: enough for the next round to avoid them."""


class Trial(NamedTuple):
    """Formats that were measured together.

    Attributes:
      name: of the rule, or of the round that found them.
      found: the plan, with its bounds.
      increases: by which it was found.
      predicted: of its formats by these increases.
      measured: of its formats together.
      error: the standard error of `measured`, if that is known.
    """

    name: str
    found: FoundFormats
    increases: Mapping[str, float]
    predicted: float
    measured: float
    error: float | None


def find_plan_with_formats(request: PlanRequest) -> Plan:
    """Returns the fastest plan found whose increase of the loss is within that of the options.

    Raises:
      ValueError: the loss, the calls or the names of increases do not fit the function, the loss is not finite, or the
        function has an operation that only XLA's partitioner can split.
      InfeasibleError: no plan fits the memory limit.
    """
    formats, space = request.options.formats, request.space
    assert formats is not None
    if not space.as_program:
        raise ValueError("`formats` need an explicit program, and the function has operations that cannot be in one.")
    carried = carried_formats(formats)
    if carried and carrying_parameter(request.traced_function) is None:
        raise ValueError(
            f"{carried[0]}, whose residuals go with the state of a training, but no result of "
            f"{request.options.function_name} replaces an argument. Return the new state as one part of the result."
        )
    groups = offered_groups(space, formats)
    earlier = earlier_plan_of(request)
    if earlier is not None and _is_for(earlier, groups, formats):
        return earlier
    losses = measured_losses(request) if formats.calls or formats.validation_runs else None
    if formats.increases is not None:
        names = {group.name for group in all_groups(space, formats)}
        if unknown := sorted(set(formats.increases) - names):
            raise ValueError(
                f"`Formats.increases` names {unknown[0]!r}, which is no group of products of "
                f"{request.options.function_name}; there are {', '.join(sorted(names)) or 'none'}."
            )
        increases = dict(formats.increases)
    else:
        assert losses is not None
        increases = increases_at(losses, groups, frozenset())
    if losses is None:
        deadline = request.options.deadline()
        start = first_start(request, groups, Deadline.from_now(deadline.remaining_s(_EXACT_SHARE)))
        found = fastest_within(request, groups, increases, formats.max_loss_increase, deadline, start)
        return _with_formats(request, groups, _trial("", found, groups, increases, Increase(0.0, None)), (), "")
    rules = simple_rules(all_groups(space, formats))
    trials = measured_trials(request, groups, losses, increases, rules)
    best = fastest_trial(trials, formats.max_loss_increase)
    _warn_of_overflows(losses)
    plan = _with_formats(request, groups, best, trials, losses.measured_by)
    if plan.formats is not None and (noise := noise_words(plan.formats)):
        warnings.warn(noise, stacklevel=2)
    return plan


def _is_for(plan: Plan, groups: Sequence[ProductGroup], formats: Formats) -> bool:
    """Returns whether a plan's formats were chosen within the same limit of the same groups, measured in the same way.

    What was measured on may differ: a training that goes on has other calls left. Increases that are given and not
    measured have to be the same.
    """
    planned = plan.formats
    if planned is None or planned.max_loss_increase != formats.max_loss_increase:
        return False
    offered = {group.name: (group.kind, group.format) for group in groups}
    known = {group.name: (group.kind, group.format) for group in planned.groups}
    is_measured, given = bool(formats.calls or formats.validation_runs), formats.increases
    if bool(planned.measured_by) != is_measured or planned.increases_by != _increases_by(formats):
        return False
    if given is not None:
        is_as_given = is_measured or all(given.get(group.name) == group.loss_increase for group in planned.groups)
        return is_as_given and known.keys() == offered.keys() & given.keys()
    return known.keys() <= offered.keys() and {*known.values()} == {*offered.values()}  # some may not be measured


def _increases_by(formats: Formats) -> str:
    """Returns how the increase of each group is first measured; "" where increases are given."""
    return formats.increases_by if formats.increases is None else ""


def measured_trials(
    request: PlanRequest,
    groups: Sequence[ProductGroup],
    losses: MeasuredLosses,
    increases: dict[str, float],
    rules: Mapping[str, Set[FormatKey]],
    planned: dict[str, FoundFormats] | None = None,
) -> list[Trial]:
    """Returns the trials of each round and of the rules, in the order in which they were measured.

    The last round stands in the place of an earlier one that found the same formats.

    Args:
      planned: the plans of rules, which depend on no loss: those that are here are taken, and others are added.
    """
    formats = request.options.formats
    assert formats is not None
    limit, solves = formats.max_loss_increase, formats.rounds + 1 + len(rules) + 2
    limit_s = request.options.time_limit_s
    known = [group for group in groups if group.name in losses.groups and group.name in increases]
    offered = frozenset(member for group in known for member in group.members)

    def deadline() -> Deadline:
        return Deadline.from_now(None if limit_s is None else limit_s / solves)

    def measured(products: Set[FormatKey]) -> Increase:
        return losses.increase_of(stand_ins(losses, groups, products))

    trials: list[Trial] = []
    planned, looked = {} if planned is None else planned, increases
    start = first_start(request, known, deadline())
    for number in range(formats.rounds + 1):
        found = fastest_within(request, known, increases, limit, deadline(), start)
        earlier = next((i for i, trial in enumerate(trials) if trial.found.products == found.products), None)
        if earlier is not None:
            if found.plan.step_s <= trials[earlier].found.plan.step_s:
                trials[earlier] = trials[earlier]._replace(found=found, increases=increases)
            break
        last = _trial(f"round {number + 1}", found, groups, increases, measured(found.products))
        trials.append(last)
        if number == 0:
            for name, products in {"nothing": frozenset(), **rules}.items():
                try:
                    if name not in planned:
                        own = plan_with(request, offered & products, deadline(), found.start)
                        planned[name] = FoundFormats(*own, found.bound_of_any_s, found.bound_of_any_s)
                except InfeasibleError:  # the memory limit needs arrays that are kept as codes
                    continue
                rounded = planned[name].products
                equal = next((t for t in trials if t.found.products == rounded), None)
                increase = measured(rounded) if equal is None else Increase(equal.measured, equal.error)
                trials.append(_trial(name, planned[name], groups, increases, increase))
        start = found.start
        if number < formats.rounds:
            around = last if last.measured > limit else fastest_trial(trials, limit)
            products = stand_ins(losses, groups, around.found.products)
            if losses.takes_looks:
                within = products if math.isfinite(around.measured) else frozenset()  # else all that follows diverges
                looked = increases_at(losses, known, within)
            increases = _scaled(groups, fitted_increases(groups, looked, trials, limit), around, limit)
    return trials


def fastest_trial(trials: Sequence[Trial], limit: float) -> Trial:
    """Returns the fastest of those that were measured to be within a limit.

    Raises:
      InfeasibleError: none is.
    """
    within = [trial for trial in trials if trial.measured <= limit]
    if not within:
        least = min(trial.measured for trial in trials)
        raise InfeasibleError(
            f"No plan was found within `memory_limit_bytes` that adds at most {limit:g} to the loss: of those within "
            f"the memory the best one adds {least:.2g}. Allow more memory or a larger `Formats.max_loss_increase`."
        )
    return min(within, key=lambda trial: trial.found.plan.step_s)


def measured_losses(request: PlanRequest) -> MeasuredLosses:
    """Returns the measured losses of the function, or of the narrower one that stands for it."""
    options, traced_function, space = request.options, request.traced_function, request.space
    formats = options.formats
    assert formats is not None
    if formats.measured_fn is not None:
        options, traced_function = traced_measured_function(options)
        space = space_of(options, traced_function)
    types = array_types(traced_function.call.arrays)
    paths, num_devices = traced_function.out_paths, math.prod(request.space.axis_sizes)
    losses = MeasuredLosses(formats, space, options, types, paths, num_devices)
    losses.check_exact(core.jaxpr_as_fun(traced_function.jaxpr))
    return losses


def _warn_of_overflows(losses: MeasuredLosses) -> None:
    if losses.overflows:
        counts = ", ".join(f"{count} of {name}" for name, count in losses.overflows.most_common())
        warnings.warn(
            f"{sum(losses.overflows.values())} operands had numbers that are not finite, so that no scale fits them, "
            f"while formats were measured: {counts}. Losses that are not finite count as inf.",
            stacklevel=2,
        )


def increases_at(losses: MeasuredLosses, groups: Sequence[ProductGroup], products: Set[FormatKey]) -> dict[str, float]:
    """Returns the increase of the loss by each group, by its name, where some products are in formats."""
    measured = [losses.groups[group.name] for group in groups if group.name in losses.groups]
    return dict(zip((g.name for g in measured), losses.increases_at(products, measured), strict=True))


def stand_ins(losses: MeasuredLosses, groups: Sequence[ProductGroup], products: Set[FormatKey]) -> frozenset[FormatKey]:
    """Returns the products of the measured function that stand for some of the searched one.

    They are the same where both have as many equal layers, else those at about the same depth; of each group that is in
    its format at least one.
    """
    like = set()
    for group in groups:
        measured = losses.groups.get(group.name)
        if measured is not None:
            count, last = len(measured.vertices), len(group.vertices) - 1
            places = [round(i * last / (count - 1)) if count > 1 else last // 2 for i in range(count)]
            pairs = zip(measured.vertices, places, strict=True)
            inside = [group.member(vertex) in products for vertex in group.vertices]
            own = {measured.member(vertex) for vertex, place in pairs if inside[place]}
            rounded = [place for place, is_in in enumerate(inside) if is_in]
            if rounded and not own:  # between those that stand for others: the nearest one is measured
                nearest = min(range(count), key=lambda i: min(abs(places[i] - place) for place in rounded))
                own = {measured.member(measured.vertices[nearest])}
            like |= own
    return frozenset(like)


def fitted_increases(
    groups: Sequence[ProductGroup], increases: Mapping[str, float], trials: Sequence[Trial], limit: float
) -> dict[str, float]:
    """Returns increases that agree with what was measured of whole trials, and else are in proportion to given ones.

    They are the least squares of two kinds of distances, none negative. The sum over a trial's formats may differ from
    what was measured by a share of it, or of the limit if that is more; trials with losses that are not finite do not
    count. An increase may differ from the given one, times a factor that is fitted to all trials, by itself, or by the
    mean of all if that is more.
    """
    trials = [trial for trial in trials if math.isfinite(trial.measured)]
    known = [group for group in groups if math.isfinite(increases.get(group.name, math.inf))]
    if not known:  # scipy's `nnls` ends the process on a matrix without columns
        return dict(increases)
    given = np.array([increases[group.name] for group in known])
    shares = np.array([[share_in(group, trial.found.products) for group in known] for trial in trials])
    measured = np.array([trial.measured for trial in trials])
    predicted, of_trials = shares @ given, 1 / (_TRUSTED_SHARE * np.maximum(limit, np.abs(measured)))
    total = np.sum((predicted * of_trials) ** 2)
    factor = max(0.0, np.sum(measured * predicted * of_trials**2) / total) if total else 1.0
    prior = factor * given
    of_groups = 1 / np.maximum(prior, max(float(np.mean(prior)), limit / len(known)))
    fitted = nnls(
        np.concatenate([shares * of_trials[:, None], np.diag(of_groups)]),
        np.concatenate([measured * of_trials, prior * of_groups]),
    )[0]
    return {**increases, **dict(zip((group.name for group in known), fitted.tolist(), strict=True))}


def _scaled(
    groups: Sequence[ProductGroup], increases: Mapping[str, float], trial: Trial, limit: float
) -> dict[str, float]:
    """Returns increases by which a trial that was measured to be beyond the limit is beyond it, by as much."""
    scaled, products, together = dict(increases), trial.found.products, min(trial.measured, _MOST_DAMAGE * limit)
    if not predicted_increase(groups, increases, products) <= limit < together:
        return scaled
    shares = {g.name: share_in(g, products) for g in groups if g.name in increases}
    inside = {name for name, share in shares.items() if share}
    total = sum(increases[name] * shares[name] for name in inside)
    for name in inside:
        is_known = 0 < total < math.inf
        scaled[name] = increases[name] * together / total if is_known else together / sum(shares.values())
    return scaled


def _trial(
    name: str, found: FoundFormats, groups: Sequence[ProductGroup], increases: Mapping[str, float], measured: Increase
) -> Trial:
    return Trial(name, found, increases, predicted_increase(groups, increases, found.products), *measured)


def _with_formats(
    request: PlanRequest, groups: Sequence[ProductGroup], best: Trial, trials: Sequence[Trial], measured_by: str
) -> Plan:
    """Returns the plan of a trial with its bounds and what is known of its formats."""
    formats, space, found = request.options.formats, request.space, best.found
    assert formats is not None
    plan, increases = found.plan, best.increases
    bound_s = min(max(found.bound_s, 0.0), plan.step_s)
    offered = [group for group in groups if group.name in increases]
    timeline = plan.timeline
    if timeline is not None:  # the bound of the space with the chosen formats is none of other formats
        least_s = space.with_formats({m: 0.0 for g in offered for m in sorted(g.members)}).least_compute_s
        timeline = replace(timeline, lower_bound_s=min(least_s, timeline.lower_bound_s))
    planned = PlannedFormats(
        formats.max_loss_increase,
        predicted_increase(groups, increases, found.products),
        _rows(request, offered, increases, found),
        best.measured if measured_by else None,
        measured_by,
        tuple(
            FormatTrial(t.name, t.found.plan.step_s, len(t.found.products), t.predicted, t.measured, t.error)
            for t in trials
        ),
        _increases_by(formats),
    )
    plan = replace(plan, lower_bound_s=bound_s, timeline=timeline, formats=planned)
    return replace(plan, status="finished") if plan.gap > OPTIMAL_GAP and plan.status == "optimal" else plan


def _rows(
    request: PlanRequest, groups: Sequence[ProductGroup], increases: Mapping[str, float], found: FoundFormats
) -> tuple[FormatGroup, ...]:
    rows, space = [], request.space.with_formats(dict.fromkeys(sorted(found.products), 0.0))
    gain_of = gains_s(space, in_formats(space, found.choice, found.products))
    for group in groups:
        rounded = group.members & found.products
        gain_s = sum(gain_of[product] for product in rounded)
        counts = len(group.vertices), len(rounded)
        rows.append(FormatGroup(group.name, *counts, increases[group.name], gain_s, group.format, group.kind))
    return tuple(sorted(rows, key=lambda row: (-row.gain_s, row.name)))
