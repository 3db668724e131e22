"""What pieces of tables cost on their devices: seconds of lookups and exchanges, and bytes.

Features are what networks see of pieces (`diffshard/tables/learned_cost.py`).

Letters for sizes: D devices.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cost.embedding_tables import (
    BACKWARD_FACTOR,
    ID_BYTES,
    POOLED_BYTES,
    STATE_BYTES_PER_ROW,
    access_share,
    copy_update_s,
    exchange_s,
    host_fetch_s,
    lookup_s,
)
from search_spaces.embedding_tables.base import (
    EVERY_DEVICE,
    HOST,
    DecodedTables,
    EmbeddingTable,
    Piece,
    TableDevices,
)

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


class Price(NamedTuple):
    """What pieces cost each device.

    Attributes:
      forward_s: seconds of forward lookups, `[D]`.
      rest_s: seconds of both exchanges and the backward pass, `[D]`.
      num_bytes: in memory of the devices, with the optimiser's state of all rows, `[D]`.
      host_bytes: in memory of the hosts, `[D]`.
      state_bytes: of `num_bytes`, the optimiser's state and whole copies, `[D]`.
    """

    forward_s: np.ndarray
    rest_s: np.ndarray
    num_bytes: np.ndarray
    host_bytes: np.ndarray
    state_bytes: np.ndarray


def piece_bytes(table: EmbeddingTable, rows: int, columns: int) -> int:
    """Returns the bytes of a piece with its optimiser's state."""
    return rows * (columns * table.itemsize + STATE_BYTES_PER_ROW)


def price_of(table: EmbeddingTable, pieces: Iterable[Piece], devices: TableDevices) -> Price:
    """Computes what pieces of one table cost each device."""
    return Price(*(part[0] for part in prices_of(table, [tuple(pieces)], devices)))


def prices_of(table: EmbeddingTable, pieces: Sequence[Sequence[Piece]], devices: TableDevices) -> Price:
    """Computes what several strategies of one table, given as their pieces, cost each device: arrays `[K, D]`."""
    every = [(k, piece) for k, of_one in enumerate(pieces) for piece in of_one]
    at = np.array([k for k, _ in every], np.int64)
    device, row_start, row_end, column_start, column_end = (
        np.array([piece[field] for _, piece in every], np.int64) for field in range(1, 6)
    )
    rows, columns = row_end - row_start, column_end - column_start
    on_host = np.array([piece.memory == HOST for _, piece in every], bool)
    copied = device == EVERY_DEVICE
    seconds = _lookups_s(table, [piece for _, piece in every], devices)  # [D, P]
    forward, rest, num_bytes, host_bytes, state = (np.zeros((len(pieces), devices.num_devices)) for _ in range(5))
    numbers_bytes, state_bytes = rows * columns * table.itemsize, rows * STATE_BYTES_PER_ROW
    single = at[~copied], device[~copied]
    np.add.at(forward, single, seconds[device, np.arange(len(every))][~copied])
    np.add.at(num_bytes, single, (np.where(on_host, 0, numbers_bytes) + state_bytes)[~copied])
    np.add.at(host_bytes, single, np.where(on_host, numbers_bytes, 0)[~copied])
    np.add.at(state, single, state_bytes[~copied])
    np.add.at(forward, at[copied], seconds.T[copied])
    for copy_bytes in (num_bytes, state):
        np.add.at(copy_bytes, at[copied], (numbers_bytes + state_bytes)[copied, None])
    sizes = rows[copied], columns[copied], table.itemsize
    updates_s = {h: copy_update_s(*sizes, devices.num_devices, devices.s_per_byte, h) for h in set(devices.hardware)}
    np.add.at(rest, at[copied], np.stack([updates_s[hardware] for hardware in devices.hardware], axis=1))
    for k, of_one in enumerate(pieces):
        for device_index, sent in _sent(of_one) if table.pooling_factor else ():
            rest[k, device_index] += 2 * exchange_s(devices.batch_size, sent, devices.num_devices, devices.s_per_byte)
    return Price(forward, rest + BACKWARD_FACTOR * forward, num_bytes, host_bytes, state)


def sent_columns(tables: Sequence[EmbeddingTable], pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Returns devices with the columns of pooled rows that they send; rows of the same columns are added up before.

    Args:
      tables: T of them.
      pieces: of these tables.
    """
    return _sent(piece for piece in pieces if tables[piece.table].pooling_factor)


def _sent(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Returns devices with the columns that they send of pieces that are looked up."""
    sent = {(p.device, p.table, p.column_start, p.column_end) for p in pieces if p.device != EVERY_DEVICE}
    return [(device, end - start) for device, _, start, end in sorted(sent)]


def decoded(tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], devices: TableDevices) -> DecodedTables:
    """Returns pieces of all tables with what they cost each device."""
    total = [np.zeros(devices.num_devices) for _ in range(4)]
    for index, table in enumerate(tables):
        price = price_of(table, [p for p in pieces if p.table == index], devices)
        for sum_, part in zip(total, price[:4], strict=True):
            sum_ += part
    return DecodedTables(tuple(pieces), *total)


def lookup_and_update_s(
    tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], devices: TableDevices
) -> tuple[float, float]:
    """Returns the seconds of a step's lookups with their exchange, and of the rest; both together are the step's."""
    whole = decoded(tables, pieces, devices)
    columns = np.zeros(devices.num_devices)
    for device, count in sent_columns(tables, pieces):
        columns[device] += count
    exchanged_s = float(exchange_s(devices.batch_size, columns.max(), devices.num_devices, devices.s_per_byte))
    return float(whole.forward_s.max()) + exchanged_s, float(whole.rest_s.max()) - exchanged_s


def _lookups_s(table: EmbeddingTable, pieces: Sequence[Piece], devices: TableDevices) -> np.ndarray:
    """Returns the seconds of forward lookups of P pieces on each device, `[D, P]`."""
    if not table.pooling_factor:
        return np.zeros((devices.num_devices, len(pieces)))
    copied = np.array([piece.device == EVERY_DEVICE for piece in pieces])
    examples = np.where(copied, devices.batch_size / devices.num_devices, devices.batch_size)
    ids = examples * table.pooling_factor
    access = None if table.access is None else np.array(table.access)
    start, end = (np.array([piece[field] for piece in pieces]) for field in (2, 3))
    columns = np.array([piece.columns for piece in pieces])
    lookups = ids * access_share(access, table.rows, start, end)
    on_host = np.array([piece.memory == HOST for piece in pieces])
    seconds_on = {}
    for hardware in dict.fromkeys(devices.hardware):
        seconds = lookup_s(lookups, columns, table.itemsize, ids, examples, hardware)
        if on_host.any():
            seconds = seconds + np.where(on_host, host_fetch_s(lookups, columns, table.itemsize, hardware), 0.0)
        seconds_on[hardware] = seconds
    return np.stack([seconds_on[hardware] for hardware in devices.hardware])
