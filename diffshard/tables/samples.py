"""Random pieces of tables on a device, and random exchanges, measured: what the learned cost is trained on.

Letters for sizes: N samples, M elements of one sample at most, F features.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffshard.tables.measurements import device_seconds, exchange_seconds
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece
from search_spaces.embedding_tables.prices import device_features, piece_features

_PARTS = 16  # of a table, for which accesses are counted
_MOST_BYTES = 2**28
"""Of the tables of one sample; larger tables are drawn smaller, so that a sample takes little memory."""
_BATCH_SIZES = (2048, 4096, 8192, 16384)
_MOST_PIECES, _MOST_ROWS_COPIED = 12, 10**4.5


class Samples(NamedTuple):
    """Sets of elements with what they take together.

    Attributes:
      features: of each element of each set, N arrays `[m, F]`.
      forward_s: `[N]`.
      backward_s: `[N]`.
    """

    features: list[np.ndarray]
    forward_s: np.ndarray
    backward_s: np.ndarray


def device_samples(
    count: int, device: Any, rng: np.random.Generator, each: Callable[[], None] = lambda: None
) -> Samples:
    """Measures random pieces on a device; calls `each` after each sample."""
    found = []
    for _ in range(count):
        batch_size = int(rng.choice(_BATCH_SIZES))
        tables, pieces = random_pieces(rng)
        seconds = device_seconds(tables, pieces, batch_size, device, rng)
        features = [piece_features(tables[p.table], p, batch_size, 1) for p in pieces]
        found.append((np.array(features), *seconds))
        each()
    return _samples(found)


def exchange_samples(
    count: int, devices: Sequence[Any], rng: np.random.Generator, each: Callable[[], None] = lambda: None
) -> Samples:
    """Measures random exchanges between two or more of the devices; calls `each` after each sample."""
    counts, found = [2**i for i in range(1, len(devices).bit_length()) if 2**i <= len(devices)], []
    for _ in range(count):
        batch_size, num_devices = int(rng.choice(_BATCH_SIZES)), int(rng.choice(counts))
        columns = _uneven(rng, num_devices, 10 ** rng.uniform(1, 3), 4)
        ids = _uneven(rng, num_devices, 10 ** rng.uniform(0, 2.3), 1)
        seconds = exchange_seconds(columns, ids, batch_size, devices[:num_devices])
        found.append((device_features(columns, ids, batch_size), *seconds))
        each()
    return _samples(found)


def random_pieces(rng: np.random.Generator) -> tuple[list[EmbeddingTable], list[Piece]]:
    """Draws tables of many sizes with a piece of each: all of it, some columns or rows, or a copy."""
    count = int(np.exp(rng.uniform(0, np.log(_MOST_PIECES + 1))))
    tables, pieces = [], []
    for i in range(count):
        columns = int(2 ** rng.integers(2, 8))
        rows = int(10 ** rng.uniform(1.5, np.log10(_MOST_BYTES / count / columns / 4)))
        access = None
        if rows >= _PARTS and rng.random() < 0.8:
            rank = np.arange(1, rows + 1) ** -rng.uniform(0.6, 1.2)  # Zipf's law
            access = tuple(part.sum() for part in np.array_split(rank, _PARTS))
        pooling_factor = float(np.clip(rng.lognormal(1.0, 1.2), 1, 100))
        dtype = "bfloat16" if rng.random() < 0.15 else "float32"
        tables.append(EmbeddingTable(f"t{i}", rows, columns, pooling_factor, dtype, access=access))
        pieces.append(_random_piece(tables[i], i, rng))
    return tables, pieces


def _random_piece(table: EmbeddingTable, index: int, rng: np.random.Generator) -> Piece:
    whole, kind = Piece(index, 0, 0, table.rows, 0, table.dimension), rng.random()
    if kind < 0.1 and table.rows <= _MOST_ROWS_COPIED:
        return whole._replace(device=EVERY_DEVICE)
    if kind < 0.35 and table.dimension >= 8:
        width = table.dimension // (4 if table.dimension >= 16 and rng.random() < 0.5 else 2)
        start = width * int(rng.integers(table.dimension // width))
        return whole._replace(column_start=start, column_end=start + width)
    if kind < 0.55:
        parts = int(2 ** rng.integers(1, 4))
        part = int(rng.integers(parts))
        return whole._replace(row_start=table.rows * part // parts, row_end=table.rows * (part + 1) // parts)
    return whole


def _uneven(rng: np.random.Generator, num_devices: int, mean: float, multiple: int) -> list[int]:
    """Draws sizes of devices that are more or less alike."""
    shares = rng.dirichlet(np.full(num_devices, 10 ** rng.uniform(0, 2))) * num_devices
    return [max(round(share * mean / multiple), 1) * multiple for share in shares]


def _samples(found: Sequence[tuple[np.ndarray, float, float]]) -> Samples:
    features, forward_s, backward_s = zip(*found, strict=True)
    return Samples(list(features), np.array(forward_s), np.array(backward_s))
