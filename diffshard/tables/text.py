"""A plan of embedding tables as text: what a step takes, what each device does, and where each table is."""

import collections
import dataclasses

from diffshard.plans.formats import format_bytes, format_count, format_devices, format_s
from diffshard.plans.text_table import format_table, wrapped
from diffshard.tables.plan_data import TablePlanData
from search_spaces.embedding_tables.base import DEVICE, EVERY_DEVICE, HOST, EmbeddingTable, Piece


def format_table_plan(plan: TablePlanData) -> str:
    """Returns the text that `print(plan)` shows."""
    devices, predicted, layout = plan.devices, plan.predicted, plan.layout
    on_hosts = f", {format_bytes(layout.host_array_bytes())} in memory of its host" if devices.host_limit_bytes else ""
    names = list(dict.fromkeys(hardware.name for hardware in devices.hardware))
    lines = wrapped(
        f"Plan of {format_count(len(plan.tables), 'embedding table')} on {format_devices(dict(plan.mesh_axes))}, "
        f"{' and '.join(names)}"
    )
    *bound, search = plan.certificate.lines("placement in the search space")
    if plan.learned is not None:
        bound = wrapped(f"none: the cost is learned from {plan.learned.source}", "  bound    ", " " * 11)
    forward_s, rest_s = predicted.forward_s.max(), predicted.rest_s.max()
    lines += [
        "",
        f"  step     {format_s(plan.step_s)} predicted for {devices.batch_size:,} examples: lookups "
        f"{format_s(forward_s)}, exchanges and backward {format_s(rest_s)}",
        *bound,
        *wrapped(
            f"  memory   {format_bytes(layout.array_bytes())} kept on each device{on_hosts}: arrays are as long "
            "as on the fullest one",
            "",
            " " * 11,
        ),
        search,
        "",
    ]
    tables_on = collections.Counter(piece.device for piece in plan.pieces)
    columns = [("device", "pieces", "lookups", "rest", "memory", "limit")]
    sizes = [predicted.device_bytes, devices.memory_limit_bytes]
    if devices.host_limit_bytes:
        columns = [(*columns[0], "host", "limit")]
        sizes += [predicted.host_bytes, devices.host_limit_bytes]
    times = zip(predicted.forward_s, predicted.rest_s, strict=True)
    rows = columns + [
        (str(d), str(tables_on[d] + tables_on[EVERY_DEVICE]), *map(format_s, seconds), *map(format_bytes, num_bytes))
        for d, (seconds, num_bytes) in enumerate(zip(times, zip(*sizes, strict=True), strict=True))
    ]
    lines += [*format_table(rows, "  ", right=range(len(rows[0]))), ""]
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
    copied = [piece for piece in pieces if piece.device == EVERY_DEVICE]
    on_devices = [piece for piece in pieces if piece.device != EVERY_DEVICE and piece.memory == DEVICE]
    on_hosts = [piece for piece in pieces if piece.memory == HOST]
    if copied and copied[0].rows == table.rows:
        return "a copy on each device"
    if len(on_devices) == len(pieces):
        return _divided(table, pieces)
    parts = []
    for part, memory in ((copied, "copied"), (on_devices, "on devices"), (on_hosts, "on hosts")):
        if part:
            start, end = min(p.row_start for p in part), max(p.row_end for p in part)
            some_rows = dataclasses.replace(table, rows=end - start, access=None)
            where = "to each" if part is copied else _divided(some_rows, part)
            parts.append(f"rows {start}-{end - 1} {memory}: {where}")
    return "; ".join(parts)


def _divided(table: EmbeddingTable, pieces: list[Piece]) -> str:
    """Returns how pieces divide a table, or some rows of it, among devices."""
    if len(pieces) == 1:
        return f"device {pieces[0].device}"
    if pieces[0].rows < table.rows:
        return "rows " + ", ".join(f"{p.row_start}-{p.row_end - 1} on {p.device}" for p in pieces)
    return "columns " + ", ".join(f"{p.column_start}-{p.column_end - 1} on {p.device}" for p in pieces)
