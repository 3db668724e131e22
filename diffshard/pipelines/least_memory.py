"""The least memory that a pipeline needs, to say where nothing fits how far that is from fitting.

A division of the layers needs as much as its stage that needs most. So the dynamic program that divides layers finds
the one that needs least, over what each stage needs at least. That is known of the stages whose problem was built;
others need no less than their state, split over all their devices, or than fewer of their layers. Problems on the best
path are built until it has no others.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cost.memory import least_memory
from cost.pipeline_schedules import BY_STAGES_LEFT, Schedule, kept_microbatches
from diffshard.base import InfeasibleError
from diffshard.pipelines.options import PipelineOptions, memory_limit_of
from diffshard.pipelines.plans.text import short_source
from diffshard.pipelines.stage_dynamic_program import best_division, bottleneck_objective
from diffshard.pipelines.stage_search import Entry
from diffshard.pipelines.step_search import StepSearch
from diffshard.sharding_search.planning import lightest_choice

_MOST_STAGES = 12
"""Stages whose problems are built for one number of micro-batches: each takes about a second for a large model."""


class StageNeed(NamedTuple):
    """The memory that a stage needs of each of its devices.

    Attributes:
      least_bytes: no sharding that keeps all residuals needs less.
    """

    least_bytes: float
    enough_bytes: float


class PipelineNeed(NamedTuple):
    """The memory of the division that needs least.

    Attributes:
      need: of that stage; None where only `share` is known of it.
      share: of the memory limit of the stage's devices; no division that keeps all residuals needs less.
    """

    search: StepSearch
    entry: Entry
    need: StageNeed | None
    share: float


def least_need(searches: Sequence[StepSearch], is_over: Callable[[], bool]) -> PipelineNeed | None:
    """Returns the least that a pipeline needs, in any of some numbers of micro-batches.

    Returns:
      None where no division can be placed on the devices at all.
    """
    needs = []
    for search in sorted(searches, key=lambda search: -search.num_microbatches):  # usually more need less
        below = min((need.share for need in needs), default=np.inf)
        need = _NeedSearch(search).least(below, is_over)
        needs += [] if need is None else [need]
    return min(needs, key=lambda need: need.share, default=None)


class _NeedSearch:
    """The dynamic program over what stages need, of a step in some number of micro-batches."""

    def __init__(self, search: StepSearch):
        self.search, self.divisions, size = search, search.divisions, len(search.chain)
        names: list[Schedule] = [
            name if name in BY_STAGES_LEFT else "1f1b" for name in search.options.pipeline.schedules
        ]
        self.schedule: Schedule = min(  # the one that keeps the fewest micro-batches; none keeps fewer than 1F1B
            names, key=lambda name: kept_microbatches(name, 2, search.num_microbatches)
        )
        limits = np.array([self.divisions.memory_limit_bytes[s.kind] for s in search.submeshes])
        state = np.concatenate([[0.0], np.cumsum(search.chain.state_bytes)])
        of_stage = state[None, :] - state[:size, None]
        self.limits = limits
        self.shares = of_stage[:, :, None] / (np.array([s.num_devices for s in search.submeshes]) * limits)
        self.known: dict[Entry, StageNeed] = {}

    def least(self, below: float, is_over: Callable[[], bool]) -> PipelineNeed | None:
        """Returns the need of the division that needs least; None where it is no less than a share."""
        while True:
            found = self._largest()
            if found is None or found[1] >= below:
                return None
            entry, share = found
            if entry in self.known or len(self.known) >= _MOST_STAGES or is_over():
                return PipelineNeed(self.search, entry, self.known.get(entry), share)
            self.known[entry] = stage_need(self.search, entry)

    def _largest(self) -> tuple[Entry, float] | None:
        """Returns the stage that needs most in the best division, and its share."""
        search, count = self.search, self.search.num_microbatches
        division = best_division(
            len(search.chain),
            self.divisions.devices,
            search.submeshes,
            lambda left: self._table(kept_microbatches(self.schedule, left, count)),
            np.zeros_like(self.divisions.link_s),
            bottleneck_objective(),
            max_stages=search.options.pipeline.max_stages,
            use_all_devices=False,
        )
        if division is None:
            return None
        num_stages = len(division.stages)
        entries = [
            Entry(*stage, kept_microbatches(self.schedule, num_stages - i, count))
            for i, stage in enumerate(division.stages)
        ]
        shares = [self._table(e.in_flight)[e.start, e.end, e.submesh] for e in entries]
        largest = int(np.argmax(shares))
        return entries[largest], float(shares[largest])

    def _table(self, in_flight: int) -> np.ndarray:
        """Returns `[L, L + 1, P]`, the share that each stage needs at least.

        A stage with more layers, or that keeps more micro-batches, needs no less.
        """
        table = self.shares.copy()
        for entry, need in self.known.items():
            if entry.in_flight <= in_flight:
                of_more = table[: entry.start + 1, entry.end :, entry.submesh]
                np.maximum(of_more, need.least_bytes / self.limits[entry.submesh], out=of_more)
        return table


def stage_need(search: StepSearch, entry: Entry) -> StageNeed:
    """Returns the memory that a stage needs on each of its devices."""
    space = search.request(entry).space
    least_bytes = float(np.max(least_memory(space.problem)[1]))
    return StageNeed(least_bytes, max(space.summarize(lightest_choice(space.problem).tolist()).peak_bytes, least_bytes))


def nothing_found(searches: Sequence[StepSearch]) -> InfeasibleError | TimeoutError:
    """Returns the error of a search that found nothing: what does not fit, or that it had too little time.

    What does not fit is the stage that needs most in the division that needs least.
    """
    options, is_over = searches[0].options, searches[0].progress.is_search_over
    need = least_need(searches, is_over)
    name = getattr(options.fn, "__name__", "the function")
    if is_over() and need is not None and need.share <= 1:
        return TimeoutError(
            f"`time_limit_s` {options.time_limit_s} ended the search for a pipeline of {name} before a first one was "
            "found, and nothing says that none fits. Give more time, fewer numbers of `Pipeline.microbatches` and "
            "`schedules`, or the solver 'greedy'."
        )
    kinds = ", ".join(
        f"{hosts.num_devices} x {hosts.name} with {memory_limit_of(options, kind):,.0f} bytes"
        for kind, hosts in enumerate(options.cluster.kinds)
    )
    state_bytes = searches[0].chain.state_bytes.sum()
    donate = "" if searches[0].is_donated else " donate the state (`donate_argnums`),"
    reasons = "".join(f" {reason}" for reason in searches[0].step.scans_in_one)
    return InfeasibleError(
        f"No pipeline of {name} with at most {options.pipeline.max_stages} stages was found that fits {kinds}. "
        f"{_need_text(options, need)} Its state alone has {state_bytes:,.0f} bytes. Give more memory, devices, stages "
        f"or micro-batches,{donate} or rematerialise (`jax.checkpoint`).{reasons}"
    )


def _need_text(options: PipelineOptions, need: PipelineNeed | None) -> str:
    if need is None:
        return "The stages that could be cut are no division of the devices."
    search, entry = need.search, need.entry
    submesh = search.submeshes[entry.submesh]
    limit, source = memory_limit_of(options, submesh.kind), short_source(search.chain.sources[entry.start])
    layers = f"layers {entry.start}-{entry.end - 1} of {len(search.chain)}" + (f" (from {source})" if source else "")
    keeping = "Least" if set(options.pipeline.residuals) == {"keep"} else "If all residuals are kept, least"
    text = (
        f"{keeping} is needed with {search.num_microbatches} micro-batches: its largest stage, {layers} on "
        f"{submesh.num_devices} x {options.cluster.kinds[submesh.kind].name} with {entry.in_flight} in flight, needs "
        f"at least {need.share * limit:,.0f} bytes on each device"
    )
    if need.need is not None:
        text += f", and {need.need.enough_bytes:,.0f} are enough for it"
    if need.share <= 1:
        text += "; no stage was proven not to fit, so that a longer `time_limit_s` or another `solver` may find one"
    return text + "."
