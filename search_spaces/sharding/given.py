"""What the user or the function itself fixes: specs of arguments, sharding constraints, `shard_map`s."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from search_spaces.partition_specs import IndexedSpec, broadcast_specs, checked_axes_of, split_shape
from search_spaces.sharding.base import GivenSpec, ShardingStrategy
from search_spaces.sharding.graph import Graph, Operand, Value, Vertex


def dimensions_of(
    spec: PartitionSpec, rank: int, axis_names: Sequence[str], axis_sizes: Sequence[int], name: str
) -> list[tuple[int, ...] | None]:
    """Returns a `PartitionSpec` as axis indices for each dimension; None where it leaves a dimension unconstrained.

    Axes of one device split nothing and are left out.

    Raises:
      ValueError: as `checked_axes_of`; `name` is the array's, for the message.
    """
    sizes = dict(zip(axis_names, axis_sizes, strict=True))
    return [
        None if axes is None else tuple(axis_names.index(axis) for axis in axes if sizes[axis] > 1)
        for axes in checked_axes_of(spec, rank, axis_names, name)
    ]


def fits(spec: IndexedSpec, given: GivenSpec) -> bool:
    """Tells whether a spec agrees with the given one in every dimension that is not free."""
    return all(given_axes is None or tuple(given_axes) == axes for axes, given_axes in zip(spec, given, strict=True))


def is_constrained(vertex: Vertex) -> bool:
    """Tells whether the function itself says how an operation is sharded: a sharding constraint or a `shard_map`."""
    return _primitive(vertex) in ("shard_map", "sharding_constraint")


def constraint_of(vertex: Vertex, axis_names: Sequence[str], sizes: Sequence[int]) -> GivenSpec | None:
    """Returns what a sharding constraint asks for; None for every other vertex."""
    if vertex.equation is None or _primitive(vertex) != "sharding_constraint":
        return None
    spec = getattr(vertex.equation.params["sharding"], "spec", None)
    if spec is None:
        return None
    return dimensions_of(spec, len(vertex.results[0].shape), axis_names, sizes, "a sharding constraint's array")


def shard_map_strategy(vertex: Vertex, axis_names: Sequence[str], sizes: tuple[int, ...]) -> ShardingStrategy | None:
    """Returns the only strategy of a `shard_map`, which has its own specs; None for every other vertex."""
    if vertex.equation is None or _primitive(vertex) != "shard_map":
        return None
    params = vertex.equation.params
    of_map = tuple(getattr(params.get("mesh"), "axis_names", axis_names))
    if not set(of_map) <= set(axis_names):
        raise ValueError(
            f"A shard_map in the function ({vertex.user_source}), such as a lookup of tables or a layer of experts, "
            f"is for a mesh with the axes {of_map}, not {tuple(axis_names)}. Search on its mesh: give `mesh`, not "
            "`devices`."
        )

    def specs(given: Sequence[Any], arrays: Sequence[Operand]) -> tuple[IndexedSpec, ...]:
        dimensions = [
            dimensions_of(s, rank_of(x), axis_names, sizes, "a `shard_map`'s array")
            for s, x in zip(given, arrays, strict=True)
        ]
        return tuple(tuple(axes or () for axes in dims) for dims in dimensions)

    results = specs(params["out_specs"], vertex.results)
    names = params.get("newly_manual_axes", params.get("manual_axes", axis_names))
    parts = math.prod(n for name, n in zip(axis_names, sizes, strict=True) if name in names)
    return ShardingStrategy(specs(params["in_specs"], vertex.operands), results, parts, ((),) * len(results), results)


def axes_with_meaning(
    graph: Graph, given: Mapping[int, GivenSpec], axis_names: Sequence[str], sizes: tuple[int, ...]
) -> frozenset[int]:
    """Returns the mesh axes that given specs, constraints or `shard_map`s name: these cannot be swapped with others."""
    fixed_axes = {axis for dims in given.values() for axes in dims for axis in axes or ()}
    for vertex in graph.operations():
        fixed_axes.update(axis for axes in constraint_of(vertex, axis_names, sizes) or () for axis in axes or ())
        strategy = shard_map_strategy(vertex, axis_names, sizes)
        specs = () if strategy is None else (*strategy.operands, *strategy.results)
        fixed_axes.update(axis for spec in specs for axes in spec for axis in axes)
    return frozenset(fixed_axes)


def rank_of(operand: Operand) -> int:
    """Returns the number of dimensions of a value or literal."""
    return len(operand.shape) if isinstance(operand, Value) else np.ndim(operand.val)


def _primitive(vertex: Vertex) -> str:
    return "" if vertex.equation is None else vertex.equation.primitive.name


def check_prefix(in_shardings: Any, mesh: Mesh | AbstractMesh) -> None:
    """Holds `in_shardings` against the mesh, as far as that goes without the arguments.

    Raises:
      TypeError: an entry is not a sharding.
      ValueError: a spec names an axis that the mesh does not have.
    """
    for path, leaf in jax.tree.leaves_with_path(in_shardings, is_leaf=_is_spec):
        name = f"`in_shardings`{jax.tree_util.keystr(path)}"
        if not _is_spec(leaf):
            raise TypeError(f"{name} must be a PartitionSpec, a NamedSharding or None, not {leaf!r}.")
        if leaf is not None:
            spec = _spec(leaf)
            checked_axes_of(spec, len(spec), tuple(mesh.axis_names), name)
            _check_mesh(name, leaf, mesh)


def given_specs(in_shardings: Any, args: Sequence[Any]) -> list[PartitionSpec | NamedSharding | None]:
    """Returns what the user gives for each leaf of the positional arguments, None for nothing.

    Args:
      in_shardings: as in `search`: an entry for each argument, without the static ones.
      args: the arguments without the static ones.
    """
    if in_shardings is None:
        return [None] * len(jax.tree.leaves(args))
    tuples = isinstance(in_shardings, tuple | list) and not _is_spec(in_shardings)
    prefix = tuple(in_shardings) if tuples else (in_shardings,)
    if len(prefix) != len(args):
        raise ValueError(
            f"`in_shardings` must be a tuple with an entry for each of the {len(args)} positional arguments, not "
            f"{len(prefix)}; None leaves an argument free."
        )
    try:
        return broadcast_specs(prefix, tuple(args), _is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`in_shardings` is not a prefix of the arguments: {error}") from None


def given_dimensions(
    specs: Sequence[PartitionSpec | NamedSharding | None],
    arrays: Sequence[jax.ShapeDtypeStruct],
    paths: Sequence[str],
    mesh: Mesh | AbstractMesh,
) -> dict[int, GivenSpec]:
    """Returns the spec that each flat argument must keep, by its number; a dimension that is None is free.

    Args:
      specs: for each array the spec that is given, or None.

    Raises:
      ValueError: a spec does not fit its array.
    """
    kept_specs = {}
    axis_names = tuple(map(str, mesh.axis_names))
    for i, (sharding, array) in enumerate(zip(specs, arrays, strict=True)):
        if sharding is not None:
            spec, shape, name = _spec(sharding), array.shape, f"{paths[i]}, whose sharding is given,"
            split_shape(shape, checked_axes_of(spec, len(shape), axis_names, name), mesh.shape, name)
            kept_specs[i] = dimensions_of(spec, len(shape), axis_names, tuple(mesh.shape.values()), name)
    return kept_specs


def carried_spec(leaf: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    """Returns the spec of an array that is already sharded over the mesh, or None."""
    if isinstance(leaf, Tracer):  # has a sharding only where the mesh's axes are explicit
        return None
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and getattr(leaf, "committed", True):
        return sharding.spec if _is_same(sharding.mesh, mesh) else None
    return None


def _is_same(one: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> bool:
    """Tells whether two meshes have the same axes and, where both have devices, the same ones."""
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


def as_sharding(spec: PartitionSpec | NamedSharding, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns a given spec or sharding as a sharding on a mesh."""
    return NamedSharding(mesh, _spec(spec))


def _spec(sharding: PartitionSpec | NamedSharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding
