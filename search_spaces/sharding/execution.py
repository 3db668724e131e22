"""Runs a traced function with a layout by sharding constraints: the compiler partitions, and is told where.

The graph is evaluated again on whole arrays. Every result, every step of a reshard and every stored array gets a
constraint, so that the compiler finds the layout's own collectives the cheapest way between them.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from search_spaces.partition_specs import IndexedSpec, named_spec, partition_spec
from search_spaces.replay import bind, context_of
from search_spaces.sharding.base import Layout, ReshardStep, ShardingStrategy, coded_by, in_format
from search_spaces.sharding.custom_calls.operations import runs_on_parts
from search_spaces.sharding.executor import ReadOperand
from search_spaces.sharding.graph import Graph, Value, Vertex, rank_of
from search_spaces.sharding.interpreter import GraphInterpreter
from search_spaces.sharding.local_blocks import Blocks
from search_spaces.sharding.local_operations import LocalCall, combiner, run_local
from search_spaces.sharding.replicated_operations import is_replicated
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.schedule import ProgramSchedule
from search_spaces.sharding.spec import divides_or_pads, replicated_spec


def make_layout(
    graph: Graph,
    strategies: Sequence[ShardingStrategy],
    value_specs: Sequence[IndexedSpec],
) -> Layout:
    """Returns a layout from a strategy for each vertex and a spec for each value."""
    inputs = [strategies[vertex.index].unreduced[0] for vertex in graph.inputs]
    outputs = [
        inputs[argument]
        if argument is not None
        else value_specs[output.id]
        if isinstance(output, Value)
        else replicated_spec(np.ndim(output.val))
        for output, argument in zip(graph.outputs, graph.feedback, strict=True)
    ]
    return Layout(tuple(strategies), tuple(value_specs), tuple(inputs), tuple(outputs))


def chosen_layout(graph: Graph, strategies: list[ShardingStrategy], shared_reshards: Mapping[int, int]) -> Layout:
    """Returns the layout of a strategy for each node, where values with a shared reshard are read and kept as it says.

    Args:
      strategies: of the vertices, then of the shared reshards.
      shared_reshards: the index of the node of a value's shared reshard, by the value's id.
    """
    value_specs = []
    for value in graph.values:
        shared = shared_reshards.get(value.id)
        made_spec = strategies[value.vertex].results[value.result]
        value_specs.append(made_spec if shared is None else strategies[shared].results[0])
    chosen = list(strategies[: len(graph.vertices)])
    for value_id, shared in shared_reshards.items():
        vertex = graph.values[value_id].vertex
        for coded in coded_by(strategies[shared], vertex):
            chosen[vertex] = in_format(chosen[vertex], coded)
    return make_layout(graph, chosen, value_specs)


class Execution:
    """A graph with a layout on a mesh, as a function of flat arguments.

    Args:
      layout: for every vertex its strategy, for every value the spec in which its readers receive it.
      mesh: the mesh; an abstract one can be lowered for, not run on.
      path: the steps between two specs: those that were priced.
    """

    def __init__(self, graph: Graph, layout: Layout, mesh: Mesh | AbstractMesh, path: Paths):
        self.graph, self.layout, self.mesh, self.path = graph, layout, mesh, path
        self.axis_names = tuple(mesh.axis_names)
        self.axis_sizes = tuple(mesh.shape[name] for name in self.axis_names)

    def on_mesh(self, mesh: Mesh | AbstractMesh) -> Self:
        """Returns the same function and layout on another mesh with the same axes."""
        return type(self)(self.graph, self.layout, mesh, self.path)

    def __call__(self, *arguments: Any) -> list[Any]:
        """Runs the function; returns its flat results."""
        run = GraphInterpreter(self.graph, self.layout, self.path, self, ProgramSchedule())
        return run(arguments, self.graph.constant_arrays)

    # `executor.Arrays`: whole arrays with constraints.

    def reshard(
        self, array: Any, value: Value, source: IndexedSpec, steps: Sequence[ReshardStep], exchanged_in: str = ""
    ) -> Any:
        """Constrains an array to the spec after each step."""
        del source, exchanged_in
        for step in steps:
            array = self.fix(array, value, step.spec)
        return array

    def fix(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        """Constrains an array to a spec."""
        if not value.shape or not divides_or_pads(spec, value.shape, self.axis_sizes):
            return array  # on the way between padded splits
        sharding = NamedSharding(self.mesh, partition_spec(named_spec(spec, self.axis_names)))
        return jax.lax.with_sharding_constraint(array, sharding)

    def operate(self, vertex: Vertex, read: ReadOperand) -> Sequence[Any]:
        """Runs an operation on whole arrays."""
        assert vertex.equation is not None
        strategy = self.layout.strategies[vertex.index]
        on_parts = runs_on_parts(vertex)
        if on_parts and is_replicated(vertex, strategy, self.axis_sizes):  # in a plan that was edited
            return bind(vertex.equation, [read(o, replicated_spec(rank_of(o))) for o in vertex.operands])
        operands = [read(operand, spec) for operand, spec in zip(vertex.operands, strategy.operands, strict=True)]
        return self._on_parts(vertex, operands) if on_parts else bind(vertex.equation, operands)

    def _on_parts(self, vertex: Vertex, operands: Sequence[Any]) -> Sequence[Any]:
        """Runs an operation that XLA cannot partition on each device's own parts."""
        strategy = self.layout.strategies[vertex.index]
        blocks = Blocks(self.axis_names, self.axis_sizes)

        def run(*parts: Any) -> list[Any]:
            results = run_local(LocalCall(vertex, strategy, blocks), parts)
            return [
                blocks.reduce(part, unreduced, steps, combiner(vertex))
                for part, unreduced, steps in zip(results, strategy.unreduced, strategy.reductions, strict=True)
            ]

        def specs(given: Sequence[IndexedSpec]) -> list[Any]:
            return [partition_spec(named_spec(spec, self.axis_names)) for spec in given]

        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=tuple(specs(strategy.operands)),
            out_specs=specs(strategy.results),
            check_vma=False,
        )(*operands)

    def reduce(self, vertex: Vertex, results: Sequence[Any], residual: Any = None) -> Sequence[Any]:
        """Constrains the results of an operation."""
        del residual
        strategy = self.layout.strategies[vertex.index]
        constraints = zip(results, vertex.results, strategy.results, strict=True)
        return [self.fix(array, value, spec) for array, value, spec in constraints]

    def context_of(self, equation: core.JaxprEqn) -> AbstractContextManager[None]:
        """Restores the source line, name scope and settings of an equation."""
        return context_of(equation)


class PropagatedExecution(Execution):
    """A graph of which XLA's partitioner is told nothing but how operations run that it cannot partition."""

    def fix(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        """Returns the array as it is."""
        del value, spec
        return array
