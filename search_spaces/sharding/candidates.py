"""Which strategies a vertex of a graph may choose from: by its rule, by its kind, or by what the function fixes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from search_spaces.sharding.graph import Value, Vertex
from search_spaces.sharding.resharding import Paths
from search_spaces.sharding.rule import Rule
from search_spaces.sharding.spec import Spec, shards, specs_of_shape
from search_spaces.sharding.strategies import Strategy, holding, strategies_of_rule, whole

MOST_STRATEGIES = 400
Given = Sequence[tuple[int, ...] | None]
"""For each dimension the axes that split it, or None where it is free."""


@dataclass(frozen=True)
class Candidates:
    """The strategies of vertices on a mesh.

    Attributes:
      axis_names, axis_sizes: the mesh's.
      path: the steps between two specs.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    path: Paths

    def of(self, vertex: Vertex, rule: Rule | None, given: Given | None, copied: bool) -> tuple[Strategy, ...]:
        """What a vertex may choose from.

        Args:
          vertex: of the graph.
          rule: of its operation; None replicates.
          given: what the user fixed of an input.
          copied: whether the array that the vertex holds has several readers, so that a gathered copy may be kept.
        """
        if vertex.kind == "operation":
            return self._operation(vertex, rule)
        value, num_operands = vertex.results[0], len(vertex.operands)
        if vertex.kind == "stack":
            return tuple(self._joined((s,), ((), *s)) for s in specs_of_shape(value.shape[1:], self.axis_sizes))
        if vertex.kind == "join":
            return tuple(self._joined((s,) * num_operands, s) for s in specs_of_shape(value.shape, self.axis_sizes))
        stored = self._allowed(value.shape, given)
        return tuple(self._kept(vertex, s, used) for s in stored for used in (_coarser(s) if copied else (s,)))

    def _operation(self, vertex: Vertex, rule: Rule | None) -> tuple[Strategy, ...]:
        assert vertex.equation is not None
        constrained = _constraint(vertex, self.axis_names)
        if constrained is not None:
            return tuple(holding(s, self.axis_sizes) for s in self._allowed(vertex.results[0].shape, constrained))
        manual = _manual(vertex, self.axis_names, self.axis_sizes)
        if manual is not None:
            return (manual,)
        if rule is None:
            return (whole([_rank(o) for o in vertex.operands], [len(r.shape) for r in vertex.results]),)
        return strategies_of_rule(rule, self.axis_sizes, MOST_STRATEGIES)

    def _allowed(self, shape: tuple[int, ...], given: Given | None) -> list[Spec]:
        specs = [s for s in specs_of_shape(shape, self.axis_sizes) if given is None or _fits(s, given)]
        # One that splits unevenly or orders axes in its own way is not among ours, but it was asked for.
        return specs or [tuple(axes or () for axes in given or ())]

    def _kept(self, vertex: Vertex, stored: Spec, used: Spec) -> Strategy:
        """An array that is stored one way and gathered for its readers: a parameter, a carry, a slice of a stack."""
        gathers = self.path(stored, used)
        count = len(vertex.results)
        operand = ((), *stored) if vertex.kind == "slice" else stored
        parts = shards(stored, self.axis_sizes)
        return Strategy(
            (operand,) * len(vertex.operands),
            (used, stored)[:count],
            parts,
            (gathers, ())[:count],
            (stored, stored)[:count],
        )

    def _joined(self, operands: tuple[Spec, ...], result: Spec) -> Strategy:
        return Strategy(operands, (result,), shards(result, self.axis_sizes), ((),), (result,))


def is_constrained(vertex: Vertex, axis_names: Sequence[str]) -> bool:
    """Whether the function itself says how an operation is sharded: a sharding constraint or a `shard_map`."""
    assert vertex.equation is not None
    return vertex.equation.primitive.name == "shard_map" or _constraint(vertex, axis_names) is not None


def _constraint(vertex: Vertex, axis_names: Sequence[str]) -> Given | None:
    equation = vertex.equation
    if equation is None or equation.primitive.name != "sharding_constraint":
        return None
    spec = getattr(equation.params["sharding"], "spec", None)
    return None if spec is None else dimensions_of(spec, len(vertex.results[0].shape), axis_names)


def _manual(vertex: Vertex, axis_names: Sequence[str], sizes: tuple[int, ...]) -> Strategy | None:
    """The one strategy of a `shard_map`: its own specs."""
    equation = vertex.equation
    if equation is None or equation.primitive.name != "shard_map":
        return None
    params = equation.params

    def specs(given: Sequence[Any], arrays: Sequence[Any]) -> tuple[Spec, ...]:
        found = [dimensions_of(s, _rank(x), axis_names) for s, x in zip(given, arrays, strict=True)]
        return tuple(tuple(axes or () for axes in dims) for dims in found)

    results = specs(params["out_specs"], vertex.results)
    manual = params.get("newly_manual_axes", params.get("manual_axes", axis_names))
    parts = int(np.prod([n for name, n in zip(axis_names, sizes, strict=True) if name in manual]))
    return Strategy(specs(params["in_specs"], vertex.operands), results, parts, ((),) * len(results), results)


def _rank(operand: Any) -> int:
    return len(operand.shape) if isinstance(operand, Value) else np.ndim(operand.val)


def _coarser(spec: Spec) -> list[Spec]:
    """The specs that gathering along some of a spec's axes leaves, itself first."""
    axes = [a for dim in spec for a in dim]
    found = []
    for kept in range(2 ** len(axes) - 1, -1, -1):
        left = {a for i, a in enumerate(axes) if kept >> i & 1}
        found.append(tuple(tuple(a for a in dim if a in left) for dim in spec))
    return found


def _fits(spec: Spec, given: Given) -> bool:
    return all(wanted is None or tuple(wanted) == axes for axes, wanted in zip(spec, given, strict=True))


def dimensions_of(spec, rank: int, axis_names: Sequence[str]) -> list[tuple[int, ...] | None]:
    """A `PartitionSpec` as axis indices for each dimension; None where it leaves a dimension unconstrained.

    Raises:
      ValueError: the spec has more entries than the array has dimensions or names an axis that the mesh has not.
    """
    if len(spec) > rank:
        raise ValueError(f"a spec {spec} of {len(spec)} entries does not fit an array of {rank} dimensions.")
    dims: list[tuple[int, ...] | None] = []
    for entry in spec:
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        if names and not isinstance(names[0], str):  # PartitionSpec.UNCONSTRAINED
            dims.append(None)
            continue
        for name in names:
            if name not in axis_names:
                raise ValueError(f"a spec {spec} names the axis {name!r}; the mesh has {tuple(axis_names)}.")
        dims.append(tuple(axis_names.index(name) for name in names))
    return dims + [()] * (rank - len(dims))
