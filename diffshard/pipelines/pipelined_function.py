"""A training step that runs as a pipeline: searched, compiled and run for the types of its arguments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from cost.clusters import Cluster
from cost.host_groups import Hosts
from cost.presets import device_and_network
from cost.real_numbers import is_positive, whole_number
from diffshard.live_progress import ProgressDisplay, live_line
from diffshard.pipelines.base import Pipeline, PipelinePlan
from diffshard.pipelines.delayed_gradients import DelayedStep, delayed, has_versions
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.offload_search import check_offload
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.planned_pipeline import FoundPipeline
from diffshard.pipelines.search import find_pipeline
from diffshard.pipelines.shared_choices import program_facts, request_facts
from diffshard.plans.formats import format_bytes, format_count, format_s
from diffshard.plans.notebook import NOT_PLANNED, planned_function_element
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.call import array_types, split
from diffshard.sharding_search.mesh_candidates import mesh_of_all
from diffshard.solving.solve import resolve


@dataclass
class _Prepared:
    """What runs calls with arrays of some types.

    Attributes:
      found: the pipeline.
      execution: its programs on devices; None until the first call.
    """

    found: FoundPipeline
    execution: StagedExecution | None = None


class PipelinedFunction:
    """A training step that runs as a pipeline; made by `diffshard.search(fn, cluster, pipeline=...)`.

    Args:
      options: what was asked for.
    """

    def __init__(self, options: PipelineOptions):
        self.options = options
        self._prepared: dict[Any, _Prepared] = {}

    def plan(self, *args: Any, **kwargs: Any) -> PipelinePlan:
        """Returns the plan for arguments (arrays or `jax.ShapeDtypeStruct`), searched once for each set of shapes.

        Raises:
          InfeasibleError: no pipeline fits the memory.
          ValueError: no number of micro-batches divides the batch, or the step cannot be cut; names the operation.
        """
        return self._prepare(*self._with_versions(args, kwargs)).found.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step; arrays are copied to the stages that keep them.

        Leaves of the result that several stages keep a part of, such as stacked weights of layers, are `StagedArray`.
        With the schedule "2bw" weights are `DelayedArray`, of arrays or of `StagedArray`.

        Raises:
          TypeError: it is called under `jax.jit`, `jax.grad` or another transformation of JAX, or with weights in two
            versions though its gradients are not delayed.
          ValueError: the cluster is only described, without devices.
          StageError: a program of a stage failed; names the stage.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            name = getattr(self.options.fn, "__name__", "function")
            raise TypeError(
                f"{name} as a pipeline runs several programs on different devices, so that it cannot be called under "
                "`jax.jit`, `jax.grad`, `jax.vmap` or another transformation. Call it outside of them, and put "
                "gradients inside of the step."
            )
        if not isinstance(self.options.fn, DelayedStep) and has_versions((args, kwargs)):
            raise TypeError(
                "The arguments have weights in two versions (`DelayedArray`), which only the schedule '2bw' and "
                "`diffshard.delayed` take. Give `diffshard.current_version(state)`."
            )
        if not self.options.cluster.devices:
            raise ValueError(
                "`cluster` is only described: it can be planned for, not run on. Give "
                "`diffshard.Cluster.from_devices(jax.devices())`."
            )
        args, kwargs = self._with_versions(args, kwargs)
        prepared = self._prepare(args, kwargs)
        if prepared.execution is None:
            prepared.execution = self._execution(args, kwargs, prepared.found)
        step = prepared.found.step
        results = prepared.execution(step.flat_arguments(split((args, _sorted(kwargs)))[0]))
        return step.result(results)

    def execution(self, *args: Any, **kwargs: Any) -> StagedExecution:
        """Returns what runs calls with such arguments: its programs, its copies, and `wait`."""
        args, kwargs = self._with_versions(args, kwargs)
        prepared = self._prepare(args, kwargs)
        if prepared.execution is None:
            prepared.execution = self._execution(args, kwargs, prepared.found)
        return prepared.execution

    def __repr__(self) -> str:
        return f"<PipelinedFunction {self._headline()}, {format_count(len(self._prepared), 'plan')}>"

    def _repr_html_(self) -> str:
        plans = [prepared.found.plan for prepared in self._prepared.values()]
        advice = "" if plans else NOT_PLANNED
        return planned_function_element(self._headline(), advice, [(_page_title(plan), plan.html()) for plan in plans])

    def _headline(self) -> str:
        name, cluster = getattr(self.options.fn, "__name__", "function"), self.options.cluster
        kinds = ", ".join(f"{hosts.count} x {hosts.devices} {hosts.name}" for hosts in cluster.kinds)
        return f"{name} as a pipeline on {format_count(cluster.num_devices, 'device')}, {kinds}"

    def _with_versions(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        fn = self.options.fn
        return fn.with_versions(*args, **kwargs) if isinstance(fn, DelayedStep) else (args, kwargs)

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Prepared:
        arrays, structure = split((tuple(args), _sorted(kwargs)))
        key = structure, array_types(arrays)
        if key not in self._prepared:
            self._prepared[key] = _Prepared(self._agreed_pipeline(args, kwargs))
        return self._prepared[key]

    def _agreed_pipeline(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FoundPipeline:
        """Finds the pipeline, in the first process that owns devices of the cluster; the others get what it found.

        Raises:
          ProcessesError: what they ask for differs, or what they traced, or one of them failed.
        """
        mesh = mesh_of_all(self.options.cluster)
        processes, what = processes_of(mesh), "search a pipeline"
        processes.check_alike(what, request_facts(self.options))
        name = getattr(self.options.fn, "__name__", "function")
        with errors_for_all(mesh, what), live_line(f"searching a pipeline of {name}", self.options.progress) as line:
            found = find_pipeline(self.options, args, kwargs, processes, line)
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
            donate=self._donated(args, kwargs, found),
            transfer_of=plans.transfer,
        )

    def _donated(self, args: Sequence[Any], kwargs: Mapping[str, Any], found: FoundPipeline) -> list[int]:
        """Returns the flat arguments of the cut step that are donated and replaced by a result."""
        flags, segments = donated_arrays(self.options, args, kwargs), found.step.segments.arguments
        counts = [1 if s is None else s.num_segments for s in segments]
        of_step = [flag for flag, count in zip(flags, counts, strict=True) for _ in range(count)]
        return [i for i, result in enumerate(found.step.replaced) if result is not None and of_step[i]]


def pipelined(
    fn: Callable[..., Any],
    devices: Any,
    pipeline: Pipeline,
    hardware: Any,
    unused: Mapping[str, Any],
    *,
    progress: ProgressDisplay = "terminal",
    **options: Any,
) -> PipelinedFunction:
    """Returns a training step that runs as a pipeline on devices; its arguments are checked here.

    Args:
      fn: the training step.
      devices: a `Cluster`, JAX devices, or their number.
      pipeline: what may be chosen.
      hardware: the name of a preset; None for clusters, and for that of JAX devices.
      unused: options of `search` that pipelines do not have; they must be None, empty or false.
      progress: as in `search`.
      options: `memory_limit_bytes`, `donate_argnums`, `donate_argnames`, `solver`, `time_limit_s`.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"`pipeline` must be a diffshard.Pipeline, not {pipeline!r}.")
    for name, value in unused.items():
        if value is not None and value != ():
            raise ValueError(f"`{name}` cannot be given together with `pipeline`; got {value!r}.")
    if not callable(fn):
        raise TypeError(f"`fn` must be a function, not {type(fn).__name__}.")
    limit = options.get("memory_limit_bytes")
    if limit is not None and not is_positive(limit):
        raise ValueError(f"`memory_limit_bytes` must be a positive number, not {limit!r}.")
    time_limit_s = options.get("time_limit_s")
    if time_limit_s is not None and not is_positive(time_limit_s):
        raise ValueError(f"`time_limit_s` must be a positive number of seconds or None, not {time_limit_s!r}.")
    if progress not in get_args(ProgressDisplay):
        raise ValueError(f"`progress` must be one of {get_args(ProgressDisplay)}, not {progress!r}.")
    numbers, names = _donated_arguments(fn, options.pop("donate_argnums", ()), options.pop("donate_argnames", ()))
    resolve(options["solver"])
    cluster = _cluster(devices, hardware)
    if "offload" in pipeline.residuals:
        check_offload(cluster)
    return PipelinedFunction(
        PipelineOptions(
            fn=delayed(fn) if pipeline.is_delayed else fn,
            cluster=cluster,
            pipeline=pipeline,
            donate_argnums=numbers,
            donate_argnames=names,
            progress=progress,
            **options,
        )
    )


