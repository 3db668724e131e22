"""A search whose plan a compiler has judged, by Shardy's partitioner or by XLA's compiled programs.

A plan is optimal by the cost model, which knows neither what overlaps nor what a partitioner does. `compile` therefore
lets several plans compete as programs: the found one under each executor, and those of baselines. A memory limit then
holds for XLA's number: where no program of the found plan fits, the search gets a limit that is tighter by the excess.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import jax
import numpy as np

from cost.memory import least_memory
from diffshard.base import InfeasibleError
from diffshard.baselines.plans import plans_of_baselines
from diffshard.checks.collectives import with_reduce_scatters
from diffshard.checks.explicit_collectives import explicit_collectives
from diffshard.checks.targets import Target
from diffshard.checks.verify import predicted_sent_bytes, sent_bytes
from diffshard.comparison.compare import CompilablePlan, judge
from diffshard.plans.base import Executor
from diffshard.plans.comparison import ComparedPlan, Comparison
from diffshard.plans.printing import format_bytes, format_count, format_s
from diffshard.sharding_search.executors import default_executor, flat_function, with_executor
from diffshard.sharding_search.options import Options, with_automatic_axes
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planning import find_plan, memory_advice
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.shape_search import find_on_mesh
from diffshard.sharding_search.tracing import TracedFunction, space_of, trace_call
from search_spaces.replay import function_source
from search_spaces.sharding.space import ShardingSpace

Check = Literal["shardy", "compile", "numbers"]
"""Which compiler judges a plan, or that the numbers of the first call are held against another run."""
MAX_ROUNDS = 4
"""Searches with ever tighter memory limits: the excess halves in most, so that a fifth would gain a few percent."""
MAX_OVERESTIMATE = 1.25
"""How far above the limit a prediction may be for a plan to be compiled: a decoder's was 24% above XLA's number."""
NOTED_DIFFERENCE = 0.05
"""Share of the plan's bytes by which Shardy's must differ for a note: single values differ by a few scalars."""
FOUND = "found"


def checks_of(check: Check | Sequence[Check] | None) -> tuple[Literal["shardy", "compile"] | None, bool]:
    """Returns which compiler judges a plan, and whether the numbers of the first call are checked."""
    checks = () if check is None else tuple(check) if isinstance(check, tuple | list) else (check,)
    if any(name not in get_args(Check) for name in checks) or {"shardy", "compile"} <= set(checks):
        raise ValueError(
            f'`check` must be one of {get_args(Check)}, a compiler together with "numbers", or None, not {check!r}.'
        )
    compiler = "compile" if "compile" in checks else "shardy" if "shardy" in checks else None
    return compiler, "numbers" in checks


def plan_by_shardy(request: PlanRequest) -> Plan:
    """Returns the found plan, with a note where Shardy's partitioner would send other bytes than the plan has."""
    plan = find_on_mesh(request)
    request = request.with_recomputed(plan)
    axes = dict(plan.mesh_axes)
    mesh = with_automatic_axes(request.options.mesh).abstract_mesh
    flat = flat_function(plan, request.traced_function, request.space, mesh)
    traced = flat.jit().trace(*request.traced_function.call.arrays, *flat.residuals)
    lowered = traced.lower(lowering_platforms=(jax.default_backend(),))
    partitioned = sent_bytes(with_reduce_scatters(explicit_collectives(lowered), axes), axes)
    predicted = predicted_sent_bytes(plan.collectives, axes)
    notes = plan.notes
    if abs(partitioned - predicted) > NOTED_DIFFERENCE * max(predicted, partitioned):
        difference = f"{format_bytes(partitioned)} in a step, where the plan has {format_bytes(predicted)}."
        source = function_source(request.options.fn)
        notes = (*notes, f"{source}: by {plan.executor}, Shardy's partitioner lets a device send {difference}")
    return replace(plan, notes=notes, search_s=time.perf_counter() - request.start_s)


