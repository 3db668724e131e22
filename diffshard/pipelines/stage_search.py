"""The search for the sharding of one stage of a pipeline on one submesh.

The layouts of stages that were solved hold for others with equal layers.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from cost.base import Hardware
from cost.evaluation import evaluate
from cost.memory import least_memory
from diffshard.base import InfeasibleError
from diffshard.pipelines.options import STAGE_AXES
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.stage_function import StageFunction, weigh
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.planning import fastest_choice
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import step_s
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.partition_specs import NamedSpec, checked_axes_of, named_spec, num_parts
from search_spaces.pipelines.stage_labels import Key
from search_spaces.pipelines.stage_programs import copy_of
from search_spaces.pipelines.step_parts import num_bytes
from search_spaces.sharding.base import Layout
from search_spaces.sharding.space import ShardingSpace

_EQUAL_SHARE = 1e-4
"""More than the seconds of equal stages that keep other numbers of micro-batches differ, relatively."""
STAGE_GAP = 0.005
"""The gap at which the search for the sharding of a stage ends, chosen by hand: stages of a GPT that programs were then
planned for differed by more from their programs together."""
BACKWARD_SHARE = 2 / 3
"""The part of a micro-batch's seconds that its backward pass takes, before the programs are planned: of the
three products of a layer with weights, two are in the backward pass."""


class StageMemoryError(InfeasibleError):
    """A stage that does not fit the memory limit.

    Attributes:
      is_proven: whether no sharding fits; else the solver found none.
    """

    def __init__(self, message: str, *, is_proven: bool = False):  # as pickle calls it
        super().__init__(message)
        self.is_proven = is_proven


@dataclass(frozen=True)
class StageLayout:
    """How a stage runs on a mesh.

    Attributes:
      seconds: predicted, of a whole step: all micro-batches and the end.
      end_s: the part of `seconds` that is the end of the step.
      residual_bytes: of each device, what a micro-batch leaves there for its backward pass.
      specs: by key, of arguments and of what programs leave.
      choice: of the space's nodes; a stage of equal equations takes it over without a search.
      recomputed: the steps of the forward program that run again in the backward program (`residuals.StageResiduals`).
      recomputed_bytes: of the arrays that this spares in each micro-batch, as a whole.
      num_residuals: arrays that the backward program of a micro-batch reads of its forward program.
      offloaded: positions, among the stage's residuals (`residuals.residuals_of`), of those that are offloaded.
      offloaded_bytes: of each device, what a micro-batch leaves on the host for its backward pass.
      offload_s: of a micro-batch, for the copies to the host; those back take as long. `seconds` has both.
      is_limited: whether the memory may have ruled out a faster layout.
      is_interrupted: whether Ctrl-C ended its search.
    """

    seconds: float
    lower_bound_s: float
    end_s: float
    peak_bytes: float
    residual_bytes: float
    specs: dict[Key, NamedSpec]
    choice: tuple[int, ...] = ()
    in_flight: int = 1
    recomputed: tuple[int, ...] = ()
    recomputed_bytes: float = 0.0
    num_residuals: int = 0
    offloaded: tuple[int, ...] = ()
    offloaded_bytes: float = 0.0
    offload_s: float = 0.0
    is_limited: bool = False
    is_interrupted: bool = False

    def copied(self, arguments: Iterable[Key]) -> list[Key]:
        """Returns the arguments that are resharded once, when a step begins, for all micro-batches."""
        return [key for key in arguments if key in self.specs and self.specs[key] != self.specs[copy_of(key)]]


def search_stage(
    function: StageFunction,
    mesh: AbstractMesh,
    hardware: Hardware,
    memory_limit_bytes: float,
    *,
    is_donated: bool,
    known: StageLayout | None = None,
    **solving: Any,
) -> StageLayout:
    """Finds how a stage runs on a mesh.

    Args:
      is_donated: whether results may take the memory of the arguments that they replace.
      known: the layout of a stage that may have equal equations; then it is taken over, and nothing is solved.
      solving: the options `solver`, `key` and `time_limit_s` of the search for a sharding.
    """
    request = stage_request(
        function,
        mesh,
        hardware,
        is_donated=is_donated,
        memory_limit_bytes=memory_limit_bytes,
        **solving,
    )
    options, space = request.options, request.space
    least_bytes = float(np.max(least_memory(space.problem)[1]))
    if least_bytes > memory_limit_bytes:
        raise StageMemoryError(f"A stage needs at least {least_bytes:,.0f} bytes.", is_proven=True)
    choice = None if known is None else _taken_over(known, function, space)
    is_interrupted = False
    if known is not None and choice is not None:
        bound = known.lower_bound_s
    else:
        try:
            solution = fastest_choice(request, options.deadline(), stop_gap=STAGE_GAP)
        except InfeasibleError as error:
            raise StageMemoryError(str(error), is_proven=False) from None
        is_interrupted = solution.status == "interrupted"
        choice, bound = solution.choice, max(solution.lower_bound - space.most_preference_s, 0.0)
    summary = space.summarize(choice)
    seconds = step_s(summary.prediction)
    bound = min(bound, seconds)
    of_end = [not function.is_each(vertex) for vertex in space.graph.vertices]
    end_s = float(summary.prediction.compute_s[of_end].sum())
    end_s += sum(t.seconds for t in summary.prediction.transfers if of_end[t.vertex])
    end_s = min(end_s, seconds)
    specs = _specs(function, space, summary.layout, options.axis_names)
    sizes = dict(mesh.shape)
    residual_bytes = sum(
        num_bytes(function.staged.avals[key]) / num_parts(specs.get(key, ()), sizes) for key in function.queued
    )
    return StageLayout(
        seconds,
        bound,
        end_s,
        summary.peak_bytes,
        residual_bytes,
        specs,
        tuple(map(int, choice)),
        function.in_flight,
        num_residuals=len(function.residuals),
        is_interrupted=is_interrupted,
    )


def _taken_over(known: StageLayout, function: StageFunction, space: ShardingSpace) -> tuple[int, ...] | None:
    """Returns the choice of a stage that a known one makes, if both have equal equations; None if it is another stage.

    The known stage may keep another number of micro-batches: then it has fewer or more arguments, of the residuals that
    the others leave, and its last ones stand for the rest. The choice has to fit and to take as long as the known one.
    """
    choice, more = list(known.choice), function.in_flight - known.in_flight
    if more:
        if min(known.in_flight, function.in_flight) < 2:
            return None
        size = len(function.queued)
        end = len(function.kept) + len(function.sums) + (known.in_flight - 1) * size
        last = choice[end - size : end]
        choice = choice[: end + min(more, 0) * size] + last * max(more, 0) + choice[end:]
    costs = space.problem.node_cost
    if len(choice) != len(costs) or any(c >= len(cost) for c, cost in zip(choice, costs, strict=True)):
        return None
    summary = space.summarize(choice)
    known_s = known.seconds - 2 * function.staged.num_microbatches * known.offload_s  # without the copies to the host
    is_equal = abs(step_s(summary.prediction) - known_s) <= _EQUAL_SHARE * known_s
    return tuple(choice) if is_equal and evaluate(space.problem, choice).feasible else None


def stage_request(
    function: StageFunction, mesh: AbstractMesh, hardware: Hardware, *, is_donated: bool, **options: Any
) -> PlanRequest:
    """Returns the request for the sharding of a stage; `options` are further ones of the search."""
    of_search = Options(
        fn=function,
        mesh=mesh,
        hardware=hardware,
        donate_argnums=(0, 1, 2, 4) if is_donated else (1, 2, 4),
        in_shardings=_given_to(function, mesh),
        progress="none",
        **options,
    )
    traced = trace_function(of_search, function.shapes)
    weigh(function, traced.graph, mesh)
    return PlanRequest(of_search, traced, space_of(of_search, traced), 0.0)


def _given_to(function: StageFunction, mesh: AbstractMesh) -> Any:
    """Returns the shardings that the user gives to arguments that a stage keeps, on the axes that its mesh has."""
    staged = function.staged
    if not staged.given:
        return None
    axes = {str(name): size for name, size in mesh.shape.items()}

    def given(key: Key) -> PartitionSpec | None:
        spec = staged.given.get(key) if staged.home_of[key] == function.stage else None
        if spec is None:
            return None
        shape = staged.avals[key].shape
        by_dim = checked_axes_of(spec, len(shape), STAGE_AXES, "an argument, whose sharding is given,")
        known = [None if names is None else tuple(name for name in names if name in axes) for names in by_dim]
        for size, names in zip(shape, known, strict=True):
            if size % prod(axes[name] for name in names or ()):
                raise StageMemoryError(
                    f"An argument of shape {tuple(shape)} cannot be split as {spec}, which is given, on a mesh {axes}.",
                    is_proven=True,
                )
        return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if names is None else names or None for names in known))

    return [given(key) for key in function.kept], None, None, [given(key) for key in function.read], None


def _specs(
    function: StageFunction, space: ShardingSpace, layout: Layout, axis_names: tuple[str, ...]
) -> dict[Key, NamedSpec]:
    """Returns the specs of arguments and of all arrays that have a name."""
    held = [key for _ in range(function.in_flight - 1) for key in function.queued]
    keys = (*function.kept, *(a.total for a in function.sums), *held, *function.read, *function.received)
    specs = {key: named_spec(spec, axis_names) for key, spec in zip(keys, layout.input_specs, strict=True)}
    for key, vertex in zip(keys, space.graph.inputs, strict=True):
        specs[copy_of(key)] = named_spec(layout.value_specs[vertex.results[0].id], axis_names)
    keys_of_names = {name: key for key, name in function.names.items()}
    for vertex in space.graph.operations():
        if vertex.equation is not None and vertex.primitive == "name":
            key = keys_of_names.get(vertex.equation.params["name"])
            if key is not None:
                specs[key] = named_spec(layout.value_specs[vertex.results[0].id], axis_names)
    return specs


class Entry(NamedTuple):
    """A stage that may be solved."""

    start: int
    end: int
    submesh: int
    in_flight: int


@dataclass
class FoundDivision:
    """A division of the layers into stages, with the shardings found for each.

    Attributes:
      bound_s: the schedule's lower bound for the stages' seconds.
    """

    stages: tuple[Stage, ...]
    entries: tuple[Entry, ...]
    layouts: tuple[StageLayout, ...]
    bound_s: float


UNKNOWN: Any = object()
FREE_SHARE = 0.95
"""A plan that needs less of the memory is taken to be the best one without a limit."""
SolveEntry = Callable[[Entry], StageLayout]
Kind = tuple[tuple[Hashable, ...], int]
"""Of a stage: its layers, equal for equal ones, and its submesh."""


@dataclass
class _Known:
    by_kind: dict[Kind, dict[int, StageLayout | None]] = field(default_factory=dict)  # and micro-batches kept
    solved: list[tuple[Entry, StageLayout]] = field(default_factory=list)


class SolvedStages:
    """The stages that a search has solved.

    Args:
      signatures: `[L]`, equal for equal layers.
      solve: solves an entry; raises `StageMemoryError` where it does not fit.
    """

    def __init__(self, signatures: Sequence[Hashable], memory_limits_bytes: Sequence[float], solve: SolveEntry):
        self._signatures, self._limits, self._solve = tuple(signatures), memory_limits_bytes, solve
        self._layouts: dict[tuple[Kind, int], StageLayout | None] = {}
        self._all = self._known = _Known()
        self._of_parts: dict[Hashable, _Known] = {}
        self.proven_not_to_fit: set[tuple[Kind, int]] = set()

    @contextmanager
    def of_part(self, part: Hashable) -> Iterator[None]:
        """Knows only what was solved for a part of the devices, until the context ends."""
        self._known = self._of_parts.setdefault(part, _Known())
        try:
            yield
        finally:
            for kind, layouts in self._known.by_kind.items():
                self._all.by_kind.setdefault(kind, {}).update(layouts)
            self._known = self._all

    @property
    def by_kind(self) -> dict[Kind, dict[int, StageLayout | None]]:
        """The layouts by kind and micro-batches kept; None where nothing fits."""
        return self._known.by_kind

    @property
    def solved(self) -> list[tuple[Entry, StageLayout]]:
        """The entries that were solved and fit, with their layouts."""
        return self._known.solved

    def kind(self, entry: Entry) -> Kind:
        """Returns the key that an entry shares with those that have its layout."""
        return self._signatures[entry.start : entry.end], entry.submesh

    def layout(self, entry: Entry) -> StageLayout | None:
        """Returns the layout of a stage, solved or known from one with equal layers; None where it does not fit."""
        known = self.known(entry)
        if known is not UNKNOWN:
            return known
        key = self.kind(entry), entry.in_flight
        if key not in self._layouts:
            try:
                self._layouts[key] = self._solve(entry)
            except StageMemoryError as error:
                self._layouts[key] = None
                if error.is_proven:
                    self.proven_not_to_fit.add(key)
        layout = self._layouts[key]
        self.by_kind.setdefault(key[0], {})[entry.in_flight] = layout
        if layout is not None:
            self.solved.append((entry, layout))
        return layout

    def layouts(self, entries: Iterable[Entry]) -> tuple[StageLayout, ...] | None:
        """Returns the layouts of stages; None if one of them does not fit."""
        found: list[StageLayout] = []
        for entry in entries:
            layout = self.layout(entry)
            if layout is None:
                return None
            found.append(layout)
        return tuple(found)

    def known(self, entry: Entry) -> Any:
        """Returns the layout of a stage, None if it does not fit, or `UNKNOWN`.

        A layout that leaves memory free is the best one for as many micro-batches as fit; one that the memory
        may have limited is taken for more of them too, but not for fewer.
        """
        by_in_flight = self.by_kind.get(self.kind(entry), {})
        if entry.in_flight in by_in_flight:
            return by_in_flight[entry.in_flight]
        for in_flight, layout in by_in_flight.items():
            if layout is None and in_flight <= entry.in_flight:
                return None
            is_best = layout is not None and (not layout.is_limited or in_flight <= entry.in_flight)
            room = FREE_SHARE * self._limits[entry.submesh]
            if layout is not None and is_best and layout.peak_bytes < room:
                peak_bytes = layout.peak_bytes + (entry.in_flight - in_flight) * layout.residual_bytes
                if peak_bytes < room:
                    return replace(layout, peak_bytes=peak_bytes)
        return UNKNOWN

    def is_proven_not_to_fit(self, entry: Entry) -> bool:
        """Returns whether no sharding of a stage fits, also because it does not with fewer micro-batches."""
        return any((self.kind(entry), kept) in self.proven_not_to_fit for kept in range(1, entry.in_flight + 1))

    def solved_stages(self) -> Iterator[tuple[int, int, int]]:
        """Yields the first layer, the number of layers and the submesh of what is solved, also for equal layers."""
        for length, p in {(len(signatures), p) for signatures, p in self.by_kind}:
            for start in range(len(self._signatures) - length + 1):
                if self.kind(Entry(start, start + length, p, 1)) in self.by_kind:
                    yield start, length, p
