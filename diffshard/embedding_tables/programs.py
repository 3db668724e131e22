"""The programs of all devices: lookups of pooled rows, and updates of the rows that were looked up.

All devices run one program, in which each takes the branch with its own pieces (`lax.switch` by its number). So a
device does no other device's work, however different the pieces are. Between the branches are exchanges
(`exchanges.py`). Rows in memory of the host come and go outside of the branches (`host_rows.py`): XLA's GPU compiler
lets a loop touch that memory, but no branch. A row's gradient meets the squares of its other columns in one sum over
devices, so that row-wise Adagrad computes the same as for a whole table.

Letters for sizes: D devices, b examples of one device, B = D · b, P ids, A rows, W columns.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from diffshard.embedding_tables.arrays import TableArrays
from diffshard.embedding_tables.exchanges import Arrays, Exchanges, Looked, in_columns, joined_columns
from diffshard.embedding_tables.host_rows import changed_rows, fetched_rows
from diffshard.embedding_tables.layout import HostGroup, Layout, Slot
from diffshard.embedding_tables.reference import NO_ID, adagrad_changes, pooled, pooling_weights, row_gradients
from search_spaces.embedding_tables.base import HOST, Piece

Fetched = dict[str, jax.Array]
"""Rows from memory of the host by group, `[B, P of all pieces in the group, W]`."""


class DevicePrograms:
    """The programs that each device runs, for `shard_map`.

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
                parts = {dtype: [jnp.zeros((1, 0), dtype)] for dtype in layout.numbers}
                for piece, *_ in self._device_slots(device):
                    parts[layout.tables[piece.table].dtype].append(uniform(piece).reshape(1, -1))
                return {dtype: joined_columns(parts[dtype], 1, n, dtype, 0) for dtype, n in layout.numbers.items()}

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
                own_ids = _from(layout.copies[index], ids[table.name])
                rows[table.name] += pooled(tables.copies[table.name], own_ids, weights[table.name])
        return rows

    def update(
        self, tables: TableArrays, state: TableArrays, ids: Arrays, weights: Arrays, gradients: Arrays,
        rate: jax.Array, epsilon: float,
    ) -> tuple[TableArrays, TableArrays]:  # fmt: skip
        """Makes a step of row-wise Adagrad with the gradients of the pooled rows, by table `[b, dimension]`."""
        layout = self._layout
        weights = self._pooling_weights(ids, weights)
        to_tables = self._exchanges.to_tables(ids, weights)
        received = self._exchanges.gradients_to_tables(gradients)
        devices = range(layout.num_devices)
        squares = jnp.zeros(0)
        if layout.split_by_columns:
            own = self._switch([self._squares_on(d, ids) for d in devices], *to_tables, received)
            squares = lax.psum(own, self._axes)
        branches = [self._update_on(d, ids, epsilon) for d in devices]
        shards, state_shards, changes = self._switch(
            branches, tables.shards, state.shards, *to_tables, received, squares, rate
        )
        hosts = {}
        for group, num_rows in layout.host_rows.items():
            host = lax.reshape(tables.hosts[group.name], (num_rows, group.columns))
            hosts[group.name] = lax.reshape(changed_rows(host, *changes[group.name]), (1, num_rows, group.columns))
        copies, state_copies = dict(tables.copies), dict(state.copies)
        for index, piece in layout.copies.items():
            name = layout.tables[index].name
            gradient = jnp.zeros((piece.rows, piece.columns), jnp.float32)
            rows, sums = row_gradients(_from(piece, ids[name]), weights[name], gradients[name], piece.rows)
            gradient = lax.psum(gradient.at[rows].add(sums, mode="drop"), self._axes)
            changes_of_all, state_copies[name] = adagrad_changes(
                state.copies[name], jnp.arange(piece.rows), gradient, jnp.square(gradient).mean(axis=1), rate, epsilon
            )
            copies[name] = (copies[name].astype(jnp.float32) - changes_of_all).astype(copies[name].dtype)
        return TableArrays(shards, copies, hosts), TableArrays(state_shards, state_copies, {})

    def _pooling_weights(self, ids: Arrays, weights: Arrays) -> dict[str, jax.Array]:
        return {
            table.name: pooling_weights(ids[table.name], weights.get(table.name), table.rows, table.pooling)
            for table in self._layout.tables
        }

    def _switch(self, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        return lax.switch(lax.axis_index(self._axes), branches, *operands)

    def _device_slots(self, device: int) -> list[Slot]:
        return [slot for slot in self._layout.slots[device] if slot.piece.memory != HOST]

    def _piece(self, shards: Mapping[str, jax.Array], slot: Slot) -> jax.Array:
        piece = slot.piece
        numbers = shards[self._layout.tables[piece.table].dtype][0]
        end = slot.offset + piece.rows * piece.columns
        return lax.slice(numbers, (slot.offset,), (end,)).reshape(piece.rows, piece.columns)

    def _fetched(self, tables: TableArrays, widths: Arrays, to_tables: tuple[jax.Array, jax.Array]) -> Fetched:
        """Fetches what the device looks up in memory of its host."""
        layout, fetched = self._layout, {}
        for group, num_rows in layout.host_rows.items():
            most = max(self._host_width(device, group, widths) for device in range(layout.num_devices))
            branches = [self._host_ids_on(d, group, widths, most) for d in range(layout.num_devices)]
            ids = self._switch(branches, *to_tables)
            host = lax.reshape(tables.hosts[group.name], (num_rows, group.columns))
            fetched[group.name] = fetched_rows(host, ids.ravel()).reshape(*ids.shape, group.columns)
        return fetched

    def _host_width(self, device: int, group: HostGroup, widths: Arrays) -> int:
        """Returns how many ids an example has in one group of a device."""
        pieces = (slot.piece for slot in self._layout.host_slots(device, group))
        return sum(widths[self._layout.tables[piece.table].name].shape[1] for piece in pieces)

    def _host_ids_on(self, device: int, group: HostGroup, widths: Arrays, most: int) -> Callable[..., jax.Array]:
        """Returns a function to the rows of the host's array that a device looks up, `[B, most]`."""

        def run(ids: jax.Array, weights: jax.Array) -> jax.Array:
            looked = self._exchanges.looked(device, widths, ids, weights)
            parts = []
            for slot in self._layout.host_slots(device, group):
                own = _from(slot.piece, looked.ids[slot.piece.table])
                parts.append(jnp.where(own >= 0, own + slot.offset, NO_ID))
            return joined_columns(parts, ids.shape[0], most, ids.dtype, NO_ID)

        return run

    def _lookup_on(self, device: int, widths: Arrays) -> Callable[..., jax.Array]:
        layout = self._layout

        def run(shards: dict[str, jax.Array], fetched: Fetched, ids: jax.Array, weights: jax.Array) -> jax.Array:
            looked = self._exchanges.looked(device, widths, ids, weights)
            sent = jnp.zeros((ids.shape[0], layout.sent_columns), jnp.float32)
            parts: list[tuple[Slot, jax.Array]] = [
                (slot, pooled(self._piece(shards, slot), _from(slot.piece, looked.ids[t]), looked.weights[t]))
                for slot in self._device_slots(device)
                for t in (slot.piece.table,)
            ]
            for group in layout.host_rows:
                start = 0
                for slot in layout.host_slots(device, group):
                    own = looked.weights[slot.piece.table]
                    rows = fetched[group.name][:, start : start + own.shape[1]].astype(jnp.float32)
                    parts.append((slot, jnp.einsum("bp,bpc->bc", own, rows, precision="highest")))
                    start += own.shape[1]
            for slot, part in parts:
                sent += in_columns(part, slot.column, layout.sent_columns)
            return sent

        return run

    def _squares_on(self, device: int, widths: Arrays) -> Callable[..., jax.Array]:
        """Returns a function to the squares of the gradients of looked up rows, over a device's own columns.

        They are in the order in which `row_gradients` has the rows, which is the same for all pieces of the same rows.
        """

        def run(ids: jax.Array, weights: jax.Array, gradients: jax.Array) -> jax.Array:
            looked, squares = self._exchanges.looked(device, widths, ids, weights), []
            for t, start, end in self._layout.split_by_columns:
                own = jnp.zeros(ids.shape[0] * widths[self._layout.tables[t].name].shape[1], jnp.float32)
                for slot in self._layout.slots[device]:
                    if (slot.piece.table, slot.piece.row_start, slot.piece.row_end) == (t, start, end):
                        _, sums = self._row_gradients(looked, slot, gradients)
                        own = own + jnp.square(sums).sum(axis=1)
                squares.append(own)
            return jnp.concatenate(squares)

        return run

    def _row_gradients(self, looked: Looked, slot: Slot, gradients: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = gradients[:, slot.column : slot.column + slot.piece.columns]
        ids = _from(slot.piece, looked.ids[slot.piece.table])
        return row_gradients(ids, looked.weights[slot.piece.table], own, slot.piece.rows)

    def _update_on(self, device: int, widths: Arrays, epsilon: float) -> Callable[..., Any]:
        """Returns a function to a device's shards and state, and to changes of rows in memory of its host, by group."""
        layout = self._layout
        ends = {group.name: num_rows for group, num_rows in layout.host_rows.items()}

        def run(
            shards: dict[str, jax.Array], state: dict[str, jax.Array], ids: jax.Array, weights: jax.Array,
            gradients: jax.Array, squares: jax.Array, rate: jax.Array,
        ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, tuple[jax.Array, jax.Array]]]:  # fmt: skip
            looked = self._exchanges.looked(device, widths, ids, weights)
            shards, state = dict(shards), dict(state)
            changed: dict[str, list[tuple[jax.Array, jax.Array]]] = {name: [] for name in ends}
            for slot in layout.slots[device]:
                piece, table = slot.piece, layout.tables[slot.piece.table]
                rows, sums = self._row_gradients(looked, slot, gradients)
                own = jnp.square(sums).sum(axis=1)
                if piece.columns < table.dimension:
                    own = self._squares_of(squares, piece, widths, ids.shape[0])
                end = slot.state_offset + piece.rows
                changes, new_state = adagrad_changes(
                    state["state"][0, slot.state_offset : end], rows, sums, own / table.dimension, rate, epsilon
                )
                state["state"] = state["state"].at[0, slot.state_offset : end].set(new_state)
                if piece.memory == HOST:
                    name = layout.group_of(piece).name
                    rows = jnp.where(rows < piece.rows, rows + slot.offset, ends[name])
                    changed[name].append((rows, changes))
                    continue
                old = self._piece(shards, slot)
                array = _minus(old, rows, changes).reshape(1, -1)
                shards[table.dtype] = lax.dynamic_update_slice(shards[table.dtype], array, (0, slot.offset))
            sizes = {group: self._most_changes(group, widths, ids.shape[0]) for group in layout.host_rows}
            return (
                shards,
                state,
                {g.name: _joined_changes(g, changed[g.name], ends[g.name], n) for g, n in sizes.items()},
            )

        return run

    def _most_changes(self, group: HostGroup, widths: Arrays, batch_size: int) -> int:
        return batch_size * max(self._host_width(d, group, widths) for d in range(self._layout.num_devices))

    def _squares_of(self, squares: jax.Array, piece: Piece, widths: Arrays, batch_size: int) -> jax.Array:
        start = 0
        for part in self._layout.split_by_columns:
            end = start + batch_size * widths[self._layout.tables[part[0]].name].shape[1]
            if part == (piece.table, piece.row_start, piece.row_end):
                return squares[start:end]
            start = end
        raise AssertionError(f"{piece} is not split by columns")


def _from(piece: Piece, ids: jax.Array) -> jax.Array:
    """Returns ids counted from a piece's first row; other rows' become -1."""
    is_here = (ids >= piece.row_start) & (ids < piece.row_end)
    return jnp.where(is_here, ids - piece.row_start, NO_ID)


def _minus(array: jax.Array, rows: jax.Array, changes: jax.Array) -> jax.Array:
    old = array.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)
    return array.at[rows].set((old - changes).astype(array.dtype), mode="drop")


def _joined_changes(
    group: HostGroup, changed: Sequence[tuple[jax.Array, jax.Array]], end: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """Joins changes of pieces in one group to rows `[size]` and changes `[size, W]`; `end` stands for no row."""
    missing = size - sum(len(rows) for rows, _ in changed)
    rows = jnp.concatenate([*(rows for rows, _ in changed), jnp.full(missing, end)])
    return rows, jnp.concatenate([*(own for _, own in changed), jnp.zeros((missing, group.columns), jnp.float32)])
