"""Where the pieces of tables lie in each device's arrays.

Each device keeps its pieces one after the other in one array for each dtype, which is as long on every device as on the
fullest one. So devices may hold pieces of any number and shape, in ordinary sharded JAX arrays `[D, A, U]`: U is the
largest width of which the columns of all these pieces are multiples; a row of a piece is one or several U-rows. Rows
in memory of the host are in arrays `[D, A, W]`, one for each dtype and width W, because they are fetched row by row.
Rows that each host has are in arrays of their own, of the same kind: their layout is that of one host.

Letters for sizes: D devices, A rows, U or W columns.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from diffshard.base import PlanError
from search_spaces.embedding_tables.base import DEVICE, EVERY_DEVICE, HOST, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.optimizers import STATE_NUMBER_BYTES
from search_spaces.embedding_tables.prices import piece_bytes


class RowGroup(NamedTuple):
    """Rows of equal kind, which are read and written together; those in memory of hosts have their own array."""

    dtype: str
    columns: int

    @property
    def name(self) -> str:
        """The key of the array of rows in memory of the hosts, among the arrays of all devices."""
        return f"{self.dtype} of {self.columns} columns"


class Columns(NamedTuple):
    """Pooled columns of a table that a device sends, or whose gradients it receives."""

    table: int
    start: int
    end: int


class Slot(NamedTuple):
    """A piece and its place on its device.

    Attributes:
      offset: its first U-row in the array of its dtype; on the host its first row in the array of its group.
      state_offset: its first row of the state's U numbers in the array of the optimiser's state.
      column: its first column in the pooled rows that the device sends; pieces of the same columns share them.
    """

    piece: Piece
    offset: int
    state_offset: int
    column: int


@dataclass(frozen=True)
class Layout:
    """The places of all pieces.

    Attributes:
      pieces: all but those that each host has.
      num_devices: D.
      each_host: the places of these on the devices of one host; None where there are none.
    """

    tables: tuple[EmbeddingTable, ...]
    pieces: tuple[Piece, ...]
    num_devices: int
    each_host: "Layout | None" = None

    @cached_property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """The pieces on each device, D tuples."""
        return tuple(self._slots_on(device) for device in range(self.num_devices))

    @cached_property
    def copies(self) -> dict[int, Piece]:
        """The rows of which every device has a copy, by table."""
        return {piece.table: piece for piece in self.pieces if piece.device == EVERY_DEVICE}

    @cached_property
    def split_by_columns(self) -> tuple[tuple[int, int, int], ...]:
        """Table, first row and end of each piece of columns; gradients of these rows are on several devices."""
        parts = [p for p in self.pieces if p.columns < self.tables[p.table].dimension]
        return tuple(sorted({(p.table, p.row_start, p.row_end) for p in parts}))

    @cached_property
    def unit_columns(self) -> dict[str, int]:
        """How wide the arrays of each dtype are on a device, U."""
        pieces = [p for p in self.pieces if p.device != EVERY_DEVICE and p.memory == DEVICE]
        dtypes = sorted({self.tables[p.table].dtype for p in pieces})
        return {d: math.gcd(*(p.columns for p in pieces if self.tables[p.table].dtype == d)) for d in dtypes}

    @cached_property
    def unit_rows(self) -> dict[str, int]:
        """How many rows the arrays of each dtype have on a device, A."""

        def rows_on(device: int, dtype: str, unit: int) -> int:
            own = (p for p in self._pieces_on(device, DEVICE) if self.tables[p.table].dtype == dtype)
            return sum(p.rows * p.columns // unit for p in own)

        units = self.unit_columns.items()
        return {dtype: max(rows_on(device, dtype, unit) for device in range(self.num_devices)) for dtype, unit in units}

    @cached_property
    def device_groups(self) -> tuple[RowGroup, ...]:
        """The kinds of rows in memory of devices."""
        pieces = (p for p in self.pieces if p.device != EVERY_DEVICE and p.memory == DEVICE)
        return tuple(sorted({self.group_of(p) for p in pieces}))

    @cached_property
    def host_rows(self) -> dict[RowGroup, int]:
        """How many rows the arrays in memory of the hosts have for a device, A, by group."""
        groups = sorted({self.group_of(p) for p in self.pieces if p.memory == HOST})
        return {
            group: max(
                sum(p.rows for p in self._pieces_on(device, HOST) if self.group_of(p) == group)
                for device in range(self.num_devices)
            )
            for group in groups
        }

    def group_of(self, piece: Piece) -> RowGroup:
        """Returns the group of a piece."""
        return RowGroup(self.tables[piece.table].dtype, piece.columns)

    def slots_in(self, device: int, group: RowGroup, memory: str) -> tuple[Slot, ...]:
        """Returns the slots of one group in memory of a device, or of its host."""
        own = (slot for slot in self.slots[device] if slot.piece.memory == memory)
        return tuple(slot for slot in own if self.group_of(slot.piece) == group)

    @cached_property
    def state_rows(self) -> int:
        """How many rows of U numbers the array of the optimiser's state has on a device, A."""
        counts = [sum(s.piece.rows * self.state_columns_of(s.piece) for s in slots) for slots in self.slots]
        return max(counts, default=0) // self.state_unit

    def state_columns_of(self, piece: Piece) -> int:
        """Returns how many numbers of state each row of a piece has."""
        return self.tables[piece.table].update_rule.state_columns(piece.columns)

    @cached_property
    def state_groups(self) -> tuple[int, ...]:
        """The numbers of state that rows on single devices have, without 0, each once."""
        found = {self.state_columns_of(p) for p in self.pieces if p.device != EVERY_DEVICE}
        return tuple(sorted(found - {0}))

    @cached_property
    def state_unit(self) -> int:
        """Of how many numbers the state of each row is a multiple, U."""
        return math.gcd(*self.state_groups) or 1

    @property
    def counts_steps(self) -> bool:
        """Whether an optimiser of a table counts steps."""
        return any(table.update_rule.counts_steps for table in self.tables)

    @cached_property
    def sent(self) -> tuple[tuple[Columns, ...], ...]:
        """Which pooled columns each device sends, one after the other, D tuples."""
        return tuple(
            tuple(dict.fromkeys(_columns_of(p) for p in self._pieces_on(device, DEVICE, HOST)))
            for device in range(self.num_devices)
        )

    @cached_property
    def sent_columns(self) -> int:
        """How many columns of pooled rows a device sends, W."""
        return max(sum(c.end - c.start for c in columns) for columns in self.sent)

    def tables_on(self, device: int) -> tuple[int, ...]:
        """Returns the tables that have a piece on a device, in order."""
        return tuple(sorted({slot.piece.table for slot in self.slots[device]}))

    def array_bytes(self) -> int:
        """Returns the bytes that each device keeps, what the fullest device needs more than others included."""
        sizes = {table.dtype: table.itemsize for table in self.tables}
        copies = sum(piece_bytes(self.tables[t], p.rows, p.columns) for t, p in self.copies.items())
        numbers = sum(sizes[dtype] * rows * self.unit_columns[dtype] for dtype, rows in self.unit_rows.items())
        each_host = 0 if self.each_host is None else self.each_host.array_bytes()
        state = STATE_NUMBER_BYTES * self.state_rows * self.state_unit
        return numbers + state + copies + each_host

    def host_array_bytes(self) -> int:
        """Returns the bytes in memory of the host for each device, what the fullest one needs more included."""
        sizes = {table.dtype: table.itemsize for table in self.tables}
        return sum(sizes[group.dtype] * group.columns * rows for group, rows in self.host_rows.items())

    def _pieces_on(self, device: int, *memories: str) -> list[Piece]:
        return [p for p in self.pieces if p.device == device and p.memory in memories]

    def _slots_on(self, device: int) -> tuple[Slot, ...]:
        slots, state_offset, width = [], 0, 0
        offsets: dict[str | RowGroup, int] = {}
        first_column: dict[Columns, int] = {}
        for piece in self._pieces_on(device, DEVICE, HOST):
            on_host = piece.memory == HOST
            key = self.group_of(piece) if on_host else self.tables[piece.table].dtype
            columns = _columns_of(piece)
            if columns not in first_column:
                first_column[columns] = width
                width += piece.columns
            slots.append(Slot(piece, offsets.get(key, 0), state_offset, first_column[columns]))
            unit = piece.columns if on_host else self.unit_columns[self.tables[piece.table].dtype]
            offsets[key] = offsets.get(key, 0) + piece.rows * piece.columns // unit
            state_offset += piece.rows * self.state_columns_of(piece) // self.state_unit
        return tuple(slots)


