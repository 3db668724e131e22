"""What pieces of tables cost on their devices: seconds of lookups and exchanges, and bytes.

Features are what networks see of pieces (`diffshard/tables/learned_cost.py`).

Letters for sizes: D devices on H hosts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cost.embedding_tables import (
    BACKWARD_FACTOR,
    ID_BYTES,
    POOLED_BYTES,
    access_share,
    copy_update_s,
    element_state_s,
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
    """The costs of pieces on each device.

    Attributes:
      forward_s: seconds of forward lookups, `[D]`.
      rest_s: seconds of both exchanges and the backward pass, `[D]`.
      num_bytes: in memory of the devices, with the optimiser's state of all rows, `[D]`.
      host_bytes: in memory of the hosts, `[D]`.
      state_bytes: of `num_bytes`, the optimiser's state and whole copies, `[D]`.
      each_host_bytes: of `num_bytes`, numbers of rows that each host has, `[D]`.
      each_host_state_bytes: of `state_bytes`, those of such rows, `[D]`.
    """

    forward_s: np.ndarray
    rest_s: np.ndarray
    num_bytes: np.ndarray
    host_bytes: np.ndarray
    state_bytes: np.ndarray
    each_host_bytes: np.ndarray
    each_host_state_bytes: np.ndarray


def piece_bytes(table: EmbeddingTable, rows: int, columns: int) -> int:
    """Returns the bytes of a piece with its optimiser's state."""
    return rows * (columns * table.itemsize + table.update_rule.state_bytes(columns))


def price_of(table: EmbeddingTable, pieces: Iterable[Piece], devices: TableDevices) -> Price:
    """Computes what pieces of one table cost each device."""
    return Price(*(part[0] for part in prices_of(table, [tuple(pieces)], devices)))


def prices_of(table: EmbeddingTable, pieces: Sequence[Sequence[Piece]], devices: TableDevices) -> Price:
    """Computes what several strategies of one table, given as their pieces, cost each device: arrays `[K, D]`."""
    every = [(k, piece) for k, of_one in enumerate(pieces) for piece in of_one]
    at, rows, columns = (
        np.array(own, np.int64)
        for own in ([k for k, _ in every], [p.rows for _, p in every], [p.columns for _, p in every])
    )
    on_host, on_each, copied = (
        np.array(own, bool)
        for own in (
            [p.memory == HOST for _, p in every],
            [p.on_each_host for _, p in every],
            [p.device == EVERY_DEVICE for _, p in every],
        )
    )
    seconds = _lookups_s(table, [piece for _, piece in every], devices)  # [D, P]
    # Places are a piece on a device each, Q of them: one of most pieces, one for each device that has a copy.
    own_devices = [devices_of(piece, devices) for _, piece in every]
    place = np.repeat(np.arange(len(every)), [len(own) for own in own_devices])
    index = at[place], np.array([device for own in own_devices for device in own], np.int64)
    shape = len(pieces), devices.num_devices

    def summed(amounts: np.ndarray) -> np.ndarray:
        """Adds up what each place has, `[Q]`, by strategy and device, `[K, D]`."""
        sums = np.zeros(shape)
        np.add.at(sums, index, amounts)
        return sums

    numbers_bytes, state_bytes = rows * columns * table.itemsize, rows * table.update_rule.state_bytes(columns)
    forward = summed(seconds[index[1], place])
    rest = BACKWARD_FACTOR * forward + summed(
        _copies_s(table, rows, columns, copied, on_each, devices)[index[1], place]
    )
    if table.update_rule.numbers_per_element and table.pooling_factor:
        updated = np.where(copied | on_each, 0, np.minimum(rows, _lookups(table, [p for _, p in every], devices)[0]))
        rest += summed(_element_states_s(table, updated, columns, devices)[index[1], place])
    for k, of_one in enumerate(pieces):
        for device, sent_s in _sent_s(of_one, devices) if table.pooling_factor else ():
            rest[k, device] += 2 * sent_s
    return Price(
        forward,
        rest,
        num_bytes=summed((np.where(on_host, 0, numbers_bytes) + state_bytes)[place]),
        host_bytes=summed(np.where(on_host, numbers_bytes, 0)[place]),
        state_bytes=summed((np.where(copied, numbers_bytes, 0) + state_bytes)[place]),
        each_host_bytes=summed(np.where(on_each, numbers_bytes, 0)[place]),
        each_host_state_bytes=summed(np.where(on_each, state_bytes, 0)[place]),
    )


