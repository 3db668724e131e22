"""A plan of embedding tables as text: what a step takes, what each device does, and where each table is."""

import collections
from typing import Protocol

from diffshard.embedding_tables.checks import Pieces
from diffshard.plans.formats import format_bytes, format_count, format_devices, format_percent, format_s
from diffshard.plans.text_table import format_table, wrapped
from search_spaces.embedding_tables.base import EVERY_DEVICE, DecodedTables, EmbeddingTable, Piece


class Described(Pieces, Protocol):
    """What the text says of a plan; see `TablePlan`."""

    @property
    def step_s(self) -> float: ...  # noqa: D102
    @property
    def lower_bound_s(self) -> float: ...  # noqa: D102
    @property
    def gap(self) -> float: ...  # noqa: D102
    @property
    def status(self) -> str: ...  # noqa: D102
    @property
    def search_s(self) -> float: ...  # noqa: D102


def plan_text(plan: Described, predicted: DecodedTables) -> str:
    """Returns a plan as lines."""
    devices = plan.devices
    names = list(dict.fromkeys(hardware.name for hardware in devices.hardware))
    lines = wrapped(
        f"Plan of {format_count(len(plan.tables), 'embedding table')} on {format_devices(dict(plan.mesh_axes))}, "
        f"{' and '.join(names)}"
    )
    forward_s, rest_s = predicted.forward_s.max(), predicted.rest_s.max()
    lines += [
        "",
        f"  step     {format_s(plan.step_s)} predicted for {devices.batch_size:,} examples: lookups "
        f"{format_s(forward_s)}, exchanges and backward {format_s(rest_s)}",
        *wrapped(
            f"  bound    {format_s(plan.lower_bound_s)}, gap {format_percent(plan.gap)}: no placement in the search "
            "space is predicted to be faster by more",
            "",
            " " * 11,
        ),
        f"  search   {format_s(plan.search_s)}, {plan.status}",
        "",
    ]
    tables_on = collections.Counter(piece.device for piece in plan.pieces)
    times = zip(predicted.forward_s, predicted.rest_s, strict=True)
    sizes = zip(predicted.device_bytes, devices.memory_limit_bytes, strict=True)
    rows = [("device", "pieces", "lookups", "rest", "memory", "limit")]
    rows += [
        (str(d), str(tables_on[d] + tables_on[EVERY_DEVICE]), *map(format_s, seconds), *map(format_bytes, num_bytes))
        for d, (seconds, num_bytes) in enumerate(zip(times, sizes, strict=True))
    ]
    lines += [*format_table(rows, "  ", right=range(6)), ""]
    rows = [("table", "type", "ids", "size", "where")]
    for index, table in enumerate(plan.tables):
        pieces = [piece for piece in plan.pieces if piece.table == index]
        kind = f"{table.dtype}[{table.rows},{table.dimension}]"
        rows.append(
            (table.name, kind, f"{table.pooling_factor:g}", format_bytes(table.num_bytes), _where(table, pieces))
        )
    return "\n".join([*lines, *format_table(rows, "  ", right=(2, 3), wrap=(0, 4))])


def _where(table: EmbeddingTable, pieces: list[Piece]) -> str:
    """Returns where the pieces of a table are, in words."""
    if pieces[0].device == EVERY_DEVICE:
        return "a copy on each device"
    if len(pieces) == 1:
        return f"device {pieces[0].device}"
    if pieces[0].rows < table.rows:
        return "rows " + ", ".join(f"{p.row_start}-{p.row_end - 1} on {p.device}" for p in pieces)
    return "columns " + ", ".join(f"{p.column_start}-{p.column_end - 1} on {p.device}" for p in pieces)
