"""The arrays of one step of a pipeline while it runs: which stage has which, and until when.

A stage has arrays of the whole step (arguments, and what begins and finishes the step), arrays of each micro-batch in
flight, and sums. Each is forgotten after the last program that reads it. The same code runs a step and sizes it: what
is done with arrays is an argument. Steps may overlap: the next one begins before the last gradients of this one are
there.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from jax.extend import core
from jax.sharding import NamedSharding

from cost.pipeline_schedules import BACKWARD, FORWARD, WEIGHTS, ScheduleGraph
from cost.pipeline_steps import Overlap, PipelineStep, overlapped_operations
from diffshard.pipelines.copies import bytes_each
from diffshard.pipelines.stage_calls import Leaving, StageCall, StageCalls
from search_spaces.pipelines.batch_states import Split
from search_spaces.pipelines.stage_labels import NUMBER, Key, Label, ProgramKind
from search_spaces.pipelines.stage_programs import StagedStep

_PROGRAMS: dict[int, ProgramKind] = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weights"}


class Actions(Protocol):
    """Actions on arrays: `execution.py` dispatches programs, an experiment adds up bytes."""

    def enter(self, array: Any, key: Key, stage: int) -> Any:
        """Returns an argument as a stage stores it."""
        ...

    def zeros(self, call: StageCall) -> list[Any]:
        """Returns the totals of a program before its first micro-batch."""
        ...

    def run(
        self, call: StageCall, microbatch: int | None, totals: list[Any], given_up: list[Any], reads: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs a program; returns totals and what leaves it."""
        ...

    def send(self, array: Any, key: Key, source: int, target: int) -> Any:
        """Returns a copy, on another stage, of an array that leaves a program."""
        ...

    def shared(self, array: Any, key: Key, source: int, target: int) -> Any:
        """Returns an array in the form in which it is sent."""
        ...

    def number(self, stage: int, microbatch: int) -> Any:
        """Returns the number of a micro-batch, on a stage."""
        ...

    def free(self, array: Any) -> None:
        """Gives up the memory of a donated argument, which nothing reads any more."""
        ...

    def merge(self, key: Key, label: Label, pieces: list[Any]) -> Any:
        """Returns a result from its pieces, those of all micro-batches in order."""
        ...


