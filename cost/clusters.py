"""Clusters whose hosts may be of different kinds: which parts of them can work together, and how fast they are linked.

A part (a submesh) has devices of one kind, as in Alpa: a power of two of the devices of one host, or whole hosts. So
every mesh over a submesh has links that follow from the levels of a host, as on a cluster of one kind
(`cost/networks.py`). Nothing here needs devices; `Cluster.from_devices` describes those that are here.

Source: Alpa, Zheng et al. (2022), section 5.2, for the shapes of submeshes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cost.base import Hardware, Link
from cost.networks import Network, SwitchedHost, host_of, links_of, share_of_host
from cost.presets import device_and_network, preset_name_of
from cost.real_numbers import AmountOrInf, checked_number, whole_number

_FREE = Link(0.0, 0.0)


class Submesh(NamedTuple):
    """Devices of one kind that work together.

    Attributes:
      kind: the index of the kind of devices.
      num_devices: how many.
      shape: hosts, and devices in each of them.
    """

    kind: int
    num_devices: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hosts:
    """Hosts that are alike.

    Attributes:
      count: how many hosts.
      devices: devices in each of them.
      hardware: of a device: the name of a preset, or a `Hardware`, whose links are not read.
      inside: the link between two devices of a host; None takes that of the cluster, or else of the preset.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """

    count: int
    devices: int
    hardware: Hardware | str
    inside: Link | None = None

    def __post_init__(self):
        for name in ("count", "devices"):
            if (whole_number(getattr(self, name)) or 0) < 1:
                raise ValueError(
                    f"`Hosts.{name}` must be a whole number, 1 or more, not {getattr(self, name)!r}. Leave out hosts "
                    "that have no devices."
                )
        if isinstance(self.hardware, str):
            device_and_network(self.hardware)
        elif not isinstance(self.hardware, Hardware):
            raise TypeError(
                f"`Hosts.hardware` must be a Hardware or the name of a preset, not {type(self.hardware).__name__}."
            )
        _check_link("Hosts.inside", self.inside)

    @property
    def num_devices(self) -> int:
        """Devices in all of the hosts."""
        return self.count * self.devices

    @property
    def name(self) -> str:
        """The name of the hardware."""
        return self.device.name

    @property
    def device(self) -> Hardware:
        """One device, without links."""
        device, network = _known_network(self)
        own_part = device if network is None else share_of_host(network, device, self.devices)
        return dataclasses.replace(own_part, links={})


def _known_network(hosts: Hosts) -> tuple[Hardware, Network | None]:
    """Returns a device without links, and what is known of how the host's devices are connected."""
    if isinstance(hosts.hardware, Hardware):
        return hosts.hardware, None
    device, network = device_and_network(hosts.hardware)
    return device, dataclasses.replace(network, num_devices=hosts.devices)


def _check_link(name: str, link: Any) -> None:
    """Checks the link of single transfers; None is one, too.

    Raises:
      TypeError: it is no link.
      ValueError: it has more than its own line.
    """
    if link is None:
        return
    if not isinstance(link, Link):
        raise TypeError(f"`{name}` must be a Link(latency_s, s_per_byte) or None, not {link!r}.")
    if link.by_kind or link.num_hosts != 1:
        raise ValueError(f"`{name}` must be a Link of one line: neither `by_kind` nor `num_hosts` is read.")


