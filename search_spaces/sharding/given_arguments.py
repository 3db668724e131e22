"""Shardings that are kept: those that the user gives, and those that arguments already have."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from search_spaces.sharding.given import dimensions_of

Dimensions = list[tuple[int, ...] | None]
"""For each dimension the axes (by index) that split it, or None where it is free."""


def check_prefix(in_shardings: Any, mesh: Mesh | AbstractMesh) -> None:
    """Holds `in_shardings` against the mesh, as far as that goes without the arguments.

    Raises:
      TypeError: something in it is no sharding.
      ValueError: a spec names an axis that the mesh has not.
    """
    for path, leaf in jax.tree.leaves_with_path(in_shardings, is_leaf=_is_spec):
        name = f"`in_shardings`{jax.tree_util.keystr(path)}"
        if not _is_spec(leaf):
            raise TypeError(f"{name} must be a PartitionSpec, a NamedSharding or None, not {leaf!r}.")
        if leaf is not None:
            spec = _spec(leaf)
            _dimensions(name, spec, max(len(spec), 1), mesh)
            _check_mesh(name, leaf, mesh)


def given_dimensions(
    in_shardings: Any, args: tuple[Any, ...], carried: Sequence[PartitionSpec | None], paths: Sequence[str], mesh: Any
) -> dict[int, Dimensions]:
    """What must be kept of each flat argument: what the user gives, else what the argument carries.

    Args:
      in_shardings: as in `search`.
      args: the arguments without the static ones, abstract.
      carried: for each flat argument the spec that it has, or None.
      paths: for each flat argument its name.
      mesh: the mesh.

    Raises:
      ValueError: `in_shardings` is no prefix of the arguments, or a spec does not fit its argument.
    """
    asked: list[Any] = list(carried)
    if in_shardings is not None:
        tuples = isinstance(in_shardings, tuple | list) and not _is_spec(in_shardings)
        prefix = tuple(in_shardings) if tuples else (in_shardings,)
        if len(prefix) != len(args):
            raise ValueError(
                f"`in_shardings` must have an entry for each of the {len(args)} arguments, not {len(prefix)}."
            )
        asked = [a if a is not None else c for a, c in zip(_broadcast(prefix, args), asked, strict=True)]
    found = {}
    for i, (sharding, leaf) in enumerate(zip(asked, jax.tree.leaves(args), strict=True)):
        if sharding is not None:
            spec, shape = _spec(sharding), jax.numpy.shape(leaf)
            dims = _dimensions(f"`in_shardings` of {paths[i]}", spec, len(shape), mesh)
            _check_divides(paths[i], spec, dims, shape, tuple(mesh.shape.values()))
            found[i] = dims
    return found


def carried_spec(leaf: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    """The spec of an array that is already sharded over the mesh, or None."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and getattr(leaf, "committed", True):
        return sharding.spec if _is_same(sharding.mesh, mesh) else None
    return None


def _is_same(one: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> bool:
    """Whether two meshes have the same axes and, where both have devices, the same ones."""
    if list(one.shape.items()) != list(other.shape.items()):
        return False
    return not (isinstance(one, Mesh) and isinstance(other, Mesh)) or one.devices.tolist() == other.devices.tolist()


def _check_mesh(name: str, sharding: PartitionSpec | NamedSharding, mesh: Mesh | AbstractMesh) -> None:
    if isinstance(sharding, NamedSharding) and not _is_same(sharding.mesh, mesh):
        raise ValueError(
            f"{name} is on the mesh {sharding.mesh}, not on `mesh`, {mesh}. Give its PartitionSpec instead."
        )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def _spec(sharding: PartitionSpec | NamedSharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def _dimensions(name: str, spec: PartitionSpec, rank: int, mesh: Mesh | AbstractMesh) -> Dimensions:
    try:
        return dimensions_of(spec, rank, tuple(mesh.axis_names), tuple(mesh.shape.values()))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_divides(
    path: str, spec: PartitionSpec, dims: Dimensions, shape: Sequence[int], axis_sizes: Sequence[int]
) -> None:
    for d, (axes, n) in enumerate(zip(dims, shape, strict=True)):
        parts = math.prod(axis_sizes[a] for a in axes or ())
        if n % parts:
            raise ValueError(
                f"`in_shardings` of {path}: {spec} splits dimension {d} of {tuple(shape)} into {parts} parts, "
                "which do not divide it. Pad the array or choose another dimension."
            )


def _broadcast(prefix: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """The prefix's entry for each leaf of the arguments."""
    found: list[Any] = []

    def spread(spec: Any, subtree: Any) -> None:
        found.extend([spec] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(spread, prefix, args, is_leaf=_is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`in_shardings` is not a prefix of the arguments: {error}") from None
    return found
