"""From a sharding space to a plan: the space is solved, and the choice written down with names.

Arguments, mesh axes and operations have names in a plan, so that it can be read, saved, and applied in another process.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cost.base import FORBIDDEN, Problem
from cost.evaluation import evaluate, format_excess
from cost.memory import least_memory
from diffshard.base import Deadline, InfeasibleError, Progress, Solution
from diffshard.outer_search import CutOffError
from diffshard.plans.base import Operation, PlannedObjective, PredictedCollective, Tensor
from diffshard.plans.printing import short_name
from diffshard.plans.sections import PredictedComputing
from diffshard.sharding_search.carried import planned_residuals, planned_scales
from diffshard.sharding_search.executors import default_executor, executor_notes
from diffshard.sharding_search.fingerprints import function_digest
from diffshard.sharding_search.layout import signature_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import earlier_plan_of, start_of
from diffshard.sharding_search.predictions import memory_profile_of, predicted_timeline, whole_work_of
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import (
    StepCost,
    best_step,
    objective_of,
    step_s,
    waiting_transfers,
)
from diffshard.sharding_search.tracing import TracedFunction
from diffshard.solving.objectives.minimise import TANGENT_SHARE
from diffshard.solving.solve import DEFAULT_SOLVER, solve
from diffshard.solving.solvers import gradient
from search_spaces.partition_specs import IndexedSpec, NamedSpec, named_spec
from search_spaces.sharding.base import Layout
from search_spaces.sharding.explaining import NextBest, Summary
from search_spaces.sharding.graph import Operand, Value, Vertex
from search_spaces.sharding.host_state import host_arrays
from search_spaces.sharding.space import ShardingSpace
from search_spaces.sharding.step_quantities import computing_of

PLAN_GAP = 1e-4
"""The gap to the bound at which a search for a plan ends: predictions of seconds are far less exact."""

LAST_PROBLEM_SHARE = 0.9
"""The share of the time limit after which no further problem is begun: presolve alone can take what is left."""


def find_plan(request: PlanRequest) -> Plan:
    """Solves a traced function's space within the options' memory limit, and writes the solution down as a plan.

    An earlier plan that the options have is returned if it was made for the same, else the search begins with it. Of
    another function it is only a start where the operations have the same names.

    Raises:
      InfeasibleError: no plan fits the memory limit.
      CutOffError: no plan is shorter than the limit of the request.
    """
    options = request.options
    start = None if options.start is None else start_of(options.start, request.space)
    if start is not None and start.is_exact and options.objective is None and (plan := earlier_plan_of(request)):
        return plan
    choice = None if start is None else start.choice

    progress = request.progress
    if math.isfinite(request.step_limit_s):
        progress = _until_cut_off(request)
        if choice is None:  # a start that keeps the memory lets the solver look for a bound first
            choice = lightest_choice(request.space.problem)
    _ = request.space.problem  # built before the solver's time begins: on five axes that alone can take a minute
    solution = fastest_choice(request._replace(progress=progress), options.deadline(), choice)
    return make_plan(request, solution)


def fastest_choice(
    request: PlanRequest, deadline: Deadline, start: np.ndarray | None = None, stop_gap: float = PLAN_GAP
) -> Solution:
    """Returns the choice of a request's space with the fastest step that was found within the options' limits.

    Args:
      deadline: of all problems of a search together.
      start: `[V]` strategy indices to begin with.
      stop_gap: the relative gap at which the search ends.

    Raises:
      InfeasibleError: no plan fits the memory limit.
    """
    options = request.options
    steps: list[tuple[float, float]] = []  # where links bound the step: the best one so far and its bound

    def progress(seconds: float, cost: float, lower_bound: float) -> None:
        if steps:  # a tangent's costs are below those of steps, and its bound may be of one branch only
            cost, lower_bound = steps[-1]
        if request.progress is not None:
            request.progress(seconds, cost, lower_bound)

    def tell(cost_s: float, bound_s: float) -> None:
        steps.append((cost_s, bound_s))
        progress(deadline.elapsed_s, cost_s, bound_s)

    def solve_within_limits(problem: Problem, near: np.ndarray | None, gap: float) -> Solution:
        told = progress if options.objective is None else None  # others are not in seconds
        if near is None:
            limited = replace(options, time_limit_s=deadline.remaining_s())
            return solve_problem_of(limited, problem, request.space, start, told, gap)
        limited = replace(options, time_limit_s=deadline.remaining_s(TANGENT_SHARE))
        if options.solver == DEFAULT_SOLVER and len(problem.node_cost) > gradient.MOST_NODES_OF_SMALL:
            limited = replace(limited, solver=gradient.solve_quickly)  # there are several such problems
        return solve_problem_of(limited, problem, request.space, near, told, max(stop_gap, gap))

    def is_over() -> bool:
        return deadline.is_over(LAST_PROBLEM_SHARE)

    limit = options.memory_limit_bytes
    return best_step(request.space, solve_within_limits, limit, stop_gap, options.objective, is_over, tell)


def _until_cut_off(request: PlanRequest) -> Progress:
    """Returns a progress function that raises `CutOffError` once the bound reaches the limit of the request."""
    preference_s = request.space.most_preference_s

    def progress(seconds: float, cost: float, lower_bound: float) -> None:
        if lower_bound - preference_s >= request.step_limit_s:
            raise CutOffError(lower_bound - preference_s)
        if request.progress is not None:
            request.progress(seconds, cost, lower_bound)

    return progress


def lightest_choice(problem: Problem) -> np.ndarray:
    """Returns the choice `[V]` in which each node holds the least memory, and of these costs least."""
    held = [np.zeros(len(cost)) for cost in problem.node_cost]
    for node, usage in zip(problem.usage_node, problem.usage, strict=True):
        held[node] += np.asarray(usage, float).reshape(len(usage), -1).sum(axis=1)
    return np.array([np.lexsort((cost, num_bytes))[0] for cost, num_bytes in zip(problem.node_cost, held, strict=True)])


def solve_problem_of(
    options: Options,
    problem: Problem,
    space: ShardingSpace,
    start: np.ndarray | None,
    progress: Progress | None,
    stop_gap: float = PLAN_GAP,
) -> Solution:
    """Solves a problem of a function's space, equal layers alike where that costs next to nothing."""
    problem = problem._replace(memory_limit=options.memory_limit_bytes)
    limit, least = options.memory_limit_bytes, float(np.max(least_memory(problem)[1]))
    if least > limit:
        raise InfeasibleError(
            f"`memory_limit_bytes` is {limit:,.0f}, but every plan of {options.function_name} on the mesh "
            f"{dict(options.mesh.shape)} needs at least {least:,.0f} bytes on each device. "
            f"{memory_advice(space, options)}",
            is_proven=True,
        )
    solution = solve(
        problem,
        solver=options.solver,
        time_limit_s=options.time_limit_s,
        key=options.key,
        progress=progress,
        tied=space.tied,
        start=start,
        stop_gap=stop_gap,
    )
    if not solution.feasible and not solution.excess:
        raise InfeasibleError(
            f"Each plan of {options.function_name} that the solver found is predicted to take {FORBIDDEN:.0e} s or "
            "more, which counts as impossible. Check the shapes of the arguments, the lengths of loops, and the rates "
            f"of `hardware` {space.hardware.name!r}."
        )
    if not solution.feasible:
        raise InfeasibleError(
            f"The solver found no plan within `memory_limit_bytes` {limit:,.0f}: its best exceeds it by "
            f"{format_excess(solution.excess)} bytes (status: {solution.status}). "
            f"At least {least:,.0f} bytes are needed."
        )
    return solution


