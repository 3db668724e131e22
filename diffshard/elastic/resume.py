"""`resume` goes on with a training where its last checkpoint is, on the devices that there are now."""

import math
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from cost.clusters import Cluster
from cost.real_numbers import Count, checked_number
from diffshard.base import PlanError
from diffshard.elastic.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    last_whole_checkpoint,
    remove_unfinished,
    set_aside,
)
from diffshard.elastic.ownership import Ownership
from diffshard.elastic.training import STATE, Training, difference_of, saved_arrays
from diffshard.files import folder_path
from diffshard.front_end import search
from diffshard.pipelines.pipelined_function import PipelinedFunction
from diffshard.pipelines.plan import PipelinePlan
from diffshard.plans.printing import short_name
from diffshard.processes import Processes, errors_for_all, processes_of
from diffshard.sharding_search.call import split
from diffshard.sharding_search.mesh_candidates import mesh_of_all
from diffshard.sharding_search.placing_arrays import FreshState, parameter_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.request import PlanRequest


@overload
def resume(
    directory: str | os.PathLike[str],
    fn: Callable[..., Any],
    mesh: Mesh,
    init: Callable[[], Any],
    *args: Any,
    save_interval_steps: int = 1,
    max_to_keep: int = 3,
    **options: Any,
) -> Training[Plan]: ...


@overload
def resume(
    directory: str | os.PathLike[str],
    fn: Callable[..., Any],
    mesh: Cluster,
    init: Callable[[], Any],
    *args: Any,
    save_interval_steps: int = 1,
    max_to_keep: int = 3,
    **options: Any,
) -> Training[PipelinePlan]: ...


def resume(
    directory: str | os.PathLike[str],
    fn: Callable[..., Any],
    mesh: Mesh | Cluster,
    init: Callable[[], Any],
    *args: Any,
    save_interval_steps: int = 1,
    max_to_keep: int = 3,
    **options: Any,
) -> Training[Plan] | Training[PipelinePlan]:
    """Plans a training step for a mesh and finds the state to go on from; the first start and every later one alike.

    >>> with diffshard.resume("checkpoints", train_step, mesh, init, batch_shapes, save_interval_steps=100) as training:
    ...     state = training.restore()
    ...     for number in range(training.num_steps, 10_000):
    ...         state, loss = training.step(state, batch_of(number))
    ...         training.save(number + 1, state)

    The mesh, the hardware and the options may be others than before. Where nothing has changed the plan of the
    checkpoint is used again. Else the search begins with it. The sizes of arrays, and so the batch, stay the same on
    all meshes, so that the loss goes on to rounding as if nothing had happened.

    Args:
      directory: of the checkpoints, which is made if there is none. All processes see the same one. One job at a time
        writes there: a file says which. The file of a job that was killed counts for nothing on the same machine, and
        on another one if it is not touched for 15 seconds, for which `resume` waits then.
      fn: a training step: it takes the state first, and returns it anew.
      mesh: of the devices that there are; with `pipeline` a `Cluster` of them, all of one process.
      init: makes the state without arguments. It is run only if there is no checkpoint, on all devices, each making
        its own part; else it only says what the pytree and the shapes are.
      *args: the other arguments of `fn`: arrays or `jax.ShapeDtypeStruct`.
      save_interval_steps: the number of steps between two saves; `force=True` saves between them, too.
      max_to_keep: the number of newest checkpoints that are kept.
      **options: as of `diffshard.search`.

    Returns:
      The planned step with its checkpoints; it loads nothing before `restore`.

    Raises:
      CheckpointError: there are checkpoints, but none of them is whole; or the last whole one has another state than
        `init` makes, or was written by a newer version. Nothing is started anew in their place. Or another job writes
        to the directory, or a training of this process that is not closed.
      OSError: the directory cannot be read, made or written to.
      ProcessesError: the processes do not see the same directory, or another one failed.
      TypeError, ValueError: an argument breaks a rule, also one of `search`; no plan fits the memory limit; or `fn`
        does not return the state.
    """
    is_pipeline, devices = options.get("pipeline") is not None, mesh
    if is_pipeline and isinstance(devices, Cluster):
        mesh = _mesh_of(devices)
    with errors_for_all(mesh if isinstance(mesh, Mesh) else None, "go on from the last checkpoint"):
        directory = folder_path("directory", directory)
        mesh = _checked_arguments(mesh, init, {"save_interval_steps": save_interval_steps, "max_to_keep": max_to_keep})
        fresh_state = FreshState(init)
        saved = saved_arrays(fresh_state.paths(STATE), fresh_state.arrays)
        if not is_pipeline:
            _warn_of_whole_batch(mesh, args)
        checkpoint, ownership = _agreed_checkpoint(directory, mesh)
        try:
            if checkpoint is not None:
                name = f"The checkpoint `{checkpoint.folder}`"
                difference = difference_of(name, checkpoint.arrays, "the state of `init`", saved)
                if difference is not None:
                    raise CheckpointError(f"{difference} Give the function and the state that the training began with.")
                options.setdefault("start", _plan_of(checkpoint, PipelinePlan if is_pipeline else Plan))
            if is_pipeline:
                step, plan, shardings = _pipelined(fn, devices, fresh_state, args, options)
            else:
                step = search(fn, mesh, **options).checked_by(_check_that_state_comes_back)
                plan = step.plan(fresh_state.shapes, *args)
                tensors = plan.arguments[: len(fresh_state.arrays)]
                shardings = [tensor.sharding_on(plan.placed_mesh) for tensor in tensors]
                if plan.residuals and parameter_of(plan.residuals[0]) != plan.parameters[0]:
                    raise ValueError(
                        f"`{plan.parameters[0]}` must be the largest argument that `fn` returns anew, for sums with "
                        "error feedback and delayed scales, whose residuals are saved with the state: "
                        f"`{parameter_of(plan.residuals[0])}` is larger."
                    )
        except BaseException:
            if ownership is not None:
                ownership.release()
            raise
    of_files = fresh_state, checkpoint, directory, ownership, save_interval_steps, max_to_keep
    return Training(step, plan, shardings, mesh, *of_files)  # pyright: ignore[reportArgumentType]  # of one kind


