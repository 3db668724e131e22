"""Steps of a pipeline that overlap: the next one begins before the last gradients of this one are there.

With gradients of the weights of one step ago, the micro-batches of step t + 1 read what step t was given, and nothing
that it makes. A device runs programs in the order in which they are started, so that this alone fills no bubble: a step
that is started as a whole keeps devices waiting for its last gradients while the next one could begin. Here the first
programs of the next step are started between the last ones of this step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core
from jax.sharding import NamedSharding

from cost.pipeline_schedules import BACKWARD
from cost.pipeline_steps import Overlap, PipelineStep, overlapped_operations
from diffshard.pipelines.copies import bytes_each
from diffshard.pipelines.stage_calls import StageCalls
from diffshard.pipelines.stage_run import Actions, StageRun
from search_spaces.pipelines.stage_labels import Key, Label
from search_spaces.pipelines.stage_programs import StagedStep


def possible_overlap(staged: StagedStep, replaced: Sequence[int | None]) -> Overlap:
    """Returns how a step can overlap with the next one.

    Args:
      staged: the step, of gradients of one step ago.
      replaced: for each flat argument the flat result that replaces it in the next step, or None.
    """
    early = {key for label, p in staged.programs.items() if label.kind != "finish" for key in p.reads}
    if any(staged.inputs[position] in early for position in _late(staged, replaced)):
        return "none"
    for label, program in staged.programs.items():
        makers = [staged.makers[key] for key in program.reads if key in staged.makers]
        if label.kind == "finish" and any(m.kind != "begin" and m.stage != label.stage for m in makers):
            return "late_ends"
    return "own_ends"


def chosen_overlap(
    staged: StagedStep,
    replaced: Sequence[int | None],
    sharding: Callable[[int, Key], NamedSharding],
    free_bytes: Sequence[float],
    price: Callable[[Overlap], PipelineStep],
) -> Overlap:
    """Returns how a step overlaps with the next one: as it can, if that fits the memory and is faster.

    Args:
      staged: the step, of gradients of one step ago.
      replaced: for each flat argument the flat result that replaces it in the next step, or None.
      free_bytes: `[S]`, of each device of a stage.
    """
    overlap = possible_overlap(staged, replaced)
    needed = (overlap_bytes(staged, replaced, stage, overlap, sharding) for stage in range(staged.num_stages))
    fits = all(num_bytes <= free for num_bytes, free in zip(needed, free_bytes, strict=True))
    return overlap if fits and price(overlap).step_s < price("none").step_s else "none"


def overlap_bytes(
    staged: StagedStep,
    replaced: Sequence[int | None],
    stage: int,
    overlap: Overlap,
    sharding: Callable[[int, Key], NamedSharding],
) -> int:
    """Returns the bytes that a stage keeps more, on each device, where steps overlap: what two steps have at one time.

    These are what begins a step, such as gathered weights, and the sums of a step that ends after the next one's.
    Previous versions of weights are gathered too, where they are stored in another way than current ones.
    """
    is_last = min(staged.num_microbatches, staged.num_stages - stage) == 1
    if overlap == "none" or (overlap == "own_ends" and is_last):
        return 0
    begin = staged.programs.get(Label("begin", stage))
    keys = [] if begin is None else [key for key in begin.makes if key in staged.avals]
    for key, home, result in zip(staged.inputs, staged.homes, replaced, strict=True):
        old = None if result is None else staged.outputs[result]
        is_gathered = old in staged.inputs and sharding(stage, key) != sharding(stage, old) if home == stage else False
        keys += [key] if is_gathered else []
    if overlap == "late_ends":
        programs = [program for label, program in staged.programs.items() if label.stage == stage]
        keys += [a.total for program in programs for a in program.accumulations]
    return sum(bytes_each(staged.avals[k].shape, staged.avals[k].dtype, sharding(stage, k)) for k in keys)


def run_overlapped(
    calls: StageCalls,
    actions: Actions,
    overlap: Overlap,
    replaced: Sequence[int | None],
    steps: Iterable[Sequence[Any]],
) -> Iterator[list[Any]]:
    """Runs steps that overlap, and yields the flat results of each when the next one has been started.

    Args:
      replaced: for each flat argument the flat result that replaces it in the next step, or None.
      steps: the flat arguments of each; those that a result replaces are read of the first step only.
    """
    operations, before = _Operations(calls.staged, overlap, replaced), None
    for arrays in steps:
        if before is None:
            before = StageRun(calls, actions, arrays)
            operations.first(before)
            continue
        run = StageRun(calls, actions, operations.early_arguments(before, arrays))
        del arrays
        operations.next(before, run)
        yield before.results()
        before = run
        del run
    if before is not None:
        operations.next(before, None)
        yield before.results()


class _Operations:
    """Starts the programs of two steps that overlap."""

    def __init__(self, staged: StagedStep, overlap: Overlap, replaced: Sequence[int | None]):
        self._staged, self._overlap, self._replaced = staged, overlap, replaced
        self._of_first, self._of_others = overlapped_operations(staged.num_stages, staged.num_microbatches)
        self._late = _late(staged, replaced)
        last = {op.stage for op in self._of_others if (op.kind, op.microbatch) == self._last and not op.is_new}
        self._ended_at_first = [stage for stage in range(staged.num_stages) if stage not in last]

    @property
    def _last(self) -> tuple[int, int]:
        return BACKWARD, self._staged.num_microbatches - 1

    def first(self, run: StageRun) -> None:
        run.begin()
        for operation in self._of_first:
            run.operation(operation.kind, operation.stage, operation.microbatch)

    def early_arguments(self, before: StageRun, arrays: Sequence[Any]) -> list[Any]:
        """Returns the flat arguments of a step that are there before the step before it ends; None for the others."""
        return [
            None if p in self._late else array if result is None else before.result(result)
            for p, (array, result) in enumerate(zip(arrays, self._replaced, strict=True))
        ]

    def next(self, before: StageRun, run: StageRun | None) -> None:
        """Ends a step, and begins the next one, if there is one."""
        is_own = self._overlap == "own_ends"
        if is_own:
            self._end(before, run, self._ended_at_first)
        if run is not None:
            run.begin()
        for op in self._of_others:
            step = run if op.is_new else before
            if step is not None:
                step.operation(op.kind, op.stage, op.microbatch)
            if is_own and not op.is_new and (op.kind, op.microbatch) == self._last:
                self._end(before, run, [op.stage])
        if not is_own:
            self._end(before, run, range(self._staged.num_stages))

    def _end(self, before: StageRun, run: StageRun | None, stages: Sequence[int]) -> None:
        before.end(stages)
        for position in self._late if run is not None else ():
            result = self._replaced[position]
            assert run is not None
            assert result is not None
            if self._staged.makers[self._staged.outputs[result]].stage in stages:
                run.enter(position, before.result(result))


def _late(staged: StagedStep, replaced: Sequence[int | None]) -> list[int]:
    """Returns the positions of flat arguments that the step before makes with its sums."""
    late = []
    for position, result in enumerate(replaced):
        key = None if result is None else staged.outputs[result]
        if key is None or isinstance(key, core.Literal) or key in staged.inputs:
            continue
        if staged.makers[key].kind != "begin":
            late.append(position)
    return late
