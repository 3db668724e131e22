"""Joins replicas of a pipeline, which take different micro-batches of a step, into one step of more stages.

All replicas have the same cuts. Replica 0, the main one, keeps the state. The others read copies of the weights when a
step begins and only sum up their micro-batches. Programs of the main replica's stages then combine the sums of all
replicas, and finish the step. So what runs and sizes steps in stages does so for replicas too.

Letters for sizes: R replicas, S stages of each of them; stage s of replica r is stage r·S + s of the joined step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from search_spaces.pipelines.batch_states import Split
from search_spaces.pipelines.microbatches import combined_with, neutral
from search_spaces.pipelines.stage_labels import PROGRAM_KINDS, Accumulation, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram

COMBINE_PHASE = -1
"""The phase of the programs that combine the sums of all replicas, before all others that finish the step."""


def replica_key(replica: int, key: Key) -> Key:
    """Returns the name that an array of a replica has in the joined step."""
    return ("replica", replica, key)


def replica_part(staged: StagedStep) -> StagedStep:
    """Returns the part of a step that a replica runs which is not the main one: its micro-batches and their sums.

    It has no programs that finish the step, reads nothing that only these read, and has no results but the sums.
    """
    programs = {label: p for label, p in staged.programs.items() if label.kind in ("forward", "backward")}
    needed = {(label.stage, key) for label, program in programs.items() for key in program.reads}
    begins = {label: _pruned(p, {k for s, k in needed if s == label.stage}) for label, p in staged.programs.items()
              if label.kind == "begin"}  # fmt: skip
    programs = {**{label: program for label, program in begins.items() if program is not None}, **programs}
    return replace(staged, programs=programs, outputs=(), replaced_by=(None,) * len(staged.inputs))


def replicated_step(replicas: Sequence[StagedStep], microbatches: Sequence[int]) -> StagedStep:
    """Joins the replicas of a step into one step with a stage for each stage of each replica.

    Micro-batches 0 to M_0 - 1 are those of the main replica, the next M_1 those of replica 1, and so on.

    Args:
      replicas: `[R]`, the same step with the same cuts; they may differ in what they copy when a step begins.
      microbatches: `[R]`, how many each of them takes.
    """
    main, size = replicas[0], replicas[0].num_stages
    if len(microbatches) != len(replicas) or min(microbatches) < 1 or sum(microbatches) != main.num_microbatches:
        raise ValueError(
            f"`microbatches` must be {len(replicas)} numbers, 1 or more, and together {main.num_microbatches}, not "
            f"{tuple(microbatches)}."
        )
    combined = _combined_sums(main)
    avals = dict(main.avals)
    programs: dict[Label, StageProgram] = {}
    for r, staged in enumerate(replicas):
        part = staged if r == 0 else replica_part(staged)
        own = _own_names(part, combined, r)
        for label, program in part.programs.items():
            at = label._replace(stage=label.stage + r * size)
            programs[at] = _renamed(program, at, own, combined, is_main=r == 0)
        for key, name in own.items():
            avals[name] = avals[key] if key not in combined else _of_replica(
                avals[key], combined[key][1].state, microbatches[r]
            )  # fmt: skip
        avals.update({key: aval for key, aval in staged.avals.items() if key not in avals})
    for stage in range(size):
        totals = [a for at, a in combined.values() if at.stage == stage]
        if totals:
            label = Label("finish", stage, COMBINE_PHASE)
            programs[label] = program = _combining(label, totals, microbatches, avals)
            avals.update(zip((a.total for a in totals), program.program.out_avals, strict=True))
    order = sorted(programs, key=lambda label: (PROGRAM_KINDS.index(label.kind), label.phase, label.stage))
    return replace(
        main,
        num_stages=size * len(replicas),
        programs={label: programs[label] for label in order},
        avals=avals,
    )


def replica_specs(specs: Mapping[Key, Any], staged: StagedStep, replica: int) -> dict[Key, Any]:
    """Returns the specs of a stage of a replica by the names that its arrays have in the joined step."""
    combined = _combined_sums(staged)
    own = _own_names(staged if replica == 0 else replica_part(staged), combined, replica)
    of_parts = {key for key, (_, a) in combined.items() if isinstance(a.state, Split)}  # of other sizes in a replica
    return {**specs, **{own[key]: spec for key, spec in specs.items() if key in own and key not in of_parts}}


def _combined_sums(staged: StagedStep) -> dict[Key, tuple[Label, Accumulation]]:
    """Returns the results of all replicas together, by key; those equal for all micro-batches are the main one's."""
    return {
        a.total: (label, a)
        for label, program in staged.programs.items()
        for a in program.accumulations
        if a.state != "whole"
    }