@dataclass(frozen=True)
class Cluster:
    """Hosts of one kind or of several, and their links.

    >>> cluster = Cluster(
    ...     [Hosts(2, devices=8, hardware="a100"), Hosts(2, devices=4, hardware="t4")], between=Link(10e-6, 8e-11)
    ... )
    >>> cluster.num_devices
    24

    A kind is a hardware with a number of devices in a host: equal groups of hosts are one kind.

    Attributes:
      hosts: groups of hosts; a kind is an index into `kinds`, not into these.
      inside: the link between two devices of a host, of all kinds that have none of their own. Bytes are those that one
        device sends. None takes what is usual for a preset.
      between: the link between two hosts. Bytes are those that one host sends, all its devices together. None takes
        what is usual for a preset, if all kinds have the same.
      devices: JAX devices by kind, host and place in the host; `()` for a description of devices that are not here.

    Raises:
      TypeError, ValueError: an argument breaks a rule; hosts of one kind disagree on the link inside; a link is not
        given and does not follow from a preset; devices are not as many as the hosts have.
    """

    hosts: Sequence[Hosts]
    inside: Link | None = None
    between: Link | None = None
    devices: tuple[tuple[tuple[Any, ...], ...], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self):
        hosts = (self.hosts,) if isinstance(self.hosts, Hosts) else tuple(self.hosts)
        for group in hosts:
            if not isinstance(group, Hosts):
                raise TypeError(f"`Cluster.hosts` must be `Hosts(count, devices=..., hardware=...)`, not {group!r}.")
        if not hosts:
            raise ValueError("`Cluster.hosts` is empty; give at least one `Hosts(count, devices=..., hardware=...)`.")
        object.__setattr__(self, "hosts", hosts)
        _check_link("Cluster.inside", self.inside)
        _check_link("Cluster.between", self.between)
        _ = self._networks  # raises where a link is missing
        self._check_devices()

    @staticmethod
    def from_devices(
        devices: Sequence[Any],
        *,
        hardware: Hardware | str | None = None,
        inside: Link | None = None,
        between: Link | None = None,
    ) -> "Cluster":
        """Describes JAX devices, grouped by the hosts that they are in and by their kinds.

        Args:
          devices: such as `jax.devices()`.
          hardware: of all devices; None takes the preset of each device's kind.
          inside: as in `Cluster`.
          between: as in `Cluster`.

        Raises:
          TypeError: `devices` are none.
          ValueError: there are no devices, one is there twice, a device's kind has no preset, or as `Cluster`.
        """
        devices = checked_devices(devices)
        by_host: dict[Any, list[Any]] = {}
        for device in devices:
            of_device = preset_name_of(device.device_kind) if hardware is None else hardware
            by_host.setdefault((of_device, host_of(device)), []).append(device)
        by_kind: dict[Any, list[tuple[Any, ...]]] = {}
        for (of_device, _), in_host in by_host.items():
            by_kind.setdefault((of_device, len(in_host)), []).append(tuple(in_host))
        hosts = [Hosts(len(of_kind), in_host, of_device) for (of_device, in_host), of_kind in by_kind.items()]
        return Cluster(hosts, inside, between, tuple(tuple(of_kind) for of_kind in by_kind.values()))

    @cached_property
    def kinds(self) -> tuple[Hosts, ...]:
        """The kinds, each with all of its hosts.

        Raises:
          ValueError: hosts of one kind disagree on the link inside.
        """
        kinds: dict[Any, Hosts] = {}
        for group in self.hosts:
            key = group.hardware if isinstance(group.hardware, Hardware) else group.name, group.devices
            other = kinds.get(key)
            if other is not None and other.inside != group.inside:
                raise ValueError(
                    f"`Cluster.hosts` disagree on the link inside of hosts of {group.devices} x {group.name}: "
                    f"{other.inside} and {group.inside}. Give both the same `Hosts.inside`."
                )
            kinds[key] = group if other is None else dataclasses.replace(other, count=other.count + group.count)
        return tuple(kinds.values())

    def _check_devices(self) -> None:
        """Checks that there is one JAX device for each device of each host, or none at all."""
        if isinstance(self.devices, tuple) and not self.devices:
            return
        wanted = [[kind.devices] * kind.count for kind in self.kinds]
        try:
            given = [[len(host) for host in kind] for kind in self.devices]
            flat = [device for kind in self.devices for host in kind for device in host]
        except TypeError:
            given, flat = None, []
        if given != wanted:
            sizes = "; ".join(f"{kind.count} of {kind.devices}" for kind in self.kinds)
            raise ValueError(
                f"`Cluster.devices` must have for each kind its hosts, and for each host its devices, here {sizes}: "
                f"such as `(((device, ...), ...),)`, or `Cluster.from_devices(devices)`. It is {self.devices!r}."
            )
        if len({id(device) for device in flat}) < len(flat):
            raise ValueError(f"`Cluster.devices` has a device twice; give each one once. It is {self.devices!r}.")

    @property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(hosts.num_devices for hosts in self.kinds)

    def submeshes(self, kind: int | None = None) -> tuple[Submesh, ...]:
        """Returns the parts that a stage may have: powers of two within a host, a whole host, and several whole hosts.

        Args:
          kind: the index of a kind; None for all kinds.

        Raises:
          ValueError: there is no such kind.
        """
        if kind is None:
            return tuple(submesh for k in range(len(self.kinds)) for submesh in self.submeshes(k))
        hosts = self._kind(kind)
        in_host = [2**power for power in range(hosts.devices.bit_length()) if 2**power < hosts.devices]
        within = [Submesh(kind, count, (1, count)) for count in in_host]
        whole = [Submesh(kind, n * hosts.devices, (n, hosts.devices)) for n in range(1, hosts.count + 1)]
        return (*within, *whole)

    def hardware(self, kind: int, shape: Mapping[str, int]) -> Hardware:
        """Returns the hardware of a mesh over a submesh: a device of the kind with a link for each axis.

        Args:
          kind: the index of a kind.
          shape: devices along each axis of the mesh, slowest first, whose product is that of a submesh. The last axis's
            neighbours are neighbours in the host.

        Raises:
          ValueError: there is no such kind, or no submesh of so many devices.
        """
        hosts = self._kind(kind)
        sizes = [submesh.num_devices for submesh in self.submeshes(kind)]
        for axis, size in shape.items():
            if (whole_number(size) or 0) < 1:
                raise ValueError(f"`shape` must have a whole number of devices along {axis!r}, not {size!r}.")
        num_devices = math.prod(shape.values())
        if num_devices not in sizes:
            raise ValueError(
                f"`shape` {dict(shape)} has {num_devices} devices, but the submeshes of {hosts.name} have "
                f"{', '.join(map(str, sizes))}."
            )
        return dataclasses.replace(hosts.device, links=links_of(self._networks[kind], shape))

    def link_s(self, num_bytes: float, sender: Submesh, receiver: Submesh, *, in_one_host: bool | None = None) -> float:
        """Returns the seconds of sending an array from one submesh to another one, of which all devices send a part.

        Each of n senders sends 1/n of the array, at the same time as the others, and each of m receivers gets 1/m. The
        slowest decides: the devices of one side, those of the other, or the connections of the hosts of either side.

        Args:
          num_bytes: of the whole array.
          sender: a submesh.
          receiver: another submesh.
          in_one_host: whether both are in the same host; None takes that they are if one host has so many devices.

        Raises:
          ValueError: the bytes are negative or no number; there is no such kind; `in_one_host` is true of submeshes
            that one host does not have.
        """
        number = checked_number("num_bytes", num_bytes, AmountOrInf)
        sides = [(side, self._kind(side.kind), self._networks[side.kind].transfers()) for side in (sender, receiver)]
        fits = sender.kind == receiver.kind and sender.num_devices + receiver.num_devices <= sides[0][1].devices
        if in_one_host and not fits:
            raise ValueError(f"`in_one_host` is true, but no host has the devices of both {sender} and {receiver}.")
        inside_s = max(inside.s_per_byte * number / side.num_devices for side, _, (inside, _) in sides)
        if fits if in_one_host is None else in_one_host:
            return sides[0][2][0].latency_s + inside_s
        betweens = [
            (self.between or between, math.ceil(side.num_devices / hosts.devices))
            for side, hosts, (_, between) in sides
        ]
        between_s = max(between.s_per_byte * number / num_hosts for between, num_hosts in betweens)
        return max(between.latency_s for between, _ in betweens) + max(inside_s, between_s)

    def _kind(self, kind: int) -> Hosts:
        number = whole_number(kind)
        if number is None or not 0 <= number < len(self.kinds):
            names = ", ".join(f"{i}: {hosts.name}" for i, hosts in enumerate(self.kinds))
            raise ValueError(f"`kind` must be the index of a kind ({names}), not {kind!r}.")
        return self.kinds[number]

    @cached_property
    def _networks(self) -> tuple[Network, ...]:
        """The network of each kind."""
        networks = [self._network(hosts) for hosts in self.kinds]
        if self.between is None and len(self.kinds) > 1:
            links = {network.transfers()[1] for network in networks}
            if len(links) > 1:
                names = " and ".join(dict.fromkeys(hosts.name for hosts in self.kinds))
                raise ValueError(
                    f"`Cluster.between` must be given: hosts of {names} have different networks, so that the link "
                    "between them does not follow. Write `between=Link(latency_s, s_per_byte)` for what one host sends."
                )
        return tuple(networks)

    def _network(self, hosts: Hosts) -> Network:
        _, network = _known_network(hosts)
        inside = self.inside if hosts.inside is None else hosts.inside
        has_many_hosts = sum(group.count for group in self.hosts) > 1
        if network is None and inside is None and hosts.devices > 1:
            raise ValueError(
                f"`Cluster.inside` must be given for {hosts.name}, which is no preset: the link between two devices of "
                "a host."
            )
        if network is None and self.between is None and has_many_hosts:
            raise ValueError(
                f"`Cluster.between` must be given for {hosts.name}, which is no preset: the link between two hosts."
            )
        if network is not None and inside is None:
            return network if self.between is None else network.with_hosts_linked_by(self.between)
        own = (_FREE, _FREE) if network is None else network.transfers()
        host = SwitchedHost(hosts.devices, math.inf, math.inf, launch_s=0.0, hop_s=0.0, network_hop_s=0.0)
        return host.with_devices_linked_by(inside or own[0]).with_hosts_linked_by(self.between or own[1])


def checked_devices(devices: Any) -> list[Any]:
    """Returns JAX devices as a list.

    Raises:
      TypeError: they are no sequence.
      ValueError: there are none, or one is there twice.
    """
    if not isinstance(devices, Sequence | np.ndarray) or isinstance(devices, str):
        raise TypeError(f"`devices` must be JAX devices, such as `jax.devices()`, not {devices!r}.")
    found = list(np.asarray(devices, object).flat)
    if not found:
        raise ValueError("`devices` is empty; give JAX devices, such as `jax.devices()`.")
    if len({id(device) for device in found}) < len(found):
        raise ValueError("`devices` has a device twice.")
    return found
