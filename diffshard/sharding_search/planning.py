"""From a sharding space to a plan."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from cost.evaluation import evaluate
from cost.memory import least_memory
from diffshard.base import InfeasibleError, Progress, Solution
from diffshard.plans import base as plans
from diffshard.plans.base import Operation, PredictedCollective, Tensor
from diffshard.sharding_search.layout import named_spec, signature_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.traced import TracedFunction
from diffshard.solving.solve import solve
from search_spaces.sharding.base import Layout, Operand, Spec, Value, Vertex
from search_spaces.sharding.explaining import NextBest
from search_spaces.sharding.space import ShardingSpace


def make_plan(
    options: Options, traced: TracedFunction, space: ShardingSpace, start: float, progress: Progress | None
) -> Plan:
    """Solves a space and writes the result down; `start` is when the search began, by `time.perf_counter`.

    Raises:
      InfeasibleError: no plan fits the memory limit.
    """
    solution = _solved(options, space, progress)
    choice = [int(s) for s in solution.choice]
    prediction = space.predict(choice)
    compute_s = float(prediction.compute_s.sum())
    step_s = compute_s + sum(transfer.seconds for transfer in prediction.transfers)
    lower_bound_s = min(max(solution.lower_bound - space.most_preference_s, 0.0), step_s)
    solver = options.solver
    return Plan(
        function=_name(options.fn),
        mesh_axes=dict(zip(space.axis_names, space.axis_sizes, strict=True)),
        hardware=space.hardware,
        memory_limit_bytes=space.memory_limit_bytes,
        **_arrays(space, traced, choice, prediction.compute_s),
        compute_s=compute_s,
        collectives=tuple(
            PredictedCollective(t.kind, t.axis, t.num_bytes, t.count, t.seconds, t.vertex) for t in prediction.transfers
        ),
        peak_bytes=float(np.max(evaluate(space.problem, choice).peak)),
        lower_bound_s=lower_bound_s,
        gap=(step_s - lower_bound_s) / step_s if step_s else 0.0,
        status=solution.status,
        solver=solver if isinstance(solver, str) else getattr(solver, "__name__", "function"),
        search_s=time.perf_counter() - start,
        history=solution.history,
        notes=space.notes,
        static_argnums=options.static_argnums,
        donate_argnums=options.donate_argnums,
        mesh=options.mesh,
    )


def _solved(options: Options, space: ShardingSpace, progress: Progress | None) -> Solution:
    limit, least = space.memory_limit_bytes, float(np.max(least_memory(space.problem)[1]))
    if least > limit:
        raise InfeasibleError(
            f"`memory_limit_bytes` is {limit:,.0f}, but every plan of {_name(options.fn)} on the mesh "
            f"{dict(options.mesh.shape)} needs at least {least:,.0f} bytes on each device. Give more memory or "
            "devices, donate the state (`donate_argnums`), or rematerialise (`jax.checkpoint`)."
        )
    solution = solve(
        space.problem, solver=options.solver, time_limit_s=options.time_limit_s, key=options.key, progress=progress
    )
    if not solution.feasible:
        raise InfeasibleError(
            f"The solver found no plan within `memory_limit_bytes` {limit:,.0f}: its best exceeds it by "
            f"{solution.excess:,.0f} bytes (status: {solution.status}). At least {least:,.0f} bytes are needed."
        )
    return solution


class _Arrays(TypedDict):
    """How a plan lays out every array."""

    arguments: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]


def _arrays(space: ShardingSpace, traced: TracedFunction, choice: Sequence[int], compute_s: np.ndarray) -> _Arrays:
    """Writes down what a choice means for arguments, results and operations; `compute_s` `[vertices]`."""
    execution, next_best = space.decode(choice), space.next_best(choice)
    graph, layout, names = space.graph, execution.layout, space.axis_names
    arguments = zip(graph.inputs, traced.paths, execution.in_specs, next_best.inputs, strict=True)
    outputs = zip(graph.outputs, traced.out_paths, execution.out_specs, strict=True)
    operations = zip(graph.vertices, compute_s, next_best.vertices, strict=True)
    return _Arrays(
        arguments=tuple(
            replace(_tensor(path, v.results[0], spec, names), given=i in space.given, **_next_best(other, names))
            for i, (v, path, spec, other) in enumerate(arguments)
        ),
        outputs=tuple(_tensor(path, output, spec, names) for output, path, spec in outputs),
        operations=tuple(
            replace(_operation(v, layout, float(seconds), names), **_next_best(other, names))
            for v, seconds, other in operations
        ),
    )


def _tensor(path: str, array: Operand, spec: Spec, axis_names: Sequence[str]) -> Tensor:
    of_type: Any = array if isinstance(array, Value) else array.aval
    return Tensor(path, tuple(of_type.shape), str(of_type.dtype), named_spec(spec, axis_names))


def _operation(vertex: Vertex, layout: Layout, compute_s: float, axis_names: Sequence[str]) -> Operation:
    strategy = layout.strategies[vertex.index]

    def named(specs: Iterable[Spec]) -> tuple[plans.Spec, ...]:
        return tuple(named_spec(spec, axis_names) for spec in specs)

    return Operation(
        kind=vertex.kind,
        signature=signature_of(vertex),
        source=vertex.source,
        scope=vertex.scope,
        operands=named(strategy.operands),
        unreduced=named(strategy.unreduced),
        results=named(strategy.results),
        value_specs=named(layout.value_specs[v.id] for v in vertex.results),
        count=vertex.weight,
        compute_s=compute_s,
    )


def _next_best(other: NextBest, axis_names: Sequence[str]) -> dict[str, Any]:
    """The fields of a tensor or operation that say which other spec would have been the next best."""
    spec = None if other.spec is None else named_spec(other.spec, axis_names)
    return {"next_best_spec": spec, "next_best_s": other.added_s}


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
