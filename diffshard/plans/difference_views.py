"""The difference of two plans as text and as a page."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from diffshard.plans.difference_data import ArrayDifference, DifferenceData, OperationDifference, Total
from diffshard.plans.formats import format_bytes, format_s, format_spec, format_table, is_shown, wrapped
from diffshard.plans.page_elements import document, escape, table
from diffshard.plans.patterns import group_names
from search_spaces.partition_specs import NamedSpec

MAX_ROWS = 24
"""Rows of operations in the text, those whose seconds differ most; the page has all of them."""

_Rows = list[tuple[str, ...]]


class _Table(NamedTuple):
    """A table of either view: its heading, two rows of titles, rows, and the columns of numbers."""

    heading: str
    titles: tuple[tuple[str, ...], tuple[str, ...]]
    rows: _Rows
    right: tuple[int, ...]


def format_difference(difference: DifferenceData) -> str:
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


def difference_page(difference: DifferenceData) -> str:
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


def _tables(difference: DifferenceData, max_rows: int | None) -> list[_Table]:
    num_arguments, num_outputs, num_layers, num_operations = difference.counts
    return [
        _Table(
            "Totals", (("",) * 4, ("", "first", "second", "change")), [_total(t) for t in difference.totals], (1, 2, 3)
        ),
        _arrays("Arguments", difference.arguments, num_arguments),
        _arrays("Results", difference.outputs, num_outputs),
        _layers(difference, num_layers),
        _operations(difference, num_operations, max_rows),
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


def _arrays(what: str, arrays: Sequence[ArrayDifference], count: int) -> _Table:
    keys: list[Hashable] = [array[1:] for array in arrays]
    rows: _Rows = []
    for group in group_names([array.path for array in arrays], keys):
        one, times = arrays[group.members[0]], len(group.members)
        held = [format_bytes(times * size) if is_shown(size) else "-" for size in one.device_bytes]
        rows.append((group.pattern, _times(times), one.type, *map(_spec, one.specs), *held))
    titles = (("", "", "", "sharding", "", "on a device", ""), ("name", "", "type", *("first", "second") * 2))
    return _Table(f"{what}: {len(arrays)} of {count} differ", titles, rows, (1, 5, 6))


def _layers(difference: DifferenceData, count: int) -> _Table:
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


def _operations(difference: DifferenceData, count: int, max_rows: int | None) -> _Table:
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
