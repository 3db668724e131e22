"""The search for the stages of a step in one number of micro-batches: its layers, and how stages of them are solved."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
from jax.sharding import AbstractMesh, AxisType

from cost.pipeline_schedules import BY_STAGES_LEFT, Schedule
from diffshard.live_progress import LiveLine
from diffshard.pipelines.course import Course
from diffshard.pipelines.cutting import CutStep, UncutStep, cut_step
from diffshard.pipelines.division_search import DivisionSearch
from diffshard.pipelines.even_division import EvenDivisionSearch
from diffshard.pipelines.layer_bounds import LayerBounds
from diffshard.pipelines.layer_graphs import LayerChain, layer_chain
from diffshard.pipelines.options import PipelineOptions, memory_limit_of, mesh_shape
from diffshard.pipelines.solved_stages import Entry, FoundDivision
from diffshard.pipelines.stage_function import StageFunction
from diffshard.pipelines.stage_search import StageLayout, stage_request
from diffshard.pipelines.stage_variants import StageVariants
from diffshard.sharding_search.request import PlanRequest
from search_spaces.pipelines.example_groups import in_groups
from search_spaces.pipelines.stage_labels import Key
from search_spaces.pipelines.stage_programs import StagedStep, staged_step

_MOST_LAYERS = 48


class StepSearch:
    """The search for the stages of a step in some number of micro-batches.

    Args:
      step: traced in M·R parts, where the examples of each micro-batch are in R groups, over which gradients are
        reduced once, when a step ends.
      course: of the search in all numbers of micro-batches; None begins one that shows nothing.
    """

    def __init__(
        self, options: PipelineOptions, step: UncutStep, donated: Sequence[bool], course: Course | None = None
    ):
        course = Course(LiveLine("", None), options.time_limit_s) if course is None else course
        self.is_donated = all(donated[i] for i in step.call.feedback if i is not None)
        self.options, self.step, self.course, self.num_groups = options, step, course, step.parts.num_groups
        self.num_microbatches = step.parts.num_microbatches // self.num_groups
        self.submeshes = options.cluster.submeshes()
        self._least: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._staged: dict[tuple[int, int], tuple[StagedStep, CutStep]] = {}
        self._divisions: dict[int, DivisionSearch] = {}

    @cached_property
    def chain(self) -> LayerChain:
        """The layers of the step."""
        of_group = layer_chain(self.step, _MOST_LAYERS)
        return replace(
            of_group,
            sent_bytes=of_group.sent_bytes * self.num_groups,
            returned_bytes=of_group.returned_bytes * self.num_groups,
        )

    @property
    def divisions(self) -> DivisionSearch:
        """The search for stages that have their devices alone; only the process that searches has one."""
        return self.divisions_of(1)

    def divisions_of(self, stages_per_device: int) -> DivisionSearch:
        """Returns the search for stages of which some share each device, and its memory in equal parts."""
        if stages_per_device not in self._divisions:
            kinds = range(len(self.options.cluster.kinds))
            self._divisions[stages_per_device] = DivisionSearch(
                self.chain,
                self.num_microbatches,
                self.options.cluster,
                [memory_limit_of(self.options, kind) / stages_per_device for kind in kinds],
                partial(self._solve, stages_per_device),
                self.least_layer_s,
                self.options.pipeline.max_stages,
            )
        return self._divisions[stages_per_device]

    def candidates(
        self, schedule: Schedule, stages_per_device: int, is_over: Callable[[], bool]
    ) -> list[FoundDivision]:
        """Finds divisions into stages for a schedule, which lets each device hold a number of them."""
        if schedule in BY_STAGES_LEFT:
            return self.divisions.candidates(schedule, is_over)
        return self._even(schedule, stages_per_device).candidates(is_over)

    def has_places(self, schedule: Schedule, stages_per_device: int) -> bool:
        """Tells whether there are devices for a schedule, whatever they have of memory."""
        return schedule in BY_STAGES_LEFT or any(self._even(schedule, stages_per_device).places())

    def bound(self, schedule: Schedule, stages_per_device: int, target_s: float, is_over: Callable[[], bool]) -> float:
        """Returns what every division takes at least, as `DivisionSearch.bound`."""
        if schedule in BY_STAGES_LEFT:
            return self.divisions.bound(schedule, target_s, is_over)
        return self._even(schedule, stages_per_device).bound()

    def _even(self, schedule: Schedule, stages_per_device: int) -> EvenDivisionSearch:
        return EvenDivisionSearch(self.divisions_of(stages_per_device), schedule, stages_per_device)

    def request(self, entry: Entry) -> PlanRequest:
        """Returns the request for the sharding of a stage."""
        (staged, cut), submesh = self._with_stage(entry), self.submeshes[entry.submesh]
        shape = mesh_shape(submesh)
        return stage_request(
            StageFunction(staged, int(entry.start > 0), entry.in_flight, cut.replaced),
            AbstractMesh(tuple(shape.values()), tuple(shape)),
            self.options.cluster.hardware(submesh.kind, shape),
            is_donated=self.is_donated,
            memory_limit_bytes=memory_limit_of(self.options, submesh.kind),
        )

    def _with_stage(self, entry: Entry) -> tuple[StagedStep, CutStep]:
        """Returns the step with the layers of an entry as one stage; the second one unless it is the first."""
        interval = entry.start, entry.end
        if interval not in self._staged:
            self._staged[interval] = self.staged(interval)
        return self._staged[interval]

    def _solve(self, stages_per_device: int, entry: Entry) -> StageLayout:
        staged, cut = self._with_stage(entry)
        try:
            layout = StageVariants(
                self.options,
                staged,
                int(entry.start > 0),
                cut.replaced,
                self.submeshes[entry.submesh],
                entry.in_flight,
                is_donated=self.is_donated,
                time_limit_s=self.course.stage_limit_s(),
                stages_per_device=stages_per_device,
            ).fastest()
            self.course.is_interrupted |= layout.is_interrupted
            return layout
        finally:
            self.course.solved()

    @cached_property
    def layer_bounds(self) -> LayerBounds:
        """The bounds of the layers; raises `ValueError` if an operation cannot be computed in groups."""
        return LayerBounds(self.step, self.chain)

    def least_layer_s(self, submesh: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what a micro-batch and the end of a step take at least in each layer on a submesh, `[L]` both."""
        if submesh not in self._least:
            self._least[submesh] = self._bounded_layer_s(submesh)
        return self._least[submesh]

    def _bounded_layer_s(self, submesh: int) -> tuple[np.ndarray, np.ndarray]:
        shape = mesh_shape(self.submeshes[submesh])
        mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
        return self.layer_bounds.seconds(mesh, self.options.cluster.hardware(self.submeshes[submesh].kind, shape))

    def staged(self, starts: Sequence[int]) -> tuple[StagedStep, CutStep]:
        """Cuts the step before some layers."""
        cut = cut_step(self.step, self.chain.cuts_before(starts))
        return self.programs(cut), cut

    def programs(self, cut: CutStep, copied: Collection[tuple[int, Key]] = ()) -> StagedStep:
        """Returns the programs of the step, cut into stages.

        Args:
          copied: stages with arguments that their micro-batches read from a copy.
        """
        staged = staged_step(cut.parts, cut.cuts, copied)
        if any(spec is not None for spec in self.step.given):
            counts = (1 if s is None else s.num_segments for s in cut.segments.arguments)
            given = [spec for spec, count in zip(self.step.given, counts, strict=True) for _ in range(count)]
            pairs = zip(staged.inputs, given, strict=True)
            staged = replace(staged, given={key: spec for key, spec in pairs if spec is not None})
        return in_groups(staged)
