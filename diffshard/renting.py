"""`rent` plans a function for several clusters with prices, and says which does most steps for the money.

>>> offers = [diffshard.hardware.Offer("8 H100s", diffshard.Hosts(1, 8, "h100"), price_per_hour=40.0), ...]
>>> print(diffshard.hardware.rent(train_step, offers, state, batch, tokens_per_step=batch.size))

The clusters are candidates of the outer search, and what it makes small is the price of a step: the price of an hour
times the seconds of the best plan on the cluster. No offer is cut off, because the second question, which is the
fastest, needs the plans of those that cost more; and prices in a list are easier to argue about than to obtain.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cost.clusters import Cluster, Hosts
from cost.real_numbers import PositiveAmount, checked_number, is_positive, real_number
from diffshard.base import Deadline, InfeasibleError
from diffshard.front_end import search
from diffshard.outer_search import Candidate, Outcome, OuterSearch, Tried
from diffshard.plans.printing import (
    format_bytes,
    format_count,
    format_percent,
    format_s,
    format_table,
    short_name,
    wrapped,
)
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.solving.solve import check_solver_options

_SECONDS_OF_HOUR = 3600.0
_NOT_OF_OFFERS = {
    "mesh": "each offer is a cluster, and its mesh is found",
    "devices": "the devices are those of the offers",
    "hardware": "each offer's cluster has its own",
    "objective": "the price of a step is made small",
    "pipeline": "an offer is one mesh of one kind of devices",
    "start": "a plan is for one of the clusters",
}
"""Arguments of `search` that offers leave no room for, and why."""


@dataclass(frozen=True)
class Offer:
    """Devices that can be rented, and their price.

    >>> Offer("two hosts", diffshard.Hosts(2, devices=8, hardware="h100"), price_per_hour=48.0)

    Attributes:
      name: what the offer is called in tables.
      cluster: hosts of one kind; several are a `Cluster`, which also says how they are linked.
      price_per_hour: of the whole cluster, in any currency that all offers share.

    Raises:
      TypeError, ValueError: an attribute breaks its rule; the error names it and its value.
    """

    name: str
    cluster: Cluster | Hosts
    price_per_hour: float

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"`Offer.name` must be text that tells offers apart, not {self.name!r}.")
        if isinstance(self.cluster, Hosts):
            object.__setattr__(self, "cluster", Cluster([self.cluster]))
        if not isinstance(self.cluster, Cluster):
            raise TypeError(
                f"`Offer.cluster` of {self.name!r} must be `Hosts(count, devices=..., hardware=...)` or a `Cluster` of "
                f"such, not {self.cluster!r}."
            )
        if len(kinds := self.cluster.kinds) > 1:
            raise ValueError(
                f"`Offer.cluster` of {self.name!r} must have hosts of one kind, not of {len(kinds)} "
                f"({', '.join(f'{kind.devices} x {kind.name}' for kind in kinds)}): make an offer of each kind."
            )
        price = real_number(self.price_per_hour)
        if price is None or not is_positive(price) or not math.isfinite(price):
            raise ValueError(
                f"`Offer.price_per_hour` of {self.name!r} must be a positive number, not {self.price_per_hour!r}: what "
                "an hour of the whole cluster costs. Devices of one's own cost power and what they lose in value."
            )
        object.__setattr__(self, "price_per_hour", price)

    def price_of(self, seconds: float) -> float:
        """Returns the price of some seconds of the cluster."""
        return self.price_per_hour * seconds / _SECONDS_OF_HOUR


class PlannedOffer(NamedTuple):
    """An offer, and what was found for it.

    Attributes:
      plan: the plan that was found; None where there is none.
      lower_bound_s: no plan on these devices is predicted to take less; inf where it is proven that none fits.
      reason: why there is no plan; empty where there is one.
    """

    offer: Offer
    plan: Plan | None
    lower_bound_s: float
    status: str
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step; inf where there is no plan."""
        return math.inf if self.plan is None else self.plan.step_s

    @property
    def step_price(self) -> float:
        """The price of a step; inf where there is no plan."""
        return self.offer.price_of(self.step_s)

    @property
    def least_step_price(self) -> float:
        """No plan on these devices has steps that are predicted to cost less."""
        return self.offer.price_of(self.lower_bound_s)


