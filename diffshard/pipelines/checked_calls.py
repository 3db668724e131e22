"""The first call of a pipeline, whose results are held against the step on one device."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from diffshard.base import PlanError
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.planned_pipeline import FoundPipeline
from diffshard.processes import Processes
from diffshard.sharding_search.call import array_paths, split
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
    graph, device = step.traced.function.graph, execution.calls.meshes[0].devices.flat[0]
    two_runs = TwoRuns(
        way="`pipeline`",
        reference="one device",
        refer=on_one_device(whole, device),
        fault=FAULT,
        paths=array_paths("result", step.traced.result.unflatten(shapes)),
        epsilon=coarsest_epsilon(value.dtype for value in graph.values),
        processes=processes,
    )
    donated = [i for i, is_donated in enumerate(donated_arrays(options, args, kwargs)) if is_donated]
    return step.traced.result.unflatten(two_runs.results(run, donated, arrays))
