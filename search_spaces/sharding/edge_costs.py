"""What lies between two nodes: the reshards of a value on its way from the node that makes it to one that reads it."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cost.edges import merge_edges
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Edge, Node, ShardingStrategy
from search_spaces.sharding.coded_exchanges import exchange_bytes, is_exchange
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.product_formats import FORMATS
from search_spaces.sharding.reshard_costs import CollectiveShares, Message, ReshardCosts, message_of
from search_spaces.sharding.resharding import Paths

_ON_HOST = 1e6
"""By how much a reshard of an array in the host's memory counts: it is to be resharded before or after it is there."""


def readers_of(graph: Graph) -> list[list[tuple[Vertex, int]]]:
    """Returns, for each value by id, the (vertex, operand index) pairs that read it.

    An argument that a result replaces in the next call reads that result, as its operand 0.
    """
    readers = [list(pairs) for pairs in graph.consumers()]
    for output, argument in zip(graph.outputs, graph.feedback, strict=True):
        if isinstance(output, Value) and argument is not None:
            readers[output.id].append((graph.inputs[argument], 0))
    return readers


def edges_of(graph: Graph, shared_reshards: Mapping[int, int]) -> list[Edge]:
    """Returns every way of a value from one node to another, or to itself.

    Args:
      shared_reshards: the index of the node of a value's shared reshard, by the value's id.
    """
    readers = readers_of(graph)
    edges = []
    for value in graph.values:
        if not value.shape:
            continue
        node, result = value.vertex, value.result
        shared = shared_reshards.get(value.id)
        if shared is not None:
            edges.append(Edge(node, result, shared, 0, value, graph.vertices[value.vertex].weight))
            node, result = shared, 0
        for reader, i in readers[value.id]:
            weight = reader.operand_weight[i] if reader.operands else 1.0
            weight *= _ON_HOST if value.is_on_host else 1.0
            edges.append(Edge(node, result, reader.index, i, value, weight))
    return edges


class EdgeCosts:
    """Transfer matrices of edges, each made once: spaces of one function with other formats have most of them, too."""

    def __init__(self, reshard_costs: ReshardCosts, shares: CollectiveShares):
        self._reshard_costs, self._shares = reshard_costs, shares
        self._made: dict[Hashable, tuple[np.ndarray, Any]] = {}

    def transfer_s(self, edge: Edge, nodes: Sequence[Node]) -> np.ndarray:
        """Returns `edge_transfer_s`, the same array for edges of equal `edge_key`."""
        key = edge_key(edge, nodes, self._shares)
        if key not in self._made:
            ends = nodes[edge.node].strategies, nodes[edge.reader].strategies  # kept, since the key has their ids
            self._made[key] = edge_transfer_s(edge, nodes, self._reshard_costs, self._shares), ends
        return self._made[key][0]


def transfer_matrices(
    edges: Sequence[Edge], nodes: Sequence[Node], costs: EdgeCosts
) -> dict[tuple[int, int], np.ndarray]:
    """Returns one transfer matrix `[S_u, S_v]`, seconds of waiting, for each pair of nodes u, v that values go between.

    What a node hands to itself is free: a carry that its body leaves as it is, an argument that is returned. The edges
    of equal layers share a matrix.
    """
    between = (edge for edge in edges if edge.node != edge.reader)
    return merge_edges((edge.node, edge.reader, costs.transfer_s(edge, nodes)) for edge in between)


def edge_key(edge: Edge, nodes: Sequence[Node], shares: CollectiveShares) -> Hashable:
    """Returns a key of all that the seconds of an edge depend on, on one mesh."""
    node, reader = nodes[edge.node], nodes[edge.reader]
    is_stored = reader.shared_value is None and reader.vertex.kind == "input"
    ends = id(node.strategies), edge.result, id(reader.strategies), edge.operand, is_stored
    itemsize = 0 if edge.value.dtype is None else edge.value.dtype.itemsize
    weights = edge.weight, reader.vertex.weight
    size = edge.value.shape, edge.value.num_bytes, itemsize
    return *ends, *size, shares.latency(edge.value), weights, shares.exposed(edge.value)


