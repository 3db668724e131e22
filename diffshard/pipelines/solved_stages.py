"""What is known of the stages of a step: the layouts of those that were solved, and so of others with equal layers.

A search on a part of the devices knows only what was solved for that part. So it finds the same however many other
devices there are. No stage is solved twice.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from diffshard.pipelines.stage_programme import Stage
from diffshard.pipelines.stage_search import StageLayout, StageMemoryError


class Entry(NamedTuple):
    """A stage that may be solved."""

    start: int
    end: int
    submesh: int
    in_flight: int


@dataclass
class FoundDivision:
    """A division of the layers into stages, with the shardings found for each.

    Attributes:
      bound_s: the schedule's lower bound for the stages' seconds.
    """

    stages: tuple[Stage, ...]
    entries: tuple[Entry, ...]
    layouts: tuple[StageLayout, ...]
    bound_s: float


UNKNOWN: Any = object()
_FREE_SHARE = 0.95
"""A plan that needs less of the memory is taken to be the best one without a limit."""
SolveEntry = Callable[[Entry], StageLayout]
Kind = tuple[tuple[Hashable, ...], int]
"""Of a stage: its layers, equal for equal ones, and its submesh."""


@dataclass
class _Known:
    by_kind: dict[Kind, dict[int, StageLayout | None]] = field(default_factory=dict)  # and micro-batches kept
    solved: list[tuple[Entry, StageLayout]] = field(default_factory=list)


class SolvedStages:
    """The stages that a search has solved.

    Args:
      signatures: `[L]`, equal for equal layers.
      solve: solves an entry; raises `StageMemoryError` where it does not fit.
    """

    def __init__(self, signatures: Sequence[Hashable], memory_limits_bytes: Sequence[float], solve: SolveEntry):
        self._signatures, self._limits, self._solve = tuple(signatures), memory_limits_bytes, solve
        self._layouts: dict[tuple[Kind, int], StageLayout | None] = {}
        self._all = self._known = _Known()
        self._of_parts: dict[Hashable, _Known] = {}
        self.proven_not_to_fit: set[tuple[Kind, int]] = set()

    @contextmanager
    def of_part(self, part: Hashable) -> Iterator[None]:
        """Knows only what was solved for a part of the devices, until the context ends."""
        self._known = self._of_parts.setdefault(part, _Known())
        try:
            yield
        finally:
            for kind, layouts in self._known.by_kind.items():
                self._all.by_kind.setdefault(kind, {}).update(layouts)
            self._known = self._all

    @property
    def by_kind(self) -> dict[Kind, dict[int, StageLayout | None]]:
        """The layouts by kind and micro-batches kept; None where nothing fits."""
        return self._known.by_kind

    @property
    def solved(self) -> list[tuple[Entry, StageLayout]]:
        """The entries that were solved and fit, with their layouts."""
        return self._known.solved

    def kind(self, entry: Entry) -> Kind:
        """Returns what an entry has in common with those that have its layout."""
        return self._signatures[entry.start : entry.end], entry.submesh

    def layout(self, entry: Entry) -> StageLayout | None:
        """Returns the layout of a stage, solved or known from one with equal layers; None where it does not fit."""
        known = self.known(entry)
        if known is not UNKNOWN:
            return known
        key = self.kind(entry), entry.in_flight
        if key not in self._layouts:
            try:
                self._layouts[key] = self._solve(entry)
            except StageMemoryError as error:
                self._layouts[key] = None
                if error.is_proven:
                    self.proven_not_to_fit.add(key)
        layout = self._layouts[key]
        self.by_kind.setdefault(key[0], {})[entry.in_flight] = layout
        if layout is not None:
            self.solved.append((entry, layout))
        return layout

    def known(self, entry: Entry) -> Any:
        """Returns what is known of a stage: its layout, None if it does not fit, or `UNKNOWN`.

        A layout that leaves memory free is the best one for as many micro-batches as fit; one that the memory
        may have limited is taken for more of them too, but not for fewer.
        """
        by_in_flight = self.by_kind.get(self.kind(entry), {})
        if entry.in_flight in by_in_flight:
            return by_in_flight[entry.in_flight]
        for in_flight, layout in by_in_flight.items():
            if layout is None and in_flight <= entry.in_flight:
                return None
            is_best = layout is not None and (not layout.is_limited or in_flight <= entry.in_flight)
            room = _FREE_SHARE * self._limits[entry.submesh]
            if layout is not None and is_best and layout.peak_bytes < room:
                peak_bytes = layout.peak_bytes + (entry.in_flight - in_flight) * layout.residual_bytes
                if peak_bytes < room:
                    return replace(layout, peak_bytes=peak_bytes)
        return UNKNOWN

    def is_proven_not_to_fit(self, entry: Entry) -> bool:
        """Tells whether no sharding of a stage fits, also because it does not with fewer micro-batches."""
        return any((self.kind(entry), kept) in self.proven_not_to_fit for kept in range(1, entry.in_flight + 1))

    def alike(self) -> Iterator[tuple[int, int, int]]:
        """Yields the first layer, the number of layers and the submesh of what is solved, also for equal layers."""
        for length, p in {(len(signatures), p) for signatures, p in self.by_kind}:
            for start in range(len(self._signatures) - length + 1):
                if self.kind(Entry(start, start + length, p, 1)) in self.by_kind:
                    yield start, length, p
