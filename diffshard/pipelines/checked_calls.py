"""Calls of a pipelined function: the first one, and many steps at once.

The results of the first call are held against the step on one device. Many steps take their flat arguments from those
of the first step and an iterable of batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from diffshard.base import PlanError
from diffshard.pipelines.cutting import CutStep
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.planned_pipeline import FoundPipeline
from diffshard.processes import Processes
from diffshard.sharding_search.call import array_paths, array_types, split
from diffshard.sharding_search.numbers_check import FAULT, TwoRuns, coarsest_epsilon, on_one_device
from diffshard.staged_array import StagedArray


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


Name = int | str
"""Of an argument: its position, or its name where it is given by name."""


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