@dataclass(frozen=True)
class Rental:
    """Offers of devices side by side, made by `rent`; `print` shows them as a table.

    Attributes:
      offers: in the order of the price of a step, those without a plan last.
      tokens_per_step: what a step trains on; None where it was not said.
      search_s: seconds that all searches took.
    """

    fn: Callable[..., Any]
    offers: tuple[PlannedOffer, ...]
    tokens_per_step: float | None
    search_s: float

    @property
    def cheapest(self) -> PlannedOffer:
        """The offer with most steps for the money."""
        return min(self.offers, key=lambda one: one.step_price)

    @property
    def fastest(self) -> PlannedOffer:
        """The offer with the shortest step; of several the one that costs least."""
        return min(self.offers, key=lambda one: (one.step_s, one.step_price))

    @property
    def price_gap(self) -> float:
        """By which share any plan on any of the offers can be cheaper than the cheapest one found."""
        return _gap(self.cheapest.step_price, min(one.least_step_price for one in self.offers))

    @property
    def time_gap(self) -> float:
        """By which share any plan on any of the offers can be faster than the fastest one found."""
        return _gap(self.fastest.step_s, min(one.lower_bound_s for one in self.offers))

    def step(self, name: str | None = None) -> PlannedFunction[Plan]:
        """Returns the function with the plan of an offer, as `Plan.apply` does; None takes the cheapest."""
        planned = {one.offer.name: one.plan for one in self.offers if one.plan is not None}
        plan = planned.get(self.cheapest.offer.name if name is None else name)
        if plan is None:
            raise ValueError(f"`name` must be that of an offer with a plan ({', '.join(planned)}), not {name!r}.")
        return plan.apply(self.fn)

    def __str__(self) -> str:
        return _text(self)


def rent(
    fn: Callable[..., Any],
    offers: Sequence[Offer],
    *args: Any,
    tokens_per_step: float | None = None,
    time_limit_s: float | None = None,
    **options: Any,
) -> Rental:
    """Says on which of several clusters a function does most steps for the money, and on which it is the fastest.

    >>> offers = [Offer("8 H100", Hosts(1, 8, "h100"), 24.0), Offer("16 A100", Hosts(2, 8, "a100"), 29.0)]
    >>> print(rent(train_step, offers, state, batch, tokens_per_step=batch.size, donate_argnums=0, remat="search"))

    The step is the same on all of them: the batch of `args`, divided over however many devices there are. For another
    batch, or parts of it (`in_microbatches`), call this again and compare the prices of a token.

    Args:
      offers: clusters of devices of one kind that can be rented, each with the price of an hour.
      *args: as for the function itself: arrays or `jax.ShapeDtypeStruct`.
      tokens_per_step: tokens, images or other units that a step trains on, for the table; None counts steps.
      time_limit_s: seconds for the solver, of all offers together: each has an equal part of what is left. Offers whose
        turn does not come are not tried.
      **options: of `search`, for all offers: `remat`, `memory_limit_bytes`, `donate_argnums`, `cache` and others.

    Returns:
      The offers with their plans. Each plan has its bound, which holds for all shapes of the mesh; so nothing on any
      offer is predicted to be cheaper than `cheapest` by more than `price_gap`, nor faster than `fastest` by more than
      `time_gap`.

    Raises:
      InfeasibleError: no offer has a plan; names what each of them lacks.
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """
    start_s = time.perf_counter()
    _check(offers, tokens_per_step, time_limit_s, options)
    steps = {offer.name: search(fn, devices=offer.cluster, **options) for offer in offers}  # checks options of all
    outer = OuterSearch[Plan](Deadline.from_now(time_limit_s))
    plans: dict[str, Plan] = {}
    reasons: dict[str, str] = {}

    def candidate(offer: Offer) -> Candidate[Plan]:
        def solve(deadline: Deadline, cut_off: float) -> Outcome[Plan]:
            del cut_off  # offers that cost more may be faster
            step = steps[offer.name]
            if deadline.limit_s is not None:
                step = search(fn, devices=offer.cluster, time_limit_s=deadline.remaining_s(), **options)
            try:
                plan = plans[offer.name] = step.plan(*args)
            except InfeasibleError as error:
                reasons[offer.name] = str(error)
                raise
            return Outcome(plan, offer.price_of(plan.step_s), offer.price_of(plan.lower_bound_s), plan.status)

        return Candidate(offer.name, -math.inf, solve)

    outer.run([candidate(offer) for offer in offers])
    if not plans:
        each = " ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise InfeasibleError(
            f"No plan was found on any of {format_count(len(offers), 'offer')}. {each}",
            is_proven=all(error.is_proven for error in outer.errors),
        )
    found = [
        PlannedOffer(offer, plans.get(offer.name), _bound_s(offer, tried), tried.status, reasons.get(offer.name, ""))
        for offer, tried in zip(offers, outer.tried, strict=True)
    ]
    found.sort(key=lambda one: one.step_price)
    tokens = None if tokens_per_step is None else real_number(tokens_per_step)
    return Rental(fn, tuple(found), tokens, time.perf_counter() - start_s)


