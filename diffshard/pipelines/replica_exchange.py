"""What the replicas of a pipeline exchange in a step, and how long that takes: weights go out, sums come in.

Weights go out while the main replica computes already, and sums come in while it still does. The main replica's hosts
send to one replica after the other.
"""

from collections.abc import Sequence
from math import prod

from cost.clusters import Cluster
from cost.collectives import collective_s
from cost.host_groups import Submesh
from diffshard.pipelines.options import mesh_shape
from diffshard.pipelines.stage_search import StageLayout
from search_spaces.pipelines.forward_backward import num_bytes
from search_spaces.pipelines.stage_programs import StagedStep


def weights_out_s(
    cluster: Cluster,
    part: StagedStep,
    layouts: Sequence[StageLayout],
    main: Sequence[Submesh],
    replica: Sequence[Submesh],
) -> float:
    """Returns the seconds until a replica has the weights: the copies, their gathers, and what begins its step.

    Args:
      cluster: the devices.
      part: what the replica runs, of `replica_part`.
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
      cluster: the devices.
      part: what the replica runs, of `replica_part`.
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
    parts = prod(shape[axis] for axes in layout.specs.get(key, ()) for axis in axes)
    links = cluster.hardware(submesh.kind, shape).links
    sharing = submesh.num_devices // parts
    return max(float(collective_s("all_gather", size / parts, sharing, links[axis])) for axis in shape)
