"""How a batch flows through a traced function: what holds a part of it, what sums over it, what does not know of it.

Micro-batches are like devices along a mesh axis, one after the other. So the sharding rules of operations say what
becomes of a batch that is divided: a dimension goes along, or is reduced, which leaves a part of a sum in each
micro-batch, or has to be whole, so that the function cannot be divided. Here the axis is number 0 of a mesh of that
axis alone.

A value is "whole" (the same in all micro-batches), split along a dimension, or a part of a sum, a maximum or a minimum.
Inside loops, sums of gradients go through further linear operations and stay parts of sums.

Micro-batch m of M has the examples m, m + M, m + 2M and so on. Then devices that share a batch have their own examples
in each micro-batch, and nothing has to be sent. A dimension in which each example has several neighbouring elements,
such as examples times positions, is split in runs of that length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from search_spaces.partition_specs import IndexedSpec
from search_spaces.replay import REMAT
from search_spaces.sharding.base import ReshardStep, Rule, ShardingStrategy
from search_spaces.sharding.given import rank_of
from search_spaces.sharding.graph import Block, Graph, Operand, Region, Value, Vertex
from search_spaces.sharding.local_operations import combiner
from search_spaces.sharding.opaque.operations import name_of
from search_spaces.sharding.whole_operations import runs_whole
from search_spaces.sources import user_source


class Split(NamedTuple):
    """How a value is split among micro-batches.

    Attributes:
      dim: the dimension.
      run: how many neighbouring elements of it each example has.
    """

    dim: int
    run: int = 1


Partial = Literal["sum", "max", "min"]
State = Split | Literal["whole"] | Partial
"""Of a value: how it is split, or "whole", or what combines the parts of the micro-batches."""

# Operations that are linear in what the numbers name; with whole others they take parts of sums to parts of sums.
_LINEAR_IN_ALL = frozenset(
    {
        "add",
        "add_any",
        "sub",
        "concatenate",
        "stack",
        "neg",
        "convert_element_type",
        "copy",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "reduce_sum",
        "rev",
        "slice",
        "reduce_precision",
        "optimization_barrier",
        "split",
        "unstack",
        "copy_p",
    }
)
_LINEAR_IN_ONE = frozenset({"mul", "dot_general"})
_LINEAR_IN_FIRST = frozenset({"div", "dynamic_slice", "gather", "cumsum"})
_LINEAR_IN_CASES = frozenset({"select_n"})
_LINEAR_IN_FIRST_TWO = frozenset({"dynamic_update_slice", "pad"})


class DivisionError(ValueError):
    """A function that cannot be divided into micro-batches; the message names the operation."""


@dataclass
class BatchFlow:
    """How a batch flows through a graph.

    Attributes:
      states: of each value, by id.
      strategies: for each vertex how it runs in a micro-batch; axis 0 stands for the micro-batches.
      masked: of an operation, by index, the operands that are whole, but added to parts of sums: only the first
        micro-batch counts them. Operand 0 of a loop's carry is its first value, operand 1 the next one.
      runs: of an operation, by index, the run of its first array that is split; of other vertices that of all.
      operand_runs: the run of each split operand, by the index of its vertex and its position.
      later: the ids of values that depend on finished sums.
    """

    states: list[State]
    strategies: list[ShardingStrategy]
    masked: dict[int, set[int]] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)
    operand_runs: dict[tuple[int, int], int] = field(default_factory=dict)
    later: set[int] = field(default_factory=set)


def batch_flow(
    graph: Graph, rules: Sequence[Rule | None], batch_inputs: Iterable[int], num_microbatches: int
) -> BatchFlow:
    """Follows a batch through a graph.

    Args:
      graph: the traced function.
      rules: for each vertex its rule or None.
      batch_inputs: the flat arguments whose leading dimension is the batch.
      num_microbatches: how many parts the batch is divided into.

    Raises:
      DivisionError: an operation needs the whole batch before other operations on its parts; names it.
    """
    tracer = _Tracer(graph, rules, num_microbatches)
    for i in batch_inputs:
        tracer.put(graph.inputs[i].results[0], Split(0))
    tracer.block(graph.block, is_inside=False)
    tracer.make_where_read()
    tracer.check_branches()
    return tracer.flow


class _Tracer:
    def __init__(self, graph: Graph, rules: Sequence[Rule | None], num_microbatches: int):
        self.graph, self.rules, self.axis_sizes = graph, rules, (num_microbatches,)
        self.flow = BatchFlow(["whole"] * len(graph.values), [_whole_strategy(v) for v in graph.vertices])

    def put(self, value: Value, state: State) -> None:
        self.flow.states[value.id] = state

    def state(self, operand: Operand) -> State:
        return self.flow.states[operand.id] if isinstance(operand, Value) else "whole"

    def is_later(self, operands: Iterable[Operand]) -> bool:
        return any(isinstance(o, Value) and o.id in self.flow.later for o in operands)

    def block(self, block: Block, *, is_inside: bool) -> None:
        for step in block.steps:
            if isinstance(step, Region):
                self.region(step, is_inside=is_inside)
            else:
                self.operation(step, is_inside=is_inside)

    def operation(self, vertex: Vertex, *, is_inside: bool) -> None:
        self.flow.masked.pop(vertex.index, None)
        states: list[State] = [self.state(operand) for operand in vertex.operands]
        is_split = any(isinstance(state, Split) for state in states)
        if any(state in ("sum", "max", "min") for state in states) and not is_split:
            self._operation_on_partial(vertex, states, is_inside=is_inside)
        elif is_split:
            if self.is_later(vertex.operands) or not all(isinstance(s, Split) or s == "whole" for s in states):
                raise DivisionError(
                    f"{_named(vertex)} needs a result of the whole batch before the rest of each example is known, as "
                    "batch normalisation does."
                )
            self._operation_on_parts(vertex, states)
        else:
            self.put_all(vertex, "whole")
            if self.is_later(vertex.operands):
                self.flow.later.update(v.id for v in vertex.results)

    def put_all(self, vertex: Vertex, state: State) -> None:
        for value in vertex.results:
            self.put(value, state)
        self.flow.strategies[vertex.index] = _whole_strategy(vertex)

    def _operation_on_partial(self, vertex: Vertex, states: Sequence[State], *, is_inside: bool) -> None:
        """Keeps parts of sums apart inside loops and where they are added; finishes them before everything else."""
        is_linear = "max" not in states and "min" not in states and _is_linear(vertex, states)
        is_sum_of_parts = vertex.primitive in ("add", "add_any") and set(states) == {"sum"}
        if is_linear and not self.is_later(vertex.operands) and (is_inside or is_sum_of_parts):
            self.put_all(vertex, "sum")
            if vertex.primitive not in _LINEAR_IN_ONE | _LINEAR_IN_FIRST:
                numbers = {i for i, (o, s) in enumerate(zip(vertex.operands, states, strict=True)) if s == "whole"}
                numbers -= {0} if vertex.primitive in _LINEAR_IN_CASES else set()
                numbers -= set(range(2, len(states))) if vertex.primitive in _LINEAR_IN_FIRST_TWO else set()
                self.flow.masked[vertex.index] = {i for i in numbers if not self._is_zero(vertex.operands[i])}
            return
        if is_inside:
            raise DivisionError(
                f"{_named(vertex)} is inside a loop, a branch or a rematerialised region and needs a result of the "
                "whole batch."
            )
        self.put_all(vertex, "whole")
        self.flow.later.update(v.id for v in vertex.results)

    def _operation_on_parts(self, vertex: Vertex, states: Sequence[State]) -> None:
        rule = self.rules[vertex.index]
        if rule is None:
            raise DivisionError(f"{_named(vertex)} has no sharding rule that says what becomes of a part of the batch.")
        splits = [(i, state) for i, state in enumerate(states) if isinstance(state, Split)]
        factors = {rule.operands[i][state.dim][0] for i, state in splits if rule.operands[i][state.dim]}
        strategy = None if len(factors) != 1 else _strategy(vertex, rule, min(factors), self.axis_sizes[0])
        if strategy is None or any(strategy.operands[i][state.dim] != (0,) for i, state in splits):
            raise DivisionError(f"{_named(vertex)} mixes the examples of a batch.")
        runs = {state.run / _inner(rule, rule.operands[i][state.dim]) for i, state in splits}
        run = min(runs)
        if len(runs) > 1 or run != int(run):
            raise DivisionError(f"{_named(vertex)} mixes the examples of a batch.")
        if runs_whole(vertex, strategy, self.axis_sizes) or _splits_groups(vertex, strategy):
            raise DivisionError(f"{_named(vertex)} has no form on a part of the batch.")
        self._take(vertex, rule, strategy, int(run))

    def _take(self, vertex: Vertex, rule: Rule, strategy: ShardingStrategy, run: int) -> None:
        """Runs an operation with a strategy that splits a factor of which each example has `run` neighbours."""
        self.flow.strategies[vertex.index] = strategy

        def runs_of(specs: Sequence[IndexedSpec], dims: Sequence[Sequence[Sequence[int]]]) -> list[int]:
            return [
                run * _inner(rule, of_array[spec.index((0,))]) if any(spec) else 1
                for spec, of_array in zip(specs, dims, strict=True)
            ]

        operands, results = runs_of(strategy.operands, rule.operands), runs_of(strategy.results, rule.results)
        self.flow.operand_runs.update({(vertex.index, i): n for i, n in enumerate(operands)})
        specs = (*strategy.operands, *strategy.results)
        self.flow.runs[vertex.index] = next(
            n for n, spec in zip((*operands, *results), specs, strict=True) if any(spec)
        )
        reductions = zip(vertex.results, strategy.results, strategy.reductions, results, strict=True)
        for value, spec, steps, n in reductions:
            self.put(value, _combine_of(vertex) if steps else Split(spec.index((0,)), n) if any(spec) else "whole")

    def region(self, region: Region, *, is_inside: bool) -> None:
        name = region.equation.primitive.name
        operands = [o for o in region.operands if isinstance(o, Value)]
        if not any(isinstance(self.state(o), Split) for o in operands) and not is_inside:
            later = self.is_later(operands) or any(self.state(o) != "whole" for o in operands)
            if later or name not in REMAT:  # with nothing of the batch it runs once, after the sums that it reads
                self.flow.later.update(v.id for v in region.results if later)
                return
        elif self.is_later(operands):
            raise DivisionError(f"A {name} ({_source(region)}) reads examples and a result of the whole batch.")
        if name in REMAT:
            self.block(region.blocks[0], is_inside=True)
        elif name == "cond":
            self._cond(region)
        else:
            self._loop(region, name)

    def _cond(self, region: Region) -> None:
        if self.state(region.operands[0]) != "whole":
            raise DivisionError(f"A cond ({_source(region)}) takes its branch by the batch.")
        for block in region.blocks:
            self.block(block, is_inside=True)
        for value in region.results:
            join = self.graph.vertices[value.vertex]
            states: list[State] = [self.state(o) for o in join.operands]
            where = f"A cond ({_source(region)})"
            state = _joined(states, where)
            if state == "sum" and not all(
                s == state or self._is_zero(o) for s, o in zip(states, join.operands, strict=True)
            ):
                raise DivisionError(f"{where} returns in some branch only what sums over the batch.")
            self._cross(join, state, state)

    def _loop(self, region: Region, name: str) -> None:
        where = f"A {name} ({_source(region)})"
        for vertex in region.slices:
            state = self.state(vertex.operands[0])
            if isinstance(state, Split) and state.dim == 0:
                raise DivisionError(f"{where} goes through the batch.")
            inner: State = Split(state.dim - 1, state.run) if isinstance(state, Split) else state
            self._cross(vertex, state, inner)
        states: list[State] = [self.state(carry.operands[0]) for carry in region.carries]
        while True:
            for carry, state in zip(region.carries, states, strict=True):
                self._cross(carry, state, state)
            for block in region.blocks:
                self.block(block, is_inside=True)
            after: list[State] = [
                _joined((state, self.state(carry.operands[1])), where)
                for carry, state in zip(region.carries, states, strict=True)
            ]
            if after == states:
                break
            states = after
        if name == "while" and self.state(region.blocks[0].outputs[0]) != "whole":
            raise DivisionError(f"{where} stops by the batch.")
        for carry, state in zip(region.carries, states, strict=True):
            numbers = {i for i in (0, 1) if state == "sum" and self.state(carry.operands[i]) == "whole"}
            self.flow.masked[carry.index] = {i for i in numbers if not self._is_zero(carry.operands[i])}
        for value in region.results[len(region.carries) :]:
            stack = self.graph.vertices[value.vertex]
            state: State = self.state(stack.operands[0])
            outer: State = Split(state.dim + 1, state.run) if isinstance(state, Split) else state
            self._cross(stack, state, outer)

    def _cross(self, vertex: Vertex, outside: State, inside: State) -> None:
        """Lets arrays cross the border of a loop or branch: all operands have one state, and all results one."""
        operands = [_spec(outside, rank_of(operand)) for operand in vertex.operands]
        results = [_spec(inside, len(value.shape)) for value in vertex.results]
        self.flow.strategies[vertex.index] = _strategy_of(operands, results)
        run = outside.run if isinstance(outside, Split) else 1
        self.flow.operand_runs.update({(vertex.index, i): run for i in range(len(operands))})
        for value in vertex.results:
            self.put(value, inside)

    def _is_zero(self, operand: Operand) -> bool:
        """Tells whether an operand is known to be zero everywhere, as gradients are at first."""
        while isinstance(operand, Value):
            vertex = self.graph.vertices[operand.vertex]
            if vertex.primitive not in ("broadcast_in_dim", "convert_element_type", "copy"):
                return False
            operand = vertex.operands[0]
        return not np.any(operand.val)

    def make_where_read(self) -> None:
        """Makes in parts what is whole, but only read in parts: broadcasts, random bits and what is computed of them.

        So nothing of the size of a batch exists outside of the micro-batches but the batch.
        """
        consumers, outputs = self.graph.consumers(), {o.id for o in self.graph.outputs if isinstance(o, Value)}
        for vertex in reversed(self.graph.vertices):
            rule = self.rules[vertex.index]
            if vertex.kind != "operation" or rule is None or len(vertex.results) != 1:
                continue
            (value,) = vertex.results
            if self.state(value) != "whole" or value.id in outputs or value.id in self.flow.later:
                continue
            wanted = {
                (self.flow.strategies[reader.index].operands[i], self.flow.operand_runs.get((reader.index, i), 1))
                for reader, i in consumers[value.id]
            }
            spec, run = min(wanted, default=((), 1))
            if len(wanted) != 1 or not any(spec) or not rule.results[0][spec.index((0,))]:
                continue
            dims = rule.results[0][spec.index((0,))]
            strategy = _strategy(vertex, rule, dims[0], self.axis_sizes[0])
            if strategy is None or strategy.results[0] != spec or any(strategy.reductions) or run % _inner(rule, dims):
                continue
            if not runs_whole(vertex, strategy, self.axis_sizes) and not _splits_groups(vertex, strategy):
                self._take(vertex, rule, strategy, run // _inner(rule, dims))

    def check_branches(self) -> None:
        """Checks that branches return parts where one of them does; raises `DivisionError` if not."""
        for join in self.graph.vertices:
            specs = self.flow.strategies[join.index].operands
            if join.kind == "join" and any(
                any(spec) and not isinstance(self.state(operand), Split)
                for operand, spec in zip(join.operands, specs, strict=True)
            ):
                raise DivisionError(f"A cond ({join.user_source}) returns examples in some branch only.")


def _strategy(vertex: Vertex, rule: Rule, factor: int, parts: int) -> ShardingStrategy | None:
    """Returns the strategy that splits a factor of a rule; None if that is not allowed or has no even parts."""
    if rule.sizes[factor] % parts or factor in rule.need_replication or factor in rule.permutation:
        return None

    def specs(arrays: Sequence[Sequence[Sequence[int]]]) -> tuple[IndexedSpec, ...] | None:
        result = []
        for dims in arrays:
            if any(factor in dim[1:] for dim in dims):
                return None
            result.append(tuple((0,) if dim and dim[0] == factor else () for dim in dims))
        return tuple(result)

    operands, results = specs(rule.operands), specs(rule.results)
    if operands is None or results is None:
        return None
    is_reduced = [factor in rule.reduction and not any(spec) for spec in results]
    if any(not any(spec) and not reduced for spec, reduced in zip(results, is_reduced, strict=True)):
        return None
    for array, spec in zip((*vertex.operands, *vertex.results), (*operands, *results), strict=True):
        if isinstance(array, Value) and any(n % parts for n, axes in zip(array.shape, spec, strict=True) if axes):
            return None
    reductions = tuple(
        (ReshardStep("all_reduce", 0, 1.0, spec),) if reduced else ()
        for spec, reduced in zip(results, is_reduced, strict=True)
    )
    return ShardingStrategy(operands, results, parts, reductions, results)


def _inner(rule: Rule, dims: Sequence[int]) -> int:
    """Returns how many elements of a dimension belong to each element of its major factor."""
    return prod(rule.sizes[factor] for factor in dims[1:])


def _splits_groups(vertex: Vertex, strategy: ShardingStrategy) -> bool:
    """Tells whether a convolution's groups are split, which lie one after the other, as micro-batches do not."""
    if vertex.primitive != "conv_general_dilated" or vertex.equation is None:
        return False
    params = vertex.equation.params
    batch, features, *_ = params["dimension_numbers"].lhs_spec
    counts = params["batch_group_count"], params["feature_group_count"]
    return any(n > 1 and strategy.operands[0][d] for n, d in zip(counts, (batch, features), strict=True))