def plan_by_compiling(target: Target, timeout_s: float, request: PlanRequest, executors: Sequence[Executor]) -> Plan:
    """Returns the plan whose compiled program is the fastest by the timeline, among those that fit the memory limit.

    Without a timeline it is the fastest by prediction. If nothing can be compiled, it is the found plan, with a note.

    Args:
      timeout_s: seconds for each compilation.
      request: the function with its space, and what was asked for.
      executors: by which the found plan is compiled.

    Raises:
      InfeasibleError: no plan is predicted to come near the memory limit, or none fits by its compiled program.
    """
    options, traced_function, space, start_s, *_ = request
    compiled_plans = _CompiledPlans(options, target, timeout_s, executors)
    limit_bytes = options.memory_limit_bytes
    if options.remat is None and float(np.max(least_memory(space.problem)[1])) > limit_bytes:
        limit_bytes *= MAX_OVERESTIMATE
    for number in range(MAX_ROUNDS):
        own_options = replace(options, executor="constraints", memory_limit_bytes=limit_bytes)
        try:
            found = find_on_mesh(request._replace(options=own_options))
        except InfeasibleError:
            if number == 0:
                raise
            break
        if number == 0:
            compiled_plans.add_baselines(traced_function)
        name = FOUND if limit_bytes == options.memory_limit_bytes else f"{FOUND} within {format_bytes(limit_bytes)}"
        run_again = request.with_recomputed(found)
        excess = compiled_plans.add_found(name, found, run_again.traced_function, run_again.space)
        if number == 0 and run_again is not request:
            compiled_plans.add_found_without_remat(request)
        if excess <= 0:
            break
        predicted, compiled = min(limit_bytes, found.peak_bytes), options.memory_limit_bytes + excess
        # XLA keeps a part of what a plan computes again: the excess falls with what is kept, and is no constant.
        limit_bytes = predicted - excess if options.remat is None else predicted * options.memory_limit_bytes / compiled
        if limit_bytes <= 0:
            break
    return compiled_plans.best(start_s)


