"""The search for stages: a dynamic program whose entries the sharding search solves where they matter.

An entry is a stage of some layers on some submesh that keeps some micro-batches. It is solved only when it lies on the
best path; before, it is estimated as the sum of what its layers take at least times what solved entries on such
submeshes take longer. The dynamic program over lower bounds (the solver's where an entry is solved, that sum elsewhere)
bounds every division, mesh and sharding together. Parts of a cluster are searched alone as well, so that more devices
do not lead to a slower pipeline.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cost.clusters import Cluster
from cost.pipeline_schedules import Schedule, graph_of, kept_microbatches, splits_backward
from cost.pipeline_steps import pipeline_step
from cost.pipeline_times import StageTimes
from diffshard.pipelines.layer_chain import LayerChain
from diffshard.pipelines.stage_dynamic_program import (
    Division,
    Objective,
    Stage,
    best_division,
    overlapped_objective,
    step_objective,
)
from diffshard.pipelines.stage_search import (
    BACKWARD_SHARE,
    UNKNOWN,
    Entry,
    FoundDivision,
    SolvedStages,
    SolveEntry,
    StageLayout,
)

_MOST_HOSTS = 4
"""Up to this many hosts of a kind, each number of them is tried as a part; of more hosts only powers of two are."""


def kinds_alone(cluster: Cluster) -> list[tuple[int, ...]]:
    """Returns all devices of each kind; nothing where there is one kind only."""
    kinds = cluster.kinds if len(cluster.kinds) > 1 else ()
    return [_only(cluster, kind, hosts.num_devices) for kind, hosts in enumerate(kinds)]


def fewer_hosts(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yields the devices of fewer hosts of each kind than there are, from more to fewer."""
    for kind, hosts in enumerate(cluster.kinds):
        for count in range(hosts.count - 1, 0, -1):
            if hosts.count <= _MOST_HOSTS or count & (count - 1) == 0:
                yield _only(cluster, kind, count * hosts.devices)


def _only(cluster: Cluster, kind: int, count: int) -> tuple[int, ...]:
    return tuple(count if k == kind else 0 for k in range(len(cluster.kinds)))


_INFINITE = complex(np.inf, np.inf)
_MOST_ROUNDS = 10
_LEAST_GAIN = 0.01
_PLANNED_SHARE = 1.2
"""How much slower programs that were planned one by one have been than their stages as a whole, at most and about."""


