"""The search for one stage of a pipeline on one submesh: its shardings, and which residuals it makes again.

The best sharding that keeps everything says about what each choice of residuals would take: a byte that is not kept
need be neither written nor read, and what is made again runs once more. That can be faster even where memory is free.
Choices are searched under the memory limit from the best estimate to the worst, until estimates are worse than what
was found by more than they err. The order is the same under every limit, which only rules out what does not fit, so
that more memory gives no slower stage. The bound is that of keeping everything, without a memory limit. It does not
hold for what is made again.

Residuals that wait in the memory of the host are chosen for a stage that is known already, by what their copies cost.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.extend import core
from jax.sharding import AbstractMesh

from cost.base import Hardware
from cost.clusters import Submesh
from cost.compute import CONTRACTIONS, equation_work, inner_jaxprs, roofline_s
from diffshard.pipelines.options import PipelineOptions, memory_limit_of, mesh_shape
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_search import FREE_SHARE, STAGE_GAP, StageLayout, StageMemoryError, search_stage
from search_spaces.partition_specs import num_parts
from search_spaces.pipelines.recomputed_programs import recomputed_stage, working_bytes
from search_spaces.pipelines.residuals import OUTSIDE, StageResiduals, can_be_offloaded, residuals_of, with_offloaded
from search_spaces.pipelines.stage_labels import Label
from search_spaces.pipelines.stage_programs import StagedStep
from search_spaces.pipelines.step_parts import num_bytes
from search_spaces.rematerialisation.choices import RematChoice


class ResidualEstimate(NamedTuple):
    """The estimated memory of a choice of residuals, before it is searched.

    Attributes:
      choice: what is kept and what is made again; its seconds are those of one device that has all of it.
      num_bytes: of the activations of all micro-batches in flight, as a whole.
    """

    choice: RematChoice
    num_bytes: float


_ESTIMATE_ERROR = 0.05
"""How much too high choices of residuals may be estimated, relative: those of GPTs and MLPs that were near the best one
were within it, and one that was not was 9% too high."""
_MOST_FRUITLESS = 4
"""How many choices in a row are searched that fit and are not faster."""
_PASSES, _STACKED_PASSES = 2, 4
"""How often the bytes of a residual are moved: written and read; in trips of a scan, whose stack is filled with zeros
and written by a kernel of its own, also copied (`copies_of`)."""
_KERNELS = ("reduce", "arg", "cum", "sort", "top_k", "scatter", "gather", "fft")
"""How the names of operations begin that have kernels of their own, besides contractions and loops."""


def with_choices(staged: StagedStep, layouts: Sequence[StageLayout]) -> StagedStep:
    """Returns a step whose stages make residuals again and offload them as their layouts say."""
    for stage, layout in enumerate(layouts):
        if layout.recomputed:
            residuals = StageResiduals(staged, stage, lambda equation: 0.0)
            staged = recomputed_stage(residuals, residuals.candidate(frozenset(layout.recomputed)))
    keys = [residuals_of(staged, i)[place] for i, layout in enumerate(layouts) for place in layout.offloaded]
    return with_offloaded(staged, keys)


class StageVariants:
    """The ways to run a stage on a submesh: its shardings, and what becomes of its residuals.

    Args:
      in_flight: how many micro-batches it keeps at most.
      time_limit_s: for the solver, each time that it is called.
      stages_per_device: how many stages share the memory of a device, in equal parts.
    """

    def __init__(
        self,
        options: PipelineOptions,
        staged: StagedStep,
        stage: int,
        submesh: Submesh,
        in_flight: int,
        *,
        is_donated: bool,
        time_limit_s: float,
        stages_per_device: int = 1,
    ):
        self.options, self.staged, self.stage = options, staged, stage
        self.in_flight, self.is_donated, self.shape = in_flight, is_donated, mesh_shape(submesh)
        self.hardware = options.cluster.hardware(submesh.kind, self.shape)
        self.memory_limit_bytes = memory_limit_of(options, submesh.kind) / stages_per_device
        self.uses, self.time_limit_s = options.pipeline.residuals, time_limit_s

    def chosen(
        self, recomputed: Sequence[int], offloaded: Sequence[int] = (), known: StageLayout | None = None
    ) -> StageLayout:
        """Finds the shardings of a known choice of residuals.

        Args:
          known: the layout of a stage that may have equal equations, and of the same choice.
        """
        if not recomputed and not offloaded:
            return self._layout(self.staged, self.memory_limit_bytes, known)
        residuals = self._residuals()
        return self._variant(residuals, residuals.candidate(frozenset(recomputed)), offloaded, known)

    def fastest(self) -> StageLayout:
        """Finds the fastest of those that are tried."""
        if set(self.uses) == {"keep"} or not self._has_both_passes:
            return self._layout(self.staged, self.memory_limit_bytes)
        begin_s = time.process_time()
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
        least_unfit, num_fruitless = math.inf, 0  # of the estimated bytes of what is proven not to fit
        for seconds, one in self._in_order(residuals, estimates, free, own):
            best_s = min((layout.seconds for layout in found), default=math.inf)
            is_over = num_fruitless >= _MOST_FRUITLESS or time.process_time() - begin_s > self.time_limit_s
            if seconds >= (1 + _ESTIMATE_ERROR) * best_s or (found and is_over):
                break
            if one.num_bytes >= least_unfit:
                continue
            try:
                found.append(self._variant(residuals, one.choice))
            except StageMemoryError as error:
                is_limited = True
                least_unfit = min(least_unfit, one.num_bytes) if error.is_proven else least_unfit
                continue
            num_fruitless = 0 if found[-1].seconds < best_s else num_fruitless + 1
        if not found:
            raise StageMemoryError("No choice of residuals that was tried fits.", is_proven=False)
        is_limited |= any(layout.peak_bytes > FREE_SHARE * self.memory_limit_bytes for layout in found)
        best = min(found, key=lambda layout: layout.seconds)
        return replace(best, lower_bound_s=min(free.lower_bound_s, best.seconds), is_limited=is_limited)

    @property
    def _has_both_passes(self) -> bool:
        return {label.kind for label in self.staged.programs if label.stage == self.stage} >= {"forward", "backward"}

    def _residuals(self) -> StageResiduals:
        return StageResiduals(self.staged, self.stage, lambda equation: _step_s(equation, self.hardware))

    def _estimates(self, residuals: StageResiduals) -> list[ResidualEstimate]:
        """Returns the choice that keeps everything, and others, from the fastest to the slowest.

        Those that take at least as long and as much memory as another are left out.
        """

        def estimate(choice: RematChoice) -> ResidualEstimate:
            staged = self._programs(residuals, choice)
            passes = [staged.programs[Label(kind, self.stage)] for kind in ("forward", "backward")]
            working = max(working_bytes(staged, program) for program in passes)
            return ResidualEstimate(choice, (self.in_flight - 1) * choice.kept_bytes + working)

        whole, *others = residuals.candidates()
        others.append(residuals.cheapest(_PASSES / self.hardware.reached_memory_bytes_per_s))
        found = [estimate(whole)]
        for choice in sorted(others if "recompute" in self.uses else [], key=lambda choice: choice.seconds):
            if (other := estimate(choice)).num_bytes < found[-1].num_bytes:
                found.append(other)
        return found

    def _in_order(
        self, residuals: StageResiduals, estimates: Sequence[ResidualEstimate], free: StageLayout, own: float
    ) -> list[tuple[float, ResidualEstimate]]:
        """Returns the choices with their estimated seconds, from the fastest to the slowest.

        There are none where the layout that keeps everything fits, and none is estimated to be faster.

        Args:
          estimates: of the choices; the first one keeps everything.
          free: the best layout that keeps everything, without a memory limit.
          own: of an array of a micro-batch, the part that a device has there.
        """

        def device_s(choice: RematChoice) -> float:
            bytes_of, values = residuals.bytes, residuals.values
            moved = sum(bytes_of[v] * (_PASSES if values[v].scan == OUTSIDE else _STACKED_PASSES) for v in choice.kept)
            return choice.seconds + moved / self.hardware.reached_memory_bytes_per_s

        whole, *others = estimates
        share, whole_s = self.staged.num_microbatches * own, device_s(whole.choice)
        found = [(free.seconds + share * (device_s(one.choice) - whole_s), one) for one in others]
        if free.peak_bytes > self.memory_limit_bytes:
            found.append((free.lower_bound_s, whole))
        elif min((seconds for seconds, _ in found), default=math.inf) > (1 - STAGE_GAP) * free.seconds:
            return []
        return sorted(found, key=lambda pair: pair[0])

    def _with_offload(
        self, residuals: StageResiduals, estimates: Sequence[ResidualEstimate], needed_bytes: float
    ) -> list[StageLayout]:
        """Returns a layout that offloads what the memory demands, or if none fits, all that it keeps."""
        if self.in_flight < 2:
            return []  # a micro-batch that runs has its residuals on the devices
        whole = estimates[0].choice
        found = self._least_offload(estimates, needed_bytes) or (whole, math.inf)
        for one, least_bytes in dict.fromkeys((found, (found[0], math.inf), (whole, math.inf))):
            try:
                return [self._variant(residuals, one, self._largest(self._programs(residuals, one), least_bytes))]
            except StageMemoryError:
                continue
        return []

    def _least_offload(
        self, estimates: Sequence[ResidualEstimate], needed_bytes: float
    ) -> tuple[RematChoice, float] | None:
        """Returns the choice of residuals that is fastest with as much of it offloaded as the memory demands.

        What is made again and what is offloaded is split over devices alike. A byte that is offloaded spares one less
        than the micro-batches in flight, because the one that runs has it on the devices.

        Args:
          needed_bytes: what activations may take, as a whole.

        Returns:
          The choice and the bytes of each micro-batch to offload, as a whole; None where no choice can do.
        """
        possible = []
        for choice, activation_bytes in estimates:
            offloaded = max(activation_bytes - needed_bytes, 0.0) / (self.in_flight - 1)
            if 0 < offloaded <= choice.kept_bytes:
                possible.append((choice.seconds + 2 * offloaded / self._host_bytes_per_s, choice, offloaded))
        return min(possible, key=lambda one: one[0])[1:] if possible else None

    def _largest(self, staged: StagedStep, least_bytes: float) -> tuple[int, ...]:
        """Returns the positions of the fewest, largest residuals that reach a number of bytes, or of all."""
        residuals = residuals_of(staged, self.stage)
        size = {i: num_bytes(staged.avals[k]) for i, k in enumerate(residuals) if can_be_offloaded(staged, k)}
        chosen: list[int] = []
        for i in sorted(size, key=lambda i: -size[i]):
            if sum(size[j] for j in chosen) < least_bytes:
                chosen.append(i)
        return tuple(sorted(chosen))

    @property
    def _host_bytes_per_s(self) -> float:
        assert self.hardware.host_memory_bytes_per_s is not None
        return self.hardware.host_memory_bytes_per_s

    def _programs(self, residuals: StageResiduals, choice: RematChoice) -> StagedStep:
        return recomputed_stage(residuals, choice) if choice.recomputed else self.staged

    def _variant(
        self,
        residuals: StageResiduals,
        choice: RematChoice,
        offloaded: Sequence[int] = (),
        known: StageLayout | None = None,
    ) -> StageLayout:
        """Finds the shardings of a choice; its seconds have the copies to the host and back, its bound has not."""
        staged = self._programs(residuals, choice)
        names = residuals_of(staged, self.stage)
        away = [names[i] for i in offloaded]
        layout = self._layout(with_offloaded(staged, away), self.memory_limit_bytes, known)
        spared_bytes = residuals.candidate(frozenset()).kept_bytes - choice.kept_bytes
        layout = replace(layout, recomputed=tuple(sorted(choice.recomputed)), recomputed_bytes=spared_bytes)
        if not away:
            return layout
        parts = {key: num_parts(layout.specs.get(key, ()), self.shape) for key in away}
        offloaded_bytes = sum(num_bytes(staged.avals[key]) / parts[key] for key in away)
        offload_s = offloaded_bytes / self._host_bytes_per_s
        return replace(
            layout,
            seconds=layout.seconds + 2 * staged.num_microbatches * offload_s,
            offloaded=tuple(offloaded),
            offloaded_bytes=offloaded_bytes,
            offload_s=offload_s,
        )

    def _layout(self, staged: StagedStep, memory_limit_bytes: float, known: StageLayout | None = None) -> StageLayout:
        options = self.options
        return search_stage(
            StageFunction(staged, self.stage, self.in_flight),
            AbstractMesh(tuple(self.shape.values()), tuple(self.shape)),
            self.hardware,
            memory_limit_bytes,
            is_donated=self.is_donated,
            solver=options.solver,
            key=options.key,
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
