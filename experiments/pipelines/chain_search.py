"""Searches divisions of a chain into stages over meshes, numbers of micro-batches and schedules, and simulates them.

For each number of micro-batches the stage dynamic program minimises the bound on schedules, once with the work of a
step spread over its micro-batches and once without, and the sum of the stages under limits near the slowest one. These
divisions and all equal ones are then simulated, with each schedule whose memory they have, and cuts of the fastest are
moved. The least bound over all numbers of micro-batches is
one of the whole search space: no division, mesh, number or synchronous schedule that keeps as many micro-batches in
flight as 1F1B is predicted to be faster.

Letters for sizes: S stages, M micro-batches.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cost.pipeline_schedules import BACKWARD, Schedule, graph_of
from cost.pipeline_times import Simulation, StageTimes, simulate
from cost.presets import device_and_network
from diffshard.pipelines.stage_dynamic_program import (
    Division,
    Objective,
    Stage,
    Submesh,
    best_division,
    limited_sum_objective,
    lower_bound_objective,
    slowest_stage_objective,
)
from experiments.pipelines.gpt_costs import StageTables

DEVICES_IN_HOST = 8
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "eager")
LIMITS = (1.0, 1.05)
"""Limits of a stage, relative to the slowest stage of the division with the least bound."""

NEAR = 0.05
"""How much slower than the best a division may be to have its cuts moved; moves gained less than this."""
ROUNDING = 1e-12
"""By what part the bound is lowered, for the rounding of its sums in another order than the simulation's."""

TablesOf = Callable[[int], StageTables]
"""What all stages take, by the samples of a micro-batch."""


