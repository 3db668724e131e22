"""Plans compiled for a target, and what their programs say: seconds by the timeline, bytes sent, memory."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diffshard.checks.compilation import CompiledStep, compile_steps
from diffshard.checks.compile_process import Job
from diffshard.checks.spans import COMPUTE
from diffshard.checks.targets import Target
from diffshard.checks.timeline import simulate
from diffshard.checks.timeline_lanes import lanes_of
from diffshard.checks.verify import compiled_sent_bytes, predicted_sent_bytes
from diffshard.plans.base import PlanData
from diffshard.plans.comparison import ComparedPlan
from diffshard.plans.formats import format_bytes, format_count
from diffshard.sharding_search.executors import flat_function
from diffshard.sharding_search.options import with_automatic_axes
from diffshard.sharding_search.tracing import TracedFunction
from search_spaces.sharding.space import ShardingSpace

TIMEOUT_S = 600.0
"""Seconds for one compilation: XLA takes under a minute for four layers, several for fifty that are not scanned."""


class CompilablePlan(NamedTuple):
    """A plan that can be compiled.

    Attributes:
      name: for tables.
      plan: with its executor.
      traced_function: the function that it was made for, traced under the plan's logical axis rules.
      space: of the traced function.
    """

    name: str
    plan: PlanData
    traced_function: TracedFunction
    space: ShardingSpace


def judge(plans: Sequence[CompilablePlan], target: Target, *, timeout_s: float = TIMEOUT_S) -> list[ComparedPlan]:
    """Compiles plans in processes of their own; one that fails has a note that says why.

    Args:
      plans: for one mesh.
      target: what to compile for.
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
