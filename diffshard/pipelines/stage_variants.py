"""The search for one stage of a pipeline on one submesh: its shardings, and which residuals it makes again.

If the best sharding that keeps everything fits the memory, nothing is made again: that only takes longer. Else the
memory that this sharding lacks says which choices of residuals can do, and the fastest that fits is taken, among them
other shardings that keep everything. The bound is that of the step without a memory limit, and so holds for all.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh

from cost.base import Hardware
from cost.compute import equation_work, roofline_s
from cost.host_groups import Submesh
from diffshard.pipelines.options import STAGE_TIME_LIMIT_S, PipelineOptions, memory_limit_of, mesh_shape
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_search import StageLayout, StageMemoryError, search_stage
from search_spaces.pipelines.recomputed_programs import recomputed_stage, working_bytes
from search_spaces.pipelines.residuals import StageResiduals
from search_spaces.pipelines.stage_keys import Label
from search_spaces.pipelines.stage_programs import StagedStep
from search_spaces.rematerialisation.minimum_cuts import Candidate

_MOST_VARIANTS = 3
"""Choices of residuals whose shardings are searched, besides the one that keeps everything."""


def solve_stage(
    options: PipelineOptions,
    staged: StagedStep,
    stage: int,
    replaced: Sequence[int | None],
    submesh: Submesh,
    in_flight: int,
    *,
    is_donated: bool,
    recomputed: Sequence[int] | None = None,
    known: StageLayout | None = None,
) -> StageLayout:
    """Finds how a stage runs on a submesh.

    Args:
      options: what is asked for.
      staged: the step in stages.
      stage: which one.
      replaced: for each flat argument of the step the flat result that replaces it, or None.
      submesh: what it runs on.
      in_flight: how many micro-batches it keeps at most.
      is_donated: whether the state may be overwritten.
      recomputed: the steps that run again (`StageLayout.recomputed`); None chooses them.
      known: the layout of a stage that may have equal equations, and makes again what `recomputed` says.

    Raises:
      StageMemoryError: it does not fit.
    """
    return _Variants(options, staged, stage, replaced, submesh, in_flight, is_donated).fastest(recomputed, known)


def with_recomputed(staged: StagedStep, layouts: Sequence[StageLayout]) -> StagedStep:
    """Returns a step whose stages make residuals again as their layouts say."""
    for stage, layout in enumerate(layouts):
        if layout.recomputed:
            residuals = StageResiduals(staged, stage, lambda equation: 0.0)
            staged = recomputed_stage(residuals, residuals.candidate(frozenset(layout.recomputed)))
    return staged


class _Variants:
    def __init__(
        self,
        options: PipelineOptions,
        staged: StagedStep,
        stage: int,
        replaced: Sequence[int | None],
        submesh: Submesh,
        in_flight: int,
        is_donated: bool,
    ):
        self.options, self.staged, self.stage, self.replaced = options, staged, stage, replaced
        self.in_flight, self.is_donated, self.shape = in_flight, is_donated, mesh_shape(submesh)
        self.hardware = options.cluster.hardware(submesh.kind, self.shape)
        self.memory_limit_bytes = memory_limit_of(options, submesh.kind)

    def fastest(self, recomputed: Sequence[int] | None, known: StageLayout | None) -> StageLayout:
        programs = {label.kind for label in self.staged.programs if label.stage == self.stage}
        if "recompute" not in self.options.pipeline.residuals or not programs >= {"forward", "backward"}:
            return self._layout(self.staged, self.memory_limit_bytes, known)
        residuals = StageResiduals(self.staged, self.stage, lambda equation: _step_s(equation, self.hardware))
        if recomputed is not None:
            return self._variant(residuals, residuals.candidate(frozenset(recomputed)), known)
        free = self._layout(self.staged, math.inf)
        if free.peak_bytes <= self.memory_limit_bytes:
            return free
        found = []
        for choice in self._promising(residuals, free):
            try:
                layout = self._variant(residuals, choice)
            except StageMemoryError:
                continue
            found.append(layout)
            if choice.recomputed:
                break  # the later ones keep less than is needed
        if not found:
            raise StageMemoryError("No choice of residuals that was tried fits.", is_proven=False)
        best = min(found, key=lambda layout: layout.seconds)
        return replace(best, lower_bound_s=min(free.lower_bound_s, best.seconds))

    def _promising(self, residuals: StageResiduals, free: StageLayout) -> list[Candidate]:
        """Returns the choice that keeps everything, and some that take less memory, from the fastest on.

        Those that take at least as long and as much memory as another are left out. What they take on a device is
        estimated from the sharding that keeps everything.
        """
        whole, *others = residuals.candidates()
        own = free.residual_bytes / max(whole.kept_bytes, 1.0)  # of what is whole, the part of a device

        def activation_bytes(choice: Candidate) -> float:
            staged = recomputed_stage(residuals, choice)
            passes = [staged.programs[Label(kind, self.stage)] for kind in ("forward", "backward")]
            return (self.in_flight - 1) * choice.kept_bytes + max(working_bytes(staged, p) for p in passes)

        needed = activation_bytes(whole) - (free.peak_bytes - self.memory_limit_bytes) / max(own, 1e-9)
        least, best = activation_bytes(whole), []
        for choice in sorted(others, key=lambda choice: choice.seconds):
            num_bytes = activation_bytes(choice)
            if num_bytes < least:
                least = num_bytes
                best.append((num_bytes, choice))
        first = next((i for i, (num_bytes, _) in enumerate(best) if num_bytes <= needed), len(best) - 1)
        tried = np.unique(np.linspace(max(first, 0), len(best) - 1, _MOST_VARIANTS).round().astype(int))
        return [whole, *(best[i][1] for i in tried if best)]

    def _variant(self, residuals: StageResiduals, choice: Candidate, known: StageLayout | None = None) -> StageLayout:
        staged = recomputed_stage(residuals, choice) if choice.recomputed else self.staged
        layout = self._layout(staged, self.memory_limit_bytes, known)
        spared_bytes = residuals.candidate(frozenset()).kept_bytes - choice.kept_bytes
        return replace(layout, recomputed=tuple(sorted(choice.recomputed)), recomputed_bytes=spared_bytes)

    def _layout(self, staged: StagedStep, memory_limit_bytes: float, known: StageLayout | None = None) -> StageLayout:
        options = self.options
        return search_stage(
            StageFunction(staged, self.stage, self.in_flight, self.replaced),
            AbstractMesh(tuple(self.shape.values()), tuple(self.shape)),
            self.hardware,
            memory_limit_bytes,
            is_donated=self.is_donated,
            solver=options.solver,
            time_limit_s=STAGE_TIME_LIMIT_S if options.time_limit_s is None else options.time_limit_s,
            known=known,
        )


def _step_s(equation: core.JaxprEqn, hardware: Hardware) -> float:
    """Returns about how long an operation takes on one device."""
    work = equation_work(equation)
    return float(roofline_s(work.flops, work.num_bytes, work.dtype, hardware))
