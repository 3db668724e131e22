"""Puts the arrays of an argument on a mesh as a plan wants them; each process gives all of them, or its part."""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from diffshard.base import PlanError
from diffshard.plans.base import Tensor
from diffshard.processes import processes_of
from diffshard.sharding_search.call import Structure, abstract_array, array_paths, split

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
    shardings = [tensor.sharding_on(mesh) for tensor in tensors]

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
    shardings = [tensor.sharding_on(mesh) for tensor in tensors]

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
    """Checks that arrays are the plan's; the error tells those that are the parts of one process."""
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
    """Checks that arrays are this process's parts of the plan's, or over all processes."""
    if len(arrays) != len(tensors):
        raise PlanError(f"The plan was made for {len(tensors)} arrays in this argument, not {len(arrays)}.")
    for tensor, path, array in zip(tensors, paths, arrays, strict=True):
        given = abstract_array(array)
        if is_global(array):
            check_arrays((tensor,), (path,), (given,))
            continue
        part = local_part(tensor.sharding_on(mesh), tensor.shape)
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
    """Checks that flat arguments have the shapes, types and places of a plan's."""
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


def fitting_tensors(
    of_argument: Mapping[str, tuple[Tensor, ...]],
    function: str,
    paths_of: Callable[[str], tuple[str, ...]],
    arrays: Sequence[jax.ShapeDtypeStruct],
    argument: str | None,
    cast: bool,
) -> tuple[Tensor, ...]:
    """Returns the arrays of the argument of a planned function that a tree is.

    Args:
      paths_of: returns the paths of the tree's arrays in an argument of a name.
      argument: which one it is; None for the only one that it fits.
      cast: whether floating arrays may have other floating dtypes than the plan's.
    """
    if argument is not None and argument not in of_argument:
        raise PlanError(f"`argument` is {argument!r}, but the plan was made for {', '.join(of_argument)}.")
    fitting, errors = [], []
    for name in of_argument if argument is None else [argument]:
        tensors = of_argument[name]
        given = _as_planned(arrays, tensors) if cast else arrays
        try:
            check_arrays(tensors, paths_of(name), given)
            fitting.append(name)
        except PlanError as error:
            errors.append(f"It is not `{name}`: {error}")
    if len(fitting) == 1:
        return of_argument[fitting[0]]
    if fitting:
        raise PlanError(f"The tree fits {' and '.join(map(repr, fitting))}; name one by `argument`.")
    raise PlanError(f"The tree is no argument of {function}. {' '.join(errors)}")


def _as_planned(arrays: Sequence[jax.ShapeDtypeStruct], tensors: Sequence[Tensor]) -> list[jax.ShapeDtypeStruct]:
    """Returns floating arrays with the dtypes of a plan's, where those are floating too."""

    def is_float(dtype: Any) -> bool:
        return "<" not in str(dtype) and jnp.issubdtype(dtype, jnp.floating)

    planned = list(arrays)
    for i, (array, tensor) in enumerate(zip(arrays, tensors, strict=False)):
        if is_float(array.dtype) and is_float(tensor.dtype):
            planned[i] = jax.ShapeDtypeStruct(array.shape, jnp.dtype(tensor.dtype))
    return planned


def parameter_of(tensor: Tensor) -> str:
    """Returns the name of the argument that has an array."""
    return tensor.path[: len(tensor.path) - len(path_inside(tensor.path))]


def path_inside(path: str) -> str:
    """Returns where an array is in its argument: a path without the argument's name."""
    return path[len(re.match(r"\w*", path)[0]) :]  # pyright: ignore[reportOptionalSubscript]


LocalPart = tuple[slice | np.ndarray, ...]
"""What a process holds of each dimension of an array: a slice, or the indices where they are not in one piece."""

_SAMPLE = 4096
"""Elements of an array that are compared between processes: enough to tell another seed, and read in no time."""


def has_other_processes(mesh: Mesh) -> bool:
    """Returns whether a mesh has devices of other processes."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def is_global(array: Any) -> bool:
    """Returns whether an array is over devices of several processes already."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def local_part(sharding: NamedSharding, shape: Sequence[int]) -> LocalPart:
    """Returns which part of an array this process holds."""
    blocks = {
        tuple(dimension.indices(size)[:2] for dimension, size in zip(index, shape, strict=True))
        for index in sharding.addressable_devices_indices_map(tuple(shape)).values()
        if index is not None
    }
    spans = [sorted({block[dimension] for block in blocks}) for dimension in range(len(shape))]
    if int(np.prod([len(of_dimension) for of_dimension in spans])) != len(blocks):
        raise PlanError(
            f"The blocks of an array of shape {list(shape)} that this process holds by {sharding.spec} are not one "
            "array. Give the whole array to `plan.shard`, or order the devices of the mesh by process."
        )
    return tuple(_indices(of_dimension) for of_dimension in spans)


def part_shape(part: LocalPart) -> tuple[int, ...]:
    """Returns the shape of a part of an array."""
    return tuple(p.stop - p.start if isinstance(p, slice) else len(p) for p in part)


