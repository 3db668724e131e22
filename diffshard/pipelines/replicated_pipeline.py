"""From replicas that a search chose to a plan: shardings and programs of all their stages, and their micro-batches."""

import itertools
import time
from dataclasses import replace

from cost.host_groups import Submesh
from cost.pipeline_replicas import balanced_microbatches, joined_graph
from cost.pipeline_schedules import graph_of
from cost.pipeline_times import StageTimes, simulate
from diffshard.pipelines.base import PipelinePlan
from diffshard.pipelines.options import PipelineOptions, mesh_shape
from diffshard.pipelines.planned_pipeline import FoundPipeline, cluster_words, planned_stage
from diffshard.pipelines.plans.base import PlannedReplica
from diffshard.pipelines.plans.timing import simulated
from diffshard.pipelines.replica_exchange import sums_in_s, weights_out_s
from diffshard.pipelines.replica_search import ChosenReplicas, replica_part_s, solve_replica_stage
from diffshard.pipelines.shared_choices import shared_layouts
from diffshard.pipelines.stage_placement import arguments_of, mesh_of, place_stages, sends_s
from diffshard.pipelines.stage_plans import StageDevices, StagePlans
from diffshard.pipelines.stage_search import StageLayout
from diffshard.pipelines.stage_variants import StageVariants
from diffshard.pipelines.step_search import StepSearch
from diffshard.processes import Processes
from search_spaces.pipelines.replicas import replica_part, replica_specs, replicated_step
from search_spaces.pipelines.stage_labels import Label
from search_spaces.pipelines.stage_programs import staged_step


def planned_replicas(
    options: PipelineOptions,
    search: StepSearch,
    chosen: ChosenReplicas,
    unreplicated: FoundPipeline,
    processes: Processes,
    start_s: float,
) -> FoundPipeline:
    """Plans the programs of all replicas' stages, divides the micro-batches among them, and simulates them.

    Args:
      options: what is asked for.
      search: of the step in the chosen number of micro-batches.
      chosen: the replicas.
      unreplicated: the best pipeline without replicas, of whose plan the bound and what was tried are taken.
      processes: those that own devices of the cluster.
      start_s: when the search began.

    Raises:
      InfeasibleError: a stage does not fit.
    """
    cluster, chain, size, count = options.cluster, search.chain, len(chosen.stages), search.num_microbatches
    base, step = search.staged([stage.start for stage in chosen.stages])
    part = replica_part(base)
    course = search.course
    places = [(r, i, s) for r, replica in enumerate(chosen.replicas) for i, s in enumerate(replica.submeshes)]

    def solved(r: int, i: int, submesh: Submesh) -> StageLayout:
        in_flight = chosen.replicas[r].in_flight[i]
        if r:
            return solve_replica_stage(options, part, i, submesh, in_flight)
        variants = StageVariants(options, base, i, step.replaced, submesh, in_flight, is_donated=search.is_donated)
        return variants.chosen(())

    layouts = shared_layouts(processes, base, lambda: [solved(*place) for place in places])
    numbers = place_stages(cluster, [submesh for _, _, submesh in places])
    steps, devices = [], []
    for r in range(len(chosen.replicas)):
        own = layouts[r * size : (r + 1) * size]
        copied = [(i, key) for i, layout in enumerate(own) for key in layout.copied(base.inputs)]
        steps.append(staged_step(step.parts, step.cuts, copied))
    for (r, _, submesh), layout, of_stage in zip(places, layouts, numbers, strict=True):
        shape = mesh_shape(submesh)
        named = replace(layout, specs=replica_specs(layout.specs, steps[r], r))
        devices.append(StageDevices(mesh_of(cluster, of_stage, shape), cluster.hardware(submesh.kind, shape), named))
    any_counts = [count - len(steps) + 1, *[1] * (len(steps) - 1)]  # programs are the same for all numbers
    plans = StagePlans(
        replicated_step(steps, any_counts),
        devices,
        processes,
        solver=options.solver,
        time_limit_s=course.stage_limit_s(2 * len(places)),
    )
    forward_s, backward_s = (
        [plans.seconds(Label(kind, i)) for i in range(len(places))] for kind in ("forward", "backward")
    )
    times, exchanges = [], [(0.0, 0.0)]
    main = chosen.replicas[0].submeshes
    for r, replica in enumerate(chosen.replicas):
        own = slice(r * size, (r + 1) * size)
        sends = [sends_s(base, cluster, i, *pair) for i, pair in enumerate(itertools.pairwise(replica.submeshes))]
        times.append(StageTimes(forward_s[own], backward_s[own], [f for f, _ in sends], [b for _, b in sends]))
        if r:
            weights_s = weights_out_s(cluster, part, layouts[own], main, replica.submeshes)
            exchanges.append((weights_s, sums_in_s(cluster, part, main, replica.submeshes)))
    others = len(steps) - 1  # the main replica's hosts send to one after the other
    exchanges = [(weights_s * others, sums_s * others) for weights_s, sums_s in exchanges]
    seconds = [
        replica_part_s(of_replica, chosen.schedule, count, sum(exchange))
        for of_replica, exchange in zip(times, exchanges, strict=True)
    ]
    counts = balanced_microbatches(seconds, count)
    staged = plans.staged = replicated_step(steps, counts)
    graphs = [graph_of(chosen.schedule, size, m) for m in counts]
    simulations = [simulate(of_replica, graph) for of_replica, graph in zip(times, graphs, strict=True)]
    end_s = [layout.end_s if i < size else 0.0 for i, layout in enumerate(layouts)]
    planned = [
        planned_stage(
            options,
            chain,
            chosen.stages[i],
            submesh,
            numbers[n],
            layouts[n],
            (forward_s[n], backward_s[n], end_s[n]),
            (times[r].send_forward_s[i], times[r].send_backward_s[i]) if i < size - 1 else (0.0, 0.0),
            int(simulations[r].in_flight[i]),
            () if r else arguments_of(step, staged, layouts[n], i),
        )
        for n, (r, i, submesh) in enumerate(places)
    ]
    plan = PipelinePlan(
        function=getattr(options.fn, "__name__", "function"),
        cluster=cluster_words(cluster),
        num_devices=cluster.num_devices,
        num_layers=len(chain),
        num_microbatches=count,
        schedule=chosen.schedule,
        stages=tuple(planned[:size]),
        step_s=0.0,
        bubble=0.0,
        lower_bound_s=0.0,
        gap=0.0,
        search_s=time.perf_counter() - start_s,
        tried=unreplicated.plan.tried,
        notes=unreplicated.plan.notes,
        replicas=tuple(
            PlannedReplica(counts[r], tuple(planned[r * size : (r + 1) * size]), *exchanges[r])
            for r in range(1, len(steps))
        ),
    )
    found = simulated(plan)
    plan = replace(plan, step_s=found.step_s, bubble=found.bubble)
    joined = StageTimes(
        forward_s,
        backward_s,
        *([s for t in times for s in (*getattr(t, name), 0.0)][:-1] for name in ("send_forward_s", "send_backward_s")),
    )
    return FoundPipeline(plan, step, staged, plans, simulate(joined, joined_graph(graphs)))


def with_bound(plan: PipelinePlan, bound_s: float) -> PipelinePlan:
    """Returns a plan with a bound of its step, which is no more than the step itself."""
    bound_s = min(bound_s, plan.step_s)
    return replace(plan, lower_bound_s=bound_s, gap=(plan.step_s - bound_s) / plan.step_s if plan.step_s else 0.0)
