"""Which hosts the devices of a mesh are in, from what JAX knows of each device."""

from collections.abc import Mapping
from typing import Any

import numpy as np


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


def has_many_hosts(hosts: Mapping[str, int]) -> bool:
    """Returns whether some axis leads from host to host."""
    return any(count > 1 for count in hosts.values())
