"""What lookups in embedding tables cost: bytes of the device's memory for rows, bytes of the links for pooled rows.

A lookup reads rows all over a table, so the memory's bandwidth decides, and short rows waste a part of it. Each device
looks up the rows of its own tables for the whole batch, then an all-to-all brings the pooled rows to the examples they
belong to. That exchange ends when the device that began last has sent its rows, so that a step takes

    J = max_d F_d + max_d R_d

for forward lookups F and the rest R of each device d: both exchanges and the backward pass.

Links in a host are faster than those to other hosts, so that an exchange is priced by its bytes over each of them, one
after the other. Rows of which each host has a copy are exchanged in the host alone, and only the sum of their gradients
leaves it.

Letters for sizes: D devices on H hosts.

Source: the constants and the bytes of a lookup are those of TorchRec's `EmbeddingPerfEstimator` (table-wise sharding);
that a step takes as long as its slowest device: Zha et al., "NeuroShard" (MLSys 2023), section 2; rows copied where the
topology says so: Sethi et al., "FlexShard" (2023).
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cost.base import CostModel, Hardware

LEAST_READ_COLUMNS = 32
"""Columns that a lookup of fewer columns reads as well: a transaction of the memory is not shorter. TorchRec's."""
_FULL_BLOCK_COLUMNS, _HALF_BLOCK_COLUMNS = 128, 64
_HALF_BLOCK_PENALTY, _QUARTER_BLOCK_PENALTY = 1.15, 1.75  # of rows that do not fill a block of threads; TorchRec's
BACKWARD_FACTOR = 2.0
"""Seconds of the backward pass and the update for one second of forward lookups; TorchRec's."""
ID_BYTES = 4  # ids are int32
POOLED_BYTES = 4  # pooled rows are float32, whatever the table's type
GRADIENT_BYTES = 4  # gradients of copies are float32, whatever the table's type
COPY_GRADIENT_PASSES = 3
"""Times that an update goes over all of a copy's gradient: it is filled with zeros, squared, and applied to the rows.
In XLA's program for H100s these are three kernels. A fourth adds the rows that were looked up."""


def block_penalty(columns: ArrayLike) -> np.ndarray:
    """Returns the slowdown of lookups of few columns: 1 from 128 columns on, 1.15 from 64 on, else 1.75."""
    columns = np.asarray(columns)
    few = np.where(columns >= _HALF_BLOCK_COLUMNS, _HALF_BLOCK_PENALTY, _QUARTER_BLOCK_PENALTY)
    return np.where(columns >= _FULL_BLOCK_COLUMNS, 1.0, few)


def lookup_s(
    lookups: ArrayLike, columns: ArrayLike, itemsize: ArrayLike, ids: ArrayLike, outputs: ArrayLike, hardware: Hardware
) -> np.ndarray:
    """Computes the seconds of forward lookups on one device; arguments broadcast against each other.

    Args:
      lookups: rows that are read.
      columns: of each row.
      itemsize: bytes of one number of the table.
      ids: ids that are looked at, those of rows on other devices included.
      outputs: pooled rows that are written.
      hardware: the device, whose memory's bandwidth counts.
    """
    columns = np.asarray(columns, float)
    read = np.asarray(lookups) * np.maximum(columns, LEAST_READ_COLUMNS) * itemsize
    num_bytes = np.asarray(ids) * ID_BYTES + read + np.asarray(outputs) * columns * POOLED_BYTES
    return block_penalty(columns) * num_bytes / hardware.reached_memory_bytes_per_s


def host_fetch_s(lookups: ArrayLike, columns: ArrayLike, itemsize: ArrayLike, hardware: Hardware) -> np.ndarray:
    """Computes the seconds in which one device fetches rows from pinned memory of its host; arguments broadcast.

    Each lookup counts, also of a row that another example of the batch looks up as well.

    Args:
      lookups: rows that are fetched.
      columns: of each row.
      itemsize: bytes of one number of the table.
      hardware: the device.

    Raises:
      ValueError: the hardware has no `host_memory_bytes_per_s`.
    """
    if hardware.host_memory_bytes_per_s is None:
        raise ValueError(f"`hardware` {hardware.name!r} does not say how fast it copies: `host_memory_bytes_per_s`.")
    num_bytes = np.asarray(lookups, float) * np.asarray(columns) * np.asarray(itemsize)
    return num_bytes / hardware.host_memory_bytes_per_s


