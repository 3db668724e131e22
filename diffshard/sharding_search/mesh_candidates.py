"""The meshes among which a search chooses where it is given devices instead of a mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from cost.base import Hardware
from cost.clusters import Cluster, checked_devices
from cost.networks import LEVELS, MOST_AXES, distinct_shapes, host_of
from cost.presets import PRESET_NAMES, device_and_network, hardware_of, preset, preset_of_mesh
from cost.real_numbers import whole_number
from diffshard.plans.printing import format_count

Devices = int | Sequence[Any] | Cluster
"""How many devices, JAX devices, or a cluster of one kind."""


class MeshCandidate(NamedTuple):
    """A mesh that a search may choose."""

    mesh: Mesh | AbstractMesh
    hardware: Hardware

    @property
    def axes(self) -> dict[str, int]:
        """Devices along each axis."""
        return dict(self.mesh.shape)


def mesh_candidates(devices: Devices, hardware: Hardware | str | None) -> tuple[MeshCandidate, ...]:
    """Returns a mesh of each physically distinct shape, those with few axes first.

    Args:
      devices: a number, for devices that are not here; JAX devices, such as `jax.devices()`; or a cluster of one kind.
      hardware: the name of a preset; None for the preset of JAX devices, and for a cluster, which has its own.
    """
    if isinstance(devices, Cluster):
        return _of_cluster(devices, hardware)
    if isinstance(hardware, Hardware):
        raise ValueError(
            f"`hardware` {hardware.name!r} has links for the axes of a mesh, but `devices` leaves the axes open. Give "
            "the name of a preset, or `devices=Cluster([Hosts(count, devices=..., hardware=...)], inside=Link(...), "
            "between=Link(...))`."
        )
    if hardware is not None and not isinstance(hardware, str):
        raise TypeError(f"`hardware` must be a preset's name or None, not {type(hardware).__name__}.")
    number = whole_number(devices)
    if number is not None:
        return _of_number(number, hardware)
    if not isinstance(devices, Sequence | np.ndarray) or isinstance(devices, str):
        raise TypeError(
            f"`devices` must be a number of devices, a sequence of JAX devices or a Cluster, not {devices!r}."
        )
    return _of_jax_devices(list(np.asarray(devices, object).flat), hardware)


class LevelNames:
    """The names that specs may have for axes of meshes that are not chosen yet: levels of the hosts.

    A level stands for all axes of it, and for none where a mesh has none; "local_a" is one of several axes inside a
    host.
    """

    names = (*LEVELS, *(f"{level}_{letter}" for level in LEVELS for letter in "abc"[:MOST_AXES]))

    @staticmethod
    def on_axes(spec: PartitionSpec, axis_names: Sequence[str]) -> PartitionSpec:
        """Returns a spec of such names on the axes of a mesh."""

        def axes_of(name: str) -> list[str]:
            return [axis for axis in axis_names if axis == name or (name in LEVELS and axis.startswith(f"{name}_"))]

        def entry(names: Any) -> Any:
            if names is None or names is PartitionSpec.UNCONSTRAINED:
                return names
            return tuple(axis for name in ([names] if isinstance(names, str) else names) for axis in axes_of(name))

        return PartitionSpec(*map(entry, spec))


def mesh_of_all(devices: Any) -> Mesh | AbstractMesh | None:
    """Returns a mesh of devices whatever they are, to tell their processes of an error: None where they are unclear."""
    if isinstance(devices, Cluster):
        devices = _here(devices)
    if whole_number(devices) is not None or devices == []:
        return AbstractMesh((), ())  # devices that are not here belong to no process
    try:
        return Mesh(np.asarray(devices, object).reshape(-1), ("all",))
    except Exception:
        return None


def _here(cluster: Cluster) -> list[Any]:
    return [device for of_kind in cluster.devices for in_host in of_kind for device in in_host]


def _of_number(number: int, name: str | None) -> tuple[MeshCandidate, ...]:
    if number < 1:
        raise ValueError(f"`devices` must be 1 or more, not {number}.")
    if name is None:
        raise ValueError(
            f"`hardware` must be given for a number of devices, which says nothing of their kind: one of "
            f"{', '.join(PRESET_NAMES)}."
        )
    in_host = device_and_network(name)[1].num_devices
    if in_host is not None and number > in_host and number % in_host:
        raise ValueError(
            f"`devices` {number} does not fill hosts of {in_host}, the usual number for {name!r}. Give whole hosts, or "
            f"say how they are: `devices=Cluster([Hosts(count, devices=..., hardware={name!r})])`."
        )
    return _candidates(number, lambda axes: preset(name, axes), _abstract_mesh)


def _of_cluster(cluster: Cluster, hardware: Hardware | str | None) -> tuple[MeshCandidate, ...]:
    if hardware is not None:
        raise ValueError("`hardware` must be None for a Cluster, which has that of its hosts.")
    if len(cluster.kinds) > 1:
        names = ", ".join(
            f"{format_count(hosts.count, 'host')} of {hosts.devices} x {hosts.name}" for hosts in cluster.kinds
        )
        raise ValueError(f"`devices` must be a cluster of one kind for one mesh over all of them, not of {names}.")
    here = _here(cluster)
    make_mesh = (lambda axes: _mesh(here, axes)) if here else _abstract_mesh
    return _candidates(cluster.num_devices, lambda axes: cluster.hardware(0, axes), make_mesh)


def _of_jax_devices(devices: list[Any], name: str | None) -> tuple[MeshCandidate, ...]:
    for device in checked_devices(devices):
        if not hasattr(device, "device_kind"):
            raise TypeError(f"`devices` must be JAX devices, such as `jax.devices()`, not {device!r}.")
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"`devices` must be of one kind for one mesh, not of {', '.join(kinds)}.")
    by_host = sorted(devices, key=host_of)  # neighbours are neighbours in the host, otherwise in the order given

    def price(axes: dict[str, int]) -> Hardware:
        mesh = _mesh(by_host, axes)
        return hardware_of(mesh) if name is None else preset_of_mesh(name, mesh)

    return _candidates(len(devices), price, lambda axes: _mesh(by_host, axes))


def _candidates(
    num_devices: int,
    price: Callable[[dict[str, int]], Hardware],
    make_mesh: Callable[[dict[str, int]], Mesh | AbstractMesh],
) -> tuple[MeshCandidate, ...]:
    shapes = distinct_shapes(num_devices, lambda axes: price(axes).links)
    return tuple(MeshCandidate(make_mesh(axes), price(axes)) for axes in shapes)


def _abstract_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _mesh(devices: list[Any], axes: Mapping[str, int]) -> Mesh:
    sizes = tuple(axes.values())
    assert math.prod(sizes) == len(devices)
    if devices[0].platform == "tpu":  # neighbours along an axis are neighbours in the torus
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        placed = np.array(devices, object).reshape(sizes)
    return Mesh(placed, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))
