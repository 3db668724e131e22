"""The rates that programs reach on GPUs in hosts, and which links a collective takes.

A datasheet's rate is not what a kernel reaches, so a timeline is priced at the share of it that a `Hardware` names.
Links come in two classes: those inside a host and those between hosts. A group of devices that stays in a host takes
the first; one with a single device in each host takes the second; a ring over several devices in several hosts takes
both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost.base import CollectiveKind, Hardware
from cost.collectives import collective_s
from cost.networks import SwitchedHost

INSIDE_HOST = "links inside a host"
BETWEEN_HOSTS = "links between hosts"
HOST_MEMORY = "link to host memory"

# What one GPU of an HGX H100 sends: NVLink at 80% of 450 GB/s, and its own InfiniBand card at 90% of 50 GB/s.
# Latencies are those of NCCL's tuning model, as in `cost.presets`.
H100_HOST = SwitchedHost(8, 360e9, 8 * 45e9, launch_s=14e-6, hop_s=1.9e-6, network_hop_s=4e-6)
# PCI Express 5.0 with 16 lanes has 63 GB/s; copies to pinned memory reach about 80% of it.
HOST_MEMORY_BYTES_PER_S = 50e9


@dataclass(frozen=True)
class AchievableRates:
    """What one device and its links reach.

    Attributes:
      device: rates of arithmetic by dtype and of memory, what kernels reach of them, and what a launch takes; its links
        are not used.
      host: the devices that share a host, and the rates inside and between hosts. Devices are numbered row-major over
        the mesh, and each `host.num_devices` neighbours in that order share a host.
      host_memory_bytes_per_s: of copies between the device's and the host's memory.
    """

    device: Hardware
    host: SwitchedHost = H100_HOST
    host_memory_bytes_per_s: float = HOST_MEMORY_BYTES_PER_S

    def kernel_s(self, flops: Mapping[str, float], num_bytes: float) -> float:
        """Returns a kernel's seconds by roofline: launch, and the slower of its arithmetic and its memory traffic."""
        arithmetic_s = sum(count / self.device.reached_flops_per_s(dtype) for dtype, count in flops.items())
        return self.device.kernel_launch_s + max(arithmetic_s, num_bytes / self.device.reached_memory_bytes_per_s)

    def collective_s(self, kind: CollectiveKind, num_bytes: float, groups: Sequence[Sequence[int]]) -> float:
        """Returns seconds of one collective alone on its links.

        Args:
          kind: what it does.
          num_bytes: the full size within one group, as `cost.collectives` counts it.
          groups: devices that take part together; for a permute pairs of source and target.
        """
        size, members, _ = self._widest(groups)
        if kind == "collective_permute":
            size, members = 2, 2 if members == 2 else 1
        link = self.host.link(size, max(1, self.host.num_devices // members))
        return float(collective_s(kind, num_bytes, size, link))

    def links(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Returns the classes of links that a collective over these groups takes."""
        _, members, num_hosts = self._widest(groups)
        inside = (INSIDE_HOST,) if members > 1 else ()
        return (*inside, BETWEEN_HOSTS) if num_hosts > 1 else (INSIDE_HOST,)

    def _widest(self, groups: Sequence[Sequence[int]]) -> tuple[int, int, int]:
        """Returns (devices, most devices in one host, hosts) of the group that spans the most hosts."""
        extents = []
        for group in groups:
            hosts = Counter(device // self.host.num_devices for device in set(group))
            extents.append((len(set(group)), max(hosts.values()), len(hosts)))
        return max(extents, key=lambda extent: (extent[2], -extent[1]))


def achievable_rates(hardware: Hardware, *, host: SwitchedHost = H100_HOST) -> AchievableRates:
    """Returns the rates at which programs run.

    Args:
      hardware: the device's rates and the shares of them that programs reach.
      host: the links, with the rates that collectives reach.
    """
    return AchievableRates(hardware, host)