class PipelinePlan(NamedTuple):
    """A division with what decides its step time.

    Attributes:
      stages: from the first to the last.
      num_microbatches: M.
      schedule: when they run.
      step_s: simulated; infinite where it does not fit the memory.
    """

    stages: tuple[Stage, ...]
    num_microbatches: int
    schedule: Schedule
    step_s: float


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
      plan: the fastest; None where none fits.
      bound_s: no plan of the search space is faster.
      search_s: processor seconds of the search.
    """

    plan: PipelinePlan | None
    bound_s: float
    search_s: float


def search(
    num_layers: int,
    num_devices: int,
    submeshes: Sequence[Submesh],
    tables_of: TablesOf,
    batch: int,
    num_microbatches: Sequence[int],
    *,
    max_stages: int,
) -> SearchResult:
    """Searches the fastest plan for a batch."""
    start = time.process_time()
    chains = [
        _Chain(num_layers, num_devices, submeshes, tables_of(batch // count), count, max_stages)
        for count in num_microbatches
    ]
    bounded = sorted(((chain.bound(), i) for i, chain in enumerate(chains)), key=lambda pair: (pair[0].value, pair[1]))
    best = PipelinePlan((), 0, "1f1b", math.inf)
    for bound, i in bounded:
        if bound.value >= best.step_s:
            break  # no plan with these micro-batches is faster, nor with those after them
        chain = chains[i]
        divisions = chain.divisions(bound).union(chain.equal_divisions())
        plans = (chain.simulated(stages, schedule) for stages in divisions for schedule in SCHEDULES)
        fastest = min(plans, key=lambda plan: (plan.step_s, plan.stages))
        if fastest.step_s < best.step_s * (1 + NEAR):
            best = min(best, chain.improved(fastest), key=lambda plan: plan.step_s)
    found = best if math.isfinite(best.step_s) else None
    return SearchResult(found, bounded[0][0].value * (1 - ROUNDING), time.process_time() - start)


class _Chain(NamedTuple):
    """A chain with the prices of one number of micro-batches."""

    num_layers: int
    num_devices: int
    submeshes: Sequence[Submesh]
    tables: StageTables
    num_microbatches: int
    max_stages: int

    @property
    def microbatch_s(self) -> np.ndarray:
        """The seconds of stages for a micro-batch."""
        return self.tables.forward_s + self.tables.backward_s

    @property
    def spread_s(self) -> np.ndarray:
        """The same with a part of the work of a step."""
        return self.microbatch_s + self.tables.step_s / self.num_microbatches

    def divide(self, seconds: np.ndarray, objective: Objective, schedule: Schedule = "1f1b") -> Division | None:
        """Returns the best division of stages that take some seconds and have the memory of a schedule.

        Links depend on the number of devices alone. So of all meshes of as many devices each stage takes the fastest
        that fits, before the dynamic program runs.
        """
        sizes = sorted({submesh.num_devices for submesh in self.submeshes})
        of_size = [[p for p, mesh in enumerate(self.submeshes) if mesh.num_devices == size] for size in sizes]
        by_size = [Submesh(0, size) for size in sizes]

        def fitting_s(number: int) -> np.ndarray:
            num_kept = kept(schedule, number, self.num_microbatches)
            return np.where(fits(self.tables, num_kept), seconds, np.inf)

        division = best_division(
            self.num_layers,
            [self.num_devices],
            by_size,
            lambda number: np.stack([fitting_s(number)[..., group].min(axis=-1) for group in of_size], axis=-1),
            _least_link_s(self.tables, by_size, self.num_devices),
            objective,
            max_stages=self.max_stages,
        )
        if division is None:
            return None
        stages = []
        for i, (start, end, size) in enumerate(division.stages):
            group = of_size[size]
            fastest = int(fitting_s(len(division.stages) - i)[start, end, group].argmin())
            stages.append(Stage(start, end, group[fastest]))
        return Division(tuple(stages), division.value)

    def simulated(self, stages: tuple[Stage, ...], schedule: Schedule) -> PipelinePlan:
        """Returns the plan of a division with a schedule."""
        return simulated(stages, self.submeshes, self.tables, self.num_microbatches, schedule)

    def bound(self) -> Division:
        """Returns the division with the least bound, and the larger of two bounds; infinite where nothing fits.

        One has the ways of the first and the last micro-batch through all stages, the other the work of a step.
        """
        bound = self.divide(self.microbatch_s, lower_bound_objective(self.num_microbatches))
        slowest = self.divide(self.spread_s, slowest_stage_objective())
        if bound is None or slowest is None:
            return Division((), math.inf)
        return Division(bound.stages, max(bound.value, self.num_microbatches * slowest.value))

    def divisions(self, bound: Division) -> set[tuple[Stage, ...]]:
        """Returns divisions that may be fast, with the one of the bound."""
        found = {bound.stages}
        for schedule in SCHEDULES:
            spread = self.divide(self.spread_s, lower_bound_objective(self.num_microbatches), schedule)
            if spread is None or spread.stages in found:
                continue
            found.add(spread.stages)
            limit_s = max(float(self.spread_s[stage]) for stage in spread.stages)
            limited = (self.divide(self.spread_s, limited_sum_objective(limit_s * x), schedule) for x in LIMITS)
            found.update(division.stages for division in limited if division is not None)
        return found

    def equal_divisions(self) -> set[tuple[Stage, ...]]:
        """Returns the divisions into equal stages on equal meshes."""
        found = set()
        for p, submesh in enumerate(self.submeshes):
            num_stages = self.num_devices // submesh.num_devices
            if num_stages <= min(self.max_stages, self.num_layers - 2):
                ends = pairwise(equal_cuts(self.num_layers, num_stages))
                found.add(tuple(Stage(start, end, p) for start, end in ends))
        return found

    def improved(self, plan: PipelinePlan) -> PipelinePlan:
        """Moves one cut of a plan by one layer for as long as that is simulated to be faster."""
        while math.isfinite(plan.step_s):
            moved = []
            for i, (before, after) in enumerate(pairwise(plan.stages)):
                for cut in (after.start - 1, after.start + 1):
                    if before.start < cut < after.end:
                        pair = (before._replace(end=cut), after._replace(start=cut))
                        moved.append(self.simulated((*plan.stages[:i], *pair, *plan.stages[i + 2 :]), plan.schedule))
            fastest = min(moved, default=plan, key=lambda other: other.step_s)
            if fastest.step_s >= plan.step_s:
                break
            plan = fastest
        return plan


def equal_cuts(num_layers: int, num_stages: int) -> list[int]:
    """Returns where stages begin and the end, with as many blocks in each; the outermost layers are no blocks."""
    inner = [1 + (num_layers - 2) * i // num_stages for i in range(1, num_stages)]
    return [0, *inner, num_layers]


def simulated(
    stages: Sequence[Stage], submeshes: Sequence[Submesh], tables: StageTables, count: int, schedule: Schedule
) -> PipelinePlan:
    """Returns a plan with its simulated step time: stages sum gradients and update after their last backward."""
    size = len(stages)
    for i, stage in enumerate(stages):
        if not fits(tables, kept(schedule, size - i, count))[stage]:
            return PipelinePlan(tuple(stages), count, schedule, math.inf)
    sends_s = transfers_s(stages, submeshes, tables)
    forward = [tables.forward_s[stage] for stage in stages]
    backward = [tables.backward_s[stage] for stage in stages]
    simulation = simulate(StageTimes(forward, backward, sends_s, sends_s), graph_of(schedule, size, count))
    ends_s = [_last_backward_s(simulation, i) + tables.step_s[stage] for i, stage in enumerate(stages)]
    return PipelinePlan(tuple(stages), count, schedule, float(max(ends_s)))


def _last_backward_s(simulation: Simulation, stage: int) -> float:
    is_backward = (simulation.graph.stage == stage) & (simulation.graph.kind == BACKWARD)
    return float(simulation.end_s[is_backward].max())


def kept(schedule: Schedule, number: int, count: int) -> int:
    """Returns how many micro-batches a stage keeps, where `number` stages follow it, itself included."""
    return min(count, 2 * number - 1 if schedule == "eager" else number)


def fits(tables: StageTables, num_kept: int) -> np.ndarray:
    """Returns `[L, L + 1, P]`: whether a stage fits the memory of its devices with so many micro-batches in flight."""
    with np.errstate(invalid="ignore"):
        needed = tables.state_bytes + num_kept * tables.residual_bytes + tables.transient_bytes
    return needed <= tables.memory_bytes


def transfers_s(stages: Sequence[Stage], submeshes: Sequence[Submesh], tables: StageTables) -> list[float]:
    """Returns the seconds of each link for a micro-batch one way, from where the stages lie in the hosts.

    Larger stages are placed first, so that a stage of a power of two devices never lies across two hosts in vain.
    """
    sizes = [submeshes[stage.submesh].num_devices for stage in stages]
    places = [0] * len(sizes)
    used = 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[i], used = used, used + sizes[i]
    hosts = [
        (place // DEVICES_IN_HOST, (place + n - 1) // DEVICES_IN_HOST) for place, n in zip(places, sizes, strict=True)
    ]
    return [
        _send_s(tables.sent_bytes[stages[j].start], sizes[i], sizes[j], hosts[i] == hosts[j])
        for i, j in pairwise(range(len(stages)))
    ]


def _send_s(num_bytes: float, sender: int, receiver: int, in_one_host: bool) -> float:
    """Returns the seconds of a transfer that all devices of both stages share in, or all their hosts."""
    inside, between = device_and_network("v100")[1].transfers()
    link, parts = (inside, min(sender, receiver)) if in_one_host else (between, max(1, min(sender, receiver) // 8))
    return link.latency_s + link.s_per_byte * num_bytes / parts


def _least_link_s(tables: StageTables, submeshes: Sequence[Submesh], num_devices: int) -> np.ndarray:
    """Returns `[L, P, P]`, what both transfers of a link take at least: in one host wherever two stages fit in one."""
    sizes = [submesh.num_devices for submesh in submeshes]
    pairs = np.array(
        [
            [[_send_s(num_bytes, a, b, in_one_host) for in_one_host in (False, True)] for a in sizes for b in sizes]
            for num_bytes in tables.sent_bytes
        ]
    ).reshape(len(tables.sent_bytes), len(sizes), len(sizes), 2)
    can_share = np.add.outer(sizes, sizes) <= min(DEVICES_IN_HOST, num_devices)
    return 2 * np.where(can_share, pairs.min(axis=-1), pairs[..., 0])
