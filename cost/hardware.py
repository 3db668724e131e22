"""Hardware as data: what one device can do and what each mesh axis's links cost."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A mesh axis's link by the α–β model: a message of b bytes takes `latency_s + b * s_per_byte` seconds."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Hardware:
    """One device and the links between devices.

    Attributes:
      name: for people.
      flops_per_s: peak rate by dtype name ("float32", "bfloat16", ...), or one number for all.
      memory_bytes_per_s: bandwidth of the device's memory.
      memory_bytes: size of the device's memory.
      links: the link of each mesh axis.
    """

    name: str
    flops_per_s: Mapping[str, float] | float
    memory_bytes_per_s: float
    memory_bytes: float
    links: Mapping[str, Link]
