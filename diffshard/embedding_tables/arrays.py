"""Tables as each device keeps them, and the way from whole tables and back.

Letters for sizes: D devices, N numbers, A rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffshard.embedding_tables.layout import Layout


class TableArrays(NamedTuple):
    """All tables, or their optimiser's state, on devices.

    Attributes:
      shards: for each dtype the numbers of all pieces, `[D, N]`; of the state one array `[D, A]`, named "state".
      copies: tables of which every device has a copy, by name: `[rows, dimension]`, of the state `[rows]`.
    """

    shards: dict[str, jax.Array]
    copies: dict[str, jax.Array]


def to_numbers(layout: Layout, tables: Sequence[np.ndarray]) -> TableArrays:
    """Returns whole tables, `[rows, dimension]` each, as the arrays of all devices, on the host."""
    shards = {dtype: np.zeros((layout.num_devices, n), jnp.dtype(dtype)) for dtype, n in layout.numbers.items()}
    for device, slots in enumerate(layout.slots):
        for p, offset, *_ in slots:
            part = tables[p.table][p.row_start : p.row_end, p.column_start : p.column_end]
            shards[layout.tables[p.table].dtype][device, offset : offset + part.size] = part.ravel()
    return TableArrays(shards, {layout.tables[t].name: tables[t] for t in layout.copied})  # pyright: ignore[reportArgumentType]


def to_tables(layout: Layout, arrays: TableArrays) -> dict[str, np.ndarray]:
    """Returns the arrays of all devices as whole tables by name, on the host."""
    shards = {dtype: np.asarray(array) for dtype, array in arrays.shards.items()}
    tables = {table.name: np.zeros((table.rows, table.dimension), jnp.dtype(table.dtype)) for table in layout.tables}
    for device, slots in enumerate(layout.slots):
        for p, offset, *_ in slots:
            table = layout.tables[p.table]
            part = shards[table.dtype][device, offset : offset + p.rows * p.columns].reshape(p.rows, p.columns)
            tables[table.name][p.row_start : p.row_end, p.column_start : p.column_end] = part
    return {**tables, **{name: np.asarray(copy) for name, copy in arrays.copies.items()}}