@dataclass
class DivisionSearch:
    """The search for the stages of a step in M micro-batches.

    Args:
      num_microbatches: M.
      solve: solves an entry; raises `StageMemoryError` where it does not fit.
      least_layer_s: `least_layer_s(submesh)`: what a micro-batch and the step's end take at least in each layer on a
        submesh, `[L]` both.
    """

    chain: LayerChain
    num_microbatches: int
    cluster: Cluster
    memory_limit_bytes: Sequence[float]
    solve: SolveEntry
    least_layer_s: Callable[[int], tuple[np.ndarray, np.ndarray]]
    max_stages: int

    def __post_init__(self):
        self.submeshes = self.cluster.submeshes()
        limits = [self.memory_limit_bytes[submesh.kind] for submesh in self.submeshes]
        self.known = SolvedStages(self.chain.signatures, limits, self.solve)
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
        """Finds divisions on each kind of device alone, on all devices, and on fewer hosts of a kind.

        Those are left out that are proven slower than another. Fewer hosts matter where the network is slow, because
        the programs of a division may take longer than its stages as a whole.
        """
        found, whole = list[FoundDivision](), tuple(self.devices)

        def value(share: float = 1.0) -> float:
            return min((share * division.bound_s for division in found), default=np.inf)

        bounds = {part: self.bound(schedule, np.inf, lambda: True, part) for part in kinds_alone(self.cluster)}
        for part in (*sorted(bounds, key=lambda part: bounds[part]), whole):
            if part == whole or bounds[part] < value():
                best = min(found, key=lambda division: division.bound_s, default=None)
                division = self._best_on(part, schedule, is_over, best if part == whole else None)
                found += [division] if division is not None and division is not best else []
        for part in fewer_hosts(self.cluster):
            if not is_over() and self.bound(schedule, np.inf, lambda: True, part) < value(_PLANNED_SHARE):
                division = self._best_on(part, schedule, is_over, None)
                is_new = division is not None and all(division.stages != other.stages for other in found)
                found += [division] if division is not None and is_new else []
        return found

    def _best_on(
        self, devices: Sequence[int], schedule: Schedule, is_over: Callable[[], bool], best: FoundDivision | None
    ) -> FoundDivision | None:
        """Finds a division by estimates, solves its stages, and repeats while a better one is expected.

        It is estimated by what was solved for the same devices alone, so that others do not change what is found.

        Returns:
          The best division whose stages were all solved, or the given one if it is better; None where nothing fits.
        """
        rounds = 0  # since a first division was found; before, only what does not fit ends the search
        with self.known.of_part(tuple(devices)):
            while rounds < _MOST_ROUNDS and not (best is None and is_over()):
                division = self._best_division(schedule, self.estimate, devices)
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
        entries = self._entries(stages, schedule)
        layouts = self.known.layouts(entries)
        if layouts is None:
            return None
        objective, value, later_s = self._objective(schedule), 0.0, 0.0
        assert objective.wait is not None
        for i in reversed(range(len(stages))):
            seconds = self._seconds(layouts[i])
            value = max(float(objective.fold(seconds, value)), float(objective.wait(len(stages) - i, seconds, later_s)))
            later_s += seconds.imag
            if i:
                link_s = self.link_s[stages[i].start, stages[i - 1].submesh, stages[i].submesh]
                value, later_s = float(objective.join(link_s, value)), later_s + link_s
        return FoundDivision(stages, entries, layouts, value)

    def simulated_s(self, schedule: Schedule, found: FoundDivision, stages_per_device: int = 1) -> float:
        """Returns the seconds of a step whose stages are solved, before their programs are planned one by one."""
        each_s = np.array([layout.seconds for layout in found.layouts]) / self.num_microbatches
        return self.estimated_s(schedule, found.stages, each_s, stages_per_device)

    def estimated_s(
        self, schedule: Schedule, stages: Sequence[Stage], each_s: np.ndarray, stages_per_device: int = 1
    ) -> float:
        """Returns the seconds of a step by those of a micro-batch in each stage, with its share of the step's end."""
        count, size = self.num_microbatches, len(stages)
        device = graph_of(schedule, size, count, stages_per_device).device
        sends = [
            self.link_s[after.start, before.submesh, after.submesh] / 2 * (device[i] != device[i + 1])
            for i, (before, after) in enumerate(itertools.pairwise(stages))
        ]
        forward_s = each_s * (1 - BACKWARD_SHARE)
        weights_s = forward_s if splits_backward(schedule) else None  # a product of a layer's weights in each
        backward_s = each_s - forward_s if weights_s is None else each_s - forward_s - weights_s
        times = StageTimes(forward_s, backward_s, sends, sends, weights_s)
        ends = [0.0] * size  # they are in `each_s`
        return float(pipeline_step(times, schedule, count, ends, stages_per_device=stages_per_device).step_s)

    def bound(
        self,
        schedule: Schedule,
        target_s: float,
        is_over: Callable[[], bool],
        devices: Sequence[int] | None = None,
    ) -> float:
        """Returns a lower bound on the seconds of every division, with any shardings; infinite where none fits.

        Entries on the best path of lower bounds are solved until it reaches a number, or for some rounds.

        Args:
          schedule: it limits how many micro-batches a stage keeps.
          target_s: a higher bound is of no use.
          is_over: tells whether there is no time left.
          devices: `[kinds]`, how many of each kind may be used; None uses all.
        """
        devices = self.devices if devices is None else devices
        for _ in range(_MOST_ROUNDS):
            division = self._best_division(schedule, self._bound, devices)
            if division is None:
                return np.inf
            unsolved = [
                entry for entry in self._entries(division.stages, schedule) if self.known.known(entry) is UNKNOWN
            ]
            if not unsolved or division.value >= target_s or is_over():
                return division.value
            self.known.layout(
                max(unsolved, key=lambda entry: float(np.real(self.least_s[entry.start, entry.end, entry.submesh])))
            )
        division = self._best_division(schedule, self._bound, devices)
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

    def known_layout(self, entry: Entry) -> StageLayout | None:
        """Returns the layout of a stage that is solved, or of one with equal layers; None if there is none."""
        known = self.known.known(entry)
        return None if known is UNKNOWN else known

    def _seconds(self, layout: StageLayout) -> complex:
        """Returns the seconds of a micro-batch, with its share of the step's end, and without."""
        count = self.num_microbatches
        return complex(layout.seconds / count, (layout.seconds - layout.end_s) / count)

    def _best_division(
        self, schedule: Schedule, table: Callable[[int], np.ndarray], devices: Sequence[int]
    ) -> Division | None:
        used = [p for p, submesh in enumerate(self.submeshes) if submesh.num_devices <= devices[submesh.kind]]
        division = best_division(
            len(self.chain),
            devices,
            [self.submeshes[p] for p in used],
            lambda left: table(kept_microbatches(schedule, left, self.num_microbatches))[..., used],
            self.link_s[:, used][:, :, used],
            self._objective(schedule),
            max_stages=self.max_stages,
            use_all_devices=False,
        )
        if division is None:
            return None
        return division._replace(stages=tuple(s._replace(submesh=used[s.submesh]) for s in division.stages))

    def estimate(self, in_flight: int) -> np.ndarray:
        """Returns `[L, L + 1, P]`: seconds of a micro-batch, of unsolved entries by those that are solved."""
        slowdowns: dict[int, list[float]] = {}  # by submesh, of solved entries over full speed
        for entry, layout in self.known.solved:
            least_s = float(np.real(self.least_s[entry.start, entry.end, entry.submesh]))
            if least_s > 0:
                slowdowns.setdefault(entry.submesh, []).append(self._seconds(layout).real / least_s)
        means = {submesh: float(np.mean(ratios)) for submesh, ratios in slowdowns.items()}
        usual = [1.0 for _ in self.devices]  # of each kind
        for p, mean in means.items():
            usual[self.submeshes[p].kind] = max(usual[self.submeshes[p].kind], mean)
        factors = np.array([means.get(p, usual[submesh.kind]) for p, submesh in enumerate(self.submeshes)])
        fits = np.isfinite(self.least_s)
        table = np.where(fits, np.where(fits, self.least_s, 0) * factors, _INFINITE)
        for start, length, p in self.known.solved_stages():
            layout = self.known.known(Entry(start, start + length, p, in_flight))
            if layout is None:
                table[start, start + length, p] = _INFINITE
                if self.known.is_proven_not_to_fit(Entry(start, start + length, p, in_flight)):
                    table[: start + 1, start + length :, p] = _INFINITE  # more layers need more memory
            elif layout is not UNKNOWN and np.isfinite(table[start, start + length, p]):
                table[start, start + length, p] = self._seconds(layout)
        return table

    def _bound(self, in_flight: int) -> np.ndarray:
        """Returns `[L, L + 1, P]`: what a micro-batch takes at least.

        What was proven of a stage that keeps fewer micro-batches holds for one that keeps more, which has less memory.
        """
        table = self.least_s.copy()
        for start, length, p in self.known.solved_stages():
            at = start, start + length, p
            kind = self.known.kind(Entry(*at, in_flight))
            for kept, layout in self.known.by_kind[kind].items():
                if layout is not None and kept <= in_flight:
                    known = complex(table[at])
                    bound_s = max(known.real, layout.lower_bound_s / self.num_microbatches)
                    table[at] = complex(bound_s, known.imag)
            if self.known.is_proven_not_to_fit(Entry(*at, in_flight)):
                table[at] = _INFINITE
        return table