def memory_advice(space: ShardingSpace, options: Options) -> str:
    """Returns a sentence that says what to do where the memory is too small for a function."""
    donate = " donate the state (`donate_argnums`)," if donating_helps(space) else ""
    host, stays = "", options.state or options.formats or options.judged_by  # what offloading does not go with
    if not stays and space.hardware.host_memory_bytes_per_s is not None and host_arrays(space.graph):
        host = " keep the optimiser's moments in the host's memory (`state=\"offload\"`),"
    less = "compute the batch in parts (`in_microbatches`)" if options.remat else 'rematerialise (`remat="search"`)'
    return f"Give more memory or devices,{donate}{host} or {less}."


def donating_helps(space: ShardingSpace) -> bool:
    """Returns whether every plan would need less than now if the arguments that results replace were donated."""
    replaced = {argument for argument in space.graph.feedback if argument is not None}
    donated = tuple(is_donated or i in replaced for i, is_donated in enumerate(space.donated))
    if donated == space.donated:
        return False
    least_bytes, now_bytes = (np.max(least_memory(s.problem)[1]) for s in (space.with_donated(donated), space))
    return bool(least_bytes < now_bytes)


def make_plan(request: PlanRequest, solution: Solution) -> Plan:
    """Writes the solution of a space down as a plan."""
    options, traced_function, space, start_s, *_ = request
    summary = space.summarize(solution.choice)
    prediction = summary.prediction
    compute_s, predicted_s = float(prediction.compute_s.sum()), step_s(prediction)
    objective = None if options.objective is None else _planned_objective(options.objective, space, solution)
    lower_bound_s = min(max(solution.lower_bound - space.most_preference_s, 0.0), predicted_s) if not objective else 0.0
    solver = options.solver
    executor, notes = options.executor, ()
    if executor is None:
        executor, notes = default_executor(space)
    notes = (*space.notes, *traced_function.notes, *notes, *executor_notes(executor, space, summary.layout))
    return Plan(
        function=options.function_name,
        mesh_axes=dict(options.mesh.shape),
        hardware=options.hardware,
        memory_limit_bytes=options.memory_limit_bytes,
        **_arrays(traced_function, summary, options.axis_names, frozenset(space.given)),
        compute_s=compute_s,
        collectives=tuple(
            PredictedCollective(
                t.kind, t.axis, t.num_bytes, t.count, t.seconds, t.vertex, t.link_s, t.made_by, t.read_by
            )
            for t in waiting_transfers(prediction)
        ),
        peak_bytes=summary.peak_bytes,
        lower_bound_s=lower_bound_s,
        status=solution.status,
        solver=solver if isinstance(solver, str) else getattr(solver, "__name__", "function"),
        search_s=time.perf_counter() - start_s,
        history=solution.history,
        notes=notes,
        static_argnums=options.static_argnums,
        donate_argnums=options.donate_argnums,
        static_argnames=options.static_argnames,
        donate_argnames=options.donate_argnames,
        parameters=traced_function.call.parameters,
        executor=executor,
        logical_axis_rules=options.logical_axis_rules,
        whole_work=whole_work_of(request, summary.layout),
        memory=memory_profile_of(traced_function.graph, summary.memory),
        objective=objective,
        computing=PredictedComputing(
            *computing_of(space.graph, summary.layout, space.node_costs, prediction.compute_s)
        ),
        timeline=predicted_timeline(space, summary.layout) if executor == "program" else None,
        function_digest=function_digest(traced_function),
        offloads_state=options.state is not None,
        residuals=planned_residuals(traced_function, space, summary.layout),
        delayed_scales=planned_scales(space.graph, summary.layout),
        mesh=options.mesh,
        structures=(traced_function.call.structure, traced_function.result),
    )


