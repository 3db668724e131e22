"""`find_pipeline`: a training step cut into stages on parts of a cluster, all of it chosen together."""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from cost.pipeline_schedules import Schedule
from diffshard.base import Deadline, InfeasibleError, PlanError
from diffshard.live_progress import LiveLine
from diffshard.outer_search import Candidate, CutOffError, Outcome, OuterSearch
from diffshard.pipelines.cutting import UncutStep, uncut_step
from diffshard.pipelines.decisions import (
    ChosenPipeline,
    RecordingProcesses,
    planned_facts,
    question_facts,
    trace_facts,
)
from diffshard.pipelines.least_memory import nothing_found
from diffshard.pipelines.options import (
    SEARCH_SHARE,
    PipelineOptions,
    SearchProgress,
    donated_arrays,
    given_arrays,
    mesh_shape,
)
from diffshard.pipelines.planned_pipeline import FoundPipeline, planned_pipeline, with_bound
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.consistency import from_json, to_json
from diffshard.pipelines.replica_search import ChosenReplicas, choose_replicas, replicas_bound_s
from diffshard.pipelines.replicated_pipeline import (
    CHOOSE_REPLICAS,
    CHOOSE_STAGES,
    applied_pipeline,
    chosen_of,
    planned_replicas,
    with_decisions,
)
from diffshard.pipelines.stage_search import FoundDivision
from diffshard.pipelines.step_search import StepSearch, search_in
from diffshard.plans.documents import Store
from diffshard.plans.printing import format_s
from diffshard.processes import Processes
from diffshard.sharding_search.fingerprints import digest_of

_OF_SEARCH: dict[str, Any] = {"bound_s": 0.0, "tried": (), "notes": (), "estimate_s": 0.0}
"""What a search says of the stages that it chose, without the stages."""
_STORED = "diffshard stored pipeline", 2
"""The format of the files of a folder that keeps pipelines, and its version."""
_MOST_PLANNED = 4
"""Pipelines whose programs are planned at most."""
_LEAST_GAIN = 0.02
"""What another pipeline has to be estimated faster, relatively, for its programs to be planned."""


class _Choice(NamedTuple):
    search: StepSearch
    schedule: Schedule
    stages_per_device: int


class _Simulated(NamedTuple):
    seconds: float
    choice: _Choice
    found: FoundDivision


def find_pipeline(
    options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any], processes: Processes, line: LiveLine
) -> FoundPipeline:
    """Finds stages, their meshes and shardings, the number of micro-batches and the schedule, for some arguments.

    Args:
      args: of the step; arrays or their shapes.
      processes: those that own devices of the cluster. All of them trace the step; the first one searches.

    Raises:
      ValueError: no number of micro-batches divides the batch, or the step cannot be cut.
      InfeasibleError: no pipeline fits the memory.
      TimeoutError: the time limit ended the search before anything was found, and something may fit.
      ProcessesError: the processes have traced different steps.
    """
    progress = SearchProgress(line, options.time_limit_s)
    progress.step("tracing")
    donated, what = donated_arrays(options, args, kwargs), "search a pipeline"
    steps = processes.alike(what, lambda: _steps(options, args, kwargs), trace_facts)
    searches = [StepSearch(options, step, donated, progress) for step in steps]
    question = digest_of(question_facts(options, steps)) if processes.is_first else ""
    store = None if options.cache is None or not processes.is_first else Store(options.cache, *_STORED)
    key = digest_of({"the question": question, "`time_limit_s`": repr(options.time_limit_s)})

    def known() -> PipelinePlanData | None:
        if options.start is not None and options.start.question == question:
            return options.start
        return None if store is None else store.plan(key, lambda v, path: from_json(v, path, PipelinePlanData))

    plan = processes.shared("take an earlier plan", known, kind=PipelinePlanData | None)
    if plan is not None:
        try:
            return applied_pipeline(plan, searches, processes)
        except PlanError as error:
            warnings.warn(f"An earlier plan of a pipeline is searched again: {error}", stacklevel=2)
    if not processes.is_first:
        progress.step("waiting for the first process")
    chosen = processes.shared(what, lambda: _chosen(searches), kind=tuple[ChosenPipeline, ...])
    found = _best_planned(searches, chosen, processes)
    if options.pipeline.max_replicas > 1 and len(options.cluster.kinds) > 1:
        found = _faster_with_replicas(searches, found, processes)
    elif options.pipeline.max_replicas > 1:
        note = "There are no replicas: each would be on devices of a kind of its own, and all devices are of one kind."
        found = _with_note(found, note)
    left_out = sorted({*options.pipeline.microbatch_counts} - {step.num_microbatches for step in searches})
    if left_out:
        found = _with_note(found, f"Numbers of micro-batches that the batch cannot be divided into: {left_out}.")
    if places := steps[0].means_of_microbatches:
        found = _with_note(
            found, f"Gradients have means of their micro-batch, not of the whole batch, at {', '.join(places)}."
        )
    for reason in steps[0].scans_in_one:
        found = _with_note(found, reason)
    whole = replace(
        found.plan,
        question=question,
        facts=planned_facts(steps[0]),
        roles=options.roles,
        batch_means=options.pipeline.batch_means,
    )
    whole = processes.shared(what, lambda: whole, kind=PipelinePlanData)
    if store is not None and not progress.is_interrupted:  # an interrupted search might have found better stages
        store.keep(key, to_json(whole))
    return found._replace(plan=whole)


