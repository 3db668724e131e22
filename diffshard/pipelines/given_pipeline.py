"""Pipelines of plans that are there already: their decisions are taken, and nothing is searched."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffshard.base import PlanError
from diffshard.pipelines.course import Course
from diffshard.pipelines.cutting import UncutStep
from diffshard.pipelines.decisions import (
    DAMAGED_DECISIONS,
    ChosenPipeline,
    DecidedProcesses,
    RecordingProcesses,
    planned_facts,
    shared_layouts,
)
from diffshard.pipelines.options import PipelineOptions
from diffshard.pipelines.planned_pipeline import FoundPipeline, cluster_words, planned_pipeline
from diffshard.pipelines.plans.base import PipelinePlanData, PlannedStage
from diffshard.pipelines.replica_search import ChosenReplicas
from diffshard.pipelines.replicated_pipeline import planned_replicas
from diffshard.pipelines.stage_search import StageLayout
from diffshard.pipelines.step_search import StepSearch
from diffshard.plans.documents import DAMAGE
from diffshard.processes import Processes
from search_spaces.pipelines.stage_programs import StagedStep

CHOOSE_STAGES = "choose the stages of a pipeline"
"""What is decided first of a pipeline."""
CHOOSE_REPLICAS = "choose the replicas of a pipeline"
"""What is decided first of a pipeline with replicas."""


def with_decisions(found: FoundPipeline, recording: RecordingProcesses) -> FoundPipeline:
    """Returns a pipeline whose plan has what was decided of it."""
    return found._replace(plan=replace(found.plan, decisions=recording.decisions))


def applied_pipeline(
    options: PipelineOptions,
    plan: PipelinePlanData,
    steps: Sequence[UncutStep],
    donated: Sequence[bool],
    processes: Processes,
    course: Course,
) -> FoundPipeline:
    """Returns the pipeline of a plan for a traced step.

    Args:
      steps: the step in some numbers of micro-batches, the plan's among them.
      processes: those that own devices of the cluster; all of them have the plan.
    """
    step = _step_of(plan, steps)
    check_fits(plan, options, step)
    decided = DecidedProcesses(processes.indices, plan.decisions)
    search = StepSearch(options, step, donated, course)
    course.step("taking the stages of a plan")
    try:
        if plan.replicas:
            replicas = decided.shared(CHOOSE_REPLICAS, _not_decided, kind=ChosenReplicas)
            found = planned_replicas(options, search, replicas, plan, decided)
        else:
            chosen = decided.shared(CHOOSE_STAGES, _not_decided, kind=ChosenPipeline)
            found = planned_pipeline(options, search, chosen, decided)
    except PlanError:
        raise
    except DAMAGE as error:
        raise PlanError(f"The decisions of the plan are damaged: {error}.") from None
    if not decided.are_taken or _layout(found.plan) != _layout(plan):
        raise PlanError(DAMAGED_DECISIONS)
    return found._replace(plan=plan)


def chosen_of(plan: PipelinePlanData, options: PipelineOptions, steps: Sequence[UncutStep]) -> ChosenPipeline | None:
    """Returns the stages of a plan without replicas; None if it was made for another function or cluster."""
    try:
        check_fits(plan, options, _step_of(plan, steps))
        return DecidedProcesses((0,), plan.decisions).shared(CHOOSE_STAGES, _not_decided, kind=ChosenPipeline)
    except (PlanError, *DAMAGE):
        return None


def layouts_of(plan: PipelinePlanData, staged: StagedStep) -> list[StageLayout]:
    """Returns the shardings of the stages of a plan without replicas for the same stages; none if it is damaged."""
    try:
        return shared_layouts(DecidedProcesses((0,), plan.decisions[1:]), staged, _not_decided)
    except (PlanError, *DAMAGE):
        return []


def check_fits(plan: PipelinePlanData, options: PipelineOptions, step: UncutStep) -> None:
    """Checks that a plan was made for a step and a cluster."""
    if not plan.decisions:
        raise PlanError(
            "The plan can only be shown: it was saved by a version that did not save the plans of the stages. Search "
            "again, and save the new plan."
        )
    if plan.cluster != (cluster := cluster_words(options.cluster)):
        raise PlanError(
            f"The plan was made for {plan.cluster}, not for {cluster}. Give `devices` of that kind and number; or a "
            "`diffshard.Cluster` with the hosts and links that it was searched with and `devices=`, where others stand "
            "for them."
        )
    own = planned_facts(step)
    for name, text in own.items():
        if plan.facts.get(name) != text:
            was = f"{plan.facts[name]}, not {text}" if name.startswith("`") and name in plan.facts else "another one"
            raise PlanError(f"The plan does not fit the function: {name} was {was} when the plan was made.")
    for name in plan.facts:
        if name not in own:
            raise PlanError(f"The plan was made for a function with {name}, which is not given.")


def _step_of(plan: PipelinePlanData, steps: Sequence[UncutStep]) -> UncutStep:
    wanted = plan.num_microbatches * plan.num_groups, plan.num_groups
    for step in steps:
        if (step.parts.num_microbatches, step.parts.num_groups) == wanted:
            return step
    raise PlanError(f"The plan has {plan.num_microbatches} micro-batches, into which this batch is not divided.")


def _layout(plan: PipelinePlanData) -> tuple[Any, ...]:
    """Returns what decides how a pipeline runs, without what is predicted of it."""

    def of(stage: PlannedStage) -> tuple[Any, ...]:
        arguments = tuple((tensor.path, tensor.spec) for tensor in stage.arguments)
        return stage.first_layer, stage.last_layer, dict(stage.mesh_axes), stage.devices, stage.in_flight, arguments

    counts = [replica.num_microbatches for replica in plan.replicas]
    return plan.schedule, plan.overlap, counts, [of(stage) for stage in plan.all_stages]


def _not_decided() -> Any:
    raise PlanError("The plan has no decisions.")
