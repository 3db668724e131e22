"""What a layer of a step takes at least in any stage: its operations solved alone, with free shardings at its borders.

A stage of some layers runs at least the operations of these layers. Of what it pays, a part belongs to one layer
alone: its operations, and the reshards of values between two operations of the same program and the same loop of the
layer. All else costs nothing or more. So the least cost of that part, over all shardings, is a bound for the layer, and
the sum over the layers of a stage is one for the stage. To hold in every stage, whatever else is in it:

- values between two programs, two layers, or a loop and what is around it are resharded freely: a stage may keep
  several micro-batches, so that its backward program reads what another micro-batch left;
- operations of the end of a step count with their cheapest strategies, and nothing is resharded between them: a stage
  has the arrays of several layers in one, which may be split in more ways;
- collectives count in full only for values between two contractions of the same part, and have no latency elsewhere:
  what lies between two contractions there does so in every stage.

Equal layers are solved once. A loop over layers is cut around one trip, so that the traced step stays small.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from cost.base import Hardware, Problem
from diffshard.pipelines.cutting import UncutStep, cut_step
from diffshard.pipelines.layer_graphs import LayerChain
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_lifetimes import weigh
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from diffshard.solving.solve import solve
from search_spaces.pipelines.example_groups import in_groups
from search_spaces.pipelines.stage_labels import LabelledStep
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.sharding.base import Node
from search_spaces.sharding.edge_costs import transfer_matrices
from search_spaces.sharding.graph import Graph, Value, Vertex, is_contraction
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.reshard_costs import CollectiveShares
from search_spaces.sharding.space import ShardingSpace

_SCOPE = re.compile(r"layer#(\d+)#(\w+)")
_GAP = 0.003
"""Where the solver may stop for one layer, relative; leaving the borders free costs the bound far more than that."""
_TIME_LIMIT_S = 8.0
"""For solving a part of a layer; its bound says what is left."""


class LayerPart(NamedTuple):
    """What is solved together.

    Attributes:
      loop: the identity of the scan's equation whose trips it is in; 0 around all scans.
    """

    layer: int
    kind: str
    loop: int


@dataclass(frozen=True)
class _Layers:
    """A step in one stage, in which some layers have scopes.

    Attributes:
      number: for each layer of the chain an equal one that has a scope.
    """

    function: StageFunction
    number: Sequence[int]


class LayerBounds:
    """What each layer of a chain takes at least, on one mesh after the other.

    Raises:
      ValueError: an operation cannot be computed in groups; names it.
    """

    def __init__(self, step: UncutStep, chain: LayerChain):
        self._layers = _marked_layers(step, chain)

    def seconds(self, mesh: AbstractMesh, hardware: Hardware) -> tuple[np.ndarray, np.ndarray]:
        """Returns `[L]` seconds of a micro-batch in each layer and `[L]` of the step's end, with any sharding."""
        function, number = self._layers.function, list(self._layers.number)
        options = Options(fn=function, mesh=mesh, hardware=hardware, memory_limit_bytes=np.inf, progress="none")
        traced = trace_function(options, function.shapes)
        weigh(function, traced.graph, mesh)
        traced.graph.stored_until.clear()  # residuals that the backward program may compute in its own kernels are free
        space = space_of(options, traced)
        each_s, end_s = layer_seconds(space, function, set(number))
        slack_s = space.most_preference_s
        each_s, end_s = (np.maximum([seconds[layer] - slack_s for layer in number], 0.0) for seconds in (each_s, end_s))
        return each_s / function.staged.num_microbatches, end_s


