"""The sharding space: a traced function on a mesh as a `Problem`, and a choice back as a `Layout` that runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from cost.base import Hardware, Problem
from cost.compute import equation_dtype, equation_flops, roofline_s
from search_spaces.sharding.candidates import Candidates
from search_spaces.sharding.dimensions import axes_of, kinds_of_dimensions
from search_spaces.sharding.given import axes_with_meaning, is_constrained
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.lifetimes import CONTRACTIONS, Lifetimes, lifetimes
from search_spaces.sharding.reshard_costs import ReshardCosts
from search_spaces.sharding.rule import Rule
from search_spaces.sharding.shardy import operation_rules
from search_spaces.sharding.spec import Spec, shards
from search_spaces.sharding.strategies import ShardingStrategy
from search_spaces.sharding.traffic import touched_bytes


class Node(NamedTuple):
    """A node of the problem: a vertex of the graph, or the hub of a value that several operations read.

    Attributes:
      vertex: the vertex; for a hub the one that makes the value.
      hub: the value, or None.
      strategies: what can be chosen.
    """

    vertex: Vertex
    hub: Value | None
    strategies: tuple[ShardingStrategy, ...]


class Layout(NamedTuple):
    """A decoded choice: how every value is laid out over the mesh.

    Attributes:
      strategy: for each vertex the strategy that it runs.
      held: for each value, by id, the spec that its readers find; None for values without dimensions.
    """

    strategy: tuple[ShardingStrategy, ...]
    held: tuple[Spec, ...]


@dataclass(frozen=True)
class ShardingSpace:
    """Everything that can be chosen about a traced function on a mesh.

    Args:
      graph: the traced function.
      axis_names, axis_sizes: the mesh's axes.
      hardware: what computing and communicating costs.
      given: specs that inputs must keep, by flat argument; a dimension that is None is free.
      donated: for each flat argument, whether its memory may be used again.
      memory_limit_bytes: for each device; `inf` for none.
    """

    graph: Graph
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    hardware: Hardware
    given: Mapping[int, Sequence[tuple[int, ...] | None]]
    donated: tuple[bool, ...]
    memory_limit_bytes: float = np.inf

    @cached_property
    def rules(self) -> list[Rule | None]:
        """The rule of each vertex."""
        operations = list(self.graph.operations())
        found: list[Rule | None] = [None] * len(self.graph.vertices)
        equations = [v.equation for v in operations if v.equation is not None]
        for vertex, rule in zip(operations, operation_rules(equations), strict=True):
            found[vertex.index] = rule
        return found

    @cached_property
    def without_rule(self) -> list[Vertex]:
        """Operations that Shardy gives no rule for: they run whole on every device."""
        return [v for v in self.graph.operations() if self.rules[v.index] is None and not is_constrained(v)]

    @cached_property
    def prices(self) -> ReshardCosts:
        """What moving arrays costs."""
        return ReshardCosts(self.axis_names, self.axis_sizes, self.hardware)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Which values are written to memory, and when they live."""
        return lifetimes(self.graph, self.rules, self.donated)

    @cached_property
    def nodes(self) -> list[Node]:
        """One node for each vertex, in order, then the hubs."""
        shared = [len(readers) > 1 for readers in self._readers]
        fixed = axes_with_meaning(self.graph, self.given, self.axis_names, self.axis_sizes)
        candidates = Candidates(
            self.axis_names,
            axes_of(self.axis_sizes, self.prices.rates, fixed),
            self.prices.path,
            kinds_of_dimensions(self.graph, self.rules),
            self._leaving,
        )
        nodes = []
        for vertex in self.graph.vertices:
            given = self.given.get(vertex.index) if vertex.kind == "input" else None
            copied = bool(vertex.results) and shared[vertex.results[0].id]
            nodes.append(Node(vertex, None, candidates.of(vertex, self.rules[vertex.index], given, copied)))
        for value in self.graph.values:
            vertex = self.graph.vertices[value.vertex]
            # Arrays that are kept beside a gathered copy (arguments, what a loop's body reads) need no hub.
            own_copy = vertex.kind in ("input", "constant", "slice") or (vertex.kind == "carry" and value.result == 0)
            if value.shape and shared[value.id] and not own_copy:
                nodes.append(Node(vertex, value, candidates.of_hub(value)))
        return nodes

    @property
    def _leaving(self) -> frozenset[int]:
        """Results of the function that replace no argument, by id."""
        pairs = zip(self.graph.outputs, self.graph.feedback, strict=True)
        return frozenset(o.id for o, argument in pairs if isinstance(o, Value) and argument is None)

    @cached_property
    def hub_node(self) -> dict[int, int]:
        """The index of the node of a value's hub, by the value's id."""
        return {n.hub.id: i for i, n in enumerate(self.nodes) if n.hub is not None}

    @cached_property
    def _readers(self) -> list[list[tuple[Vertex, int]]]:
        """Who reads each value, the arguments that results replace included."""
        found = self.graph.consumers()
        for output, argument in zip(self.graph.outputs, self.graph.feedback, strict=True):
            if isinstance(output, Value) and argument is not None:
                found[output.id].append((self.graph.inputs[argument], 0))
        return found

    @cached_property
    def problem(self) -> Problem:
        """The space as a problem in seconds and bytes."""
        edges, matrices = self._edges()
        usage_node, usage, interval = self._usages()
        return Problem(
            node_cost=[self._node_cost(node) for node in self.nodes],
            edge_nodes=np.array(edges, int).reshape(-1, 2),
            edge_cost=matrices,
            usage_node=np.array(usage_node, int),
            usage=usage,
            usage_interval=np.array(interval, int).reshape(-1, 2),
            memory_limit=self.memory_limit_bytes,
        )

    # Latency: compilers combine independent collectives into one, so those of parameters and gradients share one.

    @cached_property
    def _after_contraction(self) -> np.ndarray:
        found = np.zeros(len(self.graph.vertices), bool)
        for vertex in self.graph.vertices:
            name = vertex.equation.primitive.name if vertex.equation is not None else ""
            found[vertex.index] = (vertex.kind == "operation" and name in CONTRACTIONS) or any(
                found[o.vertex] for o in vertex.operands if isinstance(o, Value)
            )
        return found

    @cached_property
    def _before_contraction(self) -> np.ndarray:
        consumers = self.graph.consumers()
        found = np.zeros(len(self.graph.vertices), bool)
        for vertex in reversed(self.graph.vertices):
            for value in vertex.results:
                for reader, _ in consumers[value.id]:
                    name = reader.equation.primitive.name if reader.equation is not None else ""
                    heavy = reader.kind == "operation" and name in CONTRACTIONS
                    found[vertex.index] |= heavy or found[reader.index]
        return found

    @cached_property
    def _stored_bytes(self) -> float:
        return float(max(1, sum(v.results[0].num_bytes for v in self.graph.inputs)))

    def latency_share(self, value: Value) -> float:
        """The part of a collective's latency that a value pays: all of it, unless it is combined with others."""
        alone = self._after_contraction[value.vertex] and self._before_contraction[value.vertex]
        return 1.0 if alone else min(1.0, value.num_bytes / self._stored_bytes)

    def local_bytes(self, value: Value, spec: Spec) -> float:
        """Bytes of one device's part of a value."""
        return value.num_bytes / shards(spec, self.axis_sizes)

    # Costs of nodes

    def compute_s(self, vertex: Vertex, strategies: Sequence[ShardingStrategy]) -> np.ndarray:
        """Seconds of one device's arithmetic and memory traffic in one step, `[strategies]`."""
        if vertex.kind != "operation" or vertex.equation is None:
            return np.zeros(len(strategies))
        touched = np.array([touched_bytes(vertex, s, self.lifetimes.written, self.axis_sizes) for s in strategies])
        flops = equation_flops(vertex.equation) / np.array([s.parts for s in strategies], float)
        dtype = equation_dtype(vertex.equation)
        return vertex.weight * roofline_s(flops, touched, dtype, self.hardware)

    def reduction_s(self, node: Node, strategy: ShardingStrategy) -> float:
        """Seconds of the collectives that a strategy itself causes, in one step."""
        if node.hub is not None:
            return 0.0
        seconds = 0.0
        for value, steps in zip(node.vertex.results, strategy.reductions, strict=True):
            for move in steps:
                seconds += self.prices.move_s(move, value.num_bytes, self.latency_share(value))
        return seconds * node.vertex.weight

    def _node_cost(self, node: Node) -> np.ndarray:
        if node.hub is not None:
            return np.zeros(len(node.strategies))
        compute = self.compute_s(node.vertex, node.strategies) + self.holding_s(node.vertex, node.strategies)
        return compute + np.array([self.reduction_s(node, s) for s in node.strategies])

    def holding_s(self, vertex: Vertex, strategies: Sequence[ShardingStrategy]) -> np.ndarray:
        """A thousandth of the time to read what an argument keeps: of equally fast plans the smallest is chosen.

        Keeping gradients and optimiser state sharded (ZeRO) moves as many bytes as plain data parallelism does. Of
        equally small plans the one that splits the first dimensions is: layers that are alike are then split alike.
        """
        if vertex.kind != "input":
            return np.zeros(len(strategies))
        rate = self.hardware.memory_bytes_per_s
        s_per_byte = 1e-3 / rate if np.isfinite(rate) else 1e-6 * self.prices.dearest_s_per_byte
        s_per_byte /= prod(self.axis_sizes)  # so that the bound gives up no more than a part of a sharded step
        stored = [s.unreduced[0] for s in strategies]
        late = [1 + 0.1 * max((d for d, axes in enumerate(spec) if axes), default=0) for spec in stored]
        return s_per_byte * np.array(
            [self.local_bytes(vertex.results[0], s) * w for s, w in zip(stored, late, strict=True)]
        )

    @cached_property
    def most_holding_s(self) -> float:
        """The most that `holding_s` can add up to: what a bound on the problem's cost gives up for one on seconds."""
        return sum(float(np.max(self.holding_s(v, self.nodes[v.index].strategies))) for v in self.graph.inputs)

    # Edges

    def links(self) -> list[tuple[int, int, int, int, Value, float]]:
        """Every edge as (node of the producer, its result, node of the reader, its operand, value, weight).

        The reader of a value with a hub is the hub (operand 0), whose own readers follow.
        """
        found = []
        for value in self.graph.values:
            if not value.shape:
                continue
            node, result = value.vertex, value.result
            hub = self.hub_node.get(value.id)
            if hub is not None:
                found.append((node, result, hub, 0, value, self.graph.vertices[value.vertex].weight))
                node, result = hub, 0
            for reader, i in self._readers[value.id]:
                weight = reader.operand_weight[i] if reader.operands else 1.0
                found.append((node, result, reader.index, i, value, weight))
        return found

    def _edges(self) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
        merged: dict[tuple[int, int], np.ndarray] = {}
        for node, result, reader, i, value, weight in self.links():
            if node == reader:
                continue
            sources = tuple(s.results[result] for s in self.nodes[node].strategies)
            targets = self._targets(reader, i)
            share = self.latency_share(value)
            matrix = self.prices.reshard_s(sources, targets, float(value.num_bytes), share, weight)
            if (node, reader) in merged:
                merged[node, reader] = merged[node, reader] + matrix
            elif (reader, node) in merged:
                merged[reader, node] = merged[reader, node] + matrix.T
            else:
                merged[node, reader] = matrix
        return list(merged), list(merged.values())

    def _targets(self, node: int, operand: int) -> tuple[Spec, ...]:
        return tuple(self.target(node, operand, s) for s in range(len(self.nodes[node].strategies)))

    def target(self, node: int, operand: int, strategy: int) -> Spec:
        """The spec in which a node wants an operand; what comes back to an argument must be as it is stored."""
        found = self.nodes[node].strategies[strategy]
        if self.nodes[node].hub is None and self.nodes[node].vertex.kind == "input":
            return found.unreduced[0]
        return found.operands[operand]

    # Memory

    def _usages(self) -> tuple[list[int], list[np.ndarray], list[tuple[int, int]]]:
        nodes, usage, interval = [], [], []

        def add(node: int, num_bytes: Sequence[float], start: int, end: int) -> None:
            nodes.append(node)
            usage.append(np.array(num_bytes, float))
            interval.append((start, max(end, start + 1)))

        written, when, first_use = self.lifetimes
        for value in self.graph.values:
            if not value.shape or not written[value.id]:
                continue
            start, end = when[value.id]
            node, result = self.hub_node.get(value.id, value.vertex), value.result
            strategies = self.nodes[node].strategies
            if node != value.vertex:
                add(node, [self.local_bytes(value, s.results[0]) for s in strategies], start, end)
                continue
            add(
                node,
                [
                    self.local_bytes(value, s.unreduced[result] if _keeps(s, result) else s.results[result])
                    for s in strategies
                ],
                start,
                end,
            )
            copy = [self.local_bytes(value, s.results[result]) if _keeps(s, result) else 0.0 for s in strategies]
            if any(copy):
                add(node, copy, first_use[value.id], max(self.graph.values[value.id].dies + 2, first_use[value.id] + 1))
        return nodes, usage, interval

    def decode(self, choice: Sequence[int]) -> Layout:
        """What a choice of the problem means.

        Args:
          choice: `[nodes]` strategy indices.
        """
        chosen = [node.strategies[s] for node, s in zip(self.nodes, choice, strict=True)]
        held = []
        for value in self.graph.values:
            hub = self.hub_node.get(value.id)
            held.append(chosen[value.vertex].results[value.result] if hub is None else chosen[hub].results[0])
        return Layout(tuple(chosen[: len(self.graph.vertices)]), tuple(held))


def _keeps(strategy: ShardingStrategy, result: int) -> bool:
    """Whether an array is kept beside its gathered copy."""
    return any(m.kind == "all_gather" for m in strategy.reductions[result])
