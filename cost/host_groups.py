"""Hosts that are alike, the parts of a cluster that can work together, and the shapes of meshes of their devices.

`cost/clusters.py` joins hosts that are alike to a cluster. A mesh of given devices has each physically distinct shape
once.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cost.base import Hardware, Link
from cost.networks import Network
from cost.presets import device_and_network
from cost.real_numbers import whole_number


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
        check_link("Hosts.inside", self.inside)

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
        device, network = known_network(self)
        own_part = device if network is None else network.share(device, self.devices)
        return dataclasses.replace(own_part, links={})


def known_network(hosts: Hosts) -> tuple[Hardware, Network | None]:
    """Returns a device without links, and what is known of how the host's devices are connected."""
    if isinstance(hosts.hardware, Hardware):
        return hosts.hardware, None
    device, network = device_and_network(hosts.hardware)
    return device, dataclasses.replace(network, num_devices=hosts.devices)


def check_link(name: str, link: Any) -> None:
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
