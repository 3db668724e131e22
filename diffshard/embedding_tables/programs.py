"""The programs of all devices: lookups of pooled rows, and updates of the rows that were looked up.

All devices run one program, in which each takes the branch with its own pieces (`lax.switch` by its number). So a
device does no other device's work, however different the pieces are. Between the branches are exchanges:

    ids to the devices of their tables → [lookups] → pooled rows to the devices of their examples

and backwards for gradients. A row's gradient meets the squares of its other columns in one sum over devices, so that
row-wise Adagrad computes the same as for a whole table.

Letters for sizes: D devices, b examples of one device, B = D · b, P ids, W columns.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from diffshard.embedding_tables.arrays import TableArrays
from diffshard.embedding_tables.layout import Layout, Slot
from diffshard.embedding_tables.reference import NO_ID, adagrad_step, pooled, pooling_weights, row_gradients
from search_spaces.embedding_tables.base import EVERY_DEVICE, Piece

Arrays = Mapping[str, jax.Array]


class Looked(NamedTuple):
    """The ids of a device's own tables for the whole batch.

    Attributes:
      ids: by table, `[B, P]`.
      weights: by table, `[B, P]` float32.
    """

    ids: dict[int, jax.Array]
    weights: dict[int, jax.Array]


class DevicePrograms:
    """The programs that each device runs, for `shard_map`.

    Args:
      layout: the places of the pieces.
      axes: names of the mesh's axes; the devices are numbered row-major.
    """

    def __init__(self, layout: Layout, axes: tuple[str, ...]):
        self._layout, self._axes = layout, axes

    def init(self, key_data: jax.Array) -> TableArrays:
        """Returns one device's tables of uniform numbers within ±1/√rows; each piece has random numbers of its own."""
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
                for slot in layout.slots[device]:
                    parts[layout.tables[slot.piece.table].dtype].append(uniform(slot.piece).reshape(1, -1))
                return {dtype: _padded(parts[dtype], 1, n, dtype, 0) for dtype, n in layout.numbers.items()}

            return run

        shards = self._switch([on(device) for device in range(layout.num_devices)])
        copied = [piece for piece in layout.pieces if piece.device == EVERY_DEVICE]
        return TableArrays(shards, {layout.tables[p.table].name: uniform(p) for p in copied})

    def lookup(self, tables: TableArrays, ids: Arrays, weights: Arrays) -> dict[str, jax.Array]:
        """Returns the pooled rows of one device's examples: by table `[b, dimension]`, float32."""
        layout = self._layout
        weights = self._pooling_weights(ids, weights)
        branches = [self._lookup_on(device, ids) for device in range(layout.num_devices)]
        sent = self._switch(branches, tables.shards, *self._to_tables(ids, weights))
        received = self._to_examples(sent)
        rows = {}
        for index, table in enumerate(layout.tables):
            if index in layout.copied:
                rows[table.name] = pooled(tables.copies[table.name], ids[table.name], weights[table.name])
            else:
                rows[table.name] = self._joined(received, index)
        return rows

    def update(
        self, tables: TableArrays, state: TableArrays, ids: Arrays, weights: Arrays, gradients: Arrays,
        rate: jax.Array, epsilon: float,
    ) -> tuple[TableArrays, TableArrays]:  # fmt: skip
        """Makes a step of row-wise Adagrad with the gradients of the pooled rows, by table `[b, dimension]`."""
        layout = self._layout
        weights = self._pooling_weights(ids, weights)
        to_tables = self._to_tables(ids, weights)
        received = self._gradients_to_tables(gradients)
        devices = range(layout.num_devices)
        squares = jnp.zeros(0)
        if layout.split_by_columns:
            own = self._switch([self._squares_on(d, ids) for d in devices], *to_tables, received)
            squares = lax.psum(own, self._axes)
        branches = [self._update_on(d, ids, epsilon) for d in devices]
        shards, state_shards = self._switch(branches, tables.shards, state.shards, *to_tables, received, squares, rate)
        copies, state_copies = dict(tables.copies), dict(state.copies)
        for index in layout.copied:
            table = layout.tables[index]
            gradient = jnp.zeros((table.rows, table.dimension), jnp.float32)
            own_ids, own = ids[table.name], gradients[table.name]
            rows, sums = row_gradients(own_ids, weights[table.name], own, table.rows)
            gradient = lax.psum(gradient.at[rows].add(sums, mode="drop"), self._axes)
            copies[table.name], state_copies[table.name] = adagrad_step(
                tables.copies[table.name], state.copies[table.name], jnp.arange(table.rows), gradient,
                jnp.square(gradient).mean(axis=1), rate, epsilon,
            )  # fmt: skip
        return TableArrays(shards, copies), TableArrays(state_shards, state_copies)

    def _pooling_weights(self, ids: Arrays, weights: Arrays) -> dict[str, jax.Array]:
        return {
            table.name: pooling_weights(ids[table.name], weights.get(table.name), table.rows, table.pooling)
            for table in self._layout.tables
        }

    def _switch(self, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        return lax.switch(lax.axis_index(self._axes), branches, *operands)

    def _exchange(self, parts: jax.Array) -> jax.Array:
        """Sends part d of `[D, b, ...]` to device d, and returns what the devices sent, `[D, b, ...]`."""
        if self._layout.num_devices == 1 or not parts.size:
            return parts
        return lax.all_to_all(parts, self._axes, 0, 0, tiled=True)

    def _to_tables(self, ids: Arrays, weights: Arrays) -> tuple[jax.Array, jax.Array]:
        """Sends ids and weights to the devices of their tables, where they become `[B, P of all its tables]`."""
        layout = self._layout
        results = []
        for arrays, filler in ((ids, NO_ID), (weights, 0)):
            rows = [
                [arrays[layout.tables[t].name] for t in layout.tables_on(device)]
                for device in range(layout.num_devices)
            ]
            results.append(self._joined_batch(self._exchange(_stacked(rows, next(iter(arrays.values())), filler))))
        return results[0], results[1]

    def _to_examples(self, sent: jax.Array) -> jax.Array:
        """Sends pooled rows `[B, W]` to the devices of their examples, which get `[D, b, W]`."""
        return self._exchange(
            sent.reshape(self._layout.num_devices, sent.shape[0] // self._layout.num_devices, sent.shape[1])
        )

    def _gradients_to_tables(self, gradients: Arrays) -> jax.Array:
        """Sends gradients of pooled rows the other way, where they become `[B, W]`."""
        layout = self._layout
        rows = [
            [
                gradients[layout.tables[p.table].name][:, p.column_start : p.column_end].astype(jnp.float32)
                for p in (slot.piece for slot in slots)
            ]
            for slots in layout.slots
        ]
        some = next(iter(gradients.values())).astype(jnp.float32)
        return self._joined_batch(self._exchange(_stacked(rows, some, 0, layout.sent_columns)))

    def _joined_batch(self, received: jax.Array) -> jax.Array:
        return received.reshape(received.shape[0] * received.shape[1], received.shape[2])

    def _joined(self, received: jax.Array, index: int) -> jax.Array:
        """Puts the pooled columns of one table together, and adds those of its rows on several devices."""
        table = self._layout.tables[index]
        rows = jnp.zeros((received.shape[1], table.dimension), jnp.float32)
        for device, slots in enumerate(self._layout.slots):
            for piece, _, _, column in slots:
                if piece.table == index:
                    part = received[device, :, column : column + piece.columns]
                    # `rows.at[...].add` has an empty array of indices where a piece has all columns. As a residual it
                    # ends the process that compiles the gradient: Shardy of JAX 0.11 cannot take it out.
                    rows += jnp.pad(part, ((0, 0), (piece.column_start, table.dimension - piece.column_end)))
        return rows

    def _looked(self, device: int, widths: Arrays, ids: jax.Array, weights: jax.Array) -> Looked:
        """Takes the ids `[B, P of all tables]` of a device's tables apart."""
        own_ids, own_weights, start = {}, {}, 0
        for t in self._layout.tables_on(device):
            end = start + widths[self._layout.tables[t].name].shape[1]
            own_ids[t], own_weights[t] = ids[:, start:end], weights[:, start:end]
            start = end
        return Looked(own_ids, own_weights)

    def _local_ids(self, looked: Looked, slot: Slot) -> jax.Array:
        """Returns the ids of a piece, counted from its first row; other rows' become -1."""
        ids, piece = looked.ids[slot.piece.table], slot.piece
        is_here = (ids >= piece.row_start) & (ids < piece.row_end)
        return jnp.where(is_here, ids - piece.row_start, NO_ID)

    def _piece(self, shards: Mapping[str, jax.Array], slot: Slot) -> jax.Array:
        piece = slot.piece
        numbers = shards[self._layout.tables[piece.table].dtype][0]
        end = slot.offset + piece.rows * piece.columns
        return lax.slice(numbers, (slot.offset,), (end,)).reshape(piece.rows, piece.columns)

    def _lookup_on(self, device: int, widths: Arrays) -> Callable[..., jax.Array]:
        def run(shards: dict[str, jax.Array], ids: jax.Array, weights: jax.Array) -> jax.Array:
            looked = self._looked(device, widths, ids, weights)
            parts = [
                pooled(self._piece(shards, slot), self._local_ids(looked, slot), looked.weights[slot.piece.table])
                for slot in self._layout.slots[device]
            ]
            return _padded(parts, ids.shape[0], self._layout.sent_columns, jnp.float32, 0)

        return run

    def _squares_on(self, device: int, widths: Arrays) -> Callable[..., jax.Array]:
        """Returns a function to the squares of the gradients of looked up rows, over a device's own columns.

        They are in the order in which `row_gradients` has the rows, which is the same for all pieces of columns.
        """

        def run(ids: jax.Array, weights: jax.Array, gradients: jax.Array) -> jax.Array:
            looked, squares = self._looked(device, widths, ids, weights), []
            for t in self._layout.split_by_columns:
                own = jnp.zeros(ids.shape[0] * widths[self._layout.tables[t].name].shape[1], jnp.float32)
                for slot in self._layout.slots[device]:
                    if slot.piece.table == t:
                        _, sums = self._row_gradients(looked, slot, gradients)
                        own = own + jnp.square(sums).sum(axis=1)
                squares.append(own)
            return jnp.concatenate(squares)

        return run

    def _row_gradients(self, looked: Looked, slot: Slot, gradients: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = gradients[:, slot.column : slot.column + slot.piece.columns]
        ids = self._local_ids(looked, slot)
        return row_gradients(ids, looked.weights[slot.piece.table], own, slot.piece.rows)

    def _update_on(self, device: int, widths: Arrays, epsilon: float) -> Callable[..., Any]:
        def run(
            shards: dict[str, jax.Array], state: dict[str, jax.Array], ids: jax.Array, weights: jax.Array,
            gradients: jax.Array, squares: jax.Array, rate: jax.Array,
        ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:  # fmt: skip
            looked, shards, state = self._looked(device, widths, ids, weights), dict(shards), dict(state)
            for slot in self._layout.slots[device]:
                piece, table = slot.piece, self._layout.tables[slot.piece.table]
                rows, sums = self._row_gradients(looked, slot, gradients)
                own = jnp.square(sums).sum(axis=1)
                if piece.table in self._layout.split_by_columns:
                    own = self._squares_of(squares, piece.table, widths, ids.shape[0])
                end = slot.state_offset + piece.rows
                array, new_state = adagrad_step(
                    self._piece(shards, slot), state["state"][0, slot.state_offset : end], rows, sums,
                    own / table.dimension, rate, epsilon,
                )  # fmt: skip
                start = slot.offset
                shards[table.dtype] = lax.dynamic_update_slice(shards[table.dtype], array.reshape(1, -1), (0, start))
                state["state"] = state["state"].at[0, slot.state_offset : end].set(new_state)
            return shards, state

        return run

    def _squares_of(self, squares: jax.Array, table: int, widths: Arrays, batch_size: int) -> jax.Array:
        start = 0
        for t in self._layout.split_by_columns:
            end = start + batch_size * widths[self._layout.tables[t].name].shape[1]
            if t == table:
                return squares[start:end]
            start = end
        raise AssertionError(f"table {table} is not split by columns")


def _stacked(rows: Sequence[Sequence[jax.Array]], like: jax.Array, filler: int, width: int | None = None) -> jax.Array:
    """Returns `[D, b, width]` from arrays `[b, ...]` for each device, which are joined and filled up."""
    if width is None:
        width = max(sum(array.shape[1] for array in arrays) for arrays in rows)
    return jnp.stack([_padded(arrays, like.shape[0], width, like.dtype, filler) for arrays in rows])


def _padded(parts: Sequence[jax.Array], num_rows: int, width: int, dtype: Any, filler: int) -> jax.Array:
    """Joins arrays `[num_rows, ...]` to one `[num_rows, width]`, filled up."""
    missing = width - sum(part.shape[1] for part in parts)
    return jnp.concatenate([*parts, jnp.full((num_rows, missing), filler, dtype)], axis=1)