def _planned_objective(cost: StepCost, space: ShardingSpace, solution: Solution) -> PlannedObjective:
    """Returns a user's objective of a solution, whose cost and bound have preferences for small arguments in them."""
    value = objective_of(space, cost, solution.choice)
    preference = float(evaluate(space.preference_problem, solution.choice).cost)
    unit = (solution.cost - value) / preference if preference else 0.0
    bound = solution.lower_bound - max(unit, 0.0) * space.most_preference_s
    return PlannedObjective(short_name(getattr(cost, "__qualname__", "objective")), value, min(bound, value))


def _arrays(
    traced_function: TracedFunction, summary: Summary, axis_names: Sequence[str], given: frozenset[int]
) -> dict[str, Any]:
    """Returns the fields `arguments`, `outputs` and `operations` of a choice's plan; `given` arguments are fixed."""
    graph, layout, next_best = traced_function.graph, summary.layout, summary.next_best
    call = traced_function.call
    arguments = zip(graph.inputs, call.paths, layout.input_specs, next_best.inputs, call.logical_axes, strict=True)
    outputs = zip(graph.outputs, traced_function.out_paths, layout.output_specs, strict=True)
    operations = zip(graph.vertices, summary.prediction.compute_s, next_best.vertices, strict=True)
    on_host = {i for i, vertex in enumerate(graph.inputs) if layout.strategies[vertex.index].on_host}
    return {
        "arguments": tuple(
            replace(
                _tensor(path, vertex.results[0], spec, axis_names),
                given=i in given,
                on_host=layout.strategies[vertex.index].on_host,
                logical_axes=None if names is None else tuple(map(_axis_text, names)),
                **_next_best(other, axis_names),
            )
            for i, (vertex, path, spec, other, names) in enumerate(arguments)
        ),
        "outputs": tuple(
            replace(_tensor(path, output, spec, axis_names), on_host=argument in on_host)
            for (output, path, spec), argument in zip(outputs, graph.feedback, strict=True)
        ),
        "operations": tuple(
            replace(_operation(vertex, layout, float(seconds), axis_names), **_next_best(other, axis_names))
            for vertex, seconds, other in operations
        ),
    }


def _tensor(path: str, array: Operand, spec: IndexedSpec, axis_names: Sequence[str]) -> Tensor:
    of_type: Any = array if isinstance(array, Value) else array.aval
    return Tensor(path, tuple(of_type.shape), str(of_type.dtype), named_spec(spec, axis_names))


def _axis_text(name: str | tuple[str, ...] | None) -> str:
    return name if isinstance(name, str) else "+".join(name or ())


def _operation(vertex: Vertex, layout: Layout, compute_s: float, axis_names: Sequence[str]) -> Operation:
    strategy = layout.strategies[vertex.index]

    def named_specs(specs: Iterable[IndexedSpec]) -> tuple[NamedSpec, ...]:
        return tuple(named_spec(spec, axis_names) for spec in specs)

    return Operation(
        kind=vertex.kind,
        signature=signature_of(vertex),
        source=vertex.source,
        scope=vertex.scope,
        operands=named_specs(strategy.operands),
        unreduced=named_specs(strategy.unreduced),
        results=named_specs(strategy.results),
        value_specs=named_specs(layout.value_specs[v.id] for v in vertex.results),
        count=vertex.weight,
        compute_s=compute_s,
        reductions=tuple(tuple((step.kind, axis_names[step.axis]) for step in steps) for steps in strategy.reductions)
        if vertex.kind == "operation"
        else (),
        format=strategy.format,
        sent_in=strategy.sent_in,
        kept_in=strategy.kept_in,
        exchanged_in=strategy.exchanged_in,
    )


def _next_best(other: NextBest, axis_names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a tensor or operation that say which other spec would have been the next best."""
    spec = None if other.spec is None else named_spec(other.spec, axis_names)
    return {"next_best_spec": spec, "next_best_s": other.added_s}
