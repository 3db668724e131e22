"""Runs a traced function on the parts of a batch, one after the other, with the results of the whole batch.

What the batch flows through runs in a scan over the micro-batches. There operations have the forms that they have on
one device's part of an array, so that random bits, positions and lookups are those of the whole batch. Parts of sums
are added up in the scan, and what needs them, such as an optimiser's update, runs once after it. Where examples need
them, as the gradient of a product of means does, a scan before it makes these sums alone.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.partition_specs import IndexedSpec
from search_spaces.pipelines.batch_states import (
    BatchFlow,
    Split,
    State,
    Step,
    operands_of,
    spec_of,
    step_order,
    values_of,
)
from search_spaces.replay import bind
from search_spaces.sharding.base import Layout, ReshardStep
from search_spaces.sharding.executor import ReadOperand
from search_spaces.sharding.graph import Graph, Operand, Value, Vertex
from search_spaces.sharding.interpreter import Environment, GraphInterpreter
from search_spaces.sharding.local_blocks import Blocks, context_of_blocks
from search_spaces.sharding.local_operations import LocalCall, run_local, untyped_parameters
from search_spaces.sharding.schedule import ProgramSchedule

TOTALS = -1
"""The key in an environment, beside the ids of values, of the sums of the whole batch that examples read."""
_COMBINE = {"sum": lambda a, b: a + b, "max": jnp.maximum, "min": jnp.minimum}


class MicrobatchedFunction:
    """A function of flat arguments that runs in micro-batches.

    Args:
      graph: the traced function.
      flow: how the batch flows through it.
      num_microbatches: into how many parts the batch is divided.
      num_groups: R, into how many neighbouring groups the batch is divided first; each has the same number of parts.
        A call, which computes all parts one after the other, is for 1.
    """

    def __init__(self, graph: Graph, flow: BatchFlow, num_microbatches: int, num_groups: int = 1):
        self.graph, self.flow = graph, flow
        self.num_microbatches, self.num_groups = num_microbatches, num_groups
        self.order = step_order(graph, flow)
        specs = [spec_of(flow.states[value.id], len(value.shape)) for value in graph.values]
        self.layout = Layout(tuple(flow.strategies), tuple(specs), (), ())

    def __call__(self, *arguments: Any) -> list[Any]:
        """Returns the flat results of the whole batch."""
        env = self.environment({v.results[0].id: a for v, a in zip(self.graph.inputs, arguments, strict=True)})
        self.run_before(env)
        for sums in self._sums_before():
            self._add_sums(env, sums)
        self._run_microbatches(env)
        self.run_after(env)
        return [env[o.id] if isinstance(o, Value) else o.val for o in self.graph.outputs]

    def environment(self, arrays: dict[int, Any]) -> Environment:
        """Returns an environment with some arrays, by the ids of their values, and the constants."""
        constants = zip(self.graph.constants, self.graph.constant_arrays, strict=True)
        return ChainMap({**{vertex.results[0].id: array for vertex, array in constants}, **arrays})

    def run_before(self, env: Environment) -> None:
        """Runs what comes before all micro-batches; the environment has the whole batch."""
        whole = self._interpreter(0)
        for step in self.order.before:
            if isinstance(step, Vertex) and step.index in self.flow.early:
                self._run_whole(env, step)
            else:
                whole.run(env, (step,))

    def run_each(self, env: Environment, number: Any) -> None:
        """Runs a micro-batch; the environment has its part of the batch.

        Of sums that it reads it makes estimates, unless the environment has them in `TOTALS`.
        """
        self._interpreter(number, env.get(TOTALS, {})).run(env, self.order.each)

    def run_after(self, env: Environment) -> None:
        """Runs what comes after all micro-batches; the environment has what these made together."""
        self._interpreter(0).run(env, self.order.after)

    def _sums_before(self) -> list[list[Value]]:
        """Returns the sums that examples read, those first that can be made without the others."""
        read = self._read_as_totals(self.order.each)
        remaining = {value: set(self._read_as_totals(self._steps_to([value]))) for value in read}
        levels: list[list[Value]] = []
        while remaining:
            level = [value for value, needed in remaining.items() if not needed & remaining.keys()]
            assert level, "a sum depends on itself"
            levels.append(level)
            for value in level:
                del remaining[value]
        return levels

    def _read_as_totals(self, steps: Iterable[Step]) -> list[Value]:
        """Returns the sums of the whole batch that steps read for examples; loops and branches read none."""
        pairs = (
            (step, i) for step in steps if isinstance(step, Vertex) for i in self.flow.estimates.get(step.index, ())
        )
        operands = (step.operands[i] for step, i in pairs)
        return list(dict.fromkeys(operand for operand in operands if isinstance(operand, Value)))

    def _steps_to(self, values: Iterable[Value]) -> list[Step]:
        """Returns the steps of a micro-batch that lead to some values: a loop or a branch with all that it reads."""
        each = self.order.each
        maker = {value.id: number for number, step in enumerate(each) for value in values_of(step)}
        found, waiting = set[int](), [value.id for value in values]
        while waiting:
            number = maker.get(waiting.pop())
            if number is not None and number not in found:
                found.add(number)
                waiting += [operand.id for operand in operands_of(each[number]) if isinstance(operand, Value)]
        return [each[number] for number in sorted(found)]

    def _add_sums(self, env: Environment, sums: Sequence[Value]) -> None:
        """Makes sums over all micro-batches, and puts them into the environment for the examples that read them."""
        steps, totals = self._steps_to(sums), env.get(TOTALS, {})

        def trip(carry: list[Any], of_trip: tuple[Any, list[Any]]) -> tuple[list[Any], None]:
            inner = self._environment_of_trip(env, of_trip[1])
            self._interpreter(of_trip[0], totals).run(inner, steps)
            return self._combined(sums, carry, inner), None

        added, _ = lax.scan(trip, self._neutral(sums), self._of_trips(env))
        env[TOTALS] = {**totals, **{v.id: a.astype(v.dtype) for v, a in zip(sums, added, strict=True)}}

    def _run_microbatches(self, env: Environment) -> None:
        """Runs what each micro-batch runs, and puts what is read afterwards into the environment."""
        states = self.flow.states
        kept = self.values_read_afterwards()
        split = [value for value in kept if isinstance(states[value.id], Split)]
        repeated = [value for value in kept if states[value.id] == "whole"]
        combined = [value for value in kept if states[value.id] in ("sum", "max", "min")]

        def trip(carry: list[Any], of_trip: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            inner = self._environment_of_trip(env, of_trip[1])
            self.run_each(inner, of_trip[0])
            carry = self._combined(combined, carry, inner)
            return carry, [inner[value.id] for value in (*split, *repeated)]

        totals, stacks = lax.scan(trip, self._neutral(combined), self._of_trips(env))
        for value, total in zip(combined, totals, strict=True):
            env[value.id] = total.astype(value.dtype)
        for value, stack in zip((*split, *repeated), stacks, strict=True):
            is_split = isinstance(states[value.id], Split)
            env[value.id] = merged(stack, states[value.id]) if is_split else stack[-1]

    def _batch(self) -> list[Value]:
        """Returns the arguments that have the batch."""
        values = (vertex.results[0] for vertex in self.graph.inputs)
        return [value for value in values if isinstance(self.flow.states[value.id], Split)]

    def _of_trips(self, env: Environment) -> tuple[jax.Array, list[Any]]:
        return jnp.arange(self.num_microbatches), [self.divided(env[value.id]) for value in self._batch()]

    def _environment_of_trip(self, env: Environment, parts: Sequence[Any]) -> Environment:
        return ChainMap({**env, **dict(zip((value.id for value in self._batch()), parts, strict=True))})

    def _neutral(self, values: Sequence[Value]) -> list[Any]:
        return [neutral(self.flow.states[value.id], value.shape, value.dtype) for value in values]

    def _combined(self, values: Sequence[Value], totals: Sequence[Any], env: Environment) -> list[Any]:
        pairs = zip(values, totals, strict=True)
        return [combined_with(self.flow.states[value.id], total, env[value.id]) for value, total in pairs]

    def _run_whole(self, env: Environment, vertex: Vertex) -> None:
        """Runs an operation on the whole batch."""
        assert vertex.equation is not None
        operands = [env[o.id] if isinstance(o, Value) else o.val for o in vertex.operands]
        with context_of_blocks(vertex.equation):
            results = bind(vertex.equation, operands, **untyped_parameters(vertex.equation))
        env.update(zip((value.id for value in vertex.results), results, strict=True))

    def divided(self, array: Any) -> Any:
        """Returns an array of a batch as `[M, B / M, ...]`."""
        in_part, groups = array.shape[0] // self.num_microbatches, self.num_groups
        if groups == 1:
            return jnp.moveaxis(array.reshape(in_part, self.num_microbatches, *array.shape[1:]), 1, 0)
        parts = array.reshape(groups, in_part, self.num_microbatches // groups, *array.shape[1:])
        return jnp.moveaxis(parts, 2, 1).reshape(self.num_microbatches, in_part, *array.shape[1:])

    def _interpreter(self, position: Any, totals: Mapping[int, Any] | None = None) -> "_Interpreter":
        """Returns a runner of steps: of a micro-batch with the totals that are known, None for steps that run once."""
        blocks = MicrobatchBlocks(("microbatch",), (self.num_microbatches,), position, self.num_groups)
        return _Interpreter(self.graph, self.layout, _Parts(self.layout, self.flow, blocks, totals))

    def values_read_afterwards(self) -> list[Value]:
        """Returns the values of micro-batches that results are, or that run-once steps read."""
        made = {value.id for step in self.order.each for value in values_of(step)}
        made -= {value.id for step in self.order.after for value in values_of(step)}  # estimates stay inside
        operands = [*self.graph.outputs, *(o for step in self.order.after for o in operands_of(step))]
        read = {o.id: o for o in operands if isinstance(o, Value) and o.id in made}
        return list(read.values())


@dataclass(frozen=True)
class MicrobatchBlocks(Blocks):
    """One micro-batch's view of the arrays: micro-batches take the place of devices along one mesh axis.

    The batch is R neighbouring groups, and in a group every n-th run belongs to the same of its n parts. Groups have
    their parts one after the other: those of the first group come first.

    Attributes:
      number: of the micro-batch.
      num_groups: R.
    """

    number: Any = 0
    num_groups: int = 1

    def index(self, axes: Sequence[int]) -> jax.Array:
        """Returns the number of the micro-batch, 0 for no axis."""
        return jnp.asarray(self.number if axes else 0, jnp.int32)

    def position(self, axes: Sequence[int], size: int, local: Any, run: int = 1) -> Any:
        """Returns where elements of this micro-batch's part lie along a whole dimension."""
        if not axes:
            return local
        number, count = self.index(axes).astype(local.dtype), self.axis_sizes[0] // self.num_groups
        if self.num_groups == 1:
            return (local // run * count + number) * run + local % run
        return number // count * (size * count) + (local // run * count + number % count) * run + local % run

    def local_position(self, axes: Sequence[int], size: int, position: Any, run: int = 1) -> tuple[Any, Any]:
        """Returns where elements of a whole dimension lie in this micro-batch's part, and whether they do."""
        count = self.axis_sizes[0] // self.num_groups
        group = position // (size * count) if self.num_groups > 1 else 0
        in_group = position - group * (size * count)
        example = in_group // run
        local = example // count * run + in_group % run
        is_here = (group * count + example % count == self.index(axes)) & (local >= 0) & (local < size)
        return local, is_here


class _Parts:
    """`executor.Arrays`: parts of arrays that belong to one micro-batch."""

    def __init__(self, layout: Layout, flow: BatchFlow, blocks: MicrobatchBlocks, totals: Mapping[int, Any] | None):
        self.layout, self.flow, self.blocks, self.totals = layout, flow, blocks, totals

    def part(self, array: Any, spec: IndexedSpec, run: int) -> Any:
        """Returns the part of a whole array that belongs to the micro-batch."""
        dim, groups = spec.index((0,)), self.blocks.num_groups
        count, before, after = self.blocks.axis_sizes[0], array.shape[:dim], array.shape[dim + 1 :]
        if groups == 1:
            runs = jnp.reshape(array, (*before, -1, count, run, *after))
            part = lax.dynamic_index_in_dim(runs, self.blocks.index((0,)), dim + 1, keepdims=False)
        else:
            runs = jnp.reshape(array, (*before, groups, -1, count // groups, run, *after))
            runs = jnp.moveaxis(runs, dim + 2, dim + 1).reshape(*before, count, -1, run, *after)
            part = lax.dynamic_index_in_dim(runs, self.blocks.index((0,)), dim, keepdims=False)
        return part.reshape(*before, -1, *after)

    def counted_once(self, array: Any) -> Any:
        """Returns the array for the first micro-batch and zeros for all others."""
        return jnp.where(self.blocks.index((0,)) == 0, array, jnp.zeros((), jnp.result_type(array)))

    def reshard(
        self, array: Any, value: Value, source: IndexedSpec, steps: Sequence[ReshardStep], exchanged_in: str = ""
    ) -> Any:
        """Returns the array as it is: where a part of it is wanted, the reader takes it (`read_part`)."""
        del value, source, steps, exchanged_in
        return array

    def read_part(self, vertex: Vertex, position: int, array: Any) -> Any:
        """Returns the part of an operand that its vertex reads, of an array that may be whole."""
        spec, operand = self.layout.strategies[vertex.index].operands[position], vertex.operands[position]
        is_whole = not isinstance(operand, Value) or self.flow.states[operand.id] == "whole"
        if not any(spec) or not is_whole:
            return array
        return self.part(jnp.asarray(array), spec, self.flow.operand_runs[vertex.index, position])

    def fix(self, array: Any, value: Value, spec: IndexedSpec) -> Any:
        del value, spec
        return array

    def operate(self, vertex: Vertex, read: ReadOperand) -> Sequence[Any]:
        strategy = self.layout.strategies[vertex.index]
        read_operands = (read(operand, spec) for operand, spec in zip(vertex.operands, strategy.operands, strict=True))
        operands = [self.read_part(vertex, i, array) for i, array in enumerate(read_operands)]
        for i in self.flow.masked.get(vertex.index, ()):
            operands[i] = self.counted_once(operands[i])
        if self.totals is not None:
            for i in self.flow.estimates.get(vertex.index, ()):
                operands[i] = self._total(vertex.operands[i], operands[i])
        if strategy.parts > 1:
            return run_local(LocalCall(vertex, strategy, self.blocks, self.flow.runs[vertex.index]), operands)
        assert vertex.equation is not None
        return bind(vertex.equation, operands, **untyped_parameters(vertex.equation))

    def _total(self, operand: Operand, own: Any) -> Any:
        """Returns a sum over the whole batch as examples read it: exactly, or estimated from their own micro-batch."""
        if self.totals is None or not isinstance(operand, Value):
            return own
        if operand.id in self.totals:
            return self.totals[operand.id]
        is_sum = self.flow.states[operand.id] == "sum"
        return own * jnp.asarray(self.blocks.axis_sizes[0], jnp.result_type(own)) if is_sum else own

    def reduce(self, vertex: Vertex, results: Sequence[Any], residual: Any = None) -> Sequence[Any]:
        del vertex, residual
        return results

    def context_of(self, equation: core.JaxprEqn) -> Any:
        return context_of_blocks(equation)


class _Interpreter(GraphInterpreter):
    """Evaluates steps on the parts of one micro-batch."""

    arrays: _Parts

    def __init__(self, graph: Graph, layout: Layout, arrays: _Parts):
        super().__init__(graph, layout, _path, arrays, ProgramSchedule())

    def run(self, env: Environment, steps: Sequence[Step]) -> None:
        self._steps(env, steps)

    def _initial(self, env: Environment, carries: Sequence[Vertex]) -> list[Any]:
        arrays = super()._initial(env, carries)
        return [self._crossing(carry, 0, array) for carry, array in zip(carries, arrays, strict=True)]

    def _operand(self, env: Environment, vertex: Vertex, position: int) -> Any:
        return self._crossing(vertex, position, super()._operand(env, vertex, position))

    def _crossing(self, vertex: Vertex, position: int, array: Any) -> Any:
        """Returns an array as it goes into a loop, or from one trip to the next."""
        array = self.arrays.read_part(vertex, position, array)
        is_masked = position in self.arrays.flow.masked.get(vertex.index, ())
        return self.arrays.counted_once(array) if is_masked else array


def _path(source: IndexedSpec, target: IndexedSpec) -> tuple[ReshardStep, ...]:
    """Returns no steps: parts stay parts, and readers take their part of what is whole."""
    del source, target
    return ()


def merged(stack: Any, state: State) -> Any:
    """Returns a whole array from the stacked parts of the micro-batches."""
    assert isinstance(state, Split)
    dim, parts = state.dim, jnp.moveaxis(stack, 0, state.dim)  # [..., M, examples x run, ...]
    parts = parts.reshape(*parts.shape[: dim + 1], -1, state.run, *parts.shape[dim + 2 :])
    parts = jnp.swapaxes(parts, dim, dim + 1)  # [..., examples, M, run, ...]
    return parts.reshape(*parts.shape[:dim], -1, *parts.shape[dim + 3 :])


def combined_with(state: State, total: Any, part: Any) -> Any:
    """Adds the part of one micro-batch to what earlier ones made."""
    assert isinstance(state, str)
    return _COMBINE[state](total, part.astype(total.dtype))


def neutral(state: State, shape: Sequence[int], dtype: Any) -> Any:
    """Returns the initial value with which parts are combined; sums of short floats are kept in float32."""
    dtype = jnp.dtype(dtype)
    if state == "sum":
        is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return jnp.zeros(shape, jnp.float32 if is_short else dtype)
    if dtype == jnp.bool:
        return jnp.full(shape, state == "min")
    limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    infinite = jnp.issubdtype(dtype, jnp.floating)
    least, greatest = (-jnp.inf, jnp.inf) if infinite else (limits.min, limits.max)
    return jnp.full(shape, least if state == "max" else greatest, dtype)
