"""What computing is made of: products at some share of the peak rate, and all else, which memory traffic bounds."""

from typing import NamedTuple

from search_spaces.sharding.base import Layout
from search_spaces.sharding.graph import Graph, Vertex, is_contraction
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.opaque.operations import opaque_of


class Computing(NamedTuple):
    """One device's arithmetic and memory traffic in one step.

    Attributes:
      products_s: seconds of products of matrices, convolutions, and kernels of users such as attention.
      products_share: of the peak rate of arithmetic that these reach, from 0 to 1.
      traffic_s: seconds of all other operations.
      traffic_share: of the memory's peak bandwidth that these reach, from 0 to 1.
    """

    products_s: float
    products_share: float
    traffic_s: float
    traffic_share: float


def is_product(vertex: Vertex) -> bool:
    """Tells whether an operation counts as a product: what a step spends its arithmetic on."""
    return is_contraction(vertex) or opaque_of(vertex) is not None


def computing_of(graph: Graph, layout: Layout, node_costs: NodeCosts) -> Computing:
    """Returns what computing with a layout is made of."""
    hardware = node_costs.hardware
    products_s = products_at_peak_s = traffic_s = traffic_at_peak_s = 0.0
    for vertex, strategy in zip(graph.vertices, layout.strategies, strict=True):
        seconds = node_costs.chosen_compute_s(vertex, strategy)
        traffic_s += node_costs.chosen_keeping_s(vertex, layout)
        if not seconds:
            continue
        work = node_costs.work(vertex, strategy)
        if is_product(vertex):
            products_s += seconds
            products_at_peak_s += vertex.weight * work.flops / hardware.peak_flops_per_s(work.dtype)
        else:
            traffic_s += seconds
            traffic_at_peak_s += vertex.weight * work.num_bytes / hardware.memory_bytes_per_s
    return Computing(
        products_s, _share(products_at_peak_s, products_s), traffic_s, _share(traffic_at_peak_s, traffic_s)
    )


def _share(at_peak_s: float, seconds: float) -> float:
    return min(at_peak_s / seconds, 1.0) if seconds else 0.0
