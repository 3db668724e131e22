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
from math import prod

import numpy as np

from search_spaces.pipelines.batch_states import (
    BatchFlow,
    DivisionError,
    Split,
    State,
    counted_operands,
    factor_strategy,
    inner_size,
    is_linear,
    make_where_read,
    named,
    reshaped,
    spec_of,
    splits_groups,
    strategy_of,
)
from search_spaces.pipelines.step_parts import is_transposed
from search_spaces.replay import REMAT, user_source
from search_spaces.sharding.base import Rule, ShardingStrategy
from search_spaces.sharding.graph import Block, Graph, Operand, Region, Value, Vertex, is_contraction, rank_of
from search_spaces.sharding.replicated_operations import is_replicated
from search_spaces.sharding.strategies import whole_strategy


def batch_flow(
    graph: Graph,
    rules: Sequence[Rule | None],
    batch_inputs: Iterable[int],
    num_microbatches: int,
    *,
    num_groups: int = 1,
    estimates_sums: bool = False,
) -> BatchFlow:
    """Follows a batch through a graph.

    Args:
      graph: the traced function.
      rules: for each vertex its rule or None.
      batch_inputs: the flat arguments whose leading dimension is the batch.
      num_microbatches: how many parts the batch is divided into.
      num_groups: of examples side by side, whose parts are micro-batches one after the other.
      estimates_sums: whether gradients of examples may read sums over the batch as their micro-batch estimates them.

    Raises:
      DivisionError: an operation needs the whole batch before other operations on its parts; names it.
    """
    tracer = _Tracer(graph, rules, num_microbatches, num_groups, estimates_sums)
    for i in batch_inputs:
        tracer.put(graph.inputs[i].results[0], Split(0))
        tracer.early_sources[graph.inputs[i].results[0].id] = frozenset()
    tracer.block(graph.block, is_inside=False)
    make_where_read(graph, rules, tracer.flow, num_microbatches)
    tracer.check_branches()
    tracer.complete_early()
    tracer.check_reads()
    return tracer.flow


