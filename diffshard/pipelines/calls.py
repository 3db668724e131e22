"""What calls of a pipelined function need before and after its programs run.

Static arguments are taken out: for each set of their values there is a step that does not take them. The results of the
first call are held against the step on one device. Many steps take their flat arguments from those of the first step
and an iterable of batches.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from diffshard.base import PlanError
from diffshard.pipelines.cutting import CutStep
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.planned_pipeline import FoundPipeline
from diffshard.processes import Processes
from diffshard.sharding_search.argument_names import positional_names, signature_of
from diffshard.sharding_search.call import array_paths, array_types, split
from diffshard.sharding_search.numbers_check import FAULT, TwoRuns, coarsest_epsilon, on_one_device
from diffshard.staged_array import StagedArray

Name = int | str
"""The position of an argument, or its name where it is given by name."""


class StaticCall(NamedTuple):
    """A call whose static arguments are taken out.

    Attributes:
      values: the static arguments, by the position or the name by which they are given.
    """

    values: dict[Name, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that calls of the same step share; 1 and 1.0 are equal, but different constants."""
        return tuple((place, _exact(value)) for place, value in sorted(self.values.items(), key=str))


def _exact(value: Any) -> Any:
    """Returns a key that is equal for values of one type, sign and contents only; tuples are looked into."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_exact, value))
    return type(value), value, repr(value) if isinstance(value, float | complex) else ""


def static_call(options: PipelineOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StaticCall:
    """Takes the static arguments out of a call."""
    by_position = {n: args[n] for n in options.static_argnums if n < len(args)}
    by_name = {name: kwargs[name] for name in options.static_argnames if name in kwargs}
    for place, value in {**by_position, **by_name}.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"The static argument {place!r} is {type(value).__name__}, which is not hashable. Give a value that "
                "is, such as a tuple or a frozen dataclass."
            ) from None
    return StaticCall(
        {**by_position, **by_name},
        tuple(x for n, x in enumerate(args) if n not in by_position),
        {name: x for name, x in kwargs.items() if name not in by_name},
    )


def without_static(options: PipelineOptions, values: Mapping[Name, Any]) -> PipelineOptions:
    """Returns the options of the step that does not take static arguments, which have these values."""
    names = positional_names(signature_of(options.fn))
    taken = {names.index(place) if place in names else place for place in values}

    def moved(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(n - sum(isinstance(s, int) and s < n for s in taken) for n in positions)

    batch = options.pipeline.batch
    return replace(
        options,
        fn=_bound(options.fn, values),
        pipeline=replace(options.pipeline, batch_argnums=moved(batch.argnums)),
        donate_argnums=moved(options.donate_argnums),
        static_argnums=(),
        static_argnames=(),
    )


def check_static(options: PipelineOptions) -> None:
    """Checks that static arguments have no batch, and are none where a loss is measured."""
    names, batch = positional_names(signature_of(options.fn)), options.pipeline.batch
    static = {_name(names, place) for place in (*options.static_argnums, *options.static_argnames)}
    for name in static & {_name(names, place) for place in (*batch.argnums, *batch.argnames)}:
        raise ValueError(f"`static_argnums` and `Pipeline.batch_argnums` share the argument {name!r}.")
    if static and options.pipeline.loss_limit is not None:
        raise ValueError(
            "`Pipeline.loss_limit` cannot be given together with static arguments, such as the graphs of nnx modules, "
            f"which its runs do not have; got {sorted(map(str, static))}. Bind them by `functools.partial`, or split "
            "modules into graph and state."
        )


def _name(names: Sequence[str], place: Name) -> Name:
    return names[place] if isinstance(place, int) and place < len(names) else place


def _bound(fn: Callable[..., Any], values: Mapping[Name, Any]) -> Callable[..., Any]:
    """Returns a function without some of its arguments, which have these values."""
    by_position = sorted((n, value) for n, value in values.items() if isinstance(n, int))
    by_name = {name: value for name, value in values.items() if isinstance(name, str)}

    @functools.wraps(fn)
    def bound(*args: Any, **kwargs: Any) -> Any:
        whole = list(args)
        for n, value in by_position:
            whole.insert(n, value)
        return fn(*whole, **kwargs, **by_name)

    signature = signature_of(fn)
    if signature is not None:
        names = positional_names(signature)
        taken = {*by_name, *(names[n] for n, _ in by_position if n < len(names))}
        left = [p for name, p in signature.parameters.items() if name not in taken]
        if all(p.kind is not inspect.Parameter.VAR_POSITIONAL for p in left):
            vars(bound)["__signature__"] = signature.replace(parameters=left)
    return bound


def check_can_be_held(options: PipelineOptions, processes: Processes) -> None:
    """Checks that one device has room for what all of them compute, as far as that is known."""
    if not options.cluster.devices:
        raise ValueError(
            '`check` "numbers" holds the first call against one device, and the cluster of `pipeline` is only '
            "described, so that nothing runs. Give `diffshard.Cluster.from_devices(jax.devices())`."
        )
    if options.pipeline.batch_means != "whole":
        raise ValueError(
            '`check` "numbers" cannot be given together with `Pipeline(batch_means="each_microbatch")`: one device has '
            "the means of the whole batch, and so other gradients."
        )
    if not processes.is_one:
        raise PlanError(
            'By `check` "numbers" a `pipeline` is held against one device, which the devices of several processes have '
            "no room for. Check in one process."
        )


def checked_call(
    options: PipelineOptions,
    found: FoundPipeline,
    execution: StagedExecution,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    processes: Processes,
) -> Any:
    """Runs a step as a pipeline and on one device, and returns the pipeline's result.

    Args:
      kwargs: of the step, in order of their names.
      processes: those that run it; one.

    Raises:
      NumbersError: a result differs by more than rounding.
      StageError: as the call of an execution.
    """
    step, (arrays, structure) = found.step, split((tuple(args), kwargs))

    def whole(*flat: Any) -> list[Any]:
        new_args, new_kwargs = structure.unflatten(flat)
        return split(options.fn(*new_args, **new_kwargs))[0]

    def run(*flat: Any) -> list[Any]:
        groups = step.segments.grouped_results(execution(step.flat_arguments(flat)))
        return [group[0] if segments is None else StagedArray(group, segments.dim) for segments, group in groups]

    shapes = [jax.ShapeDtypeStruct((), "float32")] * len(step.segments.results)  # only the names of results are read
    graph, device = step.function.graph, execution.calls.meshes[0].devices.flat[0]
    two_runs = TwoRuns(
        way="`pipeline`",
        reference="one device",
        refer=on_one_device(whole, device),
        fault=FAULT,
        paths=array_paths("result", step.call.result.unflatten(shapes)),
        epsilon=coarsest_epsilon(value.dtype for value in graph.values),
        processes=processes,
    )
    donated = [i for i, is_donated in enumerate(donated_arrays(options, args, kwargs)) if is_donated]
    return step.call.result.unflatten(two_runs.results(run, donated, arrays))


def batches_of(
    names: Sequence[str], batch: BatchArguments, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[Name, Iterable[Any]]:
    """Returns the arguments that have the batch, each an iterable of batches."""
    of_batch = {names[n] for n in batch.argnums if n < len(names)} | set(batch.argnames)
    found: dict[Name, Any] = {
        n: x for n, x in enumerate(args) if n in batch.argnums or (n < len(names) and names[n] in of_batch)
    }
    found.update({name: x for name, x in kwargs.items() if name in of_batch})
    if not found:
        wanted = ", ".join(map(str, (*batch.argnums, *batch.argnames)))
        raise ValueError(
            f"`steps` was not given the argument that has the batch ({wanted}, by `Pipeline.batch_argnums` and "
            "`batch_argnames`). Give it as an iterable of batches."
        )
    for name, iterable in found.items():
        if hasattr(iterable, "shape") or isinstance(iterable, str | Mapping) or not isinstance(iterable, Iterable):
            raise TypeError(
                f"Argument {name} of `steps` must be an iterable of batches, such as a list or a generator, not one "
                f"batch of type {type(iterable).__name__}. Call the function itself for one step."
            )
    return found


def flat_steps(
    step: CutStep, args: Sequence[Any], kwargs: Mapping[str, Any], batches: Iterator[Mapping[Name, Any]]
) -> Iterator[list[Any]]:
    """Yields the flat arguments of each step, those of all but the first one without what results replace.

    Args:
      kwargs: of the first step, by name, in order of their names.
      batches: the arguments of the other steps that have the batch.
    """
    flat = step.flat_arguments(split((tuple(args), kwargs))[0])
    given: dict[Name, Any] = {**dict(enumerate(args)), **kwargs}
    arrays_of = {name: split(argument) for name, argument in given.items()}
    types = {name: (structure, array_types(arrays)) for name, (arrays, structure) in arrays_of.items()}
    numbers = {name: len(arrays) for name, (arrays, _) in arrays_of.items()}
    is_replaced = [result is not None for result in step.parts.replaced_by]
    del args, kwargs, given, arrays_of
    yield flat
    flat = [None if is_old else array for array, is_old in zip(flat, is_replaced, strict=True)]
    positions = [*step.segments.positions(), len(flat)]
    for count, batch in enumerate(batches, 2):
        first = 0
        for name, number in numbers.items():
            segments = step.segments.arguments[first : first + number]
            if name in batch:
                arrays, structure = split(batch[name])
                if (structure, array_types(arrays)) != types[name]:
                    raise ValueError(
                        f"Argument {name} of `steps` must have batches of equal shapes and types; that of step {count} "
                        f"has {array_types(arrays)}, that of the first step {types[name][1]}. Pad it or leave it out."
                    )
                parts = [[a] if s is None else s.split(a) for a, s in zip(arrays, segments, strict=True)]
                start = positions[first]
                flat[start : start + sum(map(len, parts))] = [part for divided in parts for part in divided]
            first += number
        yield list(flat)
