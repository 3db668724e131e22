"""How devices are connected, from which the link of each mesh axis follows.

A mesh's axes are listed slowest first, as `jax.make_mesh` and `mesh_utils.create_device_mesh` lay devices out: the last
axis's neighbours are neighbours in the host. An axis whose groups fit in a host of g devices gets the in-host link; one
that crosses hosts shares the host's network with the other groups: a ring with k members in each host gets k/g of the
host's bandwidth. An all-to-all crosses once for each pair of devices, so it gets one device's share only. Where links
were measured they come before such rules: on hosts of 8 V100s a rule that was fitted to other rings is off by 12% in
the median, and by far more in all-reduces between hosts (python -m experiments.collectives).

Which hosts the devices of a mesh are in follows from what JAX knows of each device. A mesh of given devices has each
physically distinct shape once.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cost.base import CollectiveKind, Hardware, Link
from cost.lines import Line


@dataclass(frozen=True)
class SwitchedHost:
    """A host whose devices see each other at one speed, and a network between hosts.

    Attributes:
      device_bytes_per_s: what one device of a ring sends to the next.
      network_bytes_per_s: what one host sends to the others.
      launch_s, hop_s, network_hop_s: a ring's latency is the launch and a hop for each of its steps.
      rings: exceptions to `device_bytes_per_s` where devices are not all alike: from (group size, stride between
        members) to bytes/s of a ring and of an all-to-all.
      measured_lines: of kinds of collectives, which come before the rules: from (devices in a host, devices of the
        axis, stride). Kinds and axes that were not measured follow the rules.
    """

    num_devices: int
    device_bytes_per_s: float
    network_bytes_per_s: float
    launch_s: float
    hop_s: float
    network_hop_s: float
    rings: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    measured_lines: Mapping[tuple[int, int, int], Mapping[CollectiveKind, tuple[Line, ...]]] = field(
        default_factory=dict
    )

    def link(self, size: int, stride: int, num_hosts: int | None = None) -> Link:
        """Returns the link of an axis of `size` devices whose neighbours are `stride` devices apart.

        A group along the axis is in `num_hosts` hosts (or pods); None takes what follows from the stride.
        """
        members = max(1, min(size, self.num_devices // stride)) if stride < self.num_devices else 1
        if num_hosts is not None:
            members = math.ceil(size / num_hosts)
        hosts = math.ceil(size / members)
        latency_s = self.launch_s + (size - hosts) * self.hop_s + (hosts - 1) * self.network_hop_s
        ring, all_to_all = self.rings.get((members, stride), (self.device_bytes_per_s, self.device_bytes_per_s))
        if hosts > 1:
            share = self.network_bytes_per_s / self.num_devices
            ring, all_to_all = min(ring, share * members), min(all_to_all, share)
        lines = self.measured_lines.get((self.num_devices, size, stride), {})
        return Link(latency_s, 1 / ring, {"all_to_all": (Line(latency_s, 1 / all_to_all),), **lines}, hosts)

    def transfers(self) -> tuple[Link, Link]:
        """Returns the links of single transfers: of one device to another in its host, and of one host to another.

        Bytes are those that the device sends, and those that all devices of the host send together.
        """
        return (
            Link(self.launch_s + self.hop_s, _inverse(self.device_bytes_per_s)),
            Link(self.launch_s + self.network_hop_s, _inverse(self.network_bytes_per_s)),
        )

    def with_devices_linked_by(self, inside: Link) -> "SwitchedHost":
        """Returns the same with one link between any two devices of a host, whose bytes are those that one sends."""
        rate = _inverse(inside.s_per_byte)
        return replace(self, device_bytes_per_s=rate, hop_s=inside.latency_s, rings={}, measured_lines={})

    def with_hosts_linked_by(self, between: Link) -> "SwitchedHost":
        """Returns the same with another link from host to host, whose bytes are those that one host sends.

        Lines that were measured inside a host are kept.
        """
        inside = {key: lines for key, lines in self.measured_lines.items() if key[1] * key[2] <= key[0]}
        rate = _inverse(between.s_per_byte)
        return replace(self, network_bytes_per_s=rate, network_hop_s=between.latency_s, measured_lines=inside)


@dataclass(frozen=True)
class TorusPod:
    """A pod of chips in a torus (each mesh axis along one of its dimensions), and a network between pods.

    Attributes:
      wrap: an axis is a ring, not a line, if its size is a multiple of this.
      link_bytes_per_s: one link, one direction; a ring uses both directions at once, the ends of a line only one.
      network_bytes_per_s: one chip's share of the network between pods.
    """

    num_devices: int
    wrap: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    launch_s: float
    hop_s: float
    network_hop_s: float

    def link(self, size: int, stride: int, num_hosts: int | None = None) -> Link:
        """Returns the link of an axis of `size` chips whose neighbours are `stride` chips apart."""
        if (size * stride > self.num_devices) if num_hosts is None else num_hosts > 1:
            latency_s = self.launch_s + (size - 1) * self.network_hop_s
            return Link(latency_s, 1 / self.network_bytes_per_s)
        is_ring = size % self.wrap == 0
        bytes_per_s = self.link_bytes_per_s * (2 if is_ring else 1)
        hops = size // 2 if is_ring else size - 1
        # The middle of a line carries n²/4 of the n² blocks each way; a ring's links a half of that. Our all-to-all
        # counts (n − 1)/n² of the bytes, so the rest of the factor is here.
        busiest = size**2 / 4 if not is_ring else size**2 / 8
        all_to_all = busiest / max(size - 1, 1) / self.link_bytes_per_s
        latency_s = self.launch_s + hops * self.hop_s
        exchange = Line(latency_s, max(all_to_all, 1 / bytes_per_s))
        return Link(latency_s, 1 / bytes_per_s, {"all_to_all": (exchange,)})

    def transfers(self) -> tuple[Link, Link]:
        """Returns the links of one chip to another in its pod, and of one pod to another."""
        return (
            Link(self.launch_s + self.hop_s, _inverse(self.link_bytes_per_s)),
            Link(self.launch_s + self.network_hop_s, _inverse(self.network_bytes_per_s * self.num_devices)),
        )

    def with_hosts_linked_by(self, between: Link) -> "TorusPod":
        """Returns the same with another link from pod to pod."""
        rate = _inverse(between.s_per_byte) / self.num_devices
        return replace(self, network_bytes_per_s=rate, network_hop_s=between.latency_s)


@dataclass(frozen=True)
class SharedProcessor:
    """Simulated devices of one processor: all links are its memory, all devices share its rates.

    Attributes:
      bytes_per_s: at which a ring moves bytes through the memory.
      num_devices: devices that are simulated; None where no link depends on it.
    """

    bytes_per_s: float
    launch_s: float
    hop_s: float
    num_devices: int | None = None

    def link(self, size: int, stride: int, num_hosts: int | None = None) -> Link:
        """Returns the link of an axis of `size` devices, which does not depend on the stride or the hosts."""
        del stride
        latency_s, slope = self.launch_s + (size - 1) * self.hop_s, 1 / self.bytes_per_s
        return Link(latency_s, slope, {"reduce_scatter": (Line(latency_s, 2 * slope),)}, num_hosts or 1)

    def share(self, device: Hardware, num_devices: int) -> Hardware:
        """Returns an equal part of the processor's rates, by dtype, and of its memory."""
        assert isinstance(device.flops_per_s, Mapping)
        return replace(
            device,
            name=device.name if num_devices == 1 else f"{device.name}, shared by {num_devices} devices",
            flops_per_s={dtype: rate / num_devices for dtype, rate in device.flops_per_s.items()},
            memory_bytes_per_s=device.memory_bytes_per_s / num_devices,
            memory_bytes=device.memory_bytes / num_devices,
        )

    def transfers(self) -> tuple[Link, Link]:
        """Returns the links of single transfers, which do not depend on the hosts."""
        link = Link(self.launch_s + self.hop_s, _inverse(self.bytes_per_s))
        return link, link

    def with_hosts_linked_by(self, between: Link) -> SwitchedHost:
        """Returns processors with a network between them."""
        rate = _inverse(between.s_per_byte)
        return SwitchedHost(self.num_devices or 1, self.bytes_per_s, rate, self.launch_s, self.hop_s, between.latency_s)


