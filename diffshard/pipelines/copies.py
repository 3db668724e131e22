"""Copies of arrays from the devices of one stage to those of another, shard by shard.

Inside a process `jax.device_put` does it: where both sides have equal shards, it is dispatched at once, also to more or
fewer devices. Between processes all that own a device of either side run one small program, which permutes shards
among both sides' devices. It needs no equal numbers of devices, and runs wherever collectives run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


@dataclass
class CopyCount:
    """How many copies a step made.

    Attributes:
      blocked: copies that may have waited on the host: what they read was not ready before the call and was ready after
        it. A copy whose source ended just then counts too, so that the number is never too low.
      blocked_s: seconds that these calls took together.
    """

    copies: int = 0
    bytes: int = 0
    blocked: int = 0
    blocked_s: float = 0.0


class Copier:
    """Copies arrays between sub-meshes, and counts. Programs for copies between processes are made once."""

    def __init__(self):
        self.restart()
        self._exchanges: dict[Any, Callable[[Any], tuple[Any, Any]]] = {}

    def restart(self) -> None:
        """Begins to count again."""
        self.count = CopyCount()

    def from_host(self, array: Any, sharding: NamedSharding) -> Any:
        """Returns an array as some devices store it, from the host or from wherever else it is."""
        self._count(np.shape(array), array, sharding)
        if sharding.is_fully_addressable:
            return self._watched(array, lambda: jax.device_put(array, sharding))
        values = np.asarray(array if hasattr(array, "dtype") else jnp.asarray(array))  # a Python number is float32
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def copy(self, array: Any, aval: Any, source: NamedSharding, target: NamedSharding) -> tuple[Any, Any]:
        """Copies an array to other devices.

        Args:
          array: on `source`; None in a process that owns none of it.
          target: where it goes; has equal shards, of as many parts.

        Returns:
          The array on `target`, None where this process owns none of it; and for a copy between processes a number that
          is there when it has run, else None.
        """
        if source == target:  # a device has both stages
            return array, None
        self._count(aval.shape, aval, target)
        if source.is_fully_addressable and target.is_fully_addressable:
            return self._watched(array, lambda: jax.device_put(array, target)), None
        key = source, target, aval.shape, aval.dtype
        if key not in self._exchanges:
            is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
            self._exchanges[key] = (_exchange_of_keys if is_key else _exchange)(source, target, aval)
        return self._watched(array, lambda: self._exchanges[key](array))

    def _watched(self, array: Any, copy: Callable[[], Any]) -> Any:
        if not isinstance(array, jax.Array):
            return copy()
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        source: Any = jax.random.key_data(array) if is_key else array  # keys do not tell whether they are ready
        waits, start = not source.is_ready(), time.perf_counter()
        copied = copy()
        if waits and source.is_ready():
            self.count.blocked += 1
            self.count.blocked_s += time.perf_counter() - start
        return copied

    def _count(self, shape: Sequence[int], array: Any, target: NamedSharding) -> None:
        self.count.copies += 1
        self.count.bytes += bytes_each(shape, getattr(array, "dtype", np.float32), target) * target.num_devices


def transfer_shardings(
    shape: Sequence[int], source: Mesh | AbstractMesh, target: Mesh | AbstractMesh
) -> tuple[NamedSharding, NamedSharding]:
    """Returns how an array leaves a mesh for another one, and how it arrives there: in equal parts."""
    parts, dim = shared_parts(shape, tuple(source.shape.values()), tuple(target.shape.values()))
    one, other = (NamedSharding(mesh, _first_axes(mesh, parts, dim)) for mesh in (source, target))  # type: ignore[arg-type]
    return one, other


def shared_parts(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Returns into how many parts an array is split that goes from one mesh to another, and along which dimension.

    The parts are even, and as many as some first axes of both meshes have together.
    """
    possible = _first_products(one) & _first_products(other)
    parts, dim = max(((n, -d) for d, size in enumerate(shape) for n in possible if size % n == 0), default=(1, 0))
    return parts, -dim


def _first_products(sizes: Sequence[int]) -> set[int]:
    return {prod(sizes[:count]) for count in range(len(sizes) + 1)}


