"""Rows of which each host has a copy, divided among its devices: lookups stay in the host, and gradients are summed.

A host's devices run the program of `programs.py` for themselves, as if there were no others. Between hosts goes the sum
of the gradients, dense and float32, as it does of rows that every device has; each device has its part of it.

Letters for sizes: n devices of a host, b examples of one device, A rows of U columns of a device's array.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from diffshard.tables.arrays import TableArrays
from diffshard.tables.exchanges import Arrays
from diffshard.tables.layout import Layout, Slot
from diffshard.tables.programs import DevicePrograms
from search_spaces.embedding_tables.optimizers import Step


class EachHostPrograms:
    """The programs of each device for such rows, for `shard_map`.

    Args:
      layout: of the n devices of one host.
      across: names of the mesh's axes from host to host.
      inside: names of the axes in a host.
    """

    def __init__(self, layout: Layout, across: tuple[str, ...], inside: tuple[str, ...]):
        self._layout, self._across, self._inside = layout, across, inside
        self._programs = DevicePrograms(layout, inside)
        self._names = [layout.tables[t].name for t in sorted({piece.table for piece in layout.pieces})]

    def init(self, key_data: jax.Array) -> dict[str, jax.Array]:
        """Returns one device's shards, `[1, A, U]` of each dtype, which are the same on all hosts."""
        return self._programs.init(key_data)[0]

    def lookup(self, shards: dict[str, jax.Array], ids: Arrays, weights: Arrays) -> dict[str, jax.Array]:
        """Returns the pooled rows of one device's examples: by table `[b, dimension]`, float32."""
        shards = {dtype: _same_on_hosts(self._across, numbers) for dtype, numbers in shards.items()}
        rows = self._programs.lookup(TableArrays(shards, {}, {}, {}), ids, weights)
        return {name: rows[name] for name in self._names}

    def update(
        self, shards: dict[str, jax.Array], state: jax.Array, ids: Arrays, weights: Arrays, gradients: Arrays,
        step: Step,
    ) -> tuple[dict[str, jax.Array], jax.Array]:  # fmt: skip
        """Makes a step of the optimisers with the gradients of the pooled rows, by table `[b, dimension]`."""
        in_float32 = {dtype: numbers.astype(jnp.float32) for dtype, numbers in shards.items()}
        _, transposed = jax.vjp(lambda own: self.lookup(own, ids, weights), in_float32)
        (sums,) = transposed({name: gradients[name].astype(jnp.float32) for name in self._names})
        devices = range(self._layout.num_devices)
        squares = jnp.zeros(0, jnp.float32)
        if self._layout.split_by_columns:
            squares = lax.psum(self._switch([self._squares_on(d) for d in devices], sums), self._inside)
        return self._switch([self._update_on(d) for d in devices], shards, state, sums, squares, step)

    def _switch(self, branches: list[Callable[..., Any]], *operands: Any) -> Any:
        return lax.switch(lax.axis_index(self._inside), branches, *operands)

    def _place(self, slot: Slot) -> tuple[str, slice]:
        """Returns the dtype of a piece, and where its U-rows are in the array of it."""
        dtype = self._layout.tables[slot.piece.table].dtype
        count = slot.piece.rows * slot.piece.columns // self._layout.unit_columns[dtype]
        return dtype, slice(slot.offset, slot.offset + count)

    def _rows(self, arrays: dict[str, jax.Array], slot: Slot) -> jax.Array:
        """Returns all rows of a piece, `[rows, columns]`."""
        dtype, place = self._place(slot)
        return arrays[dtype][0, place].reshape(slot.piece.rows, slot.piece.columns)

    def _squares_on(self, device: int) -> Callable[..., jax.Array]:
        """Returns a function to the squares of the gradients of rows that are split by columns, over own columns."""

        def run(sums: dict[str, jax.Array]) -> jax.Array:
            squares = []
            for t, start, end in self._layout.split_by_columns:
                own = jnp.zeros(end - start, jnp.float32)
                for slot in self._layout.slots[device]:
                    if (slot.piece.table, slot.piece.row_start, slot.piece.row_end) == (t, start, end):
                        own = own + jnp.square(self._rows(sums, slot)).sum(axis=1)
                squares.append(own)
            return jnp.concatenate(squares)

        return run

    def _update_on(self, device: int) -> Callable[..., tuple[dict[str, jax.Array], jax.Array]]:
        """Returns a function to a device's shards and its state `[1, F]` after the step."""
        first, squares_of = 0, {}
        for part in self._layout.split_by_columns:
            squares_of[part] = slice(first, first := first + part[2] - part[1])

        def run(
            shards: dict[str, jax.Array], state: jax.Array, sums: dict[str, jax.Array], squares: jax.Array,
            step: Step,
        ) -> tuple[dict[str, jax.Array], jax.Array]:  # fmt: skip
            shards = dict(shards)
            for slot in self._layout.slots[device]:
                piece, own_sums = slot.piece, self._rows(sums, slot)
                table, state_columns = self._layout.tables[piece.table], self._layout.state_columns_of(piece)
                part = squares_of.get((piece.table, piece.row_start, piece.row_end))
                own = jnp.square(own_sums).sum(axis=1) if piece.columns == table.dimension else squares[part]
                first = slot.state_offset * self._layout.state_unit
                at = slice(first, first + piece.rows * state_columns)
                old = state[0, at].reshape(piece.rows, state_columns)
                changes, states = table.update_rule.update(old, own_sums, own / table.dimension, step)
                rows = self._rows(shards, slot)
                rows = (rows.astype(jnp.float32) - changes).astype(rows.dtype)
                dtype, place = self._place(slot)
                units = rows.reshape(-1, self._layout.unit_columns[dtype])
                shards[dtype] = shards[dtype].at[0, place].set(units)
                state = state.at[0, at].set(states.ravel())
            return shards, state

        return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _same_on_hosts(across: tuple[str, ...], numbers: jax.Array) -> jax.Array:
    """Returns an array that is the same on all hosts; its gradient is the sum of the hosts' gradients."""
    del across
    return numbers


def _forward(across: tuple[str, ...], numbers: jax.Array) -> tuple[jax.Array, None]:
    del across
    return numbers, None


def _backward(across: tuple[str, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (lax.psum(gradient, across),)


_same_on_hosts.defvjp(_forward, _backward)