def _best_planned(
    searches: Sequence[StepSearch], chosen: Sequence[ChosenPipeline], processes: Processes
) -> FoundPipeline:
    """Plans the programs of the pipeline with the least estimate, and of others while their estimates are clearly less.

    A stage may take longer in its programs than as a whole, because communication of one does not wait beside another.
    """
    best: FoundPipeline | None = None
    start, progress = searches[0].options.start, searches[0].progress
    begun = processes.shared(
        "begin with an earlier plan", lambda: _begun(searches, chosen), kind=tuple[ChosenPipeline, ...]
    )
    refused: InfeasibleError | None = None
    for number, one in enumerate((*begun, *chosen)):
        is_enough = number >= len(begun) + _MOST_PLANNED
        if best is not None and (is_enough or one.estimate_s >= (1 - _LEAST_GAIN) * best.plan.step_s):
            break
        if best is not None and processes.shared("search a pipeline", progress.is_proof_over, kind=bool):
            break
        search = search_in(searches, one.num_microbatches, one.num_groups)
        assert search is not None
        recording = RecordingProcesses(processes.indices)
        one = recording.shared(CHOOSE_STAGES, lambda one=one: one, kind=ChosenPipeline)
        try:
            found = planned_pipeline(search, one, recording, start if begun and not number else None)
        except InfeasibleError as error:  # the start was made for more memory, or its split programs need more
            refused = error
            continue
        found = with_decisions(found, recording)
        best = found if best is None or found.plan.step_s < best.plan.step_s else best
    if best is None:
        assert refused is not None
        raise refused
    return best


def _begun(searches: Sequence[StepSearch], chosen: Sequence[ChosenPipeline]) -> tuple[ChosenPipeline, ...]:
    """Returns the stages of the plan that the search begins with; none if they do not fit, or are found anyway."""
    options = searches[0].options
    if options.start is None:
        return ()
    start = chosen_of(options.start, searches)
    is_known = start is None or any(one._replace(**_OF_SEARCH) == start._replace(**_OF_SEARCH) for one in chosen[:1])
    if start is None or is_known or start.schedule not in options.pipeline.schedules:
        return ()
    best = chosen[0]
    return (start._replace(bound_s=best.bound_s, tried=best.tried, notes=best.notes, estimate_s=0.0),)


def _with_note(found: FoundPipeline, note: str) -> FoundPipeline:
    return found._replace(plan=replace(found.plan, notes=(*found.plan.notes, note)))