@dataclass
class _CompiledPlans:
    """Plans of one function, and what their programs were.

    Attributes:
      timeout_s: seconds for each compilation.
      baseline_plans: those that will be compiled with the next found plan.
      entries: plans that were compiled, and what became of them.
    """

    options: Options
    target: Target
    timeout_s: float
    executors: Sequence[Executor]
    baseline_plans: list[CompilablePlan] = field(default_factory=list)
    entries: list[tuple[CompilablePlan, ComparedPlan]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_baselines(self, traced_function: TracedFunction) -> None:
        """Adds the plans of baselines, unless the user has given shardings, which these would not keep."""
        call = traced_function.call
        given = [path for path, spec in zip(call.paths, call.given, strict=True) if spec is not None]
        if given:
            more = f" and {format_count(len(given) - 1, 'more argument')}" if len(given) > 1 else ""
            self.notes.append(f"{given[0]}{more}: no baseline's plan takes part, because shardings are given.")
            return
        plans = plans_of_baselines(replace(self.options, executor="propagation"), traced_function)
        for name, plan in plans.items():
            options = replace(self.options, logical_axis_rules=plan.logical_axis_rules)
            by_rules = trace_call(options, traced_function.call) if plan.logical_axis_rules else traced_function
            self.baseline_plans.append(CompilablePlan(name, plan, by_rules, space_of(options, by_rules)))
        self.notes += [f"{name} is left out: {reason}" for name, reason in plans.left_out.items()]

    def add_found(self, name: str, found: Plan, traced_function: TracedFunction, space: ShardingSpace) -> float:
        """Compiles a found plan under each executor, and baselines' plans that were not compiled yet.

        Returns:
          Bytes by which the smallest program of the found plan exceeds the memory limit; 0 or less if one fits.
        """
        found = replace(found, memory_limit_bytes=self.options.memory_limit_bytes)
        first_executor = self.options.executor
        if first_executor is None:
            first_executor, _ = default_executor(space)
        executors = sorted(self.executors, key=lambda e: e != first_executor)  # the first wins where all fail
        found_plans = [CompilablePlan(name, with_executor(found, e, space), traced_function, space) for e in executors]
        plans = [*found_plans, *self.baseline_plans]
        self.baseline_plans = []
        rows = judge(plans, self.target, timeout_s=self.timeout_s)
        self.entries += zip(plans, rows, strict=True)
        peaks = [row.compiled_peak_bytes for row in rows[: len(found_plans)] if row.compiled_peak_bytes is not None]
        return min(peaks) - self.options.memory_limit_bytes if peaks else 0.0

    def add_found_without_remat(self, request: PlanRequest) -> None:
        """Compiles the plan that computes nothing again, unless it is predicted to need far more than the limit."""
        limit_bytes = MAX_OVERESTIMATE * self.options.memory_limit_bytes
        options = replace(self.options, executor="constraints", remat=None, memory_limit_bytes=limit_bytes)
        try:
            found = find_plan(request._replace(options=options))
        except InfeasibleError:
            return
        self.add_found(f"{FOUND}, all kept", found, request.traced_function, request.space)

    def best(self, start_s: float) -> Plan:
        """Returns the best plan with the table of all."""
        limit = self.options.memory_limit_bytes
        found = self.entries[0][0].plan
        axes = dict(self.options.mesh.shape)
        rows = tuple(row for _, row in self.entries)
        comparison = Comparison(self.options.function_name, axes, self.target.name, rows, tuple(self.notes))
        with_program = [entry for entry in self.entries if entry[1].compiled_sent_bytes is not None]
        entries_that_fit = [entry for entry in with_program if entry[1].fits]
        if with_program and not entries_that_fit:
            smallest = min(with_program, key=lambda entry: entry[1].compiled_peak_bytes or math.inf)[1]
            raise InfeasibleError(
                f"`memory_limit_bytes` is {limit:,.0f}, but the smallest of {len(with_program)} programs compiled "
                f"for {self.target.name}, {smallest.name} by {smallest.executor}, needs "
                f"{smallest.compiled_peak_bytes or 0.0:,.0f} bytes on each device, and was predicted to need "
                f"{smallest.predicted_peak_bytes:,.0f}. "
                f"{memory_advice(self.entries[0][0].space, self.options)}"
            )
        best, row = min(entries_that_fit or self.entries[:1], key=lambda entry: _order(entry[1]))
        plan = best.plan
        assert isinstance(plan, Plan)
        assert isinstance(found, Plan)
        bound_s = min(found.lower_bound_s, plan.step_s)
        return replace(
            plan,
            # A baseline's own bound is one for plans with its shardings only.
            lower_bound_s=bound_s,
            status=found.status,
            history=found.history,
            notes=(*plan.notes, f"{function_source(self.options.fn)}: {_verdict(row, comparison)}"),
            comparison=comparison,
            search_s=time.perf_counter() - start_s,
        )


def _order(row: ComparedPlan) -> tuple[float, float]:
    """Returns the sort key of plans, the best first: seconds of the timeline, or of the prediction without one."""
    return math.inf if row.timeline_s is None else row.timeline_s, row.predicted_s


def _verdict(row: ComparedPlan, comparison: Comparison) -> str:
    """Says in a sentence why a plan won."""
    name = f"{row.name} by {row.executor}"
    if row.compiled_sent_bytes is None:
        return f"no plan could be compiled for {comparison.target}; this one is {name}."
    count = sum(other.compiled_sent_bytes is not None for other in comparison.rows)
    if row.timeline_s is None:
        return f"of {count} programs compiled for {comparison.target}, {name} fits and is predicted to be the fastest."
    return (
        f"of {count} programs compiled for {comparison.target}, {name} is the fastest that fits: "
        f"{format_s(row.timeline_s)} in the timeline."
    )
