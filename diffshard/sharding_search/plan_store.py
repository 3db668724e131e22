"""Plans that are there already: in a folder of earlier searches, as a start, or with the first process of a job.

In the file of a stored plan, operations that differ only in their place are written once.

An earlier plan is also the beginning of a search: the plan itself where nothing has changed, else a start for the
solver. A plan for other mesh sizes, hardware or memory is seldom the best one, but often near it: what is split over
the axis "model" of 4 devices is mostly split over it when there are 3. So each operation starts with the strategy whose
specs differ least, by the names of axes, from those that the plan gave it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from diffshard.base import PlanError
from diffshard.plans.base import Operation, PlanData
from diffshard.plans.documents import DAMAGE, Store
from diffshard.plans.file import from_json, to_json, without_places
from diffshard.plans.json_values import from_json_values
from diffshard.plans.sections import Rematerialisation
from diffshard.processes import Processes, processes_of
from diffshard.sharding_search.fingerprints import digest_of, facts_of, function_digest
from diffshard.sharding_search.layout import signature_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import traced_measured_function
from search_spaces.partition_specs import IndexedSpec, NamedSpec, indexed_spec
from search_spaces.sharding.base import ShardingStrategy
from search_spaces.sharding.space import ShardingSpace

_KEPT = ("optimal", "finished", "time limit")
"""How a search ends whose plan is kept: one that was interrupted might have found a better one."""


def plan_store(folder: str) -> Store:
    """Returns the plans that a folder keeps."""
    return Store(folder, "diffshard stored plan", 2)


def plan_or_search(store: Store, find: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan:
    """Returns the plan of an earlier search, or else searches and keeps the plan.

    A plan that the options begin with is not kept if it was made for the same question and so may have been taken
    as it is: other options, such as a shorter time limit, may have found it. A file that is damaged, or not one of
    this store, is told in a warning and replaced.
    """
    key = key_of(request)
    plan = store.plan(key, lambda values, path: _from_values(values, path, request))
    if plan is not None:
        return plan
    plan = find(request)
    if plan.status in _KEPT and earlier_plan_of(request) is None:
        store.keep(key, without_places(to_json(plan)))
    return plan


def key_of(request: PlanRequest) -> str:
    """Returns a hash of everything that the plan of a request depends on."""
    options, formats = request.options, request.options.formats
    facts = {**facts_of(options, request.traced_function), "`time_limit_s`": repr(options.time_limit_s)}
    if formats is not None and formats.measured_fn is not None and (formats.calls or formats.validation_runs):
        measured_function = traced_measured_function(options)[1]
        facts["`Formats.measured_fn`"] = function_digest(measured_function)  # `facts_of` does not see what it calls
    return digest_of(facts)


def _from_values(content: Any, path: str, request: PlanRequest) -> Plan:
    """Returns the plan of a store's JSON values."""
    try:
        mesh = request.options.candidate_with(content["mesh_axes"]).mesh
        remat = from_json_values(Rematerialisation | None, content["remat"])
        # The key does not depend on the lines of the program: operations are where they are today.
        graph = (request if remat is None else request.with_recomputed(remat)).traced_function.graph
    except DAMAGE as error:
        raise PlanError(f"`{path}` is a damaged plan: {error}.") from None
    places = [(vertex.source, vertex.scope) for vertex in graph.vertices]
    return from_json(content, path, Plan, mesh, places)


FindPlan = Callable[[PlanRequest], Plan]


def plan_of_first_process(find: FindPlan, request: PlanRequest, processes: Processes | None = None) -> Plan:
    """Returns the plan that the first process finds; in one process only, it just searches.

    Args:
      request: for the same function in all processes.
      processes: whose plan it is; None for those that own devices of the mesh.

    Raises:
      InfeasibleError: as `find`, in all processes; so is any other error of the search.
      ProcessesError: as `Processes.shared`.
    """
    options = request.options

    def pack(plan: Plan) -> bytes:
        return json.dumps({"plan": to_json(plan), "stored_in": plan.stored_in}).encode()

    def unpack(content: bytes) -> Plan:
        document = json.loads(content)
        mesh = options.candidate_with(document["plan"]["mesh_axes"]).mesh
        plan = from_json(document["plan"], "the plan of the first process", Plan, mesh)
        return replace(plan, stored_in=document["stored_in"])

    what = f"search a plan of {options.function_name}"
    processes = processes_of(options.mesh) if processes is None else processes
    plan = processes.shared(what, lambda: find(request), pack=pack, unpack=unpack)
    return request.complete(plan)


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
        assert node.shared_value is not None
        operation = plan.operations[node.shared_value.vertex]
        spec = _known_axes(operation.value_specs[node.shared_value.result], space.axis_names)
        wanted.append(_Wanted((), (), (spec,)))
    choice, is_exact = [], tuple(plan.mesh_axes.items()) == tuple(sizes.items())
    nearest: dict[tuple[int, _Wanted, bool], tuple[int, bool]] = {}
    for node, specs, costs in zip(space.nodes, wanted, space.problem.node_cost, strict=True):
        key = id(node.strategies), specs, node.shared_value is not None
        if key not in nearest:
            nearest[key] = _nearest(node.strategies, specs, np.asarray(costs))
        index, is_same = nearest[key]
        choice.append(index)
        is_exact = is_exact and is_same
    return Start(np.array(choice, np.int64), is_exact)


def earlier_plan_of(request: PlanRequest) -> Plan | None:
    """Returns the plan that the options of a request begin with, if it was made for the same; None where it was not."""
    start = request.options.start
    return request.complete(start) if isinstance(start, Plan) and _is_made_for(start, request) else None


def _is_made_for(plan: Plan, request: PlanRequest) -> bool:
    """Returns whether an earlier plan was made for this traced function, its mesh axes and the options of its search.

    Names and shapes of operations do not tell functions apart: the length of a loop, for one, is in neither. So the
    digests of the functions must be equal. How the plan was searched (the solver, its key, its time limit and which
    compiler judged it) may differ. A plan with number formats or for another objective than seconds is not for a search
    without them: it changes numbers, or is slower than it has to be.
    """
    options, call = request.options, request.traced_function.call
    options = options.on(options.candidate_with(plan.mesh_axes))
    before = (plan.hardware, plan.memory_limit_bytes, plan.static_argnums, plan.donate_argnums, plan.static_argnames)
    now = (options.hardware, options.memory_limit_bytes, options.static_argnums, options.donate_argnums)
    types = [(tensor.shape, tensor.dtype, tensor.given) for tensor in plan.arguments]
    given = request.space.given
    return (
        tuple(plan.mesh_axes.items()) == tuple(zip(options.axis_names, options.axis_sizes, strict=True))
        and before == (*now, options.static_argnames)
        and plan.donate_argnames == options.donate_argnames
        and plan.logical_axis_rules == options.logical_axis_rules
        and options.executor in (None, plan.executor)
        and (options.remat is None) == (plan.remat is None)
        and (options.state is not None) == plan.offloads_state
        and (plan.formats is None or options.formats is not None)
        and (plan.objective is None or options.objective is not None)
        and types == [(array.shape, str(array.dtype), i in given) for i, array in enumerate(call.arrays)]
        and plan.function_digest == function_digest(request.traced_function)
    )


def _operation_name(kind: str, signature: str) -> tuple[str, str]:
    """Returns the key that operations must share for specs to carry over; sizes may differ, as of a larger batch."""
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
    """Returns how many axes of how many dimensions differ; a shared reshard has only results to compare."""
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
