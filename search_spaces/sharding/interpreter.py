"""Evaluates a graph with a layout: what every executor shares, whatever its arrays are.

A graph is evaluated vertex by vertex: operands are brought to the specs that the vertex's strategy wants, the operation
runs, and its results are brought to the specs in which their readers look for them. Loops, branches and rematerialised
regions run as they were traced. What an array is (a whole array with sharding constraints, or one device's block) and
how it is resharded and computed with is left to `Arrays`.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from search_spaces.partition_specs import IndexedSpec
from search_spaces.replay import REMAT
from search_spaces.sharding.base import Layout, ShardingStrategy
from search_spaces.sharding.delayed_scales import DelayedScales
from search_spaces.sharding.executor import Arrays, Encode, Flow, Keeping, Path
from search_spaces.sharding.graph import Block, Graph, Operand, Region, Value, Vertex, operations_in, values_of
from search_spaces.sharding.host_state import host_copies
from search_spaces.sharding.kept_codes import LateReads
from search_spaces.sharding.reshard_costs import is_message_coded
from search_spaces.sharding.schedule import Barrier, FetchStage, ProgramSchedule

Environment = ChainMap[Any, Any]
"""The array of each value, by id, with the spec in which its readers receive it; a region's arrays come first.

The last map is that of the straight line. There a fetch's array stands under its `Fetch`, and partial results that wait
for their reduction under their vertex.
"""


class _Key(NamedTuple):
    """Where something else stands in an environment than the array of a value.

    Attributes:
      what: the "codes" of a value, its array "on host", or the "residual" of an operation's sums (in the last map).
      number: the id of the value, or the index of the operation.
    """

    what: Literal["codes", "on host", "residual"]
    number: int | None


_codes, _on_host, _residual = (partial(_Key, what) for what in ("codes", "on host", "residual"))


class GraphInterpreter:
    """An interpreter of a graph with a layout, on an executor's arrays.

    Args:
      layout: for every vertex its strategy, for every value the spec in which its readers receive it.
      path: the steps between two specs: those that were priced.
      schedule: where the program has barriers; without them the compiler orders it.
      encode: what rounds an operand before it is moved; needed where the layout has products in float8.
      keeping: how values are kept as codes, where the layout has any.
      delayed: the scales of operands that have those of earlier steps.
    """

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        path: Path,
        arrays: Arrays,
        schedule: ProgramSchedule,
        flow: Flow = Flow(),  # noqa: B008, immutable
        encode: Encode | None = None,
        keeping: Keeping | None = None,
        delayed: DelayedScales | None = None,
    ):
        self.graph, self.layout, self.path, self.arrays, self.schedule = graph, layout, path, arrays, schedule
        self.flow, self.encode, self.keeping, self.delayed = flow, encode, keeping, delayed
        self.late = LateReads() if keeping is None else keeping.late
        self.host = host_copies(graph, layout.strategies)

    def __call__(
        self, arguments: Sequence[Any], constants: Sequence[Any], residuals: Mapping[int, Any] | None = None
    ) -> list[Any]:
        """Returns the function's flat results, with the layout's output specs, and then the next residuals.

        Args:
          arguments: the flat arguments.
          constants: the arrays of `Graph.constants`.
          residuals: of sums that are sent with error feedback, by vertex; inside loops stacked, as a scan slices them.
        """
        residuals = residuals or {}
        env: Environment = ChainMap({_residual(vertex): array for vertex, array in residuals.items()})
        for vertex, array in zip((*self.graph.inputs, *self.graph.constants), (*arguments, *constants), strict=True):
            self._enter(env, vertex, array)
        self._copy_in(env, None)
        self._steps(env, self.graph.block.steps)
        targets = zip(self.graph.outputs, self.layout.output_specs, strict=True)
        results = [self._result(env, output, spec) for output, spec in targets]
        return [*results, *(env[_residual(vertex)] for vertex in residuals)]

    def _result(self, env: Environment, output: Operand, spec: IndexedSpec) -> Any:
        if isinstance(output, Value) and output.id in self.host.of_result:
            return env[_on_host(output.id)]
        return self._read_operand(env, output, spec)

    def _copy_in(self, env: Environment, made: int | None) -> None:
        """Begins the copies from the host's memory that wait for a value."""
        for array in self.host.coming.get(made, ()):
            value, spec = self.graph.values[array.value], self.layout.strategies[array.vertex].unreduced[0]
            keys = [key for key in (made, _on_host(array.after)) if key in env]
            copy, after = self.flow.from_host(env.maps[-1].pop(_on_host(value.id)), value, [env[key] for key in keys])
            for key, other in zip(keys, after, strict=True):
                next(arrays for arrays in env.maps if key in arrays)[key] = other
            self._store(ChainMap(env.maps[-1]), value, copy, spec)

    def _arrived(self, env: Environment, value: Value) -> None:
        """Copies from and to the host's memory what was to wait for a value."""
        self._copy_in(env, value.id)
        if value.id in self.host.of_result:
            spec = self.layout.strategies[self.host.of_result[value.id].vertex].unreduced[0]
            array = self._reshard(env[value.id], value, self.layout.value_specs[value.id], spec)
            env[_on_host(value.id)] = self.flow.to_host(array, value)

    def _reshard(
        self, array: Any, value: Value, source: IndexedSpec, target: IndexedSpec, exchanged_in: str = ""
    ) -> Any:
        if not value.shape:
            return array
        return self.arrays.reshard(array, value, source, self.path(source, target), exchanged_in)

    def _read_operand(self, env: Environment, operand: Operand, spec: IndexedSpec) -> Any:
        if not isinstance(operand, Value):
            return operand.val
        maker, source = self.layout.strategies[operand.vertex], self.layout.value_specs[operand.id]
        exchanged_in = maker.exchanged_in if maker.exchanged_in and maker.results[0] == source else ""
        return self._reshard(env[operand.id], operand, source, spec, exchanged_in)

    def _read_message(self, env: Environment, vertex: Vertex, position: int, spec: IndexedSpec) -> Any:
        """Reads as `_read_operand` does, but rounds an operand of a product in float8 first if it is moved as codes."""
        operand = vertex.operands[position]
        assert isinstance(operand, Value)
        if not is_message_coded(self.path, self.layout, vertex, position):
            return self._read_operand(env, operand, spec)
        assert self.encode is not None
        source = self.layout.value_specs[operand.id]
        return self._reshard(self.encode(env[operand.id], vertex, position, source), operand, source, spec)

    def _read_array(self, env: Environment, operand: Operand, spec: IndexedSpec, dtype: Any) -> Any:
        """Reads as `_read_operand` does, but returns a literal as an array of the given type."""
        array = self._read_operand(env, operand, spec)
        return array if isinstance(operand, Value) else jnp.asarray(array, dtype)

    def _operand(self, env: Environment, vertex: Vertex, position: int) -> Any:
        return self._read_operand(
            env, vertex.operands[position], self.layout.strategies[vertex.index].operands[position]
        )

    def _store(self, env: Environment, value: Value, array: Any, spec: IndexedSpec) -> None:
        env[value.id] = self._as_read(array, value, spec)
        if value.id in self.late.kept:
            assert self.keeping is not None
            env[value.id], env[_codes(value.id)] = self.keeping.encode(env[value.id], value)
        self._arrived(env, value)

    def _as_read(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        """Returns an array that has a spec with that in which its readers receive it."""
        target = self.layout.value_specs[value.id]
        exchanged_in = self.layout.strategies[value.vertex].exchanged_in if spec != target else ""
        return self._reshard(array, value, spec, target, exchanged_in)

    def _with_late(self, env: Environment, vertex: Vertex) -> Environment:
        """Returns the environment that an operation after the forward pass reads: kept codes are decoded."""
        values = list(filter(self._is_late, values_of(vertex.operands)))
        return env.new_child({v.id: self._late_array(env, v) for v in values}) if values else env

    def _is_late(self, value: Value) -> bool:
        return value.id in self.late.kept or value.id in self.late.again

    def _late_array(self, env: Environment, value: Value) -> Any:
        """Returns a value from its codes, or computed again from others that are."""
        if value.id in self.late.kept:
            return self._decoded(env[_codes(value.id)], value)
        vertex = self.graph.vertices[value.vertex]
        inner = self._with_late(env, vertex).new_child()
        with self._context_of(vertex):
            results = self.arrays.operate(vertex, lambda operand, spec, _=0: self._read_operand(inner, operand, spec))
            (array,) = self.arrays.reduce(vertex, results)
        spec = self.layout.strategies[vertex.index].results[0]
        return self._as_read(array, value, spec)

    def _enter(self, env: Environment, vertex: Vertex, array: Any) -> None:
        """Puts an array that a vertex stores into the environment, gathered as the strategy has it."""
        strategy, value = self.layout.strategies[vertex.index], vertex.results[0]
        if value.id in self.host.of_argument:
            env[_on_host(value.id)] = array
            return
        if value.shape:
            array = self.arrays.fix(array, value, strategy.unreduced[0])
            if vertex.index in self.schedule.bare_inputs:
                env[value.id] = array
                return
            array = self.arrays.reshard(array, value, strategy.unreduced[0], strategy.reductions[0])
        self._store(env, value, array, strategy.results[0])

    def _leave(self, env: Environment, vertex: Vertex, array: Any, result: int) -> None:
        """Puts what a loop leaves into the environment."""
        value, spec = vertex.results[result], self.layout.strategies[vertex.index].results[result]
        self._store(env, value, self.arrays.fix(array, value, spec), spec)

    def _steps(self, env: Environment, steps: Sequence[Vertex | Region]) -> None:
        for step in steps:
            assert step.equation is not None
            with self.arrays.context_of(step.equation):
                if isinstance(step, Region):
                    self._region(env, step)
                else:
                    self._operation(env, step)

    def _operation(self, env: Environment, vertex: Vertex) -> None:
        if vertex.index in self.schedule.barriers:
            self._pass_barrier(env, self.schedule.barriers[vertex.index])
        if vertex.index not in self.schedule.late_operations:
            self._run(env, vertex)

    def _run(self, env: Environment, vertex: Vertex) -> None:
        inside = self._with_late(env, vertex) if vertex.index in self.late.vertices else env

        def read(operand: Operand, spec: IndexedSpec, position: int | None = None) -> Any:
            fetch = self.schedule.fetches.get((vertex.index, operand.id)) if isinstance(operand, Value) else None
            if fetch is not None and fetch in env:
                return self._reshard(env[fetch], fetch.value, fetch.spec, spec)
            if position is not None and isinstance(operand, Value):
                return self._read_message(inside, vertex, position, spec)
            return self._read_operand(inside, operand, spec)

        results = self.arrays.operate(vertex, read)
        if vertex.index in self.schedule.late_reductions:
            scattered = _scattered_dimension(self.layout.strategies[vertex.index])
            env.maps[-1][vertex] = [self.flow.lay_out(array, scattered) for array in results]
        else:
            self._finish(env, vertex, results)

    def _finish(self, env: Environment, vertex: Vertex, partial: Sequence[Any]) -> None:
        key = _residual(vertex.index)
        if key in env:
            *results, env.maps[-1][key] = self.arrays.reduce(vertex, partial, env[key])
        else:
            results = self.arrays.reduce(vertex, partial)
        specs = self.layout.strategies[vertex.index].results
        for value, array, spec in zip(vertex.results, results, specs, strict=True):
            self._store(env, value, array, spec)

    def _pass_barrier(self, env: Environment, barrier: Barrier) -> None:
        """Joins what must have ended behind one barrier, and starts what may start now.

        The compiler carries the layout of what it joins neither to what makes it nor to what reads it, so the program
        says how it lies: partial results as their reduce-scatter wants them, and what is made of a reduced gradient as
        the state does. Otherwise the compiler copies, the state as well, which it then cannot update in place.
        """
        keys: dict[Any, None] = dict.fromkeys(v.id for v in barrier.values if v.id in env)
        keys.update(dict.fromkeys((*barrier.arrivals, *barrier.reductions)))
        roots = dict.fromkeys(stage.fetch.root.id for stage in barrier.stages if stage.is_first)
        if not keys and not roots:
            return
        reduced = {value.id for value in barrier.values} & self.schedule.reduced_values
        arrays = [self.flow.lay_out(env[key]) if key in reduced else env[key] for key in (*keys, *roots)]
        after = self.flow.barrier(arrays)
        for key, array in zip(keys, after, strict=False):
            next(arrays for arrays in env.maps if key in arrays)[key] = array
        line: Environment = ChainMap(env.maps[-1])
        for vertex in barrier.reductions:
            with self._context_of(vertex):
                self._finish(line, vertex, line[vertex])
        for vertex in barrier.operations:
            with self._context_of(vertex):
                self._run(line, vertex)
        with_stored = env.new_child(dict(zip(roots, after[len(keys) :], strict=True)))
        for stage in barrier.stages:
            line[stage.fetch] = self._start_stage(with_stored, stage)

    def _start_stage(self, env: Environment, stage: FetchStage) -> Any:
        """Returns the array of a fetch after a stage; the stored arrays stand in the first map."""
        fetch = stage.fetch
        reader = self.graph.vertices[fetch.readers[0]]
        if not stage.is_first:
            with self._context_of(reader):
                return self.arrays.reshard(env[fetch], fetch.value, stage.before, stage.steps)
        env = env.new_child()
        array = env[fetch.root.id]
        for vertex in fetch.chain:
            with self._context_of(vertex):
                results = self.arrays.operate(vertex, lambda operand, spec, _=0: self._read_operand(env, operand, spec))
                (array,) = self.arrays.reduce(vertex, results)
            if vertex is not fetch.chain[-1]:
                self._store(env, vertex.results[0], array, self.layout.strategies[vertex.index].results[0])
        with self._context_of(reader):
            if fetch.chain:
                made = self.layout.strategies[fetch.chain[-1].index].results[0]
                array = self._reshard(array, fetch.value, made, stage.before)
            if fetch.encoded_for is not None:
                assert self.encode is not None
                array = self.encode(array, reader, fetch.encoded_for, stage.before)
            return self.arrays.reshard(array, fetch.value, stage.before, stage.steps)

    def _context_of(self, vertex: Vertex) -> AbstractContextManager[None]:
        assert vertex.equation is not None
        return self.arrays.context_of(vertex.equation)

    def _region(self, env: Environment, region: Region) -> None:
        run: dict[str, Callable[[Environment, Region], None]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            **dict.fromkeys(REMAT, self._remat),
        }
        run[region.equation.primitive.name](env, region)

    def _remat(self, env: Environment, region: Region) -> None:
        """Runs a rematerialised region behind a barrier; without it XLA would merge the work with the forward pass."""
        params = region.equation.params
        inner = env.new_child()
        has_barrier = params["prevent_cse"]
        has_barrier = (has_barrier,) * len(region.operands) if isinstance(has_barrier, bool) else has_barrier
        values = [o for o, bar in zip(region.operands, has_barrier, strict=True) if bar and isinstance(o, Value)]
        values = [v for v in values if v.id in env]  # others wait for a barrier, or are fetched
        if params["differentiated"] and values:
            # Numbers that are kept as codes need not be there any more.
            keys = [_codes(v.id) if v.id in self.late.kept else v.id for v in values if v.id not in self.late.again]
            arrays = self.flow.barrier([env[key] for key in keys])
            inner.update(zip(keys, arrays, strict=True))
        self._steps(inner, region.blocks[0].steps)
        passed = {v.id for v in values}  # what the region only hands on goes on from behind its barrier
        for value in region.results:
            if value.id in inner and (value.id in passed or value.id not in env):
                env[value.id] = inner[value.id]

    def _initial(self, env: Environment, carries: Sequence[Vertex]) -> list[Any]:
        specs = [self.layout.strategies[carry.index].operands[0] for carry in carries]
        return [
            self._read_array(env, carry.operands[0], spec, carry.results[0].dtype)
            for carry, spec in zip(carries, specs, strict=True)
        ]

    def _inside(self, env: Environment, carries: Sequence[Vertex], arrays: Sequence[Any]) -> Environment:
        """Returns the environment of a loop's body."""
        inner = ChainMap(dict(env))
        for vertex, array in zip(carries, arrays, strict=True):
            self._enter(inner, vertex, array)
        return inner

    def _next(self, env: Environment, carries: Sequence[Vertex]) -> list[Any]:
        return [self._operand(env, carry, 1) for carry in carries]

    def _scan(self, env: Environment, region: Region) -> None:
        stacks = [self.graph.vertices[v.vertex] for v in region.results[len(region.carries) :]]
        vertices = sorted(vertex.index for vertex in operations_in(region.blocks[0].steps))
        residuals, delayed = [key for key in map(_residual, vertices) if key in env], self.delayed
        scales = delayed.of_loop(vertices) if delayed is not None else []
        first_residual, first_scale = len(region.slices), len(region.slices) + len(residuals)

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            slices = [x if c is None else self._decoded(x, c) for x, c in zip(xs, coded, strict=False)]
            inner = self._inside(env, [*region.carries, *region.slices], [*carry, *slices])
            inner.maps[-1].update(zip(residuals, xs[first_residual:first_scale], strict=True))
            with delayed.trip(scales, xs[first_scale:]) if delayed is not None else nullcontext([]) as found:
                self._steps(inner, region.blocks[0].steps)
            ys = [self._stacked(inner, stack) for stack in stacks]
            return self._next(inner, region.carries), [*ys, *(inner[key] for key in residuals), *found]

        coded = list(map(self._kept_stack, region.slices))
        xs = [
            self._operand(self._with_late(env, vertex), vertex, 0) if stack is None else env[_codes(stack.id)]
            for vertex, stack in zip(region.slices, coded, strict=True)
        ]
        xs += [env[key] for key in residuals]
        xs += delayed.now(scales) if delayed is not None else []
        carry, ys = self.flow.scan(region.equation, body, self._initial(env, region.carries), xs)
        env.maps[-1].update(zip(residuals, ys[len(stacks) :], strict=False))
        if delayed is not None:
            delayed.found_in_loop(scales, ys[len(stacks) + len(residuals) :])
        for vertex, array in zip(region.carries, carry, strict=True):
            self._leave(env, vertex, array, 1)
        for stack, array in zip(stacks, ys, strict=False):
            (value,) = stack.results
            if value.id in self.late.kept:
                env[_codes(value.id)] = self.arrays.fix(array, value, self.layout.strategies[stack.index].results[0])
            else:
                self._leave(env, stack, array, 0)

    def _stacked(self, env: Environment, stack: Vertex) -> Any:
        """Returns the part of a stack that a trip leaves: its codes, if the stack is kept as codes."""
        array, (value,) = self._operand(env, stack, 0), stack.results
        if value.id not in self.late.kept:
            return array
        assert self.keeping is not None
        return self.keeping.encode(array, value)[1]

    def _kept_stack(self, vertex: Vertex) -> Value | None:
        """Returns the stack of which a loop reads codes, each trip its own; one with another spec is decoded before."""
        (stack,) = vertex.operands
        if not isinstance(stack, Value) or stack.id not in self.late.kept:
            return None
        is_alike = self.layout.strategies[vertex.index].operands[0] == self.layout.value_specs[stack.id]
        return stack if is_alike else None

    def _decoded(self, codes: Any, value: Value) -> Any:
        assert self.keeping is not None
        return self.keeping.decode(codes, value)

    def _while(self, env: Environment, region: Region) -> None:
        condition, body = region.blocks

        def proceed(carry: list[Any]) -> Any:
            inner = self._inside(env, region.carries, carry)
            self._steps(inner, condition.steps)
            return self._read_operand(inner, condition.outputs[0], ())

        def step(carry: list[Any]) -> list[Any]:
            inner = self._inside(env, region.carries, carry)
            self._steps(inner, body.steps)
            return self._next(inner, region.carries)

        carry = self.flow.while_loop(proceed, step, self._initial(env, region.carries))
        for vertex, array in zip(region.carries, carry, strict=True):
            self._leave(env, vertex, array, 1)

    def _cond(self, env: Environment, region: Region) -> None:
        joins = [self.graph.vertices[v.vertex] for v in region.results]

        def branch(number: int, block: Block) -> Callable[[], list[Any]]:
            specs = [self.layout.strategies[join.index].operands[number] for join in joins]

            def run() -> list[Any]:
                inner = ChainMap(dict(env))
                self._steps(inner, block.steps)
                return [
                    self._read_array(inner, output, spec, join.results[0].dtype)
                    for output, spec, join in zip(block.outputs, specs, joins, strict=True)
                ]

            return run

        index = self._read_operand(env, region.operands[0], ())
        results = self.flow.switch(index, [branch(i, b) for i, b in enumerate(region.blocks)])
        for join, array in zip(joins, results, strict=True):
            self._enter(env, join, array)


def _scattered_dimension(strategy: ShardingStrategy) -> int:
    """Returns the dimension over which the partial results of an operation are scattered, 0 if they are not."""
    spec = strategy.unreduced[0]
    scatters = [step for step in strategy.reductions[0] if step.kind == "reduce_scatter"]
    return next((d for d, axes in enumerate(scatters[-1].spec) if axes != spec[d]), 0) if scatters else 0
