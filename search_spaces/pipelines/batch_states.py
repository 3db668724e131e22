"""The states of values among micro-batches, and the strategies that split them; see `batch_flow`.

Linear operations take parts of sums to parts of sums. A value that is whole but read only in parts is computed in
parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from search_spaces.partition_specs import IndexedSpec
from search_spaces.sharding.base import ReshardStep, Rule, ShardingStrategy
from search_spaces.sharding.custom_calls.operations import name_of
from search_spaces.sharding.graph import Graph, Operand, Region, Value, Vertex
from search_spaces.sharding.local_operations import combiner
from search_spaces.sharding.replicated_operations import is_replicated


class Split(NamedTuple):
    """How a value is split among micro-batches."""

    dim: int
    run: int = 1


Partial = Literal["sum", "max", "min"]
State = Split | Literal["whole"] | Partial
"""How a value is split, or "whole", or what combines its parts of the micro-batches."""


def factor_strategy(vertex: Vertex, rule: Rule, factor: int, parts: int) -> ShardingStrategy | None:
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


def reshaped(state: Split, before: Sequence[int], after: Sequence[int], parts: int) -> Split | None:
    """Returns how the result of a reshape is split where its operand is; None if no dimension can be split so.

    In the order of memory the elements of a micro-batch are stretches of equal length at equal distances, which a
    reshape leaves where they are: it only counts them along another dimension.

    >>> reshaped(Split(0), (8, 3), (2, 4, 3), 4)  # two groups of four examples, one for each micro-batch
    Split(dim=1, run=1)
    >>> reshaped(Split(0), (8, 3), (24,), 4)
    Split(dim=0, run=3)
    >>> reshaped(Split(0), (8, 3), (4, 2, 3), 4) is None  # the examples of a micro-batch are in different groups
    True
    """
    stretch = state.run * prod(before[state.dim + 1 :])
    for dim, size in enumerate(after):
        run, rest = divmod(stretch, prod(after[dim + 1 :]))
        if run and not rest and not size % (run * parts):
            return Split(dim, run)
    return None


def inner_size(rule: Rule, dims: Sequence[int]) -> int:
    """Returns how many elements of a dimension belong to each element of its major factor."""
    return prod(rule.sizes[factor] for factor in dims[1:])


def splits_groups(vertex: Vertex, strategy: ShardingStrategy) -> bool:
    """Returns whether a convolution's groups are split, which lie one after the other, as micro-batches do not."""
    if vertex.primitive != "conv_general_dilated" or vertex.equation is None:
        return False
    params = vertex.equation.params
    batch, features, *_ = params["dimension_numbers"].lhs_spec
    counts = params["batch_group_count"], params["feature_group_count"]
    return any(n > 1 and strategy.operands[0][d] for n, d in zip(counts, (batch, features), strict=True))


def strategy_of(operands: Sequence[IndexedSpec], results: Sequence[IndexedSpec]) -> ShardingStrategy:
    """Returns the strategy of what reads and makes arrays with specs, such as the border of a loop."""
    return ShardingStrategy(tuple(operands), tuple(results), 1, ((),) * len(results), tuple(results))


def spec_of(state: State, rank: int) -> IndexedSpec:
    """Returns the spec of a value in a state."""
    return tuple((0,) if isinstance(state, Split) and d == state.dim else () for d in range(rank))


class DivisionError(ValueError):
    """A function that cannot be divided into micro-batches; the message names the operation."""


@dataclass
class BatchFlow:
    """How a batch flows through a graph.

    Attributes:
      strategies: for each vertex how it runs in a micro-batch; axis 0 stands for the micro-batches.
      masked: of an operation, by index, the operands that are whole, but added to parts of sums: only the first
        micro-batch counts them. Operand 0 of a loop's carry is its first value, operand 1 the next one.
      runs: of an operation, by index, the run of its first array that is split; of other vertices that of all.
      operand_runs: the run of each split operand, by the index of its vertex and its position.
      later: the ids of values that depend on finished sums.
      estimated: the indices of operations on finished sums that run in each micro-batch as well, on its estimates of
        these sums, because gradients of its examples read what they make.
      estimates: of an operation of micro-batches, by index, the positions of operands that are sums of the whole batch,
        for which it reads estimates: the micro-batch's own sum times the number of micro-batches.
      early: the indices of operations that run on the whole batch before all micro-batches: sums of the batch itself,
        such as the number of words that a mask keeps, and what leads to them.
    """

    states: list[State]
    strategies: list[ShardingStrategy]
    masked: dict[int, set[int]] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)
    operand_runs: dict[tuple[int, int], int] = field(default_factory=dict)
    later: set[int] = field(default_factory=set)
    early: set[int] = field(default_factory=set)
    estimated: set[int] = field(default_factory=set)
    estimates: dict[int, set[int]] = field(default_factory=dict)

    def run_in_parts(self, vertex: Vertex, rule: Rule, strategy: ShardingStrategy, run: int) -> None:
        """Runs an operation with a strategy that splits a factor of which each example has `run` neighbours."""
        self.strategies[vertex.index] = strategy

        def runs_of(specs: Sequence[IndexedSpec], dims: Sequence[Sequence[Sequence[int]]]) -> list[int]:
            return [
                run * inner_size(rule, of_array[spec.index((0,))]) if any(spec) else 1
                for spec, of_array in zip(specs, dims, strict=True)
            ]

        operands, results = runs_of(strategy.operands, rule.operands), runs_of(strategy.results, rule.results)
        self.operand_runs.update({(vertex.index, i): n for i, n in enumerate(operands)})
        specs = (*strategy.operands, *strategy.results)
        self.runs[vertex.index] = next(n for n, spec in zip((*operands, *results), specs, strict=True) if any(spec))
        reductions = zip(vertex.results, strategy.results, strategy.reductions, results, strict=True)
        for value, spec, steps, n in reductions:
            self.states[value.id] = (
                combine_of(vertex) if steps else Split(spec.index((0,)), n) if any(spec) else "whole"
            )


