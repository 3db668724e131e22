"""Cuts a training step into stages, also inside of its scans over layers.

A cut between two trips of a scan divides the scan, before the step is put in micro-batches. Then the cut is one between
two equations, as all others are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from diffshard.pipelines.microbatches import (
    BatchArguments,
    TracedCall,
    divided_call,
    traced_call,
)
from diffshard.pipelines.plans.base import BatchMeans
from diffshard.sharding_search.call import abstract_array
from diffshard.staged_array import StagedArray
from search_spaces.pipelines.batch_states import Split
from search_spaces.pipelines.layer_flow import layer_flow
from search_spaces.pipelines.microbatches import MicrobatchedFunction
from search_spaces.pipelines.residuals import Cut, CutCandidate, cut_candidates
from search_spaces.pipelines.scan_segments import (
    Mark,
    Segments,
    mark_of,
    numbered_program,
    scan_of,
    segmented_program,
    without_numbers,
)
from search_spaces.pipelines.step_parts import Part, StepParts, is_transposed, step_parts
from search_spaces.replay import user_source, with_inner, without_dead_code
from search_spaces.sharding.custom_calls.cudnn import planned_without_cudnn

_COUNT_NAME = "Pipeline.microbatches"
"""How errors call the number of micro-batches: what users of pipelines write."""


@dataclass(frozen=True)
class UncutStep:
    """A training step in micro-batches, before it is cut.

    Attributes:
      call: the traced step; its equations have numbers.
      parts: the step in three parts; cuts name equations of `parts.each`.
      given: for each flat argument the sharding that the user gives, or None; empty where there are none.
    """

    call: TracedCall
    function: MicrobatchedFunction
    parts: StepParts
    given: tuple[PartitionSpec | None, ...] = ()
    batch_means: BatchMeans = "whole"

    @property
    def means_of_microbatches(self) -> list[str]:
        """The places of gradients that read means, or other sums, of their own micro-batch."""
        graph, flow = self.function.graph, self.function.flow
        return list(dict.fromkeys(graph.vertices[i].user_source for i in sorted(flow.estimated | set(flow.estimates))))

    def candidates(self) -> list[CutCandidate]:
        """Returns all places at which the forward pass can be cut, in order."""
        return [c for c in cut_candidates(self.parts) if not c.cut.trip or c.cut.equation not in self._scans_in_one]

    @property
    def scans_in_one(self) -> list[str]:
        """Why scans over layers are not cut between their trips, in sentences."""
        return list(self._scans_in_one.values())

    @cached_property
    def _scans_in_one(self) -> dict[int, str]:
        """Why a scan over layers is not cut, by its equation."""
        program, jaxpr = self.call.program, self.parts.each.program.jaxpr
        reasons = {}
        for index in sorted({c.cut.equation for c in cut_candidates(self.parts) if c.cut.trip}):
            mark = mark_of(jaxpr.eqns[index])
            assert mark is not None
            flow = layer_flow(program, scan_of(program, mark.number), self.call.batch)
            if regions := flow.regions_of_all_layers(program.jaxpr):
                reasons[index] = (
                    f"The layers of a scan ({user_source(jaxpr.eqns[index])}) stay in one stage, because a "
                    f"jax.checkpoint ({user_source(regions[0])}) computes all of them again at once. Put it around the "
                    "function of one layer, the body of the scan."
                )
        return reasons


@dataclass(frozen=True)
class CutStep:
    """A training step that is cut into stages.

    Attributes:
      call: the traced step, of arguments of which some are divided by layers.
      function: it in micro-batches.
      cuts: `[S - 1]`, indices of equations of `parts.each` with which a stage begins.
    """

    call: TracedCall
    function: MicrobatchedFunction
    parts: StepParts
    cuts: tuple[int, ...]
    segments: Segments

    def donated(self, flags: Iterable[bool]) -> list[int]:
        """Returns the flat arguments of the cut step that a result replaces, of those of the whole one with a flag."""
        pairs = zip(self.segments.spread(flags), self.parts.replaced_by, strict=True)
        return [i for i, (is_donated, result) in enumerate(pairs) if is_donated and result is not None]

    def flat_arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the flat arguments of the cut step from those of the whole one: arrays, also `StagedArray`."""
        divided = []
        for array, segments in zip(arrays, self.segments.arguments, strict=True):
            is_staged = isinstance(array, StagedArray)
            if segments is None:
                divided.append(jax.numpy.asarray(array) if is_staged else array)
                continue
            sizes = tuple(b - a for a, b in zip(segments.bounds, segments.bounds[1:], strict=False))
            if is_staged and array.dim == segments.dim and array.sizes == sizes:
                divided += array.parts
            else:
                divided += segments.split(jax.numpy.asarray(array) if is_staged else array)
        return divided

    def result(self, arrays: Sequence[Any]) -> Any:
        """Returns the result of the whole step; its leaves that several stages made are `StagedArray`."""
        leaves = [
            group[0] if segments is None else StagedArray(group, segments.dim)
            for segments, group in self.segments.grouped_results(arrays)
        ]
        return self.call.result.unflatten(leaves)


