"""Two plans side by side: what differs in how arrays are split, what layers take and send, and what the step costs.

Arguments and results are matched by their paths, layers by their names. Operations are matched in program order, as far
as both functions have the same ones; a note names the first operation that differs.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes
from diffshard.plans.base import Operation, PlanData, Tensor
from diffshard.plans.difference_data import (
    Alignment,
    ArrayDifference,
    LayerDifference,
    OperationDifference,
    Total,
    align_operations,
)
from diffshard.plans.layers import layers_of_operations
from diffshard.plans.page_elements import Paged, document, escape, table
from diffshard.plans.printing import (
    format_array,
    format_bytes,
    format_devices,
    format_s,
    format_spec,
    format_table,
    group_names,
    is_shown,
    readable_path,
    short_name,
    wrapped,
)
from diffshard.plans.summary import communication, device_bytes, operation_name, result_type
from search_spaces.partition_specs import NamedSpec

_EQUAL_SHARE = 1e-9  # of the larger: quantities that differ by less are equal up to rounding


@dataclass(frozen=True)
class PlanDifference(Paged):
    """The differences of two plans; `print` shows them, `html` makes a page, and notebooks show that.

    Attributes:
      titles: function, mesh, hardware and executor of each plan.
      totals: seconds of a step, bytes that a device sends and holds.
      arguments, outputs, layers, operations: those that differ.
      counts: how many arguments, outputs, layers and operations were compared.
      notes: where the functions, meshes or hardware differ, and how many operations were not compared.
    """

    titles: tuple[str, str]
    totals: tuple[Total, ...]
    arguments: tuple[ArrayDifference, ...]
    outputs: tuple[ArrayDifference, ...]
    layers: tuple[LayerDifference, ...]
    operations: tuple[OperationDifference, ...]
    counts: tuple[int, int, int, int]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return format_difference(self)

    def html(self) -> str:
        """Returns the difference as a self-contained page for a browser."""
        return difference_page(self)


def difference_of(first: PlanData, second: PlanData) -> PlanDifference:
    """Compares two plans, of any functions, meshes and hardware."""
    alignment = align_operations(first, second)
    matched = alignment.pairs
    arguments, num_arguments = _arrays(first, second, first.arguments, second.arguments)
    outputs, num_outputs = _arrays(first, second, first.outputs, second.outputs)
    layers, num_layers = _layers(first, second)
    return PlanDifference(
        titles=(_title(first), _title(second)),
        totals=(
            Total("step", "s", first.step_s, second.step_s),
            Total("computing", "s", first.compute_s, second.compute_s),
            Total("communicating", "s", first.step_s - first.compute_s, second.step_s - second.compute_s),
            Total("sent by a device", "bytes", sum(_sent(first)), sum(_sent(second))),
            Total("arguments on a device", "bytes", _held(first), _held(second)),
            Total("peak memory", "bytes", first.peak_bytes, second.peak_bytes),
        ),
        arguments=arguments,
        outputs=outputs,
        layers=layers,
        operations=_operations(first, second, matched),
        counts=(num_arguments, num_outputs, num_layers, sum(first.operations[i].kind != "input" for i, _ in matched)),
        notes=_notes(first, second, alignment),
    )


def _title(plan: PlanData) -> str:
    return f"{short_name(plan.function)} on {format_devices(plan.mesh_axes)}, {plan.hardware.name}, by {plan.executor}"


def _sent(plan: PlanData) -> list[float]:
    """Returns the bytes that a device sends for each operation of a plan in one step."""
    sent = [0.0] * len(plan.operations)
    for c in plan.collectives:
        kind = cast(CollectiveKind, c.kind)
        sent[c.operation] += float(collective_sent_bytes(kind, c.num_bytes, plan.mesh_axes[c.axis])) * c.count
    return sent


def _held(plan: PlanData) -> float:
    return sum(device_bytes(plan, tensor) for tensor in plan.arguments)


def _differs(first: float, second: float) -> bool:
    return abs(first - second) > _EQUAL_SHARE * max(abs(first), abs(second))


def _arrays(
    first: PlanData, second: PlanData, ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> tuple[tuple[ArrayDifference, ...], int]:
    """Returns the arrays that differ, and how many there are."""
    by_path = {tensor.path: tensor for tensor in theirs}
    paths = dict.fromkeys([*(t.path for t in ours), *by_path])
    own = {tensor.path: tensor for tensor in ours}
    found = []
    for path in paths:
        one, other = own.get(path), by_path.get(path)
        held = device_bytes(first, one) if one else 0.0, device_bytes(second, other) if other else 0.0
        specs = one.spec if one else None, other.spec if other else None
        types = [format_array(tensor) for tensor in (one, other) if tensor]
        if specs[0] != specs[1] or types[0] != types[-1] or _differs(*held):
            found.append(ArrayDifference(readable_path(path), " or ".join(dict.fromkeys(types)), specs, held))
    return tuple(found), len(paths)


def _layers(first: PlanData, second: PlanData) -> tuple[tuple[LayerDifference, ...], int]:
    """Returns the layers that take or send something else, in the order of the first plan, and how many there are."""
    amounts = [_amounts_of_layers(plan) for plan in (first, second)]
    names = dict.fromkeys([*amounts[0], *amounts[1]])
    found = []
    for name in names:
        (compute, wait, sent), others = (each.get(name, (0.0, 0.0, 0.0)) for each in amounts)
        pairs = (compute, others[0]), (wait, others[1]), (sent, others[2])
        if any(_differs(*pair) for pair in pairs):
            found.append(LayerDifference(name, *pairs))
    return tuple(found), len(names)


def _amounts_of_layers(plan: PlanData) -> dict[str, tuple[float, float, float]]:
    """Returns seconds of computing and communicating and sent bytes of each layer."""
    seconds, sent = communication(plan).seconds, _sent(plan)
    amounts: dict[str, tuple[float, float, float]] = {}
    for i, name in enumerate(layers_of_operations(plan)):
        before = amounts.get(name, (0.0, 0.0, 0.0))
        amounts[name] = before[0] + plan.operations[i].compute_s, before[1] + seconds[i], before[2] + sent[i]
    return amounts


def _operations(
    first: PlanData, second: PlanData, matched: Sequence[tuple[int, int]]
) -> tuple[OperationDifference, ...]:
    communications = communication(first), communication(second)
    found = []
    for indices in matched:
        one, other = first.operations[indices[0]], second.operations[indices[1]]
        if not one.results or one.kind == "input":
            continue
        kinds = tuple(sorted(c.kinds[i]) for c, i in zip(communications, indices, strict=True))
        specs = one.value_specs[0], other.value_specs[0]
        if specs[0] == specs[1] and kinds[0] == kinds[1]:
            continue
        seconds = tuple(
            o.compute_s + c.seconds[i] for o, c, i in zip((one, other), communications, indices, strict=True)
        )
        name = operation_name(first, indices[0])
        both = tuple(kinds[0]), tuple(kinds[1])
        found.append(OperationDifference(indices, name, result_type(one), specs, (seconds[0], seconds[1]), both))
    return tuple(found)


def _notes(first: PlanData, second: PlanData, alignment: Alignment) -> tuple[str, ...]:
    notes = []
    matched, not_compared = alignment
    missing = tuple(
        len(plan.operations) - len(matched) - number for plan, number in zip((first, second), not_compared, strict=True)
    )
    if any((*missing, *not_compared)):
        start = next((n for n, (i, j) in enumerate(matched) if (i, j) != (n, n)), None)
        index = start if start is not None else _common_beginning(matched)
        there = " and ".join(
            f"{which} has {_operation_text(plan.operations, index)}"
            for which, plan in (("the first", first), ("the second", second))
        )
        notes.append(
            f"The functions differ from operation {index:,} on, where {there}. {missing[0]:,} operations of the first "
            f"and {missing[1]:,} of the second have no partner and are compared by layer only."
        )
    if any(not_compared):
        notes.append(
            f"{not_compared[0]:,} operations of the first and {not_compared[1]:,} of the second are in layers with too "
            "many to look for their partners: they are not compared one by one, only by layer."
        )
    for what, field in (
        ("products have other number formats", "format"),
        ("sums are sent in other formats", "sent_in"),
        ("arrays are kept in other formats", "kept_in"),
        ("arrays are exchanged in other formats", "exchanged_in"),
    ):
        pairs = ((i, first.operations[i], second.operations[j]) for i, j in matched)
        differing = [i for i, one, other in pairs if getattr(one, field) != getattr(other, field)]
        if differing:
            names = sorted({operation_name(first, i) for i in differing})
            notes.append(f"{len(differing):,} {what}: {', '.join(names)}.")
    if dict(first.mesh_axes) != dict(second.mesh_axes):
        meshes = f"{format_devices(first.mesh_axes)} and {format_devices(second.mesh_axes)}"
        notes.append(f"The meshes differ: {meshes}. An axis of one name may have different sizes.")
    if first.hardware != second.hardware:
        notes.append(f"The hardware differs: {_hardware_words(first, second)}. Seconds differ by that, too.")
    return tuple(notes)


def _common_beginning(matched: Sequence[tuple[int, int]]) -> int:
    return sum(i == j == n for n, (i, j) in enumerate(matched))


def _operation_text(operations: Sequence[Operation], index: int) -> str:
    if index >= len(operations):
        return "no more operations"
    operation = operations[index]
    return f"{operation.signature} ({operation.source or operation.kind})"


def _hardware_words(first: PlanData, second: PlanData) -> str:
    names = first.hardware.name, second.hardware.name
    return " and ".join(names) if names[0] != names[1] else f"{names[0]} with other links or rates"


MAX_ROWS = 24
"""Rows of operations in the text, those whose seconds differ most; the page has all of them."""

_Rows = list[tuple[str, ...]]


class _Table(NamedTuple):
    """A table of either view: its heading, two rows of titles, rows, and the columns of numbers."""

    heading: str
    titles: tuple[tuple[str, ...], tuple[str, ...]]
    rows: _Rows
    right: tuple[int, ...]


def format_difference(difference: PlanDifference) -> str:
    """Returns the text that `print` shows."""
    first, second = difference.titles
    parts = ["\n".join(["Difference of two plans", "", *wrapped(first, "  first   "), *wrapped(second, "  second  ")])]
    if difference.notes:
        parts.append("\n".join(line for note in difference.notes for line in wrapped(note, "  ", "    ")))
    for shown in _tables(difference, MAX_ROWS):
        if shown.rows:
            titles = [row for row in shown.titles if any(row)]
            lines = format_table((*titles, *shown.rows), "  ", right=shown.right, wrap=(0,))
            parts.append("\n".join([shown.heading, "", *lines]))
        else:
            parts.append(shown.heading)
    return "\n\n".join(parts)


def difference_page(difference: PlanDifference) -> str:
    """Returns the difference as a self-contained page."""
    first, second = map(escape, difference.titles)
    notes = "".join(f"<li>{escape(note)}</li>" for note in difference.notes)
    body = [
        "<h1>Difference of two plans</h1>",
        f"<div class=dim>first: {first}</div><div class=dim>second: {second}</div>",
        f"<ul>{notes}</ul>" if notes else "",
    ]
    for shown in _tables(difference, None):
        body.append(f"<h2>{escape(shown.heading)}</h2>")
        if shown.rows:
            groups, titles = shown.titles
            head = [
                f"{group}: {title}" if group else title for group, title in zip(_filled(groups), titles, strict=True)
            ]
            body.append(table(head, shown.rows, right=shown.right))
    body.append(f"<details><summary>As text</summary><pre>{escape(format_difference(difference))}</pre></details>")
    return document("Difference of two plans", body)


def _filled(groups: Sequence[str]) -> list[str]:
    """Returns the group of each column, where a title of two columns stands over the first."""
    filled: list[str] = []
    for group in groups:
        filled.append(group or (filled[-1] if filled else ""))
    return filled


def _tables(difference: PlanDifference, max_rows: int | None) -> list[_Table]:
    num_arguments, num_outputs, num_layers, num_operations = difference.counts
    return [
        _Table(
            "Totals", (("",) * 4, ("", "first", "second", "change")), [_total(t) for t in difference.totals], (1, 2, 3)
        ),
        _array_rows("Arguments", difference.arguments, num_arguments),
        _array_rows("Results", difference.outputs, num_outputs),
        _layer_rows(difference, num_layers),
        _operation_rows(difference, num_operations, max_rows),
    ]


def _total(total: Total) -> tuple[str, ...]:
    shown = format_s if total.unit == "s" else format_bytes
    return total.name, shown(total.first), shown(total.second), _change(total.first, total.second)


def _change(first: float, second: float) -> str:
    if first == second:
        return "the same"
    if not first or not math.isfinite(second / first):
        return "new"
    share = second / first - 1
    if abs(share) < 0.0005:
        return "below 0.1%"
    return f"{share:+.1%}" if abs(share) < 10 else f"{second / first:,.0f} times"


def _spec(spec: NamedSpec | None) -> str:
    return "not there" if spec is None else format_spec(spec)


def _array_rows(what: str, arrays: Sequence[ArrayDifference], count: int) -> _Table:
    keys: list[Hashable] = [array[1:] for array in arrays]
    rows: _Rows = []
    for group in group_names([array.path for array in arrays], keys):
        one, times = arrays[group.members[0]], len(group.members)
        held = [format_bytes(times * size) if is_shown(size) else "-" for size in one.device_bytes]
        rows.append((group.pattern, _times(times), one.type, *map(_spec, one.specs), *held))
    titles = (("", "", "", "sharding", "", "on a device", ""), ("name", "", "type", *("first", "second") * 2))
    return _Table(f"{what}: {len(arrays)} of {count} differ", titles, rows, (1, 5, 6))


def _layer_rows(difference: PlanDifference, count: int) -> _Table:
    layers = difference.layers
    keys: list[Hashable] = [tuple(tuple(f"{x:.3g}" for x in pair) for pair in layer[1:]) for layer in layers]
    rows: _Rows = []
    for group in group_names([layer.name for layer in layers], keys):
        one = layers[group.members[0]]
        cells = [*map(_seconds, one.compute_s), *map(_seconds, one.communicate_s)]
        sent = [format_bytes(size) if is_shown(size) else "-" for size in one.sent_bytes]
        rows.append((group.pattern, _times(len(group.members)), *cells, *sent))
    titles = (("", "", "computes", "", "waits", "", "sends", ""), ("name", "", *("first", "second") * 3))
    return _Table(f"Layers: {len(layers)} of {count} differ", titles, rows, tuple(range(1, 8)))


def _operation_rows(difference: PlanDifference, count: int, max_rows: int | None) -> _Table:
    operations = difference.operations
    keys: list[Hashable] = [(o.type, o.specs, o.collectives) for o in operations]
    groups = group_names([o.name for o in operations], keys)

    def seconds(group: Sequence[int], plan: int) -> float:
        return sum(operations[i].seconds[plan] for i in group)

    largest = sorted(groups, key=lambda g: -abs(seconds(g.members, 0) - seconds(g.members, 1)))[:max_rows]
    rows: _Rows = []
    for group in sorted(largest, key=lambda g: g.members):
        one = operations[group.members[0]]
        times = [_seconds(seconds(group.members, plan)) for plan in (0, 1)]
        rows.append((group.pattern, _times(len(group.members)), one.type, *map(_spec, one.specs), *times))
        rows += [_collective_row(one, kind_and_axis) for kind_and_axis in _other_collectives(one)]
    heading = f"Operations: {len(operations)} of {count} that both functions have differ"
    if len(largest) < len(groups):
        heading += f"; the {len(largest)} kinds that differ most, of {len(groups)}"
    titles = (("", "", "", "sharding", "", "takes", ""), ("name", "", "result", *("first", "second") * 2))
    return _Table(heading, titles, rows, (1, 5, 6))


def _other_collectives(operation: OperationDifference) -> list[tuple[str, str]]:
    """Returns the collectives that only one of the plans needs."""
    first, second = operation.collectives
    return [c for c in dict.fromkeys((*first, *second)) if (c in first) != (c in second)]


def _collective_row(operation: OperationDifference, kind_and_axis: tuple[str, str]) -> tuple[str, ...]:
    in_first = kind_and_axis in operation.collectives[0]
    return (f"  + {' '.join(kind_and_axis)}", "", "", "yes" if in_first else "", "" if in_first else "yes", "", "")


def _times(count: int) -> str:
    return f"{count}x" if count > 1 else ""


def _seconds(seconds: float) -> str:
    return format_s(seconds) if seconds else "-"
