"""What a choice keeps in memory: how much at each position of the program, and which arrays hold the peak."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.memory import memory_profile, numbered_times
from search_spaces.sharding.memory import Usages


class HeldArray(NamedTuple):
    """An array in memory.

    Attributes:
      value: its id.
      is_copy: whether it is the gathered copy of a value that is stored as well.
      num_bytes: on each device.
    """

    value: int
    is_copy: bool
    num_bytes: float


class MemoryUse(NamedTuple):
    """The memory of a device in one step of a choice.

    Attributes:
      times: `[T]` where it changes, as in the intervals of `Usages`: 0 before the first operation, p + 1 at position p.
      num_bytes: `[T]` in use from each of these times until the next.
      at_peak: what is in memory at the first time of the peak, the largest first; together the peak.
    """

    times: np.ndarray
    num_bytes: np.ndarray
    at_peak: tuple[HeldArray, ...]


def memory_use(usages: Usages, choice: Sequence[int]) -> MemoryUse:
    """Returns the memory that a choice uses.

    Args:
      usages: of the space, K in total.
      choice: `[V]` strategy indices.
    """
    pairs = zip(usages.node, usages.num_bytes, strict=True)
    amounts = np.array([num_bytes[choice[node]] for node, num_bytes in pairs], float)
    if not len(amounts):
        return MemoryUse(np.zeros(1, int), np.zeros(1), ())
    times, interval = numbered_times(np.array(usages.interval, int))
    num_bytes = memory_profile(interval, amounts[:, None], len(times))[:, 0]
    peak = int(np.argmax(num_bytes))
    is_held = (interval[:, 0] <= peak) & (peak < interval[:, 1]) & (amounts > 0)
    held = [HeldArray(usages.value[k], usages.is_copy[k], float(amounts[k])) for k in np.flatnonzero(is_held)]
    return MemoryUse(times, num_bytes, tuple(sorted(held, key=lambda array: -array.num_bytes)))