class _Tracer:
    def __init__(
        self,
        graph: Graph,
        rules: Sequence[Rule | None],
        num_microbatches: int,
        num_groups: int,
        estimates_sums: bool,
    ):
        self.graph, self.rules, self.axis_sizes, self.num_groups = graph, rules, (num_microbatches,), num_groups
        self.estimates_sums = estimates_sums
        self.early_sources: dict[int, frozenset[int]] = {}  # of split values that are cheap: what leads to them
        self.flow = BatchFlow(["whole"] * len(graph.values), [whole_strategy(v) for v in graph.vertices])

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
            needs_sums = self.is_later(vertex.operands) or not all(isinstance(s, Split) or s == "whole" for s in states)
            if needs_sums and not (is_gradient(vertex) and not is_inside and self._estimate(vertex)):
                raise DivisionError(
                    f"{named(vertex)} needs a result of the whole batch before the rest of each example is known, as "
                    "batch normalisation does."
                )
            self._operation_on_parts(vertex, states)
            if not is_inside:
                self._finish_early(vertex)
        else:
            self.put_all(vertex, "whole")
            if self.is_later(vertex.operands):
                self.flow.later.update(v.id for v in vertex.results)

    def _estimate(self, vertex: Vertex) -> bool:
        """Lets an operation of micro-batches read estimates of sums; returns whether that is possible."""
        if not self.estimates_sums:
            return False
        waiting = [vertex]
        while waiting:
            reader = waiting.pop()
            for position, operand in enumerate(reader.operands):
                if not isinstance(operand, Value):
                    continue
                if self.state(operand) in ("sum", "max", "min"):
                    self.flow.estimates.setdefault(reader.index, set()).add(position)
                elif operand.id in self.flow.later and operand.vertex not in self.flow.estimated:
                    maker = self.graph.vertices[operand.vertex]
                    if maker.kind != "operation":
                        return False  # of a loop, which micro-batches do not run
                    self.flow.estimated.add(maker.index)
                    waiting.append(maker)
        return True

    def _finish_early(self, vertex: Vertex) -> None:
        """Lets sums over the batch itself run before all micro-batches, so that these may read them.

        Contractions, loops and all that depends on them are for micro-batches.
        """
        split = [o for o in vertex.operands if isinstance(self.state(o), Split)]
        if is_contraction(vertex) or not all(isinstance(o, Value) and o.id in self.early_sources for o in split):
            return
        sources = frozenset({vertex.index}).union(*(self.early_sources[o.id] for o in split if isinstance(o, Value)))
        if all(isinstance(self.state(value), Split) for value in vertex.results):
            self.early_sources.update({value.id: sources for value in vertex.results})
        elif not any(isinstance(self.state(value), Split) for value in vertex.results):
            self.put_all(vertex, "whole")
            self.flow.early.update(sources)

    def put_all(self, vertex: Vertex, state: State) -> None:
        for value in vertex.results:
            self.put(value, state)
        self.flow.strategies[vertex.index] = whole_strategy(vertex)

    def _operation_on_partial(self, vertex: Vertex, states: Sequence[State], *, is_inside: bool) -> None:
        """Keeps parts of sums apart inside loops and where they are added; finishes them before everything else."""
        is_kept = "max" not in states and "min" not in states and is_linear(vertex, states)
        is_sum_of_parts = vertex.primitive in ("add", "add_any") and set(states) == {"sum"}
        if is_kept and not self.is_later(vertex.operands) and (is_inside or is_sum_of_parts):
            self.put_all(vertex, "sum")
            counted = counted_operands(vertex, states)
            self.flow.masked[vertex.index] = {i for i in counted if not self._is_zero(vertex.operands[i])}
            return
        if is_inside:
            raise DivisionError(
                f"{named(vertex)} is inside a loop, a branch or a rematerialised region and needs a result of the "
                "whole batch."
            )
        self.put_all(vertex, "whole")
        self.flow.later.update(v.id for v in vertex.results)

    def _operation_on_parts(self, vertex: Vertex, states: Sequence[State]) -> None:
        rule = self.rules[vertex.index]
        if rule is None:
            raise DivisionError(f"{named(vertex)} has no sharding rule that says what becomes of a part of the batch.")
        splits = [(i, state) for i, state in enumerate(states) if isinstance(state, Split)]
        if vertex.primitive == "reshape" and self._reshape(vertex, splits[0][1]):
            return
        factors = {rule.operands[i][state.dim][0] for i, state in splits if rule.operands[i][state.dim]}
        strategy = None if len(factors) != 1 else factor_strategy(vertex, rule, min(factors), self.axis_sizes[0])
        if strategy is None or any(strategy.operands[i][state.dim] != (0,) for i, state in splits):
            raise DivisionError(f"{named(vertex)} mixes the examples of a batch.")
        runs = {state.run / inner_size(rule, rule.operands[i][state.dim]) for i, state in splits}
        run = min(runs)
        if len(runs) > 1 or run != int(run):
            raise DivisionError(f"{named(vertex)} mixes the examples of a batch.")
        if is_replicated(vertex, strategy, self.axis_sizes) or splits_groups(vertex, strategy):
            raise DivisionError(f"{named(vertex)} has no form on a part of the batch.")
        self.flow.run_in_parts(vertex, rule, strategy, int(run))

    def _reshape(self, vertex: Vertex, state: Split) -> bool:
        """Splits the result of a reshape where the runs of each micro-batch lie in it; returns whether they do."""
        (operand,), (value,) = vertex.operands, vertex.results
        assert isinstance(operand, Value)
        inside = reshaped(state, operand.shape, value.shape, self.axis_sizes[0])
        if inside is None:
            return False
        if self.num_groups > 1 and prod(operand.shape[: state.dim]) != prod(value.shape[: inside.dim]):
            return False  # groups lie side by side in the dimension, and would not in its minor part
        specs = (spec_of(state, len(operand.shape)),), (spec_of(inside, len(value.shape)),)
        self.flow.strategies[vertex.index] = ShardingStrategy(*specs, self.axis_sizes[0], ((),), specs[1])
        self.flow.operand_runs[vertex.index, 0] = self.flow.runs[vertex.index] = state.run
        self.put(value, inside)
        return True

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
        condition = self.state(region.blocks[0].outputs[0]) if name == "while" else "whole"
        if condition != "whole" and not (region.ends_by_example and condition == "max"):
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
        operands = [spec_of(outside, rank_of(operand)) for operand in vertex.operands]
        results = [spec_of(inside, len(value.shape)) for value in vertex.results]
        self.flow.strategies[vertex.index] = strategy_of(operands, results)
        run = outside.run if isinstance(outside, Split) else 1
        self.flow.operand_runs.update({(vertex.index, i): run for i in range(len(operands))})
        for value in vertex.results:
            self.put(value, inside)

    def _is_zero(self, operand: Operand) -> bool:
        """Returns whether an operand is known to be zero everywhere, as gradients are at first."""
        while isinstance(operand, Value):
            vertex = self.graph.vertices[operand.vertex]
            if vertex.primitive not in ("broadcast_in_dim", "convert_element_type", "copy"):
                return False
            operand = vertex.operands[0]
        return not np.any(operand.val)

    def complete_early(self) -> None:
        """Adds what early operations read that is made in parts only."""
        for vertex in reversed(self.graph.vertices):
            if vertex.index in self.flow.early:
                made = (o.vertex for o in vertex.operands if isinstance(o, Value) and isinstance(self.state(o), Split))
                self.flow.early.update(i for i in made if self.graph.vertices[i].kind == "operation")

    def check_reads(self) -> None:
        """Checks that no operation of a micro-batch reads examples of others: what it reads is split as it is made."""
        for vertex in self.graph.operations():
            if vertex.index in self.flow.early and all(self.state(value) == "whole" for value in vertex.results):
                continue
            for position, (operand, spec) in enumerate(
                zip(vertex.operands, self.flow.strategies[vertex.index].operands, strict=True)
            ):
                state, run = self.state(operand), self.flow.operand_runs.get((vertex.index, position), 1)
                if isinstance(state, Split) and (spec, run) != (spec_of(state, rank_of(operand)), state.run):
                    raise DivisionError(f"{named(vertex)} mixes the examples of a batch.")

    def check_branches(self) -> None:
        """Checks that branches return parts where one of them does; raises `DivisionError` if not."""
        for join in self.graph.vertices:
            specs = self.flow.strategies[join.index].operands
            if join.kind == "join" and any(
                any(spec) and not isinstance(self.state(operand), Split)
                for operand, spec in zip(join.operands, specs, strict=True)
            ):
                raise DivisionError(f"A cond ({join.user_source}) returns examples in some branch only.")


def is_gradient(vertex: Vertex) -> bool:
    """Returns whether an operation belongs to a backward pass."""
    return vertex.equation is not None and is_transposed(vertex.equation)


def _joined(states: Sequence[State], where: str) -> State:
    """Returns the state of what is one or the other: a whole value may be split, or be counted once in a sum."""
    kinds = set(states) - {"whole"}
    if len(kinds) > 1 or kinds & {"max", "min"}:
        raise DivisionError(f"{where} carries what is sometimes split and sometimes a part of a sum.")
    return kinds.pop() if kinds else "whole"


def _source(region: Region) -> str:
    """Returns where a region comes from; loops know the calls around them, whose lines may be the user's only ones."""
    return region.carries[0].user_source if region.carries else user_source(region.equation)
