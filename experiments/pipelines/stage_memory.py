"""How much memory the stages of a pipeline take: XLA's bytes of each program, and what lives between programs.

A step is run without data, with the same code that runs it with data, so that arrays live exactly as long. Before each
program the arrays that its stage has at that time are added up; while the program runs there are also its results and
what XLA needs in between. Programs are compiled for the devices of the sub-meshes, which need not be here: `gpu_mesh`
of `diffshard.checks.targets` describes GPUs for which XLA compiles on any machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from cost.pipeline_schedules import ScheduleGraph
from diffshard.pipelines.copies import bytes_each
from diffshard.pipelines.stage_calls import Leaving, StageCall, StageCalls
from diffshard.pipelines.stage_run import StageRun
from search_spaces.pipelines.stage_labels import Key, Label

_COUNTED = ("step_bytes", "sum_bytes", "microbatch_bytes", "peak_bytes", "host_bytes")


class ProgramMemory(NamedTuple):
    """XLA's bytes of a compiled program, on each device.

    Attributes:
      alias_bytes: of outputs that take the memory of arguments.
      read_back_bytes: of offloaded residuals that it copies from the host, where `temporary_bytes` is without them:
        XLA for CPUs, and for GPUs that are only described, takes memory of the host for memory of the device.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    read_back_bytes: int = 0

    @property
    def added_bytes(self) -> int:
        """The bytes that it takes besides the arrays that are there before it."""
        return self.output_bytes - self.alias_bytes + self.temporary_bytes + self.read_back_bytes


@dataclass(frozen=True)
class StageMemory:
    """The memory of a stage's devices while it runs, in bytes on each of them, with what their other stages keep.

    Attributes:
      programs: XLA's bytes of each program of the stage, by label.
      step_bytes: the most of what lives for the whole step: arguments, and what begins and finishes it.
      microbatch_bytes: the most of what micro-batches in flight have at one time.
      peak_bytes: the most at one time, while a program runs.
      host_bytes: the most of offloaded residuals at one time, in pinned memory of the host.
    """

    programs: dict[Label, ProgramMemory]
    step_bytes: int
    sum_bytes: int
    microbatch_bytes: int
    peak_bytes: int
    peak: Label
    host_bytes: int = 0


def stage_memory(calls: StageCalls, graph: ScheduleGraph) -> list[StageMemory]:
    """Compiles all programs of a pipeline, and returns the memory of each stage.

    Args:
      calls: the programs on sub-meshes, of devices that are here or are only described.

    Raises:
      RuntimeError: a program does not compile; names its stage.
    """
    programs = {label: _compiled_memory(calls, call) for label, call in calls.calls.items()}
    sizes = _Sizes(calls, programs)
    inputs = [_Array(calls.staged.avals[key]) for key in calls.staged.inputs]
    sizes.step = StageRun(calls, sizes, inputs)
    sizes.step.step(graph)
    return [
        StageMemory({label: m for label, m in programs.items() if label.stage == stage}, **sizes.most[stage])
        for stage in range(calls.staged.num_stages)
    ]


def compiled_program(calls: StageCalls, call: StageCall) -> Any:
    """Returns a program of a stage as XLA compiles it, with its `as_text()` and `memory_analysis()`."""
    stage = call.program.label.stage

    def shapes(keys: Sequence[Key], shardings: Sequence[NamedSharding]) -> list[jax.ShapeDtypeStruct]:
        avals = [calls.staged.avals[key] for key in keys]
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(avals, shardings, strict=True)]

    totals = [a.total for a in call.sums]
    sums = shapes(totals, [calls.sharding(stage, key) for key in totals])
    given_up, reads = (
        shapes(keys, [calls.read_sharding(stage, key) for key in keys]) for keys in (call.given_up, call.reads)
    )
    try:
        return call.function.lower(sums, given_up, reads).compile()
    except Exception as error:
        raise RuntimeError(
            f"The {call.program.label.kind} program of stage {stage} does not compile: {error}"
        ) from error


def _compiled_memory(calls: StageCalls, call: StageCall) -> ProgramMemory:
    stats, stage = compiled_program(calls, call).memory_analysis(), call.program.label.stage
    from_host = [key for key in call.reads if calls.is_offloaded(stage, key)]
    sizes = ((calls.staged.avals[key], calls.read_sharding(stage, key)) for key in from_host)
    read_back_bytes = sum(bytes_each(aval.shape, aval.dtype, sharding) for aval, sharding in sizes)
    return ProgramMemory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        0 if stats.host_argument_size_in_bytes else read_back_bytes,
    )


class _Array(NamedTuple):
    """An array without data: its shape and dtype, and its bytes on each device, or on the host for each device."""

    aval: Any
    num_bytes: int = 0
    host_bytes: int = 0


class _Sizes:
    """Adds up what stages have when a program starts; makes arrays without data."""

    step: StageRun

    def __init__(self, calls: StageCalls, programs: dict[Label, ProgramMemory]):
        self._calls, self._programs = calls, programs
        self._together = [[s for s, other in enumerate(calls.meshes) if other == mesh] for mesh in calls.meshes]
        zero: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
        self.most = [{**zero, "peak": Label("begin", stage)} for stage in range(calls.staged.num_stages)]

    def _array(self, key: Key, sharding: NamedSharding) -> _Array:
        aval = self._calls.staged.avals[key]
        num_bytes = bytes_each(aval.shape, aval.dtype, sharding)
        return _Array(aval, num_bytes)

    def enter(self, array: Any, key: Key, stage: int) -> _Array:
        return self._array(key, self._calls.sharding(stage, key))

    def zeros(self, call: StageCall) -> list[_Array]:
        stage = call.program.label.stage
        return [self._array(a.total, self._calls.sharding(stage, a.total)) for a in call.sums]

    def run(
        self, call: StageCall, microbatch: int | None, totals: list[Any], given_up: list[Any], reads: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        label = call.program.label
        now, on_host = {"step": 0, "sum": 0, "micro-batch": 0}, 0
        for stage in self._together[label.stage]:
            for kind, array in self.step.arrays_of(stage):
                now[kind] += array.num_bytes
                on_host += array.host_bytes
        most = self.most[label.stage]
        most["host_bytes"] = max(most["host_bytes"], on_host)
        for name, kind in (("step_bytes", "step"), ("sum_bytes", "sum"), ("microbatch_bytes", "micro-batch")):
            most[name] = max(most[name], now[kind])
        at_once = sum(now.values()) + self._programs[label].added_bytes
        if at_once > most["peak_bytes"]:
            most["peak_bytes"], most["peak"] = at_once, label
        return totals, [self._left(leaving, label.stage) for leaving in call.leaves]

    def _left(self, leaving: Leaving, stage: int) -> _Array:
        array = self._array(leaving.key, leaving.sharding)
        if leaving.is_kept and self._calls.is_offloaded(stage, leaving.key):
            return _Array(array.aval, 0, array.num_bytes)
        return array

    def send(self, array: Any, key: Key, source: int, target: int) -> _Array:
        return self._array(key, self._calls.shared(key, source, target)[1])

    def shared(self, array: Any, key: Key, source: int, target: int) -> _Array:
        return self._array(key, self._calls.shared(key, source, target)[0])

    def number(self, stage: int, microbatch: int) -> None:
        return None

    def free(self, array: Any) -> None:
        return None

    def merge(self, key: Key, label: Label, pieces: list[Any]) -> _Array:
        return self._array(key, self._calls.sharding(label.stage, key))
