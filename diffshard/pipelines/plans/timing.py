"""When each operation of a planned pipeline runs: the simulation of a plan's schedule, from its own numbers."""

from cost.pipeline_steps import PipelineStep, pipeline_step
from cost.pipeline_times import StageTimes
from diffshard.pipelines.plans.base import PipelinePlanData


def simulated(plan: PipelinePlanData) -> PipelineStep:
    """Simulates the micro-batches of a plan, and says what a step of it takes with its end.

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
    return pipeline_step(times, plan.schedule, plan.num_microbatches, [stage.end_s for stage in stages])
