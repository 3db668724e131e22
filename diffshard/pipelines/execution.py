"""Runs the programs of a staged step on the sub-meshes of its stages, in the order of a schedule.

One Python thread dispatches all programs; devices run them as soon as what they read is there. What goes from stage to
stage leaves a program in equal shards of as many parts as both sub-meshes have, so that a copy is dispatched at once
and waits for nothing on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from cost.pipeline_schedules import BACKWARD, FORWARD, ScheduleGraph
from search_spaces.pipelines.batch_states import Split
from search_spaces.pipelines.microbatches import combined_with, merged, neutral
from search_spaces.pipelines.stage_labels import NUMBER, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram

ShardingOf = Callable[[int, Key], Sharding | None]
"""`sharding(stage, key)`: how a stage stores an array; None replicates it."""


@dataclass
class CopyCount:
    """How many copies between stages a step made, and how many of them had to wait on the host.

    Attributes:
      copies: of arrays.
      bytes: sent in all.
    """

    copies: int = 0
    bytes: int = 0


class StagedExecution:
    """A staged step that runs on sub-meshes.

    Args:
      staged: the programs.
      meshes: `[S]`, the sub-mesh of each stage; no device is in two of them.
      graph: the schedule.
      sharding_of: how each stage stores its arguments, sums, and what its programs leave.
    """

    def __init__(self, staged: StagedStep, meshes: Sequence[Mesh], graph: ScheduleGraph, sharding_of: ShardingOf):
        self.staged, self.meshes, self.graph, self.sharding_of = staged, list(meshes), graph, sharding_of
        self.copied = CopyCount()
        self._programs = {label: self._compiled(program) for label, program in staged.programs.items()}
        self._zeros = {
            label: jax.jit(
                lambda program=program: [self._neutral(a.total, a.state) for a in _summed(program)],
                out_shardings=[self.sharding(label.stage, a.total) for a in _summed(program)],
            )
            for label, program in staged.programs.items()
            if label.kind == "backward"
        }
        self._numbers = [
            [jax.device_put(np.int32(m), NamedSharding(mesh, PartitionSpec())) for m in range(staged.num_microbatches)]
            for mesh in self.meshes
        ]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs a step.

        Args:
          arrays: the flat arguments; each is copied to its stage unless it is there.

        Returns:
          The flat results, each on the sub-mesh of the stage that made it.
        """
        run = _Run(self, arrays)
        for label in self._labels("begin"):
            run.program(label, None)
        for kind, stage, microbatch in zip(
            self.graph.kind.tolist(), self.graph.stage.tolist(), self.graph.microbatch.tolist(), strict=True
        ):
            if kind in (FORWARD, BACKWARD):
                label = Label("forward" if kind == FORWARD else "backward", stage)
                run.program(label, microbatch)
                if kind == BACKWARD:
                    run.end_microbatch(stage, microbatch)
        run.finish_sums()
        for label in self._labels("finish"):
            run.program(label, None)
        return run.results()

    def place(self, number: int) -> NamedSharding:
        """Returns the sharding in which argument `number` is kept."""
        key = self.staged.inputs[number]
        return self.sharding(self.staged.homes[number], key)

    def sharding(self, stage: int, key: Key) -> Any:
        """Returns how a stage stores an array that it receives or keeps; replicated where nothing is said."""
        chosen = self.sharding_of(stage, key)
        return NamedSharding(self.meshes[stage], PartitionSpec()) if chosen is None else chosen

    def shared_shardings(self, key: Key, source: int, target: int) -> tuple[NamedSharding, NamedSharding]:
        """Returns how an array leaves a stage for another one, and how it arrives there: in equal shards.

        Both have as many parts as divide both numbers of devices and the first dimension that they divide.
        """
        shape = self.staged.avals[key].shape
        counts = self.meshes[source].devices.size, self.meshes[target].devices.size
        parts, dim = max(((gcd(gcd(*counts), n), -d) for d, n in enumerate(shape)), default=(1, 0))
        spec = PartitionSpec(*([None] * -dim), "part") if parts > 1 else PartitionSpec()

        def shardings(mesh: Mesh) -> NamedSharding:
            return NamedSharding(Mesh(mesh.devices.reshape(parts, -1), ("part", "copy")), spec)

        return shardings(self.meshes[source]), shardings(self.meshes[target])

    def _labels(self, kind: str) -> list[Label]:
        return [label for label in self.staged.programs if label.kind == kind]

    def _neutral(self, total: Key, state: Any) -> Any:
        aval = self.staged.avals[total]
        return neutral(state, aval.shape, aval.dtype)

    def _compiled(self, program: StageProgram) -> Callable[..., Any]:
        run, stage = core.jaxpr_as_fun(program.program), program.label.stage
        sums = _summed(program)

        def call(totals: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            made = run(*arrays)
            env = {**dict(zip(program.reads, arrays, strict=True)), **dict(zip(program.makes, made, strict=True))}
            totals = [combined_with(a.state, t, env[a.part]) for a, t in zip(sums, totals, strict=True)]
            return totals, [env[key] for key in self._leaving(program)]

        out = [self._out_sharding(program, key) for key in self._leaving(program)]
        sums_out = [self.sharding(stage, a.total) for a in sums]
        return jax.jit(call, out_shardings=(sums_out, out), donate_argnums=(0,))

    def _leaving(self, program: StageProgram) -> list[Key]:
        """Returns the keys of what a program leaves: not of parts that it adds up itself."""
        added = {a.part for a in _summed(program)}
        results = {key for key in self.staged.outputs if not isinstance(key, core.Literal)}
        return [key for key in program.makes if key not in added or self.staged.readers.get(key) or key in results]

    def _out_sharding(self, program: StageProgram, key: Key) -> Any:
        """Returns the sharding in which a program leaves an array: as another stage reads it, or as its own does."""
        stage = program.label.stage
        others = self._targets(program, key)
        if not others or stage in self.staged.readers[key]:
            return self.sharding(stage, key)
        return self.shared_shardings(key, stage, others[0])[0]

    def _targets(self, program: StageProgram, key: Key) -> list[int]:
        """Returns the other stages that read what a program makes."""
        if self.staged.makers.get(key) != program.label or program.label.kind == "begin":
            return []
        return sorted(self.staged.readers.get(key, frozenset()) - {program.label.stage})


class _Run:
    """The arrays of one step while it runs."""

    def __init__(self, execution: StagedExecution, arrays: Sequence[Any]):
        self.execution, self.staged = execution, execution.staged
        self.kept: list[dict[Key, Any]] = [{} for _ in execution.meshes]  # by stage, of the whole step
        self.parts: dict[tuple[int, int], dict[Key, Any]] = {}  # by stage and micro-batch
        self.totals: dict[Label, list[Any]] = {}
        self.stacks: dict[Key, list[Any]] = {}
        self.given = dict(zip(self.staged.inputs, arrays, strict=True))
        for position, key in enumerate(self.staged.inputs):
            for stage in sorted(self.staged.readers.get(key, frozenset({self.staged.homes[position]}))):
                self.kept[stage][key] = self.copied(self.given[key], execution.sharding(stage, key))

    def copied(self, array: Any, sharding: Any) -> Any:
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        self.execution.copied.copies += 1
        return jax.device_put(array, sharding)

    def program(self, label: Label, microbatch: int | None) -> None:
        program = self.staged.programs.get(label)
        if program is None:
            return
        stage = label.stage
        local = self.kept[stage] if microbatch is None else self.parts.setdefault((stage, microbatch), {})
        reads = [self._read(stage, microbatch, key) for key in program.reads]
        if label.kind == "backward" and label not in self.totals:
            self.totals[label] = self.execution._zeros[label]()
        totals, leaving = self.execution._programs[label](self.totals.get(label, []), reads)
        if label.kind == "backward":
            self.totals[label] = totals
        for key, array in zip(self.execution._leaving(program), leaving, strict=True):
            local[key] = array
            for target in self.execution._targets(program, key):
                sent = self.execution.shared_shardings(key, stage, target)
                array = self.copied(array, sent[0])
                there = self.kept[target] if microbatch is None else self.parts.setdefault((target, microbatch), {})
                there[key] = self.copied(array, sent[1])
        for a in program.accumulations:
            if a not in _summed(program):
                part = local[a.part]
                if isinstance(a.state, Split):
                    self.stacks.setdefault(a.total, []).append((microbatch, part))
                else:
                    self.kept[stage][a.total] = part

    def _read(self, stage: int, microbatch: int | None, key: Key) -> Any:
        if key == NUMBER:
            assert microbatch is not None
            return self.execution._numbers[stage][microbatch]
        if microbatch is not None and key in self.parts[stage, microbatch]:
            return self.parts[stage, microbatch][key]
        return self.kept[stage][key]

    def end_microbatch(self, stage: int, microbatch: int) -> None:
        """Forgets the arrays of a micro-batch, so that their memory is free."""
        del self.parts[stage, microbatch]

    def finish_sums(self) -> None:
        """Puts what all micro-batches made where the programs that finish the step read it."""
        for label, totals in self.totals.items():
            for a, total in zip(_summed(self.staged.programs[label]), totals, strict=True):
                self.kept[label.stage][a.total] = total
        for label, program in self.staged.programs.items():
            for a in program.accumulations:
                if a.total in self.stacks:
                    parts = [part for _, part in sorted(self.stacks[a.total], key=lambda entry: entry[0])]
                    self.kept[label.stage][a.total] = jax.jit(lambda parts, a=a: merged(jnp.stack(parts), a.state))(
                        parts
                    )
                for target in sorted(self.staged.readers.get(a.total, frozenset()) - {label.stage}):
                    sent = self.execution.shared_shardings(a.total, label.stage, target)
                    self.kept[target][a.total] = self.copied(
                        self.copied(self.kept[label.stage][a.total], sent[0]), sent[1]
                    )

    def results(self) -> list[Any]:
        found = []
        for key in self.staged.outputs:
            if isinstance(key, core.Literal):
                found.append(jnp.asarray(key.val))
            elif key in self.given:
                home = self.staged.homes[self.staged.inputs.index(key)]
                found.append(self.kept[home][key])
            else:
                found.append(self.kept[self.staged.makers[key].stage][key])
        return found


def _summed(program: StageProgram) -> list[Any]:
    """Returns those of a program's accumulations that it adds up itself."""
    return [a for a in program.accumulations if a.state in ("sum", "max", "min")]
