"""What a step's objective reads: seconds of arithmetic, and of collectives on each link, as quantities of a choice.

The problem of a space has one sum of them, in which collectives that can overlap with arithmetic count at a fixed
share. Here they are apart, so that an objective combines them as it likes.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from cost.base import Problem
from cost.edges import map_by_key, map_distinct, merge_edges
from cost.quantities import LiveMemory, Quantities, Quantity, with_weights
from search_spaces.sharding.base import Edge, Layout, Node
from search_spaces.sharding.coded_sums import finished_steps
from search_spaces.sharding.custom_calls.operations import custom_call_of
from search_spaces.sharding.edge_costs import (
    edge_key,
    edge_specs,
    exchanges_of,
    fill_formatted,
    messages_of,
    rounding_s,
)
from search_spaces.sharding.graph import Graph, Vertex, is_contraction
from search_spaces.sharding.node_costs import NodeCosts

COMPUTE, BLOCKING, OVERLAPPED, EXPOSED, MEMORY = "compute_s", "blocking_s", "overlapped_s", "exposed_s", "memory_bytes"
"""Names of quantities. `compute_s`: seconds of arithmetic and memory traffic. `blocking_s`: `[A]` seconds on each mesh
axis's link of collectives that arithmetic waits for. `overlapped_s`: `[A]` the same of those that can overlap with it,
and `exposed_s` what the step waits for them at the hardware's exposed share. `memory_bytes`: `[T]` in use over time."""

_OfEdge = Callable[[Edge, Sequence[Node], NodeCosts], np.ndarray]


def preference_problem(problem: Problem, nodes: Sequence[Node], node_costs: NodeCosts) -> Problem:
    """Returns a space's problem without its seconds: the preferences for small arguments and the memory remain."""
    preference = [_preference_s(node, node_costs) for node in nodes]
    zeros: dict[tuple[int, ...], np.ndarray] = {}
    free = [zeros.setdefault(np.shape(matrix), np.zeros(np.shape(matrix))) for matrix in problem.edge_cost]
    return problem._replace(node_cost=preference, edge_cost=free)


def step_quantities(
    problem: Problem, nodes: Sequence[Node], edges: Sequence[Edge], node_costs: NodeCosts
) -> Quantities:
    """Returns the seconds of a step's parts as quantities.

    Args:
      problem: of the space, whose edges the quantities have.
    """
    compute, sent = _of_nodes(nodes, node_costs)
    moved = _of_edges(problem, nodes, edges, node_costs, _of_edge)
    parts: dict[str, Quantity | LiveMemory] = {COMPUTE: Quantity(compute, _rounding(problem, nodes, edges, node_costs))}
    for column, name in enumerate((BLOCKING, OVERLAPPED, EXPOSED)):
        of_nodes, of_edges = (map_distinct(itemgetter((..., column, slice(None))), arrays) for arrays in (sent, moved))
        parts[name] = Quantity(of_nodes, of_edges)
    return parts | {MEMORY: LiveMemory(problem)}


def step_problem(preference: Problem, quantities: Quantities) -> Problem:
    """Returns a space's problem with the links' limit: a step waits for collectives that overlap with arithmetic.

    It waits for the larger of two loads: what the hardware's share says, and their links' seconds less arithmetic.

    Args:
      preference: the problem without seconds.
    """
    counted = {COMPUTE: 1.0, BLOCKING: 1.0, OVERLAPPED: 0.0, EXPOSED: 0.0, MEMORY: 0.0}
    weights = {name: np.full(quantity.shape, counted[name]) for name, quantity in quantities.items()}
    compute, overlapped, exposed = (quantities[name] for name in (COMPUTE, OVERLAPPED, EXPOSED))
    assert isinstance(compute, Quantity)
    assert isinstance(overlapped, Quantity)
    assert isinstance(exposed, Quantity)
    rounding = compute.edge or [np.zeros(1)] * len(overlapped.edge)
    return with_weights(preference, quantities, weights)._replace(
        load=_waits(compute.node, overlapped.node, exposed.node),
        edge_load=_waits(rounding, overlapped.edge, exposed.edge),
    )


