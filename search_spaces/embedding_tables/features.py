"""What networks see of pieces of tables and of devices (`learned_cost.py`).

Letters for sizes: D devices.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from cost.embedding_tables import ID_BYTES, POOLED_BYTES, access_share
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece

NUM_PIECE_FEATURES, NUM_DEVICE_FEATURES = 10, 7
_LEAST_BYTES = 2e4
"""Work of a piece that is hardly looked up: what the call of its operations takes, about."""


def piece_features(table: EmbeddingTable, piece: Piece, batch_size: int, num_devices: int) -> list[float]:
    """Returns features of a piece on one device: logarithms of its work in bytes and of sizes, and two kinds of pieces.

    Args:
      table: of the piece.
      piece: a part of the table.
      batch_size: examples of all devices together.
      num_devices: D; a device looks up the D-th part of the examples in its copies.
    """
    is_copy = piece.device == EVERY_DEVICE
    examples = batch_size / (num_devices if is_copy else 1)
    ids = examples * table.pooling_factor
    access = None if table.access is None else np.array(table.access)
    lookups = ids * access_share(access, table.rows, piece.row_start, piece.row_end)
    sizes = (examples, ids, lookups, distinct_rows(table, piece, ids), piece.columns, table.itemsize, piece.rows)
    work = ID_BYTES * ids + (lookups * table.itemsize + POOLED_BYTES * examples) * piece.columns + _LEAST_BYTES
    return [
        math.log(work),
        *(math.log1p(size) for size in sizes),
        float(is_copy),
        float(piece.columns < table.dimension),
    ]


def device_features(columns: ArrayLike, ids: ArrayLike, batch_size: int) -> np.ndarray:
    """Returns features of all D devices of exchanges, `[..., D, F]`.

    Args:
      columns: of pooled rows that each device sends, `[..., D]`.
      ids: of one example that each device gets, `[..., D]`.
      batch_size: examples of all devices together.
    """
    sizes = np.stack([np.asarray(columns, float), np.asarray(ids, float)], axis=-1)
    num_devices = sizes.shape[-2]
    most = np.broadcast_to(sizes.max(axis=-2, keepdims=True), sizes.shape)  # all parts are as large as the largest
    work = np.log(batch_size / num_devices * (most @ [POOLED_BYTES, 2 * ID_BYTES]) + _LEAST_BYTES)
    shared = np.broadcast_to([math.log(batch_size), math.log(num_devices)], sizes.shape)
    return np.concatenate([work[..., None], np.log1p(sizes), np.log1p(most), shared], axis=-1)


def distinct_rows(table: EmbeddingTable, piece: Piece, ids: float) -> float:
    """Returns how many rows of a piece are expected to be looked up, each counted once.

    Args:
      table: of the piece; rows in one part of its `access` are looked up equally often, in independent draws.
      piece: a part of the table.
      ids: that are looked up in the whole table.
    """
    access = np.array((1.0,) if table.access is None else table.access)
    edges = np.linspace(0, table.rows, len(access) + 1)
    rows = np.clip(np.minimum(edges[1:], piece.row_end) - np.maximum(edges[:-1], piece.row_start), 0, None)
    rate = ids * access / access.sum() / np.diff(edges)
    return float(rows @ -np.expm1(-rate))
