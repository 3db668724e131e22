"""Arrays over the devices of several processes, made of what each process has: whole arrays, or its part of them."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from diffshard.base import PlanError

LocalPart = tuple[slice | np.ndarray, ...]
"""What a process holds of each dimension of an array: a slice, or the indices where they are not in one piece."""

_SAMPLE = 4096
"""Elements of an array that are compared between processes: enough to tell another seed, and read in no time."""


def has_other_processes(mesh: Mesh) -> bool:
    """Tells whether a mesh has devices of other processes."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def is_global(array: Any) -> bool:
    """Tells whether an array is over devices of several processes already."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def local_part(sharding: NamedSharding, shape: Sequence[int]) -> LocalPart:
    """Returns which part of an array this process holds.

    Raises:
      PlanError: its blocks are not a grid, so that they are not one array.
    """
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
