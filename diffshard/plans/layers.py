"""A plan by layer: the modules of the user's code in the order in which they run, equal ones only once.

The operations of a plan are a sequence of passes through its layers. Flows are the collectives on arrays that one layer
makes and another reads.
"""

import re
import statistics
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from diffshard.plans.base import Operation, PlanData
from diffshard.plans.page_elements import escape
from diffshard.plans.printing import format_array, format_bytes, format_s, group_names, is_shown, readable_path
from diffshard.plans.summary import Communication, communication, device_bytes, module_path, modules_of, result_type
from search_spaces.partition_specs import NamedSpec

_SMALL_SHARE = 0.03  # of a layer's time: operations that take less are shown together; fits a layer on a screen


class LayerPart(NamedTuple):
    """An argument or operation in a layer, or several that are alike.

    Attributes:
      name: path inside the layer, without the layer's own name.
      spec: how it is split; None for all small operations together, whose specs differ.
      array: type of the argument or of the operation's first result.
      times: how many there are in one layer.
      seconds: of all of them in one layer and step.
      num_bytes: of all of them on one device; 0 for operations.
      collectives: "kind axis" of the communication that they cause.
      source: file and line of the first of them.
    """

    name: str
    spec: NamedSpec | None
    array: str
    times: int
    seconds: float
    num_bytes: float
    collectives: tuple[str, ...]
    source: str


class Layer(NamedTuple):
    """A layer, or several of equal content.

    Attributes:
      name: pattern of the modules' names, such as `GPT/layer_*`.
      times: how many layers there are of this content.
      compute_s, collective_s: seconds of one of them in one step.
      members: the names of the layers that it stands for.
    """

    name: str
    times: int
    arguments: tuple[LayerPart, ...]
    forward: tuple[LayerPart, ...]
    backward: tuple[LayerPart, ...]
    compute_s: float
    collective_s: float
    members: tuple[str, ...]


class _Operations(NamedTuple):
    """The operations of a plan with their communication."""

    plan: PlanData
    communication: Communication

    def seconds(self, index: int) -> float:
        return self.plan.operations[index].compute_s + self.communication.seconds[index]

    def collectives(self, *indices: int) -> tuple[str, ...]:
        """Returns the collectives of some operations, each once, as "kind axis"."""
        kinds = dict.fromkeys(kind for i in indices for kind in self.communication.kinds[i])
        return tuple(f"{kind} {axis}" for kind, axis in kinds)


def layers(plan: PlanData) -> list[Layer]:
    """Returns the layers of a plan in the order of their forward passes.

    Operations outside all modules form layers of their own by what they do: the loss, or the update of the state.
    """
    operations = _Operations(plan, communication(plan))
    members: dict[str, tuple[list[int], list[int]]] = {}
    names = _names_of(plan)
    for i, operation in enumerate(plan.operations):
        if operation.kind != "input":
            members.setdefault(names[i], ([], []))["transpose(" in operation.scope].append(i)
    arguments = _arguments_of(plan, list(members))
    result = []
    for name in [*members, *(name for name in arguments if name not in members)]:
        forward, backward = members.get(name, ([], []))
        arguments_inside = arguments.get(name, [])
        layer = Layer(
            name,
            1,
            _argument_parts(operations, arguments_inside, name),
            _operation_parts(operations, forward, name),
            _operation_parts(operations, backward, name),
            sum(plan.operations[i].compute_s for i in (*forward, *backward)),
            sum(operations.communication.seconds[i] for i in (*forward, *backward, *arguments_inside)),
            (name,),
        )
        if layer.compute_s or layer.collective_s or layer.arguments:
            result.append(layer)
    middle = {name: statistics.median(forward or backward) for name, (forward, backward) in members.items()}
    return _without_repetition(sorted(result, key=lambda layer: middle.get(layer.name, -1)))


def layer_of_scope(scope: str) -> tuple[str, bool]:
    """Returns the layer of what a name stack is of, its two outermost modules, and whether it is of a backward pass."""
    modules = modules_of(scope)
    name = "/".join(modules[:2]) or ("loss" if "jvp(" in scope else "update")
    return name, "transpose(" in scope


def layers_of_operations(plan: PlanData) -> list[str]:
    """Returns the name of the layer of each entry of `PlanData.operations`, arguments included."""
    names = _names_of(plan)
    arguments = _arguments_of(plan, list(dict.fromkeys(name for name in names if name)))
    for layer, members in arguments.items():
        for index in members:
            names[index] = layer
    return names


