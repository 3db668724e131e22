"""Which layer runs when, and what is sent between layers.

The operations of a plan are a sequence of passes through its layers. Flows are the collectives on arrays that one layer
makes and another reads.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from diffshard.plans.base import PlanData
from diffshard.plans.layers import Layer, layer_of_scope, layers_of_operations
from diffshard.plans.page_elements import escape
from diffshard.plans.printing import format_bytes, format_s, is_shown

Direction = Literal["forward", "backward", "update"]
_LEAST_SHARE = 0.004  # of all operations: a shorter pass belongs to the one before it, as it would be too narrow to see


class LayerPass(NamedTuple):
    """Operations of one layer and direction that run after each other.

    Attributes:
      direction: "update" for what is outside the loss and its derivative.
      start, end: numbers of operations that ran before it and until its end.
    """

    layer: str
    direction: Direction
    start: int
    end: int


def operations_before(plan: PlanData) -> list[int]:
    """Returns for each entry of `PlanData.operations` how many that compute something have run when it is done."""
    counts, count = [], 0
    for operation in plan.operations:
        count += operation.kind == "operation"
        counts.append(count)
    return counts


def direction_of(plan: PlanData, index: int) -> Direction:
    """Returns in which pass an operation runs."""
    return pass_of_scope(plan.operations[index].scope)[1]


def pass_of_scope(scope: str) -> tuple[str, Direction]:
    """Returns the layer and the pass of what a name stack is of."""
    layer, is_backward = layer_of_scope(scope)
    return layer, "backward" if is_backward else "update" if layer == "update" else "forward"


def layer_passes(plan: PlanData) -> list[LayerPass]:
    """Returns the passes through the layers in program order."""
    result: list[LayerPass] = []
    count = 0
    for operation in plan.operations:
        if operation.kind != "operation":
            continue
        layer, direction = pass_of_scope(operation.scope)
        if result and (result[-1].layer, result[-1].direction) == (layer, direction):
            result[-1] = result[-1]._replace(end=count + 1)
        else:
            result.append(LayerPass(layer, direction, count, count + 1))
        count += 1
    return _without_short_ones(result, _LEAST_SHARE * count)


def _without_short_ones(found: list[LayerPass], least: float) -> list[LayerPass]:
    """Joins passes of fewer operations than `least` to the one before, and neighbours that are then alike."""
    result: list[LayerPass] = []
    for layer_pass in found:
        is_short = layer_pass.end - layer_pass.start < least
        if result and (is_short or result[-1][:2] == layer_pass[:2]):
            result[-1] = result[-1]._replace(end=layer_pass.end)
        else:
            result.append(layer_pass)
    return result


class LayerFlow(NamedTuple):
    """Collectives of one kind along one mesh axis, on arrays from one shown layer to another.

    Attributes:
      source, target: names of shown layers; equal inside a layer, and where a layer hands on to the next of those that
        are shown as one.
      direction: the pass that makes the arrays, or reads them where they are arguments.
      num_bytes: of all executions, each the size of the whole array in one group of devices along the axis.
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
    """The collectives of a plan, in bytes of one step as in `LayerFlow`.

    Attributes:
      between: those between layers, in the order of the layers that make the arrays.
      inside: those on arrays that are made and read in one layer.
    """

    between: tuple[LayerFlow, ...]
    inside: tuple[LayerFlow, ...]


def layer_traffic(plan: PlanData, shown_layers: Sequence[Layer]) -> LayerTraffic:
    """Returns the traffic between layers and inside them; `shown_layers` are those of `layers(plan)`."""
    layer_of = layers_of_operations(plan)
    shown = {member: layer.name for layer in shown_layers for member in layer.members}
    order = {layer.name: i for i, layer in enumerate(shown_layers)}
    totals: dict[tuple[bool, str, str, Direction, str, str], list[float]] = {}
    for c in plan.collectives:
        amounts = (c.count, c.count * c.num_bytes, c.seconds)
        reader = c.made_by if c.read_by is None else c.read_by
        direction = direction_of(plan, reader if plan.operations[c.made_by].kind == "input" else c.made_by)
        source, target = layer_of[c.made_by], layer_of[reader]
        ends = shown.get(source, source), shown.get(target, target)
        entry = totals.setdefault((source == target, *ends, direction, c.kind, c.axis), [0.0, 0.0, 0.0])
        for i, amount in enumerate(amounts):
            entry[i] += amount
    flows = [(key[0], LayerFlow(*key[1:], *entry)) for key, entry in totals.items()]
    flows.sort(key=lambda pair: [order.get(name, len(order)) for name in pair[1][:2]])
    shown_flows = [(is_inside, flow) for is_inside, flow in flows if is_shown(flow.num_bytes)]
    inside, between = (tuple(f for is_inside, f in shown_flows if is_inside == wanted) for wanted in (True, False))
    return LayerTraffic(between, inside)


def flows_below(traffic: LayerTraffic, shown_layers: Sequence[Layer]) -> list[list[LayerFlow]]:
    """Returns for each layer the flows to draw below it: those between it and itself or a layer further down."""
    order = {layer.name: i for i, layer in enumerate(shown_layers)}
    result: list[list[LayerFlow]] = [[] for _ in shown_layers]
    last = len(shown_layers) - 1
    for flow in traffic.between:
        result[min(order.get(flow.source, last), order.get(flow.target, last))].append(flow)
    return result


def inside_element(layer: Layer, traffic: LayerTraffic) -> str:
    """Returns the collectives inside one layer, each kind with its executions and bytes in a step."""
    totals: dict[tuple[str, str], list[float]] = {}
    for flow in traffic.inside:
        if flow.source == layer.name:
            entry = totals.setdefault((flow.kind, flow.axis), [0.0, 0.0])
            entry[0] += flow.count / layer.times
            entry[1] += flow.num_bytes / layer.times
    lines = (
        f"<div><span class=moves>{escape(kind)} {escape(axis)}</span> {count:,.0f}×, {format_bytes(num_bytes)}</div>"
        for (kind, axis), (count, num_bytes) in sorted(totals.items(), key=lambda item: -item[1][1])
    )
    return f"<div class=inside>{''.join(lines)}</div>" if totals else ""


def flow_elements(layer: Layer, flows: Sequence[LayerFlow], most_bytes: float) -> str:
    """Returns the element below a layer: an arrow for each other layer and direction, with the collectives on it.

    Args:
      most_bytes: the largest number of bytes of any flow, as wide as the column of bars.
    """
    lines = []
    for flow in flows:
        if flow.source == flow.target:
            arrow, other = ("↓" if flow.direction != "backward" else "↑"), "to the next of them"
        elif flow.source == layer.name:
            arrow, other = "↓", f"to {flow.target}"
        else:
            arrow, other = "↑", f"from {flow.source}"
        amounts = f"{flow.count:,.0f}×, {format_bytes(flow.num_bytes)}, {format_s(flow.seconds)}"
        share = 100 * flow.num_bytes / (most_bytes or 1.0)
        lines.append(
            f"<div class=flow><b>{arrow}</b><span>{escape(other)}, {flow.direction}</span>"
            f"<span><span class=moves>{escape(flow.kind)} {escape(flow.axis)}</span> {amounts}</span>"
            f'<i><i style="width:{share:.1f}%"></i></i></div>'
        )
    return f"<div class=flows>{''.join(lines)}</div>" if lines else ""
