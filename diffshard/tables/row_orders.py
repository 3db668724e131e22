"""Rows numbered anew, so that those that are looked up most often come first.

Only the hot rows move: they change places with the rows that were first. So an order is as long as there are hot rows,
however long the table is, and an id is looked for among the moved rows alone.

Letters for sizes: H hot rows, M moved rows, at most 2 H.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.real_numbers import Index
from search_spaces.embedding_tables.base import EmbeddingTable, Piece


class RowOrder(NamedTuple):
    """The rows that come first in a table, whatever their ids are.

    Attributes:
      table: the table's index.
      hottest: ids of the rows that are numbered 0, 1, ..., `[H]`.
    """

    table: Index
    hottest: tuple[Index, ...]

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of all moved rows in ascending order, and their new numbers, both `[M]` int32."""
        hottest, count = np.asarray(self.hottest, np.int64), len(self.hottest)
        displaced = np.setdiff1d(np.arange(count), hottest)
        old = np.concatenate([hottest, displaced])
        new = np.concatenate([np.arange(count), np.sort(hottest[hottest >= count])])
        order = np.argsort(old)
        is_moved = old[order] != new[order]
        return old[order][is_moved].astype(np.int32), new[order][is_moved].astype(np.int32)

    def renumbered(self, ids: jax.Array) -> jax.Array:
        """Returns the new numbers of rows; an id that is no row stays as it is."""
        old, new = self.moves()
        if not len(old):
            return ids
        at = jnp.minimum(jnp.searchsorted(old, ids), len(old) - 1)
        return jnp.where(jnp.asarray(old)[at] == ids, jnp.asarray(new)[at], ids)

    def ids_of(self, num_rows: int) -> np.ndarray:
        """Returns the id of each new number, `[rows]`."""
        ids, (old, new) = np.arange(num_rows), self.moves()
        ids[new] = old
        return ids


def needed_orders(
    tables: Iterable[EmbeddingTable], hottest: dict[str, np.ndarray], pieces: Iterable[Piece]
) -> tuple[RowOrder, ...]:
    """Returns orders of the rows before the last cut between rows of a table; a table without cuts needs none.

    Args:
      tables: of the plan.
      hottest: by table, rows from the one that is looked up most often on; tables that are not there keep their order.
      pieces: of all tables.
    """
    pieces, found = tuple(pieces), []
    for index, table in enumerate(tables):
        ends = [p.row_end for p in pieces if p.table == index and p.row_end < table.rows]
        if table.name in hottest and ends:
            found.append(RowOrder(index, tuple(hottest[table.name][: max(ends)].tolist())))
    return tuple(found)


def check_orders(tables: tuple[EmbeddingTable, ...], orders: tuple[RowOrder, ...]) -> None:
    """Checks that orders are of different tables and name different rows of these.

    Raises:
      ValueError: one does not.
    """
    indices = [order.table for order in orders]
    if len(set(indices)) < len(indices) or any(index >= len(tables) for index in indices):
        raise ValueError(f"`orders` are of the tables {indices}, which must be different ones of {len(tables)}")
    for order in orders:
        table, rows = tables[order.table], set(order.hottest)
        if len(rows) < len(order.hottest) or max(rows, default=0) >= table.rows:
            raise ValueError(f"the order of table {table.name!r} must have different ids below {table.rows}")