def _donated_arguments(
    fn: Callable[..., Any], numbers: Sequence[Any], names: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns donated arguments by position and by name, those that have both in both, as calls may give them.

    Raises:
      ValueError: the function has no such argument.
    """
    checked = [whole_number(number) for number in numbers]
    if any(number is None or number < 0 for number in checked):
        raise ValueError(f"`donate_argnums` must be positions of arguments, 0 or more, not {tuple(numbers)!r}.")
    found = [number for number in checked if number is not None]
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a built-in function
        return tuple(found), tuple(names)
    kinds = {p.kind for p in parameters.values()}
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    function = getattr(fn, "__name__", "the function")
    for number in found:
        if number >= len(named) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ValueError(
                f"`donate_argnums` {tuple(found)} names a position that the {len(named)} arguments of {function} "
                "do not have."
            )
    for name in names:
        if not isinstance(name, str) or (name not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds):
            raise ValueError(
                f"`donate_argnames` has {name!r}, which is no argument of {function}; it has {', '.join(parameters)}."
            )
    all_names = [*names, *(named[number] for number in found if number < len(named))]
    all_numbers = [*found, *(named.index(name) for name in names if name in named)]
    return tuple(dict.fromkeys(all_numbers)), tuple(dict.fromkeys(all_names))


def _cluster(devices: Any, hardware: Any) -> Cluster:
    """Returns devices as a cluster.

    Raises:
      TypeError, ValueError: they are a mesh, or of no kind that is known.
    """
    if isinstance(devices, Mesh | AbstractMesh):
        raise TypeError(
            "`mesh` cannot be given together with `pipeline`, which divides devices into meshes itself. Give "
            "`devices=jax.devices()` or a `diffshard.Cluster`."
        )
    if isinstance(devices, Cluster):
        if hardware is not None:
            raise ValueError("`hardware` must be None for a Cluster, which has that of its hosts.")
        return devices
    number = whole_number(devices)
    if number is None:
        return Cluster.from_devices(devices, hardware=hardware)
    if not isinstance(hardware, str):
        raise ValueError("`hardware` must be the name of a preset for a number of devices.")
    in_host = device_and_network(hardware)[1].num_devices or number
    if number < 1 or (number > in_host and number % in_host):
        raise ValueError(f"`devices` must be 1 or more, and fill hosts of {in_host}, not {number}.")
    return Cluster([Hosts(max(number // in_host, 1), min(number, in_host), hardware)])


def _page_title(plan: PipelinePlan) -> str:
    num_bytes = sum(tensor.num_bytes for stage in plan.stages for tensor in stage.arguments)
    stages = format_count(len(plan.stages), "stage")
    return f"Plan for arguments of {format_bytes(num_bytes)} in {stages}: {format_s(plan.step_s)} predicted"


def _sorted(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in sorted(kwargs)}
