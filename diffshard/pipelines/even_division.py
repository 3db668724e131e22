"""The search for stages on equal parts of a cluster, for schedules by which a device holds several stages.

How many micro-batches a stage keeps depends on how many devices there are, not only on the stages after it. So each
number of devices is a search of its own: all of them are alike, and a dynamic program divides the layers so that the
slowest stage is the fastest. Stages are solved where they lie on the best path, as in `division_search`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cost.clusters import Cluster, Submesh
from cost.pipeline_schedules import Schedule, goes_round, graph_of, in_flight
from diffshard.pipelines.division_search import DivisionSearch
from diffshard.pipelines.stage_dynamic_program import Stage, best_division, step_objective
from diffshard.pipelines.stage_search import Entry, FoundDivision

_MOST_ROUNDS = 10
_LEAST_GAIN = 1e-3
"""Relative: cuts are moved again while the estimated step gets faster by so much."""
_MOST_FOUND = 3
"""Divisions that are solved for a number of devices, chosen by hand: the first one is nearly always kept."""


def even_submeshes(cluster: Cluster, kind: int, num_stages: int) -> tuple[Submesh, ...] | None:
    """Returns the largest submeshes of a kind that all stages can have alike; None if there are too few devices."""
    hosts, possible = cluster.kinds[kind], []
    for submesh in cluster.submeshes(kind):
        if submesh.num_devices >= hosts.devices:
            fits = hosts.count // (submesh.num_devices // hosts.devices)
        else:
            fits = hosts.count * (hosts.devices // submesh.num_devices)
        possible += [submesh] if fits >= num_stages else []
    return (max(possible, key=lambda submesh: submesh.num_devices),) * num_stages if possible else None


@dataclass(frozen=True)
class EvenDivisionSearch:
    """The search for stages on D equal submeshes of one kind, for each D.

    Args:
      divisions: what is known of stages, each with its part of a device's memory.
    """

    divisions: DivisionSearch
    schedule: Schedule
    stages_per_device: int

    def candidates(self, is_over: Callable[[], bool]) -> list[FoundDivision]:
        """Finds a division for each number of submeshes on which one fits; `bound_s` is the seconds of its step."""
        found = list[FoundDivision]()
        for num_submeshes, p in self.places():
            if found and is_over():
                break
            with self.divisions.known.of_part((self.schedule, self.stages_per_device, num_submeshes, p)):
                best = self._best_on(num_submeshes, p, is_over)
            found += [] if best is None else [best]
        return found

    def bound(self) -> float:
        """Returns a lower bound on the seconds of all candidates: all arithmetic, evenly divided; or infinity."""
        count, bounds = self.divisions.num_microbatches, []
        for num_submeshes, p in self.places():
            each_s, end_s = (float(np.sum(layers)) for layers in self.divisions.least_layer_s(p))
            bounds.append((count * each_s + end_s) / num_submeshes)
        return min(bounds, default=np.inf)

    def places(self) -> Iterator[tuple[int, int]]:
        """Yields numbers of submeshes, and which submesh all of them are."""
        divisions, each = self.divisions, self.stages_per_device
        most = min(divisions.max_stages, len(divisions.chain)) // each
        for kind in range(len(divisions.cluster.kinds)):
            for number in range(1 if each == 1 else 2, most + 1):
                submeshes = even_submeshes(divisions.cluster, kind, number)
                if submeshes is not None and goes_round(self.schedule, number, divisions.num_microbatches):
                    yield number, divisions.submeshes.index(submeshes[0])

    def _best_on(self, num_submeshes: int, p: int, is_over: Callable[[], bool]) -> FoundDivision | None:
        """Finds a division by estimates, solves its stages, and repeats while another one is estimated to be better."""
        size, count = num_submeshes * self.stages_per_device, self.divisions.num_microbatches
        kept = in_flight(graph_of(self.schedule, size, count, self.stages_per_device)).tolist()
        tried: set[tuple[Stage, ...]] = set()
        found = list[FoundDivision]()
        while len(tried) < _MOST_ROUNDS and len(found) < _MOST_FOUND and not (found and is_over()):
            stages = self._estimated(p, kept)
            if stages is None or stages in tried:
                break
            tried.add(stages)
            solved = self._solved(stages, kept)
            found += [] if solved is None else [solved]
        return min(found, key=lambda division: division.bound_s, default=None)

    def _estimated(self, p: int, kept: Sequence[int]) -> tuple[Stage, ...] | None:
        """Returns the division into stages on one kind of submesh that is estimated to be the fastest.

        The dynamic program makes the slowest stage as fast as possible. From there cuts are moved by a layer while a
        simulation gets faster: what counts is all stages of a device together, and the way through them.
        """
        divisions, size = self.divisions, len(kept)
        tables = {k: divisions.estimate(k)[..., p] for k in set(kept)}
        division = best_division(
            len(divisions.chain),
            [size],
            [Submesh(0, 1, (1, 1))],
            lambda left: tables[kept[size - left]][..., None],
            divisions.link_s[:, [p]][:, :, [p]],
            step_objective(divisions.num_microbatches * self.stages_per_device),
            max_stages=size,
        )
        if division is None:
            return None

        def step_s(stages: tuple[Stage, ...]) -> float:
            each_s = np.array([tables[k][s.start, s.end].real for s, k in zip(stages, kept, strict=True)])
            if not np.isfinite(each_s).all():
                return np.inf
            return divisions.estimated_s(self.schedule, stages, each_s, self.stages_per_device)

        best = tuple(stage._replace(submesh=p) for stage in division.stages)
        best_s, previous_s = step_s(best), np.inf
        while best_s < (1 - _LEAST_GAIN) * previous_s:
            previous_s = best_s
            for moved in _moved(best):
                if (seconds := step_s(moved)) < best_s:
                    best, best_s = moved, seconds
        return best

    def _solved(self, stages: tuple[Stage, ...], kept: Sequence[int]) -> FoundDivision | None:
        entries = tuple(Entry(*stage, k) for stage, k in zip(stages, kept, strict=True))
        layouts = self.divisions.known.layouts(entries)
        if layouts is None:
            return None
        found = FoundDivision(stages, entries, layouts, 0.0)
        found.bound_s = self.divisions.simulated_s(self.schedule, found, self.stages_per_device)
        return found


def _moved(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """Yields the divisions in which one cut is a layer earlier or later."""
    for i, (before, after) in enumerate(itertools.pairwise(stages)):
        for cut in (after.start - 1, after.start + 1):
            if before.start < cut < after.end:
                yield (*stages[:i], before._replace(end=cut), after._replace(start=cut), *stages[i + 2 :])