class StageRun:
    """The arrays of one step while it runs.

    Args:
      arrays: the flat arguments; None for those that `enter` gives later.
    """

    def __init__(self, calls: StageCalls, actions: Actions, arrays: Sequence[Any]):
        self._calls, self._staged, self._actions = calls, calls.staged, actions
        self._kept: list[dict[Key, Any]] = [{} for _ in calls.meshes]
        self._parts: dict[tuple[int, int], dict[Key, Any]] = {}  # by stage and micro-batch
        self._totals: dict[Label, list[Any]] = {}
        self._pieces: dict[Key, dict[int, Any]] = {}
        for position, array in enumerate(arrays):
            if array is not None:
                self.enter(position, array)

    def enter(self, position: int, array: Any) -> None:
        """Takes a flat argument, before programs that read it run."""
        key = self._staged.inputs[position]
        for stage in sorted(self._staged.readers.get(key, frozenset()) | {self._staged.homes[position]}):
            self._kept[stage][key] = self._actions.enter(array, key, stage)

    def step(self, graph: ScheduleGraph) -> list[Any]:
        """Runs the step in the order of a schedule; returns the flat results."""
        self.begin()
        for kind, stage, microbatch in zip(
            graph.kind.tolist(), graph.stage.tolist(), graph.microbatch.tolist(), strict=True
        ):
            self.operation(kind, stage, microbatch)
        self.end(range(self._staged.num_stages))
        return self.results()

    def begin(self) -> None:
        """Runs the programs that begin the step."""
        for label in self._labels("begin"):
            self._program(label, None)

    def operation(self, kind: int, stage: int, microbatch: int) -> None:
        """Runs a program of a micro-batch; does nothing for transfers, which programs start."""
        if kind in _PROGRAMS:
            self._program(Label(_PROGRAMS[kind], stage), microbatch)
        if kind == (WEIGHTS if self._staged.has_split_backward else BACKWARD):
            self._parts.pop((stage, microbatch), None)

    def end(self, stages: Collection[int]) -> None:
        """Ends the step of some stages, after the last micro-batches of all whose sums they read."""
        self._finish_sums(stages)
        for label in self._labels("finish"):
            if label.stage in stages:
                self._program(label, None)

    def results(self) -> list[Any]:
        """Returns the flat results, after the step has ended."""
        return [self.result(number) for number in range(len(self._staged.outputs))]

    def result(self, number: int) -> Any:
        """Returns a flat result: an array, or the number that it is.

        Raises:
          KeyError: no program has made it yet.
        """
        key = self._staged.outputs[number]
        if isinstance(key, core.Literal):
            return key.val
        return self._kept[self._staged.stage_of(key)][key]

    def arrays_of(self, stage: int) -> Iterator[tuple[str, Any]]:
        """Yields the arrays that a stage has between programs, and what each is of: "step", "sum" or "micro-batch"."""
        yield from (("step", array) for array in self._kept[stage].values())
        yield from (
            ("sum", total) for label, totals in self._totals.items() if label.stage == stage for total in totals
        )
        of_stage = (parts for (at, _), parts in self._parts.items() if at == stage)
        yield from (("micro-batch", array) for parts in of_stage for array in parts.values())
        for total, pieces in self._pieces.items():
            if self._staged.makers[total].stage == stage:
                yield from (("step", array) for array in pieces.values())

    def _labels(self, kind: str) -> list[Label]:
        return [label for label in self._calls.calls if label.kind == kind]

    def _part(self, stage: int, microbatch: int | None) -> dict[Key, Any]:
        return self._kept[stage] if microbatch is None else self._parts.setdefault((stage, microbatch), {})

    def _program(self, label: Label, microbatch: int | None) -> None:
        call = self._calls.calls.get(label)
        if call is None:
            return
        if call.zeros is not None and label not in self._totals:
            self._totals[label] = self._actions.zeros(call)
        given_up, reads = (
            [self._array(label.stage, microbatch, key) for key in k] for k in (call.given_up, call.reads)
        )
        made, leaves = self._actions.run(call, microbatch, self._totals.get(label, []), given_up, reads)
        if call.sums:
            self._totals[label] = made
        del given_up, reads, made
        for key in call.forgotten:
            self._part(label.stage, microbatch).pop(key)
        for leaving, array in zip(call.leaves, leaves, strict=True):
            self._leave(label.stage, microbatch, leaving, array)
        self._keep_pieces(call, microbatch)

    def _array(self, stage: int, microbatch: int | None, key: Key) -> Any:
        if microbatch is not None:
            if key == NUMBER:
                return self._actions.number(stage, microbatch)
            parts = self._part(stage, microbatch)
            if key in parts:
                return parts[key]
        return self._kept[stage][key]

    def _leave(self, stage: int, microbatch: int | None, leaving: Leaving, array: Any) -> None:
        if leaving.is_kept:
            self._part(stage, microbatch)[leaving.key] = array
        for target in leaving.targets:
            sent = self._actions.send(array, leaving.key, stage, target)
            self._part(target, microbatch)[leaving.key] = sent

    def _keep_pieces(self, call: StageCall, microbatch: int | None) -> None:
        label = call.program.label
        for a in call.program.accumulations:
            if a not in call.sums:
                assert microbatch is not None
                piece = self._array(label.stage, microbatch, a.part)
                if isinstance(a.state, Split):
                    self._pieces.setdefault(a.total, {})[microbatch] = piece
                else:
                    self._kept[label.stage][a.total] = piece

    def _finish_sums(self, stages: Collection[int]) -> None:
        """Frees what only micro-batches read; puts what they made where the programs that finish the step read it."""
        for stage in stages:
            for key in self._calls.read_until_finish[stage]:
                array = self._kept[stage].pop(key, None)
                if key in self._calls.donated and array is not None:
                    self._actions.free(array)  # the caller still has it, so that forgetting it is not enough
        for label, call in self._calls.calls.items():
            if label.stage not in stages:
                continue
            self._kept[label.stage].update(
                zip((a.total for a in call.sums), self._totals.pop(label, []), strict=True) if call.sums else ()
            )
            for a in call.program.accumulations:
                if isinstance(a.state, Split):
                    pieces = [piece for _, piece in sorted(self._pieces.pop(a.total).items())]
                    self._kept[label.stage][a.total] = self._actions.merge(a.total, label, pieces)
                for target in sorted(self._staged.readers.get(a.total, frozenset()) - {label.stage}):
                    shared = self._actions.shared(self._kept[label.stage][a.total], a.total, label.stage, target)
                    self._kept[target][a.total] = self._actions.send(shared, a.total, label.stage, target)


