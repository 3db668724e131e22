"""The vocabulary of embedding tables on devices: tables, devices, and the pieces into which tables are split.

Letters for sizes: T tables, D devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from cost.base import Hardware
from cost.embedding_tables import TableLinks
from cost.real_numbers import Amount, AmountOrInf, Count, Index, Limit, real_number, whole_number
from search_spaces.embedding_tables.optimizers import OPTIMIZERS, ROWWISE_ADAGRAD, TableOptimizer

EVERY_DEVICE = -1
"""In the place of a piece's device: every device holds a copy of these rows, with all columns."""
DEVICE, HOST = "device", "host"
"""Memories of rows: the device's own, or pinned memory of its host, from which the device fetches what it looks up."""
MEMORIES = (DEVICE, HOST)
_POOLINGS = ("sum", "mean")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table, and how a training step looks it up.

    Attributes:
      name: different from those of other tables.
      rows: number of rows.
      dimension: number of columns.
      pooling_factor: ids of one example, on average; 0 if the table is not looked up.
      dtype: "float32", "bfloat16" or "float16".
      pooling: what becomes of the rows of one example: their "sum", or their "mean" by weights.
      access: counts of lookups in parts of equally many rows, from the first row to the last; None if rows are looked
        up equally often. Hot rows are those at the beginning: put rows that are looked up often first, or let
        `shard_tables` number them anew by `statistics`.
      optimizer: what updates its rows: "rowwise_adagrad", "adagrad", "adam" or "sgd". They keep one number of state for
        each row, one and two for each number of the table, and none.

    Raises:
      ValueError: an attribute breaks its rule.
    """

    name: str
    rows: int
    dimension: int
    pooling_factor: float = 1.0
    dtype: str = "float32"
    pooling: str = "sum"
    access: tuple[float, ...] | None = None
    optimizer: str = ROWWISE_ADAGRAD

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"`EmbeddingTable.name` must be a text that is not empty, not {self.name!r}.")
        for field in ("rows", "dimension"):
            number = whole_number(getattr(self, field))
            if number is None or number < 1:
                raise ValueError(f"{self._field(field)} must be a positive whole number, not {getattr(self, field)!r}.")
            object.__setattr__(self, field, number)
        if self.rows >= 2**31:
            raise ValueError(f"{self._field('rows')} must be below 2^31, because ids are int32, not {self.rows}.")
        pooling_factor = real_number(self.pooling_factor)
        if pooling_factor is None or not 0 <= pooling_factor < math.inf:
            raise ValueError(
                f"{self._field('pooling_factor')} must be a finite number of at least 0, not {self.pooling_factor!r}."
            )
        object.__setattr__(self, "pooling_factor", pooling_factor)
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self._field('dtype')} must be one of {', '.join(_DTYPES)}, not {self.dtype!r}.")
        if self.pooling not in _POOLINGS:
            raise ValueError(f"{self._field('pooling')} must be 'sum' or 'mean', not {self.pooling!r}.")
        if self.optimizer not in OPTIMIZERS:
            names = ", ".join(map(repr, OPTIMIZERS))
            raise ValueError(f"{self._field('optimizer')} must be one of {names}, not {self.optimizer!r}.")
        if self.access is not None:
            object.__setattr__(self, "access", self._checked_access(self.access))

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole table, without the optimiser's state."""
        return self.rows * self.dimension * self.itemsize

    @property
    def update_rule(self) -> TableOptimizer:
        """The optimiser's state and update of each row."""
        return OPTIMIZERS[self.optimizer]

    def _field(self, field: str) -> str:
        return f"`EmbeddingTable.{field}` of {self.name!r}"

    def _checked_access(self, access: Sequence[float]) -> tuple[float, ...]:
        try:
            counts = np.asarray(access, float)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self._field('access')} must be counts of lookups, such as (3.0, 1.0), not {access!r}."
            ) from None
        if counts.ndim != 1 or not 1 <= len(counts) <= self.rows:
            raise ValueError(
                f"{self._field('access')} must be 1 to {self.rows} counts, at most one for each row; got shape "
                f"{counts.shape}."
            )
        if not np.isfinite(counts).all() or (counts < 0).any() or not counts.sum():
            raise ValueError(f"{self._field('access')} must be finite counts, none negative and not all 0.")
        return tuple(counts.tolist())


class Piece(NamedTuple):
    """A part of a table on one device.

    Attributes:
      table: the table's index.
      device: the device's index; `EVERY_DEVICE` for rows of which every device holds a copy.
      row_start: the first row.
      row_end: the row after the last one.
      column_start: the first column.
      column_end: the column after the last one.
      memory: "device", or "host" for rows that the device fetches when they are looked up.
      on_each_host: whether each host has a copy, on the device of the same place in it; `device` is that of the first
        host. Examples look up the copy of their own host.
    """

    table: Index
    device: int
    row_start: Index
    row_end: Index
    column_start: Index
    column_end: Index
    memory: str = DEVICE
    on_each_host: bool = False

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_end - self.row_start

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.column_end - self.column_start


@dataclass(frozen=True)
class TableDevices:
    """The devices that tables are spread over.

    Attributes:
      hardware: of each device, `[D]`.
      memory_limit_bytes: for the tables on each device and their optimiser's state, `[D]`.
      s_per_byte: seconds for a byte that one device sends in an all-to-all over all devices of its host.
      batch_size: examples of one step, of all devices together.
      host_limit_bytes: for rows in memory of the host, for each device, `[D]`; empty where all rows are on devices.
      num_hosts: hosts of equally many devices, which are numbered host by host. Links of one host are those of all
        devices, wherever these are.
      far_s_per_byte: seconds for a byte that one device sends to another host, while all devices of its host send.
    """

    hardware: tuple[Hardware, ...]
    memory_limit_bytes: tuple[Limit, ...]
    s_per_byte: Amount
    batch_size: Count
    host_limit_bytes: tuple[AmountOrInf, ...] = ()
    num_hosts: Count = 1
    far_s_per_byte: Amount = 0.0

    @property
    def num_devices(self) -> int:
        """The number of devices, D."""
        return len(self.hardware)

    @property
    def devices_per_host(self) -> int:
        """Devices of each host."""
        return self.num_devices // self.num_hosts

    @property
    def links(self) -> TableLinks:
        """The links between all devices."""
        return TableLinks(self.num_devices, self.s_per_byte, self.num_hosts, self.far_s_per_byte)


class DecodedTables(NamedTuple):
    """Which device holds what, and what that costs.

    Attributes:
      pieces: of all tables, in the order of the tables.
      forward_s: seconds of each device's forward lookups, `[D]`.
      rest_s: seconds of each device's exchanges and backward pass, `[D]`.
      device_bytes: what each device holds in its own memory, `[D]`.
      host_bytes: what each device has in memory of its host, `[D]`.
    """

    pieces: tuple[Piece, ...]
    forward_s: np.ndarray
    rest_s: np.ndarray
    device_bytes: np.ndarray
    host_bytes: np.ndarray
