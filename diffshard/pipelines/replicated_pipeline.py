"""From replicas that a search chose to a plan: shardings and programs of all their stages, and their micro-batches.

Pipelines of plans that are there already take the same way: their decisions are taken, and nothing is searched.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cost.clusters import Cluster, Submesh
from cost.pipeline_schedules import graph_of
from cost.pipeline_times import StageTimes, balanced_microbatches, joined_graph, simulate
from diffshard.base import PlanError
from diffshard.pipelines.decisions import (
    DAMAGED_DECISIONS,
    ChosenPipeline,
    DecidedProcesses,
    RecordingProcesses,
    not_decided,
    planned_facts,
    shared_layouts,
)
from diffshard.pipelines.planned_pipeline import (
    FoundPipeline,
    StagePlace,
    cluster_words,
    planned_pipeline,
    planned_stage,
    predicted_plan,
)
from diffshard.pipelines.plans.base import PipelinePlanData, PlannedReplica, PlannedStage
from diffshard.pipelines.replica_search import (
    ChosenReplicas,
    replica_part_s,
    solve_replica_stage,
    sums_in_s,
    weights_out_s,
)
from diffshard.pipelines.stage_plans import StagePlans, arguments_of, place_stages, sends_s, stage_devices
from diffshard.pipelines.stage_search import StageLayout
from diffshard.pipelines.stage_variants import StageVariants
from diffshard.pipelines.step_search import StepSearch, search_in
from diffshard.plans.documents import DAMAGE
from diffshard.processes import Processes
from search_spaces.pipelines.replicas import replica_part, replica_specs, replicated_step
from search_spaces.pipelines.stage_programs import StagedStep, staged_step


def planned_replicas(
    search: StepSearch, chosen: ChosenReplicas, unreplicated: PipelinePlanData, processes: Processes
) -> FoundPipeline:
    """Plans the programs of all replicas' stages, divides the micro-batches among them, and simulates them.

    Args:
      search: of the step in the chosen number of micro-batches.
      unreplicated: the plan of the best pipeline without replicas, whose notes and tried choices it shows as well.

    Raises:
      InfeasibleError: a stage does not fit.
    """
    size, count, schedule = len(chosen.stages), search.num_microbatches, chosen.schedule
    cluster = search.options.cluster
    base, step = search.staged([stage.start for stage in chosen.stages])
    places = _places(search, chosen, base, processes)
    steps = []
    for own in places:
        copied = [(i, key) for i, place in enumerate(own) for key in place.layout.copied(base.inputs)]
        steps.append(staged_step(step.parts, step.cuts, copied))
    plans = _planned_programs(search, places, steps, processes)
    exchanges = _exchanges(cluster, replica_part(base), places)
    seconds = [
        replica_part_s(of_replica, schedule, count, sum(exchange))
        for of_replica, exchange in zip(_times(cluster, base, places, plans), exchanges, strict=True)
    ]
    counts = balanced_microbatches(seconds, count)
    staged = plans.staged = replicated_step(steps, counts)
    times = _times(cluster, base, places, plans)  # again: some totals are as large as a replica's micro-batches
    graphs = [graph_of(schedule, size, m) for m in counts]
    in_flight = [simulate(*pair).in_flight.tolist() for pair in zip(times, graphs, strict=True)]
    planned = [
        tuple(
            planned_stage(
                search,
                place,
                times[r],
                i,
                0.0 if r else place.layout.end_s,
                in_flight[r][i],
                () if r else arguments_of(step, staged, place.layout, i),
            )
            for i, place in enumerate(own)
        )
        for r, own in enumerate(places)
    ]
    others = [PlannedReplica(counts[r], planned[r], *exchanges[r]) for r in range(1, len(steps))]
    plan = predicted_plan(search, schedule, planned[0], others, tried=unreplicated.tried, notes=unreplicated.notes)
    forward_s, backward_s = plans.pass_seconds("forward"), plans.pass_seconds("backward")
    sends = zip(*[of_replica.sends_after(i) for of_replica in times for i in range(size)][:-1], strict=True)
    simulation = simulate(StageTimes(forward_s, backward_s, *map(list, sends)), joined_graph(graphs))
    return FoundPipeline(plan, step, staged, plans, simulation)


def _places(
    search: StepSearch, chosen: ChosenReplicas, base: StagedStep, processes: Processes
) -> list[list[StagePlace]]:
    """Returns where the stages of each replica run, those of the main one first, with the shardings found for them.

    Raises:
      InfeasibleError: a stage does not fit.
    """
    options, part, size = search.options, replica_part(base), len(chosen.stages)
    wanted = [(r, i, s) for r, replica in enumerate(chosen.replicas) for i, s in enumerate(replica.submeshes)]
    limit_s = search.progress.stage_limit_s(3 * len(wanted))  # each has two programs as well

    def solved(r: int, i: int, submesh: Submesh) -> StageLayout:
        in_flight = chosen.replicas[r].in_flight[i]
        if r:
            return solve_replica_stage(options, part, i, submesh, in_flight, limit_s)
        variants = StageVariants(
            options, base, i, submesh, in_flight, is_donated=search.is_donated, time_limit_s=limit_s
        )
        return variants.chosen(())

    layouts = shared_layouts(processes, base, lambda: [solved(*one) for one in wanted])
    numbers = place_stages(options.cluster, [submesh for _, _, submesh in wanted])
    rows = zip(wanted, numbers, layouts, strict=True)
    flat = [StagePlace(chosen.stages[i], submesh, own, layout) for (_, i, submesh), own, layout in rows]
    return [flat[first : first + size] for first in range(0, len(flat), size)]


def _planned_programs(
    search: StepSearch,
    places: Sequence[Sequence[StagePlace]],
    steps: Sequence[StagedStep],
    processes: Processes,
) -> StagePlans:
    """Plans the programs of all stages, which are the same however many micro-batches each replica takes."""
    options, devices = search.options, []
    for r, (own, staged) in enumerate(zip(places, steps, strict=True)):
        for _, submesh, numbers, layout in own:
            named = replace(layout, specs=replica_specs(layout.specs, staged, r))
            devices.append(stage_devices(options.cluster, submesh, numbers, named))
    counts = [search.num_microbatches - len(steps) + 1, *[1] * (len(steps) - 1)]
    limit_s = search.progress.stage_limit_s(2 * len(devices))
    return StagePlans(replicated_step(steps, counts), devices, processes, options, limit_s)


def _times(
    cluster: Cluster, base: StagedStep, places: Sequence[Sequence[StagePlace]], plans: StagePlans
) -> list[StageTimes]:
    """Returns the seconds of a micro-batch in the stages of each replica, and between them."""
    forward_s, backward_s, found = plans.pass_seconds("forward"), plans.pass_seconds("backward"), []
    for r, own in enumerate(places):
        stages = slice(r * len(own), (r + 1) * len(own))
        sends = sends_s(base, cluster, [place.submesh for place in own])
        found.append(StageTimes(forward_s[stages], backward_s[stages], *sends))
    return found


def _exchanges(cluster: Cluster, part: StagedStep, places: Sequence[Sequence[StagePlace]]) -> list[tuple[float, float]]:
    """Returns for each replica the seconds until it has the weights, and those of bringing its sums.

    Both are 0 for the main one. The main replica's hosts send to one replica after the other.
    """
    main, *others = ([place.submesh for place in own] for own in places)
    exchanges = [(0.0, 0.0)]
    for own, submeshes in zip(places[1:], others, strict=True):
        weights_s = weights_out_s(cluster, part, [place.layout for place in own], main, submeshes)
        sums_s = sums_in_s(cluster, part, main, submeshes)
        exchanges.append((weights_s * len(others), sums_s * len(others)))
    return exchanges


CHOOSE_STAGES = "choose the stages of a pipeline"
"""What is decided first of a pipeline."""
CHOOSE_REPLICAS = "choose the replicas of a pipeline"
"""What is decided first of a pipeline with replicas."""


def with_decisions(found: FoundPipeline, recording: RecordingProcesses) -> FoundPipeline:
    """Returns a pipeline whose plan has what was decided of it."""
    return found._replace(plan=replace(found.plan, decisions=recording.decisions))


def applied_pipeline(plan: PipelinePlanData, searches: Sequence[StepSearch], processes: Processes) -> FoundPipeline:
    """Returns the pipeline of a plan for a traced step.

    Args:
      searches: of the step in some numbers of micro-batches, the plan's among them.
      processes: those that own devices of the cluster; all of them have the plan.
    """
    search = _search_of(plan, searches)
    decided = DecidedProcesses(processes.indices, plan.decisions)
    search.progress.step("taking the stages of a plan")
    try:
        if plan.replicas:
            replicas = decided.shared(CHOOSE_REPLICAS, not_decided, kind=ChosenReplicas)
            found = planned_replicas(search, replicas, plan, decided)
        else:
            chosen = decided.shared(CHOOSE_STAGES, not_decided, kind=ChosenPipeline)
            found = planned_pipeline(search, chosen, decided)
    except PlanError:
        raise
    except DAMAGE as error:
        raise PlanError(f"The decisions of the plan are damaged: {error}.") from None
    if not decided.are_taken or _layout(found.plan) != _layout(plan):
        raise PlanError(DAMAGED_DECISIONS)
    return found._replace(plan=plan)


def chosen_of(plan: PipelinePlanData, searches: Sequence[StepSearch]) -> ChosenPipeline | None:
    """Returns the stages of a plan without replicas; None if it was made for another function or cluster."""
    try:
        _search_of(plan, searches)
        return DecidedProcesses((0,), plan.decisions).shared(CHOOSE_STAGES, not_decided, kind=ChosenPipeline)
    except (PlanError, *DAMAGE):
        return None


def _search_of(plan: PipelinePlanData, searches: Sequence[StepSearch]) -> StepSearch:
    """Returns the search in the number of micro-batches of a plan; checks that it was made for the step and cluster."""
    search = search_in(searches, plan.num_microbatches, plan.num_groups)
    if search is None:
        raise PlanError(f"The plan has {plan.num_microbatches} micro-batches, into which this batch is not divided.")
    if not plan.decisions:
        raise PlanError("The plan can only be shown: it has no `decisions`, the plans of its stages. Search again.")
    check_cluster(plan, search.options.cluster)
    own = planned_facts(search.step)
    for name, text in own.items():
        if plan.facts.get(name) != text:
            was = f"{plan.facts[name]}, not {text}" if name.startswith("`") and name in plan.facts else "another one"
            raise PlanError(f"The plan does not fit the function: {name} was {was} when the plan was made.")
    for name in plan.facts:
        if name not in own:
            raise PlanError(f"The plan was made for a function with {name}, which is not given.")
    return search


def check_cluster(plan: PipelinePlanData, cluster: Cluster) -> None:
    """Checks that a plan was made for hosts of a cluster's kinds and numbers."""
    if plan.cluster != (words := cluster_words(cluster)):
        raise PlanError(
            f"The plan was made for {plan.cluster}, and `devices` are {words}. Give devices in such hosts, with "
            "`hardware=` if they stand for others; or the `diffshard.Cluster` that was searched, with its links and "
            "`devices=`."
        )


def _layout(plan: PipelinePlanData) -> tuple[Any, ...]:
    """Returns the fields of a plan that decide how a pipeline runs, without its predictions."""

    def of(stage: PlannedStage) -> tuple[Any, ...]:
        arguments = tuple((tensor.path, tensor.spec) for tensor in stage.arguments)
        return stage.first_layer, stage.last_layer, dict(stage.mesh_axes), stage.devices, stage.in_flight, arguments

    counts = [replica.num_microbatches for replica in plan.replicas]
    return plan.schedule, plan.overlap, counts, [of(stage) for stage in plan.all_stages]