def uncut_step(
    fn: Callable[..., Any],
    count: int,
    batch: BatchArguments,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_groups: int = 1,
    *,
    batch_means: BatchMeans = "whole",
) -> UncutStep:
    """Traces a training step for some arguments, arrays or their shapes, in micro-batches.

    Args:
      count: into how many parts the batch is divided.
      num_groups: R, which divides `count`: `in_groups` makes micro-batches of R parts each.
    """
    with planned_without_cudnn():
        call = traced_call(fn, count, batch, args, kwargs, _COUNT_NAME)
    arrays = [abstract_array(array) for array in call.arrays]  # Python's numbers have no shapes
    call = call._replace(program=without_dead_code(numbered_program(call.program)), arrays=arrays)
    for equation in call.program.jaxpr.eqns:
        is_loop = equation.primitive.name in ("scan", "while") and not is_transposed(equation)
        if is_loop and any(map(is_transposed, with_inner([equation]))):
            raise ValueError(
                f"{call.name} has a {equation.primitive.name} ({user_source(equation)}) whose trips hold a forward and "
                "a backward pass, which no stages can be cut from. If it accumulates gradients over parts of the "
                "batch, remove it and give `Pipeline.microbatches` instead: the step then computes them by itself."
            )
    is_estimating = batch_means == "each_microbatch"
    function = divided_call(call, count, _COUNT_NAME, num_groups, estimates_sums=is_estimating)
    parts = step_parts(function, call.feedback)
    _check_is_batch(call, parts)
    return UncutStep(call, function, parts, batch_means=batch_means)


def _check_is_batch(call: TracedCall, parts: StepParts) -> None:
    """Refuses a state, such as an optimiser's, as the batch: the step replaces it and sums nothing over it.

    Micro-batches of it would be parts of its update, which is right in its results and no pipeline at all.
    """
    is_summed = any(not isinstance(parts.states[made], Split) for made in parts.each.makes)
    if not is_summed and set(call.batch) <= set(parts.replaced):
        raise ValueError(
            f"`Pipeline.batch_argnums` must name arguments that have the batch, but {call.name} returns new values of "
            f"all of them, as of {call.paths[call.batch[0]]}, and adds no gradients up over them: they are its state. "
            "Give the position of the batch, such as `Pipeline(batch_argnums=2)` for a step of parameters, optimiser "
            "state and batch."
        )


def cut_step(step: UncutStep, cuts: Sequence[Cut]) -> CutStep:
    """Cuts a step at some places.

    Args:
      cuts: `[S - 1]`, of those of `step.candidates()`: equations of `step.parts.each` or trips of its scans.
    """
    trips: dict[int, list[int]] = {}
    for cut in cuts:
        if cut.trip and (mark := mark_of(step.parts.each.program.jaxpr.eqns[cut.equation])) is not None:
            trips.setdefault(mark.number, []).append(cut.trip)
    divided = segmented_program(step.call.program, trips, step.call.batch, step.call.feedback)
    positions, segments = divided.segments.positions(), divided.segments.arguments
    paths: list[str] = []
    for path, found in zip(step.call.paths, segments, strict=True):
        bounds = [] if found is None else zip(found.bounds, found.bounds[1:], strict=False)
        paths += [path] if found is None else [f"{path}[{a}:{b}]" for a, b in bounds]
    call = step.call._replace(
        program=without_dead_code(divided.program) if trips else step.call.program,
        arrays=divided.segments.split_shapes(step.call.arrays),
        paths=paths,
        batch=[positions[i] for i in step.call.batch],
        feedback=divided.segments.divided_feedback(step.call.feedback),
    )
    count, num_groups = step.parts.num_microbatches, step.parts.num_groups
    is_estimating = step.batch_means == "each_microbatch"
    function = (
        divided_call(call, count, _COUNT_NAME, num_groups, estimates_sums=is_estimating) if trips else step.function
    )
    parts = step_parts(function, call.feedback) if trips else step.parts
    where = sorted(_place(step, parts, cut, divided.bounds) for cut in cuts)
    parts = replace(
        parts,
        **{name: replace(part, program=without_numbers(part.program)) for name, part in _programs(parts).items()},
    )
    return CutStep(call, function, parts, tuple(where), divided.segments)


def _place(step: UncutStep, parts: StepParts, cut: Cut, bounds: Mapping[int, Sequence[int]]) -> int:
    """Returns the equation of a cut step that a cut of the uncut step names."""
    uncut = [mark_of(equation) for equation in step.parts.each.program.jaxpr.eqns]
    found = [mark_of(equation) for equation in parts.each.program.jaxpr.eqns]
    numbers = [mark.number if mark is not None else -1 for mark in uncut]
    number = next(n for n in numbers[cut.equation :] if n >= 0)
    if cut.trip:
        return found.index(Mark(number, bounds[number].index(cut.trip)))
    same = [i for i, mark in enumerate(found) if mark is not None and mark.number == number]
    if len(same) == numbers.count(number):
        return same[numbers[: cut.equation].count(number)]
    return min(i for i, mark in enumerate(found) if mark is not None and mark.number >= number)


def _programs(parts: StepParts) -> dict[str, Part]:
    return {"before": parts.before, "each": parts.each, "after": parts.after}
