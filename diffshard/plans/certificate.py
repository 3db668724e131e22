"""How good a plan is known to be: the same six things for every plan, whatever it plans.

A plan predicts `step_s`, and stores what its search found out: `lower_bound_s`, `status`, `search_s` and `history`. The
gap follows from these, so it is stored nowhere.
"""

import math
from typing import Any, NamedTuple, Protocol

from cost.number_ranges import Amount, AnyNumber
from diffshard.plans.formats import format_percent, format_s, wrapped

History = tuple[tuple[Amount, AnyNumber, AnyNumber], ...]
"""(seconds since the start, cost, lower bound) at each improvement of a solver."""
STATUSES = ("optimal", "finished", "time limit", "interrupted")
"""How a search may end that found a plan."""
_TOLERANCE = 1e-6  # relative: sums of the same numbers in another order


class Certificate(NamedTuple):
    """How good a plan is known to be, and what it took to find it.

    Attributes:
      step_s: predicted seconds of a step.
      lower_bound_s: no plan in the search space is predicted to take less; 0 or -inf where no bound is known.
      gap: how much less the best possible plan can take at most, relative to `step_s`.
      status: how the search ended, one of `STATUSES`.
      search_s: seconds of the search.
      history: the improvements of the solver; empty where there were none, or several searches made the plan.
    """

    step_s: float
    lower_bound_s: float
    gap: float
    status: str
    search_s: float
    history: History = ()

    @property
    def has_bound(self) -> bool:
        """Whether a bound is known: 0 s is one only for a step that takes no time."""
        return has_bound(self.lower_bound_s, self.gap)

    @property
    def bound_words(self) -> str:
        """The bound and the gap to it, as `1.20 ms, gap 3%`; `none` where no bound is known."""
        return f"{format_s(self.lower_bound_s)}, gap {format_percent(self.gap)}" if self.has_bound else "none"

    def lines(self, others: str) -> list[str]:
        """Returns the lines of a plan's text that say what is known; `others` names what none of is faster by more."""
        bound = f"{self.bound_words}: no {others} is predicted to be faster by more" if self.has_bound else "none"
        return [
            *wrapped(bound, "  bound    ", " " * 11),
            f"  search   {format_s(self.search_s)}, {self.status}",
        ]


class _Judged(Protocol):
    """What a certificate is made of."""

    @property
    def step_s(self) -> float: ...
    @property
    def lower_bound_s(self) -> float: ...
    @property
    def status(self) -> str: ...
    @property
    def search_s(self) -> float: ...
    @property
    def history(self) -> History: ...


class Certified:
    """A plan that says how good it is known to be: its class has the other fields of `Certificate`."""

    @property
    def gap(self: _Judged) -> float:
        """How much less the best possible plan can be predicted to take, relative to `step_s`."""
        return relative_gap(self.step_s, self.lower_bound_s)

    @property
    def certificate(self) -> Certificate:
        """How good the plan is known to be, and what it took to find it."""
        plan: Any = self
        return Certificate(plan.step_s, plan.lower_bound_s, plan.gap, plan.status, plan.search_s, plan.history)


def relative_gap(step_s: float, lower_bound_s: float) -> float:
    """Returns how much less than a time its lower bound is, relative to the time; 0 if it is no less."""
    if math.isinf(step_s):
        return math.inf
    return max(step_s - lower_bound_s, 0.0) / step_s if step_s else 0.0


def has_bound(lower_bound_s: float, gap: float) -> bool:
    """Returns whether a search has found a bound: 0 s is one only for a step that takes no time."""
    return math.isfinite(lower_bound_s) and (lower_bound_s > 0 or gap <= 0)


def check_certificate(certificate: Certificate) -> None:
    """Checks that a search can have ended so, and that the bound is not above the step."""
    _, lower_bound_s, gap, status, *_ = certificate
    if status not in STATUSES:
        raise ValueError(f"`status` is {status!r}, not one of {STATUSES}")
    step_s = certificate.step_s
    if not lower_bound_s <= step_s * (1 + _TOLERANCE):
        raise ValueError(f"`lower_bound_s` is {lower_bound_s!r}, more than the {step_s!r} s of the step")
    if math.isnan(gap):
        raise ValueError(f"`lower_bound_s` is {lower_bound_s!r}, which gives no gap to a step of {step_s!r} s")
