"""The data of a plan of embedding tables: which device holds what, what that costs, and its text."""

import collections
import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property

from jax.sharding import AbstractMesh, Mesh

from cost.embedding_tables import step_s
from cost.real_numbers import Amount, Count
from diffshard.plans.plan_record import Certified, History, check_certificate
from diffshard.plans.printing import format_bytes, format_count, format_devices, format_s, format_table, wrapped
from diffshard.tables.hot_rows import RowOrder, check_orders
from diffshard.tables.layout import Layout, layout_of
from diffshard.tables.learned_cost import LearnedPrediction
from search_spaces.embedding_tables.base import (
    DEVICE,
    EVERY_DEVICE,
    HOST,
    MEMORIES,
    DecodedTables,
    EmbeddingTable,
    Piece,
    TableDevices,
)
from search_spaces.embedding_tables.optimizers import ROWWISE_ADAGRAD
from search_spaces.embedding_tables.prices import decoded, devices_of


@dataclass(frozen=True)
class TablePlanData(Certified):
    """Where embedding tables are on devices, and what that is predicted to cost.

    Attributes:
      pieces: which device holds which part of each table.
      mesh_axes: the mesh's axes with their sizes; devices are numbered row-major.
      lower_bound_s: no placement in the search space takes fewer seconds.
      search_s: seconds that planning took.
      learned: what networks predict, where `shard_tables` was given a learned cost; None where prices are by bytes.
      orders: of tables whose rows are numbered anew, the hot ones first; pieces count rows by these numbers.
      mesh: the devices, an `AbstractMesh` if they are not here; not saved.
    """

    tables: tuple[EmbeddingTable, ...]
    devices: TableDevices
    pieces: tuple[Piece, ...]
    mesh_axes: tuple[tuple[str, Count], ...]
    lower_bound_s: Amount
    status: str
    search_s: Amount
    learned: LearnedPrediction | None = None
    history: History = ()
    orders: tuple[RowOrder, ...] = ()
    mesh: Mesh | AbstractMesh | None = field(default=None, compare=False)

    @cached_property
    def predicted(self) -> DecodedTables:
        """The seconds and bytes of each device."""
        by_bytes = decoded(self.tables, self.pieces, self.devices)
        return by_bytes if self.learned is None else self.learned.in_place_of(by_bytes)

    @cached_property
    def layout(self) -> Layout:
        """Where the pieces lie in each device's arrays."""
        return layout_of(self.tables, self.pieces, self.devices)

    @property
    def kept_bytes(self) -> int:
        """Bytes that each device keeps, with the optimiser's state: its arrays are as long as on the fullest one."""
        return self.layout.array_bytes()

    @property
    def step_s(self) -> float:
        """Predicted seconds of all lookups of a step, their exchanges and their backward pass."""
        return step_s(self.predicted.forward_s, self.predicted.rest_s)


def check_table_plan(plan: TablePlanData) -> None:
    """Checks that the fields of a plan fit each other; that they have the right types is known."""
    names = [table.name for table in plan.tables]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`tables` must be one or more with different names, not {names}")
    _check_devices(plan)
    _check_pieces(plan)
    check_orders(plan.tables, plan.orders)
    check_certificate(plan.certificate)


def axes_across(mesh_axes: tuple[tuple[str, Count], ...], num_hosts: int) -> int:
    """Returns how many of a mesh's axes lead from host to host, the first ones.

    Raises:
      ValueError: the sizes of no first ones are the number of hosts together.
    """
    for count in range(len(mesh_axes) + 1):
        if math.prod(size for _, size in mesh_axes[:count]) == num_hosts:
            return count
    raise ValueError(f"`mesh_axes` are {mesh_axes}, of which the first ones do not lead over {num_hosts} hosts")


def _check_devices(plan: TablePlanData) -> None:
    devices = plan.devices
    num_devices = devices.num_devices
    axes = [axis for axis, _ in plan.mesh_axes]
    if math.prod(size for _, size in plan.mesh_axes) != num_devices or len(set(axes)) < len(axes):
        raise ValueError(f"`mesh_axes` are {plan.mesh_axes}, not of {num_devices} devices")
    axes_across(plan.mesh_axes, devices.num_hosts)
    lists: dict[str, tuple[object, ...]] = {"devices.memory_limit_bytes": devices.memory_limit_bytes}
    if devices.host_limit_bytes:
        lists["devices.host_limit_bytes"] = devices.host_limit_bytes
        if any(hardware.host_memory_bytes_per_s is None for hardware in devices.hardware):
            raise ValueError("`devices.host_limit_bytes` is given, but `hardware` does not say how fast its host is")
    if plan.learned is not None:
        lists |= {"learned.forward_s": plan.learned.forward_s, "learned.rest_s": plan.learned.rest_s}
    for name, numbers in lists.items():
        if len(numbers) != num_devices:
            raise ValueError(f"`{name}` has {len(numbers)} numbers for {num_devices} devices")


