"""The protocol of plans that are one record: text, page, file, difference, certificate.

A class has the fields, says by `__str__` what `print` shows, and names the kind of its files. The rest follows.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from diffshard.base import PlanError
from diffshard.plans.certificate import Certified
from diffshard.plans.documents import RecordFile
from diffshard.plans.formats import format_percent, format_s
from diffshard.plans.page_elements import cards, document, escape, framed

_MOST_DIFFERENCES = 40
"""Lines of a difference: more than a screen would not be read. Chosen by hand."""
_NOT_COMPARED = ("search_s", "history")  # how a plan was found


class PlanRecord(Certified):
    """A plan that is shown, saved, loaded and compared by its fields."""

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

    def _repr_html_(self) -> str:
        return framed(self.html())

    def diff(self, other: Self) -> str:
        """Returns a line for each value that another plan has otherwise, as `busy_s[2]: 0.5 → 0.25`; empty for none."""
        if type(other) is not type(self):
            raise PlanError(f"A {type(self).__name__} can be compared with its own kind, not a {type(other).__name__}.")
        return difference_in_lines(*(plan._file.to_json(plan) for plan in (self, other)), without=_NOT_COMPARED)


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
