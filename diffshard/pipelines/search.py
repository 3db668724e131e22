"""`search_pipeline`: a training step cut into stages on parts of a cluster, all of it chosen together."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from cost.pipeline_schedules import Schedule, graph_of
from cost.pipeline_times import Simulation, StageTimes, simulate
from diffshard.base import InfeasibleError
from diffshard.pipelines.base import PipelinePlan, PlannedStage
from diffshard.pipelines.cutting import CutStep, UncutStep, cut_step, uncut_step
from diffshard.pipelines.division_search import DivisionSearch, Entry, FoundDivision, deadline
from diffshard.pipelines.layer_chain import LayerChain, layer_chain
from diffshard.pipelines.options import (
    STAGE_TIME_LIMIT_S,
    PipelineOptions,
    donated_arrays,
    memory_limit_of,
    mesh_shape,
    solve_stage,
)
from diffshard.pipelines.shared_choices import ChosenPipeline, shared_layouts, trace_facts
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_placement import arguments_of, mesh_of, place_stages, sends_s
from diffshard.pipelines.stage_plans import StageDevices, StagePlans
from diffshard.pipelines.stage_search import StageLayout, least_layer_s
from diffshard.plans.formats import format_count
from diffshard.processes import Processes
from search_spaces.pipelines.stage_labels import Label
from search_spaces.pipelines.stage_programs import StagedStep, staged_step

_MOST_LAYERS = 24
_BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's seconds, before the programs are planned one by one."""


class FoundPipeline(NamedTuple):
    """A pipeline that was found.

    Attributes:
      plan: what users see.
      step: the step that is cut.
      staged: its programs.
      plans: their plans.
      simulation: of the schedule.
    """

    plan: PipelinePlan
    step: CutStep
    staged: StagedStep
    plans: StagePlans
    simulation: Simulation


class _Candidate(NamedTuple):
    seconds: float
    schedule: Schedule
    search: "_StepSearch"
    found: FoundDivision


class _StepSearch:
    """The search for the stages of a step in some number of micro-batches."""

    def __init__(self, options: PipelineOptions, step: UncutStep, donated: Sequence[bool]):
        self.is_donated = all(donated[i] for i in step.call.feedback if i is not None)
        self.options, self.step = options, step
        self.num_microbatches, self.submeshes = step.parts.num_microbatches, options.cluster.submeshes()
        self._staged: dict[tuple[int, int], tuple[StagedStep, CutStep]] = {}

    @cached_property
    def chain(self) -> LayerChain:
        """The layers of the step."""
        return layer_chain(self.step, _MOST_LAYERS)

    @cached_property
    def divisions(self) -> DivisionSearch:
        """The search for stages; only the process that searches has one."""
        return DivisionSearch(
            self.chain,
            self.num_microbatches,
            self.options.cluster,
            [memory_limit_of(self.options, kind) for kind in range(len(self.options.cluster.kinds))],
            self._solve,
            self._least_layer_s,
            self.options.pipeline.max_stages,
        )

    def _solve(self, entry: Entry) -> StageLayout:
        interval = entry.start, entry.end
        if interval not in self._staged:
            self._staged[interval] = self.staged(interval)
        staged, cut = self._staged[interval]
        return solve_stage(
            self.options,
            staged,
            int(entry.start > 0),
            cut.replaced,
            self.submeshes[entry.submesh],
            entry.in_flight,
            is_donated=self.is_donated,
        )

    def _least_layer_s(self, submesh: int) -> tuple[np.ndarray, np.ndarray]:
        chain, shape = self.chain, mesh_shape(self.submeshes[submesh])
        whole = staged_step(chain.step.parts, [], layers=chain.labelled)
        return least_layer_s(
            StageFunction(whole, 0, 1, chain.step.replaced),
            AbstractMesh(tuple(shape.values()), tuple(shape)),
            self.options.cluster.hardware(self.submeshes[submesh].kind, shape),
            len(chain),
        )

    def staged(self, starts: Sequence[int]) -> tuple[StagedStep, CutStep]:
        """Cuts the step before some layers."""
        cut = cut_step(self.step, self.chain.cuts_before(starts))
        return staged_step(cut.parts, cut.cuts), cut


