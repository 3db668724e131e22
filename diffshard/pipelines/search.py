"""`search_pipeline`: a training step cut into stages on parts of a cluster, all of it chosen together."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from cost.clusters import Cluster
from cost.host_groups import Submesh
from cost.pipeline_schedules import Schedule, graph_of
from cost.pipeline_times import Simulation, StageTimes, simulate
from diffshard.base import InfeasibleError, Solver
from diffshard.pipelines.base import Pipeline, PipelinePlan, PlannedStage
from diffshard.pipelines.cutting import CutStep, UncutStep, cut_step, uncut_step
from diffshard.pipelines.division_search import DivisionSearch, Entry, FoundDivision, deadline
from diffshard.pipelines.layer_chain import layer_chain
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_plans import StageDevices, StagePlans
from diffshard.pipelines.stage_search import StageLayout, least_layer_s, search_stage
from diffshard.plans.base import Tensor
from diffshard.plans.formats import format_count
from diffshard.sharding_search.call import split
from diffshard.sharding_search.options import DEFAULT_SOLVER
from search_spaces.pipelines.forward_backward import num_bytes
from search_spaces.pipelines.stage_labels import Label
from search_spaces.pipelines.stage_programs import StagedStep, staged_step

_MOST_LAYERS = 24
_BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's seconds, before the programs are planned one by one."""
_STAGE_TIME_LIMIT_S = 15.0
"""For the solver, for one stage; its bound says what is left."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The arguments of a search for a pipeline.

    Attributes:
      fn: the training step.
      cluster: the devices.
      pipeline: what may be chosen.
      memory_limit_bytes: of each device; None takes the memory of its kind.
      donate_argnums, donate_argnames: arguments whose memory results may take.
      solver: of the sharding of a stage.
      time_limit_s: for solving and proving; None ends by its own rule.
    """

    fn: Callable[..., Any]
    cluster: Cluster
    pipeline: Pipeline
    memory_limit_bytes: float | None = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    solver: str | Solver = DEFAULT_SOLVER
    time_limit_s: float | None = None


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
        self.options, self.step, self.chain = options, step, layer_chain(step, _MOST_LAYERS)
        self.num_microbatches, self.submeshes = step.parts.num_microbatches, options.cluster.submeshes()
        self._staged: dict[tuple[int, int], tuple[StagedStep, CutStep]] = {}
        self.divisions = DivisionSearch(
            self.chain,
            self.num_microbatches,
            options.cluster,
            [memory_limit_of(options, kind) for kind in range(len(options.cluster.kinds))],
            self._solve,
            self._least_layer_s,
            options.pipeline.max_stages,
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


def find_pipeline(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FoundPipeline:
    """Finds stages, their meshes and shardings, the number of micro-batches and the schedule, for some arguments.

    Raises:
      ValueError: no number of micro-batches divides the batch, or the step cannot be cut.
      InfeasibleError: no pipeline fits the memory.
    """
    start_s, is_over = time.perf_counter(), deadline(options.time_limit_s)
    donated = donated_arrays(options, args, kwargs)
    searches = [_StepSearch(options, step, donated) for step in _steps(options, args, kwargs)]
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
    return _planned(options, best, bound_s, tuple(tried), start_s)


def donated_arrays(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bool]:
    """Tells for each flat argument whether it is donated."""
    flags: list[bool] = []
    for name, argument in (*enumerate(args), *((name, kwargs[name]) for name in sorted(kwargs))):
        is_donated = name in (options.donate_argnums if isinstance(name, int) else options.donate_argnames)
        flags += [is_donated] * len(split(argument)[0])
    return flags


def solve_stage(
    options: PipelineOptions,
    staged: StagedStep,
    stage: int,
    replaced: Sequence[int | None],
    submesh: Submesh,
    in_flight: int,
    *,
    is_donated: bool,
) -> StageLayout:
    """Finds how a stage runs on a submesh.

    Raises:
      InfeasibleError: it does not fit.
    """
    function = StageFunction(staged, stage, in_flight, replaced)
    shape = mesh_shape(submesh)
    return search_stage(
        function,
        AbstractMesh(tuple(shape.values()), tuple(shape)),
        options.cluster.hardware(submesh.kind, shape),
        memory_limit_of(options, submesh.kind),
        is_donated=is_donated,
        solver=options.solver,
        time_limit_s=_STAGE_TIME_LIMIT_S if options.time_limit_s is None else options.time_limit_s,
    )


def mesh_shape(submesh: Submesh) -> dict[str, int]:
    """Returns the mesh over a submesh: hosts and devices, or two axes within a host."""
    hosts, devices = submesh.shape if len(submesh.shape) == 2 else (1, submesh.num_devices)
    if hosts > 1:
        return {"x": hosts, "y": devices}
    return {"x": 2, "y": devices // 2} if devices >= 4 and devices % 2 == 0 else {"x": devices}


def memory_limit_of(options: PipelineOptions, kind: int) -> float:
    """Returns the bytes that a device of a kind may hold."""
    own = options.cluster.kinds[kind].device.memory_bytes
    return own if options.memory_limit_bytes is None else options.memory_limit_bytes


def _steps(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[UncutStep]:
    """Traces the step in each number of micro-batches that divides the batch.

    Raises:
      ValueError: none of them does.
    """
    pipeline, steps, errors = options.pipeline, [], []
    batch = BatchArguments.checked(pipeline.batch_argnums, pipeline.batch_argnames)
    for count in sorted(set(pipeline.microbatches)):
        try:
            steps.append(uncut_step(options.fn, count, batch, args, kwargs))
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
    options: PipelineOptions,
    best: _Candidate,
    bound_s: float,
    tried: tuple[tuple[int, Schedule, float], ...],
    start_s: float,
) -> FoundPipeline:
    """Plans the programs of the stages that were found, and simulates them."""
    stages, cluster, chain = best.found.stages, options.cluster, best.search.chain
    count, submeshes = best.search.num_microbatches, best.search.submeshes
    staged, step = best.search.staged([stage.start for stage in stages])
    layouts = [
        solve_stage(
            options,
            staged,
            i,
            step.replaced,
            submeshes[stage.submesh],
            entry.in_flight,
            is_donated=best.search.is_donated,
        )
        for i, (stage, entry) in enumerate(zip(stages, best.found.entries, strict=True))
    ]
    numbers = place_stages(cluster, [submeshes[stage.submesh] for stage in stages])
    devices = []
    for stage, layout, own in zip(stages, layouts, numbers, strict=True):
        submesh = submeshes[stage.submesh]
        shape = mesh_shape(submesh)
        devices.append(StageDevices(_mesh(cluster, own, shape), cluster.hardware(submesh.kind, shape), layout))
    copied = [(i, key) for i, layout in enumerate(layouts) for key in layout.copied(staged.inputs)]
    staged = staged_step(step.parts, step.cuts, copied)
    plans = StagePlans(staged, devices, solver=options.solver, time_limit_s=_STAGE_TIME_LIMIT_S)
    forward_s, backward_s = (
        [plans.seconds(Label(kind, i)) for i in range(len(stages))] for kind in ("forward", "backward")
    )
    sends = [
        _sends(staged, cluster, i, submeshes[a.submesh], submeshes[b.submesh])
        for i, (a, b) in enumerate(itertools.pairwise(stages))
    ]
    end_s = [
        max(layout.seconds - count * (f + b), 0.0) for layout, f, b in zip(layouts, forward_s, backward_s, strict=True)
    ]
    times = StageTimes(forward_s, backward_s, [f for f, _ in sends], [b for _, b in sends])
    simulation = simulate(times, graph_of(best.schedule, len(stages), count))
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
                arguments=_arguments(step, staged, layout, i),
            )
        )
    bound_s = min(bound_s, step_s)
    plan = PipelinePlan(
        function=getattr(options.fn, "__name__", "function"),
        cluster=", ".join(f"{format_count(h.count, 'host')} of {h.devices} x {h.name}" for h in cluster.kinds),
        num_devices=cluster.num_devices,
        num_layers=len(chain),
        num_microbatches=count,
        schedule=best.schedule,
        stages=tuple(planned),
        step_s=step_s,
        bubble=simulation.bubble,
        lower_bound_s=bound_s,
        gap=(step_s - bound_s) / step_s if step_s else 0.0,
        search_s=time.perf_counter() - start_s,
        tried=tried,
    )
    return FoundPipeline(plan, step, staged, plans, simulation)


def place_stages(cluster: Cluster, submeshes: Sequence[Submesh]) -> list[list[int]]:
    """Returns the numbers of the devices of each stage, kind by kind and host by host; the largest are placed first.

    Raises:
      InfeasibleError: the parts of hosts that the stages need do not fit the hosts.
    """
    free: list[list[list[int]]] = []  # by kind and host
    number = 0
    for hosts in cluster.kinds:
        of_kind = []
        for _ in range(hosts.count):
            of_kind.append(list(range(number, number + hosts.devices)))
            number += hosts.devices
        free.append(of_kind)
    numbers: list[list[int]] = [[] for _ in submeshes]
    for i in sorted(range(len(submeshes)), key=lambda i: -submeshes[i].num_devices):
        kind, count = submeshes[i].kind, submeshes[i].num_devices
        in_host = min(count, cluster.kinds[kind].devices)
        hosts = [host for host in free[kind] if len(host) >= in_host][: count // in_host]
        if len(hosts) * in_host < count:
            raise InfeasibleError(
                f"The stages need {[s.num_devices for s in submeshes if s.kind == kind]} devices of hosts of "
                f"{cluster.kinds[kind].devices} x {cluster.kinds[kind].name}, of which there are {len(free[kind])}. "
                "Describe hosts with a power of two of devices, or give another `Pipeline.max_stages`."
            )
        for host in hosts:
            numbers[i] += host[:in_host]
            del host[:in_host]
    return numbers


def _mesh(cluster: Cluster, numbers: Sequence[int], shape: Mapping[str, int]) -> Mesh | AbstractMesh:
    if not cluster.devices:
        return AbstractMesh(tuple(shape.values()), tuple(shape))
    flat = [device for kind in cluster.devices for host in kind for device in host]
    return Mesh(np.array([flat[n] for n in numbers]).reshape(tuple(shape.values())), tuple(shape))


def _sends(staged: StagedStep, cluster: Cluster, i: int, one: Submesh, other: Submesh) -> tuple[float, float]:
    """Returns the seconds of what a micro-batch sends from stage i to the next and back."""
    forward = backward = 0.0
    for key, label in staged.makers.items():
        for target in staged.readers.get(key, frozenset()) - {label.stage}:
            if label.kind == "forward" and label.stage <= i < target:
                forward += num_bytes(staged.avals[key])
            if label.kind == "backward" and target <= i < label.stage and not isinstance(key, tuple):
                backward += num_bytes(staged.avals[key])
    return cluster.link_s(forward, one, other), cluster.link_s(backward, other, one)


def _arguments(step: CutStep, staged: StagedStep, layout: StageLayout, stage: int) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(path, tuple(array.shape), str(array.dtype), layout.specs.get(key, ((),) * len(array.shape)))
        for path, array, key, home in zip(
            step.traced.paths, step.traced.arrays, staged.inputs, staged.homes, strict=True
        )
        if home == stage
    )
