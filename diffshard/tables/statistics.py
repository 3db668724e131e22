"""How often rows of a table are looked up, measured from a sample of training ids.

Few rows have most of the lookups, and they may be anywhere in a table. In the order of their counts they come first, so
that the rows which are worth fast memory, or a copy on every device, are those before a cut.

Letters for sizes: N examples of the sample, L rows that were looked up, P ids of an example at most.

Source: Sethi et al., "RecShard" (ASPLOS 2022), section 4.1. For rows that are not in the sample: Good, "The population
frequencies of species" (Biometrika 1953).
"""

from typing import Any, NamedTuple

import numpy as np

MOST_PARTS = 1024
"""Parts of a table for which lookups are counted: a cut between hot rows and others is at the end of one. A table of 40
million rows then has parts of 39,000; more parts would only be in the way of reading the plan's file."""


class TableStatistics(NamedTuple):
    """What a sample of ids tells about one table; `TableStatistics.measure(ids)` makes it.

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
