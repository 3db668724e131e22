"""`compare` compiles plans of one function for a target, and sets predictions and programs side by side."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from cost.base import Hardware
from cost.real_numbers import Limit, checked_number
from diffshard.base import InfeasibleError, checked_mesh
from diffshard.checks.compilation import CompiledStep, Job, compile_steps
from diffshard.checks.targets import Target, target_for
from diffshard.checks.timeline import COMPUTE, simulate
from diffshard.checks.timeline_lanes import lanes_of
from diffshard.checks.verify import compiled_sent_bytes, predicted_sent_bytes
from diffshard.plans.base import PlanData
from diffshard.plans.comparison import ComparedPlan, Comparison
from diffshard.plans.printing import format_bytes, format_count
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.executors import flat_function
from diffshard.sharding_search.options import Options, hardware_for, options_of, with_automatic_axes
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planning import find_plan
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import TracedFunction, space_of, trace_function
from search_spaces.sharding.space import ShardingSpace

TIMEOUT_S = 600.0
"""Seconds for one compilation: XLA takes under a minute for four layers, several for fifty that are not scanned."""


class CompilablePlan(NamedTuple):
    """A plan that can be compiled.

    Attributes:
      traced_function: the function that it was made for, traced under the plan's logical axis rules.
    """

    name: str
    plan: PlanData
    traced_function: TracedFunction
    space: ShardingSpace


def judge(plans: Sequence[CompilablePlan], target: Target, *, timeout_s: float = TIMEOUT_S) -> list[ComparedPlan]:
    """Compiles plans in processes of their own; one that fails has a note that says why.

    Args:
      timeout_s: seconds for each compilation.

    Raises:
      RuntimeError: the target's compiler is not installed.
    """
    target.check()
    jobs: dict[str, Job] = {}
    failures: dict[str, str] = {}
    for index, plan in enumerate(plans):
        try:
            jobs[str(index)] = _job(plan, target)
        except Exception as error:  # whatever a user's function or JAX raises loses this plan, not the others
            failures[str(index)] = f"It could not be lowered: {type(error).__name__}: {error}"
    results: Mapping[str, CompiledStep | str] = {**compile_steps(jobs, timeout_s=timeout_s), **failures}
    return [_row(plan, results[str(index)], target) for index, plan in enumerate(plans)]


def _job(compilable: CompilablePlan, target: Target) -> Job:
    _, plan, traced_function, space = compilable
    assert plan.mesh is not None
    # Without devices, so that one that is here does not stand in the way of lowering for another platform.
    flat = flat_function(plan, traced_function, space, with_automatic_axes(plan.mesh).abstract_mesh)
    step = flat.export_for(target.platform, traced_function.call.arrays)
    return Job(step, flat.donate_argnums, dict(plan.mesh_axes), target, flat.compiler_options)


def _row(compilable: CompilablePlan, result: CompiledStep | str, target: Target) -> ComparedPlan:
    plan, axes = compilable.plan, dict(compilable.plan.mesh_axes)
    timeline, notes, fits = None, [], True
    if isinstance(result, str):
        notes.append(result)
    else:
        if result.num_involuntary:
            arrays = format_count(result.num_involuntary, "array")
            notes.append(f"XLA's partitioner replicates {arrays} on the way between two shardings.")
        fits = (result.peak_bytes or 0.0) <= plan.memory_limit_bytes
        if not fits:
            limit = format_bytes(plan.memory_limit_bytes)
            notes.append(f"It does not fit the memory limit of {limit}.")
        if target.rates is not None:
            timeline = simulate(result.hlo, axes, target.rates)
            notes += timeline.notes
    sent = None if isinstance(result, str) else compiled_sent_bytes(result.hlo, axes, platform=target.platform)
    return ComparedPlan(
        name=compilable.name,
        executor=plan.executor,
        predicted_s=plan.step_s,
        timeline_s=timeline.step_s if timeline else None,
        computing_s=timeline.busy_s.get(COMPUTE, 0.0) if timeline else None,
        predicted_sent_bytes=predicted_sent_bytes(plan.collectives, axes),
        compiled_sent_bytes=sent,
        predicted_peak_bytes=plan.peak_bytes,
        compiled_peak_bytes=None if isinstance(result, str) else result.peak_bytes,
        fits=fits,
        notes=tuple(notes),
        lanes=lanes_of(timeline) if timeline else (),
    )


def compare(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    *args: Any,
    plans: Mapping[str, Any],
    target: Target | str | None = None,
    hardware: Hardware | str | None = None,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] | None = (),
    static_argnums: int | Sequence[int] | None = (),
    time_limit_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Comparison:
    """Compiles plans for a target, and sets their predictions beside what XLA makes of them; nothing is run.

    >>> print(diffshard.compare(train_step, mesh, state, batch, plans={"found": plan, "mine": (P(), P("data"))}))

    Each plan is compiled in a process of its own, as its executor runs it. A compiler that crashes or hangs leaves a
    note in its row. Time is that of `diffshard.checks.timeline`, a simulation of the compiled schedule; the target
    "host" has none, and shows bytes and memory only. With `jax.distributed` all processes of the mesh call this, and
    the first one compiles for all.

    Args:
      fn: the function that the plans were made for.
      mesh: the mesh, whose devices need not be the target's; an abstract one will do.
      *args: as for the function itself: arrays or `jax.ShapeDtypeStruct`.
      plans: by name a `Plan`, the path of a saved one, or shardings of the arguments as `in_shardings` of `search`.
        Shardings are completed to the plan that is predicted to be the fastest, and compiled by propagation.
      target: "h100", "a100", "host" or a `Target`; None takes the one of the plans' hardware.
      hardware: as in `search`, for plans that are given as shardings; None takes that of the first `Plan`, if there is
        one. The four arguments that follow are for plans that are given as shardings, too: a `Plan` has its own.
      memory_limit_bytes: of each device; None takes the memory of the hardware.
      donate_argnums: positions of arguments whose memory may be used for results, as in `jax.jit`.
      static_argnums: positions of arguments that are compile-time constants, as in `jax.jit`.
      time_limit_s: seconds for the solver to complete each of them; None lets it end by its own rule.
      timeout_s: seconds for each compilation.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
      PlanError: a plan was made for another function, other arguments or another mesh.
      RuntimeError: the target's compiler is not installed; names the extra that brings it.
      ProcessesError: another process has given other plans, or an argument that breaks a rule.
    """
    with errors_for_all(mesh, "compare plans"):
        checked_mesh(mesh)
        checked_number("timeout_s", timeout_s, Limit, " of seconds")
        if not isinstance(plans, Mapping) or not plans:
            raise ValueError(f"`plans` must map at least one name to a plan, not {plans!r}.")
        plans = {name: _plan_or_shardings(plan, mesh) for name, plan in plans.items()}
        hardware_of_plans = [plan.hardware for plan in plans.values() if isinstance(plan, Plan)]
        priced_for = hardware_of_plans[0] if hardware is None and hardware_of_plans else hardware_for(hardware, mesh)
        compiled_for = target_for(target, priced_for)
        compiled_for.check()
        options = options_of(
            fn,
            mesh,
            priced_for,
            memory_limit_bytes,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            time_limit_s=time_limit_s,
            executor="propagation",
        )

    def compared() -> Comparison:
        compilable_plans, notes = [], []
        for name, plan in plans.items():
            try:
                compilable_plans.append(_compilable_plan(name, plan, options, args))
            except InfeasibleError as error:
                notes.append(f"{name} is left out: {error}")
        rows = judge(compilable_plans, compiled_for, timeout_s=timeout_s)
        return Comparison(options.function_name, dict(mesh.shape), compiled_for.name, tuple(rows), tuple(notes))

    processes, what = processes_of(mesh), f"compare plans of {options.function_name}"
    processes.check_alike(what, {"`plans`": ", ".join(plans), "`target`": compiled_for.name})
    return processes.shared(what, compared, kind=Comparison)


def _plan_or_shardings(plan: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns a plan, read from its file where a path is given; anything else as it is."""
    if isinstance(plan, str | os.PathLike):
        plan = Plan.load(plan)
    if isinstance(plan, Plan):
        checked_mesh(mesh, plan.mesh_axes)
    return plan


def _compilable_plan(name: str, plan: Any, options: Options, args: Sequence[Any]) -> CompilablePlan:
    """Traces the function for a plan; shardings are completed to one by a search."""
    start_s = time.perf_counter()
    if not isinstance(plan, Plan):
        options = replace(options, in_shardings=plan)
        traced_function = trace_function(options, args)
        request = PlanRequest(options, traced_function, space_of(options, traced_function), start_s)
        return CompilablePlan(name, find_plan(request), traced_function, request.space)
    options = replace(
        options,
        donate_argnums=plan.donate_argnums,
        static_argnums=plan.static_argnums,
        logical_axis_rules=plan.logical_axis_rules,
    )
    traced_function = trace_function(options, args)
    plan.check_call(traced_function.call)
    request = PlanRequest(options, traced_function, space_of(options, traced_function), start_s)
    request = request.with_recomputed(plan)
    return CompilablePlan(name, replace(plan, mesh=options.mesh), request.traced_function, request.space)
