"""What is sent between the layers of a plan: the collectives on arrays that one layer makes and another reads."""

from collections.abc import Sequence
from typing import NamedTuple

from diffshard.plans.base import PlanData
from diffshard.plans.formats import format_bytes, format_s
from diffshard.plans.layers import Layer, layers_of_operations
from diffshard.plans.page_elements import escape
from diffshard.plans.phases import Direction, direction_of


class LayerEdge(NamedTuple):
    """Collectives of one kind along one mesh axis, on arrays from one shown layer to another.

    Attributes:
      source, target: names of shown layers; equal inside a layer, and where a layer hands on to the next of those that
        are shown as one.
      direction: the pass that makes the arrays, or reads them where they are arguments.
      kind, axis: of the collectives.
      count: executions in one step.
      num_bytes: of all of them, each the size of the whole array in one group of devices along the axis.
      seconds: that the step waits for them.
    """

    source: str
    target: str
    direction: Direction
    kind: str
    axis: str
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    num_bytes: float
    seconds: float


class LayerTraffic(NamedTuple):
    """The collectives of a plan, in bytes of one step as in `LayerEdge`.

    Attributes:
      edges: those between layers, in the order of the layers that make the arrays.
      inside: those on arrays that are made and read in one layer.
      unknown_bytes: in plans of older versions, which do not say who reads.
    """

    edges: tuple[LayerEdge, ...]
    inside: tuple[LayerEdge, ...]
    unknown_bytes: float


def layer_traffic(plan: PlanData, shown_layers: Sequence[Layer]) -> LayerTraffic:
    """Returns what is sent between layers and inside them; `shown_layers` are those of `layers(plan)`."""
    layer_of = layers_of_operations(plan)
    shown = {member: layer.name for layer in shown_layers for member in layer.members}
    order = {layer.name: i for i, layer in enumerate(shown_layers)}
    unknown_bytes = 0.0
    totals: dict[tuple[bool, str, str, Direction, str, str], list[float]] = {}
    for c in plan.collectives:
        amounts = (c.count, c.count * c.num_bytes, c.seconds)
        if c.made_by is None:
            unknown_bytes += amounts[1]
            continue
        reader = c.made_by if c.read_by is None else c.read_by
        direction = direction_of(plan, reader if plan.operations[c.made_by].kind == "input" else c.made_by)
        source, target = layer_of[c.made_by], layer_of[reader]
        ends = shown.get(source, source), shown.get(target, target)
        entry = totals.setdefault((source == target, *ends, direction, c.kind, c.axis), [0.0, 0.0, 0.0])
        for i, amount in enumerate(amounts):
            entry[i] += amount
    edges = [(key[0], LayerEdge(*key[1:], *entry)) for key, entry in totals.items()]
    edges.sort(key=lambda pair: [order.get(name, len(order)) for name in pair[1][:2]])
    inside, between = (tuple(edge for is_inside, edge in edges if is_inside == wanted) for wanted in (True, False))
    return LayerTraffic(between, inside, unknown_bytes)


def edges_below(traffic: LayerTraffic, shown_layers: Sequence[Layer]) -> list[list[LayerEdge]]:
    """Returns for each layer the edges to draw below it: those between it and itself or a layer further down."""
    order = {layer.name: i for i, layer in enumerate(shown_layers)}
    result: list[list[LayerEdge]] = [[] for _ in shown_layers]
    last = len(shown_layers) - 1
    for edge in traffic.edges:
        result[min(order.get(edge.source, last), order.get(edge.target, last))].append(edge)
    return result


def inside_element(layer: Layer, traffic: LayerTraffic) -> str:
    """Returns the collectives inside one layer, each kind with its executions and bytes in a step."""
    totals: dict[tuple[str, str], list[float]] = {}
    for edge in traffic.inside:
        if edge.source == layer.name:
            entry = totals.setdefault((edge.kind, edge.axis), [0.0, 0.0])
            entry[0] += edge.count / layer.times
            entry[1] += edge.num_bytes / layer.times
    lines = (
        f"<div><span class=moves>{escape(kind)} {escape(axis)}</span> {count:,.0f}×, {format_bytes(num_bytes)}</div>"
        for (kind, axis), (count, num_bytes) in sorted(totals.items(), key=lambda item: -item[1][1])
    )
    return f"<div class=inside>{''.join(lines)}</div>" if totals else ""


def edge_elements(layer: Layer, edges: Sequence[LayerEdge], most_bytes: float) -> str:
    """Returns the element below a layer: an arrow for each other layer and direction, with the collectives on it.

    Args:
      layer: below which it stands.
      edges: of `edges_below`.
      most_bytes: the largest number of bytes of any edge, as wide as the column of bars.
    """
    lines = []
    for edge in edges:
        if edge.source == edge.target:
            arrow, other = ("↓" if edge.direction != "backward" else "↑"), "to the next of them"
        elif edge.source == layer.name:
            arrow, other = "↓", f"to {edge.target}"
        else:
            arrow, other = "↑", f"from {edge.source}"
        amounts = f"{edge.count:,.0f}×, {format_bytes(edge.num_bytes)}, {format_s(edge.seconds)}"
        share = 100 * edge.num_bytes / (most_bytes or 1.0)
        lines.append(
            f"<div class=edge><b>{arrow}</b><span>{escape(other)}, {edge.direction}</span>"
            f"<span><span class=moves>{escape(edge.kind)} {escape(edge.axis)}</span> {amounts}</span>"
            f'<i><i style="width:{share:.1f}%"></i></i></div>'
        )
    return f"<div class=edges>{''.join(lines)}</div>" if lines else ""
