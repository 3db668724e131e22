"""Where the pieces of tables lie in each device's arrays.

Each device keeps its pieces one after the other in one array for each dtype, which is as long on every device as on the
fullest one. So devices may hold pieces of any number and shape, in ordinary sharded JAX arrays `[D, N]`.

Letters for sizes: D devices, N numbers, A rows, W columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece


class Slot(NamedTuple):
    """A piece and its place on its device.

    Attributes:
      piece: the piece.
      offset: its first number in the array of its dtype.
      state_offset: its first row in the array of the optimiser's state.
      column: its first column in the pooled rows that the device sends.
    """

    piece: Piece
    offset: int
    state_offset: int
    column: int


@dataclass(frozen=True)
class Layout:
    """The places of all pieces.

    Attributes:
      tables: in the order of the plan.
      pieces: of all tables.
      num_devices: D.
    """

    tables: tuple[EmbeddingTable, ...]
    pieces: tuple[Piece, ...]
    num_devices: int

    @cached_property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """The pieces on each device, D tuples."""
        return tuple(self._slots_on(device) for device in range(self.num_devices))

    @cached_property
    def copied(self) -> tuple[int, ...]:
        """The tables of which every device has a copy."""
        return tuple(piece.table for piece in self.pieces if piece.device == EVERY_DEVICE)

    @cached_property
    def split_by_columns(self) -> tuple[int, ...]:
        """The tables that are split by columns, whose rows' gradients are on several devices."""
        columns = {p.table: self.tables[p.table].dimension for p in self.pieces}
        return tuple(sorted({p.table for p in self.pieces if p.columns < columns[p.table]}))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """How many numbers the arrays of each dtype have on a device, N."""
        dtypes = {self.tables[slot.piece.table].dtype for slots in self.slots for slot in slots}
        return {dtype: max(self._end(slots, dtype) for slots in self.slots) for dtype in sorted(dtypes)}

    @cached_property
    def state_rows(self) -> int:
        """How many rows the array of the optimiser's state has on a device, A."""
        return max((sum(slot.piece.rows for slot in slots) for slots in self.slots), default=0)

    @cached_property
    def sent_columns(self) -> int:
        """How many columns of pooled rows a device sends, W."""
        return max(sum(slot.piece.columns for slot in slots) for slots in self.slots)

    def tables_on(self, device: int) -> tuple[int, ...]:
        """Returns the tables that have a piece on a device, in order."""
        return tuple(sorted({slot.piece.table for slot in self.slots[device]}))

    def array_bytes(self) -> int:
        """Returns the bytes that each device keeps, what the fullest device needs more than others included."""
        sizes = {table.dtype: table.itemsize for table in self.tables}
        copies = sum(self.tables[t].num_bytes + 4 * self.tables[t].rows for t in self.copied)
        return sum(sizes[dtype] * n for dtype, n in self.numbers.items()) + 4 * self.state_rows + copies

    def _slots_on(self, device: int) -> tuple[Slot, ...]:
        slots, state_offset, column = [], 0, 0
        offsets: dict[str, int] = {}
        for piece in self.pieces:
            if piece.device == device:
                dtype = self.tables[piece.table].dtype
                slots.append(Slot(piece, offsets.get(dtype, 0), state_offset, column))
                offsets[dtype] = offsets.get(dtype, 0) + piece.rows * piece.columns
                state_offset, column = state_offset + piece.rows, column + piece.columns
        return tuple(slots)

    def _end(self, slots: Sequence[Slot], dtype: str) -> int:
        pieces = (slot.piece for slot in slots)
        return sum(p.rows * p.columns for p in pieces if self.tables[p.table].dtype == dtype)
