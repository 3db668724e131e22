"""The strategies of one table: whole on a device, split by columns or rows over devices, or a copy on each device.

Columns are split in halves, and halves again, as long as the width stays a multiple of 4; the pieces are of equal
width, or a half and two quarters. Rows are split into equal parts. The pieces of a table are on different devices.

Tiers: hot rows, the first ones, may be apart from the others, and rows in memory of the hosts. Few rows have most of
the lookups. Copies of these on all devices divide their lookups evenly. In memory of the devices, with the others in
memory of the hosts, they let tables fit that are larger than all devices. Each tier is made of ordinary pieces, so that
prices, programs and checks know nothing of tiers.

Hosts: each host may have a copy of a table, divided among its devices. Then only the sum of the gradients goes over the
slow links between hosts, and each device still keeps and updates a part only.

A table has hundreds of strategies but about a dozen kinds of them: those of a kind differ only in the devices. Kinds
are made and priced once; the pieces of a strategy are made when they are asked for.

Letters for sizes: S strategies, D devices, K kinds, H different hardware, G groups of devices, n devices of a group.

Source: tiers by the distribution of accesses: Sethi et al., "RecShard" (ASPLOS 2022); copies of hot rows: Sethi et al.,
"FlexShard" (2023).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from search_spaces.embedding_tables.base import DEVICE, EVERY_DEVICE, HOST, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import Price, piece_bytes, prices_of

WIDTH_MULTIPLE = 4
"""Columns of a piece that was split are a multiple of this, so that vector loads stay aligned."""
MOST_GROUPS = 128
"""Groups of devices up to which a split has a strategy for each; of more, only evenly spread ones are taken. All groups
of 2 of 16 devices are 120; chosen by hand."""
MOST_ORDERS = 280
"""Orders of all groups up to which pieces of rows that differ have a strategy for each; of more, as many are taken from
all of them. Those of 4 of 8 devices are 280; chosen by hand."""


class TableStrategy(NamedTuple):
    """Where the pieces of a table are.

    Attributes:
      name: for people, such as "2 column pieces on 0, 3".
      pieces: one or more.
    """

    name: str
    pieces: tuple[Piece, ...]


class StrategyKind(NamedTuple):
    """Strategies that differ only in the devices.

    Attributes:
      name: of each of them, with {} in the place of the devices.
      pieces: one or more; the device of each is an index into a group, or `EVERY_DEVICE`.
      groups: devices of each strategy, `[G, n]`; all D of them, host by host, where each host has a copy.
    """

    name: str
    pieces: tuple[Piece, ...]
    groups: np.ndarray


class TableStrategies:
    """The strategies of all kinds of a table, one kind after the other; each is made when it is asked for.

    Args:
      kinds: of one table.
    """

    def __init__(self, kinds: Iterable[StrategyKind]):
        self.kinds = tuple(kinds)
        self._ends = list(itertools.accumulate(len(kind.groups) for kind in self.kinds))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[TableStrategy]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> TableStrategy:
        index = range(len(self))[index]
        at = int(np.searchsorted(self._ends, index, side="right"))
        kind = self.kinds[at]
        group = kind.groups[index - self._ends[at]].tolist()
        pieces = tuple(p if p.device == EVERY_DEVICE else p._replace(device=group[p.device]) for p in kind.pieces)
        named = group[: len(kind.pieces)] if kind.pieces[0].on_each_host else group
        return TableStrategy(kind.name.format(", ".join(map(str, named))), pieces)


def strategies_of(table: EmbeddingTable, index: int, num_devices: int, *, can_replicate: bool) -> list[StrategyKind]:
    """Returns the kinds of strategies in which all rows of a table are treated alike, in memory of the devices.

    Those with hot rows apart from the others, and with rows on hosts, are in `diffshard.tables.hot_rows`.

    Args:
      table: the table.
      index: its index, for the pieces.
      num_devices: the number of devices.
      can_replicate: whether every device may hold a copy.
    """
    whole = (0, table.rows, 0, table.dimension)
    found = [_kind("whole on {}", index, [whole], _groups(num_devices, 1))]
    for widths in _column_splits(table.dimension, num_devices):
        ends = list(itertools.accumulate(widths))
        spans = [(0, table.rows, end - width, end) for width, end in zip(widths, ends, strict=True)]
        name = f"{len(widths)} column pieces" if len(set(widths)) == 1 else "a half and 2 quarters of the columns"
        found.append(_kind(f"{name} on {{}}", index, spans, _column_groups(widths, num_devices)))
    for count in _row_counts(table.rows, num_devices):
        ends = [table.rows * (i + 1) // count for i in range(count)]
        spans = [(start, end, 0, table.dimension) for start, end in itertools.pairwise([0, *ends])]
        # With counts of accesses pieces differ, so it matters which device has which.
        groups = _groups(num_devices, count) if table.access is None else _rotated_groups(num_devices, count)
        found.append(_kind(f"{count} row pieces on {{}}", index, spans, groups))
    if can_replicate and num_devices > 1:
        copies = (Piece(index, EVERY_DEVICE, *whole),)
        found.append(StrategyKind("a copy on each device", copies, np.zeros((1, 0), np.int64)))
    return found


def least_piece(table: EmbeddingTable, num_devices: int) -> tuple[int, int]:
    """Returns rows and columns of the smallest piece into which a table can be split, by its bytes."""
    candidates = [(table.rows, table.dimension)]
    candidates += [(table.rows, max(widths)) for widths in _column_splits(table.dimension, num_devices)]
    candidates += [(-(-table.rows // count), table.dimension) for count in _row_counts(table.rows, num_devices)]
    return min(candidates, key=lambda size: piece_bytes(table, *size))


def _kind(name: str, index: int, spans: Sequence[tuple[int, int, int, int]], groups: np.ndarray) -> StrategyKind:
    return StrategyKind(name, tuple(Piece(index, place, *span) for place, span in enumerate(spans)), groups)


def _column_splits(dimension: int, num_devices: int) -> list[tuple[int, ...]]:
    """Returns the widths of the pieces of each split by columns, without that of the whole table."""
    splits, count = [], 2
    while count <= num_devices and dimension % (count * WIDTH_MULTIPLE) == 0:
        width = dimension // count
        splits.append((width,) * count)
        if count == 2 and num_devices >= 3 and width % (2 * WIDTH_MULTIPLE) == 0:
            splits.append((width, width // 2, width // 2))
        count *= 2
    return splits


def _row_counts(rows: int, num_devices: int) -> list[int]:
    """Returns into how many pieces rows are split: powers of two, and the number of devices."""
    powers = [2**i for i in range(1, num_devices.bit_length()) if 2**i <= num_devices]
    return [count for count in sorted({*powers, num_devices} - {1}) if count <= rows]


def _column_groups(widths: tuple[int, ...], num_devices: int) -> np.ndarray:
    return _groups(num_devices, len(widths)) if len(set(widths)) == 1 else _half_and_quarters_groups(num_devices)


@functools.lru_cache(64)
def _half_and_quarters_groups(num_devices: int) -> np.ndarray:
    pairs = _groups(num_devices, 2).tolist()
    groups = [(first, *pair) for pair in pairs for first in range(num_devices) if first not in pair]
    if len(groups) > MOST_GROUPS:
        nexts = [((pair[-1] + 1) % num_devices, *pair) for pair in pairs]
        groups = [group for group in nexts if group[0] not in group[1:]]
    return np.array(groups)


@functools.lru_cache(64)
def _rotated_groups(num_devices: int, count: int) -> np.ndarray:
    turns = (np.arange(count)[:, None] + np.arange(count)) % count
    groups = _groups(num_devices, count)[:, turns].reshape(-1, count)
    return groups[np.unique(np.linspace(0, len(groups) - 1, MOST_ORDERS).astype(int))]


@functools.lru_cache(256)
def _groups(num_devices: int, count: int) -> np.ndarray:
    """Returns groups of `count` devices: all of them, or where these are too many the evenly spread ones."""
    if math.comb(num_devices, count) <= MOST_GROUPS:
        return np.array(list(itertools.combinations(range(num_devices), count)))
    strides = [2**i for i in range(num_devices.bit_length()) if 2**i * (count - 1) < num_devices]
    spread = {
        tuple(sorted({(start + stride * i) % num_devices for i in range(count)}))
        for stride in strides
        for start in range(num_devices)
    }
    return np.array(sorted(group for group in spread if len(group) == count))


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


def copied_on_each_host(table: EmbeddingTable, index: int, num_devices: int, num_hosts: int) -> list[StrategyKind]:
    """Returns the kinds in which each host has a copy: whole, columns on neighbours, or rows on all its devices.

    Args:
      table: the table.
      index: its index, for the pieces.
      num_devices: of all hosts together, which are numbered host by host.
      num_hosts: more than one.
    """
    size = num_devices // num_hosts
    found = []
    for base in even_bases(table, index, size):
        others = [np.setdiff1d(np.arange(size), group) for group in base.groups]
        places = np.concatenate([base.groups, np.stack(others)], axis=1)
        groups = np.concatenate([places + size * host for host in range(num_hosts)], axis=1)
        pieces = tuple(piece._replace(on_each_host=True) for piece in base.pieces)
        found.append(StrategyKind(f"a copy on each host, {base.name}", pieces, groups))
    return found


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


def strategy_prices(table: EmbeddingTable, kinds: Sequence[StrategyKind], devices: TableDevices) -> Price:
    """Computes what each strategy of a table costs each device, a price of arrays `[S, D]`."""
    all_hardware = list(dict.fromkeys(devices.hardware))
    hardware_of = np.array([all_hardware.index(hardware) for hardware in devices.hardware])
    pieces = [kind.pieces for kind in kinds]
    alike = [dataclasses.replace(devices, hardware=(h,) * devices.num_devices) for h in all_hardware]
    by_hardware = [prices_of(table, pieces, one) for one in alike]
    return Price(
        *(
            np.concatenate([_spread(prices[:, k], kind.groups, hardware_of) for k, kind in enumerate(kinds)])
            for prices in map(np.stack, zip(*by_hardware, strict=True))
        )
    )


def _spread(prices: np.ndarray, groups: np.ndarray, hardware_of: np.ndarray) -> np.ndarray:
    """Returns the price on each device, `[G, D]`, from the price on each index of a group, `[H, D]`.

    A device that is in no group pays what the last index does; where groups have all devices, there is none.
    """
    spread = np.repeat(prices[hardware_of, -1][None], len(groups), axis=0)
    np.put_along_axis(spread, groups, prices[hardware_of[groups], np.arange(groups.shape[1])], axis=1)
    return spread
