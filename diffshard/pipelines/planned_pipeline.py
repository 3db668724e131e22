"""From the stages that a search chose to a plan: the shardings and programs of each stage, and where it is."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from cost.clusters import Cluster, Submesh
from cost.pipeline_schedules import Schedule, graph_of, splits_backward
from cost.pipeline_steps import Overlap, pipeline_step
from cost.pipeline_times import Simulation, StageTimes
from diffshard.base import InfeasibleError
from diffshard.pipelines.cutting import CutStep
from diffshard.pipelines.decisions import ChosenPipeline, layouts_of, shared_layouts
from diffshard.pipelines.delayed_gradients import DelayedStep
from diffshard.pipelines.options import memory_limit_of, mesh_shape
from diffshard.pipelines.plans.base import PipelinePlanData, PlannedReplica, PlannedStage
from diffshard.pipelines.plans.consistency import simulated
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.stage_plans import (
    StagePlans,
    arguments_of,
    place_stages,
    sends_s,
    split_bytes,
    stage_devices,
)
from diffshard.pipelines.stage_run import chosen_overlap, overlap_bytes
from diffshard.pipelines.stage_search import Entry, StageLayout
from diffshard.pipelines.stage_variants import StageVariants, with_choices
from diffshard.pipelines.step_search import StepSearch
from diffshard.plans.base import Tensor
from diffshard.plans.printing import format_count
from diffshard.processes import Processes
from search_spaces.pipelines.divided_program import with_split_backward
from search_spaces.pipelines.stage_programs import StagedStep

_KEPT_BOUND = "The bound is for pipelines that keep all residuals. Some are made again here, and may be faster than it."


class FoundPipeline(NamedTuple):
    """A pipeline that was found.

    Attributes:
      plan: what users see.
      step: the step that is cut.
      staged: its programs.
      plans: their plans.
      simulation: of the schedule.
    """

    plan: PipelinePlanData
    step: CutStep
    staged: StagedStep
    plans: StagePlans
    simulation: Simulation


class StagePlace(NamedTuple):
    """A stage, and what it runs on.

    Attributes:
      stage: its layers.
      submesh: of the cluster.
      numbers: of its devices.
      layout: its shardings.
    """

    stage: Stage
    submesh: Submesh
    numbers: Sequence[int]
    layout: StageLayout


def planned_pipeline(
    search: StepSearch, chosen: ChosenPipeline, processes: Processes, start: PipelinePlanData | None = None
) -> FoundPipeline:
    """Plans the programs of the stages that were chosen, and simulates them; the first process plans for all.

    Args:
      search: of the step in the chosen number of micro-batches.
      start: an earlier plan of these stages, whose shardings are taken where they fit.
    """
    options, stages, progress = search.options, chosen.stages, search.progress
    cluster = options.cluster
    count, submeshes, each = search.num_microbatches, search.submeshes, chosen.stages_per_device
    device = graph_of(chosen.schedule, len(stages), count, each).device.tolist()
    staged, step = search.staged([stage.start for stage in stages])
    earlier = [] if start is None else layouts_of(start, staged)

    def solve_one(i: int) -> StageLayout:
        progress.step(f"sharding stage {i + 1} of {len(stages)}")
        variants = StageVariants(
            options,
            staged,
            i,
            submeshes[stages[i].submesh],
            chosen.in_flight[i],
            is_donated=search.is_donated,
            time_limit_s=progress.stage_limit_s(3 * len(stages) - i),  # each has two programs as well
            stages_per_device=each,
        )
        known = search.divisions_of(each).known_layout(Entry(*stages[i], chosen.in_flight[i]))
        known = earlier[i] if i < len(earlier) else known
        layout = (
            variants.chosen(chosen.recomputed[i], chosen.offloaded[i], known)
            if chosen.recomputed
            else variants.fastest()
        )
        progress.is_interrupted |= layout.is_interrupted
        return layout

    layouts = shared_layouts(processes, staged, lambda: [solve_one(i) for i in range(len(stages))])
    on = [submeshes[stage.submesh] for stage in stages]
    of_device = place_stages(cluster, [on[device.index(d)] for d in sorted(set(device))])
    numbers = [of_device[d] for d in device]
    devices = [stage_devices(cluster, *one) for one in zip(on, numbers, layouts, strict=True)]
    copied = [(i, key) for i, layout in enumerate(layouts) for key in layout.copied(staged.inputs)]
    staged = with_choices(search.programs(step, copied), layouts)
    is_split = splits_backward(chosen.schedule)
    staged = with_split_backward(staged) if is_split else staged
    progress.step("planning the programs of the stages")
    limit_s = progress.stage_limit_s(2 * len(stages))
    plans = StagePlans(staged, devices, processes, options, limit_s)
    progress.is_interrupted |= any(plan.status == "interrupted" for plan in plans.plans.values())
    forward_s, backward_s = (
        [s + layout.offload_s for s, layout in zip(plans.pass_seconds(kind), layouts, strict=True)]
        for kind in ("forward", "backward")
    )
    weights_s = plans.pass_seconds("weights") if is_split else None
    times = StageTimes(forward_s, backward_s, *sends_s(staged, cluster, on, device), weights_s)
    end_s = [layout.end_s for layout in layouts]
    price = partial(pipeline_step, times, chosen.schedule, count, end_s, stages_per_device=each)
    overlap: Overlap = "none"
    if chosen.schedule == "2bw":
        limits = (memory_limit_of(options, submesh.kind) for submesh in on)
        free = [limit - layout.peak_bytes for limit, layout in zip(limits, layouts, strict=True)]
        overlap = chosen_overlap(staged, plans.sharding, free, price)
    simulation = price(overlap).simulation
    planned = []
    for i, layout in enumerate(layouts):
        more = overlap_bytes(staged, i, overlap, plans.sharding)
        more += split_bytes(staged, i, simulation.graph, plans.sharding) if is_split else 0
        layout = replace(layout, peak_bytes=layout.peak_bytes + more)
        place = StagePlace(stages[i], on[i], numbers[i], layout)
        in_flight, arguments = int(simulation.in_flight[i]), arguments_of(step, staged, layout, i)
        planned.append(planned_stage(search, place, times, i, end_s[i], in_flight, arguments, each))
    _check_memory(planned)
    notes = (*chosen.notes, _KEPT_BOUND) if any(layout.recomputed for layout in layouts) else chosen.notes
    notes = (*notes, *_judged(plans)) if options.judge is not None else notes
    plan = predicted_plan(
        search,
        chosen.schedule,
        planned,
        tried=chosen.tried,
        notes=notes,
        overlap=overlap,
        stages_per_device=each,
    )
    return FoundPipeline(with_bound(plan, chosen.bound_s), step, staged, plans, simulation)


def _check_memory(stages: Sequence[PlannedStage]) -> None:
    for i, stage in enumerate(stages):
        if stage.peak_bytes > stage.memory_limit_bytes:
            raise InfeasibleError(
                f"Stage {i} needs {stage.peak_bytes:,.0f} bytes with what waits for the gradients of its weights, more "
                f"than {stage.memory_limit_bytes:,.0f}."
            )


def _judged(plans: StagePlans) -> list[str]:
    """Returns the compiler's reports on the programs of the stages."""
    notes = []
    for plan in plans.plans.values():
        notes.append(f"{plan.function} runs by `executor` {plan.executor!r}, as a compiler judged it alone.")
        without_place = (note.partition(f"({plan.function}): ")[2] or note for note in plan.notes)
        notes += [f"{plan.function}: {note}" for note in without_place]
    return notes