def devices_of(piece: Piece, devices: TableDevices) -> range:
    """Returns the devices that have a piece."""
    if piece.device == EVERY_DEVICE:
        return range(devices.num_devices)
    if piece.on_each_host:
        return range(piece.device, devices.num_devices, devices.devices_per_host)
    return range(piece.device, piece.device + 1)


def _copies_s(
    table: EmbeddingTable,
    rows: np.ndarray,
    columns: np.ndarray,
    copied: np.ndarray,
    on_each: np.ndarray,
    devices: TableDevices,
) -> np.ndarray:
    """Returns the seconds that updates of P pieces take because they are copies, `[D, P]`; 0 for others."""
    seconds_on = {}
    for hardware in dict.fromkeys(devices.hardware):
        everywhere, each_host = (
            copy_update_s(rows, columns, table.itemsize, links, hardware, table.update_rule.state_bytes(columns))
            for links in (devices.links, devices.links.across)
        )
        seconds_on[hardware] = np.where(copied, everywhere, np.where(on_each, each_host, 0.0))
    return np.stack([seconds_on[hardware] for hardware in devices.hardware])


def _element_states_s(
    table: EmbeddingTable, rows: np.ndarray, columns: np.ndarray, devices: TableDevices
) -> np.ndarray:
    """Returns the seconds that updates of rows of P pieces, `[P]`, take for their state, `[D, P]`."""
    state_bytes = table.update_rule.state_bytes(columns)
    return np.stack([element_state_s(rows, state_bytes, hardware) for hardware in devices.hardware])


def sent_columns(tables: Sequence[EmbeddingTable], pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Returns devices with the columns of pooled rows that they send; rows of the same columns are added up before.

    Args:
      tables: T of them.
      pieces: of these tables, on one device each.
    """
    return [(p.device, p.columns) for p in _sent(p for p in pieces if tables[p.table].pooling_factor)]


def _sent(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns one of the pieces whose pooled rows a device sends together each; copies on all devices send none."""
    sent = {
        (p.device, p.table, p.column_start, p.column_end, p.on_each_host): p for p in pieces if p.device != EVERY_DEVICE
    }
    return [piece for _, piece in sorted(sent.items())]


def _sent_s(pieces: Iterable[Piece], devices: TableDevices) -> Iterator[tuple[int, float]]:
    """Yields devices with the seconds in which they send the pooled rows of pieces that are looked up."""
    for piece in _sent(pieces):
        examples, links = devices.batch_size, devices.links
        if piece.on_each_host:
            examples, links = examples / devices.num_hosts, links.inside
        for device in devices_of(piece, devices):
            yield device, float(exchange_s(examples, piece.columns, links))


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
    sent_s = np.zeros(devices.num_devices)
    for device, own_s in _sent_s((p for p in pieces if tables[p.table].pooling_factor), devices):
        sent_s[device] += own_s
    return float(whole.forward_s.max() + sent_s.max()), float(whole.rest_s.max() - sent_s.max())


def _lookups(
    table: EmbeddingTable, pieces: Sequence[Piece], devices: TableDevices
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the lookups, ids and examples of a step in each of P pieces on one device, `[P]` each."""
    examples = np.array([devices.batch_size / len(devices_of(piece, devices)) for piece in pieces])
    ids = examples * table.pooling_factor
    access = None if table.access is None else np.array(table.access)
    start, end = (np.array([piece[field] for piece in pieces]) for field in (2, 3))
    return ids * access_share(access, table.rows, start, end), ids, examples


def _lookups_s(table: EmbeddingTable, pieces: Sequence[Piece], devices: TableDevices) -> np.ndarray:
    """Returns the seconds of forward lookups of P pieces on each device, `[D, P]`."""
    if not table.pooling_factor:
        return np.zeros((devices.num_devices, len(pieces)))
    columns = np.array([piece.columns for piece in pieces])
    lookups, ids, examples = _lookups(table, pieces, devices)
    on_host = np.array([piece.memory == HOST for piece in pieces])
    seconds_on = {}
    for hardware in dict.fromkeys(devices.hardware):
        seconds = lookup_s(lookups, columns, table.itemsize, ids, examples, hardware)
        if on_host.any():
            seconds = seconds + np.where(on_host, host_fetch_s(lookups, columns, table.itemsize, hardware), 0.0)
        seconds_on[hardware] = seconds
    return np.stack([seconds_on[hardware] for hardware in devices.hardware])
