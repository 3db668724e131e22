"""Between JAX's `PartitionSpec` and plain tuples: which mesh axes split each dimension of an array.

A `PartitionSpec` writes one axis as a string, several as a tuple, none as None, and may leave out trailing dimensions.
Plain tuples write them all alike, one tuple for each dimension, with axes by name or by their index in the mesh.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec

NamedAxes = tuple[str, ...]
"""The names of the mesh axes that split one dimension, major to minor."""
NamedSpec = tuple[NamedAxes, ...]
"""For each dimension of an array the names of the mesh axes that split it, major to minor."""
IndexedSpec = tuple[tuple[int, ...], ...]
"""The same with axes by their index in the mesh."""


def axes_of(spec: PartitionSpec, rank: int) -> list[NamedAxes]:
    """Returns the mesh axes that split each dimension, major to minor.

    Args:
      rank: number of dimensions of the array, at least as many as the spec has.
    """
    dimensions = []
    for d, axes in enumerate(constrained_axes_of(spec, rank)):
        if axes is None:
            raise ValueError(f"`spec` {spec} leaves dimension {d} unconstrained; name the axes that split it, or None.")
        dimensions.append(axes)
    return dimensions


def constrained_axes_of(spec: PartitionSpec, rank: int) -> list[NamedAxes | None]:
    """Returns the mesh axes that split each dimension; None where `PartitionSpec.UNCONSTRAINED` leaves it free."""
    dimensions: list[NamedAxes | None] = []
    for entry in (*spec, *[None] * (rank - len(spec))):
        if entry is PartitionSpec.UNCONSTRAINED:
            dimensions.append(None)
        else:
            dimensions.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    return dimensions


def partition_spec(spec: NamedSpec) -> PartitionSpec:
    """Returns a spec as JAX writes it."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec))


def named_spec(spec: IndexedSpec, axis_names: Sequence[str]) -> NamedSpec:
    """Returns a spec with the names of the mesh axes in place of their indices."""
    return _named_spec(spec, tuple(axis_names))


@lru_cache(maxsize=10_000)
def _named_spec(spec: IndexedSpec, axis_names: tuple[str, ...]) -> NamedSpec:
    return tuple(tuple(axis_names[a] for a in axes) for axes in spec)


def num_parts(spec: NamedSpec, axis_sizes: Mapping[str, int]) -> int:
    """Returns into how many different parts a spec splits an array."""
    return math.prod(axis_sizes[axis] for axes in spec for axis in axes)


def indexed_spec(spec: NamedSpec, axis_names: Sequence[str]) -> IndexedSpec:
    """Returns a spec with the indices of the mesh axes in place of their names."""
    return _indexed_spec(spec, tuple(axis_names))


@lru_cache(maxsize=10_000)
def _indexed_spec(spec: NamedSpec, axis_names: tuple[str, ...]) -> IndexedSpec:
    return tuple(tuple(axis_names.index(a) for a in axes) for axes in spec)


def broadcast_specs(
    specs: Any, tree: Any, is_leaf: Callable[[Any], bool] = lambda x: isinstance(x, PartitionSpec)
) -> list[Any]:
    """Returns one spec for each leaf of a tree, for specs that are a prefix of the tree.

    Raises:
      ValueError: `specs` is not a prefix of the tree.
    """
    result: list[Any] = []

    def spread(spec: Any, subtree: Any) -> None:
        result.extend([spec] * len(jax.tree.leaves(subtree)))

    jax.tree.map(spread, specs, tree, is_leaf=is_leaf)
    return result


def checked_axes_of(spec: PartitionSpec, rank: int, axis_names: Sequence[str], name: str) -> list[NamedAxes | None]:
    """Returns `constrained_axes_of` a spec, once it is checked to fit an array of this rank on a mesh of these axes."""
    if len(spec) > rank:
        raise ValueError(f"The spec of {name} is {spec} with {len(spec)} dimensions, but the array has {rank}.")
    dimensions = constrained_axes_of(spec, rank)
    axes_in_use = [axis for axes in dimensions for axis in axes or ()]
    for axis in axes_in_use:
        if axis not in axis_names:
            raise ValueError(f"The spec of {name} has an axis {axis!r}; use axes of the mesh: {tuple(axis_names)}.")
        if axes_in_use.count(axis) > 1:
            raise ValueError(
                f"The spec of {name} is {spec}; an axis can split one dimension only, {axis!r} splits two."
            )
    return dimensions


def local_shape(shape: Sequence[int], spec: PartitionSpec, mesh_axes: Mapping[str, int], name: str) -> tuple[int, ...]:
    """Returns the shape of one device's part of an array.

    Raises:
      ValueError: as `checked_axes_of` and `split_shape`, or the spec leaves a dimension unconstrained.
    """
    checked_axes_of(spec, len(shape), tuple(mesh_axes), name)
    return split_shape(shape, axes_of(spec, len(shape)), mesh_axes, name)


def split_shape(
    shape: Sequence[int], dimensions: Sequence[NamedAxes | None], mesh_axes: Mapping[str, int], name: str
) -> tuple[int, ...]:
    """Returns a shape with each dimension divided by the devices of the axes that split it; None splits nothing."""
    parts = [math.prod(mesh_axes[axis] for axis in axes or ()) for axes in dimensions]
    for d, (size, count) in enumerate(zip(shape, parts, strict=True)):
        if size % count:
            raise ValueError(
                f"Dimension {d} of {name} is {size}, which {dimensions[d]} of {count} devices do not divide; "
                "choose another spec or pad the array."
            )
    return tuple(size // count for size, count in zip(shape, parts, strict=True))
