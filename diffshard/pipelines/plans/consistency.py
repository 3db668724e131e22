"""Checks of what a plan of a pipeline from a file means: stages that follow each other, numbers that can be.

The times of a step are simulated again from those of the stages; they have to be the plan's.
"""

import math
from collections.abc import Sequence

from cost.pipeline_schedules import Schedule, splits_backward
from cost.pipeline_steps import PipelineStep, StepsInTurn, pipeline_step, steps_in_turn
from cost.pipeline_times import StageTimes
from diffshard.pipelines.plans.base import PipelinePlanData, PlannedStage
from diffshard.plans.consistency import check_tensor
from diffshard.plans.documents import PIPELINE, RecordFile
from diffshard.plans.plan_record import check_certificate


def simulated(plan: PipelinePlanData) -> PipelineStep:
    """Simulates the micro-batches of a plan's main replica, and says what a step of all takes with its end.

    Raises:
      ValueError: a time is negative or not finite.
    """
    main = _simulated(plan, plan.stages, plan.main_microbatches)
    if not plan.replicas:
        return main
    others = [step.simulation for step in simulated_replicas(plan)]
    until_sums = (r.weights_s + found.step_s + r.sums_s for r, found in zip(plan.replicas, others, strict=True))
    seconds = max(main.simulation.step_s, *until_sums)
    busy_s = sum(float(found.busy_s.sum()) for found in (main.simulation, *others))
    bubble = 1.0 - busy_s / (seconds * len(plan.all_stages)) if seconds else 0.0
    step_s = seconds + max(stage.end_s for stage in plan.stages)
    return PipelineStep(main.simulation, step_s, bubble, step_s)


def simulated_replicas(plan: PipelinePlanData) -> list[PipelineStep]:
    """Simulates the micro-batches of the other replicas, each from when it has the weights.

    Raises:
      ValueError: a time is negative or not finite.
    """
    return [_simulated(plan, replica.stages, replica.num_microbatches) for replica in plan.replicas]


def simulated_steps(plan: PipelinePlanData) -> StepsInTurn:
    """Simulates many steps of a plan with the schedule "2bw".

    Raises:
      ValueError: a time is negative or not finite.
    """
    return steps_in_turn(
        _times(plan.schedule, plan.stages), plan.num_microbatches, [s.end_s for s in plan.stages], plan.overlap
    )


def _simulated(plan: PipelinePlanData, stages: Sequence[PlannedStage], num_microbatches: int) -> PipelineStep:
    ends = [stage.end_s for stage in stages]
    each = plan.stages_per_device
    return pipeline_step(_times(plan.schedule, stages), plan.schedule, num_microbatches, ends, plan.overlap, each)


def _times(schedule: Schedule, stages: Sequence[PlannedStage]) -> StageTimes:
    links = stages[:-1]
    return StageTimes(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        [stage.send_forward_s for stage in links],
        [stage.send_backward_s for stage in links],
        [stage.weights_s for stage in stages] if splits_backward(schedule) else None,
    )


_MOST_MICROBATCHES = 2**14  # far more than any batch is divided into; a simulation of these still takes a second
_MOST_STAGES = 2**10  # likewise
_TOLERANCE = 1e-6  # relative: sums of the same numbers in another order


def check_pipeline_plan(plan: PipelinePlanData) -> None:
    """Checks that the fields of a plan fit each other; that they have the right types is known.

    Raises:
      ValueError: names the field, the rule and the value.
    """
    if plan.num_microbatches > _MOST_MICROBATCHES:
        raise ValueError(f"`num_microbatches` must be from 1 to {_MOST_MICROBATCHES}, not {plan.num_microbatches}")
    if not 1 <= len(plan.stages) <= _MOST_STAGES:
        raise ValueError(f"`stages` must be from 1 to {_MOST_STAGES}, not {len(plan.stages)}")
    if plan.predicted_steps and plan.schedule != "2bw":
        raise ValueError(f"`predicted_steps` must be 0 with {plan.schedule!r}, not {plan.predicted_steps}")
    for i, stage in enumerate(plan.stages):
        _check_stage(stage, f"stages[{i}]")
    _check_replicas(plan)
    _check_layers(plan)
    _check_devices(plan)
    _check_times(plan)
    _check_tried(plan)