class TableLinks(NamedTuple):
    """The links between D devices on H hosts of equally many.

    Attributes:
      num_devices: D.
      s_per_byte: seconds of a byte that a device sends to another one of its host; of one host, to any other.
      num_hosts: H, a divisor of D.
      far_s_per_byte: seconds of a byte that a device sends to another host, while all devices of its host send.
    """

    num_devices: int
    s_per_byte: float
    num_hosts: int = 1
    far_s_per_byte: float = 0.0

    @property
    def inside(self) -> "TableLinks":
        """The links of one host alone."""
        return TableLinks(self.num_devices // self.num_hosts, self.s_per_byte)

    @property
    def across(self) -> "TableLinks":
        """The links between one device of each host."""
        return TableLinks(self.num_hosts, self.far_s_per_byte)

    @property
    def exchanged_s_per_byte(self) -> float:
        """Seconds of a byte in parts of equal size for all devices, one of which stays."""
        in_host, in_others = self.inside.num_devices - 1, self.num_devices - self.inside.num_devices
        return (in_host * self.s_per_byte + in_others * self.far_s_per_byte) / self.num_devices

    @property
    def reduced_s_per_byte(self) -> float:
        """Seconds of a byte in an all-reduce: of its parts in each host, then of each part across hosts."""
        size, hosts = self.inside.num_devices, self.num_hosts
        return 2 * ((size - 1) / size * self.s_per_byte + (hosts - 1) / hosts / size * self.far_s_per_byte)


def exchange_s(outputs: ArrayLike, columns: ArrayLike, links: TableLinks) -> np.ndarray:
    """Computes the seconds in which one device sends pooled rows to all others, or receives their gradients.

    The latency is the same for all placements and left out.

    Args:
      outputs: pooled rows.
      columns: of each row.
      links: between D devices; an example in D stays where it is.
    """
    return np.asarray(outputs, float) * columns * POOLED_BYTES * links.exchanged_s_per_byte


def copy_update_s(
    rows: ArrayLike,
    columns: ArrayLike,
    itemsize: ArrayLike,
    links: TableLinks,
    hardware: Hardware,
    state_bytes: ArrayLike,
) -> np.ndarray:
    """Computes the seconds of a copy's update: the all-reduce of its gradient, and the passes over all of its numbers.

    Gradients of copies are dense and float32, whatever the table's type. Of each number 4 bytes are reduced over the
    devices, and `COPY_GRADIENT_PASSES` times 4 bytes and twice those of the table go through the device's memory. Of
    each row the state is read and written. Latency is left out.

    Args:
      rows: of the copy.
      columns: of each row.
      itemsize: bytes of one number of the table.
      links: between the devices that have a copy.
      hardware: the device, whose memory's bandwidth counts.
      state_bytes: of each row's state.
    """
    rows = np.asarray(rows, float)
    numbers = rows * np.asarray(columns)
    of_gradient = COPY_GRADIENT_PASSES * GRADIENT_BYTES
    passed = numbers * (of_gradient + 2 * np.asarray(itemsize)) + 2 * rows * np.asarray(state_bytes)
    return copy_reduction_s(rows, columns, links) + passed / hardware.reached_memory_bytes_per_s


def element_state_s(rows: ArrayLike, state_bytes: ArrayLike, hardware: Hardware) -> np.ndarray:
    """Computes the seconds in which an update reads and writes the state that rows have for each of their numbers.

    What row-wise optimisers keep is within `BACKWARD_FACTOR`.

    Args:
      rows: that are updated.
      state_bytes: of each row.
      hardware: the device, whose memory's bandwidth counts.
    """
    return 2 * np.asarray(rows, float) * np.asarray(state_bytes) / hardware.reached_memory_bytes_per_s


def copy_reduction_s(rows: ArrayLike, columns: ArrayLike, links: TableLinks) -> np.ndarray:
    """Computes the seconds of the all-reduce in `copy_update_s`; arguments are the same."""
    return np.asarray(rows, float) * np.asarray(columns) * GRADIENT_BYTES * links.reduced_s_per_byte


def step_s(forward_s: np.ndarray, rest_s: np.ndarray) -> float:
    """Computes J from forward lookups F `[D]` and the rest R `[D]` in seconds; 0 where there are no devices."""
    return float(np.max(forward_s, initial=0.0) + np.max(rest_s, initial=0.0))


def access_share(access: np.ndarray | None, num_rows: int, start: ArrayLike, end: ArrayLike) -> np.ndarray:
    """Returns which share of all lookups goes to the rows from `start` to `end` (exclusive), for each such pair.

    Args:
      access: `[K]` counts of lookups in K parts of the table that have equally many rows; None if rows are alike.
      num_rows: of the table.
      start: the first row, of any shape.
      end: the row after the last one, of the same shape.
    """
    start, end = np.asarray(start), np.asarray(end)
    if access is None:
        return (end - start) / num_rows
    cumulative = np.concatenate([[0.0], np.cumsum(np.asarray(access, float))])
    at = np.interp(np.stack([start, end]) / num_rows * len(access), np.arange(len(cumulative)), cumulative)
    return (at[1] - at[0]) / cumulative[-1]


def _lookups_of(size: ArrayLike, hardware: Hardware, *, columns: int) -> np.ndarray:
    return lookup_s(np.asarray(size, float), columns, 4, size, size, hardware)


def _widths(*columns: int) -> tuple[CostModel, ...]:
    """Makes models of lookups in tables of a few widths; their size is in looked up rows."""
    return tuple(partial(_lookups_of, columns=width) for width in columns)


EXAMPLE = partial(_widths, 16, 64, 128)