def combine_of(vertex: Vertex) -> Partial:
    """Returns the operation that combines results of micro-batches; raises `DivisionError` if it is another one."""
    combine = combiner(vertex)
    if combine not in ("sum", "max", "min"):
        raise DivisionError(f"{named(vertex)} combines its parts in a way of its own.")
    return combine


def named(vertex: Vertex) -> str:
    """Returns the name and the source of an operation, for errors."""
    return f"{name_of(vertex)} ({vertex.user_source})"


# fmt: off
# Operations that are linear in what the names say; with whole others they take parts of sums to parts of sums.
_LINEAR_IN_ALL = frozenset(
    ("add", "add_any", "sub", "concatenate", "stack", "neg", "convert_element_type", "copy", "copy_p", "reshape",
     "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "reduce_sum", "rev", "slice", "optimization_barrier",
     "split", "unstack")
)
# fmt: on
_LINEAR_IN_ONE = frozenset({"mul", "dot_general"})
_LINEAR_IN_FIRST = frozenset({"div", "dynamic_slice", "gather", "cumsum"})
_LINEAR_IN_CASES = frozenset({"select_n"})
_LINEAR_IN_FIRST_TWO = frozenset({"dynamic_update_slice", "pad"})


def is_linear(vertex: Vertex, states: Sequence[State]) -> bool:
    """Returns whether an operation is linear in the operands that are parts of sums."""
    name, partial = vertex.primitive, [i for i, state in enumerate(states) if state != "whole"]
    if not _has_linear_numbers(vertex, partial):
        return False
    if name in _LINEAR_IN_ALL:
        return True
    if name in _LINEAR_IN_ONE:
        return len(partial) == 1
    if name in _LINEAR_IN_FIRST:
        return partial == [0]
    if name in _LINEAR_IN_CASES:
        return 0 not in partial
    return name in _LINEAR_IN_FIRST_TWO and set(partial) <= {0, 1}


def counted_operands(vertex: Vertex, states: Sequence[State]) -> set[int]:
    """Returns the operands of a linear operation that are added to parts of sums, so that one micro-batch counts them.

    A factor counts in all micro-batches, and so do conditions and positions.
    """
    if vertex.primitive in _LINEAR_IN_ONE | _LINEAR_IN_FIRST:
        return set()
    counted = {i for i, state in enumerate(states) if state == "whole"}
    if vertex.primitive in _LINEAR_IN_CASES:
        return counted - {0}
    return counted & {0, 1} if vertex.primitive in _LINEAR_IN_FIRST_TWO else counted


def _has_linear_numbers(vertex: Vertex, partial: Sequence[int]) -> bool:
    """Returns whether types and parameters leave an operation linear: nothing is rounded to integers or out of range.

    A gather that fills what is out of bounds would add its fill once for each micro-batch.
    """
    name, equation = vertex.primitive, vertex.equation
    assert equation is not None
    types = [jnp.dtype(equation.invars[i].aval.dtype) for i in partial]  # pyright: ignore[reportAttributeAccessIssue]
    if any(dtype == jnp.bool for dtype in types):
        return False
    if name == "convert_element_type":
        return _keeps_sums(types[0], jnp.dtype(equation.params["new_dtype"]))
    if name == "div":
        return jnp.issubdtype(types[0], jnp.inexact)
    if name == "gather":
        fill = equation.params["fill_value"]
        is_zero_or_nan = jnp.issubdtype(types[0], jnp.inexact) if fill is None else fill == 0 or fill != fill
        return equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP or is_zero_or_nan
    return True


def _keeps_sums(source: Any, target: Any) -> bool:
    """Returns whether converting the parts of a sum is, but for rounding, converting the sum."""
    if target == jnp.bool:
        return False
    if jnp.issubdtype(source, jnp.integer):
        if jnp.issubdtype(target, jnp.integer):
            return jnp.iinfo(target).max >= jnp.iinfo(source).max and jnp.iinfo(target).min <= jnp.iinfo(source).min
        return not jnp.issubdtype(target, jnp.floating) or float(jnp.finfo(target).max) >= jnp.iinfo(source).max
    if not jnp.issubdtype(target, jnp.inexact):
        return False
    return bool(jnp.finfo(target).nexp >= jnp.finfo(source).nexp)  # bfloat16 has the range of float32