def _check_stage(stage: PlannedStage, name: str) -> None:
    if stage.num_offloaded > stage.num_residuals:
        count = stage.num_residuals
        raise ValueError(f"`{name}.num_offloaded` must be 0 to {count}, `num_residuals`, not {stage.num_offloaded}")
    if stage.peak_bytes > stage.memory_limit_bytes:
        raise ValueError(f"`{name}.peak_bytes` is {stage.peak_bytes!r}, more than `memory_limit_bytes`")
    axes = stage.mesh_axes
    if not axes or math.prod(axes.values()) != len(stage.devices):
        raise ValueError(f"`{name}.mesh_axes` is {dict(axes)}, not axes of a mesh of {len(stage.devices)} devices")
    for i, tensor in enumerate(stage.arguments):
        check_tensor(tensor, axes, f"{name}.arguments[{i}]")


def _check_replicas(plan: PipelinePlanData) -> None:
    """Checks that the other replicas take 1 micro-batch or more each, as the main one does, of the same layers."""
    layers = [(stage.first_layer, stage.last_layer) for stage in plan.stages]
    for r, replica in enumerate(plan.replicas):
        if plan.main_microbatches < 1:
            raise ValueError(f"`replicas[{r}].num_microbatches` must leave each replica 1 or more, not be {replica}")
        for i, stage in enumerate(replica.stages):
            _check_stage(stage, f"replicas[{r}].stages[{i}]")
        if [(stage.first_layer, stage.last_layer) for stage in replica.stages] != layers:
            raise ValueError(f"`replicas[{r}].stages` must have the layers of `stages`, {layers}")


def _check_layers(plan: PipelinePlanData) -> None:
    """Checks that stages follow each other without a gap, from the first layer to the last."""
    first = 0
    for i, stage in enumerate(plan.stages):
        if stage.first_layer != first or stage.last_layer < first:
            raise ValueError(
                f"`stages[{i}]` must begin with layer {first} and end with a later one or the same, not be "
                f"{stage.first_layer} to {stage.last_layer}"
            )
        first = stage.last_layer + 1
    if first != plan.num_layers:
        raise ValueError(f"`stages` end with layer {first - 1}, where `num_layers` is {plan.num_layers}")


def _check_devices(plan: PipelinePlanData) -> None:
    groups: dict[int, tuple[int, ...]] = {}
    for i, (group, stage) in enumerate(zip(simulated(plan).simulation.graph.device.tolist(), plan.stages, strict=True)):
        if groups.setdefault(group, stage.devices) != stage.devices:
            raise ValueError(f"`stages[{i}].devices` must be {groups[group]} with {plan.schedule!r}")
    of_replicas = (stage.devices for replica in plan.replicas for stage in replica.stages)
    devices = [device for own in (*groups.values(), *of_replicas) for device in own]
    if max(devices) >= plan.num_devices or len(set(devices)) < len(devices):
        raise ValueError(
            f"`devices` of the stages must be different numbers below `num_devices`, {plan.num_devices}, not {devices}"
        )


def _check_times(plan: PipelinePlanData) -> None:
    """Checks that the step, the bubble, the bound and what is in flight follow from the times of the stages."""
    step = simulated(plan)
    every = (plan.stages, *(replica.stages for replica in plan.replicas))
    simulations = (step.simulation, *(of_replica.simulation for of_replica in simulated_replicas(plan)))
    for stages, simulation in zip(every, simulations, strict=True):
        if [stage.in_flight for stage in stages] != simulation.in_flight.tolist():
            raise ValueError(
                f"`in_flight` of the stages must be {simulation.in_flight.tolist()} with {plan.schedule!r}"
            )
        if any(stage.weights_s for stage in stages) and not splits_backward(plan.schedule):
            raise ValueError(
                f"`weights_s` of the stages must be 0 with {plan.schedule!r}, which has all in `backward_s`"
            )
        if stages[-1].send_forward_s or stages[-1].send_backward_s:
            raise ValueError("the last of the `stages` must send nothing to a next one")
    check_certificate(plan.certificate)
    expected = {"step_s": step.step_s, "bubble": step.bubble}
    for name, value in expected.items():
        if not math.isclose(getattr(plan, name), value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * (name != "step_s")):
            raise ValueError(f"`{name}` is {getattr(plan, name)!r}, where the other numbers give {value!r}")


def _check_tried(plan: PipelinePlanData) -> None:
    if len({(count, schedule) for count, schedule, _ in plan.tried}) < len(plan.tried):
        raise ValueError("`tried` has a number of micro-batches with the same schedule twice")


FILE = RecordFile(PIPELINE, 3, check_pipeline_plan, without=("stored_in",), needed=("decisions", "facts"))
to_json, from_json = FILE.to_json, FILE.from_json