FormattedRead = tuple[IndexedSpec, str, IndexedSpec, str]
"""The spec in which a value is made and the format to which its shared reshard rounds it; the spec and the format in
which it is read by a product."""


def shared_formats(
    graph: Graph, edges: Sequence[Edge], formats_of: Mapping[int, Sequence[str]]
) -> dict[int, tuple[str, ...]]:
    """Returns the formats to which shared reshards can round values for several products, by the index of their node.

    These have one scale for a tensor, and the products read the same numbers of it as often as it is made.
    """
    read_as: dict[tuple[int, str], list[Any]] = {}
    for edge in edges:
        for name in formats_of.get(edge.reader, ()) if edge.node >= len(graph.vertices) else ():
            maker, reader, to = graph.vertices[edge.value.vertex], graph.vertices[edge.reader], FORMATS[name]
            if to.scaled == "tensor":
                dtype = to.dtypes(reader)[edge.operand] if reader.weight == maker.weight else None
                read_as.setdefault((edge.node, name), []).append(dtype)
    found: dict[int, tuple[str, ...]] = {}
    for (node, name), dtypes in read_as.items():
        if len(dtypes) > 1 and None not in dtypes and len(set(dtypes)) == 1:
            found[node] = (*found.get(node, ()), name)
    return found


def made_specs(edge: Edge, nodes: Sequence[Node]) -> list[tuple[IndexedSpec, str]]:
    """Returns the spec in which each strategy of a node makes a value, and the format to which it rounds the value."""
    node = nodes[edge.node]
    return [(s.results[edge.result], "" if node.shared_value is None else s.format) for s in node.strategies]


def messages_of(edge: Edge, nodes: Sequence[Node], path: Paths) -> dict[FormattedRead, Message]:
    """Returns how a value reaches a product in a format, for all that both ends may choose; nothing for others."""
    reader = nodes[edge.reader]
    formatted = [(s, strategy.format) for s, strategy in enumerate(reader.strategies) if strategy.format]
    targets = dict.fromkeys(
        (read_spec(reader, edge.operand, s), f) for s, f in formatted if reader.shared_value is None
    )
    sources = dict.fromkeys(made_specs(edge, nodes)) if targets else ()
    read_by = reader.vertex, edge.operand
    return {
        (a, shared, b, f): message_of(path, edge.value, a, b, *read_by, f, f == shared)
        for a, shared in sources
        for b, f in targets
    }


def rounding_s(edge: Edge, nodes: Sequence[Node], reshard_costs: ReshardCosts) -> np.ndarray | None:
    """Returns the seconds in which a value is rounded between all strategies of both ends, `[S_u, S_v]`; None for 0."""
    messages, reader = messages_of(edge, nodes, reshard_costs.path), nodes[edge.reader]
    exchanges = exchanges_of(edge, nodes, reshard_costs)
    if not messages and not exchanges:
        return None
    weight = reader.vertex.weight
    of_read = {read: weight * reshard_costs.rounding_s(edge.value, m, read[-1]) for read, m in messages.items()}
    seconds = np.zeros((len(nodes[edge.node].strategies), len(reader.strategies)))
    for exchange in exchanges:
        seconds = np.where(exchange.is_coded, exchange.coding_s, seconds)
    fill_formatted(seconds, edge, nodes, of_read)
    return seconds


def fill_formatted(array: np.ndarray, edge: Edge, nodes: Sequence[Node], of_read: Mapping[FormattedRead, Any]) -> None:
    """Writes into an array `[S_u, S_v, ...]` what products in formats have between the strategies of both ends."""
    reader, sources = nodes[edge.reader], made_specs(edge, nodes)
    for t, strategy in enumerate(reader.strategies):
        if strategy.format and reader.shared_value is None:  # a shared reshard's format is that of those behind it
            target = read_spec(reader, edge.operand, t)
            array[:, t] = [of_read[*source, target, strategy.format] for source in sources]


class Exchange(NamedTuple):
    """The exchange of an edge as codes of one format.

    Attributes:
      is_coded: `[S_u, S_v]` with which strategies of both ends.
      num_bytes: of the whole value as codes.
      coding_s: `[S_u, S_v]` seconds of encoding and decoding in one step.
    """

    is_coded: np.ndarray
    num_bytes: float
    coding_s: np.ndarray


