"""Tables as each device keeps them, and the way from whole tables and back.

Letters for sizes: D devices, A rows, U or W columns.
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
      shards: for each dtype the numbers of all pieces, `[D, A, U]`; of the state one array `[D, A]`, named "state".
      copies: rows of which every device has a copy, by table: `[rows, dimension]`, of the state `[rows]`.
      hosts: rows in pinned memory of the hosts, `[D, A, W]`, by dtype and width W; the state has none there.
    """

    shards: dict[str, jax.Array]
    copies: dict[str, jax.Array]
    hosts: dict[str, jax.Array]


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
    return TableArrays(shards, copies, hosts)  # pyright: ignore[reportArgumentType]


def shapes_of(layout: Layout) -> tuple[Any, Any]:
    """Returns the tables and their optimiser's state as `jax.ShapeDtypeStruct`s, `TableArrays` of them."""

    def shape(dtype: str, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    count = layout.num_devices
    shards = {dtype: shape(dtype, count, rows, layout.unit_columns[dtype]) for dtype, rows in layout.unit_rows.items()}
    copied = {layout.tables[t].name: (p, layout.tables[t].dtype) for t, p in layout.copies.items()}
    copies = {name: shape(dtype, p.rows, p.columns) for name, (p, dtype) in copied.items()}
    hosts = {g.name: shape(g.dtype, count, rows, g.columns) for g, rows in layout.host_rows.items()}
    state_copies = {name: shape("float32", p.rows) for name, (p, _) in copied.items()}
    state = TableArrays({"state": shape("float32", count, layout.state_rows)}, state_copies, {})
    return TableArrays(shards, copies, hosts), state


def to_tables(layout: Layout, arrays: TableArrays) -> dict[str, np.ndarray]:
    """Returns the arrays of all devices as whole tables by name, on the host."""
    shards, copies, hosts = ({name: np.asarray(x) for name, x in part.items()} for part in arrays)
    tables = {table.name: np.zeros((table.rows, table.dimension), jnp.dtype(table.dtype)) for table in layout.tables}
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
    """Returns uniform numbers within ±1/√rows in memory of the hosts, which are made there, a device after the other.

    Args:
      layout: the places of the pieces.
      key_data: of a random key.
      sharding: of the arrays, with the kind of memory.
    """

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
