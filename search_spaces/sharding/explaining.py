"""What a choice costs, part by part, and what nodes and strategies are called."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cost.base import CollectiveKind, Problem
from cost.collectives import collective_sent_bytes
from cost.evaluation import change_costs
from search_spaces.base import Part, Traffic
from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import Edge, Layout, Node, ReshardStep, ShardingStrategy
from search_spaces.sharding.coded_exchanges import exchange_bytes, is_exchange
from search_spaces.sharding.coded_sums import finished_steps
from search_spaces.sharding.custom_calls.operations import name_of
from search_spaces.sharding.edge_costs import exchange_format, read_spec, readers_of
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.memory import MemoryUse
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.reshard_costs import MAXIMUM_BYTES, Message, message_of

NO_AXES = "-"
"""The text for a dimension that no axis splits."""


class Transfer(NamedTuple):
    """A predicted collective of a choice.

    Attributes:
      kind, axis: the kind of the collective and the mesh axis along which it goes.
      num_bytes: the full size along the axis in one group of devices (see `cost.collectives`).
      seconds: that the step waits for all of them.
      link_s: that all of them keep their link busy.
      vertex: the index of the vertex that it belongs to.
      node: the index of the node that pays for it: the vertex's own, or a shared reshard's.
      made_by: the index of the vertex that makes the array it moves.
      read_by: the index of the vertex that reads the result, the first of several; None where nothing does.
    """

    kind: CollectiveKind
    axis: str
    num_bytes: float
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    seconds: float
    link_s: float
    vertex: int
    node: int
    made_by: int
    read_by: int | None


class StepPrediction(NamedTuple):
    """The predicted costs of a choice; all seconds together are its cost.

    Attributes:
      compute_s: for each vertex, seconds of arithmetic and memory traffic in one step.
      transfers: all collectives: first those that finish reductions or gather copies, then the reshards.
      preference_s: for each input, a part of the cost that is not time: of two equally fast choices
        the one with smaller arguments wins.
    """

    compute_s: np.ndarray
    transfers: tuple[Transfer, ...]
    preference_s: np.ndarray


class NextBest(NamedTuple):
    """The next best way to split one array, everything else unchanged.

    Attributes:
      spec: the cheapest of the other specs, or None where there is no other.
      added_s: what it would add to the cost.
    """

    spec: IndexedSpec | None
    added_s: float


class NextBests(NamedTuple):
    """How each array of a choice would be split next best."""

    vertices: tuple[NextBest, ...]
    inputs: tuple[NextBest, ...]


class Summary(NamedTuple):
    """Everything that a plan says about a choice."""

    layout: Layout
    prediction: StepPrediction
    memory: MemoryUse
    next_best: NextBests

    @property
    def peak_bytes(self) -> float:
        """The most memory that a device needs at any time."""
        return float(np.max(self.memory.num_bytes))


def predict(
    graph: Graph,
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    costs: NodeCosts,
    axis_names: Sequence[str],
    layout: Layout,
    choice: Sequence[int],
) -> StepPrediction:
    """Returns the predicted cost of each part of a choice.

    Args:
      choice: `[V]` strategy indices.
    """
    strategies = list(zip(graph.vertices, layout.strategies, strict=True))
    compute_s = np.array([costs.chosen_compute_s(v, s) + costs.chosen_keeping_s(v, layout) for v, s in strategies])
    for node, s in zip(nodes, choice, strict=True):
        compute_s[node.vertex.index] += costs.shared_rounding_s(node, node.strategies[s])
    moves = [_move(edge, nodes, costs, choice) for edge in edges]
    for edge, move in zip(edges, moves, strict=True):
        compute_s[nodes[edge.reader].vertex.index] += move.coding_s
    return StepPrediction(
        compute_s,
        tuple(_transfers(graph, nodes, edges, moves, costs, axis_names, strategies, choice)),
        np.array([float(costs.preference_s(v, (layout.strategies[v.index],))[0]) for v in graph.inputs]),
    )


class _Move(NamedTuple):
    """How a value goes from one node to another in a choice.

    Attributes:
      source, target: the specs in which it is made and read.
      coding_s: seconds in one step in which it is rounded for a product, or encoded and decoded for an exchange.
    """

    source: IndexedSpec
    target: IndexedSpec
    message: Message
    coding_s: float


def _move(edge: Edge, nodes: Sequence[Node], costs: NodeCosts, choice: Sequence[int]) -> _Move:
    node, reader, value, reshards = nodes[edge.node], nodes[edge.reader], edge.value, costs.reshard_costs
    made_by, read_by = node.strategies[choice[edge.node]], reader.strategies[choice[edge.reader]]
    source, target = made_by.results[edge.result], read_spec(reader, edge.operand, choice[edge.reader])
    name = exchange_format(edge, nodes, made_by, read_by)
    if name and is_exchange(reshards.path, value, source, target):
        coding_s = edge.weight * reshards.coding_s(value, [source], [target], name).item()
        return _Move(source, target, Message(True, exchange_bytes(value, name), ()), coding_s)
    name = read_by.format if reader.shared_value is None else ""
    is_rounded = node.shared_value is not None and made_by.format == name
    message = message_of(reshards.path, value, source, target, reader.vertex, edge.operand, name, is_rounded)
    return _Move(source, target, message, reader.vertex.weight * reshards.rounding_s(value, message, name))


def _transfers(
    graph: Graph,
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    moves: Sequence[_Move],
    costs: NodeCosts,
    axis_names: Sequence[str],
    strategies: Sequence[tuple],
    choice: Sequence[int],
) -> list[Transfer]:
    """Returns every collective of a choice: those that finish reductions or gather copies, then the reshards."""
    transfers: list[Transfer] = []
    reshard_costs = costs.reshard_costs
    # An argument or carry that the value replaces is before it, and reads it when the step or the trip is over.
    first_reader = [
        min(((reader.index <= value.vertex, reader.index) for reader, _ in pairs), default=(True, None))[1]
        for value, pairs in zip(graph.values, readers_of(graph), strict=True)
    ]

    def add(
        steps: Sequence[ReshardStep],
        value: Value,
        weight: float,
        vertex: int,
        node: int,
        reader: int | None = None,
        whole_bytes: float | None = None,
        exposed: float | None = None,
    ) -> None:
        read_by = first_reader[value.id] if reader is None else reader
        whole_bytes = value.num_bytes if whole_bytes is None else whole_bytes
        for step in steps:
            if step.kind != "slice" and costs.axis_sizes[step.axis] > 1:
                link_s = weight * reshard_costs.step_s(step, whole_bytes, costs.shares.latency(value))
                seconds = (costs.shares.exposed(value) if exposed is None else exposed) * link_s
                size = step.fraction * whole_bytes
                ends = value.vertex, read_by
                transfers.append(
                    Transfer(step.kind, axis_names[step.axis], size, weight, seconds, link_s, vertex, node, *ends)
                )

    for vertex, strategy in strategies:
        for i, value in enumerate(vertex.results):
            steps, _ = finished_steps(reshard_costs.path, value, strategy, i)
            exposed = costs.exposed(value, strategy)
            add(steps, value, vertex.reduction_weight, vertex.index, vertex.index, exposed=exposed)
        for collective, link_s, exposed_s in costs.own_collectives(vertex, strategy):
            seconds = vertex.weight * exposed_s, vertex.weight * link_s
            kind, axis, num_bytes, count, _ = collective
            places = (vertex.index,) * 4
            transfers.append(Transfer(kind, axis_names[axis], num_bytes, count * vertex.weight, *seconds, *places))
    for i, node in enumerate(nodes):
        for axis, seconds in costs.shared_maxima_s(node, node.strategies[choice[i]]):
            assert node.shared_value is not None
            sent = "all_reduce", axis_names[axis], MAXIMUM_BYTES, node.vertex.weight, seconds, seconds
            transfers.append(
                Transfer(*sent, node.vertex.index, i, node.shared_value.vertex, first_reader[node.shared_value.id])
            )
    for edge, (source, target, message, _) in zip(edges, moves, strict=True):
        if edge.node != edge.reader:
            vertex, shared = nodes[edge.reader].vertex.index, nodes[edge.reader].shared_value
            reader = vertex if shared is None else None
            for axis in message.maxima:
                link_s = edge.weight * reshard_costs.maximum_s(axis, message.maxima_bytes)
                exposed_s = (costs.shares.exposed(edge.value) if message.is_coded else 1.0) * link_s
                sent = "all_reduce", axis_names[axis], message.maxima_bytes, edge.weight, exposed_s, link_s
                transfers.append(Transfer(*sent, vertex, edge.reader, edge.value.vertex, vertex))
            steps = reshard_costs.path(source, target)
            add(steps, edge.value, edge.weight, vertex, edge.reader, reader, message.num_bytes)
    return transfers


def parts_of_prediction(
    prediction: StepPrediction, graph: Graph, node_names: Sequence[str], axis_sizes: Mapping[str, int]
) -> tuple[Part, ...]:
    """Returns a prediction as parts: "compute", each collective, and the "preference" for storing less."""
    parts = [
        Part(node_names[node], "compute", node, float(seconds))
        for node, seconds in enumerate(prediction.compute_s)
        if seconds
    ]
    for transfer in prediction.transfers:
        sent_bytes = (
            collective_sent_bytes(transfer.kind, transfer.num_bytes, axis_sizes[transfer.axis]) * transfer.count
        )
        traffic = Traffic("", transfer.kind, (transfer.axis,), transfer.count, float(sent_bytes))
        parts.append(Part(node_names[transfer.node], transfer.kind, transfer.node, transfer.seconds, traffic))
    for vertex, seconds in zip(graph.inputs, prediction.preference_s, strict=True):
        if seconds:
            parts.append(Part(node_names[vertex.index], "preference", vertex.index, float(seconds)))
    return tuple(parts)


def next_bests(
    problem: Problem, graph: Graph, nodes: Sequence[Node], shared_reshards: Mapping[int, int], choice: Sequence[int]
) -> NextBests:
    """Returns, for a choice, the next best spec of each vertex's first result and of each input as it is stored."""
    added_s = change_costs(problem, choice)
    vertices = []
    for vertex in graph.vertices:
        if not vertex.results:
            vertices.append(NextBest(None, 0.0))
            continue
        v = shared_reshards.get(vertex.results[0].id, vertex.index)
        vertices.append(_next_best([s.results[0] for s in nodes[v].strategies], choice[v], added_s[v]))
    inputs = [
        _next_best([s.unreduced[0] for s in nodes[v].strategies], choice[v], added_s[v])
        for v in (vertex.index for vertex in graph.inputs)
    ]
    return NextBests(tuple(vertices), tuple(inputs))


