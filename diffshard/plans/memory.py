"""The memory of a device on a plan's page: how much at each operation, and which arrays hold the peak."""

import math
from typing import NamedTuple

from diffshard.plans.base import PlanData
from diffshard.plans.layers import LayerPass, direction_of, layer_passes, operations_before
from diffshard.plans.page_elements import (
    COLOURS,
    COMPUTE,
    Curve,
    Mark,
    bar,
    escape,
    largest_in_columns,
    plot,
    strip,
    table,
)
from diffshard.plans.printing import format_bytes, format_count, group_names, is_shown
from diffshard.plans.sections import HeldTensor
from diffshard.plans.summary import operation_name, result_type, type_bytes

MAX_ROWS = 14
"""Lines of the table of arrays at the peak, the largest ones: they nearly always hold nine tenths of it."""
_NEAR_LIMIT = 0.2  # share of the limit from which on the drawing reaches up to the limit
_FILLS = {"forward": "fill0", "backward": "fill1", "update": "fill3"}


class HeldGroup(NamedTuple):
    """Arrays in memory at the peak that are alike.

    Attributes:
      origin: "argument", "gathered copy", or the pass that makes them.
      num_bytes: of all these arrays, on one device.
      parts: into how many parts each is split.
    """

    name: str
    times: int
    array: str
    origin: str
    num_bytes: float
    parts: int


def held_groups(plan: PlanData) -> list[HeldGroup]:
    """Returns the arrays in memory at the peak, the largest groups first; empty for plans without a profile."""
    held = [t for t in plan.memory.at_peak if is_shown(t.num_bytes)] if plan.memory else []
    keys = [(result_type(plan.operations[t.operation], t.result), _origin(plan, t), t.num_bytes) for t in held]
    names = [_name(plan, t) for t in held]
    groups = []
    for group in group_names(names, keys):
        array, origin, num_bytes = keys[group.members[0]]
        parts = round(type_bytes(array) / num_bytes) if num_bytes else 1
        groups.append(
            HeldGroup(group.pattern, len(group.members), array, origin, num_bytes * len(group.members), parts)
        )
    return sorted(groups, key=lambda group: -group.num_bytes)


def memory_elements(plan: PlanData) -> str:
    """Returns the page's part on memory: a bar of the peak, memory over the program, and the arrays at the peak."""
    limit = plan.memory_limit_bytes
    has_limit = not math.isinf(limit)
    title = "Memory of a device" + (f", of {format_bytes(limit)}" if has_limit else "")
    groups = held_groups(plan)
    return f"<h2>{title}</h2>{_bar_at_peak(plan, groups)}{_drawing(plan)}{_table(plan, groups)}"


def _origin(plan: PlanData, tensor: HeldTensor) -> str:
    kind = plan.operations[tensor.operation].kind
    if tensor.is_copy:
        return "gathered copy"
    return kind if kind == "constant" else "argument" if kind == "input" else direction_of(plan, tensor.operation)


def _name(plan: PlanData, tensor: HeldTensor) -> str:
    operation = plan.operations[tensor.operation]
    name = operation_name(plan, tensor.operation)
    return f"{name} {tensor.result}" if len(operation.results) > 1 else name


def _bar_at_peak(plan: PlanData, groups: list[HeldGroup]) -> str:
    """Draws the bytes of a device at the peak by where they come from."""
    names = {
        "argument": "arguments",
        "constant": "constants",
        "gathered copy": "gathered copies",
        "forward": "made in the forward pass",
        "backward": "made in the backward pass",
        "update": "made outside the loss",
    }
    totals = {origin: sum(g.num_bytes for g in groups if g.origin == origin) for origin in names}
    pieces = [
        (names[origin], total, format_bytes(total), colour)
        for (origin, total), colour in zip(totals.items(), (COMPUTE, *COLOURS), strict=False)
    ]
    rest = max(plan.peak_bytes - sum(totals.values()), 0.0)
    pieces.append(("small arrays", rest, format_bytes(rest), COLOURS[len(names)]))
    return bar(pieces, _whole(plan, plan.peak_bytes))


def _whole(plan: PlanData, least: float) -> float:
    """Returns the bytes at the full width of a bar: the limit if that is near, else what is in use."""
    limit = plan.memory_limit_bytes
    is_near = not math.isinf(limit) and plan.peak_bytes > _NEAR_LIMIT * limit
    return max(limit if is_near else plan.peak_bytes, least)


def _drawing(plan: PlanData) -> str:
    """Draws memory over the operations of the step, the limit, the peak, and which layer runs when."""
    assert plan.memory is not None
    counts = operations_before(plan)
    length = counts[-1] if counts else 0
    points: dict[float, float] = {}
    for index, num_bytes in plan.memory.changes:
        x = float(counts[index] - 1) if index >= 0 else 0.0
        points[max(x, 0.0)] = max(points.get(max(x, 0.0), 0.0), num_bytes)
    passes = layer_passes(plan)
    peak_at = next((x for x, num_bytes in points.items() if num_bytes >= plan.peak_bytes * (1 - 1e-9)), 0.0)
    where = next((f" in {p.layer}, {p.direction}" for p in passes if p.start <= peak_at < p.end), "")
    marks = [Mark(f"peak {format_bytes(plan.peak_bytes)}", "first", x=peak_at)]
    limit, top = plan.memory_limit_bytes, _whole(plan, plan.peak_bytes)
    if limit <= top:
        marks.append(Mark(f"limit {format_bytes(limit)}", "limit", y=limit))
    curve = Curve(largest_in_columns(list(points.items()), float(length or 1)), "first", is_filled=True)
    drawing = plot(
        "Memory over the operations of a step",
        [curve],
        right=float(length or 1),
        top=1.15 * top,
        ends=("start of the step", f"end, after {format_count(length, 'operation')}"),
        marks=marks,
        below=strip([_strip_piece(p) for p in passes], length),
    )
    key = "".join(
        f'<span><i style="background:var(--{fill})"></i>{direction}</span>' for direction, fill in _FILLS.items()
    )
    return (
        f"<h3>In program order, the body of a loop once</h3>{drawing}<div class=key>{key}</div>"
        f"<h3>What is in memory at the peak{escape(where)}</h3>"
    )


def _strip_piece(layer_pass: LayerPass) -> tuple[str, str, float, str]:
    layer, direction, start, end = layer_pass
    title = f"{layer}, {direction}, {format_count(end - start, 'operation')}"
    return layer.split("/")[-1], title, end - start, _FILLS[direction]


def _table(plan: PlanData, groups: list[HeldGroup]) -> str:
    """Lists the largest arrays at the peak, and all others as one line."""
    rows = [
        (
            g.name,
            f"{g.times}×" if g.times > 1 else "",
            g.array,
            g.origin,
            f"1/{g.parts}" if g.parts > 1 else "whole",
            format_bytes(g.num_bytes),
            _percent(g.num_bytes, plan),
        )
        for g in groups[:MAX_ROWS]
    ]
    rest = plan.peak_bytes - sum(g.num_bytes for g in groups[:MAX_ROWS])
    if rest > 1e-6 * plan.peak_bytes:
        rows.append(("all others", "", "", "", "", format_bytes(rest), _percent(rest, plan)))
    head = ("name", "how many", "type", "made in", "part", "on a device", "of the peak")
    return table(head, rows, right=(1, 5, 6))


def _percent(num_bytes: float, plan: PlanData) -> str:
    return f"{num_bytes / plan.peak_bytes:.1%}"