def _first_axes(mesh: Mesh | AbstractMesh, parts: int, dim: int) -> PartitionSpec:
    """Returns the spec that splits a dimension in parts over the first axes of a mesh."""
    axes: list[str] = []
    for name, size in mesh.shape.items():
        if prod(mesh.shape[axis] for axis in axes) < parts and size > 1:
            axes.append(str(name))
    return PartitionSpec(*([None] * dim), tuple(axes)) if parts > 1 else PartitionSpec()


def bytes_each(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> int:
    """Returns the bytes of an array on each of its devices."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        size = prod(data.shape) * data.dtype.itemsize
    else:
        size = np.dtype(dtype).itemsize
    return prod(sharding.shard_shape(tuple(shape))) * size


def _exchange(source: NamedSharding, target: NamedSharding, aval: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Makes a function that copies between processes: each part in rounds, from each device that has it to one other.

    Each device's shard is one part of a long array over both sides' devices; what receivers put in is not read.
    """
    senders, receivers = list(_devices(source).flat), list(_devices(target).flat)
    if set(senders) & set(receivers):
        raise ValueError("A copy between processes needs two sides without common devices.")
    both = Mesh(np.array(senders + receivers), ("device",))
    spec = PartitionSpec("device")
    shard = source.shard_shape(tuple(aval.shape))
    shape = (both.size * (shard[0] if shard else 1), *shard[1:])
    rounds = _rounds(source, target, prod(size // part for size, part in zip(aval.shape, shard, strict=True) if part))

    def permute(local: Any) -> tuple[Any, Any]:
        arrived = local
        for pairs in rounds:
            moved = lax.ppermute(local, "device", pairs)
            is_target = np.isin(np.arange(both.size), [receiver for _, receiver in pairs])
            arrived = jnp.where(jnp.asarray(is_target)[lax.axis_index("device")], moved, arrived)
        return arrived, jnp.zeros((1,), jnp.int32)

    sharding = NamedSharding(both, spec)
    program = jax.jit(jax.shard_map(permute, mesh=both, in_specs=spec, out_specs=(spec, spec)))
    own = [device for device in receivers if device.process_index == jax.process_index()]
    own_shape = shape[0] // both.size, *shape[1:]
    empty = [jax.device_put(np.zeros(own_shape, aval.dtype), device) for device in own]

    def run(array: Any) -> tuple[Any, Any]:
        given = [] if array is None else [piece.data for piece in array.addressable_shards]
        given = given if shard else [piece.reshape(1) for piece in given]
        arrived, done = program(jax.make_array_from_single_device_arrays(shape, sharding, [*given, *empty]))
        pieces = {piece.device: piece.data for piece in arrived.addressable_shards}
        found = [pieces[device] if shard else pieces[device].reshape(()) for device in own]
        if not found:
            return None, done
        return jax.make_array_from_single_device_arrays(aval.shape, target, found), done

    return run


def _exchange_of_keys(source: NamedSharding, target: NamedSharding, aval: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Makes a function that copies random keys between processes, as the integers that they are made of."""
    implementations = []

    def data_of(keys: Any) -> Any:
        implementations.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    unwrap = jax.jit(jax.random.key_data, out_shardings=source)
    wrap = jax.jit(lambda data: jax.random.wrap_key_data(data, impl=implementations[0]), out_shardings=target)
    exchange = _exchange(source, target, data)

    def run(keys: Any) -> tuple[Any, Any]:
        copied, done = exchange(None if keys is None else unwrap(keys))
        return None if copied is None else wrap(copied), done

    return run


def _rounds(source: NamedSharding, target: NamedSharding, parts: int) -> list[list[tuple[int, int]]]:
    """Returns which device sends to which in each round, as positions among the devices of both sides.

    Neighbouring devices have copies of the same part; they take turns in sending it.
    """
    senders, receivers = _devices(source).reshape(parts, -1), _devices(target).reshape(parts, -1)
    rounds: list[list[tuple[int, int]]] = []
    for part, copies in enumerate(np.arange(receivers.size).reshape(receivers.shape)):
        for number, receiver in enumerate(copies.tolist()):
            turn, copy = divmod(number, senders.shape[1])
            rounds += [[] for _ in range(turn + 1 - len(rounds))]
            rounds[turn].append((part * senders.shape[1] + copy, senders.size + receiver))
    return rounds


def _devices(sharding: NamedSharding) -> np.ndarray:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh.devices