Network = SwitchedHost | TorusPod | SharedProcessor
"""How the devices of one kind are connected; its `num_devices` are those of a host or pod."""


def links_of(network: Network, mesh_axes: Mapping[str, int], hosts: Mapping[str, int] | None = None) -> dict[str, Link]:
    """Returns the link of each axis of a mesh.

    Args:
      mesh_axes: devices along each axis, slowest first.
      hosts: hosts that a group along each axis is in, where this is known of the devices.
    """
    links: dict[str, Link] = {}
    stride = 1
    for axis, size in reversed(list(mesh_axes.items())):
        links[axis] = network.link(size, stride, None if hosts is None else hosts[axis])
        stride *= size
    return {axis: links[axis] for axis in mesh_axes}


def share_of_host(network: Network, device: Hardware, num_devices: int) -> Hardware:
    """Returns the rates and memory of one of `num_devices` of a host: its own, or its part of a shared processor's."""
    return network.share(device, num_devices) if isinstance(network, SharedProcessor) else device


def _inverse(rate: float) -> float:
    """Returns bytes/s for seconds per byte, and the other way round; what costs nothing is infinitely fast."""
    return math.inf if rate == 0 else 1 / rate


def host_of(device: Any) -> int:
    """Returns a number for the host of a device, or what takes its place in the network.

    It is the number of its process. Accelerators that know their slice have its number: a slice is a pod of TPUs, or
    the GPUs of one host or NVLink domain, which may belong to several processes.
    """
    slice_index = getattr(device, "slice_index", None)
    is_accelerator = getattr(device, "platform", "gpu") != "cpu"
    return device.process_index if slice_index is None or not is_accelerator else slice_index