def _faster_with_replicas(searches: Sequence[StepSearch], found: FoundPipeline, processes: Processes) -> FoundPipeline:
    """Returns the best pipeline with replicas if it is faster than the one without, with a bound on both.

    The first process searches, and all plan what it found.
    """
    ungrouped, progress = [search for search in searches if search.num_groups == 1], searches[0].progress

    def search() -> tuple[ChosenReplicas | None, float]:
        bound_s = min(found.plan.lower_bound_s, *(replicas_bound_s(search) for search in ungrouped))
        return choose_replicas(ungrouped, progress.is_proof_over), bound_s

    chosen, bound_s = processes.shared(
        "search replicas of a pipeline", search, kind=tuple[ChosenReplicas | None, float]
    )
    best, note = found, "No replicas fit."
    if chosen is not None:
        of_number = search_in(ungrouped, chosen.num_microbatches, 1)
        assert of_number is not None
        try:
            recording = RecordingProcesses(processes.indices)
            chosen = recording.shared(CHOOSE_REPLICAS, lambda one=chosen: one, kind=ChosenReplicas)
            replicated = planned_replicas(of_number, chosen, found.plan, recording)
            replicated = with_decisions(replicated, recording)
            best = min(found, replicated, key=lambda pipeline: pipeline.plan.step_s)
            note = (
                f"With replicas the best step takes {format_s(replicated.plan.step_s)}, and without them "
                f"{format_s(found.plan.step_s)}. Stages of replicas keep all residuals."
            )
        except InfeasibleError as error:
            note = f"{note} {error}"
    plan = replace(with_bound(best.plan, bound_s), search_s=progress.seconds)
    return _with_note(best._replace(plan=plan), note)


def _chosen(searches: Sequence[StepSearch]) -> tuple[ChosenPipeline, ...]:
    """Searches in each number of micro-batches and with each schedule, bounds all, and returns those found, best first.

    Raises:
      InfeasibleError: no pipeline fits the memory.
      TimeoutError: the time limit ended the search before anything was found, and something may fit.
    """
    options, progress = searches[0].options, searches[0].progress
    searches, refused = _with_groups(searches)
    in_order = sorted(searches, key=lambda search: search.num_groups)
    choices = [
        _Choice(search, schedule, stages_per_device)
        for search, schedule in itertools.product(in_order, options.pipeline.schedules)
        for stages_per_device in options.pipeline.stages_per_device_of(schedule)
        if search.has_places(schedule, stages_per_device)
    ]
    if not choices:
        reasons = "".join(f" {reason}" for reason in in_order[0].step.scans_in_one)
        raise ValueError(
            f"`Pipeline.schedules` {tuple(options.pipeline.schedules)} need equal parts of the cluster whose number "
            "divides that of the micro-batches with 'interleaved', and as many layers as stages at least: "
            f"{options.cluster.num_devices} devices and {len(in_order[0].chain)} layers have none with "
            f"{options.pipeline.microbatch_counts} micro-batches.{reasons}"
        )
    simulated: list[_Simulated] = []

    def candidate(number: int, choice: _Choice) -> Candidate[_Simulated]:
        search, schedule, stages_per_device = choice

        def solve(_: Deadline, cut_off_s: float) -> Outcome[_Simulated]:
            progress.tries(search.num_microbatches, schedule, number, len(choices))
            if search.num_groups > 1:  # known before anything is solved
                least_s = search.bound(schedule, stages_per_device, cut_off_s, is_over=lambda: True)
                if least_s >= cut_off_s:
                    raise CutOffError(least_s)
            divisions = search.candidates(schedule, stages_per_device, progress.is_search_over)
            price = partial(search.divisions_of(stages_per_device).simulated_s, schedule)
            found = [_Simulated(price(one, stages_per_device), choice, one) for one in divisions]
            if not found:
                raise InfeasibleError("No division into stages fits the memory.")
            simulated.extend(found)
            best = min(found, key=lambda one: one.seconds)
            progress.found(best.seconds)
            return Outcome(best, best.seconds)

        return Candidate((search.num_microbatches, schedule), -math.inf, solve)

    outer = OuterSearch[_Simulated](progress.deadline, last_share=SEARCH_SHARE)
    outer.run(candidate(number, choice) for number, choice in enumerate(choices, 1))
    if not simulated:
        raise nothing_found(searches)
    num_tried = sum(one.status != "not tried" for one in outer.tried)
    if num_tried < len(choices):
        refused = (
            *refused,
            f"The time limit ended the search after {num_tried} of {len(choices)} choices of micro-batches and "
            "schedules; the bound is for these.",
        )
    tried: dict[tuple[int, Schedule], float] = {}
    for one in outer.tried[:num_tried]:
        if one.status != "cut off":
            tried[one.name] = min(tried.get(one.name, math.inf), math.inf if one.cost is None else one.cost)
    simulated.sort(key=lambda one: one.seconds)
    progress.step("proving a bound")
    target_s, choices = simulated[0].seconds, choices[:num_tried]
    bound_s = min(
        search.bound(schedule, stages_per_device, target_s, progress.is_proof_over)
        for search, schedule, stages_per_device in choices
    )
    progress.bounded(bound_s)
    return tuple(
        ChosenPipeline(
            one.choice.search.num_microbatches,
            one.choice.schedule,
            one.found.stages,
            tuple(entry.in_flight for entry in one.found.entries),
            bound_s,
            tuple((*key, seconds) for key, seconds in tried.items()),
            one.choice.search.num_groups,
            (*refused, *_other_reduction(one, simulated)),
            recomputed=tuple(layout.recomputed for layout in one.found.layouts),
            offloaded=tuple(layout.offloaded for layout in one.found.layouts),
            estimate_s=one.seconds,
            stages_per_device=one.choice.stages_per_device,
        )
        for one in simulated
    )