def find_pipeline(
    options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any], processes: Processes
) -> FoundPipeline:
    """Finds stages, their meshes and shardings, the number of micro-batches and the schedule, for some arguments.

    Args:
      options: what is asked for.
      args: of the step; arrays or their shapes.
      kwargs: of the step.
      processes: those that own devices of the cluster. All of them trace the step; the first one searches.

    Raises:
      ValueError: no number of micro-batches divides the batch, or the step cannot be cut.
      InfeasibleError: no pipeline fits the memory.
      ProcessesError: the processes have traced different steps.
    """
    start_s, is_over = time.perf_counter(), deadline(options.time_limit_s)
    donated, what = donated_arrays(options, args, kwargs), "search a pipeline"
    steps = processes.alike(what, lambda: _steps(options, args, kwargs), trace_facts)
    searches = [_StepSearch(options, step, donated) for step in steps]
    chosen = processes.shared(what, lambda: _chosen(options, searches, is_over))
    search = next(search for search in searches if search.num_microbatches == chosen.num_microbatches)
    found = _planned(options, search, chosen, processes, start_s)
    return found._replace(plan=processes.shared(what, lambda: found.plan))


def _chosen(options: PipelineOptions, searches: Sequence[_StepSearch], is_over: Callable[[], bool]) -> ChosenPipeline:
    """Searches in each number of micro-batches and with each schedule, and bounds them all.

    Raises:
      InfeasibleError: no pipeline fits the memory.
    """
    candidates, tried = [], []
    for search in searches:
        for schedule in options.pipeline.schedules:
            found = search.divisions.best(schedule, is_over)
            seconds = np.inf if found is None else _simulated_s(search, schedule, found)
            tried.append((search.num_microbatches, schedule, float(seconds)))
            if found is not None:
                candidates.append(_Candidate(seconds, schedule, search, found))
    if not candidates:
        raise InfeasibleError(_infeasible(options, searches))
    best = min(candidates, key=lambda candidate: candidate.seconds)
    bound_s = min(
        search.divisions.bound(schedule, best.seconds, is_over)
        for search in searches
        for schedule in options.pipeline.schedules
    )
    in_flight = tuple(entry.in_flight for entry in best.found.entries)
    return ChosenPipeline(
        best.search.num_microbatches, best.schedule, best.found.stages, in_flight, bound_s, tuple(tried)
    )