def predicted_plan(
    search: StepSearch,
    schedule: Schedule,
    stages: Sequence[PlannedStage],
    replicas: Sequence[PlannedReplica] = (),
    *,
    tried: Sequence[tuple[int, Schedule, float]],
    notes: Sequence[str],
    overlap: Overlap = "none",
    stages_per_device: int = 1,
) -> PipelinePlanData:
    """Returns a plan with what its step takes by simulation, and without a bound.

    Args:
      search: of the step in the plan's number of micro-batches.
      stages: of the main replica; `replicas` are the others.
    """
    options = search.options
    plan = PipelinePlanData(
        function=getattr(options.fn, "__name__", "function"),
        cluster=cluster_words(options.cluster),
        num_devices=options.cluster.num_devices,
        num_layers=len(search.chain),
        num_microbatches=search.num_microbatches,
        schedule=schedule,
        stages=tuple(stages),
        step_s=0.0,
        bubble=0.0,
        lower_bound_s=0.0,
        search_s=search.progress.seconds,
        tried=tuple(tried),
        notes=tuple(notes),
        num_groups=search.num_groups,
        replicas=tuple(replicas),
        overlap=overlap,
        predicted_steps=options.fn.predicted_steps if isinstance(options.fn, DelayedStep) else 0.0,
        stages_per_device=stages_per_device,
    )
    found = simulated(plan)
    return replace(plan, step_s=found.step_s, bubble=found.bubble)


def with_bound(plan: PipelinePlanData, bound_s: float) -> PipelinePlanData:
    """Returns a plan with a bound of its step, which is no more than the step itself."""
    bound_s = min(bound_s, plan.step_s)
    return replace(plan, lower_bound_s=bound_s)


def planned_stage(
    search: StepSearch,
    place: StagePlace,
    times: StageTimes,
    number: int,
    end_s: float,
    in_flight: int,
    arguments: tuple[Tensor, ...],
    stages_per_device: int = 1,
) -> PlannedStage:
    """Returns a stage as a plan shows it.

    Args:
      times: of the stages of its replica, of which it has a number.
      end_s: of the end of the step.
    """
    options = search.options
    stage, submesh, numbers, layout = place
    send_forward_s, send_backward_s = times.sends_after(number)
    return PlannedStage(
        first_layer=stage.start,
        last_layer=stage.end - 1,
        source=search.chain.sources[stage.start],
        hardware=options.cluster.kinds[submesh.kind].name,
        mesh_axes=mesh_shape(submesh),
        devices=tuple(numbers),
        forward_s=float(times.forward_s[number]),
        backward_s=float(times.backward_s[number]),
        end_s=end_s,
        send_forward_s=send_forward_s,
        send_backward_s=send_backward_s,
        in_flight=in_flight,
        peak_bytes=layout.peak_bytes,
        memory_limit_bytes=float(memory_limit_of(options, submesh.kind)) / stages_per_device,
        residual_bytes=layout.residual_bytes,
        recomputed_operations=len(layout.recomputed),
        recomputed_bytes=layout.recomputed_bytes,
        num_residuals=layout.num_residuals,
        num_offloaded=len(layout.offloaded),
        offloaded_bytes=layout.offloaded_bytes,
        offload_s=layout.offload_s,
        arguments=arguments,
        weights_s=0.0 if times.weights_s is None else float(times.weights_s[number]),
    )


def cluster_words(cluster: Cluster) -> str:
    """Returns a cluster in words: `2 hosts of 8 x A100-80GB`."""
    return ", ".join(f"{format_count(h.count, 'host')} of {h.devices} x {h.name}" for h in cluster.kinds)