def hosts_along(mesh: Any) -> dict[str, int]:
    """Returns for each axis of a mesh of devices the hosts that a group along the axis is in, the most of any group."""
    hosts = np.array([host_of(device) for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    return {
        str(name): max(len(set(group)) for group in np.moveaxis(hosts, i, -1).reshape(-1, hosts.shape[i]).tolist())
        for i, name in enumerate(mesh.shape)
    }


def devices_in_host(mesh: Any) -> int:
    """Returns how many devices of a mesh are in the host of its first one."""
    hosts = [host_of(device) for device in mesh.devices.flat]
    return hosts.count(hosts[0])


MOST_AXES = 3
"""Axes of a shape, at most: with a fourth one listing strategies alone can take a minute."""
LEVELS = ("hosts", "local", "mixed")
"""What axes are called by the levels of the hosts that they lead over; see `distinct_shapes`."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def factorisations(number: int, most_factors: int) -> Iterator[tuple[int, ...]]:
    """Yields the ordered factorisations of a number into at most `most_factors` factors above 1.

    >>> list(factorisations(8, 2))
    [(8,), (2, 4), (4, 2)]
    """
    if most_factors < 1:
        return
    yield (number,)
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorisations(number // first, most_factors - 1))


def distinct_shapes(
    num_devices: int, links_of_shape: Callable[[dict[str, int]], Mapping[str, Link]]
) -> list[dict[str, int]]:
    """Returns the physically distinct shapes with named axes, those with few axes first.

    An axis is called "hosts" where each of its devices is in another host, "local" where all of them are in one host,
    and "mixed" where it leads over both; several of a name have a letter each.

    Args:
      num_devices: devices of the mesh.
      links_of_shape: returns the link of each axis of a shape.
    """
    shapes: dict[frozenset, dict[str, int]] = {}
    for sizes in sorted(factorisations(num_devices, MOST_AXES), key=len):
        axes = {f"axis{i}": size for i, size in enumerate(sizes)}
        links = links_of_shape(axes)
        key = frozenset(Counter((size, links[axis]) for axis, size in axes.items()).items())
        if key not in shapes:
            shapes[key] = dict(zip(_names([(size, links[axis]) for axis, size in axes.items()]), sizes, strict=True))
    return list(shapes.values())


def _names(axes: list[tuple[int, Link]]) -> list[str]:
    levels = ["local" if link.num_hosts == 1 else "hosts" if link.num_hosts == size else "mixed" for size, link in axes]
    return [
        level if levels.count(level) == 1 else f"{level}_{_LETTERS[levels[:i].count(level)]}"
        for i, level in enumerate(levels)
    ]
