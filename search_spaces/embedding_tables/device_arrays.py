"""How many bytes each device keeps when a plan runs: an array of JAX is as long on every device as on the fullest one.

A device has several arrays: the numbers of its pieces of each dtype, the state of the optimiser, the same two of rows
that each host has, and in memory of its host the rows of each dtype and width. Each of them is padded by itself, so
that a memory needs

    sum_a max_d (bytes of array a that device d needs),

which the smallest limit of all devices has to hold. It is never less than what the fullest device needs, so bounds
for the plain sums of each device hold for it, too.

Letters for sizes: T tables, S_t strategies of table t, D devices, A arrays of a device, O those of one table, M
memories of a device (its own, and that of its host where rows may be there).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.base import Problem
from search_spaces.embedding_tables.base import HOST, EmbeddingTable, TableDevices
from search_spaces.embedding_tables.prices import Price
from search_spaces.embedding_tables.strategies import TableStrategies


class TableBytes(NamedTuple):
    """The bytes that the strategies of one table need in arrays of the devices.

    Attributes:
      arrays: the arrays in which the table may have rows, or their state, `[O]`.
      num_bytes: in each of them on each device, `[O, D, S_t]`.
    """

    arrays: np.ndarray
    num_bytes: np.ndarray


class DeviceArrays(NamedTuple):
    """The arrays of each device.

    Attributes:
      memory: of each array, `[A]`: 0 is that of the device, 1 that of its host.
      limit_bytes: the smallest limit of each memory, `[M]`.
      num_devices: D.
      tables: T of them.
    """

    memory: np.ndarray
    limit_bytes: np.ndarray
    num_devices: int
    tables: tuple[TableBytes, ...]

    def needed(self, choices: np.ndarray) -> np.ndarray:
        """Returns the bytes that each device needs in each array, `[A, D, N]`, of choices `[N, T]`."""
        needed = np.zeros((len(self.memory), self.num_devices, len(choices)))
        for table, chosen in zip(self.tables, choices.T, strict=True):
            needed[table.arrays] += table.num_bytes[:, :, chosen]
        return needed

    def padded(self, needed: np.ndarray) -> np.ndarray:
        """Returns the bytes of each memory, `[M, ..]`, where arrays need `[A, D, ..]`."""
        return self._in_memories(needed.max(1), self.memory)

    def excess(self, choice: Sequence[int]) -> float:
        """Returns by how many bytes a choice `[T]` exceeds the limit of a memory at most; 0 where it fits."""
        padded = self.padded(self.needed(np.asarray(choice)[None]))[:, 0]
        return float(np.maximum(padded - self.limit_bytes, 0).max())

    def most(self) -> np.ndarray:
        """Returns bytes of each memory, `[M]`, that no choice exceeds."""
        return np.sum([self.padded_most(table) for table in self.tables], axis=0)

    def padded_most(self, table: TableBytes) -> np.ndarray:
        """Returns bytes of each memory, `[M]`, that a table adds at most."""
        return self._in_memories(table.num_bytes.max((1, 2)), self.memory[table.arrays])

    def fits_alone(self, table: TableBytes) -> np.ndarray:
        """Returns whether the memories hold each strategy of a table alone, `[S_t]`."""
        padded = self._in_memories(table.num_bytes.max(1), self.memory[table.arrays])
        return np.all(padded <= self.limit_bytes[:, None], axis=0)

    def _in_memories(self, longest: np.ndarray, memory: np.ndarray) -> np.ndarray:
        """Adds up the arrays of each memory: bytes `[M, ..]` from `[O, ..]` and the memory of each, `[O]`."""
        if len(self.limit_bytes) == 1:
            return longest.sum(0, keepdims=True)
        return np.stack([longest[memory == m].sum(0) for m in range(len(self.limit_bytes))])

    def limits_as(self, choice: Sequence[int]) -> np.ndarray:
        """Returns a limit for each array, `[A]`, that together are those of the memories, in the shares of a choice."""
        longest = self.needed(np.asarray(choice)[None]).max(1)[:, 0]
        for m, limit in enumerate(self.limit_bytes):
            own = self.memory == m
            longest[own] *= limit / max(longest[own].sum(), 1.0) if np.isfinite(limit) else 1.0
        return np.floor(longest)

    def with_limits(self, problem: Problem, longest: np.ndarray) -> Problem:
        """Returns a problem in which each array has a limit by itself, `[A]` bytes, the same on all devices.

        Memories are sums of longest arrays, which problems cannot say; limits of single arrays they can.
        """
        usage = []
        for table in self.tables:
            own = np.zeros((table.num_bytes.shape[2], len(self.memory), self.num_devices))
            own[:, table.arrays] = table.num_bytes.transpose(2, 0, 1)
            usage.append(own.reshape(len(own), -1))
        return problem._replace(usage=usage, memory_limit=np.repeat(longest, self.num_devices))


def device_arrays(
    tables: Sequence[EmbeddingTable],
    strategies: Sequence[TableStrategies],
    prices: Sequence[Price],
    devices: TableDevices,
) -> DeviceArrays:
    """Lays out what all strategies need in the arrays of the devices.

    Args:
      tables: T.
      strategies: of each table; the rows that a strategy has on hosts are of one width.
      devices: D.
    """
    index: dict[tuple[str | int, ...], int] = {("state",): 0}
    found = []
    for table, own_strategies, price in zip(tables, strategies, prices, strict=True):
        # A copy is as long on all devices as it is, so that it may be counted with the state.
        parts: dict[tuple[str | int, ...], np.ndarray] = {
            ("state",): price.state_bytes - price.each_host_state_bytes,
            (table.dtype,): price.num_bytes - price.state_bytes - price.each_host_bytes,
        }
        if price.each_host_bytes.any():
            parts["each host", "state"] = price.each_host_state_bytes
            parts["each host", table.dtype] = price.each_host_bytes
        if price.host_bytes.any():
            widths = _host_widths(own_strategies)
            for width in np.unique(widths[widths > 0]).tolist():
                parts[HOST, table.dtype, width] = np.where((widths == width)[:, None], price.host_bytes, 0.0)
        arrays = [index.setdefault(name, len(index)) for name in parts]
        found.append(TableBytes(np.array(arrays), np.stack([part.T for part in parts.values()])))
    limits = [devices.memory_limit_bytes, *([devices.host_limit_bytes] if devices.host_limit_bytes else [])]
    return DeviceArrays(
        memory=np.array([int(name[0] == HOST) for name in index]),
        limit_bytes=np.array([min(limit) for limit in limits], float),
        num_devices=devices.num_devices,
        tables=tuple(found),
    )


def _host_widths(strategies: TableStrategies) -> np.ndarray:
    """Returns how wide the rows on hosts are in each strategy, 0 where there are none."""
    return np.concatenate(
        [
            np.full(len(kind.groups), max((p.columns for p in kind.pieces if p.memory == HOST), default=0))
            for kind in strategies.kinds
        ]
    )
