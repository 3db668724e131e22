"""The sharding space: a traced function on a mesh as a `Problem`, and a choice back as something that runs.

The cost of a choice x is the predicted time of one step plus a preference for small arguments. Written as a problem,

    J(x) = Σ_v c_v[x_v] + Σ_(u,v) T_uv[x_u, x_v]    subject to    Σ_(k live at t) m_k[x_(node of k)] ≤ memory limit,

its terms are built by

| term               | meaning                                               | built by                              |
| ------------------ | ----------------------------------------------------- | ------------------------------------- |
| v, x_v             | vertices and shared reshards, and their strategies    | `nodes.nodes_of`                      |
| c_v                | node cost, the sum of the next four                   | `node_costs.NodeCosts.node_s`         |
| - arithmetic       | the slower of one device's FLOPs and memory traffic   | `node_costs.NodeCosts.compute_s`      |
| - traffic          | what kernels read and write, whatever lies between    | `kernels.kernels_of`                  |
| - reductions       | collectives that finish partial results, and gathers  | `node_costs.NodeCosts.reduction_s`    |
| - own collectives  | what an operation sends itself, as for a largest value | `NodeCosts.own_collectives`           |
| - preference       | a thousandth of the time to read the stored arguments | `node_costs.NodeCosts.preference_s`   |
| (u, v)             | a value that u makes and v reads or that is shared    | `edge_costs.edges_of`                 |
| T_uv               | edge cost: the reshards of these values               | `edge_costs.transfer_matrices`        |
| - reshard          | the cheapest single collectives between two specs     | `resharding.Paths`                    |
| shares             | what counts of a collective's latency and time        | `reshard_costs.CollectiveShares`      |
| weight of loops    | executions in one step, a factor of c_v and T_uv      | `tracing.build_graph`, as `weight`    |
| m_k                | usage: bytes on one device                            | `memory.usages_of`                    |
| times t of k       | when a usage is live                                  | `memory.lifetimes_of`                 |

Reductions and reshards are priced as latency · latency share + bytes · seconds for each byte, times the weight, and
times the share of it that the step waits for.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.base import Hardware, Link, Problem
from cost.edges import map_by_key
from cost.evaluation import checked_choice
from cost.quantities import Quantities
from search_spaces.base import Part
from search_spaces.sharding.base import Coded, Edge, FormatKey, GivenSpec, Layout, Node, Rule, ShardingStrategy
from search_spaces.sharding.coded_exchanges import exchangeable, with_used_exchanges
from search_spaces.sharding.codes import has_feedback
from search_spaces.sharding.device_program import DeviceProgram
from search_spaces.sharding.edge_costs import EdgeCosts, edges_of, shared_formats, transfer_matrices
from search_spaces.sharding.execution import Execution, chosen_layout
from search_spaces.sharding.explaining import (
    StepPrediction,
    Summary,
    next_bests,
    node_name,
    parts_of_prediction,
    predict,
    strategy_name,
)
from search_spaces.sharding.graph import Graph, Vertex
from search_spaces.sharding.host_state import HostArray, host_arrays, host_s_per_byte, with_host_strategies
from search_spaces.sharding.kept_codes import LateReads, Residuals
from search_spaces.sharding.kernels import Kernels, kernels_of
from search_spaces.sharding.memory import Lifetimes, Usages, lifetimes_of, memory_use, usages_of
from search_spaces.sharding.node_costs import NodeCosts
from search_spaces.sharding.nodes import nodes_of, with_formats
from search_spaces.sharding.program_steps import ProgramSteps, program_steps
from search_spaces.sharding.repetition import forms_of, tied_nodes
from search_spaces.sharding.reshard_costs import CollectiveShares, ReshardCosts
from search_spaces.sharding.schedule import ProgramSchedule
from search_spaces.sharding.scheduling import held_positions, make_schedule
from search_spaces.sharding.shardy import rules_of
from search_spaces.sharding.step_quantities import (
    preference_problem,
    step_problem,
    step_quantities,
)
from search_spaces.sharding.sum_residuals import bytes_of_strategies
from search_spaces.sharding.tracing import build_graph, feedback_of
from search_spaces.sharding.whole_work import notes_of

_ON_PRICES = frozenset({"node_costs", "problem", "quantities", "preference_problem", "step_problem", "least_compute_s"})
"""What of a space depends on the seconds of its nodes."""
_ON_NODES = frozenset(
    {"formats_of", "shared_formats", "nodes", "_strategy_numbers", "tied", "usages", "_transfer_matrices"}
)
"""What of a space depends on the strategies of its nodes."""
_ON_MEMORY = frozenset({"kernels", "lifetimes", "usages", "residuals", "_unpriced_costs"})
"""What of a space depends on when the memory of values is free."""


@dataclass(frozen=True)
class ShardingSpace:
    """Everything that can be chosen about a traced function on a mesh.

    `diffshard.search` writes a choice down before it runs: it takes `layout` and `execution`, the halves of `decode`.

    Args:
      graph: the traced function.
      axis_names, axis_sizes: `[A]` the mesh's axes.
      hardware: what computing and communicating costs.
      given: specs that inputs must keep, by flat argument; a dimension that is None is free.
      donated: for each flat argument, whether its memory may be used again.
      memory_limit_bytes: for each device; `inf` for none.
      as_program: whether operations are split only in ways that have a form on one device's part
        (`replicated_operations`); without it, only in ways that XLA's partitioner computes rightly
        (`replicated_operations.is_partitioned_wrongly`).
      loaded: flat arguments that hosts load anew for each step: none is left whole on several hosts if it divides.
      offloads_state: whether arrays of the state may be in the host's memory between their updates.
      format_price_s: seconds that it costs to have something in a format, those that its part in the loss is worth: by
        the index of a product's vertex and the name of the format, or by `Coded`. Its strategies are there again for
        each format, after those as they are. What is not listed stays as it is.
    """

    graph: Graph
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    hardware: Hardware
    given: Mapping[int, GivenSpec]
    donated: tuple[bool, ...]
    memory_limit_bytes: float = np.inf
    as_program: bool = False
    loaded: frozenset[int] = frozenset()
    offloads_state: bool = False
    format_price_s: Mapping[FormatKey, float] = field(default_factory=dict)

    def with_formats(self, price_s: Mapping[FormatKey, float]) -> "ShardingSpace":
        """Returns the space with these free to be in fewer bits; what does not depend on it is not made again."""
        _ = self._exact_nodes, self._made_strategies, self._unpriced_costs, self.edge_costs  # which all have in common
        has_other_products = self.format_price_s.keys() != price_s.keys()
        return self._with({"format_price_s": dict(price_s)}, _ON_PRICES | (_ON_NODES if has_other_products else set()))

    @cached_property
    def formats_of(self) -> dict[int, list[str]]:
        """The formats that each product may be in, in the order of its strategies."""
        names: dict[int, list[str]] = {}
        for key in self.format_price_s:
            if not isinstance(key, Coded):
                names.setdefault(key[0], []).append(key[1])
        return names

    def strategy_numbers(self, node: int) -> dict[ShardingStrategy, int]:
        """Returns the index of each strategy of a node."""
        strategies = self.nodes[node].strategies
        if id(strategies) not in self._strategy_numbers:
            self._strategy_numbers[id(strategies)] = {strategy: s for s, strategy in enumerate(strategies)}
        return self._strategy_numbers[id(strategies)]

    @cached_property
    def _strategy_numbers(self) -> dict[int, dict[ShardingStrategy, int]]:
        return {}

    def with_donated(self, donated: Sequence[bool]) -> "ShardingSpace":
        """Returns the space with other arguments donated; what does not depend on it is not made again."""
        return self._with({"donated": tuple(donated)}, _ON_MEMORY | _ON_PRICES)

    def _with(self, fields: Mapping[str, Any], depending: Set[str]) -> "ShardingSpace":
        """Returns the space with other fields, and with what is made already of those that do not depend on them."""
        space = replace(self, **fields)
        made = {name: value for name, value in vars(self).items() if name not in vars(space) and name not in depending}
        vars(space).update(made)
        return space

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        """`[V]` operations by modules and primitive, arguments by path, shared reshards by whose readers they serve."""
        return tuple(node_name(node) for node in self.nodes)

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns `[S_v]` the specs of operands and results of each strategy, as `[data, -] [-, -] -> [data, -]`."""
        return tuple(strategy_name(strategy, self.axis_names) for strategy in self.nodes[node].strategies)

    def decode(self, choice: Sequence[int]) -> Execution:
        """Returns the function with a choice's layout, for flat arguments, on a mesh without devices.

        It can be lowered for the mesh; `on_mesh` of the result gives it devices to run on.

        Raises:
          ValueError: the choice has the wrong length or an index that its node does not have.
        """
        mesh = AbstractMesh(self.axis_sizes, self.axis_names, axis_types=(AxisType.Auto,) * len(self.axis_names))
        return self.execution(self.layout(choice), mesh)

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Returns the costs of a choice: "compute" parts, collectives by kind, and a "preference" for small arguments.

        Raises:
          ValueError: as `decode`.
        """
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        return parts_of_prediction(self.predict(choice), self.graph, self.node_names, sizes)

    def summarize(self, choice: Sequence[int]) -> Summary:
        """Returns everything that a plan says about a choice; raises `ValueError` as `decode`."""
        return Summary(
            self.layout(choice),
            self.predict(choice),
            memory_use(self.usages, choice),
            next_bests(self.problem, self.graph, self.nodes, self.shared_reshards, choice),
        )

    def layout(self, choice: Sequence[int]) -> Layout:
        """Returns the strategies and specs that a choice means; raises `ValueError` as `decode`."""
        pairs = zip(self.nodes, checked_choice(self.problem, choice), strict=True)
        layout = chosen_layout(self.graph, [node.strategies[s] for node, s in pairs], self.shared_reshards)
        return with_used_exchanges(self.reshard_costs.path, self.graph, layout)

    def predict(self, choice: Sequence[int]) -> StepPrediction:
        """Returns the seconds of a choice for each vertex and collective; raises `ValueError` as `decode`."""
        layout = self.layout(choice)
        return predict(self.graph, self.nodes, self.edges, self.node_costs, self.axis_names, layout, choice)

    def execution(self, layout: Layout, mesh: Mesh | AbstractMesh) -> Execution:
        """Returns the function with a layout on a mesh whose axes are the space's."""
        return Execution(self.graph, layout, mesh, self.reshard_costs.path)

    def device_program(self, layout: Layout, mesh: Mesh | AbstractMesh) -> DeviceProgram:
        """Returns the function with a layout on a mesh as an explicit program for each device.

        Where collectives hold arithmetic it has no schedule, because there is nothing that could run beside them.
        """
        path, schedule = self.reshard_costs.path, self._schedule(layout)
        return DeviceProgram(self.graph, layout, mesh, path, schedule, self.late_reads(layout))

    def late_reads(self, layout: Layout) -> LateReads:
        """Returns the values of the forward pass that a layout's program reads after it, if some of them are codes."""
        kept = {self.graph.vertices[c.vertex].results[0].id: c.format for c in layout.coded if c.kind == "kept"}
        return self.residuals.late_reads(kept) if kept else LateReads()

    def program_steps(self, layout: Layout) -> ProgramSteps:
        """Returns the steps of the device program of a layout, from which its timeline is played."""
        return program_steps(self.graph, layout, self.node_costs, self._schedule(layout), self.late_reads(layout))

    def _schedule(self, layout: Layout) -> ProgramSchedule:
        if self.hardware.exposed_share == 1:
            return ProgramSchedule()
        compute_s = self.node_costs.execution_s(self.graph.vertices, layout.strategies)
        return make_schedule(self.graph, layout, self.reshard_costs.path, compute_s, self.lifetimes.is_written)

    @cached_property
    def rules(self) -> list[Rule | None]:
        """The rule of each vertex."""
        return rules_of(self.graph)

    @cached_property
    def nodes(self) -> list[Node]:
        """One node for each vertex, in order, then the shared reshards."""
        codes = [key for key in self.format_price_s if isinstance(key, Coded)]
        shared_reshard_of = {key.vertex: self.node_of(key) for key in codes if key.kind != "sum"}
        formats = self.formats_of, self.shared_formats
        return with_formats(
            self._exact_nodes, *formats, codes, shared_reshard_of, self.axis_sizes, self._made_strategies
        )

    @cached_property
    def _made_strategies(self) -> dict[Hashable, tuple[ShardingStrategy, ...]]:
        return {}

    @cached_property
    def shared_formats(self) -> dict[int, tuple[str, ...]]:
        """The formats to which shared reshards can round values for several products, by the index of their node."""
        return shared_formats(self.graph, self.edges, self.formats_of)

    @cached_property
    def _exact_nodes(self) -> list[Node]:
        nodes = nodes_of(
            self.graph, self.rules, self.forms, self.given, self.reshard_costs, self.as_program, self._axes_to_split
        )
        return with_host_strategies(nodes, self.host_arrays)

    @cached_property
    def host_arrays(self) -> tuple[HostArray, ...]:
        """The arrays of the state that may be in the host's memory, in the order of their updates."""
        return host_arrays(self.graph) if self.offloads_state else ()

    @cached_property
    def _axes_to_split(self) -> dict[int, frozenset[int]]:
        """The mesh axes from host to host, for each flat argument that has to be split over them."""
        axes = enumerate(zip(self.axis_names, self.axis_sizes, strict=True))
        between_hosts = {i for i, (name, size) in axes if size > 1 and self.hardware.link(name).num_hosts > 1}
        return dict.fromkeys(self.loaded - self.given.keys(), frozenset(between_hosts)) if between_hosts else {}

    @cached_property
    def forms(self) -> list[int]:
        """A number for each vertex, equal for those that compute the same."""
        return forms_of(self.graph, self.rules)

    @cached_property
    def shared_reshards(self) -> dict[int, int]:
        """The index of the node of a value's shared reshard, by the value's id."""
        return {n.shared_value.id: i for i, n in enumerate(self._exact_nodes) if n.shared_value is not None}

    def node_of(self, key: FormatKey) -> int:
        """Returns the index of the node that decides whether something is in fewer bits."""
        of_result = isinstance(key, Coded) and key.kind != "sum"
        return self.shared_reshards.get(self.graph.vertices[key[0]].results[0].id, key[0]) if of_result else key[0]

    @cached_property
    def exchangeable(self) -> list[Vertex]:
        """The operations whose result may be exchanged as codes."""
        return exchangeable(self.graph)

    @cached_property
    def residuals(self) -> Residuals:
        """The arrays that can be kept as codes for the backward pass: shared values, and stacks of loops."""
        return Residuals(self.graph, self.lifetimes, self.shared_reshards.keys())

    @cached_property
    def tied(self) -> np.ndarray:
        """`[V]` numbers of the nodes, equal for those at the same place of equal layers."""
        return tied_nodes(self.graph, self.forms, self.nodes, self.shared_reshards)

    @cached_property
    def reshard_costs(self) -> ReshardCosts:
        """The seconds of reshards on the mesh, and the steps that they take."""
        return ReshardCosts(self.axis_names, self.axis_sizes, self.hardware)

    @cached_property
    def edges(self) -> list[Edge]:
        """Every way of a value from one node to another."""
        return edges_of(self.graph, self.shared_reshards)

    @cached_property
    def kernels(self) -> Kernels:
        """The reads from memory and writes to it of each vertex."""
        return kernels_of(self.graph, self.rules, self.donated)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Which values are written to memory, and when they live."""
        return lifetimes_of(self.graph, self.rules, self.donated)

    @cached_property
    def usages(self) -> Usages:
        """The bytes that each node's strategies hold in memory, and when."""
        return self.usages_with(self.lifetimes)

    def usages_with(self, lifetimes: Lifetimes) -> Usages:
        """Returns the usages if values lived for other times, as they do where other arguments are donated."""
        held = held_positions(self.graph, self.axis_sizes, self.hardware, self.reshard_costs.path)
        codes = [key for key in self.format_price_s if isinstance(key, Coded)]
        has_kept = any(key.kind == "kept" for key in codes)
        residuals = Residuals(self.graph, lifetimes, self.shared_reshards.keys()).of_value if has_kept else {}
        with_feedback = {key.vertex for key in codes if has_feedback(key.format)}
        residual_bytes = bytes_of_strategies(
            self.reshard_costs.path, [self.nodes[vertex] for vertex in sorted(with_feedback)], any(self.donated)
        )
        return usages_of(
            self.graph, self.nodes, self.shared_reshards, lifetimes, self.axis_sizes, held, residuals, residual_bytes,
            self.host_arrays,
        )  # fmt: skip

    @cached_property
    def node_costs(self) -> NodeCosts:
        """The costs of strategies by themselves."""
        return self._unpriced_costs.with_prices(self.format_price_s)

    @cached_property
    def _unpriced_costs(self) -> NodeCosts:
        costs, shares = self.reshard_costs, self._collective_shares
        host_s = host_s_per_byte(self.graph, self.host_arrays, self.hardware, prod(self.axis_sizes))
        return NodeCosts(self.axis_sizes, self.hardware, costs, shares, self.kernels, self.forms, host_s)

    @cached_property
    def edge_costs(self) -> EdgeCosts:
        """The costs of bringing a value from one node to another."""
        return EdgeCosts(self.reshard_costs, self._collective_shares)

    @cached_property
    def _collective_shares(self) -> CollectiveShares:
        return CollectiveShares(self.graph, self.hardware.exposed_share)

    @cached_property
    def least_compute_s(self) -> float:
        """Seconds of arithmetic and memory traffic that each choice takes at least, whatever its memory."""
        costs, nodes = self.node_costs, (node for node in self.nodes if node.shared_value is None)
        return sum(map_by_key(lambda n: float(np.min(costs.compute_s(n.vertex, n.strategies))), nodes, costs.key))

    @property
    def most_preference_s(self) -> float:
        """The most that preferences add up to: a bound on cost less this is a bound on the seconds of a step."""
        return sum(
            float(np.max(self.node_costs.preference_s(v, self.nodes[v.index].strategies))) for v in self.graph.inputs
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a reader of a plan: on loops of unknown length, and operations that run whole on every device."""
        return notes_of(self.graph, self.rules, self.axis_names, self.axis_sizes, self.as_program)

    @cached_property
    def quantities(self) -> Quantities:
        """The quantities that an objective of a step reads, see `search_spaces.sharding.step_quantities`."""
        return step_quantities(self.problem, self.nodes, self.edges, self.node_costs)

    @cached_property
    def preference_problem(self) -> Problem:
        """The problem without its seconds, to which an objective of the quantities is added."""
        return preference_problem(self.problem, self.nodes, self.node_costs)

    @cached_property
    def step_problem(self) -> Problem:
        """The problem with the links' limit, which is a maximum of two loads."""
        return step_problem(self.preference_problem, self.quantities)

    @cached_property
    def _transfer_matrices(self) -> dict[tuple[int, int], np.ndarray]:
        return transfer_matrices(self.edges, self.nodes, self.edge_costs)

    @cached_property
    def problem(self) -> Problem:
        """The space as a problem in seconds and bytes, built once."""
        return self.problem_with(self.node_costs.all_s(self.nodes), self._transfer_matrices, self.usages)

    def problem_with(
        self, node_cost: list[np.ndarray], matrices: Mapping[tuple[int, int], np.ndarray], usages: Usages
    ) -> Problem:
        """Returns a problem of the space's strategies with other costs and usages."""
        return Problem(
            node_cost=node_cost,
            edge_nodes=np.array(list(matrices), int).reshape(-1, 2),
            edge_cost=list(matrices.values()),
            usage_node=np.array(usages.node, int),
            usage=usages.num_bytes,
            usage_interval=np.array(usages.interval, int).reshape(-1, 2),
            memory_limit=self.memory_limit_bytes,
        )


def _example() -> ShardingSpace:
    """Makes the space of a step of gradient descent on one layer, on a mesh of 2 x 2 devices."""

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)

    arguments = (jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32))
    jaxpr, result = jax.make_jaxpr(step, return_shape=True)(*arguments)
    links = {"data": Link(1e-6, 1e-9), "model": Link(1e-6, 5e-10)}
    return ShardingSpace(
        graph=build_graph(jaxpr, feedback_of(result, arguments), ("weights", "x")),
        axis_names=("data", "model"),
        axis_sizes=(2, 2),
        hardware=Hardware("example", 1e9, 1e9, float("inf"), links),
        given={},
        donated=(True, False),
    )


EXAMPLE = _example