def _own_names(staged: StagedStep, combined: Mapping[Key, Any], replica: int) -> dict[Key, Key]:
    """Returns the names in the joined step of the arrays that each replica has for itself."""
    local = [k for label, p in staged.programs.items() if label.kind in ("forward", "backward") for k in p.makes]
    return {key: replica_key(replica, key) for key in (*(local if replica else ()), *combined)}


def _renamed(
    program: StageProgram, label: Label, own: Mapping[Key, Key], combined: Mapping[Key, Any], *, is_main: bool
) -> StageProgram:
    is_of_microbatches = label.kind in ("forward", "backward")

    def name(key: Key) -> Key:
        return own.get(key, key) if is_of_microbatches else key

    sums = (a for a in program.accumulations if is_main or a.total in combined)
    return StageProgram(
        label,
        program.program,
        tuple(map(name, program.reads)),
        tuple(map(name, program.makes)),
        tuple(Accumulation(name(a.total), name(a.part), a.state) for a in sums),
    )


def _of_replica(aval: Any, state: Any, count: int) -> Any:
    """Returns the type of a total of some micro-batches; that of results in pieces is known as the type of a piece."""
    if not isinstance(state, Split):
        return aval
    shape = list(aval.shape)
    shape[state.dim] *= count
    return aval.update(shape=tuple(shape))


def _combining(
    label: Label, totals: Sequence[Accumulation], microbatches: Sequence[int], avals: Mapping[Key, Any]
) -> StageProgram:
    """Returns the program that combines the totals of all replicas, on a stage of the main one."""
    reads = [replica_key(r, a.total) for a in totals for r in range(len(microbatches))]
    shapes = []
    for a in totals:
        for r in range(len(microbatches)):
            aval = avals[replica_key(r, a.total)]
            is_split = isinstance(a.state, Split)
            dtype = aval.dtype if is_split else neutral(a.state, (), aval.dtype).dtype
            shapes.append(jax.ShapeDtypeStruct(aval.shape, dtype))

    def run(*arrays: Any) -> list[Any]:
        count = len(microbatches)
        groups = [arrays[i * count : (i + 1) * count] for i in range(len(totals))]
        return [_together(a.state, group, microbatches) for a, group in zip(totals, groups, strict=True)]

    program = jax.make_jaxpr(run)(*shapes)
    return StageProgram(label, program, tuple(reads), tuple(a.total for a in totals))


def _together(state: Any, arrays: Sequence[Any], microbatches: Sequence[int]) -> Any:
    if not isinstance(state, Split):
        return reduce(lambda total, part: combined_with(state, total, part), arrays)
    dim = state.dim

    def parts(array: Any, count: int) -> Any:  # [..., examples, micro-batches, run, ...]
        return array.reshape(*array.shape[:dim], -1, count, state.run, *array.shape[dim + 1 :])

    joined = jnp.concatenate([parts(a, n) for a, n in zip(arrays, microbatches, strict=True)], dim + 1)
    return joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 3 :])


def _pruned(program: StageProgram, needed: set[Key]) -> StageProgram | None:
    """Returns a program that makes only some keys and reads what these need; None if it makes none of them."""
    kept = [key in needed for key in program.makes]
    if not any(kept):
        return None
    closed = program.program
    jaxpr, is_read = dce_jaxpr(closed.jaxpr, kept)
    reads = tuple(key for key, read in zip(program.reads, is_read, strict=True) if read)
    makes = tuple(key for key, keep in zip(program.makes, kept, strict=True) if keep)
    return StageProgram(program.label, core.ClosedJaxpr(jaxpr, closed.consts), reads, makes)