def _check_pieces(plan: TablePlanData) -> None:
    """Checks that pieces cover each number of each table once, on devices that there are."""
    num_devices = plan.devices.num_devices
    for index, table in enumerate(plan.tables):
        own = [piece for piece in plan.pieces if piece.table == index]
        for p in own:
            most = plan.devices.devices_per_host if p.on_each_host else num_devices
            fits = 0 <= p.row_start < p.row_end <= table.rows and 0 <= p.column_start < p.column_end <= table.dimension
            is_copy = p.device == EVERY_DEVICE
            if is_copy and (p.columns < table.dimension or p.memory == HOST or sum(q.device < 0 for q in own) > 1):
                raise ValueError(f"table {table.name!r} has the piece {p}; of a table some whole rows may be copied")
            on_host = p.memory == HOST and (p.on_each_host or not plan.devices.host_limit_bytes)
            least = 0 if p.on_each_host else EVERY_DEVICE
            if not fits or not least <= p.device < most or p.memory not in MEMORIES or on_host:
                raise ValueError(f"table {table.name!r} has the piece {p}, which does not fit it or the devices")
        covered = sum(p.rows * p.columns for p in own)
        if covered != table.rows * table.dimension or any(_overlap(a, b) for i, a in enumerate(own) for b in own[:i]):
            raise ValueError(f"the pieces of table {table.name!r} do not cover each of its numbers once")
        parts = {(p.row_start, p.row_end) for p in own if p.columns < table.dimension}
        if any(a[0] < b[1] and b[0] < a[1] for a in parts for b in parts if a != b):  # updates add up their squares
            raise ValueError(f"pieces of columns of table {table.name!r} have different rows in common")
    if any(not 0 <= p.table < len(plan.tables) for p in plan.pieces):
        raise ValueError("a piece belongs to no table")


def _overlap(a: Piece, b: Piece) -> bool:
    return (
        a.row_start < b.row_end
        and b.row_start < a.row_end
        and a.column_start < b.column_end
        and b.column_start < a.column_end
    )


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
        *_order_lines(plan),
        search,
        "",
    ]
    tables_on = collections.Counter(device for piece in plan.pieces for device in devices_of(piece, devices))
    columns = [("device", "pieces", "lookups", "rest", "memory", "limit")]
    sizes = [predicted.device_bytes, devices.memory_limit_bytes]
    if devices.host_limit_bytes:
        columns = [(*columns[0], "host", "limit")]
        sizes += [predicted.host_bytes, devices.host_limit_bytes]
    times = zip(predicted.forward_s, predicted.rest_s, strict=True)
    rows = columns + [
        (str(d), str(tables_on[d]), *map(format_s, seconds), *map(format_bytes, num_bytes))
        for d, (seconds, num_bytes) in enumerate(zip(times, zip(*sizes, strict=True), strict=True))
    ]
    lines += [*format_table(rows, "  ", right=range(len(rows[0]))), ""]
    rows = [("table", "type", "ids", "size", "where")]
    for index, table in enumerate(plan.tables):
        pieces = [piece for piece in plan.pieces if piece.table == index]
        kind = f"{table.dtype}[{table.rows},{table.dimension}]"
        kind += f", {table.optimizer}" if table.optimizer != ROWWISE_ADAGRAD else ""
        rows.append(
            (table.name, kind, f"{table.pooling_factor:g}", format_bytes(table.num_bytes), _where(table, pieces))
        )
    return "\n".join([*lines, *format_table(rows, "  ", right=(2, 3), wrap=(0, 4))])


def _order_lines(plan: TablePlanData) -> list[str]:
    """Returns which tables have rows that are numbered anew."""
    counts = [f"{plan.tables[order.table].name} ({len(order.hottest):,} rows first)" for order in plan.orders]
    return wrapped(f"  order    rows by lookups: {', '.join(counts)}", "", " " * 11) if counts else []


def _where(table: EmbeddingTable, pieces: list[Piece]) -> str:
    """Returns where the pieces of a table are, in words."""
    if pieces[0].on_each_host:
        return f"a copy on each host: {_divided(table, pieces)}"
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