def take_over(directory: str, processes: Processes) -> Checkpoint | None:
    """Prepares a directory for the checkpoints of a training that begins now; returns the one to go on from, if any.

    Checkpoints that are damaged and newer than the last whole one are renamed, with a warning. What interrupted saves
    have left is removed, which breaks the save of a job that still writes there.

    Raises:
      CheckpointError, OSError, ProcessesError: as `last_whole_checkpoint`; nothing is changed then.
    """
    checkpoint, damages = last_whole_checkpoint(directory, processes)

    def tidy() -> None:
        for num_steps, damage in damages.items():
            assert checkpoint is not None
            warnings.warn(f"{damage}. The training goes on from step {checkpoint.num_steps}.", stacklevel=3)
            set_aside(directory, num_steps)
        remove_unfinished(directory)

    processes.shared("go on from the last checkpoint", tidy)
    return checkpoint


def _pipelined(
    fn: Callable[..., Any], devices: Any, fresh_state: FreshState, args: Sequence[Any], options: dict[str, Any]
) -> tuple[PipelinedFunction[PipelinePlan], PipelinePlan, list[NamedSharding]]:
    """Returns a step that runs as a pipeline, its plan, and where the arrays of the state are kept."""
    step = search(fn, devices, **options)
    plan, places = step.plan(fresh_state.shapes, *args), step.places(fresh_state.shapes, *args)
    if len(places) > len(split((fresh_state.shapes, *args))[0]):
        own = f", predicted_steps={plan.predicted_steps:g}" if plan.predicted_steps else ""
        raise ValueError(
            f"`init` must make the weights in all versions that the schedule {plan.schedule!r} reads, but it makes one "
            f"of each. Give `lambda: diffshard.pipelines.delayed(fn{own}).with_versions(init(), *args)[0][0]`."
        )
    of_state = zip(fresh_state.paths(STATE), places, strict=False)
    for path in (path for path, place in of_state if not place.is_replaced):
        raise ValueError(
            f"`fn` must return the new state, but no result of {plan.function} takes the place of `{path}`."
        )
    return step, plan, [place.sharding for place in places[: len(fresh_state.arrays)]]


def _mesh_of(cluster: Cluster) -> Mesh:
    """Returns a mesh of all devices of a cluster, by which their processes are known."""
    mesh = mesh_of_all(cluster)
    if not isinstance(mesh, Mesh):
        raise ValueError("`mesh` is a cluster that is only described: there are no devices to train on.")
    if not processes_of(mesh).is_one:
        raise ValueError("`resume` with `pipeline` is for one process: it saves the parts of all stages together.")
    return mesh