def _steps(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[UncutStep]:
    """Traces the step in each number of micro-batches that divides the batch.

    Raises:
      ValueError: none of them does.
    """
    pipeline, steps, errors = options.pipeline, [], []
    for count in pipeline.microbatch_counts:
        try:
            steps.append(uncut_step(options.fn, count, pipeline.batch, args, kwargs))
        except ValueError as error:
            errors.append(error)
    if not steps:
        raise errors[0]
    return steps


def _simulated_s(search: _StepSearch, schedule: Schedule, found: FoundDivision) -> float:
    count = search.num_microbatches
    seconds = np.array([layout.seconds / count for layout in found.layouts])
    sends = [
        search.divisions.link_s[after.start, before.submesh, after.submesh] / 2
        for before, after in zip(found.stages, found.stages[1:], strict=False)
    ]
    times = StageTimes(seconds * (1 - _BACKWARD_SHARE), seconds * _BACKWARD_SHARE, sends, sends)
    return simulate(times, graph_of(schedule, len(seconds), count)).step_s


def _infeasible(options: PipelineOptions, searches: Sequence[_StepSearch]) -> str:
    kinds = ", ".join(
        f"{hosts.num_devices} x {hosts.name} with {memory_limit_of(options, kind):,.0f} bytes"
        for kind, hosts in enumerate(options.cluster.kinds)
    )
    chain = searches[0].chain
    return (
        f"No pipeline of {getattr(options.fn, '__name__', 'the function')} with at most {options.pipeline.max_stages} "
        f"stages fits {kinds}: its state alone has {chain.state_bytes.sum():,.0f} bytes. Give more memory, devices, "
        "stages or micro-batches, or rematerialise (`jax.checkpoint`)."
    )


def _planned(
    options: PipelineOptions, search: _StepSearch, chosen: ChosenPipeline, processes: Processes, start_s: float
) -> FoundPipeline:
    """Plans the programs of the stages that were chosen, and simulates them; the first process plans for all."""
    stages, cluster, chain = chosen.stages, options.cluster, search.chain
    count, submeshes = search.num_microbatches, search.submeshes
    staged, step = search.staged([stage.start for stage in stages])

    def solve() -> list[StageLayout]:
        return [
            solve_stage(
                options,
                staged,
                i,
                step.replaced,
                submeshes[stage.submesh],
                in_flight,
                is_donated=search.is_donated,
            )
            for i, (stage, in_flight) in enumerate(zip(stages, chosen.in_flight, strict=True))
        ]

    layouts = shared_layouts(processes, staged, solve)
    numbers = place_stages(cluster, [submeshes[stage.submesh] for stage in stages])
    devices = []
    for stage, layout, own in zip(stages, layouts, numbers, strict=True):
        submesh = submeshes[stage.submesh]
        shape = mesh_shape(submesh)
        devices.append(StageDevices(mesh_of(cluster, own, shape), cluster.hardware(submesh.kind, shape), layout))
    copied = [(i, key) for i, layout in enumerate(layouts) for key in layout.copied(staged.inputs)]
    staged = staged_step(step.parts, step.cuts, copied)
    plans = StagePlans(staged, devices, processes, solver=options.solver, time_limit_s=STAGE_TIME_LIMIT_S)
    forward_s, backward_s = (
        [plans.seconds(Label(kind, i)) for i in range(len(stages))] for kind in ("forward", "backward")
    )
    sends = [
        sends_s(staged, cluster, i, submeshes[a.submesh], submeshes[b.submesh])
        for i, (a, b) in enumerate(itertools.pairwise(stages))
    ]
    end_s = [
        max(layout.seconds - count * (f + b), 0.0) for layout, f, b in zip(layouts, forward_s, backward_s, strict=True)
    ]
    times = StageTimes(forward_s, backward_s, [f for f, _ in sends], [b for _, b in sends])
    simulation = simulate(times, graph_of(chosen.schedule, len(stages), count))
    step_s = simulation.step_s + max(end_s)
    planned = []
    for i, (stage, layout) in enumerate(zip(stages, layouts, strict=True)):
        submesh = submeshes[stage.submesh]
        send_forward_s, send_backward_s = sends[i] if i < len(sends) else (0.0, 0.0)
        planned.append(
            PlannedStage(
                first_layer=stage.start,
                last_layer=stage.end - 1,
                source=chain.sources[stage.start],
                hardware=cluster.kinds[submesh.kind].name,
                mesh_axes=mesh_shape(submesh),
                devices=tuple(numbers[i]),
                forward_s=forward_s[i],
                backward_s=backward_s[i],
                end_s=end_s[i],
                send_forward_s=send_forward_s,
                send_backward_s=send_backward_s,
                in_flight=int(simulation.in_flight[i]),
                peak_bytes=layout.peak_bytes,
                memory_limit_bytes=memory_limit_of(options, submesh.kind),
                residual_bytes=layout.residual_bytes,
                arguments=arguments_of(step, staged, layout, i),
            )
        )
    bound_s = min(chosen.bound_s, step_s)
    plan = PipelinePlan(
        function=getattr(options.fn, "__name__", "function"),
        cluster=", ".join(f"{format_count(h.count, 'host')} of {h.devices} x {h.name}" for h in cluster.kinds),
        num_devices=cluster.num_devices,
        num_layers=len(chain),
        num_microbatches=count,
        schedule=chosen.schedule,
        stages=tuple(planned),
        step_s=step_s,
        bubble=simulation.bubble,
        lower_bound_s=bound_s,
        gap=(step_s - bound_s) / step_s if step_s else 0.0,
        search_s=time.perf_counter() - start_s,
        tried=chosen.tried,
    )
    return FoundPipeline(plan, step, staged, plans, simulation)
