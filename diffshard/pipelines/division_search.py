"""The search for stages: a dynamic programme whose entries the sharding search solves where they matter.

An entry is a stage of some layers on some submesh that keeps some micro-batches. It is solved only when it lies on the
best path; before, it is estimated as the sum of what its layers take at least times what solved entries on such
submeshes take longer. The programme over lower bounds (the solver's where an entry is solved, that sum elsewhere)
bounds every division, mesh and sharding together.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cost.clusters import Cluster
from cost.pipeline_schedules import Schedule, kept_microbatches
from diffshard.pipelines.found_divisions import Entry, FoundDivision
from diffshard.pipelines.layer_chain import LayerChain
from diffshard.pipelines.stage_programme import (
    Division,
    Objective,
    Stage,
    best_division,
    overlapped_objective,
    step_objective,
)
from diffshard.pipelines.stage_search import StageLayout, StageMemoryError

_UNKNOWN: Any = object()
_INFINITE = complex(np.inf, np.inf)
_MOST_ROUNDS = 10
_LEAST_GAIN = 0.01
_FREE_SHARE = 0.95
"""A plan that needs less of the memory is taken to be the best one without a limit."""
SolveEntry = Callable[[Entry], StageLayout]


@dataclass
class DivisionSearch:
    """The search for the stages of a step in M micro-batches.

    Args:
      chain: its layers.
      num_microbatches: M.
      cluster: the devices.
      memory_limit_bytes: of a device of each kind.
      solve: solves an entry; raises `StageMemoryError` where it does not fit.
      least_layer_s: `least_layer_s(submesh)`: what a micro-batch and the step's end take at least in each layer on a
        submesh, `[L]` both.
      max_stages: the largest number of stages.
    """

    chain: LayerChain
    num_microbatches: int
    cluster: Cluster
    memory_limit_bytes: Sequence[float]
    solve: SolveEntry
    least_layer_s: Callable[[int], tuple[np.ndarray, np.ndarray]]
    max_stages: int
    proven_not_to_fit: set[Any] = field(default_factory=set)  # by kind and micro-batches kept
    solved: dict[Any, dict[int, StageLayout | None]] = field(default_factory=dict)  # by kind and micro-batches kept
    slowdowns: dict[int, list[float]] = field(default_factory=dict)  # by submesh, of solved entries over full speed

    def __post_init__(self):
        self.submeshes = self.cluster.submeshes()
        self.devices = [hosts.num_devices for hosts in self.cluster.kinds]
        size = len(self.chain)
        pairs = [[self._link_s(i, j) for j in range(len(self.submeshes))] for i in range(len(self.submeshes))]
        sent = zip(self.chain.sent_bytes, self.chain.returned_bytes, strict=True)
        self.link_s = np.array([[[s(n) + s(back) for s in row] for row in pairs] for n, back in sent])
        state = np.concatenate([[0.0], np.cumsum(self.chain.state_bytes)])
        # Complex: with a share of the step's end, and without as the imaginary part; see `step_objective`.
        self.least_s = np.full((size, size + 1, len(self.submeshes)), np.inf, complex)
        for p, submesh in enumerate(self.submeshes):
            each_s, end_s = (np.concatenate([[0.0], np.cumsum(layers)]) for layers in self.least_layer_s(p))
            of_each, of_end = each_s[None, :] - each_s[:size, None], end_s[None, :] - end_s[:size, None]
            seconds = of_each + of_end / self.num_microbatches + 1j * of_each
            fits = (state[None, :] - state[:size, None]) / submesh.num_devices <= self.memory_limit_bytes[submesh.kind]
            self.least_s[:, :, p] = np.where(fits, seconds, _INFINITE)

    def best(self, schedule: Schedule, is_over: Callable[[], bool]) -> FoundDivision | None:
        """Returns the best of `candidates`; None where nothing fits."""
        return min(self.candidates(schedule, is_over), key=lambda found: found.bound_s, default=None)

    def candidates(self, schedule: Schedule, is_over: Callable[[], bool]) -> list[FoundDivision]:
        """Finds a division on each kind of device alone, unless it is proven slower than another, and one on all kinds.

        A kind alone comes first and is estimated by its own stages, so that other kinds do not change what is found.
        """
        kinds, found, best = range(len(self.devices)), list[FoundDivision](), None
        bounds = {kind: self.bound(schedule, np.inf, lambda: True, kind) for kind in kinds} if len(kinds) > 1 else {}
        for kind in (*sorted(bounds, key=lambda kind: bounds[kind]), None):
            if kind is not None and bounds[kind] >= (np.inf if best is None else best.bound_s):
                continue
            division = self._best_on(kind, schedule, is_over, best if kind is None else None)
            if division is not None and division is not best:
                found.append(division)
                best = min(found, key=lambda division: division.bound_s)
        return found

    def _best_on(
        self, kind: int | None, schedule: Schedule, is_over: Callable[[], bool], best: FoundDivision | None
    ) -> FoundDivision | None:
        """Finds a division by estimates, solves its stages, and repeats while a better one is expected.

        Returns:
          The best division whose stages were all solved, or the given one if it is better; None where nothing fits.
        """
        rounds = 0  # since a first division was found; before, only what does not fit ends the search
        while rounds < _MOST_ROUNDS and not (best is None and is_over()):
            division = self._best_division(schedule, self._estimate, kind)
            if division is None or (best is not None and division.value >= (1 - _LEAST_GAIN) * best.bound_s):
                break
            rounds += best is not None
            found = self.solved_division(division.stages, schedule)
            if found is not None and (best is None or found.bound_s < best.bound_s):
                best = found
            if best is not None and is_over():
                break
        return best

    def solved_division(self, stages: tuple[Stage, ...], schedule: Schedule) -> FoundDivision | None:
        """Solves the stages of a division that is given; returns None if one of them does not fit."""
        entries, layouts = self._entries(stages, schedule), []
        for entry in entries:
            layout = self._solved(entry)
            if layout is None:
                return None
            layouts.append(layout)
        objective, value, later_s = self._objective(schedule), 0.0, 0.0
        assert objective.wait is not None
        for i in reversed(range(len(stages))):
            seconds = self._seconds(layouts[i])
            value = max(float(objective.fold(seconds, value)), float(objective.wait(len(stages) - i, seconds, later_s)))
            later_s += seconds.imag
            if i:
                link_s = self.link_s[stages[i].start, stages[i - 1].submesh, stages[i].submesh]
                value, later_s = float(objective.join(link_s, value)), later_s + link_s
        return FoundDivision(stages, entries, tuple(layouts), value)

    def bound(self, schedule: Schedule, target_s: float, is_over: Callable[[], bool], kind: int | None = None) -> float:
        """Returns what every division takes at least, with any sharding of its stages; infinite where none fits.

        Entries on the best path of lower bounds are solved until it reaches a number, or for some rounds.

        Args:
          schedule: it limits how many micro-batches a stage keeps.
          target_s: a higher bound is of no use.
          is_over: tells whether there is no time left.
          kind: the only one whose devices are used; None uses all.
        """
        for _ in range(_MOST_ROUNDS):
            division = self._best_division(schedule, self._bound, kind)
            if division is None:
                return np.inf
            unsolved = [entry for entry in self._entries(division.stages, schedule) if not self._is_solved(entry)]
            if not unsolved or division.value >= target_s or is_over():
                return division.value
            self._solved(
                max(unsolved, key=lambda entry: float(np.real(self.least_s[entry.start, entry.end, entry.submesh])))
            )
        division = self._best_division(schedule, self._bound, kind)
        return np.inf if division is None else division.value

    def _objective(self, schedule: Schedule) -> Objective:
        count = self.num_microbatches
        objective = overlapped_objective if schedule == "2bw" else step_objective
        return objective(count, lambda left: kept_microbatches(schedule, left, count))

    def _link_s(self, i: int, j: int) -> Callable[[float], float]:
        return lambda num_bytes: self.cluster.link_s(num_bytes, self.submeshes[i], self.submeshes[j])

    def _entries(self, stages: tuple[Stage, ...], schedule: Schedule) -> tuple[Entry, ...]:
        count = len(stages)
        return tuple(
            Entry(*stage, kept_microbatches(schedule, count - i, self.num_microbatches))
            for i, stage in enumerate(stages)
        )

    def _solved(self, entry: Entry) -> StageLayout | None:
        """Returns the layout of a stage, solved or known from one with equal layers; None where it does not fit."""
        known = self._known(entry)
        if known is not _UNKNOWN:
            return known
        try:
            layout = self.solve(entry)
        except StageMemoryError as error:
            layout = None
            if error.is_proven:
                self.proven_not_to_fit.add((*self._kind(entry), entry.in_flight))
        self.solved.setdefault(self._kind(entry), {})[entry.in_flight] = layout
        least_s = float(np.real(self.least_s[entry.start, entry.end, entry.submesh]))
        if layout is not None and least_s > 0:
            self.slowdowns.setdefault(entry.submesh, []).append(self._seconds(layout).real / least_s)
        return layout

    def known_layout(self, entry: Entry) -> StageLayout | None:
        """Returns the layout of a stage that is solved, or of one with equal layers; None if there is none."""
        known = self._known(entry)
        return None if known is _UNKNOWN else known

    def _seconds(self, layout: StageLayout) -> complex:
        """Returns the seconds of a micro-batch, with its share of the step's end, and without."""
        count = self.num_microbatches
        return complex(layout.seconds / count, (layout.seconds - layout.end_s) / count)

    def _is_solved(self, entry: Entry) -> bool:
        return self._known(entry) is not _UNKNOWN

    def _known(self, entry: Entry) -> Any:
        """Returns what is known of a stage: its layout, None if it does not fit, or `_UNKNOWN`.

        A layout that leaves memory free is the best one for as many micro-batches as fit; one that makes residuals
        again is taken for more of them too, but not for fewer.
        """
        by_in_flight = self.solved.get(self._kind(entry), {})
        if entry.in_flight in by_in_flight:
            return by_in_flight[entry.in_flight]
        limit = self.memory_limit_bytes[self.submeshes[entry.submesh].kind]
        for in_flight, layout in by_in_flight.items():
            if layout is None and in_flight <= entry.in_flight:
                return None
            is_best = layout is not None and (
                not (layout.recomputed or layout.offloaded) or in_flight <= entry.in_flight
            )
            if layout is not None and is_best and layout.peak_bytes < _FREE_SHARE * limit:
                peak_bytes = layout.peak_bytes + (entry.in_flight - in_flight) * layout.residual_bytes
                if peak_bytes < _FREE_SHARE * limit:
                    return replace(layout, peak_bytes=peak_bytes)
        return _UNKNOWN

    def _kind(self, entry: Entry) -> tuple[tuple[Hashable, ...], int]:
        return self.chain.signatures[entry.start : entry.end], entry.submesh

    def _best_division(
        self, schedule: Schedule, table: Callable[[int], np.ndarray], kind: int | None
    ) -> Division | None:
        is_used = np.array([kind in (None, submesh.kind) for submesh in self.submeshes])
        return best_division(
            len(self.chain),
            self.devices,
            self.submeshes,
            lambda left: np.where(is_used, table(kept_microbatches(schedule, left, self.num_microbatches)), _INFINITE),
            self.link_s,
            self._objective(schedule),
            max_stages=self.max_stages,
            use_all_devices=False,
        )

    def _estimate(self, in_flight: int) -> np.ndarray:
        """Returns `[L, L + 1, P]`: seconds of a micro-batch, of unsolved entries by those that are solved."""
        means = {submesh: float(np.mean(ratios)) for submesh, ratios in self.slowdowns.items()}
        usual = [1.0 for _ in self.devices]  # of each kind
        for p, mean in means.items():
            usual[self.submeshes[p].kind] = max(usual[self.submeshes[p].kind], mean)
        factors = np.array([means.get(p, usual[submesh.kind]) for p, submesh in enumerate(self.submeshes)])
        fits = np.isfinite(self.least_s)
        table = np.where(fits, np.where(fits, self.least_s, 0) * factors, _INFINITE)
        for start, length, p in self._alike():
            layout = self._known(Entry(start, start + length, p, in_flight))
            if layout is None:
                table[start, start + length, p] = _INFINITE
                if self._is_proven_not_to_fit(Entry(start, start + length, p, in_flight)):
                    table[: start + 1, start + length :, p] = _INFINITE  # more layers need more memory
            elif layout is not _UNKNOWN and np.isfinite(table[start, start + length, p]):
                table[start, start + length, p] = self._seconds(layout)
        return table

    def _bound(self, in_flight: int) -> np.ndarray:
        """Returns `[L, L + 1, P]`: what a micro-batch takes at least.

        What was proven of a stage that keeps fewer micro-batches holds for one that keeps more, which has less memory.
        """
        table = self.least_s.copy()
        for start, length, p in self._alike():
            at = start, start + length, p
            kind = self._kind(Entry(*at, in_flight))
            for kept, layout in self.solved[kind].items():
                if layout is not None and kept <= in_flight:
                    known = complex(table[at])
                    bound_s = max(known.real, layout.lower_bound_s / self.num_microbatches)
                    table[at] = complex(bound_s, known.imag)
            if self._is_proven_not_to_fit(Entry(*at, in_flight)):
                table[at] = _INFINITE
        return table

    def _is_proven_not_to_fit(self, entry: Entry) -> bool:
        return any((*self._kind(entry), kept) in self.proven_not_to_fit for kept in range(1, entry.in_flight + 1))

    def _alike(self) -> Iterator[tuple[int, int, int]]:
        """Yields the first layer, the number of layers and the submesh of what is solved, also for equal layers."""
        for length, p in {(len(signatures), p) for signatures, p in self.solved}:
            for start in range(len(self.chain) - length + 1):
                if self._kind(Entry(start, start + length, p, 1)) in self.solved:
                    yield start, length, p
