"""What TorchRec's planner takes the ways to split a table for: seconds and bytes of each piece, and room for tables.

A table is copied to all devices, whole on one, or in pieces of columns or rows on all devices or on those of one host.
Seconds are bytes over bandwidths, forward and backward, with its constants. Weighted lookups, tables that are cached
from the host's memory, and grids of rows and columns over several hosts, which users must ask for, are left out.

Source: pytorch/torchrec of October 2025, torchrec/distributed/planner: constants, enumerators, shard estimators
and storage reservations.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cost.embedding_tables import BACKWARD_FACTOR, LEAST_READ_COLUMNS, block_penalty
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import piece_bytes, prices_of

UNIFORM, DEVICE, HOST = "one piece on each device", "pieces on any devices", "pieces on the devices of one host"

_DEVICES_PER_HOST = 8
_ID_BYTES = 8
_LEAST_COLUMNS_OF_BLOCK = 128
_BATCHED_COPY_FACTOR, _COPY_UPDATE_FACTOR = 2.455, 9.22
_RESERVED_SHARE, _DENSE_FACTOR, _ID_COPIES = 0.15, 6.0, 20


class Topology(NamedTuple):
    """Devices as the planner sees them.

    Attributes:
      num_devices: D.
      devices_per_host: D divides by it.
      batch_size: examples of each device.
      room_bytes: for tables on each device, `[D]`.
      memory_bytes_per_s: of each device's memory.
      host_link_bytes_per_s: between devices of a host.
      far_link_bytes_per_s: of each device to other hosts.
    """

    num_devices: int
    devices_per_host: int
    batch_size: float
    room_bytes: tuple[float, ...]
    memory_bytes_per_s: float = 897 * 2**30
    host_link_bytes_per_s: float = 600 * 2**30
    far_link_bytes_per_s: float = 12.5 * 2**30

    def link(self, num_devices: int) -> float:
        """Returns the bytes in a second between devices, on one host or more."""
        return self.host_link_bytes_per_s if num_devices <= self.devices_per_host else self.far_link_bytes_per_s


class Option(NamedTuple):
    """A way to split a table.

    Attributes:
      kind: TorchRec's name.
      placed: `UNIFORM`, `DEVICE` or `HOST`.
      spans: first row, row after the last, first column and column after the last of each piece.
      seconds: of each piece on its device.
      num_bytes: of each piece.
    """

    kind: str
    placed: str
    spans: tuple[tuple[int, int, int, int], ...]
    seconds: tuple[float, ...]
    num_bytes: tuple[float, ...]

    @property
    def by_rows(self) -> bool:
        """Whether pieces have different rows."""
        return "row" in self.kind

    def pieces(self, table: int, places: Sequence[int]) -> list[Piece]:
        """Returns the pieces on devices, a copy as one."""
        if self.kind == "data_parallel":
            return [Piece(table, EVERY_DEVICE, *self.spans[0])]
        return [
            Piece(table, device, *span) for device, span in zip(places, self.spans, strict=True) if span[0] < span[1]
        ]


@dataclass(frozen=True)
class Estimate:
    """The settings of the planner, and whether its own estimates are used.

    Attributes:
      reserves: whether memory is kept for everything else: 15%, six times the dense parameters, and twenty copies of
        the ids; pieces then also count their ids and pooled rows. Otherwise all memory is for tables.
      dense_bytes: of the parameters that are not in tables.
      columns: of a piece at least, as users may ask for; the planner's own is 128.
      rates_given: whether it is told the bandwidths of the devices, as users may; its own are those of V100s.
      our_prices: whether pieces cost what they do by our prices in place of TorchRec's estimates.
    """

    reserves: bool = True
    dense_bytes: float = 0.0
    columns: int = _LEAST_COLUMNS_OF_BLOCK
    rates_given: bool = False
    our_prices: bool = False

    def topology(self, tables: Sequence[EmbeddingTable], devices: TableDevices) -> Topology:
        """Returns devices with the memory that is left for tables; it may be negative."""
        batch_size, room = devices.batch_size / devices.num_devices, devices.memory_limit_bytes
        if self.reserves:
            ids = math.ceil(sum(table.pooling_factor for table in tables) * batch_size * _ID_BYTES)
            used = _DENSE_FACTOR * self.dense_bytes + _ID_COPIES * ids
            room = tuple(int((1 - _RESERVED_SHARE) * limit) - used for limit in room)
        topology = Topology(devices.num_devices, min(devices.num_devices, _DEVICES_PER_HOST), batch_size, tuple(room))
        if not self.rates_given:
            return topology
        is_far = devices.num_devices > topology.devices_per_host
        link = {"far_link_bytes_per_s" if is_far else "host_link_bytes_per_s": 1 / devices.s_per_byte}
        memory_bytes_per_s = min(one.reached_memory_bytes_per_s for one in devices.hardware)
        return topology._replace(memory_bytes_per_s=memory_bytes_per_s, **link)

    def options(self, table: EmbeddingTable, topology: Topology, devices: TableDevices) -> list[Option]:
        """Returns the ways to split a table, six of them."""
        whole = (0, table.rows, 0, table.dimension)
        columns = _column_spans(table, self.columns)
        kinds = (
            ("data_parallel", UNIFORM, (whole,) * topology.num_devices),
            ("table_wise", DEVICE, (whole,)),
            ("column_wise", DEVICE, columns),
            ("table_column_wise", HOST, columns),
            ("row_wise", UNIFORM, _row_spans(table, topology.num_devices)),
            ("table_row_wise", HOST, _row_spans(table, topology.devices_per_host)),
        )
        seconds = [_seconds(kind, table, spans, topology) for kind, _, spans in kinds]
        if self.our_prices:
            seconds = _our_seconds(table, [spans for _, _, spans in kinds], devices)
        return [
            Option(*kind, of_pieces, tuple(self._bytes(table, kind[0], span, topology) for span in kind[2]))
            for kind, of_pieces in zip(kinds, seconds, strict=True)
        ]

    def _bytes(self, table: EmbeddingTable, kind: str, span: tuple[int, int, int, int], topology: Topology) -> float:
        rows, columns = span[1] - span[0], span[3] - span[2]
        num_bytes = float(piece_bytes(table, rows, columns))
        if not self.reserves or not rows:
            return num_bytes
        senders = 1 if kind == "data_parallel" else topology.num_devices
        sharers = {"row_wise": topology.num_devices, "table_row_wise": topology.devices_per_host}.get(kind, 1)
        ids = topology.batch_size * table.pooling_factor / sharers
        pooled = topology.batch_size * columns * table.itemsize
        return num_bytes + math.ceil(ids * senders * _ID_BYTES) + math.ceil(pooled * senders)


def _column_spans(table: EmbeddingTable, least: int) -> tuple[tuple[int, int, int, int], ...]:
    """Returns pieces of the first width from `least` on that divides the columns and is a multiple of 4."""
    widths = (w for w in range(least, table.dimension) if table.dimension % w == 0 and w % 4 == 0)
    width = next(widths, table.dimension)
    return tuple((0, table.rows, start, start + width) for start in range(0, table.dimension, width))


def _row_spans(table: EmbeddingTable, count: int) -> tuple[tuple[int, int, int, int], ...]:
    """Returns pieces of as many rows each, rounded up, so that the last ones may have fewer or none."""
    block = -(-table.rows // count)
    ends = [min(block * i, table.rows) for i in range(count + 1)]
    return tuple((start, end, 0, table.dimension) for start, end in itertools.pairwise(ends))


def _seconds(
    kind: str, table: EmbeddingTable, spans: Sequence[tuple[int, int, int, int]], topology: Topology
) -> tuple[float, ...]:
    """Returns TorchRec's estimate for each piece of one kind of option, in seconds."""
    if kind == "data_parallel":
        return (_copy_seconds(table, topology),) * len(spans)
    if "row" in kind:
        return (_row_piece_seconds(kind, table, topology),) * len(spans)
    return tuple(_column_piece_seconds(table, end - start, topology) for _, _, start, end in spans)


