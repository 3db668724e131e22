"""What is whole, but only read in parts, is made in parts."""

from collections.abc import Sequence

from search_spaces.partition_specs import IndexedSpec
from search_spaces.pipelines.batch_states import (
    BatchFlow,
    Split,
    factor_strategy,
    inner_size,
    spec_of,
    splits_groups,
    strategy_of,
)
from search_spaces.sharding.base import Rule
from search_spaces.sharding.graph import Graph, Value, Vertex
from search_spaces.sharding.whole_operations import runs_whole


def make_where_read(graph: Graph, rules: Sequence[Rule | None], flow: BatchFlow, num_microbatches: int) -> None:
    """Makes in parts what is whole, but only read in parts: broadcasts, random bits and what is computed of them.

    So nothing of the size of a batch exists outside of the micro-batches but the batch.
    """
    consumers, outputs = graph.consumers(), {o.id for o in graph.outputs if isinstance(o, Value)}
    for vertex in reversed(graph.vertices):
        rule, is_border = rules[vertex.index], vertex.kind in ("slice", "stack")
        if not (is_border or (vertex.kind == "operation" and rule is not None)) or len(vertex.results) != 1:
            continue
        (value,) = vertex.results
        if flow.states[value.id] != "whole" or value.id in outputs or value.id in flow.later:
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
        if not runs_whole(vertex, strategy, (num_microbatches,)) and not splits_groups(vertex, strategy):
            flow.run_in_parts(vertex, rule, strategy, run // inner_size(rule, dims))


def _cross_in_parts(vertex: Vertex, spec: IndexedSpec, run: int, flow: BatchFlow) -> None:
    """Lets only parts into a scan slice by slice, or out of it as a stack, such as masks for its backward pass.

    Args:
      vertex: a slice or a stack.
      spec: how its result is read.
      run: how many neighbouring elements each example has along the dimension that is split.
      flow: of the batch.
    """
    dim, (operand,) = spec.index((0,)), vertex.operands
    outer = dim + 1 if vertex.kind == "slice" else dim - 1
    if outer < 0 or not isinstance(operand, Value):
        return
    state = Split(outer, run)
    flow.strategies[vertex.index] = strategy_of([spec_of(state, len(operand.shape))], [spec])
    flow.states[vertex.results[0].id] = Split(dim, run)
    flow.operand_runs[vertex.index, 0] = run
