"""Runs a traced function with a layout: its graph evaluated again with sharding constraints at the layout's places."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from search_spaces.partition_specs import named_spec, partition_spec
from search_spaces.replay import REMAT, bind, context_of, scan_again
from search_spaces.sharding.base import (
    Block,
    Graph,
    Layout,
    Operand,
    Region,
    ReshardStep,
    ShardingStrategy,
    Spec,
    Value,
    Vertex,
)
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import divides_or_pads, replicated

Environment = dict[int, Any]
"""The arrays of values, by id."""


def make_layout(graph: Graph, strategies: Sequence[ShardingStrategy], value_specs: Sequence[Spec]) -> Layout:
    """Returns a layout from a strategy for each vertex and a spec for each value."""
    inputs = [strategies[vertex.index].unreduced[0] for vertex in graph.inputs]
    outputs = [
        inputs[argument]
        if argument is not None
        else value_specs[output.id]
        if isinstance(output, Value)
        else replicated(np.ndim(output.val))
        for output, argument in zip(graph.outputs, graph.feedback, strict=True)
    ]
    return Layout(tuple(strategies), tuple(value_specs), tuple(inputs), tuple(outputs))


class Execution:
    """A graph with a layout on a mesh, as a function of flat arguments.

    Args:
      graph: the traced function.
      layout: for every vertex its strategy, for every value the spec that its readers find.
      mesh: the mesh; an abstract one can be lowered for, not run on.
      path: the steps between two specs: those that were priced.
    """

    def __init__(self, graph: Graph, layout: Layout, mesh: Mesh | AbstractMesh, path: Paths):
        self.graph, self.layout, self.mesh = graph, layout, mesh
        self.axis_names = tuple(mesh.axis_names)
        self.axis_sizes = tuple(mesh.shape[name] for name in self.axis_names)
        self.path = path

    def on_mesh(self, mesh: Mesh | AbstractMesh) -> "Execution":
        """Returns the same function and layout on another mesh, which must have the same axes."""
        return Execution(self.graph, self.layout, mesh, self.path)

    def sharding(self, spec: Spec) -> NamedSharding:
        """Returns a spec as a JAX sharding on the mesh."""
        return NamedSharding(self.mesh, partition_spec(named_spec(spec, self.axis_names)))

    def __call__(self, *arguments: Any) -> list[Any]:
        """Returns the function's flat results."""
        env: Environment = {}
        for vertex, array in zip(self.graph.inputs, arguments, strict=True):
            self._bind(env, vertex, [array])
        for vertex, array in zip(self.graph.constants, self.graph.constant_arrays, strict=True):
            self._bind(env, vertex, [array])
        self._steps(env, self.graph.block.steps)
        targets = zip(self.graph.outputs, self.layout.output_specs, strict=True)
        return [self._read(env, output, spec) for output, spec in targets]

    def _constrain(self, array: Any, value: Value, spec: Spec) -> Any:
        if not value.shape or not divides_or_pads(spec, value.shape, self.axis_sizes):
            return array  # on the way between padded splits
        return jax.lax.with_sharding_constraint(array, self.sharding(spec))

    def _reshard(self, array: Any, value: Value, source: Spec, target: Spec) -> Any:
        for step in self.path(source, target):
            array = self._constrain(array, value, step.spec)
        return array

    def _read(self, env: Environment, operand: Operand, spec: Spec) -> Any:
        if not isinstance(operand, Value):
            return operand.val
        return self._reshard(env[operand.id], operand, self.layout.value_specs[operand.id], spec)

    def _operands(self, env: Environment, vertex: Vertex) -> list[Any]:
        specs = self.layout.strategies[vertex.index].operands
        return [self._read(env, operand, spec) for operand, spec in zip(vertex.operands, specs, strict=True)]

    def _bind(self, env: Environment, vertex: Vertex, arrays: Iterable[Any]) -> None:
        """Puts a vertex's results into the environment, finished and as their readers find them."""
        strategy = self.layout.strategies[vertex.index]
        for value, array, unreduced, steps, spec in zip(
            vertex.results, arrays, strategy.unreduced, strategy.reductions, strategy.results, strict=False
        ):
            if vertex.kind == "operation":
                array = self._constrain(array, value, spec)
            else:
                array = self._gather(array, value, unreduced, steps)
            env[value.id] = self._reshard(array, value, spec, self.layout.value_specs[value.id])

    def _gather(self, array: Any, value: Value, stored: Spec, steps: Sequence[ReshardStep]) -> Any:
        if value.result or not value.shape:
            return array
        array = self._constrain(array, value, stored)
        for step in steps:
            array = self._constrain(array, value, step.spec)
        return array

    def _steps(self, env: Environment, steps: Sequence[Vertex | Region]) -> None:
        for step in steps:
            equation = step.equation
            assert equation is not None
            with context_of(equation):
                if isinstance(step, Region):
                    self._region(env, step)
                    continue
                self._bind(env, step, bind(equation, self._operands(env, step)))

    def _region(self, env: Environment, region: Region) -> None:
        name = region.equation.primitive.name
        run: dict[str, Callable[[Environment, Region], None]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            **dict.fromkeys(REMAT, self._remat),
        }
        run[name](env, region)

    def _remat(self, env: Environment, region: Region) -> None:
        """Runs a rematerialised region behind a barrier; without it XLA would merge the work with the forward pass."""
        params = region.equation.params
        inner = dict(env)
        barred = params["prevent_cse"]
        barred = (barred,) * len(region.operands) if isinstance(barred, bool) else barred
        values = [o for o, bar in zip(region.operands, barred, strict=True) if bar and isinstance(o, Value)]
        if params["differentiated"] and values:
            arrays = jax.lax.optimization_barrier([env[v.id] for v in values])
            inner.update(zip((v.id for v in values), arrays, strict=True))
        self._steps(inner, region.blocks[0].steps)
        for value in region.results:
            env.setdefault(value.id, inner[value.id])

    def _enter_carries(self, env: Environment, carries: Sequence[Vertex], arrays: Sequence[Any]) -> None:
        for vertex, array in zip(carries, arrays, strict=True):
            self._bind(env, vertex, [array])

    def _leave_carries(self, env: Environment, carries: Sequence[Vertex]) -> list[Any]:
        return [self._read(env, c.operands[1], self.layout.strategies[c.index].operands[1]) for c in carries]

    def _initial(self, env: Environment, carries: Sequence[Vertex]) -> list[Any]:
        specs = [self.layout.strategies[c.index].operands[0] for c in carries]
        init = [self._read(env, c.operands[0], spec) for c, spec in zip(carries, specs, strict=True)]
        return [
            jax.numpy.asarray(x, c.results[0].dtype) if isinstance(c.operands[0], core.Literal) else x
            for x, c in zip(init, carries, strict=True)
        ]

    def _final(self, env: Environment, carries: Sequence[Vertex], arrays: Sequence[Any]) -> None:
        for vertex, array in zip(carries, arrays, strict=True):
            value, stored = vertex.results[1], self.layout.strategies[vertex.index].results[1]
            array = self._constrain(array, value, stored)
            env[value.id] = self._reshard(array, value, stored, self.layout.value_specs[value.id])

    def _scan(self, env: Environment, region: Region) -> None:
        stacks = [self.graph.vertices[v.vertex] for v in region.results[len(region.carries) :]]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = dict(env)
            self._enter_carries(inner, region.carries, carry)
            for vertex, x in zip(region.slices, xs, strict=True):
                self._bind(inner, vertex, [x])
            self._steps(inner, region.blocks[0].steps)
            ys = [self._operands(inner, stack)[0] for stack in stacks]
            return self._leave_carries(inner, region.carries), ys

        xs = [self._operands(env, vertex)[0] for vertex in region.slices]
        carry, ys = scan_again(region.equation, body, self._initial(env, region.carries), xs)
        self._final(env, region.carries, carry)
        for stack, y in zip(stacks, ys, strict=True):
            value, spec = stack.results[0], self.layout.strategies[stack.index].results[0]
            env[value.id] = self._reshard(
                self._constrain(y, value, spec), value, spec, self.layout.value_specs[value.id]
            )

    def _while(self, env: Environment, region: Region) -> None:
        condition, body = region.blocks

        def proceed(carry: list[Any]) -> Any:
            inner = dict(env)
            self._enter_carries(inner, region.carries, carry)
            self._steps(inner, condition.steps)
            return self._read(inner, condition.outputs[0], ())

        def step(carry: list[Any]) -> list[Any]:
            inner = dict(env)
            self._enter_carries(inner, region.carries, carry)
            self._steps(inner, body.steps)
            return self._leave_carries(inner, region.carries)

        carry = jax.lax.while_loop(proceed, step, self._initial(env, region.carries))
        self._final(env, region.carries, carry)

    def _cond(self, env: Environment, region: Region) -> None:
        joins = [self.graph.vertices[v.vertex] for v in region.results]

        def branch(number: int, block: Block) -> Callable[[], list[Any]]:
            def run() -> list[Any]:
                inner = dict(env)
                self._steps(inner, block.steps)
                return [
                    jax.numpy.asarray(
                        self._read(inner, output, self.layout.strategies[join.index].operands[number]),
                        join.results[0].dtype,
                    )
                    if isinstance(output, core.Literal)
                    else self._read(inner, output, self.layout.strategies[join.index].operands[number])
                    for output, join in zip(block.outputs, joins, strict=True)
                ]

            return run

        index = self._read(env, region.operands[0], ())
        results = jax.lax.switch(index, [branch(i, b) for i, b in enumerate(region.blocks)])
        for join, array in zip(joins, results, strict=True):
            self._bind(env, join, [array])
