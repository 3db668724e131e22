"""Runs the programs of a staged step on the sub-meshes of its stages, in the order of a schedule.

One Python thread dispatches all programs; devices run them as soon as what they read is there. With many processes
each dispatches the programs of the stages that it owns devices of. All go through the schedule in the same order, so
that they meet in the copies between them.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cost.pipeline_schedules import WEIGHTS, ScheduleGraph
from cost.pipeline_steps import Overlap
from diffshard.pipelines.copies import Copier, CopyCount
from diffshard.pipelines.stage_calls import (
    FunctionOf,
    ShardingOf,
    StageCall,
    StageCalls,
    is_alike,
    program_as_traced,
)
from diffshard.pipelines.stage_run import StageRun, run_overlapped
from search_spaces.pipelines.stage_labels import Key, Label
from search_spaces.pipelines.stage_programs import StagedStep


class StageError(RuntimeError):
    """A program or a copy of a pipeline stage failed; the message names the stage and its devices.

    Attributes:
      stage: from 0.
    """

    def __init__(self, stage: int, message: str):
        super().__init__(message)
        self.stage = stage


class StagedExecution:
    """A staged step that runs on sub-meshes.

    With many processes all of them make it and call it in the same way; an array of a stage whose devices belong to
    another process has no data there.

    Args:
      meshes: `[S]`, the sub-mesh of each stage: the same one for stages that the schedule has on one device; no device
        is in two others.
      sharding_of: how each stage stores its arguments, sums, and what its programs leave.
      donate: positions of flat arguments that the caller does not need after a step, so that results take their memory.

    Attributes:
      calls: the jitted programs.
      graph: the schedule.

    Raises:
      ValueError: the meshes or the schedule do not fit the step.
    """

    def __init__(
        self,
        staged: StagedStep,
        meshes: Sequence[Mesh],
        graph: ScheduleGraph,
        sharding_of: ShardingOf,
        *,
        function_of: FunctionOf = program_as_traced,
        donate: Collection[int] = (),
    ):
        check_execution(staged, meshes, graph, donate)
        self.calls, self.graph = StageCalls(staged, meshes, sharding_of, function_of, donate), graph
        self._actions = _Dispatch(self.calls)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs a step.

        Args:
          arrays: the flat arguments; each is copied to its stages unless it is there.

        Returns:
          The flat results, each on the sub-mesh of the stage that made it. They may still be computed.

        Raises:
          StageError: a program does not compile or cannot be started. What fails later, `wait` tells.
        """
        self._actions.restart()
        return self._arrays(StageRun(self.calls, self._actions, arrays).step(self.graph))

    def steps(self, overlap: Overlap, steps: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        """Runs many steps, and yields the flat results of each when the next one has been started.

        Args:
          overlap: how each step overlaps with the next one; see `run_overlapped`.
          steps: the flat arguments of each; those that a result replaces are read of the first step only.

        Raises:
          StageError: as a call.
        """
        if overlap != "none":
            for results in run_overlapped(self.calls, self._actions, overlap, self._counted(steps)):
                yield self._arrays(results)
            return
        results = None
        for arrays in steps:
            given = zip(arrays, self.calls.staged.replaced_by, strict=True)
            old = results
            results = self([x if old is None or result is None else old[result] for x, result in given])
            yield results

    def _counted(self, steps: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        for arrays in steps:
            self._actions.restart()
            yield arrays

    def _arrays(self, results: Sequence[Any]) -> list[Any]:
        return [
            self._actions.without_data(key) if array is None else jnp.asarray(array)
            for key, array in zip(self.calls.staged.outputs, results, strict=True)
        ]

    @property
    def copied(self) -> CopyCount:
        """The copies of the last step."""
        return self._actions.copier.count

    def place(self, position: int) -> NamedSharding:
        """Returns the sharding in which the flat argument at a position is kept."""
        return self.calls.sharding(self.calls.staged.homes[position], self.calls.staged.inputs[position])

    def wait(self) -> None:
        """Waits until the programs of the last step that this process started have run.

        Raises:
          StageError: one of them failed; names the first one, in the order in which they were started.
        """
        self._actions.wait()


class _Dispatch:
    """Starts the programs of the stages that this process owns devices of, and copies arrays between stages."""

    def __init__(self, calls: StageCalls):
        self._calls, self.copier = calls, Copier()
        process = jax.process_index()
        self._is_own = [any(d.process_index == process for d in mesh.devices.flat) for mesh in calls.meshes]
        self._stage_of = {frozenset(mesh.devices.flat): stage for stage, mesh in reversed([*enumerate(calls.meshes)])}
        self._devices = [_devices(mesh) for mesh in calls.meshes]
        self._numbers: dict[tuple[int, int], Any] = {}
        self._resharding: dict[NamedSharding, Any] = {}
        self._done: list[tuple[int, str, Any]] = []

    def restart(self) -> None:
        self.copier.restart()
        self._done.clear()

    def wait(self) -> None:
        for stage, what, done in self._done:
            with self._errors(stage, what):
                done.block_until_ready()

    # What a run does with arrays.

    def enter(self, array: Any, key: Key, stage: int) -> Any:
        sharding = self._calls.sharding(stage, key)
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        source = self._stage_of.get(frozenset(array.sharding.device_set)) if isinstance(array, jax.Array) else None
        with self._errors(stage, "the copy of an argument"):
            if source is None:
                return self.copier.from_host(array, sharding) if self._is_own[stage] else None
            if self._calls.meshes[source] != self._calls.meshes[stage]:
                array = self.send(self.shared(array, key, source, stage), key, source, stage)
            return self._in_form(array, stage, sharding)

    def zeros(self, call: StageCall) -> list[Any]:
        stage = call.program.label.stage
        with self._errors(stage, "the start of its sums"):
            return call.zeros() if self._is_own[stage] else [None] * len(call.sums)

    def run(
        self, call: StageCall, microbatch: int | None, totals: list[Any], given_up: list[Any], reads: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        label = call.program.label
        if not self._is_own[label.stage]:
            return [None] * len(call.sums), [None] * len(call.leaves)
        what = _name(label, microbatch)
        with self._errors(label.stage, what):
            totals, leaves, done = call.function(totals, given_up, reads)
        self._done.append((label.stage, what, done))
        return totals, leaves

    def send(self, array: Any, key: Key, source: int, target: int) -> Any:
        if not (self._is_own[source] or self._is_own[target]):
            return None
        what = f"a copy from stage {source} on {self._devices[source]}"
        with self._errors(target, what):
            shardings = self._calls.shared(key, source, target)
            copied, done = self.copier.copy(array, self._calls.staged.avals[key], *shardings)
        if done is not None:
            self._done.append((target, what, done))
        return copied

    def shared(self, array: Any, key: Key, source: int, target: int) -> Any:
        return self._in_form(array, source, self._calls.shared(key, source, target)[0])

    def number(self, stage: int, microbatch: int) -> Any:
        if (stage, microbatch) not in self._numbers and self._is_own[stage]:
            sharding = self._calls.number_sharding(stage)
            self._numbers[stage, microbatch] = Copier().from_host(np.int32(microbatch), sharding)
        return self._numbers.get((stage, microbatch))

    def free(self, array: Any) -> None:
        array.delete()

    def merge(self, key: Key, label: Label, pieces: list[Any]) -> Any:
        with self._errors(label.stage, "what puts results of micro-batches together"):
            return self._calls.merges[key](pieces) if self._is_own[label.stage] else None

    def without_data(self, key: Key) -> jax.Array:
        """Returns a result of a stage of other processes: it has a shape and a sharding, but no data here."""
        aval = self._calls.staged.avals[key]
        sharding = self._calls.sharding(self._calls.staged.stage_of(key), key)
        return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)

    def _in_form(self, array: Any, stage: int, sharding: NamedSharding) -> Any:
        """Returns an array of a stage in another sharding on the same devices, by a program that does not wait."""
        if not self._is_own[stage]:
            return None
        if is_alike(array.sharding, sharding, array.ndim):
            return array
        if sharding not in self._resharding:
            self._resharding[sharding] = jax.jit(lambda array: array, out_shardings=sharding)
        with self._errors(stage, "a change of sharding"):
            return self._resharding[sharding](array)

    @contextmanager
    def _errors(self, stage: int, what: str) -> Iterator[None]:
        try:
            yield
        except StageError:
            raise
        except Exception as error:
            text = f"Stage {stage} on {self._devices[stage]}: {what} failed: {error}"
            if re.search(r"dot_product_attention\w*' not found for platform", str(error)):
                text += ". cuDNN's attention can be planned anywhere, and runs on GPUs only."
            raise StageError(stage, text) from error


def _name(label: Label, microbatch: int | None) -> str:
    if microbatch is not None:
        return f"the {label.kind} program of micro-batch {microbatch}"
    return f"the program that {label.kind}s the step" if label.kind == "begin" else "a program that finishes the step"


def _devices(mesh: Mesh) -> str:
    """Returns the devices of a mesh in words, with their processes where there are many."""
    devices = list(mesh.devices.flat)
    names = ", ".join(str(device) for device in devices[:8]) + (", ..." if len(devices) > 8 else "")
    if jax.process_count() == 1:
        return names
    processes = sorted({device.process_index for device in devices})
    return f"{names} of process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def check_execution(staged: StagedStep, meshes: Sequence[Mesh], graph: ScheduleGraph, donate: Collection[int]) -> None:
    """Checks that a staged step can run on sub-meshes in the order of a schedule; arguments as of `StagedExecution`.

    Raises:
      ValueError: the meshes or the schedule do not fit the step, or collectives would lose their order.
    """
    if len(meshes) != staged.num_stages:
        raise ValueError(f"`meshes` must have one mesh for each of the {staged.num_stages} stages, not {len(meshes)}.")
    sizes = (graph.num_stages, graph.num_microbatches)
    if sizes != (staged.num_stages, staged.num_microbatches):
        raise ValueError(
            f"`graph` must be for {staged.num_stages} stages and {staged.num_microbatches} micro-batches, not for "
            f"{sizes[0]} and {sizes[1]}."
        )
    stage_of: dict[Any, int] = {}
    for stage, mesh in enumerate(meshes):
        for device in mesh.devices.flat:
            other = stage_of.setdefault(device, stage)
            if mesh != meshes[other] or graph.device[stage] != graph.device[other]:
                raise ValueError(
                    f"`meshes` must have no device in common, but {device} is in those of stages {other} and {stage}."
                )
    if (graph.kind == WEIGHTS).any() != staged.has_split_backward:
        raise ValueError(
            "`graph` must split the backward pass, as 'zb-h1' does, where the programs of `staged` do, and only there."
        )
    _check_processes(meshes)
    wrong = [position for position in donate if not 0 <= position < len(staged.inputs)]
    if wrong:
        raise ValueError(f"`donate` must have positions of the {len(staged.inputs)} flat arguments, not {wrong[0]}.")


def _check_processes(meshes: Sequence[Mesh]) -> None:
    """Checks that collectives between processes keep their order, which XLA for CPUs ensures among several devices."""
    devices = [device for mesh in meshes for device in mesh.devices.flat]
    if len({device.process_index for device in devices}) == 1 or devices[0].platform != "cpu":
        return
    for stage, mesh in enumerate(meshes):
        processes = [device.process_index for device in mesh.devices.flat]
        alone = [process for process in processes if processes.count(process) == 1]
        if alone:
            raise ValueError(
                f"Stage {stage} has one CPU device of process {alone[0]}, but a stage needs two or more of each of its "
                "processes where there are several: XLA for CPUs would run the copies of a single one out of order. "
                'Give each process more devices (`jax.config.update("jax_num_cpu_devices", 4)`) or fewer stages '
                "(`Pipeline.max_stages`)."
            )