def _with_groups(searches: Sequence[StepSearch]) -> tuple[list[StepSearch], tuple[str, ...]]:
    """Returns the searches whose steps can be computed in groups of examples, and why others cannot.

    Raises:
      ValueError: no step can.
    """
    possible, errors = [], []
    for search in searches:
        try:
            _ = search.layer_bounds if search.num_groups > 1 else None
            possible.append(search)
        except ValueError as error:
            errors.append(error)
    if not possible:
        raise errors[0]
    notes = dict.fromkeys(f"Gradients cannot be reduced once a step: {error}" for error in errors)
    return possible, tuple(notes)


def _other_reduction(best: _Simulated, simulated: Sequence[_Simulated]) -> list[str]:
    """Says how long a step takes if gradients are reduced in the way that was not chosen, if that was tried."""
    is_once = best.choice.search.num_groups > 1
    others = [one.seconds for one in simulated if (one.choice.search.num_groups > 1) != is_once]
    if not others:
        return []
    way = "in each micro-batch" if is_once else "once a step"
    return [
        f"With gradients reduced {way} the best step takes {format_s(min(others))} instead of "
        f"{format_s(best.seconds)}, before the programs of the stages were planned one by one."
    ]


def _steps(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[UncutStep]:
    """Traces the step in each number of micro-batches that divides the batch, each in some numbers of groups.

    Raises:
      ValueError: none of them does.
    """
    pipeline, steps, errors, given = options.pipeline, [], [], given_arrays(options, args, kwargs)
    for count, num_groups in itertools.product(pipeline.microbatch_counts, _group_counts(options)):
        try:
            step = uncut_step(
                options.fn,
                count * num_groups,
                pipeline.batch,
                args,
                kwargs,
                num_groups,
                batch_means=pipeline.batch_means,
            )
            steps.append(replace(step, given=given))
        except ValueError as error:
            errors.append(error)
    if not steps and not errors:
        raise ValueError(
            "`Pipeline.gradient_reductions` must have 'each_microbatch' where no stage can have more than one device."
        )
    if not steps:
        raise errors[0]
    return steps


def _group_counts(options: PipelineOptions) -> list[int]:
    """Returns the numbers of groups of examples to try: 1, and the sizes of meshes and their axes."""
    ways = options.pipeline.gradient_reductions
    submeshes = options.cluster.submeshes()
    sizes = {submesh.num_devices for submesh in submeshes}.union(*(mesh_shape(s).values() for s in submeshes))
    return [*([1] if "each_microbatch" in ways else []), *(sorted(sizes - {1}) if "once" in ways else [])]
