"""A layout as an explicit program for each device: nothing is left for a compiler to partition.

The graph is evaluated again inside one `jax.shard_map` over the whole mesh. Every value is a block, every operation
runs on blocks (`local_operations.py`), and a collective stands exactly where the layout has one (`local_blocks.py`):
where a reduction is finished, where a stored array is gathered for its readers, and where a reader wants another spec
than the one in which it receives a value.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from search_spaces.communication.collectives import from_codes, to_codes
from search_spaces.partition_specs import IndexedSpec, named_spec, partition_spec
from search_spaces.replay import bind
from search_spaces.sharding.base import Layout, ReshardStep, ShardingStrategy
from search_spaces.sharding.coded_exchanges import run_exchange
from search_spaces.sharding.coded_sums import coded_sum, finish_sum
from search_spaces.sharding.codes import CODES, precision_of
from search_spaces.sharding.delayed_scales import DelayedScales, Scales
from search_spaces.sharding.executor import Flow, Keeping, ReadOperand
from search_spaces.sharding.graph import Graph, Value, Vertex, follows_contraction, rank_of
from search_spaces.sharding.interpreter import GraphInterpreter
from search_spaces.sharding.kept_codes import LateReads
from search_spaces.sharding.local_blocks import Blocks, context_of_blocks
from search_spaces.sharding.local_operations import LocalCall, combiner, run_local, unpadded, untyped_parameters
from search_spaces.sharding.number_formats import Codes, formatted_product, rounded
from search_spaces.sharding.product_formats import FORMATS
from search_spaces.sharding.replicated_operations import replicated_operations
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.schedule import ProgramSchedule
from search_spaces.sharding.spec import replicated_spec
from search_spaces.sharding.sum_residuals import MAXIMA, residuals_of


class DeviceProgram:
    """A graph with a layout on a mesh, as a function of flat arguments; called like `execution.Execution`.

    Args:
      layout: for every vertex its strategy, for every value the spec in which its readers receive it.
      mesh: the mesh; an abstract one can be lowered for, not run on.
      path: the steps between two specs: those that were priced.
      late: what is kept as codes for the backward pass.
    """

    delayed: DelayedScales | None = None  # of a run

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        mesh: Mesh | AbstractMesh,
        path: Paths,
        schedule: ProgramSchedule,
        late: LateReads = LateReads(),  # noqa: B008, immutable
    ):
        self.graph, self.layout, self.mesh, self.path = graph, layout, mesh, path
        self.schedule, self.keeping = schedule, Keeping(self.keep, self.kept, late)
        self.residuals = {residual.vertex: residual for residual in residuals_of(path, graph, layout)}
        self.follows_contraction = follows_contraction(graph)
        self.blocks = Blocks(tuple(mesh.axis_names), tuple(mesh.shape[name] for name in mesh.axis_names))
        # Asked here, because within the mapping over the mesh a custom call could not be traced by itself.
        whole = replicated_operations(graph, layout.strategies, self.blocks.axis_sizes)
        self.replicated_operations = frozenset(vertex.index for vertex in whole)

    def __call__(self, *arguments: Any) -> list[Any]:
        """Runs the function on its flat arguments, and then the residuals; returns its flat results, and the next ones.

        Residuals are those of sums that the layout sends with error feedback, `self.residuals`.
        """
        layout, num_inputs = self.layout, len(self.graph.inputs)
        constants = [layout.strategies[v.index].unreduced[0] for v in self.graph.constants]
        own = [residual.spec for residual in self.residuals.values()]
        flow = Flow(lay_out=self.lay_out)

        def run(inputs: list[Any], constants: list[Any], residuals: list[Any]) -> list[Any]:
            # Of several devices' residuals, that of this one.
            parts = dict(zip(self.residuals, (residual[0] for residual in residuals), strict=True))
            own = copy.copy(self)
            own.delayed = self._delayed(parts.pop(MAXIMA)) if MAXIMA in parts else None
            interpreter = GraphInterpreter(
                self.graph, layout, self.path, own, self.schedule, flow, own.encode, self.keeping, own.delayed
            )
            results = interpreter(inputs, constants, parts)
            num_results = len(layout.output_specs)
            after = [] if own.delayed is None else [own.delayed.after(self.blocks.axis_names)]
            return [*results[:num_results], *(part[None] for part in (*results[num_results:], *after))]

        program = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=tuple(list(map(self._partition_spec, specs)) for specs in (layout.input_specs, constants, own)),
            out_specs=[self._partition_spec(spec) for spec in (*layout.output_specs, *own)],
            check_vma=False,
        )
        return program(list(arguments[:num_inputs]), self.graph.constant_arrays, list(arguments[num_inputs:]))

    def _partition_spec(self, spec: IndexedSpec) -> PartitionSpec:
        return partition_spec(named_spec(spec, self.blocks.axis_names))

    def _delayed(self, maxima: Any) -> DelayedScales:
        products = [vertex for vertex, name in self.layout.rounded if FORMATS[name].is_delayed]
        return DelayedScales(Scales.of(self.graph), products, maxima)

    # `executor.Arrays`: blocks of one device.

    def reshard(
        self, array: Any, value: Value, source: IndexedSpec, steps: Sequence[ReshardStep], exchanged_in: str = ""
    ) -> Any:
        """Runs the collective of each step."""
        if exchanged_in:
            return run_exchange(self.blocks, array, value, source, steps, exchanged_in)
        if isinstance(array, Codes):
            return array._replace(codes=self.blocks.reshard(array.codes, value.shape, source, steps))
        block = self.blocks.reshard(array, value.shape, source, steps)
        # XLA leaves the result of an all-to-all as it arrives, and all that is added to it lies so as well: without
        # this, the embeddings of a batch would decide how the residual stream of all layers lies.
        is_embedding = not self.follows_contraction[value.vertex] and any(step.kind == "all_to_all" for step in steps)
        return self.lay_out(block) if is_embedding and self.schedule.barriers else block

    def fix(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        """Returns the block as it is: its spec is known."""
        del value, spec
        return array

    def operate(self, vertex: Vertex, read: ReadOperand) -> Sequence[Any]:
        """Runs an operation on blocks, or runs it whole and slices its results."""
        strategy = self.layout.strategies[vertex.index]
        if vertex.index not in self.replicated_operations:
            call = LocalCall(vertex, strategy, self.blocks)
            if strategy.format:
                return _checked(call, formatted_product(vertex, self._rounded_operands(call, read)))
            operands = [read(operand, spec) for operand, spec in zip(vertex.operands, strategy.operands, strict=True)]
            return _checked(call, run_local(call, operands))
        assert vertex.equation is not None
        operands = [read(operand, replicated_spec(rank_of(operand))) for operand in vertex.operands]
        results = bind(vertex.equation, operands, **untyped_parameters(vertex.equation))
        return [
            self._slice(array, value, spec)
            for array, value, spec in zip(results, vertex.results, strategy.results, strict=True)
        ]

    def _rounded_operands(self, call: LocalCall, read: ReadOperand) -> list[Codes]:
        """Returns the blocks of a product's operands, rounded on their way or here."""
        specs = call.strategy.operands
        operands = [read(o, spec, i) for i, (o, spec) in enumerate(zip(call.vertex.operands, specs, strict=True))]
        numbers = unpadded(call, [o.codes if isinstance(o, Codes) else o for o in operands])
        return [
            operand if isinstance(operand, Codes) else self.encode(block, call.vertex, position, specs[position])
            for position, (operand, block) in enumerate(zip(operands, numbers, strict=True))
        ]

    def encode(self, array: Any, vertex: Vertex, position: int, spec: IndexedSpec) -> Codes:
        """Rounds a block of an operand, which has a spec, to the format in which a product reads it."""
        to = FORMATS[self.layout.strategies[vertex.index].format]
        if to.is_delayed:
            assert self.delayed is not None
            return Codes(*self.delayed.rounded(array, vertex, position))
        axes = [self.blocks.axis_names[axis] for axis in to.maxima(vertex, position, spec)]
        return rounded(array, vertex, position, to, axes)

    def keep(self, array: Any, value: Value) -> tuple[Any, Any]:
        """Returns a block for the forward pass and its codes, which are made before anything reads the block."""
        codes = to_codes(array, CODES[self.keeping.late.kept[value.id]])
        array, codes = jax.lax.optimization_barrier((array, codes))
        return array, codes

    def kept(self, codes: Any, value: Value) -> Any:
        """Returns the block that `keep` was given, as its codes have it."""
        numbers, scales = codes
        shape = self.blocks.shape(value.shape, self.layout.value_specs[value.id])
        precision = CODES[self.keeping.late.kept[value.id]]
        return from_codes(numbers, scales, precision, shape[-1]).astype(value.dtype)

    def reduce(self, vertex: Vertex, results: Sequence[Any], residual: Any = None) -> Sequence[Any]:
        """Finishes the reduction of an operation on blocks."""
        strategy = self.layout.strategies[vertex.index]
        if vertex.index in self.replicated_operations:
            return results
        if strategy.sent_in:
            return self._finish_sum(vertex, strategy, results[0], residual)
        return [
            self.blocks.reduce(block, unreduced, steps, combiner(vertex))
            for block, unreduced, steps in zip(results, strategy.unreduced, strategy.reductions, strict=True)
        ]

    def _finish_sum(self, vertex: Vertex, strategy: ShardingStrategy, block: Any, residual: Any) -> list[Any]:
        """Finishes the partial sums of an operation's only result on codes; returns it, and the next residual if any.

        Without its residual a sum with error feedback is sent as without.
        """
        steps, precision = strategy.reductions[0], precision_of(strategy.sent_in)
        num_exact = coded_sum(self.path, vertex.results[0], steps, strategy.sent_in).num_exact
        of_sum = self.blocks, block, strategy.unreduced[0], steps, num_exact, precision
        if residual is None:
            return [finish_sum(*of_sum)[0]]
        form = self.residuals[vertex.index]
        rows = form.rows_first(residual)
        block, left = finish_sum(*of_sum, rows)
        return [block, form.rows_back(left.reshape(rows.shape))]

    def _slice(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        whole = replicated_spec(len(value.shape))
        return self.blocks.reshard(array, value.shape, whole, self.path(whole, spec)) if value.shape else array

    def lay_out(self, array: Any, major: int = 0) -> Any:
        """Constrains how a block lies in memory: one dimension is the slowest, and the others follow in their order."""
        if array.ndim < 2:
            return array
        order = (major, *(dim for dim in range(array.ndim) if dim != major))
        return with_layout_constraint(array, MemoryLayout(major_to_minor=order))

    def context_of(self, equation: core.JaxprEqn) -> AbstractContextManager[None]:
        """Restores the source line, name scope, random numbers and place of an equation, but not its mesh."""
        return context_of_blocks(equation)


def _checked(call: LocalCall, results: Sequence[Any]) -> Sequence[Any]:
    """Returns the results' blocks."""
    shapes = [jnp.shape(result) for result in results]
    if shapes != call.result_shapes:
        raise AssertionError(
            f"{call.vertex.primitive} ({call.vertex.user_source}) makes parts of {shapes} on one device, but its "
            f"plan has {call.result_shapes}. This is a fault of diffshard, not of the function; it runs with "
            '`executor="constraints"`.'
        )
    return results