def possible_overlap(staged: StagedStep) -> Overlap:
    """Returns how a step of gradients of one step ago can overlap with the next one."""
    early = {key for label, p in staged.programs.items() if label.kind != "finish" for key in p.reads}
    if any(staged.inputs[position] in early for position in _late(staged)):
        return "none"
    for label, program in staged.programs.items():
        makers = [staged.makers[key] for key in program.reads if key in staged.makers]
        if label.kind == "finish" and any(m.kind != "begin" and m.stage != label.stage for m in makers):
            return "late_ends"
    return "own_ends"


def chosen_overlap(
    staged: StagedStep,
    sharding: Callable[[int, Key], NamedSharding],
    free_bytes: Sequence[float],
    price: Callable[[Overlap], PipelineStep],
) -> Overlap:
    """Returns how a step overlaps with the next one: as it can, if that fits the memory and is faster.

    Args:
      free_bytes: `[S]`, of each device of a stage.
    """
    overlap = possible_overlap(staged)
    needed = (overlap_bytes(staged, stage, overlap, sharding) for stage in range(staged.num_stages))
    fits = all(num_bytes <= free for num_bytes, free in zip(needed, free_bytes, strict=True))
    return overlap if fits and price(overlap).step_s < price("none").step_s else "none"


def overlap_bytes(
    staged: StagedStep,
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
    for key, home, result in zip(staged.inputs, staged.homes, staged.replaced_by, strict=True):
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
    steps: Iterable[Sequence[Any]],
) -> Iterator[list[Any]]:
    """Runs steps that overlap, and yields the flat results of each when the next one has been started.

    Args:
      steps: the flat arguments of each; those that a result replaces are read of the first step only.
    """
    operations, before = _Operations(calls.staged, overlap), None
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

    def __init__(self, staged: StagedStep, overlap: Overlap):
        self._staged, self._overlap, self._replaced_by = staged, overlap, staged.replaced_by
        self._of_first, self._of_others = overlapped_operations(staged.num_stages, staged.num_microbatches)
        self._late = _late(staged)
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
            for p, (array, result) in enumerate(zip(arrays, self._replaced_by, strict=True))
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
            result = self._replaced_by[position]
            assert run is not None
            assert result is not None
            if self._staged.makers[self._staged.outputs[result]].stage in stages:
                run.enter(position, before.result(result))


def _late(staged: StagedStep) -> list[int]:
    """Returns the positions of flat arguments that the step before makes with its sums."""
    late = []
    for position, result in enumerate(staged.replaced_by):
        key = None if result is None else staged.outputs[result]
        if key is None or isinstance(key, core.Literal) or key in staged.inputs:
            continue
        if staged.makers[key].kind != "begin":
            late.append(position)
    return late