def layer_seconds(
    space: ShardingSpace, function: StageFunction, layers: set[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns what some layers take at least for all micro-batches, and at the end of a step, preferences included.

    Args:
      space: of the whole step in one stage, whose equations have the scopes of their layers.
    """
    parts = [part_of(node) for node in space.nodes]
    shares = PartShares(space.graph, [part_of(Node(v, None, ())) for v in space.graph.vertices], space.hardware)
    costs = NodeCosts(space.axis_sizes, space.hardware, space.reshard_costs, shares, space.kernels, space.forms)
    each_s, end_s = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    members: dict[LayerPart, list[int]] = {}
    for n, (node, part) in enumerate(zip(space.nodes, parts, strict=True)):
        if part is None or part.layer not in layers:
            continue
        if function.is_each(node.vertex):
            members.setdefault(part, []).append(n)
        elif node.hub is None:
            end_s[part.layer] += float(np.min(costs.node_s(node)))
    kept = [e for e in space.edges if e.node != e.reader and _is_inside(space, parts, e.node, e.reader, e.value)]
    matrices = transfer_matrices(kept, space.nodes, space.reshard_costs, shares)
    solved: dict[bytes, float] = {}
    for part, nodes in members.items():
        index = {n: i for i, n in enumerate(nodes)}
        edges = {(index[a], index[b]): m for (a, b), m in matrices.items() if a in index and b in index}
        problem = Problem([costs.node_s(space.nodes[n]) for n in nodes], _pairs(edges), list(edges.values()))
        each_s[part.layer] += _least_s(problem, solved)
    return each_s, end_s


def part_of(node: Node) -> LayerPart | None:
    """Returns the part of a layer that a node belongs to; None outside of all layers."""
    vertex = node.vertex
    scope = _SCOPE.search(vertex.scope)
    if scope is None:
        return None
    is_border = vertex.kind in ("carry", "slice", "stack")
    loops = [equation for equation in vertex.callers if equation.primitive.name in ("scan", "while")]
    loop = loops[0] if loops else vertex.equation if is_border else None
    return LayerPart(int(scope.group(1)), scope.group(2), 0 if loop is None else id(loop))


class PartShares(CollectiveShares):
    """The parts of collectives that count in every stage that has a layer."""

    def __init__(self, graph: Graph, parts: Sequence[LayerPart | None], hardware: Hardware):
        super().__init__(graph, hardware.exposed_share)
        self._is_critical = _between_contractions(graph, parts)

    def latency(self, value: Value) -> float:
        """Returns the part of a latency that is surely the value's own."""
        return 1.0 if self._is_critical[value.vertex] else 0.0


def _between_contractions(graph: Graph, parts: Sequence[LayerPart | None]) -> np.ndarray:
    """Returns which vertices lie between two contractions of their part, `[vertices]`."""
    follows, leads = (np.zeros(len(graph.vertices), bool) for _ in range(2))

    def is_near(vertex: Vertex, other: int) -> bool:
        return parts[vertex.index] is not None and parts[vertex.index] == parts[other]

    for vertex in graph.vertices:
        follows[vertex.index] = is_contraction(vertex) or any(
            follows[o.vertex] and is_near(vertex, o.vertex) for o in vertex.operands if isinstance(o, Value)
        )
    consumers = graph.consumers()
    for vertex in reversed(graph.vertices):
        leads[vertex.index] = any(
            is_near(vertex, reader.index) and (is_contraction(reader) or leads[reader.index])
            for value in vertex.results
            for reader, _ in consumers[value.id]
        )
    return follows & leads


def _is_inside(space: ShardingSpace, parts: Sequence[LayerPart | None], node: int, reader: int, value: Value) -> bool:
    """Tells whether a value is resharded between two nodes in the same way in every stage that has their layer."""
    if parts[node] is None or parts[node] != parts[reader]:
        return False
    if space.graph.vertices[value.vertex].kind == "stack":  # it has one more trip for each further layer
        return False
    return space.nodes[reader].vertex.kind != "slice" or space.nodes[reader].hub is not None


def _pairs(edges: Any) -> np.ndarray:
    return np.array(list(edges), int).reshape(-1, 2)


def _least_s(problem: Problem, solved: dict[bytes, float]) -> float:
    """Returns a lower bound of a problem, known from an equal one or solved."""
    arrays = (*problem.node_cost, problem.edge_nodes, *problem.edge_cost)
    key = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    if key not in solved:
        found = solve(problem, time_limit_s=_TIME_LIMIT_S, stop_gap=_GAP)
        least_s = sum(float(np.min(cost)) for cost in problem.node_cost)
        solved[key] = max(found.lower_bound, least_s)
    return solved[key]


def _marked_layers(step: UncutStep, chain: LayerChain) -> _Layers:
    """Returns the step in one stage with scopes around the first of all equal layers."""
    first: dict[Any, int] = {}
    for layer, signature in enumerate(chain.signatures):
        first.setdefault(signature, layer)
    starts = sorted({start for layer in first.values() for start in (layer, layer + 1) if 0 < start < len(chain)})
    cut = cut_step(step, chain.cuts_before(starts))
    labelled = LabelledStep(cut.parts, cut.cuts)
    number = {layer: (0, *starts).index(layer) for layer in first.values()}
    whole = in_groups(staged_step(cut.parts, [], layers=labelled))
    return _Layers(StageFunction(whole, 0, 1, cut.replaced), [number[first[s]] for s in chain.signatures])
