"""From the memory use of a choice, which numbers positions and values, to a plan's, which numbers operations."""

import numpy as np

from diffshard.plans.base import LEAST_SHARE_AT_PEAK, HeldTensor, MemoryProfile
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.memory_use import MemoryUse


def memory_profile_of(graph: Graph, memory: MemoryUse) -> MemoryProfile:
    """Returns the memory of a step as a plan says it: for each operation at which it changes the bytes in use.

    Positions without an operation, such as the end of a loop, count as the operation before them; of several changes at
    one operation the largest stays, so that the peak is exact.
    """
    positions = [vertex.position for vertex in graph.vertices]  # ascending, as vertices are in program order
    running = np.searchsorted(positions, memory.times - 1, side="right") - 1
    largest = {-1: 0.0}
    for index, num_bytes in zip(running.tolist(), memory.num_bytes.tolist(), strict=True):
        largest[index] = max(largest.get(index, 0.0), num_bytes)
    peak_bytes = float(np.max(memory.num_bytes))
    held = (
        HeldTensor(graph.values[a.value].vertex, graph.values[a.value].result, a.num_bytes, a.is_copy)
        for a in memory.at_peak
        if a.num_bytes >= LEAST_SHARE_AT_PEAK * peak_bytes
    )
    return MemoryProfile(tuple(sorted(largest.items())), tuple(held))
