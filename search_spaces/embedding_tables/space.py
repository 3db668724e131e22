"""Which device holds which part of each embedding table.

Each table is a node; where its pieces are is a strategy. What a step takes is the largest sum of two devices' times,
J = max_d F_d + max_e R_e (see `cost/embedding_tables.py`). So the problem has two groups of loads, each with a load for
each device. Memory has a limit for each device.

Letters for sizes: T tables, S_t strategies of table t, D devices.
"""

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from cost.base import Hardware, Problem
from cost.embedding_tables import step_s
from cost.evaluation import checked_choice
from search_spaces.base import Part
from search_spaces.embedding_tables.base import DecodedTables, EmbeddingTable, TableDevices
from search_spaces.embedding_tables.device_arrays import DeviceArrays, device_arrays
from search_spaces.embedding_tables.prices import Price, decoded
from search_spaces.embedding_tables.strategies import (
    LEAST_HOST_SHARE,
    StrategyKind,
    TableStrategies,
    copied_on_each_host,
    strategies_of,
    strategy_prices,
    whole_on_host,
    with_copied_hot_rows,
    with_host_memory,
)

MOST_REPLICATED_BYTES = 64 * 2**20
"""Bytes of the largest table, or of hot rows, of which every device may hold a copy, and for each device of a host, of
which every host may: the gradient of a copy is dense, and all of it is reduced in every step."""


class EmbeddingTableSpace:
    """All placements of embedding tables on devices.

    Args:
      tables: T tables with different names.
      devices: D devices.

    Raises:
      ValueError: there are no tables, or two have the same name.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], devices: TableDevices):
        self.tables, self.devices = tuple(tables), devices
        self.node_names = tuple(table.name for table in self.tables)
        if not self.tables:
            raise ValueError("`tables` is empty; give at least one EmbeddingTable.")
        duplicates = sorted({name for name in self.node_names if self.node_names.count(name) > 1})
        if duplicates:
            raise ValueError(f"`tables` must have different names; {', '.join(map(repr, duplicates))} is there twice.")

    @cached_property
    def strategies(self) -> tuple[TableStrategies, ...]:
        """The strategies of each table, T sequences of S_t."""
        return tuple(TableStrategies(self._kinds_of(table, index)) for index, table in enumerate(self.tables))

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """The costs of the strategies of each table: T prices of arrays `[S_t, D]`."""
        return tuple(
            strategy_prices(table, strategies.kinds, self.devices)
            for table, strategies in zip(self.tables, self.strategies, strict=True)
        )

    @cached_property
    def arrays(self) -> DeviceArrays:
        """The bytes of strategies in the arrays of the devices, with which placements have to fit the memory."""
        return device_arrays(self.tables, self.strategies, self.prices, self.devices)

    @cached_property
    def problem(self) -> Problem:
        """A node for each table, two loads for each device, a usage `[S_t, D]` for the bytes of each table.

        With memory of the hosts the usages are `[S_t, 2 D]`: all devices, then their hosts. Arrays are as long on each
        device as on the fullest one, so that the smallest limit is that of all devices; `arrays` has the padding.
        """
        limits = np.repeat(self.arrays.limit_bytes, self.devices.num_devices)
        return Problem(
            node_cost=[np.zeros(len(strategies)) for strategies in self.strategies],
            edge_nodes=np.zeros((0, 2), np.int64),
            edge_cost=[],
            usage_node=np.arange(len(self.tables)),
            usage=[self._usage(price) for price in self.prices],
            usage_interval=np.tile([0, 1], (len(self.tables), 1)),
            memory_limit=limits,
            load=[np.concatenate([price.forward_s, price.rest_s], axis=1) for price in self.prices],
            load_group=np.repeat([0, 1], self.devices.num_devices),
        )

    def _kinds_of(self, table: EmbeddingTable, index: int) -> list[StrategyKind]:
        num_devices = self.devices.num_devices
        can_replicate = table.num_bytes <= MOST_REPLICATED_BYTES
        found = strategies_of(table, index, num_devices, can_replicate=can_replicate)
        found += with_copied_hot_rows(table, index, num_devices, MOST_REPLICATED_BYTES)
        if self.devices.host_limit_bytes:
            # What a table may do does not depend on limits, so that more memory takes no placement away.
            if table.num_bytes * num_devices < LEAST_HOST_SHARE * sum(other.num_bytes for other in self.tables):
                found.append(whole_on_host(table, index, num_devices))
            else:
                found += with_host_memory(table, index, num_devices, MOST_REPLICATED_BYTES)
        found = [kind._replace(groups=self._order[kind.groups]) for kind in found]
        num_hosts = self.devices.num_hosts
        if num_hosts > 1 and table.num_bytes <= MOST_REPLICATED_BYTES * self.devices.devices_per_host:
            found += copied_on_each_host(table, index, num_devices, num_hosts)
        return found

    @cached_property
    def _order(self) -> np.ndarray:
        """Devices from the slowest to the fastest, `[D]`.

        Strategies spread pieces over neighbours. In this order these are alike, and do not depend on how devices are
        numbered.
        """
        hardware = self.devices.hardware
        keys = [
            [one.reached_memory_bytes_per_s for one in hardware],
            [one.host_memory_bytes_per_s or 0.0 for one in hardware],
            self.devices.memory_limit_bytes,
            self.devices.host_limit_bytes or [0.0] * len(hardware),
        ]
        return np.lexsort(keys[::-1])

    def _usage(self, price: Price) -> np.ndarray:
        if not self.devices.host_limit_bytes:
            return price.num_bytes
        return np.concatenate([price.num_bytes, price.host_bytes], axis=1)

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns where each strategy of a table has its pieces, in words, `[S_t]`."""
        return tuple(strategy.name for strategy in self.strategies[node])

    def decode(self, choice: Sequence[int]) -> DecodedTables:
        """Returns which device holds what.

        Raises:
          ValueError: the choice has the wrong length or an index that its table does not have.
        """
        chosen = checked_choice(self.problem, choice)
        pieces = [p for s, table in zip(chosen, self.strategies, strict=True) for p in table[s].pieces]
        return decoded(self.tables, pieces, self.devices)

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Returns the loads of each table on the two devices that decide: that of the longest lookups and of the rest.

        Raises:
          ValueError: as `decode`.
        """
        chosen = checked_choice(self.problem, choice)
        whole = self.decode(choice)
        first, last = int(whole.forward_s.argmax()), int(whole.rest_s.argmax())
        parts = []
        for node, (name, s, price) in enumerate(zip(self.node_names, chosen, self.prices, strict=True)):
            parts += [
                Part(name, kind, node, float(seconds))
                for kind, seconds in (("forward", price.forward_s[s, first]), ("rest", price.rest_s[s, last]))
                if seconds
            ]
        return tuple(parts)

    def step_s(self, choice: Sequence[int]) -> float:
        """Returns the seconds of a step; raises as `decode`."""
        whole = self.decode(choice)
        return step_s(whole.forward_s, whole.rest_s)


def _example(num_devices: int) -> EmbeddingTableSpace:
    tables = [
        EmbeddingTable("users", 1000, 16, 2.0),
        EmbeddingTable("items", 4000, 8, 5.0, access=(8.0, 4.0, 2.0, 1.0)),
        EmbeddingTable("countries", 10, 32),
    ]
    hardware = Hardware("example", 1e12, 1e9, 1e6, {})
    return EmbeddingTableSpace(
        tables, TableDevices((hardware,) * num_devices, (1e5,) * num_devices, 1e-9, batch_size=64)
    )


EXAMPLE = partial(_example, 3)