def _waits(
    compute: Sequence[np.ndarray], overlapped: Sequence[np.ndarray], exposed: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns `[..., 2]` the two loads at each place; places with equal arrays share one."""
    loads: dict[tuple[int, ...], np.ndarray] = {}
    keys = list(zip(map(id, compute), map(id, overlapped), map(id, exposed), strict=True))
    for key, own, sent, waited in zip(keys, compute, overlapped, exposed, strict=True):
        if key not in loads:
            loads[key] = np.stack([waited.sum(axis=-1), sent.sum(axis=-1) - own], axis=-1)
    return [loads[key] for key in keys]


def _preference_s(node: Node, node_costs: NodeCosts) -> np.ndarray:
    if node.shared_value is not None:
        return np.zeros(len(node.strategies))
    return node_costs.preference_s(node.vertex, node.strategies)


def _of_nodes(nodes: Sequence[Node], node_costs: NodeCosts) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the seconds of arithmetic `[S_v]`, and of what nodes send `[S_v, blocking overlapped exposed, A]`."""
    pairs = map_by_key(lambda node: _of_node(node, node_costs), nodes, node_costs.key)
    return [compute for compute, _ in pairs], [sent for _, sent in pairs]


def _of_node(node: Node, node_costs: NodeCosts) -> tuple[np.ndarray, np.ndarray]:
    sent_s = np.zeros((len(node.strategies), 3, len(node_costs.axis_sizes)))
    if node.shared_value is not None:
        for s, strategy in enumerate(node.strategies):
            for axis, seconds in node_costs.shared_maxima_s(node, strategy):
                sent_s[s, 0, axis] += seconds
        return node_costs.shared_reshard_s(node), sent_s
    vertex, shares, reshards = node.vertex, node_costs.shares, node_costs.reshard_costs
    for s, strategy in enumerate(node.strategies):
        for i, value in enumerate(vertex.results):
            exposed = node_costs.exposed(value, strategy)
            for step in finished_steps(reshards.path, value, strategy, i)[0]:
                link_s = vertex.reduction_weight * reshards.step_s(step, value.num_bytes, shares.latency(value))
                sent_s[s, :, step.axis] += _counted(link_s, exposed * link_s)
        for collective, link_s, exposed_s in node_costs.own_collectives(vertex, strategy):
            sent_s[s, :, collective.axis] += _counted(vertex.weight * link_s, vertex.weight * exposed_s)
    return node_costs.compute_s(vertex, node.strategies), sent_s


def _of_edges(
    problem: Problem, nodes: Sequence[Node], edges: Sequence[Edge], node_costs: NodeCosts, of_edge: _OfEdge
) -> list[np.ndarray]:
    """Returns for each edge of the problem what `of_edge` returns, which is asked once for edges that agree."""
    between = [edge for edge in edges if edge.node != edge.reader]
    arrays = map_by_key(
        lambda edge: of_edge(edge, nodes, node_costs), between, lambda edge: edge_key(edge, nodes, node_costs.shares)
    )
    ends = ((edge.node, edge.reader, array) for edge, array in zip(between, arrays, strict=True))
    merged = merge_edges(ends, turn=lambda array: np.swapaxes(array, 0, 1))
    return [merged[u, v] for u, v in np.asarray(problem.edge_nodes).reshape(-1, 2).tolist()]


def _rounding(
    problem: Problem, nodes: Sequence[Node], edges: Sequence[Edge], node_costs: NodeCosts
) -> list[np.ndarray]:
    """Returns the seconds in which values are rounded on their way, `[S_u, S_v]` for each edge, if any are."""
    zeros: dict[tuple[int, int], np.ndarray] = {}
    rounded: list[Edge] = []

    def seconds(edge: Edge, nodes: Sequence[Node], node_costs: NodeCosts) -> np.ndarray:
        own = rounding_s(edge, nodes, node_costs.reshard_costs)
        if own is not None:
            rounded.append(edge)
            return own
        shape = len(nodes[edge.node].strategies), len(nodes[edge.reader].strategies)
        return zeros.setdefault(shape, np.zeros(shape))

    of_edges = _of_edges(problem, nodes, edges, node_costs, seconds)
    return of_edges if rounded else []


def _of_edge(edge: Edge, nodes: Sequence[Node], node_costs: NodeCosts) -> np.ndarray:
    """Returns the quantities that an edge sends, `[S_u, S_v, blocking overlapped exposed, A]`."""
    shares, reshards = node_costs.shares, node_costs.reshard_costs
    latency, exposed = shares.latency(edge.value), shares.exposed(edge.value)
    specs = edge_specs(edge, nodes)
    link_s = edge.weight * reshards.axes_s(*specs, float(edge.value.num_bytes), latency)
    for exchange in exchanges_of(edge, nodes, reshards):
        coded_s = edge.weight * reshards.axes_s(*specs, exchange.num_bytes, latency)
        link_s = np.where(exchange.is_coded[..., None], coded_s, link_s)
    sent_s = np.moveaxis(_counted(link_s, exposed * link_s), 0, 2)
    of_pair, moved_s = {}, {}
    for pair, message in messages_of(edge, nodes, reshards.path).items():
        move = (pair[0],), (pair[2],), message.num_bytes
        if move not in moved_s:
            link_s = edge.weight * reshards.axes_s(*move, latency)[0, 0]
            moved_s[move] = _counted(link_s, exposed * link_s)
        of_pair[pair] = moved_s[move].copy()
        for axis in message.maxima:
            maximum_s = edge.weight * reshards.maximum_s(axis, message.maxima_bytes)
            of_pair[pair][:, axis] += _counted(maximum_s, (exposed if message.is_coded else 1.0) * maximum_s)
    fill_formatted(sent_s, edge, nodes, of_pair)
    return sent_s


def _counted(link_s: np.ndarray | float, exposed_s: np.ndarray | float) -> np.ndarray:
    """Returns seconds as `[blocking overlapped exposed, ...]`: what is waited for in full holds the step."""
    is_blocking = np.asarray(exposed_s) >= np.asarray(link_s)
    return np.stack(
        [np.where(is_blocking, link_s, 0), np.where(is_blocking, 0, link_s), np.where(is_blocking, 0, exposed_s)]
    )


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
    """Returns whether an operation counts as a product: what a step spends its arithmetic on."""
    return is_contraction(vertex) or custom_call_of(vertex) is not None


def computing_of(graph: Graph, layout: Layout, node_costs: NodeCosts, compute_s: np.ndarray) -> Computing:
    """Returns the parts of the computing of a layout; `compute_s` are the seconds of each vertex, rounding included."""
    hardware = node_costs.hardware
    products_s = products_at_peak_s = traffic_s = traffic_at_peak_s = 0.0
    for vertex, strategy in zip(graph.vertices, layout.strategies, strict=True):
        seconds = node_costs.chosen_compute_s(vertex, strategy)
        traffic_s += float(compute_s[vertex.index]) - seconds
        if not seconds:
            continue
        if vertex.kind == "input":  # copies from the host's memory and back
            traffic_s += seconds
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