def _checked_arguments(mesh: Any, init: Any, counts: Mapping[str, Any]) -> Mesh:
    """Checks what `resume` is given beside the directory and the function, and returns the mesh; `counts` by names."""
    if not isinstance(mesh, Mesh):
        if isinstance(mesh, Cluster):
            raise TypeError("`mesh` can be a Cluster together with `pipeline` only; give a jax.sharding.Mesh.")
        hint = " It is abstract: there are no devices to train on." if isinstance(mesh, AbstractMesh) else ""
        raise TypeError(f"`mesh` must be a jax.sharding.Mesh, not {type(mesh).__name__}.{hint}")
    num_processes = len({device.process_index for device in mesh.devices.flat})
    if num_processes != jax.process_count():
        raise ValueError(
            f"`mesh` has devices of {num_processes} processes, but the job has {jax.process_count()}, and all of them "
            "write checkpoints. Start only the processes whose devices the mesh has."
        )
    if not callable(init):
        raise TypeError(
            f"`init` must be a function without arguments that makes the state, not {type(init).__name__}; "
            "give `lambda: init(key)`."
        )
    for name, value in counts.items():
        checked_number(name, value, Count)
    return mesh


def _check_that_state_comes_back(request: PlanRequest) -> None:
    """Checks that the results have arrays like those of the state, which is the first argument."""
    traced_function = request.traced_function
    call, name = traced_function.call, short_name(request.options.function_name)
    returned = Counter((result.shape, result.dtype) for result in traced_function.jaxpr.out_avals)
    for path, array, number in zip(call.paths, call.arrays, call.numbers, strict=True):
        if number != call.numbers[0]:
            break
        returned[array.shape, array.dtype] -= 1
        if returned[array.shape, array.dtype] < 0:
            raise ValueError(
                f"`fn` must return the new state, but no result of {name} takes the place of "
                f"`{path}`, {array.dtype}{list(array.shape)}. A step that changes modules in place, as those of flax's "
                "nnx, has to take their state (`nnx.split`) and to return it anew."
            )


def _agreed_checkpoint(directory: str, mesh: Mesh) -> tuple[Checkpoint | None, Ownership | None]:
    """Takes the directory, in the first process, and returns the checkpoint to go on from, the same in all.

    Returns:
      The checkpoint, if any; and in the first process that the directory is this job's.
    """
    processes, what = processes_of(mesh), "go on from the last checkpoint"
    taken: list[Ownership] = []

    def take() -> None:
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise ValueError(f"`directory` must be a folder of checkpoints, or a new one, not the file {directory!r}.")
        try:
            os.makedirs(directory, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):  # raises now what would be raised at the first save
                pass
        except OSError as error:
            raise OSError(
                error.errno,
                f"`directory` {directory!r} cannot be made or written to: {error.strerror}. Give another one",
            ) from None
        taken.append(Ownership(directory))

    processes.check_alike(what, {"`directory`": directory})
    processes.shared(what, take)
    try:
        processes.check_alike(what, {f"whether there is a folder `{directory}`": str(os.path.isdir(directory))})
        return take_over(directory, processes), taken[0] if taken else None
    except BaseException:
        for ownership in taken:
            ownership.release()
        raise


def _plan_of(checkpoint: Checkpoint, kind: type[Any]) -> Plan | PipelinePlan | None:
    """Returns the plan of a checkpoint; where it is of another kind or cannot be read, the search begins without."""
    try:
        plan = checkpoint.plan()
        return plan if isinstance(plan, kind) else None
    except PlanError as error:
        warnings.warn(f"The search begins without the plan of the checkpoint: {error}", stacklevel=3)
        return None


def _warn_of_whole_batch(mesh: Mesh, args: Sequence[Any]) -> None:
    """Warns if the devices along a mesh axis divide no dimension of any array beside the state."""
    sizes = {size for array in split(args)[0] for size in jax.numpy.shape(array)}
    if not sizes:
        return
    for name, count in mesh.shape.items():
        if all(size % count for size in sizes):
            least = math.lcm(count, max(sizes))
            warnings.warn(
                f"The {count} devices along the mesh axis {name!r} divide no dimension of the arguments beside the "
                f"state, which have {sorted(sizes)}: each of them computes the whole batch. Use a batch that more "
                f"numbers of devices divide, such as {least}, or another mesh.",
                stacklevel=3,
            )
