"""Names of dimensions that flax's metadata give to arrays, and the specs that rules make of them.

`logical_rules` goes the other way, from a plan to the rules that it stands for.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diffshard.plans.base import LogicalAxes, LogicalAxisRules, PlanData, Tensor
from diffshard.plans.printing import format_bytes


def logical_axes_of(tree: Any) -> list[LogicalAxes | None]:
    """Returns for each leaf the axes that flax's metadata name, or None.

    The metadata are linen's boxes (`nn.with_partitioning`, `nn.with_logical_partitioning`) and the `out_sharding` of
    nnx variables. Rules that an array brings itself replace its names by mesh axes.
    """
    meta = sys.modules.get("flax.core.meta")  # arguments have such metadata only where flax is imported
    nnx = sys.modules.get("flax.nnx")
    if meta is None:
        return [None] * len(jax.tree.leaves(tree))
    boxes = (meta.Partitioned, nnx.Variable) if nnx else (meta.Partitioned,)
    axes: list[LogicalAxes | None] = []
    for box in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, boxes)):
        names, rules = (), None
        if isinstance(box, meta.Partitioned):
            names, rules = box.names, getattr(box, "rules", None)
        elif isinstance(box, boxes):
            metadata = box.get_metadata()
            names, rules = metadata.get("out_sharding"), metadata.get("sharding_rules")
        own_rules = dict(rules or ())
        named = tuple(own_rules.get(name, name) for name in names or ())
        axes += [named if named and len(named) == len(jnp.shape(leaf)) else None for leaf in jax.tree.leaves(box)]
    return axes


def spec_by_rules(axes: LogicalAxes, rules: LogicalAxisRules, mesh_axes: Sequence[str], path: str) -> PartitionSpec:
    """Returns the spec that rules give to an array: for each dimension the first rule whose mesh axes are still free.

    Args:
      axes: the names of the dimensions; those of mesh axes need no rule.
      rules: pairs of a name and mesh axes.
    """
    used: set[str] = set()
    spec: list[tuple[str, ...] | None] = []
    for name in axes:
        choices = [split for other, split in rules if other == name]
        own = (name,) if isinstance(name, str) else tuple(name or ())
        if not choices and all(axis in mesh_axes for axis in own):
            choices = [own]
        if not choices:
            raise ValueError(
                f"`{path}` names its dimensions {axes} in flax's metadata, and {name!r} neither has a rule in "
                f"`logical_axis_rules` {dict(rules)} nor is an axis of the mesh {tuple(mesh_axes)}. Give it a rule, "
                f"such as ({name!r}, None) for dimensions that are not split."
            )
        split = next((split for split in choices if used.isdisjoint(split)), ())
        used.update(split)
        spec.append(split or None)
    return PartitionSpec(*spec)


def checked_rules(rules: Any, mesh_axes: Sequence[str]) -> LogicalAxisRules:
    """Returns a user's rules with tuples of mesh axes."""
    result = []
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise TypeError(f"`logical_axis_rules` must be pairs such as ('embed', 'data'), not {rules!r}.")
    for rule in rules:
        if not isinstance(rule, Sequence) or len(rule) != 2 or not isinstance(rule[0], str):
            raise TypeError(f"`logical_axis_rules` must be pairs such as ('embed', 'data'); one is {rule!r}.")
        name, axes = rule
        if axes is not None and not isinstance(axes, str | Sequence):
            raise TypeError(f"`logical_axis_rules` must be pairs such as ('embed', 'data'); one is {rule!r}.")
        split = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in split:
            if axis not in mesh_axes:
                raise ValueError(
                    f"`logical_axis_rules` has the mesh axis {axis!r} for {name!r}; the mesh has {tuple(mesh_axes)}."
                )
        result.append((name, split))
    return tuple(result)


MeshAxes = str | tuple[str, ...] | None


class LogicalRules(NamedTuple):
    """Rules for flax, and where a plan does not follow them.

    Attributes:
      rules: pairs of a logical axis and mesh axes, as `nn.logical_axis_rules` and `logical_axis_rules` of
        `diffshard.search` take them.
      disagreements: for each name that arrays split in different ways a sentence with these; its rule is then that of
        the most bytes.
    """

    rules: tuple[tuple[str, MeshAxes], ...]
    disagreements: tuple[str, ...]


def logical_rules_of(plan: PlanData) -> LogicalRules:
    """Returns the rules that a plan's arguments with flax's metadata follow; none if there are no such arguments."""
    uses: dict[str, dict[tuple[str, ...], list[Tensor]]] = {}
    for tensor in plan.arguments:
        for name, axes in zip(tensor.logical_axes or (), tensor.spec, strict=False):
            if name and not set(name.split("+")) <= plan.mesh_axes.keys():
                uses.setdefault(name, {}).setdefault(axes, []).append(tensor)
    rules, disagreements = [], []
    for name, by_axes in uses.items():
        most_first = sorted(by_axes.items(), key=lambda item: -_bytes(item[1]))
        rules.append((name, _short(most_first[0][0])))
        if len(most_first) > 1:
            ways = "; ".join(
                f"{'+'.join(axes) or 'no axis'} in {tensors[0].path}"
                f"{f' and {len(tensors) - 1} more' if len(tensors) > 1 else ''} ({format_bytes(_bytes(tensors))})"
                for axes, tensors in most_first
            )
            disagreements.append(f"{name!r} is split over {ways}.")
    return LogicalRules(tuple(rules), tuple(disagreements))


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(tensor.num_bytes for tensor in tensors))


def _short(axes: tuple[str, ...]) -> MeshAxes:
    return None if not axes else axes[0] if len(axes) == 1 else axes
