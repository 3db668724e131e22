"""The programs of all devices that make tables, look up pooled rows, and update the rows that were looked up.

All devices run one program, in which each takes the branch with its own pieces (`lax.switch` by its number). So a
device does no other device's work, however different the pieces are. Between the branches are exchanges
(`exchanges.py`). Rows in memory of the host come and go outside of the branches (`host_rows.py`): XLA's GPU compiler
lets a loop touch that memory, but no branch.

Updates are those of the tables' optimisers. Changes are computed in the branch of each device, and made outside of it:
in a branch XLA would copy the whole array. A row's gradient meets the squares of its other columns in one sum over
devices, so that the state is that of a whole table.

A row of a piece is some U-rows of a device's array of numbers `[A, U]`. A slice of the array that is changed and put
back would be a copy of the whole piece, in time and in memory. So rows are gathered from the array itself and scattered
into it, which XLA does in place where the array is donated, but not inside of a branch. On CPUs it converts arrays of
16-bit numbers whole.

Letters for sizes: D devices, b examples of one device, B = D · b, P ids, A rows of U columns, n rows of W columns.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from diffshard.tables import host_rows
from diffshard.tables.arrays import (
    NO_ID,
    TableArrays,
    pooled,
    pooling_weights,
    row_gradients,
    summed_rows,
)
from diffshard.tables.exchanges import Arrays, Exchanges, Looked, in_columns, joined_columns
from diffshard.tables.host_rows import fetched_rows
from diffshard.tables.layout import Layout, RowGroup, Slot
from search_spaces.embedding_tables.base import DEVICE, HOST, Piece
from search_spaces.embedding_tables.optimizers import Step

Fetched = dict[str, jax.Array]
"""Rows from memory of the host by group, `[B, P of all pieces in the group, W]`."""

Rows = tuple[jax.Array, jax.Array]
"""Where rows are in an array, `[n]`, each once or nowhere, and what they become or how much they change, `[n, ...]`."""


class DevicePrograms:
    """The programs of each device that make, look up and update tables, for `shard_map`.

    Args:
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

        def shards_on(device: int) -> dict[str, jax.Array]:
            shards = {}
            for dtype, num_rows in layout.unit_rows.items():
                unit = layout.unit_columns[dtype]
                own = [p for p, *_ in self._device_slots(device) if layout.tables[p.table].dtype == dtype]
                parts = [uniform(piece).reshape(-1, unit) for piece in own]
                missing = num_rows - sum(len(part) for part in parts)
                shards[dtype] = jnp.concatenate([*parts, jnp.zeros((missing, unit), dtype)])[None]
            return shards

        shards = self._switch(lambda device: functools.partial(shards_on, device))
        return shards, {layout.tables[t].name: uniform(piece) for t, piece in layout.copies.items()}

    def lookup(self, tables: TableArrays, ids: Arrays, weights: Arrays) -> dict[str, jax.Array]:
        """Returns the pooled rows of one device's examples: by table `[b, dimension]`, float32."""
        layout = self._layout
        weights = self._pooling_weights(ids, weights)
        to_tables = self._exchanges.to_tables(ids, weights)
        fetched = self._fetched(tables, ids, to_tables)
        sent = self._switch(lambda device: self._lookup_on(device, ids), tables.shards, fetched, *to_tables)
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

    def _switch(self, branch_of: Callable[[int], Callable[..., Any]], *operands: Any) -> Any:
        """Runs each device's own branch."""
        branches = [branch_of(device) for device in range(self._layout.num_devices)]
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
            ids = self._switch(lambda d, g=group, most=most: self._host_ids_on(d, g, widths, most), *to_tables)
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

    def update(
        self, tables: TableArrays, state: TableArrays, ids: Arrays, weights: Arrays, gradients: Arrays,
        step: Step,
    ) -> tuple[TableArrays, TableArrays]:  # fmt: skip
        """Makes a step of the optimisers with the gradients of the pooled rows, by table `[b, dimension]`."""
        layout = self._layout
        weights = self._pooling_weights(ids, weights)
        to_tables = self._exchanges.to_tables(ids, weights)
        received = self._exchanges.gradients_to_tables(gradients)
        squares = jnp.zeros(0, jnp.float32)
        if layout.split_by_columns:
            squares = lax.psum(self._switch(lambda d: self._squares_on(d, ids), *to_tables, received), self._axes)
        operands = state.shards["state"], *to_tables, received, squares, step
        changes, states, host_changes = self._switch(lambda d: self._update_on(d, ids), *operands)
        shards, hosts = dict(tables.shards), {}
        for group in layout.device_groups:
            shards[group.dtype] = changed_rows(shards[group.dtype][0], *changes[group.name])[None]
        units = state.shards["state"].reshape(-1, layout.state_unit)
        for own in states.values():
            units = written_rows(units, *own)
        state_shards = {"state": units.reshape(1, -1)}
        for group, num_rows in layout.host_rows.items():
            host = lax.reshape(tables.hosts[group.name], (num_rows, group.columns))
            host = host_rows.changed_rows(host, *host_changes[group.name])
            hosts[group.name] = lax.reshape(host, (1, num_rows, group.columns))
        copies, state_copies = dict(tables.copies), dict(state.copies)
        for index, piece in layout.copies.items():
            name = layout.tables[index].name
            gradient = jnp.zeros((piece.rows, piece.columns), jnp.float32)
            rows, sums = row_gradients(from_piece(piece, ids[name]), weights[name], gradients[name], piece.rows)
            gradient = lax.psum(gradient.at[rows].add(sums, mode="drop"), self._axes)
            old_states = state.copies[name].reshape(piece.rows, layout.state_columns_of(piece))
            changes_of_all, new_states = layout.tables[index].update_rule.update(
                old_states, gradient, jnp.square(gradient).mean(axis=1), step
            )
            state_copies[name] = new_states.ravel()
            copies[name] = (copies[name].astype(jnp.float32) - changes_of_all).astype(copies[name].dtype)
        return TableArrays(shards, copies, hosts, {}), TableArrays(state_shards, state_copies, {}, {})

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
        ids = from_piece(slot.piece, looked.ids[slot.piece.table])
        return row_gradients(ids, looked.weights[slot.piece.table], own, slot.piece.rows)

    def _update_on(self, device: int, widths: Arrays) -> Callable[..., Any]:
        """Returns a function to changes of rows by group, new states by columns, and changes of rows on its host."""
        layout = self._layout

        def run(
            state: jax.Array, ids: jax.Array, weights: jax.Array, gradients: jax.Array, squares: jax.Array,
            step: Step,
        ) -> tuple[dict[str, Rows], dict[int, Rows], dict[str, Rows]]:  # fmt: skip
            looked = self._exchanges.looked(device, widths, ids, weights)
            on_device: dict[RowGroup, list[Rows]] = {group: [] for group in layout.device_groups}
            on_host: dict[RowGroup, list[Rows]] = {group: [] for group in layout.host_rows}
            states: dict[int, list[Rows]] = {columns: [] for columns in layout.state_groups}
            state_units = state.reshape(-1, layout.state_unit)
            for slot in layout.slots[device]:
                piece, table = slot.piece, layout.tables[slot.piece.table]
                rows, sums = self._row_gradients(looked, slot, gradients)
                own = jnp.square(sums).sum(axis=1)
                if piece.columns < table.dimension:
                    own = self._squares_of(squares, piece, widths, ids.shape[0])
                is_row = rows < piece.rows
                columns = layout.state_columns_of(piece)
                at = jnp.where(is_row, slot.state_offset + rows * (columns // layout.state_unit), layout.state_rows)
                old = gathered_rows(state_units, at, columns) if columns else jnp.zeros((len(at), 0), jnp.float32)
                changes, new = table.update_rule.update(old, sums, own / table.dimension, step)
                if columns:
                    states[columns].append((at, new))
                group = layout.group_of(piece)
                if piece.memory == HOST:
                    on_host[group].append((jnp.where(is_row, rows + slot.offset, layout.host_rows[group]), changes))
                else:
                    first = jnp.where(is_row, self._first_rows(slot, rows), layout.unit_rows[table.dtype])
                    on_device[group].append((first, changes))

            def joined(rows: list[Rows], most_ids: int, nowhere: int, columns: int) -> Rows:
                return _joined(rows, ids.shape[0] * most_ids, nowhere, columns)

            return (
                {
                    g.name: joined(own, self._most_ids(g, DEVICE, widths), layout.unit_rows[g.dtype], g.columns)
                    for g, own in on_device.items()
                },
                {c: joined(own, self._most_states(c, widths), layout.state_rows, c) for c, own in states.items()},
                {
                    g.name: joined(own, self._most_ids(g, HOST, widths), layout.host_rows[g], g.columns)
                    for g, own in on_host.items()
                },
            )

        return run

    def _most_states(self, columns: int, widths: Arrays) -> int:
        """Returns the ids of an example on the busiest device, of those rows whose state has this many columns."""
        return max(
            sum(self._num_ids(s, widths) for s in slots if self._layout.state_columns_of(s.piece) == columns)
            for slots in self._layout.slots
        )

    def _squares_of(self, squares: jax.Array, piece: Piece, widths: Arrays, batch_size: int) -> jax.Array:
        start = 0
        for part in self._layout.split_by_columns:
            end = start + batch_size * widths[self._layout.tables[part[0]].name].shape[1]
            if part == (piece.table, piece.row_start, piece.row_end):
                return squares[start:end]
            start = end
        raise AssertionError(f"{piece} is not split by columns")


def from_piece(piece: Piece, ids: jax.Array) -> jax.Array:
    """Returns ids counted from a piece's first row; other rows' become -1."""
    is_here = (ids >= piece.row_start) & (ids < piece.row_end)
    return jnp.where(is_here, ids - piece.row_start, NO_ID)


def _joined(parts: Sequence[Rows], size: int, nowhere: int, columns: int) -> Rows:
    """Joins rows of pieces, filled up to `size` rows that are nowhere."""
    missing = size - sum(len(at) for at, _ in parts)
    filler = jnp.full(missing, nowhere, jnp.int32), jnp.zeros((missing, columns), jnp.float32)
    at, values = zip(*parts, filler, strict=True)
    return jnp.concatenate(at), jnp.concatenate(values)


def gathered_rows(numbers: jax.Array, first: jax.Array, columns: int) -> jax.Array:
    """Returns rows of a piece, `[n, W]`.

    Args:
      numbers: `[A, U]`.
      first: the first U-row of each row, `[n]` integers below A.
      columns: W, a multiple of U.
    """
    unit = numbers.shape[1]
    names = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    mode = lax.GatherScatterMode.CLIP
    rows = lax.gather(numbers, first[:, None], names, (columns // unit, unit), mode=mode)
    return rows.reshape(first.shape[0], columns)


def changed_rows(numbers: jax.Array, first: jax.Array, changes: jax.Array) -> jax.Array:
    """Subtracts changes from rows of pieces.

    Args:
      numbers: `[A, U]`; changed in place where it is donated, and not in a branch.
      first: the first U-row of each row, `[n]` integers, each once; those from A on are left out.
      changes: `[n, W]` float32.
    """
    old = gathered_rows(numbers, jnp.minimum(first, numbers.shape[0] - 1), changes.shape[1])
    rows = (old.astype(jnp.float32) - changes).astype(numbers.dtype)
    rows = lax.optimization_barrier(rows)  # a scatter that is fused with the gather is not done in place
    return written_rows(numbers, first, rows)


def written_rows(numbers: jax.Array, first: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes rows `[n, W]` in place of rows of pieces; other arguments are those of `changed_rows`."""
    unit = numbers.shape[1]
    names = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    windows = rows.reshape(rows.shape[0], rows.shape[1] // unit, unit)
    return lax.scatter(numbers, first[:, None], windows, names, mode=lax.GatherScatterMode.FILL_OR_DROP)