def _bound_s(offer: Offer, tried: Tried) -> float:
    return max(tried.lower_bound / offer.price_of(1.0), 0.0)


def _gap(value: float, bound: float) -> float:
    return max(1 - bound / value, 0.0) if value else 0.0


def _check(offers: Any, tokens_per_step: Any, time_limit_s: Any, options: dict[str, Any]) -> None:
    """Checks what `search` does not."""
    if not isinstance(offers, Sequence) or not offers or not all(isinstance(offer, Offer) for offer in offers):
        raise TypeError(f"`offers` must be one or more `Offer(name, cluster, price_per_hour)`, not {offers!r}.")
    names = [offer.name for offer in offers]
    if len(set(names)) < len(names):
        raise ValueError(f"`offers` must have different names, not {', '.join(names)}.")
    for name, why in _NOT_OF_OFFERS.items():
        if options.get(name) is not None:
            raise TypeError(f"`{name}` is no argument of `rent`: {why}.")
    if tokens_per_step is not None:
        checked_number("tokens_per_step", tokens_per_step, PositiveAmount, " or None")
    check_solver_options(None, time_limit_s, None)


def _text(rental: Rental) -> str:
    unit, count = ("steps", 1.0) if rental.tokens_per_step is None else ("tokens", rental.tokens_per_step)
    title = f"{format_count(len(rental.offers), 'offer')} for {short_name(_function(rental))}"
    rows = [("offer", "devices", "an hour", "step", f"{unit}/s", f"{unit} for 1.00", "at most", "memory")]
    rows += [_row(one, count) for one in rental.offers]
    cheap, fast = rental.cheapest, rental.fastest
    answers = {
        "cheapest": f"{cheap.offer.name}, {_amount(count / cheap.step_price)} {unit} for 1.00; no plan on any offer is "
        f"predicted to be cheaper by more than {format_percent(rental.price_gap)}",
        "fastest": f"{fast.offer.name}, {_amount(count / fast.step_s)} {unit}/s; none is predicted to be faster by "
        f"more than {format_percent(rental.time_gap)}",
        "search": format_s(rental.search_s),
    }
    lines = [title, "", *format_table(rows, "  ", right=(2, 3, 4, 5, 6, 7), wrap=(0, 1)), ""]
    for label, words in answers.items():
        lines += wrapped(f"  {label:<9}{words}", "", " " * 11)
    for one in rental.offers:
        if one.reason:
            lines += wrapped(f"  {one.offer.name}: {one.reason}", "", " " * 4)
    return "\n".join(lines)


def _row(one: PlannedOffer, count: float) -> tuple[str, ...]:
    """Returns an offer's cells; `count` is what a step trains on, in the unit of the table."""
    cluster = one.offer.cluster
    assert isinstance(cluster, Cluster)
    own = one.offer.name, f"{cluster.num_devices} {cluster.kinds[0].name}", f"{one.offer.price_per_hour:,.2f}"
    if one.plan is None:
        return (*own, one.status, *("-",) * 4)
    most = _amount(count / one.least_step_price) if one.least_step_price else "unknown"
    speed, value = _amount(count / one.step_s), _amount(count / one.step_price)
    return (*own, format_s(one.step_s), speed, value, most, format_bytes(one.plan.peak_bytes))


def _function(rental: Rental) -> str:
    return next(one.plan.function for one in rental.offers if one.plan is not None)


def _amount(value: float) -> str:
    """Writes a number with four digits and the letter of its size: `3.071M`."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.99995 * size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
