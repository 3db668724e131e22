"""When each operation of a planned pipeline runs: the simulation of a plan's schedule, from its own numbers."""

from collections.abc import Sequence

from cost.pipeline_steps import PipelineStep, StepsInTurn, pipeline_step, steps_in_turn
from cost.pipeline_times import StageTimes
from diffshard.pipelines.plans.base import PipelinePlanData, PlannedStage


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
    return steps_in_turn(_times(plan.stages), plan.num_microbatches, [s.end_s for s in plan.stages], plan.overlap)


def _simulated(plan: PipelinePlanData, stages: Sequence[PlannedStage], num_microbatches: int) -> PipelineStep:
    ends = [stage.end_s for stage in stages]
    return pipeline_step(_times(stages), plan.schedule, num_microbatches, ends, plan.overlap)


def _times(stages: Sequence[PlannedStage]) -> StageTimes:
    links = stages[:-1]
    return StageTimes(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        [stage.send_forward_s for stage in links],
        [stage.send_backward_s for stage in links],
    )
