"""Meshes for which the programs of an experiment are compiled: host devices, which also run them, or absent H100s."""

from collections.abc import Callable, Sequence

from jax.sharding import AxisType, Mesh

from diffshard.checks.targets import gpu_mesh
from experiments.host_devices import AXIS_NAMES, host_mesh


def h100_mesh(shape: Sequence[int]) -> Mesh:
    """Makes a mesh of H100s to compile for; needs the extra `gpu-compile`."""
    mesh = gpu_mesh(dict(zip(AXIS_NAMES[len(shape)], shape, strict=True)))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(shape))


MESHES: dict[str, Callable[[Sequence[int]], Mesh]] = {"host": host_mesh, "h100": h100_mesh}
