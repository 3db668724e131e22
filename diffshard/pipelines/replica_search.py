"""The search for replicas of a pipeline on unequal devices: each kind of device a replica, the fastest the main one.

The main replica's stages are searched on its devices alone. The others have the same cuts, each stage as many of their
devices as there are for every stage. Numbers of micro-batches are then balanced.

Weights go out to the other replicas while the main one computes already, and sums come in while it still does. The main
replica's hosts send to one replica after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from cost.clusters import Cluster, Submesh
from cost.collectives import collective_s
from cost.pipeline_schedules import Schedule, graph_of, kept_microbatches
from cost.pipeline_times import StageTimes, balanced_microbatches, simulate
from diffshard.base import InfeasibleError
from diffshard.pipelines.even_division import even_submeshes
from diffshard.pipelines.options import PipelineOptions, mesh_shape
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.stage_plans import sends_s
from diffshard.pipelines.stage_search import BACKWARD_SHARE, FoundDivision, StageLayout
from diffshard.pipelines.stage_variants import StageVariants
from diffshard.pipelines.step_search import StepSearch
from search_spaces.partition_specs import num_parts
from search_spaces.pipelines.replicas import replica_part
from search_spaces.pipelines.stage_programs import StagedStep
from search_spaces.pipelines.step_parts import num_bytes


def weights_out_s(
    cluster: Cluster,
    part: StagedStep,
    layouts: Sequence[StageLayout],
    main: Sequence[Submesh],
    replica: Sequence[Submesh],
) -> float:
    """Returns the seconds until a replica has the weights: the copies, their gathers, and what begins its step.

    Args:
      layouts: `[S]`, of its stages.
      main: `[S]`, the submeshes of the main replica's stages.
      replica: `[S]`, those of the replica.
    """
    sent, gathered = [0.0] * len(main), [0.0] * len(main)
    for position, key in enumerate(part.inputs):
        if position in part.batch:
            continue
        for stage in part.readers.get(key, frozenset()):
            size = num_bytes(part.avals[key])
            sent[stage] += size
            gathered[stage] += _gather_s(cluster, replica[stage], layouts[stage], key, size)
    begin_s = max(layout.end_s for layout in layouts)
    return exchange_s(cluster, sent, main, replica) + max(gathered) + begin_s


def sums_in_s(cluster: Cluster, part: StagedStep, main: Sequence[Submesh], replica: Sequence[Submesh]) -> float:
    """Returns the seconds of bringing a replica's sums to the main one's stages and of adding them there.

    Args:
      main: `[S]`, the submeshes of the main replica's stages.
      replica: `[S]`, those of the replica.
    """
    sent = [0.0] * len(main)
    for label, program in part.programs.items():
        sent[label.stage] += sum(num_bytes(part.avals[a.total]) for a in program.accumulations)
    added_s = max(
        3 * size / submesh.num_devices / cluster.kinds[submesh.kind].device.reached_memory_bytes_per_s
        for size, submesh in zip(sent, main, strict=True)
    )
    return exchange_s(cluster, sent, replica, main) + added_s


def exchange_s(
    cluster: Cluster, sent_bytes: Sequence[float], senders: Sequence[Submesh], receivers: Sequence[Submesh]
) -> float:
    """Returns the seconds in which all stages send to those of another replica.

    Whole hosts send side by side. Stages on parts of hosts may share the connection of a host, so that they count one
    after the other.
    """
    shared_s, own_s = 0.0, 0.0
    for size, sender, receiver in zip(sent_bytes, senders, receivers, strict=True):
        seconds = cluster.link_s(size, sender, receiver) if size else 0.0
        if all(s.num_devices >= cluster.kinds[s.kind].devices for s in (sender, receiver)):
            own_s = max(own_s, seconds)
        else:
            shared_s += seconds
    return max(own_s, shared_s)


def _gather_s(cluster: Cluster, submesh: Submesh, layout: StageLayout, key: object, size: float) -> float:
    """Returns the seconds in which devices that got a part each of an array gather what each of them stores."""
    shape = mesh_shape(submesh)
    parts = num_parts(layout.specs.get(key, ()), shape)
    links = cluster.hardware(submesh.kind, shape).links
    sharing = submesh.num_devices // parts
    return max(float(collective_s("all_gather", size / parts, sharing, links[axis])) for axis in shape)


class ChosenReplica(NamedTuple):
    """Where a replica runs.

    Attributes:
      kind: the index of its devices in the cluster.
      submeshes: `[S]`, of the whole cluster.
      in_flight: `[S]`, how many micro-batches each stage keeps at most.
    """

    kind: int
    submeshes: tuple[Submesh, ...]
    in_flight: tuple[int, ...]


class ChosenReplicas(NamedTuple):
    """Replicas that a search chose, before the programs of their stages are planned.

    Attributes:
      num_microbatches: M.
      stages: the layers of each stage; their submeshes are not read.
    """

    num_microbatches: int
    schedule: Schedule
    stages: tuple[Stage, ...]
    replicas: tuple[ChosenReplica, ...]
    step_s: float


def choose_replicas(searches: Sequence[StepSearch], is_over: Callable[[], bool]) -> ChosenReplicas | None:
    """Finds the best replicas with each number of micro-batches and schedule; None if none fit."""
    options = searches[0].options
    order = kinds_by_speed(searches[0])
    kinds = order[: options.pipeline.max_replicas]
    best: ChosenReplicas | None = None
    for search in searches if len(kinds) > 1 else ():
        main = StepSearch(_of_kind(options, kinds[0]), search.step, search.donated, search.progress)
        limits = sorted({min(2**n, options.pipeline.max_stages) for n in range(8)})
        tried: set[tuple[Schedule, tuple[Stage, ...]]] = set()
        for schedule in options.pipeline.schedules:
            for limit in limits:
                if best is not None and is_over():
                    return best
                main.divisions.max_stages = limit
                found = main.divisions.best(schedule, is_over)
                if found is None or (schedule, found.stages) in tried:
                    continue
                tried.add((schedule, found.stages))
                chosen = _with_others(options, main, found, schedule, kinds)
                if chosen is not None and (best is None or chosen.step_s < best.step_s):
                    best = chosen
    return best


def kinds_by_speed(search: StepSearch) -> list[int]:
    """Returns the kinds of devices, those first that together compute a micro-batch fastest."""
    totals = [devices / sum(least) for devices, least in zip(*_device_seconds(search), strict=True)]
    return sorted(range(len(totals)), key=lambda kind: -totals[kind])


def replicas_bound_s(search: StepSearch) -> float:
    """Returns a lower bound on a step with any replicas, stages, meshes and shardings, by its arithmetic alone.

    Each layer of each micro-batch runs on devices of some kind and takes at least the least device-seconds of any
    submesh of that kind. A kind has as many device-seconds as devices in each second. So the least time in which the
    layers, divided between kinds at will, fit these is a bound; it is the value of a linear program.
    """
    devices, least = _device_seconds(search)
    kinds, layers = len(devices), len(least[0])
    seconds = np.asarray(least) * search.num_microbatches  # [K, L]
    capacity = np.zeros((kinds, kinds * layers + 1))
    for kind in range(kinds):
        capacity[kind, kind * layers : (kind + 1) * layers] = seconds[kind]
        capacity[kind, -1] = -devices[kind]
    whole = np.hstack([np.tile(np.eye(layers), kinds), np.zeros((layers, 1))])
    scale = max(float(seconds.max()), 1e-30)
    capacity[:, :-1] /= scale
    found = linprog(np.eye(kinds * layers + 1)[-1], capacity, np.zeros(kinds), whole, np.ones(layers))
    return max(float(found.fun) * scale * (1 - 1e-6), 0.0) if found.status == 0 else 0.0


def replica_part_s(times: StageTimes, schedule: Schedule, num_microbatches: int, exchange_s: float) -> list[float]:
    """Returns `[M + 1]`: the seconds of a replica for 0 to M micro-batches; it has to take at least one."""
    stages = times.num_stages
    counts = range(1, num_microbatches + 1)
    return [np.inf, *(simulate(times, graph_of(schedule, stages, m)).step_s + exchange_s for m in counts)]


def _device_seconds(search: StepSearch) -> tuple[list[int], list[np.ndarray]]:
    """Returns the devices of each kind, and `[L]` the least device-seconds of a micro-batch in each layer on it."""
    devices = [hosts.num_devices for hosts in search.options.cluster.kinds]
    least: list[np.ndarray] = []
    for kind in range(len(devices)):
        own = [p for p, submesh in enumerate(search.submeshes) if submesh.kind == kind]
        each = [search.least_layer_s(p)[0] * search.submeshes[p].num_devices for p in own]
        least.append(np.min(each, axis=0))
    return devices, least


def _with_others(
    options: PipelineOptions, main: StepSearch, found: FoundDivision, schedule: Schedule, kinds: Sequence[int]
) -> ChosenReplicas | None:
    """Adds replicas on other kinds to a division of the main kind; None where none of them fits."""
    count, cluster, size = main.num_microbatches, options.cluster, len(found.stages)
    staged, _ = main.staged([stage.start for stage in found.stages])
    part = replica_part(staged)
    in_flight = tuple(kept_microbatches(schedule, size - i, count) for i in range(size))
    submeshes = tuple(main.submeshes[stage.submesh]._replace(kind=kinds[0]) for stage in found.stages)
    replicas = [ChosenReplica(kinds[0], submeshes, tuple(entry.in_flight for entry in found.entries))]
    seconds = [replica_part_s(_times(cluster, staged, found.layouts, submeshes, count), schedule, count, 0.0)]
    for kind in kinds[1:]:
        own = even_submeshes(cluster, kind, size)
        if own is None:
            continue
        try:
            layouts = [
                solve_replica_stage(options, part, i, own[i], in_flight[i], main.progress.stage_limit_s())
                for i in range(size)
            ]
        except InfeasibleError:
            continue
        exchange_s = weights_out_s(cluster, part, layouts, submeshes, own) + sums_in_s(cluster, part, submeshes, own)
        replicas.append(ChosenReplica(kind, own, in_flight))
        seconds.append(
            replica_part_s(_times(cluster, staged, layouts, own, count), schedule, count, exchange_s * (len(kinds) - 1))
        )
    if len(replicas) == 1 or len(replicas) > count:
        return None
    counts = balanced_microbatches(seconds, count)
    end_s = max(layout.end_s for layout in found.layouts)
    step_s = max(row[m] for row, m in zip(seconds, counts, strict=True)) + end_s
    return ChosenReplicas(count, schedule, found.stages, tuple(replicas), step_s)


def solve_replica_stage(
    options: PipelineOptions, part: StagedStep, stage: int, submesh: Submesh, in_flight: int, time_limit_s: float
) -> StageLayout:
    """Finds how a stage of a replica that keeps no state runs on a submesh of the cluster, in some time."""
    variants = StageVariants(options, part, stage, submesh, in_flight, is_donated=False, time_limit_s=time_limit_s)
    return variants.chosen(())


def _times(
    cluster: Cluster, staged: StagedStep, layouts: Sequence[StageLayout], submeshes: Sequence[Submesh], count: int
) -> StageTimes:
    seconds = np.array([(layout.seconds - layout.end_s) / count for layout in layouts])
    return StageTimes(seconds * (1 - BACKWARD_SHARE), seconds * BACKWARD_SHARE, *sends_s(staged, cluster, submeshes))


def _of_kind(options: PipelineOptions, kind: int) -> PipelineOptions:
    cluster = options.cluster
    devices = (cluster.devices[kind],) if cluster.devices else ()
    one_kind = Cluster([cluster.kinds[kind]], cluster.inside, cluster.between, devices)
    return replace(options, cluster=one_kind, pipeline=replace(options.pipeline, residuals=("keep",)))
