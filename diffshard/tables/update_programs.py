"""The program of updates: row-wise Adagrad, in which the rows change that were looked up.

Changes are computed in the branch of each device (`lookup_programs.py`), and made outside of it: in a branch XLA would
copy the whole array. A row's gradient meets the squares of its other columns in one sum over devices, so that the state
is that of a whole table.

Letters for sizes: D devices, b examples of one device, B = D · b, P ids, n rows of W columns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from diffshard.tables import device_rows, host_rows
from diffshard.tables.arrays import TableArrays
from diffshard.tables.exchanges import Arrays, Looked
from diffshard.tables.layout import RowGroup, Slot
from diffshard.tables.lookup_programs import LookupPrograms, from_piece
from diffshard.tables.reference import adagrad_changes, row_gradients
from search_spaces.embedding_tables.base import DEVICE, HOST, Piece

Rows = tuple[jax.Array, jax.Array]
"""Where rows are in an array, `[n]`, each once or nowhere, and what they become or how much they change, `[n, ...]`."""


class DevicePrograms(LookupPrograms):
    """All that each device runs, for `shard_map`; arguments are those of `LookupPrograms`."""

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
        squares = jnp.zeros(0, jnp.float32)
        if layout.split_by_columns:
            own = self._switch([self._squares_on(d, ids) for d in devices], *to_tables, received)
            squares = lax.psum(own, self._axes)
        branches = [self._update_on(d, ids, epsilon) for d in devices]
        changes, (state_rows, states), host_changes = self._switch(
            branches, state.shards["state"], *to_tables, received, squares, rate
        )
        shards, hosts = dict(tables.shards), {}
        for group in layout.device_groups:
            shards[group.dtype] = device_rows.changed_rows(shards[group.dtype][0], *changes[group.name])[None]
        state_shards = {"state": state.shards["state"].at[0, state_rows].set(states, mode="drop")}
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
            changes_of_all, state_copies[name] = adagrad_changes(
                state.copies[name], gradient, jnp.square(gradient).mean(axis=1), rate, epsilon
            )
            copies[name] = (copies[name].astype(jnp.float32) - changes_of_all).astype(copies[name].dtype)
        return TableArrays(shards, copies, hosts), TableArrays(state_shards, state_copies, {})

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

    def _update_on(self, device: int, widths: Arrays, epsilon: float) -> Callable[..., Any]:
        """Returns a function to changes of rows by group, new states of rows, and changes of rows on its host."""
        layout = self._layout

        def run(
            state: jax.Array, ids: jax.Array, weights: jax.Array, gradients: jax.Array, squares: jax.Array,
            rate: jax.Array,
        ) -> tuple[dict[str, Rows], Rows, dict[str, Rows]]:  # fmt: skip
            looked = self._exchanges.looked(device, widths, ids, weights)
            on_device: dict[RowGroup, list[Rows]] = {group: [] for group in layout.device_groups}
            on_host: dict[RowGroup, list[Rows]] = {group: [] for group in layout.host_rows}
            states: list[Rows] = []
            for slot in layout.slots[device]:
                piece, table = slot.piece, layout.tables[slot.piece.table]
                rows, sums = self._row_gradients(looked, slot, gradients)
                own = jnp.square(sums).sum(axis=1)
                if piece.columns < table.dimension:
                    own = self._squares_of(squares, piece, widths, ids.shape[0])
                is_row = rows < piece.rows
                at = jnp.where(is_row, rows + slot.state_offset, layout.state_rows)
                old_states = state[0].at[at].get(mode="fill", fill_value=1.0)
                changes, new_states = adagrad_changes(old_states, sums, own / table.dimension, rate, epsilon)
                states.append((at, new_states))
                group = layout.group_of(piece)
                if piece.memory == HOST:
                    on_host[group].append((jnp.where(is_row, rows + slot.offset, layout.host_rows[group]), changes))
                else:
                    first = jnp.where(is_row, self._first_rows(slot, rows), layout.unit_rows[table.dtype])
                    on_device[group].append((first, changes))
            num_examples = ids.shape[0]
            sizes = {
                memory: {g: num_examples * self._most_ids(g, memory, widths) for g in groups}
                for memory, groups in ((DEVICE, on_device), (HOST, on_host))
            }
            num_states = num_examples * max(sum(self._num_ids(s, widths) for s in slots) for slots in layout.slots)
            return (
                {
                    g.name: _joined(own, sizes[DEVICE][g], layout.unit_rows[g.dtype], g.columns)
                    for g, own in on_device.items()
                },
                _joined(states, num_states, layout.state_rows),
                {g.name: _joined(own, sizes[HOST][g], layout.host_rows[g], g.columns) for g, own in on_host.items()},
            )

        return run

    def _squares_of(self, squares: jax.Array, piece: Piece, widths: Arrays, batch_size: int) -> jax.Array:
        start = 0
        for part in self._layout.split_by_columns:
            end = start + batch_size * widths[self._layout.tables[part[0]].name].shape[1]
            if part == (piece.table, piece.row_start, piece.row_end):
                return squares[start:end]
            start = end
        raise AssertionError(f"{piece} is not split by columns")


def _joined(parts: Sequence[Rows], size: int, nowhere: int, *columns: int) -> Rows:
    """Joins rows of pieces, filled up to `size` rows that are nowhere."""
    missing = size - sum(len(at) for at, _ in parts)
    filler = jnp.full(missing, nowhere, jnp.int32), jnp.zeros((missing, *columns), jnp.float32)
    at, values = zip(*parts, filler, strict=True)
    return jnp.concatenate(at), jnp.concatenate(values)
