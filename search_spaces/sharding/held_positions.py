"""How long a schedule holds in memory what collectives bring early or take late.

A schedule depends on what is chosen, and memory has to be known before. So this follows the windows of a program whose
devices do equal shares of each product.
"""

from math import prod
from typing import NamedTuple

import numpy as np

from cost.base import Hardware
from cost.compute import equation_dtype, equation_flops
from search_spaces.sharding.graph import Graph, follows_contraction, is_contraction, leads_to_contraction
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.scheduling import least_window_s
from search_spaces.sharding.windows import windows_around


class HeldPositions(NamedTuple):
    """What a schedule holds in memory for the sake of collectives, by value id.

    Attributes:
      fetch_from: for weights that are gathered early, the position of the gather.
      reduce_until: for products that are reduced late, as the gradients of weights are, the position of the reduction.
    """

    fetch_from: dict[int, int]
    reduce_until: dict[int, int]


def held_positions(graph: Graph, axis_sizes: tuple[int, ...], hardware: Hardware, path: Paths) -> HeldPositions:
    """Returns how long a schedule holds gathered weights before they are read, and gradients before they are reduced.

    Where collectives hold arithmetic, no weight is gathered early, and no gradient reduced late.
    """
    if hardware.exposed_share == 1:
        return HeldPositions({}, {})
    compute_s = np.zeros(len(graph.vertices))
    for vertex in filter(is_contraction, graph.operations()):
        assert vertex.equation is not None
        flops_per_s = hardware.reached_flops_per_s(equation_dtype(vertex.equation)) * prod(axis_sizes)
        compute_s[vertex.index] = equation_flops(vertex.equation) / flops_per_s
    around = windows_around(graph, compute_s, least_window_s(path), num_after=1)
    consumers, is_weight = graph.consumers(), ~follows_contraction(graph)
    is_last = ~leads_to_contraction(graph)
    return HeldPositions(
        {
            value.id: min(int(around[reader.index, 0]) for reader, _ in consumers[value.id])
            for value in graph.values
            if is_weight[value.vertex] and consumers[value.id]
        },
        {
            value.id: int(around[vertex.index, 1])
            for vertex in graph.operations()
            if is_last[vertex.index] and is_contraction(vertex)
            for value in vertex.results
        },
    )
