"""The search for the stages of a step in one number of micro-batches: its layers, and how stages of them are solved."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, AxisType

from cost.base import Hardware, Problem
from cost.pipeline_schedules import BY_STAGES_LEFT, Schedule
from diffshard.live_progress import LiveLine
from diffshard.pipelines.cutting import CutStep, UncutStep, cut_step
from diffshard.pipelines.division_search import DivisionSearch
from diffshard.pipelines.even_division import EvenDivisionSearch
from diffshard.pipelines.layer_chain import LayerChain, layer_chain
from diffshard.pipelines.options import PipelineOptions, SearchProgress, memory_limit_of, mesh_shape
from diffshard.pipelines.stage_function import StageFunction, weigh
from diffshard.pipelines.stage_search import Entry, FoundDivision, StageLayout, stage_request
from diffshard.pipelines.stage_variants import StageVariants
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import space_of, trace_function
from diffshard.solving.solve import solve
from search_spaces.pipelines.example_groups import in_groups
from search_spaces.pipelines.stage_labels import Key, LabelledStep
from search_spaces.pipelines.stage_programs import StagedStep, staged_step
from search_spaces.sharding.base import Node
from search_spaces.sharding.edge_costs import EdgeCosts, transfer_matrices
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
    """A part of a layer whose operations are solved together.

    Attributes:
      loop: the identity of the scan's equation whose trips it is in; 0 around all scans.
    """

    layer: int
    kind: str
    loop: int


class LayerBounds:
    """Lower bounds on the seconds of each layer of a chain, on one mesh after the other.

    The step is in one stage, with scopes around the first of all equal layers.

    Raises:
      ValueError: an operation cannot be computed in groups; names it.
    """

    def __init__(self, step: UncutStep, chain: LayerChain):
        first: dict[Any, int] = {}
        for layer, signature in enumerate(chain.signatures):
            first.setdefault(signature, layer)
        starts = sorted({start for layer in first.values() for start in (layer, layer + 1) if 0 < start < len(chain)})
        cut = cut_step(step, chain.cuts_before(starts))
        whole = in_groups(staged_step(cut.parts, [], layers=LabelledStep(cut.parts, cut.cuts)))
        self._function = StageFunction(whole, 0, 1)
        self._number = [(0, *starts).index(first[signature]) for signature in chain.signatures]

    def seconds(self, mesh: AbstractMesh, hardware: Hardware) -> tuple[np.ndarray, np.ndarray]:
        """Returns `[L]` seconds of a micro-batch in each layer and `[L]` of the step's end, with any sharding."""
        function, number = self._function, self._number
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
    """Returns lower bounds on some layers for all micro-batches, and at the end of a step, preferences included.

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
        elif node.shared_value is None:
            end_s[part.layer] += float(np.min(costs.node_s(node)))
    kept = [e for e in space.edges if e.node != e.reader and _is_inside(space, parts, e.node, e.reader, e.value)]
    matrices = transfer_matrices(kept, space.nodes, EdgeCosts(space.reshard_costs, shares))
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
    """Returns whether a value is resharded between two nodes in the same way in every stage that has their layer."""
    if parts[node] is None or parts[node] != parts[reader]:
        return False
    if space.graph.vertices[value.vertex].kind == "stack":  # it has one more trip for each further layer
        return False
    return space.nodes[reader].vertex.kind != "slice" or space.nodes[reader].shared_value is not None


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


_MOST_LAYERS = 48


class StepSearch:
    """The search for the stages of a step in some number of micro-batches.

    Args:
      step: traced in M·R parts, where the examples of each micro-batch are in R groups, over which gradients are
        reduced once, when a step ends.
      progress: of the search in all numbers of micro-batches; None begins one that shows nothing.
    """

    def __init__(
        self, options: PipelineOptions, step: UncutStep, donated: Sequence[bool], progress: SearchProgress | None = None
    ):
        progress = SearchProgress(LiveLine("", None), options.time_limit_s) if progress is None else progress
        self.donated, self.is_donated = donated, all(donated[i] for i in step.call.feedback if i is not None)
        self.options, self.step, self.progress, self.num_groups = options, step, progress, step.parts.num_groups
        self.num_microbatches = step.parts.num_microbatches // self.num_groups
        self.submeshes = options.cluster.submeshes()
        self._least: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._staged: dict[tuple[int, int], StagedStep] = {}
        self._divisions: dict[int, DivisionSearch] = {}

    @cached_property
    def chain(self) -> LayerChain:
        """The layers of the step."""
        of_group = layer_chain(self.step, _MOST_LAYERS)
        return replace(
            of_group,
            sent_bytes=of_group.sent_bytes * self.num_groups,
            returned_bytes=of_group.returned_bytes * self.num_groups,
        )

    @property
    def divisions(self) -> DivisionSearch:
        """The search for stages that have their devices alone; only the process that searches has one."""
        return self.divisions_of(1)

    def divisions_of(self, stages_per_device: int) -> DivisionSearch:
        """Returns the search for stages of which some share each device, and its memory in equal parts."""
        if stages_per_device not in self._divisions:
            kinds = range(len(self.options.cluster.kinds))
            self._divisions[stages_per_device] = DivisionSearch(
                self.chain,
                self.num_microbatches,
                self.options.cluster,
                [memory_limit_of(self.options, kind) / stages_per_device for kind in kinds],
                partial(self._solve, stages_per_device),
                self.least_layer_s,
                self.options.pipeline.max_stages,
            )
        return self._divisions[stages_per_device]

    def candidates(
        self, schedule: Schedule, stages_per_device: int, is_over: Callable[[], bool]
    ) -> list[FoundDivision]:
        """Finds divisions into stages for a schedule, which lets each device hold a number of them."""
        if schedule in BY_STAGES_LEFT:
            return self.divisions.candidates(schedule, is_over)
        return self._even(schedule, stages_per_device).candidates(is_over)

    def has_places(self, schedule: Schedule, stages_per_device: int) -> bool:
        """Returns whether there are devices for a schedule, whatever they have of memory."""
        return schedule in BY_STAGES_LEFT or any(self._even(schedule, stages_per_device).places())

    def bound(self, schedule: Schedule, stages_per_device: int, target_s: float, is_over: Callable[[], bool]) -> float:
        """Returns a lower bound on the seconds of every division, as `DivisionSearch.bound`."""
        if schedule in BY_STAGES_LEFT:
            return self.divisions.bound(schedule, target_s, is_over)
        return self._even(schedule, stages_per_device).bound()

    def _even(self, schedule: Schedule, stages_per_device: int) -> EvenDivisionSearch:
        return EvenDivisionSearch(self.divisions_of(stages_per_device), schedule, stages_per_device)

    def request(self, entry: Entry) -> PlanRequest:
        """Returns the request for the sharding of a stage."""
        submesh = self.submeshes[entry.submesh]
        shape = mesh_shape(submesh)
        return stage_request(
            StageFunction(self._with_stage(entry), int(entry.start > 0), entry.in_flight),
            AbstractMesh(tuple(shape.values()), tuple(shape)),
            self.options.cluster.hardware(submesh.kind, shape),
            is_donated=self.is_donated,
            memory_limit_bytes=memory_limit_of(self.options, submesh.kind),
        )

    def _with_stage(self, entry: Entry) -> StagedStep:
        """Returns the step with the layers of an entry as one stage; the second one unless it is the first."""
        interval = entry.start, entry.end
        if interval not in self._staged:
            self._staged[interval], _ = self.staged(interval)
        return self._staged[interval]

    def _solve(self, stages_per_device: int, entry: Entry) -> StageLayout:
        try:
            layout = StageVariants(
                self.options,
                self._with_stage(entry),
                int(entry.start > 0),
                self.submeshes[entry.submesh],
                entry.in_flight,
                is_donated=self.is_donated,
                time_limit_s=self.progress.stage_limit_s(),
                stages_per_device=stages_per_device,
            ).fastest()
            self.progress.is_interrupted |= layout.is_interrupted
            return layout
        finally:
            self.progress.solved()

    @cached_property
    def layer_bounds(self) -> LayerBounds:
        """The bounds of the layers; raises `ValueError` if an operation cannot be computed in groups."""
        return LayerBounds(self.step, self.chain)

    def least_layer_s(self, submesh: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns lower bounds on a micro-batch and the end of a step in each layer on a submesh, `[L]` both."""
        if submesh not in self._least:
            shape = mesh_shape(self.submeshes[submesh])
            mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
            hardware = self.options.cluster.hardware(self.submeshes[submesh].kind, shape)
            self._least[submesh] = self.layer_bounds.seconds(mesh, hardware)
        return self._least[submesh]

    def staged(self, starts: Sequence[int]) -> tuple[StagedStep, CutStep]:
        """Cuts the step before some layers."""
        cut = cut_step(self.step, self.chain.cuts_before(starts))
        return self.programs(cut), cut

    def programs(self, cut: CutStep, copied: Collection[tuple[int, Key]] = ()) -> StagedStep:
        """Returns the programs of the step, cut into stages.

        Args:
          copied: stages with arguments that their micro-batches read from a copy.
        """
        staged = staged_step(cut.parts, cut.cuts, copied)
        if any(spec is not None for spec in self.step.given):
            pairs = zip(staged.inputs, cut.segments.spread(self.step.given), strict=True)
            staged = replace(staged, given={key: spec for key, spec in pairs if spec is not None})
        return in_groups(staged)


def search_in(searches: Iterable[StepSearch], num_microbatches: int, num_groups: int) -> StepSearch | None:
    """Returns the search of a step in some number of micro-batches and groups; None if it is not among some."""
    wanted = num_microbatches, num_groups
    return next((search for search in searches if (search.num_microbatches, search.num_groups) == wanted), None)