def _column_piece_seconds(table: EmbeddingTable, columns: int, topology: Topology) -> float:
    examples = topology.batch_size * topology.num_devices
    ids = examples * table.pooling_factor
    pooled = examples * columns * table.itemsize
    passed = math.ceil(ids * _ID_BYTES) + ids * max(columns, LEAST_READ_COLUMNS) * table.itemsize + pooled
    forward = float(block_penalty(columns)) * passed / topology.memory_bytes_per_s
    return forward * (1 + BACKWARD_FACTOR) + 2 * pooled / topology.link(topology.num_devices)


def _row_piece_seconds(kind: str, table: EmbeddingTable, topology: Topology) -> float:
    """Rows are thought to be looked up equally often, and each piece pools for all examples."""
    sharers = topology.num_devices if kind == "row_wise" else topology.devices_per_host
    examples = topology.batch_size * topology.num_devices
    ids = examples * table.pooling_factor / sharers
    pooled = examples * table.dimension * table.itemsize
    forward = (
        math.ceil(ids * _ID_BYTES) + ids * table.dimension * table.itemsize + pooled
    ) / topology.memory_bytes_per_s
    sent = 2 * pooled / topology.link(sharers)
    hosts = topology.num_devices // topology.devices_per_host
    if kind == "table_row_wise" and hosts > 1:
        sent += 2 * pooled / topology.num_devices * hosts / topology.far_link_bytes_per_s
    return forward * (1 + BACKWARD_FACTOR) + sent + pooled * _BATCHED_COPY_FACTOR / topology.memory_bytes_per_s


def _copy_seconds(table: EmbeddingTable, topology: Topology) -> float:
    """A copy's forward pass uses half of the memory's bandwidth, as TorchRec's dense kernel is thought to."""
    bandwidth = 0.5 * topology.memory_bytes_per_s
    ids = topology.batch_size * table.pooling_factor
    row_bytes = table.dimension * table.itemsize
    forward = (math.ceil(ids * _ID_BYTES) + ids * row_bytes + topology.batch_size * row_bytes) / bandwidth
    hosts = min(topology.num_devices / topology.devices_per_host, 2)
    reduced = table.num_bytes * (2 * hosts - 1) / hosts
    reduced /= topology.far_link_bytes_per_s * topology.devices_per_host
    reduced *= 2 if topology.num_devices > 2 * topology.devices_per_host else 1
    return forward * (1 + BACKWARD_FACTOR) + reduced + table.num_bytes * _COPY_UPDATE_FACTOR / bandwidth


def _our_seconds(
    table: EmbeddingTable, spans: Sequence[Sequence[tuple[int, int, int, int]]], devices: TableDevices
) -> list[tuple[float, ...]]:
    """Returns the cost of each piece by our prices; the first spans are of a copy."""
    copy, *others = spans
    pieces = [(Piece(0, EVERY_DEVICE, *copy[0]),)]
    pieces += [(Piece(0, 0, *span),) for of_one in others for span in of_one]
    price = prices_of(table, pieces, devices)
    costs = iter((price.forward_s[:, 0] + price.rest_s[:, 0]).tolist())
    return [(next(costs),) * len(copy), *(tuple(next(costs) for _ in of_one) for of_one in others)]
