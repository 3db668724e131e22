"""The jitted programs of a staged step: how arrays enter and leave them, and which memory their results may take.

What another stage reads leaves a program in equal shards, of as many parts as some first axes of both meshes have. So a
copy between stages moves whole shards, and is dispatched without waiting for them. A result takes the memory of an
array of its own size that the program is the last one to read.

Two functions say how a stage works: `ShardingOf` how it stores an array, and `FunctionOf` what runs its program.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diffshard.host_memory import HOST_MEMORY
from diffshard.pipelines.copies import transfer_shardings
from search_spaces.pipelines.batch_states import Split
from search_spaces.pipelines.microbatches import combined_with, merged, neutral
from search_spaces.pipelines.stage_labels import MICROBATCH_KINDS, NUMBER, Accumulation, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram

ShardingOf = Callable[[int, Key], NamedSharding | None]
"""`sharding_of(stage, key)`: how a stage stores an array, on its sub-mesh; None replicates it."""
FunctionOf = Callable[[StageProgram], Callable[..., Sequence[Any]]]
"""`function_of(program)`: a traceable function of the arrays `program.reads` that returns those of `program.makes`."""


def program_as_traced(program: StageProgram) -> Callable[..., Sequence[Any]]:
    """Returns the function of a program as it was traced, so that XLA chooses the shardings inside."""
    return core.jaxpr_as_fun(program.program)


class Leaving(NamedTuple):
    """An array that a program leaves.

    Attributes:
      key: of the array.
      sharding: on the stage's sub-mesh.
      is_kept: whether the stage keeps it in this form.
      targets: stages that it is copied to, from this form.
    """

    key: Key
    sharding: NamedSharding
    is_kept: bool
    targets: tuple[int, ...]


@dataclass(frozen=True)
class StageCall:
    """A jitted program of a stage.

    Attributes:
      program: what it computes.
      sums: accumulations that it adds its parts to.
      given_up: keys that it reads for the last time, whose memory its results take.
      reads: the other keys that it reads.
      forgotten: keys that its stage need not keep after it.
      leaves: the arrays that it leaves.
      function: `(totals, given_up, reads) -> (totals, leaves, done)`; `done` is a number that is there when it has run.
      zeros: makes the totals to begin with; None without sums.
    """

    program: StageProgram
    sums: tuple[Accumulation, ...]
    given_up: tuple[Key, ...]
    reads: tuple[Key, ...]
    forgotten: tuple[Key, ...]
    leaves: tuple[Leaving, ...]
    function: Any
    zeros: Any


class StageCalls:
    """The jitted programs of a staged step on given sub-meshes. Nothing is compiled before it is called or lowered.

    Args:
      meshes: `[S]`, the sub-mesh of each stage.
      sharding_of: how a stage stores arguments, sums and what its programs leave.
      donate: positions of flat arguments whose memory results may take.

    Attributes:
      calls: by label, in an order in which they could run one after the other.
      merges: for the keys of results that micro-batches make in pieces, what puts the pieces together.
      read_until_finish: `[S]`, the keys of the whole step that a stage need not keep after its last micro-batch.
      donated: the keys of the arguments whose memory results may take.
    """

    def __init__(
        self,
        staged: StagedStep,
        meshes: Sequence[Mesh],
        sharding_of: ShardingOf,
        function_of: FunctionOf = program_as_traced,
        donate: Collection[int] = (),
    ):
        self.staged, self.meshes, self._sharding_of, self._function_of = staged, list(meshes), sharding_of, function_of
        self._shared: dict[tuple[Key, int, int], tuple[NamedSharding, NamedSharding]] = {}
        self._totals = {a.total for program in staged.programs.values() for a in program.accumulations}
        self._results = {key for key in staged.outputs if not isinstance(key, core.Literal)}
        whole = {a.total for p in staged.programs.values() for a in p.accumulations if a.state == "whole"}
        self.donated = frozenset(staged.inputs[position] for position in donate) - self._results
        self._own = ({*staged.makers} - {*staged.inputs} - whole - self._results) | self.donated
        self.calls = {label: self._call(program) for label, program in staged.programs.items()}
        self.read_until_finish = [self._read_until_finish(stage) for stage in range(staged.num_stages)]
        self.merges = {
            a.total: jax.jit(_merging(a), out_shardings=self.sharding(label.stage, a.total))
            for label, program in staged.programs.items()
            for a in program.accumulations
            if isinstance(a.state, Split)
        }

    def sharding(self, stage: int, key: Key) -> NamedSharding:
        """Returns how a stage stores an array that it makes or keeps; replicated where nothing is said."""
        chosen = self._sharding_of(stage, key)
        return NamedSharding(self.meshes[stage], PartitionSpec()) if chosen is None else chosen

    def shared(self, key: Key, source: int, target: int) -> tuple[NamedSharding, NamedSharding]:
        """Returns how an array leaves a stage for another one, and how it arrives there: in equal shards."""
        if (key, source, target) not in self._shared:
            meshes = self.meshes[source], self.meshes[target]
            self._shared[key, source, target] = transfer_shardings(self.staged.avals[key].shape, *meshes)
        return self._shared[key, source, target]

    def stored(self, stage: int, key: Key) -> NamedSharding:
        """Returns how an array that a stage makes waits for the programs that read it: offloaded ones on the host."""
        sharding = self.sharding(stage, key)
        return sharding.with_memory_kind(HOST_MEMORY) if self.is_offloaded(stage, key) else sharding

    def is_offloaded(self, stage: int, key: Key) -> bool:
        """Returns whether a stage leaves an array on the host for its own backward program."""
        return key in self.staged.offloaded and self.staged.makers[key].stage == stage

    def read_sharding(self, stage: int, key: Key) -> NamedSharding:
        """Returns the sharding in which a program of a stage reads an array."""
        if key == NUMBER:
            return self.number_sharding(stage)
        maker = self.staged.makers.get(key)
        if maker is None or maker.kind == "begin" or maker.stage == stage:
            return self.stored(stage, key)
        return self.shared(key, maker.stage, stage)[1]

    def number_sharding(self, stage: int) -> NamedSharding:
        """Returns how a stage stores the number of a micro-batch."""
        return NamedSharding(self.meshes[stage], PartitionSpec())

    def is_local(self, key: Key) -> bool:
        """Returns whether an array belongs to a micro-batch, and not to the whole step."""
        maker = self.staged.makers.get(key)
        return maker is not None and maker.kind in MICROBATCH_KINDS and key not in self._totals

    # One program.

    def _call(self, program: StageProgram) -> StageCall:
        stage = program.label.stage
        sums = tuple(a for a in program.accumulations if a.state in ("sum", "max", "min"))
        leaves = self._leaves(program, {a.part for a in sums})
        forgotten = self._read_last(program)
        arguments = ()
        if program.label.kind == "begin":  # the step before may still return them; donated ones are freed at the end
            arguments = self.staged.inputs
            forgotten = tuple(key for key in forgotten if key not in self.donated or self._is_random_key(key))
        given_up = self._given_up(stage, [key for key in forgotten if key not in arguments], leaves)
        reads = tuple(key for key in program.reads if key not in given_up)
        from_host = [key for key in reads if self.is_offloaded(stage, key)]
        call = _traceable(program, self._function_of(program), sums, given_up, reads, leaves, from_host)
        totals = [self.sharding(stage, a.total) for a in sums]
        shardings = totals, [leaving.sharding for leaving in leaves], self.number_sharding(stage)
        function = jax.jit(call, out_shardings=shardings, donate_argnums=(0, 1))
        zeros = jax.jit(lambda: [self._neutral(a) for a in sums], out_shardings=totals) if sums else None
        return StageCall(program, sums, given_up, reads, forgotten, leaves, function, zeros)

    def _neutral(self, a: Accumulation) -> Any:
        aval = self.staged.avals[a.total]
        return neutral(a.state, aval.shape, aval.dtype)

    def _leaves(self, program: StageProgram, added: Collection[Key]) -> tuple[Leaving, ...]:
        stage, leaves = program.label.stage, []
        pieces = self._pieces(stage)
        for key in program.makes:
            readers = self.staged.readers.get(key, frozenset())
            is_needed = stage in readers or key in self._results or key in pieces
            targets = sorted(readers - {stage}) if self._sends(program.label, key) else []
            forms = [Leaving(key, self.stored(stage, key), True, ())] if is_needed else []
            for target in targets:
                sharding = self.shared(key, stage, target)[0]
                forms = _with_target(forms, key, sharding, target, len(self.staged.avals[key].shape))
            if not forms and key not in added:
                forms = [Leaving(key, self.sharding(stage, key), True, ())]
            leaves += forms
        return tuple(leaves)

    def _sends(self, label: Label, key: Key) -> bool:
        """Returns whether a program sends an array that it makes to the other stages that read it."""
        return label.kind != "begin" and self.staged.makers.get(key) == label

    def _pieces(self, stage: int) -> set[Key]:
        """Returns the keys of what a stage keeps of each micro-batch until the end of the step."""
        own = (program for label, program in self.staged.programs.items() if label.stage == stage)
        return {a.part for p in own for a in p.accumulations if a.state not in ("sum", "max", "min")}

    def _read_last(self, program: StageProgram) -> tuple[Key, ...]:
        """Returns the keys that no program of the stage reads after this one."""
        stage, kind = program.label.stage, program.label.kind
        later = self._later_programs(program.label)
        kept = {key for p in later for key in p.reads} | {a.part for p in later for a in p.accumulations}
        kept |= self._results | self._pieces(stage) | {NUMBER}
        if kind in MICROBATCH_KINDS:
            return tuple(key for key in program.reads if key not in kept and self.is_local(key))
        return tuple(key for key in program.reads if key not in kept and not self.is_local(key))

    def _is_random_key(self, key: Key) -> bool:
        """Returns whether an array is made of random keys, which are never given up."""
        return jnp.issubdtype(self.staged.avals[key].dtype, jax.dtypes.extended)

    def _read_until_finish(self, stage: int) -> tuple[Key, ...]:
        programs = [program for label, program in self.staged.programs.items() if label.stage == stage]
        finished = {key for p in programs if p.label.kind == "finish" for key in p.reads} | self._results
        read = dict.fromkeys(key for p in programs for key in p.reads if not self.is_local(key) and key != NUMBER)
        return tuple(key for key in read if key not in finished)

    def _later_programs(self, label: Label) -> list[StageProgram]:
        labels = [other for other in self.staged.programs if other.stage == label.stage]
        return [self.staged.programs[other] for other in labels[labels.index(label) + 1 :]]

    def _given_up(self, stage: int, forgotten: Iterable[Key], leaves: Iterable[Leaving]) -> tuple[Key, ...]:
        """Returns those of the last arrays that are of the size of a result each; arguments come first."""
        free, found = [(self.staged.avals[leaving.key], leaving.sharding) for leaving in leaves], []
        for key in sorted(forgotten, key=lambda key: key not in self.staged.inputs):
            aval, sharding = self.staged.avals[key], self.read_sharding(stage, key)
            if key not in self._own or key in self.staged.offloaded or self._is_random_key(key):
                continue
            for place, (other, kept) in enumerate(free):
                if (aval.shape, aval.dtype) == (other.shape, other.dtype) and is_alike(sharding, kept, aval.ndim):
                    found.append(key)
                    del free[place]
                    break
        return tuple(found)


def is_alike(sharding: Any, other: Any, ndim: int) -> bool:
    """Returns whether two shardings put the same parts of an array on the same devices."""
    return sharding is other or sharding == other or sharding.is_equivalent_to(other, ndim)


def _with_target(forms: Sequence[Leaving], key: Key, sharding: NamedSharding, target: int, ndim: int) -> list[Leaving]:
    """Adds a target to the form in which an array leaves, or a form for it."""
    for number, form in enumerate(forms):
        if is_alike(form.sharding, sharding, ndim):
            return [*forms[:number], form._replace(targets=(*form.targets, target)), *forms[number + 1 :]]
    return [*forms, Leaving(key, sharding, False, (target,))]


def _merging(a: Accumulation) -> Callable[[list[Any]], Any]:
    return lambda pieces: merged(jnp.stack(pieces), a.state)


def _traceable(
    program: StageProgram,
    run: Callable[..., Sequence[Any]],
    sums: Sequence[Accumulation],
    given_up: Sequence[Key],
    reads: Sequence[Key],
    leaves: Sequence[Leaving],
    from_host: Collection[Key],
) -> Callable[..., Any]:
    def call(totals: list[Any], last: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any], Any]:
        env = {**dict(zip(given_up, last, strict=True)), **dict(zip(reads, arrays, strict=True))}
        env.update({key: jax.device_put(env[key], jax.memory.Space.Device) for key in from_host})
        made = run(*(env[key] for key in program.reads))
        env.update(zip(program.makes, made, strict=True))
        totals = [combined_with(a.state, total, env[a.part]) for a, total in zip(sums, totals, strict=True)]
        return totals, [env[leaving.key] for leaving in leaves], jnp.zeros((), jnp.int32)

    call.__name__ = f"stage_{program.label.stage}_{program.label.kind}"
    return call
