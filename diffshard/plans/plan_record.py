"""The protocol of plans that are one record: text, page, file, difference, certificate.

A class has the fields, says by `__str__` what `print` shows, and names the kind of its files. The rest follows.
"""

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Self

from cost.real_numbers import Amount, AnyNumber
from diffshard.base import PlanError
from diffshard.plans.documents import RecordFile
from diffshard.plans.page_elements import Paged, cards, document, escape
from diffshard.plans.printing import format_percent, format_s, wrapped

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


class Certified:
    """A plan that says how good it is known to be: its class has the other fields of `Certificate`."""

    @property
    def gap(self) -> float:
        """How much less the best possible plan can be predicted to take, relative to `step_s`."""
        plan: Any = self
        return relative_gap(plan.step_s, plan.lower_bound_s)

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


_MOST_DIFFERENCES = 40
"""Lines of a difference: more than a screen would not be read. Chosen by hand."""


class FileRecord(Paged):
    """A plan that is saved and loaded by its fields, and shown in notebooks as its page."""

    __slots__ = ()
    _file: ClassVar[RecordFile]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced whole or not at all.

        Raises:
          OSError: the file cannot be written.
        """
        self._file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a plan that `save` wrote.

        Raises:
          PlanError: the file is no such plan, is damaged, or is of another version.
          OSError: the file cannot be read.
        """
        return cls._file.load(path, cls)


class PlanRecord(Certified, FileRecord):
    """A plan that is shown, saved, loaded and compared by its fields.

    Attributes:
      _not_compared: beginnings of the names of fields that `diff` leaves out: how a plan was found.
    """

    _not_compared: ClassVar[tuple[str, ...]] = ("search_s", "history")

    def html(self) -> str:
        """Returns the plan as a self-contained page for a browser; in a notebook a plan shows itself as this page."""
        known, (title, *lines) = self.certificate, str(self).splitlines()
        gap = (format_percent(known.gap), f"gap to the lower bound {format_s(known.lower_bound_s)}")
        numbers = cards(
            (format_s(known.step_s), "predicted for a step"),
            gap if known.has_bound else ("none", "proven as a lower bound"),
            (format_s(known.search_s), f"of search: {known.status}"),
        )
        text = "\n".join(lines).strip("\n")
        return document(title, [f"<h1>{escape(title)}</h1>", numbers, f"<pre>{escape(text)}</pre>"])

    def diff(self, other: Self) -> str:
        """Returns a line for each value that another plan has otherwise, as `busy_s[2]: 0.5 → 0.25`; empty for none."""
        if type(other) is not type(self):
            raise PlanError(f"A {type(self).__name__} can be compared with its own kind, not a {type(other).__name__}.")
        return difference_in_lines(*(plan._file.to_json(plan) for plan in (self, other)), without=self._not_compared)


def difference_in_lines(values: Any, others: Any, *, without: tuple[str, ...]) -> str:
    """Returns a line for each value of JSON values that others have otherwise; of many the first ones, of none "".

    Args:
      others: of the second plan.
      without: beginnings of the names of values that are not compared.
    """
    first, second = dict(_leaves(values)), dict(_leaves(others))
    lines = [
        f"{name}: {first.get(name, 'nothing')} → {second.get(name, 'nothing')}"
        for name in {**first, **second}
        if first.get(name) != second.get(name) and not name.startswith(without)
    ]
    if len(lines) > _MOST_DIFFERENCES:
        lines[_MOST_DIFFERENCES:] = [f"and {len(lines) - _MOST_DIFFERENCES} more values"]
    return "\n".join(lines)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of JSON values that are no lists and no mappings, with the places where they are."""
    if isinstance(value, dict):
        inner = ((f"{name}.{key}".removeprefix("."), item) for key, item in value.items())
    elif isinstance(value, list):
        inner = ((f"{name}[{index}]", item) for index, item in enumerate(value))
    else:
        yield name, value
        return
    yield from itertools.chain.from_iterable(_leaves(item, place) for place, item in inner)
