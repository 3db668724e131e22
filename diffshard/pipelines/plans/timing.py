"""When each operation of a planned pipeline runs: the simulation of a plan's schedule, from its own numbers."""

from cost.pipeline_schedules import graph_of
from cost.pipeline_times import Simulation, StageTimes, simulate
from diffshard.pipelines.plans.base import PipelinePlanData


def simulated(plan: PipelinePlanData) -> Simulation:
    """Simulates the micro-batches of a plan; the end of the step comes after them.

    Raises:
      ValueError: a time is negative or not finite.
    """
    stages, links = plan.stages, plan.stages[:-1]
    times = StageTimes(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        [stage.send_forward_s for stage in links],
        [stage.send_backward_s for stage in links],
    )
    return simulate(times, graph_of(plan.schedule, len(stages), plan.num_microbatches))


def longest_end_s(plan: PipelinePlanData) -> float:
    """Returns the seconds of the end of the step, for which each stage waits until all micro-batches are through."""
    return max(stage.end_s for stage in plan.stages)
