"""Micro-batches whose examples are in groups, so that gradients are summed over the groups once, when a step ends.

A gradient that is summed over all examples of a micro-batch has to be reduced over the devices that share them, in each
micro-batch again. Here the forward and backward programs compute R groups of examples side by side, along a dimension
of their own, and what micro-batches add up has that dimension too: R totals. One program at the end of the step sums
them. Where devices split the dimension of the groups, micro-batches reduce nothing, and the sharding search finds that
by itself. The price is memory: each device has a total of its own instead of a part of one.

A step that was traced in M·R parts becomes one of M micro-batches. Group r of micro-batch m is part r·M + m, and the
groups are neighbouring parts of the batch. So a batch that is stored in R parts stays where it is.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from search_spaces.pipelines.batch_states import Split, State
from search_spaces.pipelines.grouped_program import GroupedProgram, with_own_dims
from search_spaces.pipelines.stage_labels import Accumulation, Key, Label
from search_spaces.pipelines.stage_programs import StagedStep, StageProgram
from search_spaces.pipelines.step_parts import abstract

_REDUCE = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


def in_groups(staged: StagedStep) -> StagedStep:
    """Returns a step whose micro-batches keep sums for each of R groups of their examples, and reduce them once.

    Args:
      staged: a step of M·R micro-batches, those of R groups one after the other; with one group it is returned as it
        is.

    Raises:
      ValueError: an operation cannot compute groups side by side; names it.
    """
    return staged if staged.num_groups == 1 else _Grouping(staged).step()


def reduced(total: Key) -> Key:
    """Returns the key of what the totals of all groups make together."""
    return ("reduced", total)


class _Grouping:
    """Makes the programs of M micro-batches of R groups from those of M·R micro-batches."""

    def __init__(self, staged: StagedStep):
        self.staged, self.num_groups = staged, staged.num_groups
        self.num_microbatches = staged.num_microbatches // staged.num_groups
        self.dims: dict[Key, int | None] = {}  # where arrays of micro-batches have their groups; None: the same in all
        self.grouped: dict[Label, StageProgram] = {}
        self.avals = dict(staged.avals)
        sums = [a for program in staged.programs.values() for a in program.accumulations]
        self.added = {a.part for a in sums if a.state in _REDUCE}
        self.totals = {a.total for a in sums if a.state in _REDUCE}
        self.results = {key for key in staged.outputs if not isinstance(key, core.Literal)}

    def step(self) -> StagedStep:
        """Returns the step of M micro-batches."""
        staged, programs = self.staged, {}
        for label, program in staged.programs.items():
            if label.kind == "begin":
                programs[label] = program
            elif label.kind in ("forward", "backward"):
                programs[label] = self._in_groups(program)
        for label, program in list(programs.items()):
            sums = [a for a in program.accumulations if a.state in _REDUCE]
            if sums:
                reduction = self._reduction(label.stage, sums)
                programs[reduction.label] = reduction
        for label, program in staged.programs.items():
            if label.kind == "finish":
                after = label._replace(phase=label.phase + 1)
                reads = tuple(self._whole(key) for key in program.reads)
                programs[after] = replace(program, label=after, reads=reads)
        makers: dict[Key, Label] = {}
        readers: dict[Key, set[int]] = {}
        for label, program in programs.items():
            makers.update({**dict.fromkeys(program.makes, label), **{a.total: label for a in program.accumulations}})
            for key in program.reads:
                readers.setdefault(key, set()).add(label.stage)
        return replace(
            staged,
            num_microbatches=self.num_microbatches,
            num_groups=1,
            programs=programs,
            outputs=tuple(key if isinstance(key, core.Literal) else self._whole(key) for key in staged.outputs),
            makers=makers,
            readers={key: frozenset(stages) for key, stages in readers.items()},
            avals=self.avals,
        )

    def _whole(self, key: Key) -> Key:
        """Returns the key of an array at the end of a step."""
        return reduced(key) if key in self.totals else key

    def _dim(self, key: Key) -> int | None:
        """Returns the dimension along which an array that a program reads has its groups."""
        maker = self.staged.makers.get(key)
        if maker is not None and maker.kind in ("forward", "backward") and key not in self.dims:
            self._in_groups(self.staged.programs[maker])
        return self.dims.get(key)

    def _in_groups(self, program: StageProgram) -> StageProgram:
        """Returns a forward or backward program for all groups of a micro-batch."""
        if program.label in self.grouped:
            return self.grouped[program.label]
        dims = [self._dim(key) for key in program.reads]
        run = GroupedProgram(program, dims, self.num_groups, self.num_microbatches)
        shapes = [abstract(self.avals[key]) for key in program.reads]
        traced = jax.make_jaxpr(run)(*shapes)
        traced, found = with_own_dims(traced, self.num_groups, [key in self.added for key in program.makes])
        self.dims.update(zip(program.makes, found, strict=True))
        self.avals.update(zip(program.makes, traced.out_avals, strict=True))
        self.grouped[program.label] = grouped = self._with_pieces(replace(program, program=traced))
        return grouped

    def _with_pieces(self, program: StageProgram) -> StageProgram:
        """Returns a program that puts together what its groups make in pieces, and keeps what is the same in all."""
        accumulations, pieces = [], {}
        for a in program.accumulations:
            dim = self._dim(a.part)
            if a.state in _REDUCE:
                assert dim is not None
                shape = list(self.staged.avals[a.total].shape)
                shape.insert(dim, self.num_groups)
                self.avals[a.total] = jax.ShapeDtypeStruct(tuple(shape), self.staged.avals[a.total].dtype)
            elif dim is not None:
                pieces[a.part] = dim, a.state
                a = Accumulation(a.total, ("piece", a.part), a.state)
            accumulations.append(a)
        if not pieces:
            return replace(program, accumulations=tuple(accumulations))
        needed = {*self.staged.readers, *self.results, *self.added}
        makes = tuple(key for key in program.makes if key not in pieces or key in needed)
        jaxpr = core.jaxpr_as_fun(program.program)

        def run(*arrays: Any) -> list[Any]:
            env = {**dict(zip(program.reads, arrays, strict=True))}
            env.update(zip(program.makes, jaxpr(*arrays), strict=True))
            put = [_together(env[key], dim, state) for key, (dim, state) in pieces.items()]
            return [*(env[key] for key in makes), *put]

        traced = jax.make_jaxpr(run)(*(abstract(self.avals[key]) for key in program.reads))
        keys = [("piece", key) for key in pieces]
        self.avals.update(zip(keys, traced.out_avals[len(makes) :], strict=True))
        self.avals.update({a.total: self.avals[a.part] for a in accumulations if a.part in keys})
        return replace(program, program=traced, makes=(*makes, *keys), accumulations=tuple(accumulations))

    def _reduction(self, stage: int, sums: list[Accumulation]) -> StageProgram:
        """Returns the program that sums the totals of a stage over the groups."""
        totals = [a.total for a in sums]

        def run(*arrays: Any) -> list[Any]:
            return [
                _REDUCE[a.state](array, axis=self.dims[a.part], **({"dtype": array.dtype} if a.state == "sum" else {}))  # type: ignore[index]
                for a, array in zip(sums, arrays, strict=True)
            ]

        traced = jax.make_jaxpr(run)(*(abstract(self.avals[key]) for key in totals))
        makes = tuple(reduced(key) for key in totals)
        self.avals.update(zip(makes, traced.out_avals, strict=True))
        return StageProgram(Label("finish", stage, 0), traced, tuple(totals), makes)


def _together(array: Any, dim: int, state: State) -> Any:
    """Returns the pieces of neighbouring groups in one; or one of them, where they are the same."""
    stack = jnp.moveaxis(array, dim, 0)
    if not isinstance(state, Split):
        return stack[0]
    pieces = jnp.moveaxis(stack, 0, state.dim)
    return pieces.reshape(*pieces.shape[: state.dim], -1, *pieces.shape[state.dim + 2 :])