def _next_best(specs: Sequence[IndexedSpec], strategy: int, added_s: np.ndarray) -> NextBest:
    others = [(float(seconds), spec) for spec, seconds in zip(specs, added_s, strict=True) if spec != specs[strategy]]
    if not others:
        return NextBest(None, 0.0)
    seconds, spec = min(others, key=lambda other: other[0])
    return NextBest(spec, seconds)


def node_name(node: Node) -> str:
    """Returns a short name: an operation's modules and primitive, a path, or the readers of a shared reshard."""
    vertex = node.vertex
    last = vertex.name or vertex.primitive
    if not last:
        region = "" if vertex.equation is None else f"{vertex.equation.primitive.name} "
        last = f"{region}{vertex.kind}"
    name = "/".join(part for part in (vertex.scope, last) if part)
    if node.shared_value is None:
        return name
    result = f" {node.shared_value.result}" if len(vertex.results) > 1 else ""
    return f"readers of {name}{result}"


def sources_of(vertices: Iterable[Vertex]) -> list[tuple[str, str]]:
    """Returns the operations among vertices by name, each with their number and the place of one: `3x, gpt.py:12`."""
    sources: dict[str, list[str]] = {}
    for vertex in vertices:
        where = vertex.user_source or vertex.name
        sources.setdefault(name_of(vertex), []).append(where)
    return [(name, f"{len(where)}x, {min(where)}") for name, where in sorted(sources.items())]


def strategy_name(strategy: ShardingStrategy, axis_names: Sequence[str]) -> str:
    """Returns the specs of operands and results; where results are finished by collectives, first those before them."""
    texts = [
        " ".join(spec_text(spec, axis_names) for spec in specs)
        for specs in (strategy.operands, strategy.unreduced, strategy.results)
    ]
    operands, unreduced, results = texts
    kinds = dict.fromkeys(step.kind for steps in strategy.reductions for step in steps)
    middle = [unreduced] if unreduced != results else []
    place = ["the host's memory"] if strategy.on_host else []
    return " -> ".join(filter(None, (operands, *place, *middle, *kinds, results)))


def spec_text(spec: IndexedSpec, axis_names: Sequence[str]) -> str:
    """Returns a spec for people: `[data, -]` splits the first of two dimensions over the axis data."""
    dims = ("+".join(axis_names[a] for a in axes) or NO_AXES for axes in spec)
    return f"[{', '.join(dims)}]"
