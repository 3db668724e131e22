"""The search for one stage of a pipeline on one submesh: its shardings, and which residuals it makes again.

The best sharding that keeps everything says what each choice of residuals would take: a byte that is not kept need be
neither written nor read, and what is made again runs once more. The choices are searched from the best estimate to the
worst, with memory limit, until the next estimate is no better than what was found; so they are tried in the same order
under every limit, and a limit only rules out what does not fit. The estimates are low rather than high, because what is
made again is assumed to run inside the kernels that read it. The bound is that of keeping everything, without a memory
limit. It does not hold for what is made again.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from jax.extend import core
from jax.sharding import AbstractMesh

from cost.base import Hardware
from cost.compute import CONTRACTIONS, equation_work, inner_jaxprs, roofline_s
from cost.host_groups import Submesh
from diffshard.pipelines.offload_search import (
    ResidualEstimate,
    largest_residuals,
    least_offload,
    offloaded_keys,
    with_copies,
)
from diffshard.pipelines.options import STAGE_TIME_LIMIT_S, PipelineOptions, memory_limit_of, mesh_shape
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_search import STAGE_GAP, StageLayout, StageMemoryError, search_stage
from search_spaces.pipelines.offloading import residuals_of, with_offloaded
from search_spaces.pipelines.recomputed_programs import recomputed_stage, working_bytes
from search_spaces.pipelines.residuals import StageResiduals
from search_spaces.pipelines.stage_keys import Label
from search_spaces.pipelines.stage_programs import StagedStep
from search_spaces.rematerialisation.minimum_cuts import Candidate

_FREE_SHARE = 0.95
"""A layout that needs less of the memory is taken to be the best one of its choice without a limit."""
_KERNELS = ("reduce", "arg", "cum", "sort", "top_k", "scatter", "gather", "fft")
"""How the names of operations begin that have kernels of their own, besides contractions and loops."""


def with_choices(staged: StagedStep, layouts: Sequence[StageLayout]) -> StagedStep:
    """Returns a step whose stages make residuals again and offload them as their layouts say."""
    for stage, layout in enumerate(layouts):
        if layout.recomputed:
            residuals = StageResiduals(staged, stage, lambda equation: 0.0)
            staged = recomputed_stage(residuals, residuals.candidate(frozenset(layout.recomputed)))
    return with_offloaded(staged, offloaded_keys(staged, layouts))


class StageVariants:
    """The ways to run a stage on a submesh: its shardings, and what becomes of its residuals.

    Args:
      options: what is asked for.
      staged: the step in stages.
      stage: which one.
      replaced: for each flat argument of the step the flat result that replaces it, or None.
      submesh: what it runs on.
      in_flight: how many micro-batches it keeps at most.
      is_donated: whether the state may be overwritten.
      time_limit_s: for the solver, each time that it is called; None takes that of the options, or of a stage.
    """

    def __init__(
        self,
        options: PipelineOptions,
        staged: StagedStep,
        stage: int,
        replaced: Sequence[int | None],
        submesh: Submesh,
        in_flight: int,
        *,
        is_donated: bool,
        time_limit_s: float | None = None,
    ):
        self.options, self.staged, self.stage, self.replaced = options, staged, stage, replaced
        self.in_flight, self.is_donated, self.shape = in_flight, is_donated, mesh_shape(submesh)
        self.hardware = options.cluster.hardware(submesh.kind, self.shape)
        self.memory_limit_bytes = memory_limit_of(options, submesh.kind)
        self.uses = options.pipeline.residuals
        own_limit_s = STAGE_TIME_LIMIT_S if options.time_limit_s is None else options.time_limit_s
        self.time_limit_s = own_limit_s if time_limit_s is None else time_limit_s

    def chosen(
        self, recomputed: Sequence[int], offloaded: Sequence[int] = (), known: StageLayout | None = None
    ) -> StageLayout:
        """Finds the shardings of a known choice of residuals.

        Args:
          recomputed: the steps that run again (`StageLayout.recomputed`).
          offloaded: the residuals that are offloaded (`StageLayout.offloaded`).
          known: the layout of a stage that may have equal equations, and of the same choice.

        Raises:
          StageMemoryError: it does not fit.
        """
        if not recomputed and not offloaded:
            return self._layout(self.staged, self.memory_limit_bytes, known)
        residuals = self._residuals()
        return self._variant(residuals, residuals.candidate(frozenset(recomputed)), offloaded, known)

    def fastest(self) -> StageLayout:
        """Finds the fastest of those that are tried.

        Raises:
          StageMemoryError: none fits.
        """
        if set(self.uses) == {"keep"} or not self._has_both_passes:
            return self._layout(self.staged, self.memory_limit_bytes)
        begin_s = time.perf_counter()
        residuals = self._residuals()
        free = self._layout(self.staged, math.inf)
        estimates = self._estimates(residuals)
        own = free.residual_bytes / max(estimates[0].choice.kept_bytes, 1.0)  # of what is whole, the part of a device
        found, is_limited = [free], False
        if free.peak_bytes > self.memory_limit_bytes:
            lacking = (free.peak_bytes - self.memory_limit_bytes) / max(own, 1e-9)
            needed = estimates[0].num_bytes - lacking
            found = self._with_offload(residuals, estimates, needed) if "offload" in self.uses else []
            is_limited = True
        least_unfit = math.inf  # of the estimated bytes of what is proven not to fit
        for seconds, one in self._in_order(estimates, free, own):
            best_s = min((layout.seconds for layout in found), default=math.inf)
            if seconds >= (1 - STAGE_GAP) * best_s or (found and time.perf_counter() - begin_s > self.time_limit_s):
                break
            if one.num_bytes >= least_unfit:
                continue
            try:
                found.append(self._variant(residuals, one.choice))
            except StageMemoryError as error:
                is_limited = True
                least_unfit = min(least_unfit, one.num_bytes) if error.is_proven else least_unfit
        if not found:
            raise StageMemoryError("No choice of residuals that was tried fits.", is_proven=False)
        is_limited |= any(layout.peak_bytes > _FREE_SHARE * self.memory_limit_bytes for layout in found)
        best = min(found, key=lambda layout: layout.seconds)
        return replace(best, lower_bound_s=min(free.lower_bound_s, best.seconds), is_limited=is_limited)

    @property
    def _has_both_passes(self) -> bool:
        return {label.kind for label in self.staged.programs if label.stage == self.stage} >= {"forward", "backward"}

    @property
    def _byte_s(self) -> float:
        """The seconds that a kept byte takes at least: it is written once and read once."""
        return 2 / self.hardware.reached_memory_bytes_per_s

    def _residuals(self) -> StageResiduals:
        return StageResiduals(self.staged, self.stage, lambda equation: _step_s(equation, self.hardware))

    def _estimates(self, residuals: StageResiduals) -> list[ResidualEstimate]:
        """Returns the choice that keeps everything, and others, from the fastest to the slowest.

        Those that take at least as long and as much memory as another are left out.
        """

        def estimate(choice: Candidate) -> ResidualEstimate:
            staged = self._programs(residuals, choice)
            passes = [staged.programs[Label(kind, self.stage)] for kind in ("forward", "backward")]
            working = max(working_bytes(staged, program) for program in passes)
            return ResidualEstimate(choice, (self.in_flight - 1) * choice.kept_bytes + working)

        whole, *others = residuals.candidates()
        others.append(residuals.cheapest(self._byte_s))
        found = [estimate(whole)]
        for choice in sorted(others if "recompute" in self.uses else [], key=lambda choice: choice.seconds):
            if (other := estimate(choice)).num_bytes < found[-1].num_bytes:
                found.append(other)
        return found

    def _in_order(
        self, estimates: Sequence[ResidualEstimate], free: StageLayout, own: float
    ) -> list[tuple[float, ResidualEstimate]]:
        """Returns the choices with their estimated seconds, from the fastest to the slowest.

        Args:
          estimates: of the choices; the first one keeps everything.
          free: the best layout that keeps everything, without a memory limit.
          own: of an array of a micro-batch, the part that a device has there.
        """
        whole, price, count = estimates[0].choice, self._byte_s, self.staged.num_microbatches
        others = [
            (free.seconds + count * own * (c.seconds - price * (whole.kept_bytes - c.kept_bytes)), one)
            for one in estimates[1:]
            for c in [one.choice]
        ]
        is_whole_tried = free.peak_bytes <= self.memory_limit_bytes
        of_whole = [] if is_whole_tried else [(free.lower_bound_s, estimates[0])]
        return sorted(others + of_whole, key=lambda pair: pair[0])

    def _with_offload(
        self, residuals: StageResiduals, estimates: Sequence[ResidualEstimate], needed_bytes: float
    ) -> list[StageLayout]:
        """Returns a layout that offloads what the memory demands, or if none fits, all that it keeps."""
        if self.in_flight < 2:
            return []  # a micro-batch that runs has its residuals on the devices
        whole = estimates[0].choice
        found = least_offload(estimates, needed_bytes, self.in_flight, self.hardware) or (whole, math.inf)
        for one, least_bytes in dict.fromkeys((found, (found[0], math.inf), (whole, math.inf))):
            try:
                offloaded = largest_residuals(self._programs(residuals, one), self.stage, least_bytes)
                return [self._variant(residuals, one, offloaded)]
            except StageMemoryError:
                continue
        return []

    def _programs(self, residuals: StageResiduals, choice: Candidate) -> StagedStep:
        return recomputed_stage(residuals, choice) if choice.recomputed else self.staged

    def _variant(
        self,
        residuals: StageResiduals,
        choice: Candidate,
        offloaded: Sequence[int] = (),
        known: StageLayout | None = None,
    ) -> StageLayout:
        staged = self._programs(residuals, choice)
        names = residuals_of(staged, self.stage)
        layout = self._layout(with_offloaded(staged, [names[i] for i in offloaded]), self.memory_limit_bytes, known)
        spared_bytes = residuals.candidate(frozenset()).kept_bytes - choice.kept_bytes
        layout = replace(layout, recomputed=tuple(sorted(choice.recomputed)), recomputed_bytes=spared_bytes)
        return with_copies(layout, staged, self.stage, offloaded, self.shape, self.hardware) if offloaded else layout

    def _layout(self, staged: StagedStep, memory_limit_bytes: float, known: StageLayout | None = None) -> StageLayout:
        options = self.options
        return search_stage(
            StageFunction(staged, self.stage, self.in_flight, self.replaced),
            AbstractMesh(tuple(self.shape.values()), tuple(self.shape)),
            self.hardware,
            memory_limit_bytes,
            is_donated=self.is_donated,
            solver=options.solver,
            time_limit_s=self.time_limit_s,
            known=known,
        )


def _step_s(equation: core.JaxprEqn, hardware: Hardware) -> float:
    """Returns about how long an operation takes on one device, where it runs again.

    It runs just before its readers. So an elementwise operation is computed inside their kernels, and moves no bytes.
    """
    work, name = equation_work(equation), equation.primitive.name
    has_kernel = name in CONTRACTIONS or name.startswith(_KERNELS) or bool(inner_jaxprs(equation))
    return float(roofline_s(work.flops, work.num_bytes if has_kernel else 0.0, work.dtype, hardware))
