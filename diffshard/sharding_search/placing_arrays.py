"""Puts the arrays of an argument on a mesh as a plan wants them, checked first."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from diffshard.base import PlanError
from diffshard.plans.base import Tensor
from diffshard.processes import processes_of
from diffshard.sharding_search.call import abstract_array
from diffshard.sharding_search.local_arrays import (
    from_local_part,
    from_whole,
    has_other_processes,
    is_global,
    local_part,
    part_shape,
    part_text,
    sample_text,
)

PlaceArrays = Callable[[Sequence[Tensor], Sequence[str], Sequence[Any], Mesh, bool], list[jax.Array]]
"""Puts arrays on a mesh: takes the plan's arrays, the paths of the given ones, these, the mesh, and whether this
argument is given for the first time."""


def place_whole(
    tensors: Sequence[Tensor], paths: Sequence[str], arrays: Sequence[Any], mesh: Mesh, is_first: bool
) -> list[jax.Array]:
    """Returns arrays on the mesh, of which each process has the whole.

    Raises:
      PlanError: they are not the plan's arrays.
      ProcessesError: it is the first time, and the values differ between processes, or another one has other arrays.
    """
    shardings = [NamedSharding(mesh, tensor.partition_spec) for tensor in tensors]

    def check() -> None:
        _check_whole(tensors, paths, arrays, mesh)

    if not has_other_processes(mesh):
        check()
        return jax.device_put(list(arrays), shardings)
    if is_first:
        pairs = [(path, array) for path, array in zip(paths, arrays, strict=True) if not is_global(array)]
        processes_of(mesh).alike(
            "shard the same arrays", check, lambda _: {f"`{path}`": sample_text(array) for path, array in pairs}
        )
    else:
        check()
    return [from_whole(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]


def place_local(
    tensors: Sequence[Tensor], paths: Sequence[str], arrays: Sequence[Any], mesh: Mesh, is_first: bool
) -> list[jax.Array]:
    """Returns arrays on the mesh, of which each process has its own part. Arrays over all processes are as they are.

    Raises:
      PlanError: an array is not this process's part of the plan's array.
      ProcessesError: it is the first time, and that is so in another process, or it gives other arrays.
    """
    shardings = [NamedSharding(mesh, tensor.partition_spec) for tensor in tensors]

    def check() -> None:
        _check_parts(tensors, paths, arrays, mesh)

    if is_first and has_other_processes(mesh):
        facts = {"the arrays": ", ".join(f"`{path}`" for path in paths)}
        processes_of(mesh).alike("shard the parts of the same arrays", check, lambda _: facts)
    else:
        check()
    return [
        from_whole(array, sharding) if is_global(array) else from_local_part(array, sharding, tensor.shape)
        for tensor, array, sharding in zip(tensors, arrays, shardings, strict=True)
    ]


def _check_whole(tensors: Sequence[Tensor], paths: Sequence[str], arrays: Sequence[Any], mesh: Mesh) -> None:
    """Checks that arrays are the plan's; the error tells those that are the parts of one process.

    Raises:
      PlanError: they are not.
    """
    abstract = tuple(map(abstract_array, arrays))
    try:
        check_arrays(tensors, paths, abstract)
    except PlanError as error:
        if len(arrays) != len(tensors) or not has_other_processes(mesh):
            raise
        parts = [part_shape(local_part(NamedSharding(mesh, t.partition_spec), t.shape)) for t in tensors]
        if [array.shape for array in abstract] != parts:
            raise
        raise PlanError(f"{error} These are the parts of one process: give them to `plan.shard_local`.") from None


def _check_parts(tensors: Sequence[Tensor], paths: Sequence[str], arrays: Sequence[Any], mesh: Mesh) -> None:
    """Checks that arrays are this process's parts of the plan's, or over all processes.

    Raises:
      PlanError: one is not; says which part it has to be.
    """
    if len(arrays) != len(tensors):
        raise PlanError(f"The plan was made for {len(tensors)} arrays in this argument, not {len(arrays)}.")
    for tensor, path, array in zip(tensors, paths, arrays, strict=True):
        given = abstract_array(array)
        if is_global(array):
            check_arrays((tensor,), (path,), (given,))
            continue
        part = local_part(NamedSharding(mesh, tensor.partition_spec), tensor.shape)
        wanted = part_shape(part)
        if (given.shape, str(given.dtype)) != (wanted, tensor.dtype) or path_inside(path) != path_inside(tensor.path):
            raise PlanError(
                f"`{path}` is {given.dtype}{list(given.shape)} in process {jax.process_index()}. This process holds "
                f"{part_text(part, tensor.shape)} of `{tensor.path}`, {tensor.dtype}{list(tensor.shape)}: give "
                f"{tensor.dtype}{list(wanted)}. `plan.local_parts(...)` says which part to load."
            )


def named_arguments(
    names: Sequence[str], static_argnames: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Returns the arguments that are given, with their names.

    Args:
      names: of the plan's arguments that have a position.
      static_argnames: of its static arguments that are given by name only.
      args: the first arguments.
      kwargs: further ones.

    Raises:
      PlanError: one is unknown, or is given twice.
    """
    expected = f"The plan was made for the arguments {', '.join(names)}"
    if len(args) > len(names):
        raise PlanError(f"{expected}, and was given {len(args)}.")
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise PlanError(f"`{twice[0]}` was given by position and by name.")
    for name in kwargs:
        if name not in names and name not in static_argnames:
            raise PlanError(f"{expected}, and was given {name!r}.")
    return [*zip(names, args, strict=False), *kwargs.items()]


def check_arrays(tensors: Sequence[Tensor], paths: Sequence[str], arrays: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Checks that flat arguments have the shapes, types and places of a plan's.

    Raises:
      PlanError: names the first argument that differs.
    """
    for tensor, path, array in zip(tensors, paths, arrays, strict=False):
        shape, dtype = array.shape, str(array.dtype)
        is_same_type = (tensor.shape, tensor.dtype) == (shape, dtype)
        if not is_same_type or path_inside(tensor.path) != path_inside(path):
            advice = "Search again for these shapes."
            if is_same_type:
                advice = "Its place differs: give the same pytrees, and modules of nnx to `step.shard(...)`."
            raise PlanError(
                f"The plan was made for `{tensor.path}` of {tensor.dtype}{list(tensor.shape)}, and was given "
                f"`{path}` of {dtype}{list(shape)}. {advice}"
            )
    if len(arrays) != len(tensors):
        raise PlanError(f"The plan was made for {len(tensors)} arrays in its arguments, not {len(arrays)}.")


def parameter_of(tensor: Tensor) -> str:
    """Returns the name of the argument that has an array."""
    return tensor.path[: len(tensor.path) - len(path_inside(tensor.path))]


def path_inside(path: str) -> str:
    """Returns where an array is in its argument: a path without the argument's name."""
    return path[len(re.match(r"\w*", path)[0]) :]  # pyright: ignore[reportOptionalSubscript]