def _columns_of(piece: Piece) -> Columns:
    return Columns(piece.table, piece.column_start, piece.column_end)


def layout_of(tables: tuple[EmbeddingTable, ...], pieces: tuple[Piece, ...], devices: TableDevices) -> Layout:
    """Returns where pieces lie on devices."""
    everywhere, each_host = (tuple(p for p in pieces if p.on_each_host == wanted) for wanted in (False, True))
    of_one = Layout(tables, each_host, devices.devices_per_host) if each_host else None
    return Layout(tables, everywhere, devices.num_devices, of_one)


def check_counts(layout: Layout) -> None:
    """Checks that int32 counts the rows of each array."""
    if layout.each_host is not None:
        check_counts(layout.each_host)
    for dtype, rows in layout.unit_rows.items():
        if rows > np.iinfo(np.int32).max:
            raise PlanError(
                f"The plan's {dtype} array has {rows} rows of {layout.unit_columns[dtype]} columns on each device, "
                "more than int32 counts. Plan with more devices, or give dimensions with a larger common divisor."
            )
    if layout.state_rows > np.iinfo(np.int32).max:
        raise PlanError(
            f"The optimisers' state has {layout.state_rows} rows of {layout.state_unit} numbers on each device, more "
            "than int32 counts. Plan with more devices, or give all tables one optimiser."
        )


def check_fits(layout: Layout, devices: TableDevices) -> None:
    """Checks that arrays as long on each device as on the fullest one fit all devices and their hosts."""
    check_counts(layout)
    for num_bytes, limits, memory in (
        (layout.array_bytes(), devices.memory_limit_bytes, ""),
        (layout.host_array_bytes(), devices.host_limit_bytes, "the host of "),
    ):
        if num_bytes > min(limits, default=math.inf):
            device = int(np.argmin(limits))
            raise PlanError(
                f"The plan's arrays are as long on each device as on the fullest one, {num_bytes} bytes, but "
                f"{memory}device {device} has {limits[device]:.0f}. Plan again with "
                "`shard_tables`, whose plans fit so."
            )
