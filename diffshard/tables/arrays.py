"""Tables as each device keeps them, and the way from whole tables and back.

Lookups and updates of a whole table on one device are here in the plainest form: they say what a plan computes.

Letters for sizes: D devices, A rows, U or W columns of a device's arrays; B examples, P ids of each at most, R rows, C
columns of a whole table.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffshard.tables.layout import Layout, RowGroup
from search_spaces.embedding_tables.base import HOST


class TableArrays(NamedTuple):
    """All tables, or their optimiser's state, on devices.

    Attributes:
      shards: for each dtype the numbers of all pieces, `[D, A, U]`; of the state one array `[D, F]`, named "state",
        of F numbers, and where an optimiser counts steps their number `[D]`, named "steps".
      copies: rows of which every device has a copy, by table: `[rows, dimension]`, of the state `[F]`.
      hosts: rows in pinned memory of the hosts, `[D, A, W]`, by dtype and width W; the state has none there.
      each_host: rows that each host has, divided among its devices, as `shards` are among all.
    """

    shards: dict[str, jax.Array]
    copies: dict[str, jax.Array]
    hosts: dict[str, jax.Array]
    each_host: dict[str, jax.Array]


def to_numbers(layout: Layout, tables: Sequence[np.ndarray]) -> TableArrays:
    """Returns whole tables, `[rows, dimension]` each, as the arrays of all devices, on the host."""
    shards = {
        dtype: np.zeros((layout.num_devices, rows, layout.unit_columns[dtype]), jnp.dtype(dtype))
        for dtype, rows in layout.unit_rows.items()
    }
    hosts = {
        group.name: np.zeros((layout.num_devices, rows, group.columns), jnp.dtype(group.dtype))
        for group, rows in layout.host_rows.items()
    }
    for device, slots in enumerate(layout.slots):
        for p, offset, *_ in slots:
            part = tables[p.table][p.row_start : p.row_end, p.column_start : p.column_end]
            if p.memory == HOST:
                hosts[layout.group_of(p).name][device, offset : offset + p.rows] = part
            else:
                units = part.reshape(-1, layout.unit_columns[layout.tables[p.table].dtype])
                shards[layout.tables[p.table].dtype][device, offset : offset + len(units)] = units
    copies = {layout.tables[t].name: tables[t][p.row_start : p.row_end] for t, p in layout.copies.items()}
    each_host = {}
    if layout.each_host is not None:
        of_one, num_hosts = to_numbers(layout.each_host, tables), layout.num_devices // layout.each_host.num_devices
        each_host = {dtype: np.tile(numbers, (num_hosts, 1, 1)) for dtype, numbers in of_one.shards.items()}
    return TableArrays(shards, copies, hosts, each_host)  # pyright: ignore[reportArgumentType]


def shapes_of(layout: Layout) -> tuple[Any, Any]:
    """Returns the tables and their optimiser's state as `jax.ShapeDtypeStruct`s, `TableArrays` of them."""

    def shape(dtype: str, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    count = layout.num_devices

    def shards_of(own: Layout) -> dict[str, Any]:
        return {dtype: shape(dtype, count, rows, own.unit_columns[dtype]) for dtype, rows in own.unit_rows.items()}

    copied = {layout.tables[t].name: (p, layout.tables[t].dtype) for t, p in layout.copies.items()}
    copies = {name: shape(dtype, p.rows, p.columns) for name, (p, dtype) in copied.items()}
    hosts = {g.name: shape(g.dtype, count, rows, g.columns) for g, rows in layout.host_rows.items()}
    state_copies = {
        layout.tables[t].name: shape("float32", p.rows * layout.state_columns_of(p)) for t, p in layout.copies.items()
    }
    everywhere, each_host = (
        (shards_of(own), {"state": shape("float32", count, own.state_rows * own.state_unit)}) if own else ({}, {})
        for own in (layout, layout.each_host)
    )
    if layout.counts_steps:
        everywhere[1]["steps"] = shape("float32", count)
    arrays = TableArrays(everywhere[0], copies, hosts, each_host[0])
    return arrays, TableArrays(everywhere[1], state_copies, {}, each_host[1])


def to_tables(layout: Layout, arrays: TableArrays) -> dict[str, np.ndarray]:
    """Returns the arrays of all devices as whole tables by name, on the host."""
    shards, copies, hosts, each_host = ({name: np.asarray(x) for name, x in part.items()} for part in arrays)
    if layout.each_host is None:
        tables = {t.name: np.zeros((t.rows, t.dimension), jnp.dtype(t.dtype)) for t in layout.tables}
    else:
        first_host: Any = {dtype: numbers[: layout.each_host.num_devices] for dtype, numbers in each_host.items()}
        tables = to_tables(layout.each_host, TableArrays(first_host, {}, {}, {}))
    for device, slots in enumerate(layout.slots):
        for p, offset, *_ in slots:
            table = layout.tables[p.table]
            if p.memory == HOST:
                part = hosts[layout.group_of(p).name][device, offset : offset + p.rows]
            else:
                end = offset + p.rows * p.columns // layout.unit_columns[table.dtype]
                part = shards[table.dtype][device, offset:end].reshape(p.rows, p.columns)
            tables[table.name][p.row_start : p.row_end, p.column_start : p.column_end] = part
    for t, p in layout.copies.items():
        tables[layout.tables[t].name][p.row_start : p.row_end] = copies[layout.tables[t].name]
    return tables


def random_hosts(layout: Layout, key_data: np.ndarray, sharding: jax.sharding.NamedSharding) -> dict[str, jax.Array]:
    """Returns uniform numbers within ±1/√rows in memory of the hosts, made there one device after the other."""

    def numbers_of(group: RowGroup, num_rows: int, index: Any) -> np.ndarray:
        device = index[0].indices(layout.num_devices)[0]
        numbers = np.zeros((1, num_rows, group.columns), np.float32)
        for p, offset, *_ in layout.slots_in(device, group, HOST):
            rng = np.random.default_rng([*key_data.ravel().tolist(), p.table, p.row_start, p.column_start])
            limit = layout.tables[p.table].rows ** -0.5
            own = rng.random((p.rows, p.columns), np.float32)
            numbers[0, offset : offset + p.rows] = (2 * own - 1) * limit
        return numbers.astype(jnp.dtype(group.dtype))

    return {
        group.name: jax.make_array_from_callback(
            (layout.num_devices, rows, group.columns), sharding, functools.partial(numbers_of, group, rows)
        )
        for group, rows in layout.host_rows.items()
    }


NO_ID = -1
"""In the place of an id: there is none."""


def pooled(array: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums the weighted rows of each example, `[B, C]` in float32; ids that are not rows add nothing.

    Args:
      array: a table or a part of it, `[R, C]`.
      ids: `[B, P]` integers.
      weights: `[B, P]` float32.
    """
    is_row = (ids >= 0) & (ids < array.shape[0])
    return summed_rows(jnp.take(array, jnp.where(is_row, ids, 0), axis=0), jnp.where(is_row, weights, 0.0))


def summed_rows(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums weighted rows `[B, P, C]` of each example, `[B, C]` in float32; weights are `[B, P]` float32."""
    return jnp.einsum("bp,bpc->bc", weights, rows.astype(jnp.float32), precision="highest")


def pooling_weights(ids: jax.Array, weights: jax.Array | None, num_rows: int, pooling: str) -> jax.Array:
    """Returns the weight of each looked up row, `[B, P]` float32: 0 for ids that are not rows.

    Args:
      ids: `[B, P]` integers.
      weights: `[B, P]`, or None for ones.
      pooling: "sum", or "mean", which divides by the sum of the weights of each example.
    """
    ones = jnp.ones(ids.shape, jnp.float32)
    own = jnp.where((ids >= 0) & (ids < num_rows), ones if weights is None else weights.astype(jnp.float32), 0.0)
    if pooling == "sum":
        return own
    total = own.sum(axis=1, keepdims=True)
    return own / jnp.where(total == 0, 1.0, total)


def row_gradients(
    ids: jax.Array, weights: jax.Array, gradient: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of each looked up row, without an array of the table's size.

    Args:
      ids: `[B, P]` integers.
      weights: `[B, P]` float32.
      gradient: of the pooled rows, `[B, C]`.
      num_rows: of the table or the part of it.

    Returns:
      Rows `[B * P]`, each once, followed by `num_rows`, and their gradients `[B * P, C]`.
    """
    flat = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows).ravel()
    order = jnp.argsort(flat, stable=True)
    ordered = flat[order]
    is_new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) if len(flat) else jnp.zeros(0, bool)
    segment = jnp.cumsum(is_new) - 1
    weighted = (weights[:, :, None] * gradient[:, None, :].astype(jnp.float32)).reshape(len(flat), -1)
    sums = jax.ops.segment_sum(weighted[order], segment, len(flat), indices_are_sorted=True)
    rows = jnp.full(len(flat), num_rows, flat.dtype).at[segment].min(ordered)
    return rows, sums


def padded_ids(values: np.ndarray, lengths: np.ndarray, most: int | None = None) -> np.ndarray:
    """Returns ragged ids, or their weights, as a matrix `[B, P]` with -1, for weights 0, where there are none.

    >>> padded_ids(np.array([7, 8, 9]), np.array([2, 0, 1]))
    array([[ 7,  8],
           [-1, -1],
           [ 9, -1]])

    Args:
      values: ids or float weights of all examples, one after the other, `[N]`.
      lengths: how many each example has, `[B]`.
      most: P; None takes the largest length.

    Raises:
      ValueError: lengths are not whole, are negative, do not add up to N, or one is above `most`.
    """
    values, lengths = np.asarray(values), np.asarray(lengths)
    if lengths.size and not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"`lengths` must be whole numbers, not {lengths.dtype}; cast them to integers.")
    if values.ndim != 1 or lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != len(values):
        raise ValueError(
            f"`lengths` must be `[B]`, not negative, and add up to the {values.shape} `values`; got shape "
            f"{lengths.shape} with the sum {lengths.sum()}."
        )
    longest = int(lengths.max(initial=0))
    most = longest if most is None else most
    if longest > most:
        raise ValueError(f"`most` is {most}, but an example has {longest} ids.")
    is_there = np.arange(most) < lengths[:, None]
    padded = np.full((len(lengths), most), NO_ID if np.issubdtype(values.dtype, np.integer) else 0, values.dtype)
    padded[is_there] = values
    return padded