def make_where_read(graph: Graph, rules: Sequence[Rule | None], flow: BatchFlow, num_microbatches: int) -> None:
    """Makes in parts what is whole, but only read in parts: broadcasts, random bits and what is computed of them.

    So nothing of the size of a batch exists outside of the micro-batches but the batch, and what reads all of it: early
    sums, and rows that are gathered from the whole batch.
    """
    consumers, outputs = graph.consumers(), {o.id for o in graph.outputs if isinstance(o, Value)}
    for vertex in reversed(graph.vertices):
        rule, is_border = rules[vertex.index], vertex.kind in ("slice", "stack")
        if not (is_border or (vertex.kind == "operation" and rule is not None)) or len(vertex.results) != 1:
            continue
        (value,) = vertex.results
        if flow.states[value.id] != "whole" or value.id in outputs or value.id in flow.later:
            continue
        if vertex.index in flow.early:  # it reads examples of all micro-batches
            continue
        wanted = {
            (flow.strategies[reader.index].operands[i], flow.operand_runs.get((reader.index, i), 1))
            for reader, i in consumers[value.id]
        }
        spec, run = min(wanted, default=((), 1))
        if len(wanted) != 1 or not any(spec):
            continue
        if is_border:
            _cross_in_parts(vertex, spec, run, flow)
            continue
        if rule is None or not rule.results[0][spec.index((0,))]:
            continue
        dims = rule.results[0][spec.index((0,))]
        strategy = factor_strategy(vertex, rule, dims[0], num_microbatches)
        if strategy is None or strategy.results[0] != spec or any(strategy.reductions) or run % inner_size(rule, dims):
            continue
        if not is_replicated(vertex, strategy, (num_microbatches,)) and not splits_groups(vertex, strategy):
            flow.run_in_parts(vertex, rule, strategy, run // inner_size(rule, dims))


def _cross_in_parts(vertex: Vertex, spec: IndexedSpec, run: int, flow: BatchFlow) -> None:
    """Lets only parts into a scan slice by slice, or out of it as a stack, such as masks for its backward pass.

    Args:
      run: how many neighbouring elements each example has along the dimension that is split.
    """
    dim, (operand,) = spec.index((0,)), vertex.operands
    outer = dim + 1 if vertex.kind == "slice" else dim - 1
    if outer < 0 or not isinstance(operand, Value):
        return
    state = Split(outer, run)
    flow.strategies[vertex.index] = strategy_of([spec_of(state, len(operand.shape))], [spec])
    flow.states[vertex.results[0].id] = Split(dim, run)
    flow.operand_runs[vertex.index, 0] = run


Step = Vertex | Region


@dataclass(frozen=True)
class StepOrder:
    """The steps of a function that runs in micro-batches."""

    before: tuple[Step, ...]
    each: tuple[Step, ...]
    after: tuple[Step, ...]


def step_order(graph: Graph, flow: BatchFlow) -> StepOrder:
    """Divides the steps of a function by how often they run.

    A step runs where what it reads is there: once where that is whole, in each micro-batch where it is split or made
    there, and after all of them where it needs their sums. What leads to early sums runs once and in each, too, and so
    does what makes estimates of sums.
    """
    before, each, after = [], [], []
    of_each: set[int] = set()  # the values that micro-batches make
    for step in graph.block.steps:
        operands = [o for o in operands_of(step) if isinstance(o, Value)]
        values = list(values_of(step))
        is_early = isinstance(step, Vertex) and step.index in flow.early
        if is_early:
            before.append(step)
        if any(isinstance(flow.states[o.id], Split) for o in operands) or any(
            flow.states[value.id] != "whole" for value in values
        ):
            if is_early and all(flow.states[value.id] == "whole" for value in values):
                continue
            is_of_each = True
        elif any(o.id in flow.later or flow.states[o.id] != "whole" for o in operands):
            after.append(step)
            if isinstance(step, Vertex) and step.index in flow.estimated:
                each.append(step)
            continue
        else:
            is_of_each = any(o.id in of_each for o in operands)
        (each if is_of_each else before).append(step)
        of_each.update(value.id for value in values if is_of_each)
    return StepOrder(tuple(before), tuple(each), tuple(after))


def operands_of(step: Step) -> Iterator[Operand]:
    """Returns the values that a step reads, and those read inside of a region at any depth."""
    yield from step.operands
    if isinstance(step, Region):
        for inner in _steps_inside(step):
            yield from operands_of(inner)


def values_of(step: Step) -> Iterator[Value]:
    """Returns the values that a step makes, those inside of a region at any depth, too."""
    yield from step.results
    if isinstance(step, Region):
        for vertex in (*step.carries, *step.slices):
            yield from vertex.results
        for inner in _steps_inside(step):
            yield from values_of(inner)


def _steps_inside(region: Region) -> Iterator[Step]:
    for block in region.blocks:
        yield from block.steps
