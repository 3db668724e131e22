"""Between JAX's `PartitionSpec` and plain tuples: which mesh axes split each dimension of an array.

A `PartitionSpec` writes one axis as a string, several as a tuple, none as None, and may leave out trailing dimensions.
Plain tuples write them all alike, one tuple for each dimension, with axes by name or by their index in the mesh.
"""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

NamedSpec = tuple[tuple[str, ...], ...]
"""For each dimension of an array the names of the mesh axes that split it, major to minor."""
IndexedSpec = tuple[tuple[int, ...], ...]
"""The same with axes by their index in the mesh."""


def axes_of(spec: PartitionSpec, rank: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that split each dimension, major to minor.

    Args:
      spec: of an array.
      rank: number of dimensions of the array, at least as many as the spec has.

    Raises:
      ValueError: the spec leaves a dimension unconstrained.
    """
    dimensions = []
    for d, axes in enumerate(constrained_axes_of(spec, rank)):
        if axes is None:
            raise ValueError(f"`spec` {spec} leaves dimension {d} unconstrained; name the axes that split it, or None.")
        dimensions.append(axes)
    return dimensions


def constrained_axes_of(spec: PartitionSpec, rank: int) -> list[tuple[str, ...] | None]:
    """Returns the mesh axes that split each dimension; None where `PartitionSpec.UNCONSTRAINED` leaves it free."""
    dimensions: list[tuple[str, ...] | None] = []
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
    return tuple(tuple(axis_names[a] for a in axes) for axes in spec)


def indexed_spec(spec: NamedSpec, axis_names: Sequence[str]) -> IndexedSpec:
    """Returns a spec with the indices of the mesh axes in place of their names."""
    return tuple(tuple(axis_names.index(a) for a in axes) for axes in spec)
