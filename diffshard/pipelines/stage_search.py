"""The search for the sharding of one stage of a pipeline on one submesh."""

import time
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import AbstractMesh

from cost.base import Hardware
from diffshard.pipelines.stage_function import StageFunction
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.overlap import step_s
from diffshard.sharding_search.planning import fastest_choice
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.partition_specs import NamedSpec, named_spec
from search_spaces.pipelines.forward_backward import num_bytes
from search_spaces.pipelines.stage_labels import Key
from search_spaces.sharding.base import Layout
from search_spaces.sharding.space import ShardingSpace


@dataclass(frozen=True)
class StageLayout:
    """How a stage runs on a mesh.

    Attributes:
      seconds: predicted, of a whole step: all micro-batches and the end.
      lower_bound_s: no sharding takes less.
      peak_bytes: of each device.
      residual_bytes: of each device, what a micro-batch leaves for its backward pass.
      specs: by key, of arguments and of what programs leave.
    """

    seconds: float
    lower_bound_s: float
    peak_bytes: float
    residual_bytes: float
    specs: dict[Key, NamedSpec]


def search_stage(
    function: StageFunction,
    mesh: AbstractMesh,
    hardware: Hardware,
    memory_limit_bytes: float,
    *,
    is_donated: bool,
    solver: Any,
    time_limit_s: float | None,
) -> StageLayout:
    """Finds how a stage runs on a mesh.

    Raises:
      InfeasibleError: nothing fits the memory limit.
    """
    options = Options(
        fn=function,
        mesh=mesh,
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes,
        solver=solver,
        time_limit_s=time_limit_s,
        donate_argnums=(0, 1, 2) if is_donated else (1, 2),
        progress="none",
    )
    traced = trace_function(options, function.shapes)
    function.weigh(traced.graph)
    space = space_of(options, traced)
    request = PlanRequest(options, traced, space, 0.0)
    solution = fastest_choice(request, time.perf_counter())
    summary = space.summarize(solution.choice)
    seconds = step_s(summary.prediction)
    bound = min(max(solution.lower_bound - space.most_preference_s, 0.0), seconds)
    specs = _specs(function, space, summary.layout, options.axis_names)
    sizes = dict(mesh.shape)
    residual_bytes = sum(
        num_bytes(function.staged.avals[key]) / prod(sizes[a] for axes in specs.get(key, ()) for a in axes)
        for key in function.residuals
    )
    return StageLayout(seconds, bound, summary.peak_bytes, residual_bytes, specs)


def _specs(
    function: StageFunction, space: ShardingSpace, layout: Layout, axis_names: tuple[str, ...]
) -> dict[Key, NamedSpec]:
    """Returns the specs of arguments and of all arrays that have a name."""
    arguments, held = function.arguments, [key for _ in range(function.in_flight - 1) for key in function.residuals]
    keys = (*arguments.kept, *(a.total for a in function.sums), *held, *arguments.read, *arguments.received)
    specs = {key: named_spec(spec, axis_names) for key, spec in zip(keys, layout.input_specs, strict=True)}
    keys_of_names = {name: key for key, name in function.names.items()}
    for vertex in space.graph.operations():
        if vertex.equation is not None and vertex.primitive == "name":
            key = keys_of_names.get(vertex.equation.params["name"])
            if key is not None:
                specs[key] = named_spec(layout.value_specs[vertex.results[0].id], axis_names)
    return specs
