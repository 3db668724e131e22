"""`find_pipeline`: a training step cut into stages on parts of a cluster, all of it chosen together."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cost.pipeline_schedules import Schedule, graph_of
from cost.pipeline_times import StageTimes, simulate
from diffshard.base import InfeasibleError
from diffshard.pipelines.cutting import UncutStep, uncut_step
from diffshard.pipelines.division_search import FoundDivision, deadline
from diffshard.pipelines.options import PipelineOptions, donated_arrays, memory_limit_of
from diffshard.pipelines.planned_pipeline import FoundPipeline, planned_pipeline
from diffshard.pipelines.shared_choices import ChosenPipeline, trace_facts
from diffshard.pipelines.step_search import StepSearch
from diffshard.processes import Processes

_BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's seconds, before the programs are planned one by one."""


class _Candidate(NamedTuple):
    seconds: float
    schedule: Schedule
    search: StepSearch
    found: FoundDivision


def find_pipeline(
    options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any], processes: Processes
) -> FoundPipeline:
    """Finds stages, their meshes and shardings, the number of micro-batches and the schedule, for some arguments.

    Args:
      options: what is asked for.
      args: of the step; arrays or their shapes.
      kwargs: of the step.
      processes: those that own devices of the cluster. All of them trace the step; the first one searches.

    Raises:
      ValueError: no number of micro-batches divides the batch, or the step cannot be cut.
      InfeasibleError: no pipeline fits the memory.
      ProcessesError: the processes have traced different steps.
    """
    start_s, is_over = time.perf_counter(), deadline(options.time_limit_s)
    donated, what = donated_arrays(options, args, kwargs), "search a pipeline"
    steps = processes.alike(what, lambda: _steps(options, args, kwargs), trace_facts)
    searches = [StepSearch(options, step, donated) for step in steps]
    chosen = processes.shared(what, lambda: _chosen(options, searches, is_over))
    search = next(search for search in searches if search.num_microbatches == chosen.num_microbatches)
    found = planned_pipeline(options, search, chosen, processes, start_s)
    return found._replace(plan=processes.shared(what, lambda: found.plan))


def _chosen(options: PipelineOptions, searches: Sequence[StepSearch], is_over: Callable[[], bool]) -> ChosenPipeline:
    """Searches in each number of micro-batches and with each schedule, and bounds them all.

    Raises:
      InfeasibleError: no pipeline fits the memory.
    """
    candidates, tried = [], []
    for search in searches:
        for schedule in options.pipeline.schedules:
            found = search.divisions.best(schedule, is_over)
            seconds = np.inf if found is None else _simulated_s(search, schedule, found)
            tried.append((search.num_microbatches, schedule, float(seconds)))
            if found is not None:
                candidates.append(_Candidate(seconds, schedule, search, found))
    if not candidates:
        raise InfeasibleError(_infeasible(options, searches))
    best = min(candidates, key=lambda candidate: candidate.seconds)
    bound_s = min(
        search.divisions.bound(schedule, best.seconds, is_over)
        for search in searches
        for schedule in options.pipeline.schedules
    )
    in_flight = tuple(entry.in_flight for entry in best.found.entries)
    return ChosenPipeline(
        best.search.num_microbatches, best.schedule, best.found.stages, in_flight, bound_s, tuple(tried)
    )


def _steps(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[UncutStep]:
    """Traces the step in each number of micro-batches that divides the batch.

    Raises:
      ValueError: none of them does.
    """
    pipeline, steps, errors = options.pipeline, [], []
    for count in pipeline.microbatch_counts:
        try:
            steps.append(uncut_step(options.fn, count, pipeline.batch, args, kwargs))
        except ValueError as error:
            errors.append(error)
    if not steps:
        raise errors[0]
    return steps


def _simulated_s(search: StepSearch, schedule: Schedule, found: FoundDivision) -> float:
    count = search.num_microbatches
    seconds = np.array([layout.seconds / count for layout in found.layouts])
    sends = [
        search.divisions.link_s[after.start, before.submesh, after.submesh] / 2
        for before, after in zip(found.stages, found.stages[1:], strict=False)
    ]
    times = StageTimes(seconds * (1 - _BACKWARD_SHARE), seconds * _BACKWARD_SHARE, sends, sends)
    return simulate(times, graph_of(schedule, len(seconds), count)).step_s


def _infeasible(options: PipelineOptions, searches: Sequence[StepSearch]) -> str:
    kinds = ", ".join(
        f"{hosts.num_devices} x {hosts.name} with {memory_limit_of(options, kind):,.0f} bytes"
        for kind, hosts in enumerate(options.cluster.kinds)
    )
    chain = searches[0].chain
    return (
        f"No pipeline of {getattr(options.fn, '__name__', 'the function')} with at most {options.pipeline.max_stages} "
        f"stages fits {kinds}: its state alone has {chain.state_bytes.sum():,.0f} bytes. Give more memory, devices, "
        "stages or micro-batches, or rematerialise (`jax.checkpoint`)."
    )
