"""A layout as an explicit program for each device: nothing is left for a compiler to partition.

The graph is evaluated again inside one `jax.shard_map` over the whole mesh. Every value is a block, every operation
runs on blocks (`local_operations.py`), and a collective stands exactly where the layout has one (`local_blocks.py`):
where a reduction is finished, where a stored array is gathered for its readers, and where a reader wants another spec
than the one in which it finds a value.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.extend import core, source_info_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from search_spaces.sharding.base import REMAT, Block, Graph, Layout, Operand, Region, Spec, Value, Vertex
from search_spaces.sharding.execution import partition_spec
from search_spaces.sharding.local_blocks import Blocks
from search_spaces.sharding.local_operations import LocalCall, combiner, run_local, runs_whole
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.spec import replicated

Environment = dict[int, Any]
"""The block of each value, by id, with the spec in which its readers find it."""


class DeviceProgram:
    """A graph with a layout on a mesh, as a function of flat arguments; the protocol is that of `Execution`.

    Args:
      graph: the traced function.
      layout: for every vertex its strategy, for every value the spec that its readers find.
      mesh: the mesh; an abstract one can be lowered for, not run on.
      path: the steps between two specs: those that were priced.
    """

    def __init__(self, graph: Graph, layout: Layout, mesh: Mesh | AbstractMesh, path: Paths):
        self.graph, self.layout, self.mesh, self.path = graph, layout, mesh, path
        self.blocks = Blocks(tuple(mesh.axis_names), tuple(mesh.shape[name] for name in mesh.axis_names))

    def sharding(self, spec: Spec) -> NamedSharding:
        """A spec as a JAX sharding on the mesh."""
        return NamedSharding(self.mesh, partition_spec(spec, self.blocks.axis_names))

    def whole_operations(self) -> list[Vertex]:
        """Operations that the layout splits but that have no form on blocks: they run whole on every device."""
        return [
            vertex
            for vertex in self.graph.operations()
            if runs_whole(vertex, self.layout.strategies[vertex.index], self.blocks.axis_sizes)
        ]

    def __call__(self, *arguments: Any) -> list[Any]:
        """The function's flat results."""
        stored = [self.layout.strategies[v.index].unreduced[0] for v in self.graph.constants]
        program = jax.shard_map(
            self._run,
            mesh=self.mesh,
            in_specs=tuple(
                partition_spec(spec, self.blocks.axis_names) for spec in (*self.layout.input_specs, *stored)
            ),
            out_specs=[partition_spec(spec, self.blocks.axis_names) for spec in self.layout.output_specs],
            check_vma=False,
        )
        return program(*arguments, *self.graph.constant_arrays)

    def _run(self, *blocks: Any) -> list[Any]:
        """What one device does with its blocks of the arguments and of captured arrays."""
        env: Environment = {}
        for vertex, block in zip((*self.graph.inputs, *self.graph.constants), blocks, strict=True):
            self._enter(env, vertex, block)
        self._steps(env, self.graph.block.steps)
        targets = zip(self.graph.outputs, self.layout.output_specs, strict=True)
        return [self._read(env, output, spec) for output, spec in targets]

    def _reshard(self, block: Any, value: Value, source: Spec, target: Spec) -> Any:
        return self.blocks.reshard(block, value.shape, source, self.path(source, target)) if value.shape else block

    def _read(self, env: Environment, operand: Operand, spec: Spec) -> Any:
        if not isinstance(operand, Value):
            return operand.val
        return self._reshard(env[operand.id], operand, self.layout.value_specs[operand.id], spec)

    def _operands(self, env: Environment, vertex: Vertex) -> list[Any]:
        specs = self.layout.strategies[vertex.index].operands
        return [self._read(env, operand, spec) for operand, spec in zip(vertex.operands, specs, strict=True)]

    def _enter(self, env: Environment, vertex: Vertex, block: Any) -> None:
        """Puts an array that a vertex stores into the environment, gathered as the strategy has it."""
        strategy, value = self.layout.strategies[vertex.index], vertex.results[0]
        if value.shape:
            block = self.blocks.reshard(block, value.shape, strategy.unreduced[0], strategy.reductions[0])
        env[value.id] = self._reshard(block, value, strategy.results[0], self.layout.value_specs[value.id])

    def _steps(self, env: Environment, steps: Sequence[Vertex | Region]) -> None:
        for step in steps:
            assert step.equation is not None
            with _context_of(step.equation):
                if isinstance(step, Region):
                    self._region(env, step)
                else:
                    self._operation(env, step)

    def _operation(self, env: Environment, vertex: Vertex) -> None:
        strategy = self.layout.strategies[vertex.index]
        call = LocalCall(vertex, strategy, self.blocks)
        if runs_whole(vertex, strategy, self.blocks.axis_sizes):
            whole = call.bind([self._read(env, o, replicated(_rank(o))) for o in vertex.operands])
            results = [
                self._reshard(array, value, replicated(len(value.shape)), spec)
                for array, value, spec in zip(whole, vertex.results, strategy.results, strict=True)
            ]
        else:
            results = [
                self.blocks.reduce(block, unreduced, steps, combiner(vertex))
                for block, unreduced, steps in zip(
                    run_local(call, self._operands(env, vertex)), strategy.unreduced, strategy.reductions, strict=True
                )
            ]
        for value, block, spec in zip(vertex.results, results, strategy.results, strict=True):
            env[value.id] = self._reshard(block, value, spec, self.layout.value_specs[value.id])

    def _region(self, env: Environment, region: Region) -> None:
        run: dict[str, Callable[[Environment, Region], None]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            **dict.fromkeys(REMAT, self._remat),
        }
        run[region.equation.primitive.name](env, region)

    def _remat(self, env: Environment, region: Region) -> None:
        """The region's lowering is a barrier on what comes in; without it the work is merged with the forward pass."""
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

    def _initial(self, env: Environment, carries: Sequence[Vertex]) -> list[Any]:
        return [
            jnp.asarray(self._read(env, c.operands[0], self.layout.strategies[c.index].operands[0]), c.results[0].dtype)
            for c in carries
        ]

    def _next(self, env: Environment, carries: Sequence[Vertex]) -> list[Any]:
        return [self._read(env, c.operands[1], self.layout.strategies[c.index].operands[1]) for c in carries]

    def _leave(self, env: Environment, carries: Sequence[Vertex], blocks: Sequence[Any]) -> None:
        """What a loop leaves of its carries."""
        for vertex, block in zip(carries, blocks, strict=True):
            value, spec = vertex.results[1], self.layout.strategies[vertex.index].results[1]
            env[value.id] = self._reshard(block, value, spec, self.layout.value_specs[value.id])

    def _inside(self, env: Environment, carries: Sequence[Vertex], blocks: Sequence[Any]) -> Environment:
        inner = dict(env)
        for vertex, block in zip(carries, blocks, strict=True):
            self._enter(inner, vertex, block)
        return inner

    def _scan(self, env: Environment, region: Region) -> None:
        params = region.equation.params
        stacks = [self.graph.vertices[v.vertex] for v in region.results[len(region.carries) :]]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = self._inside(env, region.carries, carry)
            for vertex, x in zip(region.slices, xs, strict=True):
                self._enter(inner, vertex, x)
            self._steps(inner, region.blocks[0].steps)
            return self._next(inner, region.carries), [self._operands(inner, stack)[0] for stack in stacks]

        xs = [self._operands(env, vertex)[0] for vertex in region.slices]
        loop = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(body, self._initial(env, region.carries), xs, **loop)
        self._leave(env, region.carries, carry)
        for stack, y in zip(stacks, ys, strict=True):
            value, spec = stack.results[0], self.layout.strategies[stack.index].results[0]
            env[value.id] = self._reshard(y, value, spec, self.layout.value_specs[value.id])

    def _while(self, env: Environment, region: Region) -> None:
        condition, body = region.blocks

        def proceed(carry: list[Any]) -> Any:
            inner = self._inside(env, region.carries, carry)
            self._steps(inner, condition.steps)
            return self._read(inner, condition.outputs[0], ())

        def step(carry: list[Any]) -> list[Any]:
            inner = self._inside(env, region.carries, carry)
            self._steps(inner, body.steps)
            return self._next(inner, region.carries)

        self._leave(env, region.carries, jax.lax.while_loop(proceed, step, self._initial(env, region.carries)))

    def _cond(self, env: Environment, region: Region) -> None:
        joins = [self.graph.vertices[v.vertex] for v in region.results]

        def branch(number: int, block: Block) -> Callable[[], list[Any]]:
            def run() -> list[Any]:
                inner = dict(env)
                self._steps(inner, block.steps)
                specs = [self.layout.strategies[join.index].operands[number] for join in joins]
                read = [self._read(inner, output, spec) for output, spec in zip(block.outputs, specs, strict=True)]
                return [jnp.asarray(x, join.results[0].dtype) for x, join in zip(read, joins, strict=True)]

            return run

        index = self._read(env, region.operands[0], ())
        results = jax.lax.switch(index, [branch(i, b) for i, b in enumerate(region.blocks)])
        for join, block in zip(joins, results, strict=True):
            self._enter(env, join, block)


def _rank(operand: Operand) -> int:
    return len(operand.shape) if isinstance(operand, Value) else np.ndim(operand.val)


@contextlib.contextmanager
def _context_of(equation: core.JaxprEqn) -> Iterator[None]:
    """The source, random-number and compute context of an equation, without the mesh in which it was traced."""
    info, context = equation.source_info, equation.ctx
    stack = source_info_util.current_name_stack() + info.name_stack
    with contextlib.ExitStack() as entered:
        entered.enter_context(source_info_util.user_context(info.traceback, name_stack=stack))
        entered.enter_context(jax.threefry_partitionable(context.threefry_partitionable))
        if context.compute_type is not None:
            entered.enter_context(compute_on(context.compute_type))
        yield
