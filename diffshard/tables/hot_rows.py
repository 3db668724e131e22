"""Rows that are looked up most often: found in a sample of training ids, and numbered anew so that they come first.

Few rows have most of the lookups, and they may be anywhere in a table. In the order of their counts they come first, so
that the rows which are worth fast memory, or a copy on every device, are those before a cut. Only the hot rows move:
they change places with the rows that were first. So an order is as long as there are hot rows, however long the table
is, and an id is looked for among the moved rows alone.

Letters for sizes: N examples of the sample, L rows that were looked up, P ids of an example at most; H hot rows, M
moved rows, at most 2 H.

Source: Sethi et al., "RecShard" (ASPLOS 2022), section 4.1. For rows that are not in the sample: Good, "The population
frequencies of species" (Biometrika 1953).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.real_numbers import Index
from search_spaces.embedding_tables.base import EmbeddingTable, Piece

MOST_PARTS = 1024
"""Parts of a table for which lookups are counted: a cut between hot rows and others is at the end of one. A table of 40
million rows then has parts of 39,000; more parts would only be in the way of reading the plan's file."""


class TableStatistics(NamedTuple):
    """Statistics of a sample of ids of one table; `TableStatistics.measure(ids)` makes them.

    Attributes:
      num_examples: N.
      num_with_ids: examples that look up at least one row.
      hottest: rows that were looked up, most often first, `[L]`.
      counts: how often, `[L]`.
    """

    num_examples: int
    num_with_ids: int
    hottest: np.ndarray
    counts: np.ndarray

    @classmethod
    def measure(cls, ids: Any) -> "TableStatistics":
        """Counts the lookups of each row.

        >>> TableStatistics.measure(np.array([[7, 7], [3, -1], [-1, -1]])).hottest
        array([7, 3])

        Args:
          ids: of a sample of examples, as for `TablePlan.lookup`: `[N, P]` integers, and -1 where there is none.

        Raises:
          ValueError: ids are no such integers, or no row is looked up.
        """
        try:
            ids = np.asarray(ids)
        except ValueError as error:  # of rows of different lengths
            raise ValueError("`ids` must be integers `[N, P]`; `padded_ids` makes them of ragged ids.") from error
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"`ids` must be integers `[N, P]`, not {ids.dtype}{list(ids.shape)}; `padded_ids` makes them of ragged "
                "ids."
            )
        if ids.size and ids.min() < -1:
            raise ValueError(f"`ids` has the id {ids.min()}; rows are 0 or more, and -1 stands for no id.")
        is_id = ids >= 0
        rows, counts = np.unique(ids[is_id], return_counts=True)
        if not rows.size:
            raise ValueError("`ids` look up no row. Give a sample of examples that do, or leave the table out.")
        order = np.argsort(-counts, kind="stable")
        return cls(len(ids), int(is_id.any(axis=1).sum()), rows[order].astype(np.int64), counts[order])

    def __repr__(self) -> str:
        return (
            f"<TableStatistics of {self.num_examples} examples: {len(self.counts)} rows looked up, "
            f"{self.pooling_factor:.3g} ids of an example, {self.coverage:.0%} of examples have some>"
        )

    @property
    def pooling_factor(self) -> float:
        """Ids of one example, on average."""
        return float(self.counts.sum() / self.num_examples)

    @property
    def coverage(self) -> float:
        """The share of examples that look up at least one row."""
        return self.num_with_ids / self.num_examples

    @property
    def cumulative(self) -> np.ndarray:
        """The share of the sample's lookups that go to the hottest row, the two hottest rows, ..., `[L]`."""
        return np.cumsum(self.counts) / self.counts.sum()

    @property
    def unseen_share(self) -> float:
        """The share of all lookups, estimated, that go to rows which are not in the sample: that of rows seen once."""
        return float((self.counts == 1).sum() / self.counts.sum())

    def access(self, num_rows: int) -> tuple[float, ...]:
        """Returns shares of lookups in parts of equally many rows, the hottest first: an `EmbeddingTable.access`.

        Args:
          num_rows: of the table, more than any id. Rows that are not in the sample share their part evenly.
        """
        num_unseen = num_rows - len(self.counts)
        unseen = self.unseen_share if num_unseen else 0.0
        cuts = np.linspace(0, num_rows, min(MOST_PARTS, num_rows) + 1)
        seen = np.interp(cuts, np.arange(len(self.counts) + 1), np.concatenate([[0.0], self.cumulative]))
        others = np.clip(cuts - len(self.counts), 0, None) / max(num_unseen, 1)
        return tuple(np.diff((1 - unseen) * seen + unseen * others).tolist())


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
