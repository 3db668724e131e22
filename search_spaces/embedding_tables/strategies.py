"""The strategies of one table: whole on a device, split by columns or rows over devices, or a copy on each device.

Columns are split in halves, and halves again, as long as the width stays a multiple of 4; the pieces are of equal
width, or a half and two quarters. Rows are split into equal parts. The pieces of a table are on different devices.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece
from search_spaces.embedding_tables.prices import piece_bytes

WIDTH_MULTIPLE = 4
"""Columns of a piece that was split are a multiple of this, so that vector loads stay aligned."""
MOST_GROUPS = 128
"""Groups of devices up to which a split has a strategy for each; of more, only evenly spread ones are taken. All groups
of 2 of 16 devices are 120; chosen by hand."""


class TableStrategy(NamedTuple):
    """Where the pieces of a table are.

    Attributes:
      name: for people, such as "2 column pieces on 0, 3".
      pieces: one or more.
    """

    name: str
    pieces: tuple[Piece, ...]


def strategies_of(table: EmbeddingTable, index: int, num_devices: int, *, can_replicate: bool) -> list[TableStrategy]:
    """Returns all strategies of a table.

    Args:
      table: the table.
      index: its index, for the pieces.
      num_devices: the number of devices.
      can_replicate: whether every device may hold a copy.
    """
    whole = (0, table.rows, 0, table.dimension)
    found = [TableStrategy(f"whole on {d}", (Piece(index, d, *whole),)) for d in range(num_devices)]
    for widths in _column_splits(table.dimension, num_devices):
        ends = list(itertools.accumulate(widths))
        spans = [(0, table.rows, end - width, end) for width, end in zip(widths, ends, strict=True)]
        kind = f"{len(widths)} column pieces" if len(set(widths)) == 1 else "a half and 2 quarters of the columns"
        found += _on_groups(kind, index, spans, _column_groups(widths, num_devices))
    for count in _row_counts(table.rows, num_devices):
        ends = [table.rows * (i + 1) // count for i in range(count)]
        spans = [(start, end, 0, table.dimension) for start, end in itertools.pairwise([0, *ends])]
        groups = _groups(num_devices, count)
        if table.access is not None:  # pieces differ, so it matters which device has which
            groups = [group[i:] + group[:i] for group in groups for i in range(count)]
        found += _on_groups(f"{count} row pieces", index, spans, groups)
    if can_replicate and num_devices > 1:
        found.append(TableStrategy("a copy on each device", (Piece(index, EVERY_DEVICE, *whole),)))
    return found


def least_piece(table: EmbeddingTable, num_devices: int) -> tuple[int, int]:
    """Returns rows and columns of the smallest piece into which a table can be split, by its bytes."""
    candidates = [(table.rows, table.dimension)]
    candidates += [(table.rows, max(widths)) for widths in _column_splits(table.dimension, num_devices)]
    candidates += [(-(-table.rows // count), table.dimension) for count in _row_counts(table.rows, num_devices)]
    return min(candidates, key=lambda size: piece_bytes(table, *size))


def _on_groups(
    kind: str, index: int, spans: Sequence[tuple[int, int, int, int]], groups: Sequence[tuple[int, ...]]
) -> Iterator[TableStrategy]:
    for group in groups:
        pieces = tuple(Piece(index, device, *span) for device, span in zip(group, spans, strict=True))
        yield TableStrategy(f"{kind} on {', '.join(map(str, group))}", pieces)


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


def _column_groups(widths: tuple[int, ...], num_devices: int) -> list[tuple[int, ...]]:
    if len(set(widths)) == 1:
        return _groups(num_devices, len(widths))
    pairs = _groups(num_devices, 2)
    groups = [(first, *pair) for pair in pairs for first in range(num_devices) if first not in pair]
    return (
        groups
        if len(groups) <= MOST_GROUPS
        else [((pair[-1] + 1) % num_devices, *pair) for pair in pairs if ((pair[-1] + 1) % num_devices not in pair)]
    )


def _groups(num_devices: int, count: int) -> list[tuple[int, ...]]:
    """Returns groups of `count` devices: all of them, or where these are too many the evenly spread ones."""
    if math.comb(num_devices, count) <= MOST_GROUPS:
        return list(itertools.combinations(range(num_devices), count))
    strides = [2**i for i in range(num_devices.bit_length()) if 2**i * (count - 1) < num_devices]
    spread = {
        tuple(sorted({(start + stride * i) % num_devices for i in range(count)}))
        for stride in strides
        for start in range(num_devices)
    }
    return sorted(group for group in spread if len(group) == count)
