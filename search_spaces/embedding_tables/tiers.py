"""Strategies in two tiers: hot rows, the first ones, apart from the others, and rows in memory of the hosts.

Few rows have most of the lookups. Copies of these on all devices divide their lookups evenly. In memory of the devices,
with the others in memory of the hosts, they let tables fit that are larger than all devices. Of a table whose rows are
looked up equally often half of the rows, or all of them, are on hosts. Each tier is made of ordinary pieces, so that
prices, programs and checks know nothing of tiers.

Source: tiers by the distribution of accesses: Sethi et al., "RecShard" (ASPLOS 2022); copies of hot rows: Sethi et al.,
"FlexShard" (2023).
"""

import itertools
from collections.abc import Iterator

import numpy as np

from search_spaces.embedding_tables.base import DEVICE, EVERY_DEVICE, HOST, EmbeddingTable, Piece
from search_spaces.embedding_tables.strategies import StrategyKind, strategies_of

LOOKUP_SHARES = (0.5, 0.75, 0.9, 0.97)
"""Shares of all lookups that go to the hot rows of a strategy, as nearly as the counts tell; chosen by hand."""
LEAST_HOST_SHARE = 1 / 64
"""Share of a device's part of all tables' bytes from which on a table may be divided between devices and hosts; smaller
ones are whole on a device or on a host. Chosen by hand."""


def even_bases(table: EmbeddingTable, index: int, num_devices: int) -> list[StrategyKind]:
    """Returns the kinds in which some of the rows may be: whole, columns on neighbours, or rows on all devices."""

    def even(kind: StrategyKind) -> StrategyKind:
        first, size = kind.groups[:, :1], len(kind.pieces)
        are_even = (kind.groups == first + np.arange(size)).all(1) & (first[:, 0] % size == 0)
        if kind.pieces[0].rows < table.rows:
            are_even &= size == num_devices
        return kind._replace(groups=kind.groups[are_even & (len({piece.columns for piece in kind.pieces}) == 1)])

    kinds = map(even, strategies_of(table, index, num_devices, can_replicate=False))
    return [kind for kind in kinds if len(kind.groups)]


def hot_counts(table: EmbeddingTable) -> list[int]:
    """Returns numbers of hot rows: the first rows of a table that are looked up more often than others."""
    if table.access is None:
        return []
    total, sum_, counts = sum(table.access), 0.0, []
    for part, count in enumerate(table.access[:-1]):
        sum_ += count
        wanted = LOOKUP_SHARES[len(counts) :]
        rows = table.rows * (part + 1) // len(table.access)
        if wanted and sum_ >= wanted[0] * total and sum_ > 1.05 * total * rows / table.rows and rows:
            counts += [rows] * sum(sum_ >= share * total for share in wanted)
    return sorted(set(counts))


def with_copied_hot_rows(
    table: EmbeddingTable, index: int, num_devices: int, most_bytes: float
) -> Iterator[StrategyKind]:
    """Yields kinds of strategies with a copy of the hot rows on every device.

    Args:
      table: the table.
      index: its index, for the pieces.
      num_devices: the number of devices.
      most_bytes: of the hot rows.
    """
    for hot in _copied_counts(table, num_devices, most_bytes):
        for base in even_bases(table, index, num_devices):
            pieces = (_copy(table, index, hot), *_of_rows(base, table, hot, table.rows, DEVICE))
            yield StrategyKind(f"{hot} rows copied, others {base.name}", pieces, base.groups)


def whole_on_host(table: EmbeddingTable, index: int, num_devices: int) -> StrategyKind:
    """Returns the kind in which all rows are in memory of one host; arguments are those of `with_copied_hot_rows`."""
    whole = Piece(index, 0, 0, table.rows, 0, table.dimension, HOST)
    return StrategyKind("whole on {}, all rows on hosts", (whole,), np.arange(num_devices)[:, None])


def with_host_memory(table: EmbeddingTable, index: int, num_devices: int, most_bytes: float) -> Iterator[StrategyKind]:
    """Yields kinds of strategies with rows in memory of the hosts: all rows, or those that are not hot.

    Of a table without counts of accesses it is half of the rows, as any half is as good as the other. Arguments are
    those of `with_copied_hot_rows`.
    """
    bases = even_bases(table, index, num_devices)
    copied = _copied_counts(table, num_devices, most_bytes)
    counts = sorted({0, *(hot_counts(table) or [table.rows // 2])})
    for hot, base in itertools.product(counts, bases):
        cold = _of_rows(base, table, hot, table.rows, HOST)
        name = f"{hot} rows on devices, others on hosts" if hot else "all rows on hosts"
        pieces = (*_of_rows(base, table, 0, hot, DEVICE), *cold)
        yield StrategyKind(f"{base.name}, {name}", pieces, base.groups)
        if hot in copied:
            pieces = (_copy(table, index, hot), *cold)
            yield StrategyKind(f"{base.name}, {hot} rows copied, others on hosts", pieces, base.groups)


def _copied_counts(table: EmbeddingTable, num_devices: int, most_bytes: float) -> list[int]:
    fitting = [hot for hot in hot_counts(table) if hot * table.dimension * table.itemsize <= most_bytes]
    return fitting if num_devices > 1 else []


def _copy(table: EmbeddingTable, index: int, hot: int) -> Piece:
    return Piece(index, EVERY_DEVICE, 0, hot, 0, table.dimension)


def _of_rows(base: StrategyKind, table: EmbeddingTable, start: int, end: int, memory: str) -> list[Piece]:
    """Returns pieces of the rows from `start` to `end`, divided as a kind divides those of the whole table."""

    def moved(row: int) -> int:
        return start + row * (end - start) // table.rows

    pieces = [p._replace(row_start=moved(p.row_start), row_end=moved(p.row_end), memory=memory) for p in base.pieces]
    return [piece for piece in pieces if piece.rows]
