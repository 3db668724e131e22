"""From a sharding space to a plan."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cost.evaluation import change_costs, evaluate
from cost.memory import least_memory
from diffshard.base import InfeasibleError, Progress, Solution
from diffshard.plans import base as plans
from diffshard.plans.base import Operation, PredictedCollective, Tensor
from diffshard.sharding_search.layout import named_spec, signature_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.traced import TracedFunction
from diffshard.solving.solve import solve
from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.predict import compute_seconds, transfers
from search_spaces.sharding.resharding import Spec
from search_spaces.sharding.space import Layout, ShardingSpace


def make_plan(
    options: Options, traced: TracedFunction, space: ShardingSpace, start: float, progress: Progress | None
) -> Plan:
    """Solves a space and writes the result down; `start` is when the search began, by `time.perf_counter`.

    Raises:
      InfeasibleError: no plan fits the memory limit.
    """
    solution = _solved(options, space, progress)
    choice = [int(s) for s in solution.choice]
    layout = space.decode(choice)
    compute = compute_seconds(space, layout)
    changes = change_costs(space.problem, choice)
    collectives = tuple(PredictedCollective(*t) for t in transfers(space, choice, layout))
    step_s = float(compute.sum()) + sum(c.seconds for c in collectives)
    lower_bound_s = min(max(solution.lower_bound - space.most_holding_s, 0.0), step_s)
    solver = options.solver
    return Plan(
        function=_name(options.fn),
        mesh_axes=dict(zip(space.axis_names, space.axis_sizes, strict=True)),
        hardware=space.hardware,
        memory_limit_bytes=space.memory_limit_bytes,
        arguments=_arguments(space, traced, layout, changes),
        outputs=_outputs(space, traced, layout),
        operations=tuple(
            _operation(space, vertex, layout, float(seconds), changes)
            for vertex, seconds in zip(space.graph.vertices, compute, strict=True)
        ),
        compute_s=float(compute.sum()),
        collectives=collectives,
        peak_bytes=float(np.max(evaluate(space.problem, choice).peak)),
        lower_bound_s=lower_bound_s,
        gap=(step_s - lower_bound_s) / step_s if step_s else 0.0,
        status=solution.status,
        solver=solver if isinstance(solver, str) else getattr(solver, "__name__", "function"),
        search_s=time.perf_counter() - start,
        history=solution.history,
        notes=tuple(_notes(space)),
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


def _operation(
    space: ShardingSpace, vertex: Vertex, layout: Layout, compute_s: float, changes: Sequence[np.ndarray]
) -> Operation:
    strategy = layout.strategy[vertex.index]

    def named(specs: Sequence[Spec]) -> tuple[plans.Spec, ...]:
        return tuple(named_spec(spec, space.axis_names) for spec in specs)

    other, other_s = None, 0.0
    if vertex.results:
        node = space.hub_node.get(vertex.results[0].id, vertex.index)
        specs = [s.results[0] for s in space.nodes[node].strategies]
        other, other_s = _next_best(specs, layout.held[vertex.results[0].id], changes[node], space.axis_names)
    return Operation(
        kind=vertex.kind,
        signature=signature_of(vertex),
        source=vertex.source,
        scope=vertex.scope,
        operands=named(strategy.operands),
        unreduced=named(strategy.unreduced),
        results=named(strategy.results),
        value_specs=named([layout.held[v.id] for v in vertex.results]),
        count=vertex.weight,
        compute_s=compute_s,
        next_best_spec=other,
        next_best_s=other_s,
    )


def _next_best(
    specs: Sequence[Spec], chosen: Spec, added_s: np.ndarray, axis_names: Sequence[str]
) -> tuple[plans.Spec | None, float]:
    """The cheapest of the other specs, and what it adds."""
    others = [(float(added), spec) for spec, added in zip(specs, added_s, strict=True) if spec != chosen]
    if not others:
        return None, 0.0
    added, spec = min(others, key=lambda other: other[0])
    return named_spec(spec, axis_names), added


def _arguments(
    space: ShardingSpace, traced: TracedFunction, layout: Layout, changes: Sequence[np.ndarray]
) -> tuple[Tensor, ...]:
    found = []
    for i, (vertex, path) in enumerate(zip(space.graph.inputs, traced.paths, strict=True)):
        value, strategies = vertex.results[0], space.nodes[vertex.index].strategies
        spec = layout.strategy[vertex.index].unreduced[0]
        other, other_s = _next_best([s.unreduced[0] for s in strategies], spec, changes[vertex.index], space.axis_names)
        found.append(
            Tensor(
                path,
                value.shape,
                str(value.dtype),
                named_spec(spec, space.axis_names),
                given=i in space.given,
                next_best_spec=other,
                next_best_s=other_s,
            )
        )
    return tuple(found)


def _outputs(space: ShardingSpace, traced: TracedFunction, layout: Layout) -> tuple[Tensor, ...]:
    found = []
    for output, argument, path in zip(space.graph.outputs, space.graph.feedback, traced.out_paths, strict=True):
        array: Any = output if isinstance(output, Value) else output.aval
        if argument is not None:
            spec = layout.strategy[space.graph.inputs[argument].index].unreduced[0]
        else:
            spec = layout.held[output.id] if isinstance(output, Value) else ()
        found.append(Tensor(path, tuple(array.shape), str(array.dtype), named_spec(spec, space.axis_names)))
    return tuple(found)


def _notes(space: ShardingSpace) -> list[str]:
    notes = list(space.graph.notes)
    without: dict[str, list[str]] = {}
    for vertex in space.without_rule:
        if any(isinstance(x, Value) and x.shape for x in (*vertex.operands, *vertex.results)):
            assert vertex.equation is not None
            without.setdefault(vertex.equation.primitive.name, []).append(vertex.source)
    for name, sources in sorted(without.items()):
        where = sorted(set(sources))
        notes.append(f"{name} has no sharding rule and runs whole on every device ({len(sources)}x, {where[0]}).")
    return notes


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
