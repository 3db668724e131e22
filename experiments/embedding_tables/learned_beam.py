"""NeuroShard's beam search with a learned cost, as its authors run it: networks say where a part adds least."""

from collections.abc import Sequence

import numpy as np

from diffshard.tables.learned_cost import LearnedTableCost
from experiments.embedding_tables.baselines import Part, Placed, Prices
from search_spaces.embedding_tables.base import EmbeddingTable, Piece, TableDevices
from search_spaces.embedding_tables.prices import piece_features


class LearnedPlaced(Placed):
    """Parts on devices, whose seconds are those of the learned cost."""

    def __init__(self, prices: "LearnedPrices"):
        super().__init__(prices.devices)
        self._prices = prices
        self._sums = np.zeros((2, prices.devices.num_devices, prices.width))
        self._columns, self._ids = np.zeros((2, prices.devices.num_devices))

    def put(self, part: Part, device: int) -> None:
        """Puts a part on a device."""
        super().put(part, device)
        self._sums[:, device] += self._prices.embeddings[part.table, part.columns]
        self._columns[device] += part.columns
        self._ids[device] += np.ceil(self._prices.tables[part.table].pooling_factor)
        networks = self._prices.cost.lookups, self._prices.cost.updates
        own_s = [float(n.seconds(sums)) for n, sums in zip(networks, self._sums[:, device], strict=True)]
        self.forward_s[device], self.rest_s[device] = own_s

    @property
    def step_s(self) -> float:
        """The seconds of a step, with its exchanges."""
        exchanged_s = self._prices.cost.exchanged_s(self._columns, self._ids, self._prices.devices.batch_size)
        return super().step_s + float(sum(exchanged_s))


class LearnedPrices(Prices):
    """The costs of parts by networks."""

    def __init__(self, tables: Sequence[EmbeddingTable], devices: TableDevices, cost: LearnedTableCost):
        super().__init__(tables, devices)
        self.cost, self.width = cost, len(cost.lookups.biases[2]) + 1
        self.embeddings: dict[tuple[int, int], np.ndarray] = {}

    def part(self, index: int, columns: int) -> Part:
        """Returns some columns of a table."""
        table, networks = self.tables[index], (self.cost.lookups, self.cost.updates)
        piece = Piece(index, 0, 0, table.rows, 0, columns)
        features = piece_features(table, piece, self.devices.batch_size, self.devices.num_devices)
        embedded = np.stack([network.embeddings(features) for network in networks])
        self.embeddings[index, columns] = embedded
        alone_s = [float(n.seconds(own)) for n, own in zip(networks, embedded, strict=True)]
        return super().part(index, columns)._replace(forward_s=alone_s[0], rest_s=alone_s[1])

    def placed(self) -> LearnedPlaced:
        """Returns devices without parts."""
        return LearnedPlaced(self)
