"""What pieces of tables cost on their devices: seconds of lookups and exchanges, and bytes.

Letters for sizes: D devices.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cost.embedding_tables import (
    BACKWARD_FACTOR,
    STATE_BYTES_PER_ROW,
    access_share,
    exchange_s,
    host_fetch_s,
    lookup_s,
    replica_gradient_s,
)
from search_spaces.embedding_tables.base import (
    DEVICE,
    EVERY_DEVICE,
    HOST,
    DecodedTables,
    EmbeddingTable,
    Piece,
    TableDevices,
)


class Price(NamedTuple):
    """What pieces cost each device.

    Attributes:
      forward_s: seconds of forward lookups, `[D]`.
      rest_s: seconds of both exchanges and the backward pass, `[D]`.
      num_bytes: in memory of the devices, with the optimiser's state of all rows, `[D]`.
      host_bytes: in memory of the hosts, `[D]`.
    """

    forward_s: np.ndarray
    rest_s: np.ndarray
    num_bytes: np.ndarray
    host_bytes: np.ndarray


def piece_bytes(table: EmbeddingTable, rows: int, columns: int) -> int:
    """Returns the bytes of a piece with its optimiser's state."""
    return rows * (columns * table.itemsize + STATE_BYTES_PER_ROW)


def price_of(table: EmbeddingTable, pieces: Iterable[Piece], devices: TableDevices) -> Price:
    """Computes what pieces of one table cost each device."""
    pieces = tuple(pieces)
    forward, rest, num_bytes, host_bytes = (np.zeros(devices.num_devices) for _ in range(4))
    for piece in pieces:
        if piece.device == EVERY_DEVICE:
            forward += [_lookup_s(table, piece, d, devices) for d in range(devices.num_devices)]
            copied_bytes = piece.rows * piece.columns * table.itemsize
            rest += replica_gradient_s(copied_bytes, devices.num_devices, devices.s_per_byte)
            num_bytes += piece_bytes(table, piece.rows, piece.columns)
            continue
        forward[piece.device] += _lookup_s(table, piece, piece.device, devices)
        state_bytes = STATE_BYTES_PER_ROW * piece.rows
        numbers_bytes = piece_bytes(table, piece.rows, piece.columns) - state_bytes
        num_bytes[piece.device] += state_bytes + (numbers_bytes if piece.memory == DEVICE else 0)
        host_bytes[piece.device] += numbers_bytes if piece.memory == HOST else 0
    for device, columns in sent_columns([table], pieces):
        rest[device] += 2 * exchange_s(devices.batch_size, columns, devices.num_devices, devices.s_per_byte)
    return Price(forward, rest + BACKWARD_FACTOR * forward, num_bytes, host_bytes)


def sent_columns(tables: Sequence[EmbeddingTable], pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Returns devices with the columns of pooled rows that they send; rows of the same columns are added up before.

    Args:
      tables: of the pieces; a single one may have any index.
      pieces: of these tables.
    """
    sent = {
        (p.device, p.table, p.column_start, p.column_end)
        for p in pieces
        if p.device != EVERY_DEVICE and tables[p.table if len(tables) > 1 else 0].pooling_factor
    }
    return [(device, end - start) for device, _, start, end in sorted(sent)]


def decoded(tables: Sequence[EmbeddingTable], pieces: Sequence[Piece], devices: TableDevices) -> DecodedTables:
    """Returns pieces of all tables with what they cost each device."""
    total = [np.zeros(devices.num_devices) for _ in range(4)]
    for index, table in enumerate(tables):
        for sum_, part in zip(total, price_of(table, [p for p in pieces if p.table == index], devices), strict=True):
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


def _lookup_s(table: EmbeddingTable, piece: Piece, device: int, devices: TableDevices) -> float:
    """Returns the seconds of a piece's forward lookups on one device."""
    if not table.pooling_factor:
        return 0.0
    examples = devices.batch_size / (devices.num_devices if piece.device == EVERY_DEVICE else 1)
    ids = examples * table.pooling_factor
    access = None if table.access is None else np.array(table.access)
    share = access_share(access, table.rows, piece.row_start, piece.row_end)
    hardware = devices.hardware[device]
    seconds = lookup_s(ids * share, piece.columns, table.itemsize, ids, examples, hardware)
    if piece.memory == HOST:
        seconds = seconds + host_fetch_s(ids * share, piece.columns, table.itemsize, hardware)
    return float(seconds)
