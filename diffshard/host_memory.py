"""Memory of hosts that devices copy to and from by themselves: its name in JAX, and what it takes to plan for it."""

from collections.abc import Iterable
from typing import Any

from cost.base import Hardware

HOST_MEMORY = "pinned_host"
"""JAX's name of it."""


def check_host_memory(option: str, hardware: Iterable[Hardware], devices: Iterable[Any], advice: str) -> None:
    """Checks that hardware says how fast it copies to memory of its host, and that devices have such memory.

    Args:
      option: what asks for it, such as '`state` is "offload"', for errors.
      devices: of JAX; none where they are not here.
      advice: what to do where a device has none.

    Raises:
      ValueError: a rate or the memory is missing.
    """
    for one in hardware:
        if one.host_memory_bytes_per_s is None:
            raise ValueError(
                f"{option}, but `hardware` {one.name!r} does not say how fast its devices copy to memory of their "
                "host. Give a `Hardware` with `host_memory_bytes_per_s`."
            )
    for device in devices:
        kinds = {memory.kind for memory in device.addressable_memories()}  # none of a device that is only described
        if kinds and HOST_MEMORY not in kinds:
            raise ValueError(f"{option}, but {device} has no pinned memory of its host, only {sorted(kinds)}. {advice}")
