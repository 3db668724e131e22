"""Moves a tree of arrays to where another plan wants it, shard by shard, and says what that takes.

Within one set of devices XLA exchanges the shards. Between two sets each device of the new one receives the pieces of
its part straight from devices that hold them, whatever the shapes of both meshes: a device holds its old shards, its
new ones and one piece, and nothing goes through the host or through one device.

Of each device's new part, what it does not hold yet arrives from the devices that do. Those that hold the same part
send equal shares of it, straight to whoever needs it. A move takes as long as the busiest device's link: what it sends,
or what it receives, whichever is more, because links carry both ways at once. Arrays move one after the other, started
together: they share one latency by their bytes.

Letters for sizes: D devices before, E devices after, R dimensions of an array.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost.base import Hardware, Link
from cost.lines import least_s
from cost.real_numbers import Amount, Index
from diffshard.base import PlanError
from diffshard.plans.base import Tensor
from diffshard.processes import errors_for_all
from diffshard.sharding_search.call import split
from diffshard.sharding_search.plan import Plan
from search_spaces.partition_specs import IndexedSpec, axes_of, indexed_spec


class Devices(NamedTuple):
    """The devices of a mesh.

    Attributes:
      ids: `[D]` numbers of the devices, row-major; a device has the same number before and after a move.
    """

    ids: tuple[int, ...]
    axis_sizes: tuple[int, ...]


class Move(NamedTuple):
    """The way of some arrays from one plan to another.

    Attributes:
      seconds: predicted; one array after the other.
      num_bytes: bytes that go from one device to another, of all devices together.
      num_arrays: arrays of which something has to be sent.
    """

    seconds: Amount
    num_bytes: Amount
    num_arrays: Index


class MovedBytes(NamedTuple):
    """The bytes of a move.

    Attributes:
      sent: `[D]` by each device before.
      received: `[E]` by each device after.
    """

    sent: np.ndarray
    received: np.ndarray


def moved_bytes(
    shape: Sequence[int], num_bytes: float, before: tuple[Devices, IndexedSpec], after: tuple[Devices, IndexedSpec]
) -> MovedBytes:
    """Returns the bytes that each device sends and receives when an array moves.

    Args:
      shape: of the whole array; its dimensions are split evenly.
      before: the devices that hold the array, and how it is split over them.
    """
    (devices, spec), (new_devices, new_spec) = before, after
    parts, new_parts = _parts(shape, spec, devices.axis_sizes), _parts(shape, new_spec, new_devices.axis_sizes)
    common = np.ones((len(parts), len(new_parts)))
    for d in range(len(shape)):
        start = np.maximum(parts[:, None, d, 0], new_parts[None, :, d, 0])
        common *= np.maximum(np.minimum(parts[:, None, d, 1], new_parts[None, :, d, 1]) - start, 0)
    _, part_number, num_holders = np.unique(
        parts.reshape(len(parts), -1), axis=0, return_inverse=True, return_counts=True
    )
    part_number = part_number.reshape(-1)
    place = {device: i for i, device in enumerate(devices.ids)}
    own_part = np.array([part_number[place[i]] if i in place else -1 for i in new_devices.ids])
    is_needed = part_number[:, None] != own_part[None, :]
    share = num_bytes / max(prod(shape), 1)
    amounts = share * common * is_needed / num_holders[part_number][:, None]
    return MovedBytes(amounts.sum(axis=1), amounts.sum(axis=0))


def move_s(moved: MovedBytes, links: Sequence[Link], latency_share: float = 1.0) -> float:
    """Returns the seconds of a move over the slowest of several links.

    Args:
      links: one at least, unless nothing moves.
      latency_share: the part of a latency that is this array's own.
    """
    most_bytes = max(moved.sent.max(initial=0.0), moved.received.max(initial=0.0))
    if not most_bytes:
        return 0.0
    return max(float(least_s(link.lines("collective_permute"), most_bytes, latency_share)) for link in links)


def links_between(*hardware_and_axes: tuple[Hardware, Mapping[str, int]]) -> tuple[Link, ...]:
    """Returns the links of some meshes over which arrays may move: those of axes with several devices."""
    links = [hardware.link(name) for hardware, axes in hardware_and_axes for name, size in axes.items() if size > 1]
    return tuple(dict.fromkeys(links))


def _parts(shape: Sequence[int], spec: IndexedSpec, axis_sizes: tuple[int, ...]) -> np.ndarray:
    """Returns where each device's part begins and ends, `[D, R, 2]`."""
    coordinates = np.indices(axis_sizes).reshape(len(axis_sizes), -1)  # [axes, D], row-major
    parts = np.zeros((coordinates.shape[1], len(shape), 2), np.int64)
    for d, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        number = np.zeros(coordinates.shape[1], np.int64)
        for a in axes:
            number = number * axis_sizes[a] + coordinates[a]
        length = size // prod(axis_sizes[a] for a in axes)
        parts[:, d, 0], parts[:, d, 1] = number * length, (number + 1) * length
    return parts


