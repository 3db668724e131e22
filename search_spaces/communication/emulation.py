"""Runs what every device of a mesh computes, emulated on one device or on real ones.

The emulation is one `jax.vmap` for each mesh axis, with the axis's name: collectives of `jax.lax` find the name there
as they find it in `jax.shard_map`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from search_spaces.partition_specs import axes_of


def local_shape(shape: Sequence[int], spec: PartitionSpec, mesh_axes: Mapping[str, int], name: str) -> tuple[int, ...]:
    """Returns the shape of one device's part of an array.

    Args:
      shape: of the whole array.
      spec: how it is split.
      mesh_axes: devices along each mesh axis.
      name: of the array, for messages.

    Raises:
      ValueError: the spec has more dimensions than the array, an axis that the mesh does not have, an axis twice, or
        axes whose devices do not divide their dimension.
    """
    if len(spec) > len(shape):
        raise ValueError(f"The spec of {name} is {spec} with {len(spec)} dimensions, but its shape is {tuple(shape)}.")
    dimensions = axes_of(spec, len(shape))
    used = [axis for axes in dimensions for axis in axes]
    for axis in used:
        if axis not in mesh_axes:
            raise ValueError(f"The spec of {name} has an axis {axis!r}; the mesh's axes are {tuple(mesh_axes)}.")
        if used.count(axis) > 1:
            raise ValueError(
                f"The spec of {name} is {spec}; an axis can split one dimension only, {axis!r} splits two."
            )
    parts = [math.prod(mesh_axes[axis] for axis in axes) for axes in dimensions]
    for d, (size, count) in enumerate(zip(shape, parts, strict=True)):
        if size % count:
            raise ValueError(
                f"Dimension {d} of {name} is {size}, which {dimensions[d]} of {count} devices do not divide; "
                "choose another spec or pad the array."
            )
    return tuple(size // count for size, count in zip(shape, parts, strict=True))


def emulate(
    fn: Callable[..., Any], mesh_axes: Mapping[str, int], in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Returns what `jax.shard_map(fn, ..., check_vma=False)` returns, a function of whole arrays, for one device.

    Arrays that no axis splits are stored once, not once for each device. Of results that an axis does not split, those
    of its first device are returned.

    Args:
      fn: what every device computes, with collectives over the names of axes.
      mesh_axes: devices along each mesh axis.
      in_specs: for each argument a `PartitionSpec`, or a pytree of them that is a prefix of the argument.
      out_specs: a `PartitionSpec` for the result, or a pytree of them that is a prefix of it.
    """

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = broadcast_specs(tuple(in_specs), arguments)
        parts = [_split(x, spec, mesh_axes) for x, spec in zip(leaves, specs, strict=True)]

        def mapped(*flat: Any) -> Any:
            return fn(*jax.tree.unflatten(structure, flat))

        for axis in reversed(list(mesh_axes)):
            in_axes = tuple(0 if any(axis in axes for axes in axes_of(s, len(s))) else None for s in specs)
            mapped = jax.vmap(mapped, in_axes=in_axes, axis_name=axis, axis_size=mesh_axes[axis])
        results = mapped(*parts)
        flat, structure_out = jax.tree.flatten(results)
        specs_out = broadcast_specs(out_specs, results)
        joined = [_join(x, spec, mesh_axes) for x, spec in zip(flat, specs_out, strict=True)]
        return jax.tree.unflatten(structure_out, joined)

    return run


def on_devices(fn: Callable[..., Any], mesh: Mesh, in_specs: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
    """Returns `fn` under `jax.shard_map` without checks of replication; its arguments may have any sharding."""
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
    if AxisType.Explicit not in mesh.axis_types:
        return mapped

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = broadcast_specs(tuple(in_specs), arguments)
        placed = [jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)]
        return mapped(*jax.tree.unflatten(structure, placed))

    return run


def broadcast_specs(specs: Any, tree: Any) -> list[PartitionSpec]:
    """Returns one spec for each leaf of a tree, for specs that are a prefix of the tree."""
    full = jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.leaves(full, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _split(x: Any, spec: PartitionSpec, mesh_axes: Mapping[str, int]) -> Any:
    """Returns `[axes that split the array, in the mesh's order..., local shape...]`."""
    split, order, shape = [], [], []
    for size, axes in zip(jnp.shape(x), axes_of(spec, jnp.ndim(x)), strict=True):
        for axis in axes:
            split.append((list(mesh_axes).index(axis), len(shape)))
            shape.append(mesh_axes[axis])
        order.append(len(shape))
        shape.append(size // math.prod(mesh_axes[axis] for axis in axes))
    if not split:
        return x
    return jnp.reshape(x, shape).transpose([*(place for _, place in sorted(split)), *order])


def _join(x: jax.Array, spec: PartitionSpec, mesh_axes: Mapping[str, int]) -> jax.Array:
    """Returns the whole array for `[all axes in the mesh's order..., local shape...]`."""
    dimensions = axes_of(spec, x.ndim - len(mesh_axes))
    used = {axis for axes in dimensions for axis in axes}
    x = x[tuple(slice(None) if axis in used else 0 for axis in mesh_axes)]
    splitting = [axis for axis in mesh_axes if axis in used]
    order, shape = [], []
    for d, axes in enumerate(dimensions):
        order += [*(splitting.index(axis) for axis in axes), len(splitting) + d]
        shape.append(x.shape[len(splitting) + d] * math.prod(mesh_axes[axis] for axis in axes))
    return x.transpose(order).reshape(shape) if used else x
