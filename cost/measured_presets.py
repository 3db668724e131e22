"""Presets whose products and links are as devices were measured, for predictions that are held against devices.

There are two worlds. The presets of `cost.presets` price products at one share of the datasheet's rate, and NVLink by a
rule; predictions with them were held against compiled programs, which were played at these same rates. Here products
follow a law of their shapes and collectives inside a host lines, all fitted to measured kernels.
"""

import dataclasses
import math
from collections.abc import Mapping

from cost.base import Hardware
from cost.measured_rates import measured_lines, measured_rates
from cost.networks import SwitchedHost, links_of
from cost.presets import device_and_network

MEASURED: tuple[str, ...] = ("a100", "h100", "h200", "b200")
"""Presets of which kernels were measured."""


def measured_preset(name: str, mesh_axes: Mapping[str, int]) -> Hardware:
    """Returns the preset of a GPU with products, attention and collectives inside a host as they were measured.

    Args:
      name: one of `MEASURED`.
      mesh_axes: sizes of the mesh's axes, slowest first, as for `cost.presets.preset`.

    Raises:
      ValueError: nothing was measured of this hardware.
    """
    device, network = measured_device_and_network(name)
    return dataclasses.replace(device, links=links_of(network, mesh_axes))


def measured_device_and_network(name: str) -> tuple[Hardware, SwitchedHost]:
    """Returns the device without links, and how such devices are connected; raises as `measured_preset`."""
    if name not in MEASURED:
        raise ValueError(f"`name` {name!r} was not measured; there are {', '.join(MEASURED)}.")
    device, network = device_and_network(name)
    assert isinstance(network, SwitchedHost)
    rates = measured_rates(name)
    rates = dataclasses.replace(rates, attention=rates.attention or device.measured.attention)
    return dataclasses.replace(device, measured=rates), with_measured_lines(network, name)


def with_measured_lines(network: SwitchedHost, name: str) -> SwitchedHost:
    """Returns a network whose collectives inside a host take the measured lines, whatever devices of it they join."""
    lines = {
        (network.num_devices, size, stride): by_kind
        for size, by_kind in measured_lines(name).items()
        for stride in (2**power for power in range(int(math.log2(network.num_devices // size)) + 1))
    }
    return dataclasses.replace(network, measured_lines=lines)
