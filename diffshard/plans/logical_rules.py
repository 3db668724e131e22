"""Flax's logical axis rules that say what a plan found: which mesh axes split the dimensions of each name."""

from typing import NamedTuple

from diffshard.plans.base import PlanData, Tensor
from diffshard.plans.formats import format_bytes

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