def _whole_strategy(vertex: Vertex) -> ShardingStrategy:
    operands = [_spec("whole", rank_of(operand)) for operand in vertex.operands]
    return _strategy_of(operands, [_spec("whole", len(value.shape)) for value in vertex.results])


def _strategy_of(operands: Sequence[IndexedSpec], results: Sequence[IndexedSpec]) -> ShardingStrategy:
    return ShardingStrategy(tuple(operands), tuple(results), 1, ((),) * len(results), tuple(results))


def _spec(state: State, rank: int) -> IndexedSpec:
    return tuple((0,) if isinstance(state, Split) and d == state.dim else () for d in range(rank))


def _combine_of(vertex: Vertex) -> Partial:
    combine = combiner(vertex)
    if combine not in ("sum", "max", "min"):
        raise DivisionError(f"{_named(vertex)} combines its parts in a way of its own.")
    return combine


def _is_linear(vertex: Vertex, states: Sequence[State]) -> bool:
    name, partial = vertex.primitive, [i for i, state in enumerate(states) if state != "whole"]
    if name in _LINEAR_IN_ALL:
        return True
    if name in _LINEAR_IN_ONE:
        return len(partial) == 1
    if name in _LINEAR_IN_FIRST:
        return partial == [0]
    if name in _LINEAR_IN_CASES:
        return 0 not in partial
    return name in _LINEAR_IN_FIRST_TWO and set(partial) <= {0, 1}


def _joined(states: Sequence[State], where: str) -> State:
    """Returns the state of what is one or the other: a whole value may be split, or be counted once in a sum."""
    kinds = set(states) - {"whole"}
    if len(kinds) > 1 or kinds & {"max", "min"}:
        raise DivisionError(f"{where} carries what is sometimes split and sometimes a part of a sum.")
    return kinds.pop() if kinds else "whole"


def _named(vertex: Vertex) -> str:
    return f"{name_of(vertex)} ({vertex.user_source})"


def _source(region: Region) -> str:
    return user_source(region.equation)
