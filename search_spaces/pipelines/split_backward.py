"""Splits the backward program of each stage: what other stages wait for, and the gradients of its weights.

A zero-bubble schedule runs the second program later, where its stage would wait. Until then it keeps the residuals that
the second program reads, and what the first one leaves: the gradients of the results of products with weights.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.1.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from search_spaces.pipelines.divided_program import DividedProgram, flattened
from search_spaces.pipelines.recomputed_programs import traced_program
from search_spaces.pipelines.stage_labels import PROGRAM_KINDS, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram

_BETWEEN = "between"


def is_between(key: Key) -> bool:
    """Tells whether an array is what the first half of a backward program leaves for the second one."""
    return isinstance(key, tuple) and key[0] == _BETWEEN


def with_split_backward(staged: StagedStep) -> StagedStep:
    """Returns a step whose stages have a program "weights" after the program "backward", which ends sooner.

    A stage that sends no gradients to others has all of it in the program "weights".
    """
    programs, avals = dict(staged.programs), dict(staged.avals)
    makers, readers = dict(staged.makers), dict(staged.readers)
    for stage in range(staged.num_stages):
        program = programs.pop(Label("backward", stage), None)
        if program is None:
            continue
        for half in _halves(staged, program, avals):
            programs[half.label] = half
            makers.update(dict.fromkeys(half.makes, half.label))
            makers.update({a.total: half.label for a in half.accumulations})
            readers.update({key: readers.get(key, frozenset()) | {stage} for key in half.reads})
    order = sorted(programs, key=lambda label: (PROGRAM_KINDS.index(label.kind), label.phase, label.stage))
    programs = {label: programs[label] for label in order}
    return replace(staged, programs=programs, avals=avals, makers=makers, readers=readers)


def _halves(staged: StagedStep, program: StageProgram, avals: dict[Key, Any]) -> list[StageProgram]:
    """Returns the programs that a backward program is split into, and adds the types of what goes between them."""
    stage, parts = program.label.stage, {a.part for a in program.accumulations}
    later = Label("weights", stage)
    is_sent = [key not in parts and bool(staged.readers.get(key, frozenset()) - {stage}) for key in program.makes]
    if not any(is_sent):
        return [replace(program, label=later)]
    divided = DividedProgram(flattened(program.program), is_sent)
    shapes = [jax.ShapeDtypeStruct(avals[key].shape, avals[key].dtype) for key in program.reads]
    _, left = jax.eval_shape(lambda *arrays: divided.first(arrays), *shapes)
    between = [(_BETWEEN, stage, number) for number in range(len(left))]
    avals.update(zip(between, left, strict=True))
    num_reads = len(program.reads)

    def second(*arrays: Any) -> list[Any]:
        return divided.second(arrays[:num_reads], arrays[num_reads:])

    traced, reads = traced_program(second, (*program.reads, *between), avals, parts)
    is_read = [key in reads for key in between]

    def first(*arrays: Any) -> list[Any]:
        made, left = divided.first(arrays)
        return [*made, *(array for array, read in zip(left, is_read, strict=True) if read)]

    traced_first, reads_first = traced_program(first, program.reads, avals)
    sent = _where(program.makes, is_sent)
    makes_first = (*sent, *_where(between, is_read))
    makes = tuple(key for key in program.makes if key not in sent)
    return [
        StageProgram(program.label, traced_first, reads_first, makes_first),
        StageProgram(later, traced, reads, makes, program.accumulations),
    ]


def _where(keys: Sequence[Key], chosen: Sequence[bool]) -> list[Key]:
    return [key for key, is_chosen in zip(keys, chosen, strict=True) if is_chosen]
