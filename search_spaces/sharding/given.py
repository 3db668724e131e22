"""What the user or the function itself fixes: specs of arguments, sharding constraints, `shard_map`s."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from search_spaces.sharding.graph import Graph, Operand, Value, Vertex
from search_spaces.sharding.spec import Spec
from search_spaces.sharding.strategies import ShardingStrategy

Given = Sequence[tuple[int, ...] | None]
"""For each dimension the axes that split it, or None where it is free."""


def dimensions_of(
    spec: Any, rank: int, axis_names: Sequence[str], axis_sizes: Sequence[int]
) -> list[tuple[int, ...] | None]:
    """A `PartitionSpec` as axis indices for each dimension; None where it leaves a dimension unconstrained.

    Axes of one device split nothing and are left out.

    Raises:
      ValueError: the spec has more entries than the array has dimensions, names an axis that the mesh has not, or
        names one twice.
    """
    if len(spec) > rank:
        raise ValueError(f"a spec {spec} of {len(spec)} entries does not fit an array of {rank} dimensions.")
    dims: list[tuple[int, ...] | None] = []
    seen: set[str] = set()
    for entry in spec:
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        if names and not isinstance(names[0], str):  # PartitionSpec.UNCONSTRAINED
            dims.append(None)
            continue
        for name in names:
            if name not in axis_names:
                raise ValueError(f"a spec {spec} names the axis {name!r}; the mesh has {tuple(axis_names)}.")
            if name in seen:
                raise ValueError(f"a spec {spec} names the axis {name!r} twice; it can split one dimension only.")
            seen.add(name)
        axes = [axis_names.index(name) for name in names]
        dims.append(tuple(axis for axis in axes if axis_sizes[axis] > 1))
    return dims + [()] * (rank - len(dims))


def fits(spec: Spec, given: Given) -> bool:
    """Whether a spec is what was given where anything was."""
    return all(wanted is None or tuple(wanted) == axes for axes, wanted in zip(spec, given, strict=True))


def is_constrained(vertex: Vertex) -> bool:
    """Whether the function itself says how an operation is sharded: a sharding constraint or a `shard_map`."""
    return _primitive(vertex) in ("shard_map", "sharding_constraint")


def constraint(vertex: Vertex, axis_names: Sequence[str], sizes: Sequence[int]) -> Given | None:
    """What a sharding constraint asks for; None for every other vertex."""
    if vertex.equation is None or _primitive(vertex) != "sharding_constraint":
        return None
    spec = getattr(vertex.equation.params["sharding"], "spec", None)
    return None if spec is None else dimensions_of(spec, len(vertex.results[0].shape), axis_names, sizes)


def manual(vertex: Vertex, axis_names: Sequence[str], sizes: tuple[int, ...]) -> ShardingStrategy | None:
    """The one strategy of a `shard_map`, its own specs; None for every other vertex."""
    if vertex.equation is None or _primitive(vertex) != "shard_map":
        return None
    params = vertex.equation.params

    def specs(given: Sequence[Any], arrays: Sequence[Operand]) -> tuple[Spec, ...]:
        found = [dimensions_of(s, rank_of(x), axis_names, sizes) for s, x in zip(given, arrays, strict=True)]
        return tuple(tuple(axes or () for axes in dims) for dims in found)

    results = specs(params["out_specs"], vertex.results)
    names = params.get("newly_manual_axes", params.get("manual_axes", axis_names))
    parts = prod(n for name, n in zip(axis_names, sizes, strict=True) if name in names)
    return ShardingStrategy(specs(params["in_specs"], vertex.operands), results, parts, ((),) * len(results), results)


def axes_with_meaning(
    graph: Graph, given: Mapping[int, Given], axis_names: Sequence[str], sizes: tuple[int, ...]
) -> frozenset[int]:
    """The mesh axes that something fixed names: they cannot change places with others."""
    found = {axis for dims in given.values() for axes in dims for axis in axes or ()}
    for vertex in graph.operations():
        found.update(axis for axes in constraint(vertex, axis_names, sizes) or () for axis in axes or ())
        strategy = manual(vertex, axis_names, sizes)
        specs = () if strategy is None else (*strategy.operands, *strategy.results)
        found.update(axis for spec in specs for axes in spec for axis in axes)
    return frozenset(found)


def rank_of(operand: Operand) -> int:
    """The number of dimensions of a value or literal."""
    return len(operand.shape) if isinstance(operand, Value) else np.ndim(operand.val)


def _primitive(vertex: Vertex) -> str:
    return "" if vertex.equation is None else vertex.equation.primitive.name