Region = tuple[tuple[int, int], ...]
"""A part of an array: where it begins and ends along each dimension."""


def reshard(tree: Any, from_plan: Plan, to_plan: Plan, *, argument: str | None = None, cast: bool = False) -> Any:
    """Moves arrays from the devices of one plan to where another plan wants them; returns them.

    >>> weights = diffshard.elastic.reshard(state.params, training_plan, generation_plan, cast=True)

    The meshes may have other shapes, and be of the same devices, of others or of some of them. The arrays stay where
    they were, too, until nothing refers to them.

    Args:
      tree: an argument of the second plan's function, such as weights, on devices of the first plan's mesh.
      from_plan: by which the arrays were made.
      to_plan: by which they will be used.
      argument: which argument of the second function the tree is; None for the only one that it fits.
      cast: whether floating arrays take the dtypes that the second plan has. They are sent in the smaller of both.

    Raises:
      PlanError: a plan's mesh has no devices; the tree is no argument of the second plan's function, or fits several;
        or an array is not on the first plan's mesh, or the meshes have other devices and belong to several processes.
      ProcessesError: another process failed.
    """
    with errors_for_all(getattr(to_plan, "mesh", None), "move arrays between plans"):
        arrays, structure, tensors = _checked(tree, from_plan, to_plan, argument, cast)
        mesh = to_plan.placed_mesh
        if _set(mesh) != _set(from_plan.placed_mesh) and _has_other_processes(mesh, from_plan.placed_mesh):
            raise PlanError(
                "`from_plan` and `to_plan` have meshes of other devices, in several processes: arrays can be moved "
                "between meshes of the same devices, or within one process. Save a checkpoint and restore it there."
            )
        moved = [_moved(a, t.sharding_on(mesh), t) for a, t in zip(arrays, tensors, strict=True)]
    return structure.unflatten(moved)


def reshard_price(
    tree: Any, from_plan: Plan, to_plan: Plan, *, argument: str | None = None, cast: bool = False
) -> Move:
    """Predicts what `reshard` takes: seconds over the slowest link of both meshes, as a `budget` prices its moves.

    Args:
      tree: as in `reshard`.
      from_plan: the same.
      to_plan: the same.
      argument: the same.
      cast: the same.

    Returns:
      Seconds, bytes that all devices send together, and the number of arrays of which something is sent.

    Raises:
      PlanError: as `reshard`.
    """
    arrays, _, tensors = _checked(tree, from_plan, to_plan, argument, cast)
    links = links_between(*((plan.hardware, plan.mesh_axes) for plan in (from_plan, to_plan)))
    total_bytes = sum(tensor.num_bytes for tensor in tensors)
    seconds, num_bytes, num_arrays = 0.0, 0.0, 0
    for array, tensor in zip(arrays, tensors, strict=True):
        size = min(tensor.num_bytes, array.nbytes)
        to_axes = tuple(to_plan.mesh_axes)
        after = _devices(to_plan.placed_mesh), indexed_spec(tensor.spec, to_axes)
        moved = moved_bytes(tensor.shape, size, _source(array), after)
        seconds += move_s(moved, links, size / max(total_bytes, 1)) if links else 0.0
        num_bytes += float(moved.sent.sum())
        num_arrays += bool(moved.sent.any())
    return Move(seconds, num_bytes, num_arrays)


def _checked(
    tree: Any, from_plan: Plan, to_plan: Plan, argument: str | None, cast: bool
) -> tuple[list[jax.Array], Any, tuple[Tensor, ...]]:
    """Returns the arrays of a tree, its structure, and where the second plan wants them."""
    for name, plan in (("from_plan", from_plan), ("to_plan", to_plan)):
        if not isinstance(plan, Plan):
            raise TypeError(f"`{name}` must be a Plan, not {type(plan).__name__}.")
    devices = _set(from_plan.placed_mesh)
    tensors = to_plan.tensors_of(tree, argument, cast=cast)
    arrays, structure = split(tree)
    for array, tensor in zip(arrays, tensors, strict=True):
        if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
            raise PlanError(
                f"`{tensor.path}` is not on the mesh of `from_plan`: put it there by `from_plan.shard`, or straight "
                "where it is used by `to_plan.shard`."
            )
        if not array.sharding.device_set <= devices:
            raise PlanError(f"`{tensor.path}` is on devices that the mesh of `from_plan` does not have.")
    return arrays, structure, tensors


def _has_other_processes(*meshes: Mesh) -> bool:
    return any(device.process_index != jax.process_index() for mesh in meshes for device in mesh.devices.flat)


def _set(mesh: Mesh) -> set[Any]:
    return set(mesh.devices.flat)


def _devices(mesh: Mesh) -> Devices:
    return Devices(tuple(device.id for device in mesh.devices.flat), mesh.devices.shape)


def _source(array: jax.Array) -> tuple[Devices, tuple[tuple[int, ...], ...]]:
    """Returns the devices that hold an array, and how it is split over them."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return _devices(mesh), indexed_spec(tuple(axes_of(sharding.spec, array.ndim)), mesh.axis_names)


def _moved(array: jax.Array, target: NamedSharding, tensor: Tensor) -> jax.Array:
    """Returns an array with another sharding, in the dtype of the plan's."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(array)
        words = NamedSharding(target.mesh, PartitionSpec(*axes_of(target.spec, array.ndim), None))
        return jax.random.wrap_key_data(_placed(data, words), impl=jax.random.key_impl(array))
    dtype = jnp.dtype(tensor.dtype)
    if dtype.itemsize < array.dtype.itemsize:
        return _placed(array.astype(dtype), target)
    return _placed(array, target).astype(dtype)


def _placed(array: jax.Array, target: NamedSharding) -> jax.Array:
    if array.sharding.device_set == target.device_set:
        return jax.device_put(array, target)
    holders = _holders(array)
    pieces = [
        _assembled(region, holders, device, number)
        for number, (device, region) in enumerate(_regions(target, array.shape).items())
    ]
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces)


def _regions(sharding: NamedSharding, shape: Sequence[int]) -> dict[Any, Region]:
    """Returns the part of an array that each device holds."""
    return {
        device: tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(tuple(shape)).items()
    }


def _holders(array: jax.Array) -> dict[Region, list[Any]]:
    """Returns the shards of each part of an array."""
    regions, holders = _regions(array.sharding, array.shape), defaultdict(list)  # pyright: ignore[reportArgumentType]
    for shard in array.addressable_shards:
        holders[regions[shard.device]].append(shard)
    return holders


def _assembled(region: Region, holders: dict[Region, list[Any]], device: Any, number: int) -> jax.Array:
    """Returns a part of an array on a device, piece by piece; holders of the same piece take turns in sending it."""
    whole, shape = None, [end - start for start, end in region]
    for part, shards in holders.items():
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, part, strict=True))
        if any(start >= end for start, end in common):
            continue
        own = [shard for shard in shards if shard.device == device]
        data = (own or shards)[number % len(own or shards)].data
        if common != part:
            starts, ends = zip(*((a - c, b - c) for (a, b), (c, _) in zip(common, part, strict=True)), strict=True)
            data = jax.lax.slice(data, starts, ends)
        piece = jax.device_put(data, device)
        if common == region:
            return piece
        if whole is None:
            whole = jnp.zeros(shape, data.dtype, device=device)
        whole = _update(whole, piece, np.array([a - c for (a, _), (c, _) in zip(common, region, strict=True)]))
    if whole is None:  # an array without elements
        (first, *_), *_ = holders.values()
        whole = jnp.zeros(shape, first.data.dtype, device=device)
    return whole


def _written(whole: jax.Array, piece: jax.Array, start: Sequence[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(whole, piece, tuple(start))


_update: Callable[..., jax.Array] = jax.jit(_written, donate_argnums=0)
