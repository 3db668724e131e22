"""The programs of all devices that make tables, and look up pooled rows.

All devices run one program, in which each takes the branch with its own pieces (`lax.switch` by its number). So a
device does no other device's work, however different the pieces are. Between the branches are exchanges
(`exchanges.py`). Rows in memory of the host come and go outside of the branches (`host_rows.py`): XLA's GPU compiler
lets a loop touch that memory, but no branch.

Letters for sizes: D devices, b examples of one device, B = D · b, P ids, A rows of U columns, W columns.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from diffshard.tables.arrays import TableArrays
from diffshard.tables.device_rows import gathered_rows
from diffshard.tables.exchanges import Arrays, Exchanges, Looked, in_columns, joined_columns
from diffshard.tables.host_rows import fetched_rows
from diffshard.tables.layout import Layout, RowGroup, Slot
from diffshard.tables.reference import NO_ID, pooled, pooling_weights, summed_rows
from search_spaces.embedding_tables.base import HOST, Piece

Fetched = dict[str, jax.Array]
"""Rows from memory of the host by group, `[B, P of all pieces in the group, W]`."""


class LookupPrograms:
    """What each device runs to make and to look up tables, for `shard_map`.

    Args:
      layout: the places of the pieces.
      axes: names of the mesh's axes; the devices are numbered row-major.
    """

    def __init__(self, layout: Layout, axes: tuple[str, ...]):
        self._layout, self._axes, self._exchanges = layout, axes, Exchanges(layout, axes)

    def init(self, key_data: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns one device's shards and copies: uniform numbers within ±1/√rows, for each piece its own."""
        layout, key = self._layout, jax.random.wrap_key_data(key_data)

        def uniform(piece: Piece) -> jax.Array:
            table = layout.tables[piece.table]
            numbers = (piece.table, piece.row_start, piece.column_start)
            own = functools.reduce(jax.random.fold_in, numbers, key)
            limit = table.rows**-0.5
            return jax.random.uniform(own, (piece.rows, piece.columns), table.dtype, -limit, limit)

        def on(device: int) -> Callable[[], dict[str, jax.Array]]:
            def run() -> dict[str, jax.Array]:
                shards = {}
                for dtype, num_rows in layout.unit_rows.items():
                    unit = layout.unit_columns[dtype]
                    own = [p for p, *_ in self._device_slots(device) if layout.tables[p.table].dtype == dtype]
                    parts = [uniform(piece).reshape(-1, unit) for piece in own]
                    missing = num_rows - sum(len(part) for part in parts)
                    shards[dtype] = jnp.concatenate([*parts, jnp.zeros((missing, unit), dtype)])[None]
                return shards

            return run

        shards = self._switch([on(device) for device in range(layout.num_devices)])
        return shards, {layout.tables[t].name: uniform(piece) for t, piece in layout.copies.items()}

    def lookup(self, tables: TableArrays, ids: Arrays, weights: Arrays) -> dict[str, jax.Array]:
        """Returns the pooled rows of one device's examples: by table `[b, dimension]`, float32."""
        layout = self._layout
        weights = self._pooling_weights(ids, weights)
        to_tables = self._exchanges.to_tables(ids, weights)
        fetched = self._fetched(tables, ids, to_tables)
        branches = [self._lookup_on(device, ids) for device in range(layout.num_devices)]
        sent = self._switch(branches, tables.shards, fetched, *to_tables)
        received = self._exchanges.to_examples(sent)
        rows = {}
        for index, table in enumerate(layout.tables):
            rows[table.name] = self._exchanges.joined(received, index)
            if index in layout.copies:
                own_ids = from_piece(layout.copies[index], ids[table.name])
                rows[table.name] += pooled(tables.copies[table.name], own_ids, weights[table.name])
        return rows

    def _pooling_weights(self, ids: Arrays, weights: Arrays) -> dict[str, jax.Array]:
        return {
            table.name: pooling_weights(ids[table.name], weights.get(table.name), table.rows, table.pooling)
            for table in self._layout.tables
        }

    def _switch(self, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        return lax.switch(lax.axis_index(self._axes), branches, *operands)

    def _device_slots(self, device: int) -> list[Slot]:
        return [slot for slot in self._layout.slots[device] if slot.piece.memory != HOST]

    def _first_rows(self, slot: Slot, rows: jax.Array) -> jax.Array:
        """Returns the first U-rows of rows of a piece."""
        dtype = self._layout.tables[slot.piece.table].dtype
        return slot.offset + rows * (slot.piece.columns // self._layout.unit_columns[dtype])

    def _rows(self, shards: Mapping[str, jax.Array], slot: Slot, rows: jax.Array) -> jax.Array:
        """Returns rows `[n, W]` of a piece."""
        numbers = shards[self._layout.tables[slot.piece.table].dtype][0]
        return gathered_rows(numbers, self._first_rows(slot, rows), slot.piece.columns)

    def _pooled(self, shards: Mapping[str, jax.Array], slot: Slot, looked: Looked) -> jax.Array:
        """Returns the pooled rows of a piece, `[B, W]`."""
        ids = from_piece(slot.piece, looked.ids[slot.piece.table])
        rows = self._rows(shards, slot, jnp.maximum(ids, 0).ravel()).reshape(*ids.shape, slot.piece.columns)
        return summed_rows(rows, jnp.where(ids >= 0, looked.weights[slot.piece.table], 0.0))

    def _fetched(self, tables: TableArrays, widths: Arrays, to_tables: tuple[jax.Array, jax.Array]) -> Fetched:
        """Fetches what the device looks up in memory of its host."""
        layout, fetched = self._layout, {}
        for group, num_rows in layout.host_rows.items():
            most = self._most_ids(group, HOST, widths)
            branches = [self._host_ids_on(d, group, widths, most) for d in range(layout.num_devices)]
            ids = self._switch(branches, *to_tables)
            host = lax.reshape(tables.hosts[group.name], (num_rows, group.columns))
            fetched[group.name] = fetched_rows(host, ids.ravel()).reshape(*ids.shape, group.columns)
        return fetched

    def _most_ids(self, group: RowGroup, memory: str, widths: Arrays) -> int:
        """Returns how many ids an example has in one group of the busiest device."""
        layout = self._layout
        return max(
            sum(self._num_ids(slot, widths) for slot in layout.slots_in(device, group, memory))
            for device in range(layout.num_devices)
        )

    def _num_ids(self, slot: Slot, widths: Arrays) -> int:
        """Returns how many ids an example has for a piece."""
        return widths[self._layout.tables[slot.piece.table].name].shape[1]

    def _host_ids_on(self, device: int, group: RowGroup, widths: Arrays, most: int) -> Callable[..., jax.Array]:
        """Returns a function to the rows of the host's array that a device looks up, `[B, most]`."""

        def run(ids: jax.Array, weights: jax.Array) -> jax.Array:
            looked = self._exchanges.looked(device, widths, ids, weights)
            parts = []
            for slot in self._layout.slots_in(device, group, HOST):
                own = from_piece(slot.piece, looked.ids[slot.piece.table])
                parts.append(jnp.where(own >= 0, own + slot.offset, NO_ID))
            return joined_columns(parts, ids.shape[0], most, ids.dtype, NO_ID)

        return run

    def _lookup_on(self, device: int, widths: Arrays) -> Callable[..., jax.Array]:
        layout = self._layout

        def run(shards: dict[str, jax.Array], fetched: Fetched, ids: jax.Array, weights: jax.Array) -> jax.Array:
            looked = self._exchanges.looked(device, widths, ids, weights)
            parts: list[tuple[Slot, jax.Array]] = [
                (slot, self._pooled(shards, slot, looked)) for slot in self._device_slots(device)
            ]
            for group in layout.host_rows:
                start = 0
                for slot in layout.slots_in(device, group, HOST):
                    own = looked.weights[slot.piece.table]
                    rows = fetched[group.name][:, start : start + own.shape[1]]
                    parts.append((slot, summed_rows(rows, own)))
                    start += own.shape[1]
            placed = [(slot.column, part) for slot, part in parts]
            return in_columns(placed, ids.shape[0], layout.sent_columns)

        return run


def from_piece(piece: Piece, ids: jax.Array) -> jax.Array:
    """Returns ids counted from a piece's first row; other rows' become -1."""
    is_here = (ids >= piece.row_start) & (ids < piece.row_end)
    return jnp.where(is_here, ids - piece.row_start, NO_ID)