def exchanges_of(edge: Edge, nodes: Sequence[Node], reshard_costs: ReshardCosts) -> list[Exchange]:
    """Returns the exchanges of an edge as codes, one for each format that its strategies have."""
    node, reader = nodes[edge.node], nodes[edge.reader]
    is_shared = reader.shared_value is not None
    names = [s.exchanged_in for s in (reader if is_shared else node).strategies]
    if not any(names) or (node.shared_value is not None and not is_shared):
        return []
    path, value = reshard_costs.path, edge.value
    sources, targets = edge_specs(edge, nodes)
    rows, columns = ({spec: i for i, spec in enumerate(dict.fromkeys(specs))} for specs in (sources, targets))
    grid = np.ix_([rows[spec] for spec in sources], [columns[spec] for spec in targets])
    can_be = np.array([[is_exchange(path, value, a, b) for b in columns] for a in rows])[grid]
    can_be &= np.array([is_shared or not s.format for s in reader.strategies])
    found = []
    for name in dict.fromkeys(filter(None, names)):
        own = np.array([other == name for other in names])
        seconds = edge.weight * reshard_costs.coding_s(value, [*rows], [*columns], name)[grid]
        found.append(Exchange(can_be & (own if is_shared else own[:, None]), exchange_bytes(value, name), seconds))
    return found


def exchange_format(edge: Edge, nodes: Sequence[Node], made_by: ShardingStrategy, read_by: ShardingStrategy) -> str:
    """Returns the format in which a value is exchanged between strategies of both ends, if it is; "" for its own.

    Its shared reshard says so, or else the operation that makes it; products in formats round what they read instead.
    """
    if nodes[edge.reader].shared_value is not None:
        return read_by.exchanged_in
    return made_by.exchanged_in if nodes[edge.node].shared_value is None and not read_by.format else ""


def edge_specs(edge: Edge, nodes: Sequence[Node]) -> tuple[tuple[IndexedSpec, ...], tuple[IndexedSpec, ...]]:
    """Returns the specs in which the strategies of a node make a value, and those in which the reader's read it."""
    node, reader = nodes[edge.node], nodes[edge.reader]
    sources = tuple(s.results[edge.result] for s in node.strategies)
    return sources, tuple(read_spec(reader, edge.operand, s) for s in range(len(reader.strategies)))


def edge_transfer_s(
    edge: Edge, nodes: Sequence[Node], reshard_costs: ReshardCosts, shares: CollectiveShares
) -> np.ndarray:
    """Returns the seconds of waiting for a value between all strategies of both ends, `[S_u, S_v]`."""
    reader = nodes[edge.reader]
    latency_share, weight = shares.latency(edge.value), edge.weight * shares.exposed(edge.value)
    sources, targets = edge_specs(edge, nodes)
    seconds = reshard_costs.reshard_s(sources, targets, float(edge.value.num_bytes), latency_share, weight)
    for exchange in exchanges_of(edge, nodes, reshard_costs):
        sent_s = reshard_costs.reshard_s(sources, targets, exchange.num_bytes, latency_share, weight)
        seconds = np.where(exchange.is_coded, sent_s + exchange.coding_s, seconds)
    messages = messages_of(edge, nodes, reshard_costs.path)
    if not messages:
        return seconds
    of_read = {
        (a, shared, b, f): reshard_costs.reshard_s((a,), (b,), message.num_bytes, latency_share, weight).item()
        + (weight if message.is_coded else edge.weight)
        * sum(reshard_costs.maximum_s(axis, message.maxima_bytes) for axis in message.maxima)
        + reader.vertex.weight * reshard_costs.rounding_s(edge.value, message, f)
        for (a, shared, b, f), message in messages.items()
    }
    seconds = seconds.copy()
    fill_formatted(seconds, edge, nodes, of_read)
    return seconds


def read_spec(node: Node, operand: int, strategy: int) -> IndexedSpec:
    """Returns the spec in which a node's strategy reads an operand; a result replaces an argument as that is stored."""
    chosen_strategy = node.strategies[strategy]
    if node.shared_value is None and node.vertex.kind == "input":
        return chosen_strategy.unreduced[0]
    return chosen_strategy.operands[operand]