def part_text(part: LocalPart, shape: Sequence[int]) -> str:
    """Writes which part of an array is meant, by the dimensions of which it is not all: `rows 16 to 31`."""
    texts = []
    for dimension, (indices, size) in enumerate(zip(part, shape, strict=True)):
        name = "rows" if dimension == 0 else f"indices of dimension {dimension}"
        if isinstance(indices, slice):
            if (indices.start, indices.stop) != (0, size):
                texts.append(f"{name} {indices.start} to {indices.stop - 1}")
        else:
            texts.append(f"{name} {', '.join(map(str, indices[:4]))}{', ...' if len(indices) > 4 else ''}")
    return " and ".join(texts) or "all of it"


def from_whole(array: Any, sharding: NamedSharding) -> jax.Array:
    """Returns an array over the devices of all processes from the whole array, which each process has.

    Each process reads its own blocks only. An array over these devices already is moved if its sharding is another.
    """
    if is_global(array):
        is_placed = array.sharding.is_equivalent_to(sharding, array.ndim)
        return array if is_placed else jax.device_put(array, sharding)
    if _is_key(array):
        data = from_whole(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    host = _on_host(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def from_local_part(array: Any, sharding: NamedSharding, shape: Sequence[int]) -> jax.Array:
    """Returns an array of a shape from this process's part of it, as `local_part` says which."""
    if _is_key(array):
        data = jax.random.key_data(array)
        words = data.shape[array.ndim :]  # of one key, which are on one device
        whole = from_local_part(data, sharding, (*shape, *words))
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(array))
    host, part = _on_host(array), local_part(sharding, shape)

    def block(index: Any) -> np.ndarray:
        starts = [dimension.indices(size)[:2] for dimension, size in zip(index, shape, strict=True)]
        return host[tuple(_within(p, *span) for p, span in zip(part, starts, strict=True))]

    return jax.make_array_from_callback(tuple(shape), sharding, block)


def sample_text(array: Any) -> str:
    """Returns a checksum of some elements of an array, by which processes notice that theirs differ."""
    host = np.asarray(jax.random.key_data(array) if _is_key(array) else array).reshape(-1)
    sample = np.ascontiguousarray(host[:: max(1, host.size // _SAMPLE)])
    return f"an array with the checksum {zlib.crc32(sample.tobytes()):08x}"


def _on_host(array: Any) -> np.ndarray:
    return np.asarray(array, dtype=jax.typeof(array).dtype)  # as JAX takes it: Python's numbers have 32 bits


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _indices(spans: Sequence[tuple[int, int]]) -> slice | np.ndarray:
    """Returns the indices in spans: a slice if they are in one piece."""
    indices = np.concatenate([np.arange(*span) for span in spans]) if spans else np.arange(0)
    if indices.size and bool(np.all(np.diff(indices) == 1)):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return slice(0, 0) if not indices.size else indices


def _within(part: slice | np.ndarray, start: int, stop: int) -> slice:
    """Returns where indices from `start` to `stop` of the whole array are in a part of it."""
    first = start - part.start if isinstance(part, slice) else int(np.searchsorted(part, start))
    return slice(first, first + stop - start)


class FreshState:
    """A state that is not made yet: its shapes are known, and no device ever holds all of it."""

    def __init__(self, init: Callable[..., Any], *args: Any):
        self._init, self._args = init, args
        self._seen: list[tuple[Structure, Any]] = []
        self.arrays: list[jax.ShapeDtypeStruct] = jax.eval_shape(self._flat, *args)
        self.structure, self._paths = self._seen[-1]

    @property
    def shapes(self) -> Any:
        """The state as a pytree of `jax.ShapeDtypeStruct`."""
        return self.structure.unflatten(self.arrays)

    def paths(self, name: str) -> tuple[str, ...]:
        """Returns the path of each array in a state that is called so."""
        return tuple(name + path for path in self._paths)

    def make(self, shardings: Sequence[NamedSharding]) -> Any:
        """Computes the state, each device its own part; what is on other devices is computed there, by itself."""
        made: dict[int, Any] = {}
        for devices in dict.fromkeys(frozenset(sharding.device_set) for sharding in shardings):
            own = [i for i, sharding in enumerate(shardings) if frozenset(sharding.device_set) == devices]
            arrays = jax.jit(
                lambda *args, own=own: [self._flat(*args)[i] for i in own], out_shardings=[shardings[i] for i in own]
            )(*self._args)
            made.update(zip(own, arrays, strict=True))
        return self.structure.unflatten([made[i] for i in range(len(shardings))])

    def _flat(self, *args: Any) -> list[Any]:
        state = self._init(*args)
        arrays, structure = split(state)
        self._seen.append((structure, array_paths("", state)))
        return [_strongly_typed(array) for array in arrays]


def _strongly_typed(array: Any) -> Any:
    """Returns an array whose dtype does not give way to others, as that of an array from a file."""
    is_key = jax.numpy.issubdtype(jax.typeof(array).dtype, jax.dtypes.prng_key)
    return array if is_key else lax.convert_element_type(array, jax.typeof(array).dtype)
