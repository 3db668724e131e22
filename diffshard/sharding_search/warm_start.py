"""An earlier plan as the beginning of a search: the plan itself where nothing has changed, else a start for the solver.

A plan for other mesh sizes, hardware or memory is seldom the best one, but often near it: what is split over the axis
"model" of 4 devices is mostly split over it when there are 3. So each operation starts with the strategy whose specs
differ least, by the names of axes, from those that the plan gave it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diffshard.plans.base import Operation, PlanData
from diffshard.sharding_search.fingerprints import function_digest
from diffshard.sharding_search.layout import signature_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.request import PlanRequest
from search_spaces.partition_specs import IndexedSpec, NamedSpec, indexed_spec
from search_spaces.sharding.base import ShardingStrategy
from search_spaces.sharding.space import ShardingSpace


class Start(NamedTuple):
    """A plan as a choice of a space.

    Attributes:
      choice: `[V]` strategy indices.
      is_exact: whether it stands for the same specs as the plan.
    """

    choice: np.ndarray
    is_exact: bool


class _Wanted(NamedTuple):
    """The specs that a plan gives one node: what it reads, its results before their reduction, and its results."""

    operands: tuple[IndexedSpec, ...]
    unreduced: tuple[IndexedSpec, ...]
    results: tuple[IndexedSpec, ...]


def start_of(plan: PlanData, space: ShardingSpace) -> Start | None:
    """Returns the choice that is nearest to a plan; None if the plan was made for other operations."""
    vertices = space.graph.vertices
    if [(_operation_name(o.kind, o.signature), len(o.value_specs)) for o in plan.operations] != [
        (_operation_name(v.kind, signature_of(v)), len(v.results)) for v in vertices
    ]:
        return None
    sizes = dict(zip(space.axis_names, space.axis_sizes, strict=True))
    wanted = [_wanted(operation, space.axis_names) for operation in plan.operations]
    for node in space.nodes[len(vertices) :]:
        assert node.hub is not None
        operation = plan.operations[node.hub.vertex]
        spec = _known_axes(operation.value_specs[node.hub.result], space.axis_names)
        wanted.append(_Wanted((), (), (spec,)))
    choice, is_exact = [], tuple(plan.mesh_axes.items()) == tuple(sizes.items())
    nearest: dict[tuple[int, _Wanted, bool], tuple[int, bool]] = {}
    for node, specs, costs in zip(space.nodes, wanted, space.problem.node_cost, strict=True):
        key = id(node.strategies), specs, node.hub is not None
        if key not in nearest:
            nearest[key] = _nearest(node.strategies, specs, np.asarray(costs))
        index, is_same = nearest[key]
        choice.append(index)
        is_exact = is_exact and is_same
    return Start(np.array(choice, np.int64), is_exact)


def is_made_for(plan: PlanData, request: PlanRequest) -> bool:
    """Tells whether an earlier plan was made for this traced function, its mesh axes and the options of its search.

    Names and shapes of operations do not tell functions apart: the length of a loop, for one, is in neither. So the
    digests of the functions must be equal, which plans of older versions do not have. How the plan was searched (the
    solver, its key, its time limit and which compiler judged it) may differ.
    """
    options, call = request.options, request.traced_function.call
    options = options.on(options.candidate_with(plan.mesh_axes))
    before = (plan.hardware, plan.memory_limit_bytes, plan.static_argnums, plan.donate_argnums, plan.static_argnames)
    now = (options.hardware, options.memory_limit_bytes, options.static_argnums, options.donate_argnums)
    types = [(tensor.shape, tensor.dtype, tensor.given) for tensor in plan.arguments]
    given = request.space.given
    return (
        isinstance(plan, Plan)
        and tuple(plan.mesh_axes.items()) == tuple(zip(options.axis_names, options.axis_sizes, strict=True))
        and before == (*now, options.static_argnames)
        and plan.donate_argnames == options.donate_argnames
        and plan.logical_axis_rules == options.logical_axis_rules
        and options.executor in (None, plan.executor)
        and (options.remat is None) == (plan.remat is None)
        and types == [(array.shape, str(array.dtype), i in given) for i, array in enumerate(call.arrays)]
        and plan.function_digest == function_digest(request.traced_function)
    )


def _operation_name(kind: str, signature: str) -> tuple[str, str]:
    """Returns what must be the same for specs to carry over: sizes of arrays may differ, as those of a larger batch."""
    return kind, signature.split("(")[0]


def _wanted(operation: Operation, axis_names: tuple[str, ...]) -> _Wanted:
    parts = (operation.operands, operation.unreduced, operation.results)
    return _Wanted(*(tuple(_known_axes(spec, axis_names) for spec in specs) for specs in parts))


def _known_axes(spec: NamedSpec, axis_names: tuple[str, ...]) -> IndexedSpec:
    """Returns a spec without the axes that the mesh does not have."""
    return indexed_spec(tuple(tuple(axis for axis in axes if axis in axis_names) for axes in spec), axis_names)


def _nearest(strategies: Sequence[ShardingStrategy], wanted: _Wanted, costs: np.ndarray) -> tuple[int, bool]:
    """Returns the strategy that differs least from what is wanted, the cheapest of several, and whether it is equal."""
    distances = np.array([_distance(strategy, wanted) for strategy in strategies])
    index = int(np.lexsort((costs, distances))[0])
    return index, bool(distances[index] == 0)


def _distance(strategy: ShardingStrategy, wanted: _Wanted) -> int:
    """Returns how many axes of how many dimensions differ; a hub has only results to compare."""
    pairs = [*zip(strategy.results, wanted.results, strict=False)]
    if wanted.operands or wanted.unreduced:
        pairs += [*zip(strategy.operands, wanted.operands, strict=False)]
        pairs += [*zip(strategy.unreduced, wanted.unreduced, strict=False)]
    return sum(
        len(set(one) ^ set(other)) or int(one != other)
        for first, second in pairs
        if first != second
        for one, other in zip(first, second, strict=False)
    )