def _names_of(plan: PlanData) -> list[str]:
    """Returns the name of the layer of each entry of `PlanData.operations`, empty for arguments.

    What a loop reads, carries and writes belongs to the layer of its body. An operation that was moved out of a loop
    has lost the module around its layer, and gets it back: `layers/attention` belongs to `Net/layers`.
    """
    names = [layer_of_scope(o.scope)[0] if o.kind != "input" else "" for o in plan.operations]
    pairs = [name.split("/") for name in dict.fromkeys(names) if "/" in name]
    inner = {last for _, last in pairs}
    whole_names = {last: f"{first}/{last}" for first, last in pairs if first not in inner}
    names = [whole_names.get(name.split("/")[0], name) for name in names]
    for i in reversed(range(len(names) - 1)):
        if plan.operations[i].kind in ("slice", "carry"):
            names[i] = names[i + 1]
    for i in range(1, len(names)):
        if plan.operations[i].kind == "stack":
            names[i] = names[i - 1]
    return names


def _arguments_of(plan: PlanData, names: Sequence[str]) -> dict[str, list[int]]:
    """Returns the arguments of each layer: those whose path has the layer's innermost module in it."""
    by_module = {name.split("/")[-1]: name for name in reversed(names)}
    result: dict[str, list[int]] = {}
    for i, tensor in enumerate(plan.arguments):
        parts = re.split(r"[/.]", readable_path(tensor.path))
        name = next((by_module[p] for p in parts[1:] if p in by_module), None)
        if name is None:  # `embed` holds what `embed.attend` reads
            name = next((by_module[m] for p in parts[1:] for m in by_module if m.startswith(f"{p}.")), None)
        result.setdefault(name or "arguments", []).append(i)
    return result


def _argument_parts(operations: _Operations, members: Sequence[int], layer: str) -> tuple[LayerPart, ...]:
    tensors = [operations.plan.arguments[i] for i in members]
    last = layer.split("/")[-1]
    names = [readable_path(t.path).replace(f"/{last}/", "/") for t in tensors]
    keys = [(t.spec, format_array(t)) for t in tensors]
    parts = []
    for group in group_names(names, keys):
        spec, array = keys[group.members[0]]
        indices = [members[m] for m in group.members]
        size = sum(device_bytes(operations.plan, operations.plan.arguments[i]) for i in indices)
        if not is_shown(size):
            continue
        seconds = sum(operations.communication.seconds[i] for i in indices)
        collectives = operations.collectives(*indices)
        parts.append(LayerPart(group.pattern, spec, array, len(indices), seconds, size, collectives, ""))
    return tuple(parts)


def _operation_parts(operations: _Operations, members: Sequence[int], layer: str) -> tuple[LayerPart, ...]:
    """Returns parts in program order, and all that take little as one part at the end."""
    records = operations.plan.operations
    costly = [i for i in members if records[i].results and operations.seconds(i) > 0]
    keys: list[tuple[NamedSpec, str, tuple[str, ...]]] = [
        (records[i].value_specs[0], result_type(records[i]), operations.collectives(i)) for i in costly
    ]
    groups = group_names([_name_inside(records[i], layer) for i in costly], keys)
    least_s = _SMALL_SHARE * sum(operations.seconds(i) for i in costly)
    parts, small = [], []
    for group in groups:
        indices = [costly[m] for m in group.members]
        seconds = sum(operations.seconds(i) for i in indices)
        spec, array, collectives = keys[group.members[0]]
        if seconds < least_s and not collectives:
            small += indices
            continue
        source = records[indices[0]].source
        parts.append(LayerPart(group.pattern, spec, array, len(indices), seconds, 0.0, collectives, source))
    if small:
        small_s = sum(map(operations.seconds, small))
        parts.append(LayerPart("small operations", None, "", len(small), small_s, 0.0, (), ""))
    return tuple(parts)


def _name_inside(operation: Operation, layer: str) -> str:
    modules, _ = module_path(operation)
    inner = modules[len(layer.split("/")) :] if "/".join(modules).startswith(layer) else modules
    return "/".join((*inner, operation.signature.split("(", 1)[0]))


def _without_repetition(all_layers: Sequence[Layer]) -> list[Layer]:
    """Joins layers of equal content."""
    groups = group_names([layer.name for layer in all_layers], [_content(layer) for layer in all_layers])
    return [
        all_layers[g.members[0]]._replace(
            name=g.pattern, times=len(g.members), members=tuple(all_layers[m].name for m in g.members)
        )
        for g in groups
    ]


def _content(layer: Layer) -> Hashable:
    """Returns the key that equal layers share: all of their parts, with times to three digits."""

    def round_parts(parts: Sequence[LayerPart]) -> Hashable:
        return tuple((*p[:4], f"{p.seconds:.3g}", *p[5:7]) for p in parts)

    return round_parts(layer.arguments), round_parts(layer.forward), round_parts(layer.backward)


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
