"""Where the stages of a pipeline are: their devices, what goes between them, and the arguments that they keep."""

from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.clusters import Cluster
from cost.host_groups import Submesh
from diffshard.base import InfeasibleError
from diffshard.pipelines.cutting import CutStep
from diffshard.pipelines.stage_search import StageLayout
from diffshard.plans.base import Tensor
from search_spaces.pipelines.forward_backward import num_bytes
from search_spaces.pipelines.stage_programs import StagedStep


def place_stages(cluster: Cluster, submeshes: Sequence[Submesh]) -> list[list[int]]:
    """Returns the numbers of the devices of each stage, kind by kind and host by host; the largest are placed first.

    Raises:
      InfeasibleError: the parts of hosts that the stages need do not fit the hosts.
    """
    free: list[list[list[int]]] = []  # by kind and host
    number = 0
    for hosts in cluster.kinds:
        of_kind = []
        for _ in range(hosts.count):
            of_kind.append(list(range(number, number + hosts.devices)))
            number += hosts.devices
        free.append(of_kind)
    numbers: list[list[int]] = [[] for _ in submeshes]
    for i in sorted(range(len(submeshes)), key=lambda i: -submeshes[i].num_devices):
        kind, count = submeshes[i].kind, submeshes[i].num_devices
        in_host = min(count, cluster.kinds[kind].devices)
        hosts = [host for host in free[kind] if len(host) >= in_host][: count // in_host]
        if len(hosts) * in_host < count:
            raise InfeasibleError(
                f"The stages need {[s.num_devices for s in submeshes if s.kind == kind]} devices of hosts of "
                f"{cluster.kinds[kind].devices} x {cluster.kinds[kind].name}, of which there are {len(free[kind])}. "
                "Describe hosts with a power of two of devices, or give another `Pipeline.max_stages`."
            )
        for host in hosts:
            numbers[i] += host[:in_host]
            del host[:in_host]
    return numbers


def mesh_of(cluster: Cluster, numbers: Sequence[int], shape: Mapping[str, int]) -> Mesh | AbstractMesh:
    """Returns the mesh of a stage; an abstract one where the cluster is only described."""
    if not cluster.devices:
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    flat = [device for kind in cluster.devices for host in kind for device in host]
    return Mesh(np.array([flat[n] for n in numbers]).reshape(tuple(shape.values())), tuple(shape))


def sends_s(staged: StagedStep, cluster: Cluster, i: int, one: Submesh, other: Submesh) -> tuple[float, float]:
    """Returns the seconds of what a micro-batch sends from stage i to the next and back."""
    forward = backward = 0.0
    for key, label in staged.makers.items():
        for target in staged.readers.get(key, frozenset()) - {label.stage}:
            if label.kind == "forward" and label.stage <= i < target:
                forward += num_bytes(staged.avals[key])
            if label.kind == "backward" and target <= i < label.stage and not isinstance(key, tuple):
                backward += num_bytes(staged.avals[key])
    return cluster.link_s(forward, one, other), cluster.link_s(backward, other, one)


def arguments_of(step: CutStep, staged: StagedStep, layout: StageLayout, stage: int) -> tuple[Tensor, ...]:
    """Returns the arguments that a stage keeps, with their shardings."""
    return tuple(
        Tensor(path, tuple(array.shape), str(array.dtype), layout.specs.get(key, ((),) * len(array.shape)))
        for path, array, key, home in zip(
            step.traced.paths, step.traced.arrays, staged.inputs, staged.homes, strict=True
        )
        if home == stage
    )
