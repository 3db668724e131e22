"""A training step that runs as a pipeline: searched, compiled and run for the types of its arguments."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diffshard.base import InfeasibleError
from diffshard.live_progress import LiveLine, live_line
from diffshard.pipelines.calls import (
    batches_of,
    check_can_be_held,
    check_static,
    checked_call,
    flat_steps,
    static_call,
    without_static,
)
from diffshard.pipelines.decisions import program_facts, request_facts
from diffshard.pipelines.delayed_gradients import DelayedStep, current_version, delayed, has_versions
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.loss_limits import MeasuredDelay, measured_delays
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.planned_pipeline import FoundPipeline, with_bound
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.page import format_pipeline_page
from diffshard.pipelines.search import find_pipeline
from diffshard.plans.page_elements import NOT_PLANNED, planned_function_element
from diffshard.plans.printing import format_bytes, format_count, format_s
from diffshard.processes import Processes, errors_for_all, processes_of
from diffshard.sharding_search.argument_names import positional_names, signature_of
from diffshard.sharding_search.call import array_types, jax_settings, split
from diffshard.sharding_search.fingerprints import check_facts
from diffshard.sharding_search.mesh_candidates import mesh_of_all

PlanT = TypeVar("PlanT", bound=PipelinePlanData)
FindPipeline = Callable[[PipelineOptions, Sequence[Any], Mapping[str, Any], Processes, LiveLine], FoundPipeline]
"""Finds a pipeline for the arguments of a call, as `find_pipeline` does."""


class ArrayPlace(NamedTuple):
    """Where an array of the arguments is kept.

    Attributes:
      sharding: on the mesh of the stage that keeps it; of several stages that of the first one, with the whole array.
      is_replaced: whether a result replaces it in the next call.
    """

    sharding: NamedSharding
    is_replaced: bool


@dataclass
class _Prepared:
    """A pipeline that runs calls with arrays of some types.

    Attributes:
      execution: its programs on devices; None until the first call.
      is_checked: whether its results were held against one device.
    """

    found: FoundPipeline
    execution: StagedExecution | None = None
    is_checked: bool = False


class PipelinedFunction(Generic[PlanT]):
    """A training step that runs as a pipeline; made by `diffshard.search(fn, cluster, pipeline=...)`.

    Args:
      options: what was asked for.
      kind: the class of its plans.
      find: finds a pipeline for the arguments of a call.
    """

    def __init__(self, options: PipelineOptions, kind: type[PlanT], find: FindPipeline = find_pipeline):
        check_static(options)
        self._has_static = bool(options.static_argnums or options.static_argnames)  # their values come with calls
        self._has_limit = options.pipeline.loss_limit is not None  # what is within it is known when it was measured
        self._delays: tuple[MeasuredDelay, ...] | None = None
        self.options = options if self._has_static or self._has_limit else _delayed(options)
        self._kind, self._find = kind, find
        self._prepared: dict[Any, _Prepared] = {}
        self._bound: dict[Any, PipelinedFunction[PlanT]] = {}  # by static arguments, or types of arrays

    def plan(self, *args: Any, **kwargs: Any) -> PlanT:
        """Returns the plan for arguments (arrays or `jax.ShapeDtypeStruct`), searched once for each set of shapes.

        Raises:
          InfeasibleError: no pipeline fits the memory.
          TimeoutError: the time limit ended the search before anything was found, and something may fit.
          TypeError: it is called under `jax.jit` or another transformation of JAX.
          ValueError: no number of micro-batches divides the batch, or the step cannot be cut; names the operation.
        """
        if self._has_static or self._has_limit:
            own, args, kwargs = self._bound_to(args, kwargs)
            return own.plan(*args, **kwargs)
        self._check_outside(args, kwargs)
        return self._plan_of(self._prepare(*self._with_versions(args, kwargs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step; arrays are copied to the stages that keep them.

        Leaves of the result that several stages keep a part of, such as stacked weights of layers, are `StagedArray`.
        With the schedule "2bw" weights are `DelayedArray`, of arrays or of `StagedArray`.

        Raises:
          TypeError: it is called under `jax.jit`, `jax.grad` or another transformation of JAX, or with weights in two
            versions though its gradients are not delayed.
          ValueError: the cluster is only described, without devices.
          StageError: a program of a stage failed; names the stage.
          NumbersError: the first results are held against one device, and differ.
        """
        if self._has_static or self._has_limit:
            own, args, kwargs = self._bound_to(args, kwargs)
            return own(*args, **kwargs)
        self._check_call(args, kwargs)
        args, kwargs = self._with_versions(args, kwargs)
        kwargs = _sorted(kwargs)
        execution, prepared = self.execution(*args, **kwargs), self._prepare(args, kwargs)
        if self.options.checks_numbers and not prepared.is_checked:
            result = checked_call(self.options, prepared.found, execution, args, kwargs, self._processes)
            prepared.is_checked = True
            return result
        step = prepared.found.step
        return step.result(execution(step.flat_arguments(split((args, kwargs))[0])))

    def steps(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Runs a step for each batch; with the schedule "2bw" each begins before the one before it has ended.

        >>> for state, loss in step.steps(state, batches):
        >>>     print(loss)

        Arguments are those of a call, but the ones that have the batch (`Pipeline.batch_argnums`) are iterables of
        batches of equal shapes. What a result of a step replaces, such as the state, goes from each step to the next.

        Only calls are held against one device where that is asked for.

        Yields:
          What calls return, step by step. It reads the batch of the next step first, and starts that step.

        Raises:
          TypeError, ValueError: as a call; or an argument is no iterable, or a batch has other shapes than the first.
          StageError: a program of a stage failed; names the stage.
        """
        if self._has_static:
            own, args, kwargs = self._bound_to(args, kwargs)
            return own.steps(*args, **kwargs)
        iterables = batches_of(
            positional_names(signature_of(self.options.fn)), self.options.pipeline.batch, args, kwargs
        )
        batches = zip(*iterables.values(), strict=True)
        return self._steps(args, kwargs, (dict(zip(iterables, batch, strict=True)) for batch in batches))

    def _steps(self, args: Any, kwargs: Any, batches: Iterator[dict[Any, Any]]) -> Iterator[Any]:
        for first in batches:
            args = tuple(first.get(n, x) for n, x in enumerate(args))
            kwargs = {name: first.get(name, x) for name, x in kwargs.items()}
            if self._has_limit:
                yield from self._bound_to(args, kwargs)[0]._steps(args, kwargs, itertools.chain([first], batches))
                return
            self._check_call(args, kwargs)
            args, kwargs = self._with_versions(args, kwargs)
            execution, found = self.execution(*args, **kwargs), self._prepare(args, kwargs).found
            flat = flat_steps(found.step, args, _sorted(kwargs), batches)
            del first, args, kwargs
            for results in execution.steps(found.plan.overlap, flat):
                yield found.step.result(results)
            return

    def execution(self, *args: Any, **kwargs: Any) -> StagedExecution:
        """Returns the execution that runs calls with such arguments: its programs, its copies, and `wait`."""
        if self._has_static or self._has_limit:
            own, args, kwargs = self._bound_to(args, kwargs)
            return own.execution(*args, **kwargs)
        args, kwargs = self._with_versions(args, kwargs)
        prepared = self._prepare(args, kwargs)
        if prepared.execution is None:
            prepared.execution = self._execution(args, kwargs, prepared.found)
        return prepared.execution

    def places(self, *args: Any, **kwargs: Any) -> list[ArrayPlace]:
        """Returns where each array of the arguments is kept, in the order in which JAX flattens them.

        With the schedule "2bw" the arguments are those of the first step, in which weights have all their versions.
        """
        if self._has_static or self._has_limit:
            own, args, kwargs = self._bound_to(args, kwargs)
            return own.places(*args, **kwargs)
        args, kwargs = self._with_versions(args, kwargs)
        execution, step = self.execution(*args, **kwargs), self._prepare(args, kwargs).found.step
        found, replaced_by = [], step.parts.replaced_by
        for position, segments in zip(step.segments.positions(), step.segments.arguments, strict=True):
            sharding = execution.place(position)
            if segments is not None:  # there is no sharding over the devices of several stages
                sharding = NamedSharding(sharding.mesh, PartitionSpec())
            found.append(ArrayPlace(sharding, replaced_by[position] is not None))
        return found

    def _bound_to(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "tuple[PipelinedFunction[PlanT], tuple[Any, ...], dict[str, Any]]":
        """Returns the function for the static arguments of a call, or for its delay, and the other arguments.

        Raises:
          TypeError: a static argument is not hashable.
          ValueError: no schedule is within the limit on the loss.
        """
        if self._has_limit:
            self._check_outside(args, kwargs)
            tree = current_version((tuple(args), _sorted(kwargs)))
            arrays, structure = split(tree)
            key = structure, array_types(arrays), jax_settings()
            if key not in self._bound:
                self._bound[key] = self._fastest_within_limit(*tree)
            return self._bound[key], tuple(args), dict(kwargs)
        call = static_call(self.options, args, kwargs)
        if call.key not in self._bound:
            self._bound[call.key] = PipelinedFunction(without_static(self.options, call.values), self._kind, self._find)
        return self._bound[call.key], call.args, call.kwargs

    def _fastest_within_limit(self, args: Sequence[Any], kwargs: dict[str, Any]) -> "PipelinedFunction[PlanT]":
        """Returns the function of the fastest pipeline whose delay raises the loss by no more than is allowed."""
        options, what = self.options, "measure delayed gradients"
        limit, steps = options.pipeline.loss_limit, options.pipeline.predicted_step_counts
        assert limit is not None
        if self._delays is None:
            self._delays = self._processes.shared(
                what, lambda: measured_delays(options.fn, limit, steps), kind=tuple[MeasuredDelay, ...]
            )
        pipelines = options.pipeline.within_limit(self._delays)
        share_s = None if options.time_limit_s is None else options.time_limit_s / len(pipelines)
        found, refused = [], None
        for pipeline in pipelines:
            own = PipelinedFunction(replace(options, pipeline=pipeline, time_limit_s=share_s), self._kind, self._find)
            try:
                found.append((own._prepare(*own._with_versions(args, kwargs)), own))
            except InfeasibleError as error:
                refused = error
        if not found:
            assert refused is not None
            raise refused
        best, own = min(found, key=lambda pair: pair[0].found.plan.step_s)
        note = f"Increases of the loss by delayed gradients: {'; '.join(map(str, self._delays))}."
        plan = with_bound(best.found.plan, min(one.found.plan.lower_bound_s for one, _ in found))
        best.found = best.found._replace(plan=replace(plan, notes=(*plan.notes, note)))
        return own

    @property
    def _plans(self) -> list[PlanT]:
        own = [self._plan_of(prepared) for prepared in self._prepared.values()]
        return own + [plan for bound in self._bound.values() for plan in bound._plans]

    def _plan_of(self, prepared: _Prepared) -> PlanT:
        plan = prepared.found.plan
        return self._kind(**{item.name: getattr(plan, item.name) for item in fields(plan)})

    def _check_outside(self, args: Any, kwargs: Any) -> None:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            name = getattr(self.options.fn, "__name__", "function")
            raise TypeError(
                f"{name} as a pipeline runs several programs on different devices, so that it cannot be planned or "
                "called under `jax.jit`, `jax.grad`, `jax.vmap` or another transformation. Call it outside of them, "
                "and put gradients inside of the step."
            )

    def _check_call(self, args: Any, kwargs: Any) -> None:
        self._check_outside(args, kwargs)
        if not isinstance(self.options.fn, DelayedStep) and has_versions((args, kwargs)):
            raise TypeError(
                "The arguments have weights in two versions (`DelayedArray`), which only the schedule '2bw' and "
                "`diffshard.pipelines.delayed` take. Give `diffshard.pipelines.current_version(state)`."
            )
        if not self.options.cluster.devices:
            raise ValueError(
                "`cluster` is only described: it can be planned for, not run on. Give "
                "`diffshard.Cluster.from_devices(jax.devices())`."
            )

    def __repr__(self) -> str:
        return f"<PipelinedFunction {self._headline()}, {format_count(len(self._plans), 'plan')}>"

    def _repr_html_(self) -> str:
        plans = self._plans
        advice = "" if plans else NOT_PLANNED
        return planned_function_element(
            self._headline(), advice, [(_page_title(plan), format_pipeline_page(plan)) for plan in plans]
        )

    def _headline(self) -> str:
        name, cluster = getattr(self.options.fn, "__name__", "function"), self.options.cluster
        kinds = ", ".join(f"{hosts.count} x {hosts.devices} {hosts.name}" for hosts in cluster.kinds)
        return f"{name} as a pipeline on {format_count(cluster.num_devices, 'device')}, {kinds}"

    def _with_versions(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        fn = self.options.fn
        return fn.with_versions(*args, **kwargs) if isinstance(fn, DelayedStep) else (args, kwargs)

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Prepared:
        arrays, structure = split((tuple(args), _sorted(kwargs)))
        key = structure, array_types(arrays), jax_settings()
        if key not in self._prepared:
            self._prepared[key] = _Prepared(self._agreed_pipeline(args, kwargs))
        return self._prepared[key]

    @property
    def _processes(self) -> Processes:
        return processes_of(mesh_of_all(self.options.cluster))

    def _agreed_pipeline(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FoundPipeline:
        """Finds the pipeline, in the first process that owns devices of the cluster; the others get what it found.

        Raises:
          ProcessesError: what they ask for differs, or what they traced, or one of them failed.
        """
        mesh = mesh_of_all(self.options.cluster)
        processes, what = self._processes, "search a pipeline"
        processes.check_alike(what, {**request_facts(self.options), **check_facts(self.options.checks_numbers)})
        if self.options.checks_numbers:
            check_can_be_held(self.options, processes)
        name = getattr(self.options.fn, "__name__", "function")
        with errors_for_all(mesh, what), live_line(f"searching a pipeline of {name}", self.options.progress) as line:
            found = self._find(self.options, args, kwargs, processes, line)
        processes.check_alike("run a pipeline", program_facts(found.staged))
        return found

    def _execution(self, args: Sequence[Any], kwargs: Mapping[str, Any], found: FoundPipeline) -> StagedExecution:
        plans, staged = found.plans, found.staged
        meshes = [stage.mesh for stage in plans.stages if isinstance(stage.mesh, Mesh)]
        return StagedExecution(
            staged,
            meshes,
            found.simulation.graph,
            plans.sharding,
            function_of=plans.function,
            donate=found.step.donated(donated_arrays(self.options, args, kwargs)),
        )


def _delayed(options: PipelineOptions) -> PipelineOptions:
    """Returns the options of the step with delayed gradients, where its pipeline is to have these."""
    (steps,) = options.pipeline.predicted_step_counts
    is_to_be = options.pipeline.is_delayed and not (isinstance(options.fn, DelayedStep) and not steps)
    return replace(options, fn=delayed(options.fn, predicted_steps=steps)) if is_to_be else options


def _page_title(plan: PipelinePlanData) -> str:
    num_bytes = sum(tensor.num_bytes for stage in plan.stages for tensor in stage.arguments)
    stages = format_count(len(plan.stages), "stage")
    return f"Plan for arguments of {format_bytes(num_bytes)} in {stages}: {format_s(plan.step_s)} predicted"


def _sorted(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in sorted(kwargs)}
