"""Anneals placements whose cost is learned: loads are what networks make of sums over a device's pieces.

Chains are drawn as in `chains.py`. A table that moves changes the sums of a few devices, and only the last layers of
the networks are evaluated again. While chains cool, an exchange is priced in proportion to the columns and ids of each
device; the placements that they pass are compared by the exact price.

Letters for sizes: C chains, T tables, S_t strategies of table t, D devices, E numbers of an embedding.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from cost.pooled_networks import HEAD
from diffshard.base import Progress
from diffshard.solving.csr import numpy_generator
from diffshard.solving.solve import random_key
from diffshard.tables.bound import strategy_arrays
from diffshard.tables.chains import SCHEDULE, Chains, Closest, Schedule, scaled
from diffshard.tables.learned_cost import LearnedTableCost, device_sums, piece_added_s
from search_spaces.embedding_tables.base import EVERY_DEVICE
from search_spaces.embedding_tables.prices import piece_features
from search_spaces.embedding_tables.space import EmbeddingTableSpace

_MOST_NUMBERS = 1 << 19
"""Numbers of embeddings of one step in all chains, which take about 5 ms; of more there are fewer chains."""


class LearnedStrategies(NamedTuple):
    """The costs that the strategies of one table add.

    Attributes:
      embeddings: of lookups and updates, `[2, D, S_t, E]`.
      added_s: seconds of forward lookups and of the rest beside the networks', `[2, D, S_t]`.
      sizes: columns that devices send, and ids that they get, `[2, D, S_t]`.
    """

    embeddings: np.ndarray
    added_s: np.ndarray
    sizes: np.ndarray


def anneal(
    space: EmbeddingTableSpace, cost: LearnedTableCost, rng: np.random.Generator, schedule: Schedule = SCHEDULE
) -> Iterator[tuple[np.ndarray, float]]:
    """Cools chains once; yields better and better placements that fit the memory, with their seconds."""
    chains = LearnedChains(space, cost, schedule, rng)
    num_sweeps = max(schedule.least_sweeps, -(-schedule.least_draws // len(space.tables)))
    for choice, scaled_step_s in chains.cooled(num_sweeps, Closest()):
        if choice is not None:
            yield choice, scaled_step_s * chains.scale_s


class LearnedChains(Chains):
    """Chains that know the sums of embeddings of each device, `[2, D, C, E]`, and its sizes, `[2, D, C]`."""

    def __init__(
        self, space: EmbeddingTableSpace, cost: LearnedTableCost, schedule: Schedule, rng: np.random.Generator
    ):
        self._cost, self._batch_size = cost, space.devices.batch_size
        self._networks = cost.lookups, cost.updates
        self._learned = [_strategies(space, cost, index) for index in range(len(space.tables))]
        self.scale_s = 1.0
        alone_s = [self._computed(own.embeddings) + own.added_s for own in self._learned]
        self._least_work_s = [float(own.sum((0, 1)).min()) for own in alone_s]
        num_devices = space.devices.num_devices
        self.scale_s = max(sum(self._least_work_s) / num_devices, np.finfo(float).tiny)
        self._slopes = self._exchange_slopes(num_devices)
        arrays = strategy_arrays(space)
        tables = []
        for by_bytes, own, seconds in zip(scaled(arrays, self.scale_s), self._learned, alone_s, strict=True):
            loads = own.added_s / self.scale_s
            loads[1] += np.tensordot(self._slopes, own.sizes, 1)
            tables.append(by_bytes._replace(loads=loads, alone=seconds.max(1).sum(0) / self.scale_s))
        most = int(arrays.sizes.max()) * self._learned[0].embeddings.shape[-1]
        num_chains = min(max(_MOST_NUMBERS // (2 * num_devices * most), schedule.least_chains), schedule.most_chains)
        self._sums = np.zeros((2, num_devices, num_chains, self._learned[0].embeddings.shape[-1]))
        self._sizes = np.zeros((2, num_devices, num_chains))
        super().__init__(tables, space.arrays, num_chains, schedule, rng)

    def steps(self) -> np.ndarray:
        """Returns the scaled seconds of a step of each chain by the exact price, `[C]`; inf where one does not fit."""
        loads = self._loads + self._computed(self._sums)
        loads[1] -= np.tensordot(self._slopes, self._sizes, 1)
        exchanged_s = self._cost.exchanged_s(self._sizes[0].T, self._sizes[1].T, self._batch_size)
        steps = loads.max(1).sum(0) + sum(exchanged_s) / self.scale_s
        return np.where(self._excess() > 0, np.inf, steps)

    def _copy(self, better: np.ndarray, worse: np.ndarray) -> None:
        super()._copy(better, worse)
        self._sums[:, :, worse], self._sizes[:, :, worse] = self._sums[:, :, better], self._sizes[:, :, better]

    def _least_work(self, t: int) -> float:
        return self._least_work_s[t]

    def _loads_with(self, t: int) -> np.ndarray:
        sums = self._sums[:, :, :, None] + self._learned[t].embeddings[:, :, None]
        return super()._loads_with(t) + self._computed(sums)

    def _add(self, t: int, sign: int) -> None:
        super()._add(t, sign)
        chosen = self._choice[:, t]
        self._sums += sign * self._learned[t].embeddings[:, :, chosen]
        self._sizes += sign * self._learned[t].sizes[:, :, chosen]

    def _computed(self, sums: np.ndarray) -> np.ndarray:
        """Returns scaled seconds of lookups and updates, `[2, ...]`, from sums of embeddings `[2, ..., E]`."""
        seconds = [network.seconds(own) for network, own in zip(self._networks, sums, strict=True)]
        return np.stack(seconds) / self.scale_s

    def _exchange_slopes(self, num_devices: int) -> np.ndarray:
        """Returns scaled seconds of both exchanges for a column and for an id of each device, `[2]`."""
        sizes = np.mean([own.sizes.sum(1).min(1) for own in self._learned], axis=0) * len(self._learned)
        even = np.tile(np.maximum(sizes, 1)[:, None] / num_devices, (1, num_devices))
        slopes = []
        for kind in range(2):
            more = even.copy()
            more[kind] *= 1.1
            more_s, even_s = (sum(self._cost.exchanged_s(c, i, self._batch_size)) for c, i in (more, even))
            slopes.append(max(more_s - even_s, 0.0) / (0.1 * even[kind, 0]) / self.scale_s)
        return np.array(slopes)


def _strategies(space: EmbeddingTableSpace, cost: LearnedTableCost, index: int) -> LearnedStrategies:
    """Lays out what the strategies of a table add; those of a kind differ only in the devices."""
    table, devices, strategies = space.tables[index], space.devices, space.strategies[index]
    num_devices = devices.num_devices
    pieces = [piece for kind in strategies.kinds for piece in kind.pieces]
    features = [piece_features(table, piece, devices.batch_size, num_devices) for piece in pieces]
    embedded = iter(np.stack([network.embeddings(features) for network in (cost.lookups, cost.updates)], axis=1))
    embeddings = np.zeros((2, num_devices, len(strategies), HEAD + 1))
    added_s, sizes = (np.zeros((2, num_devices, len(strategies))) for _ in range(2))
    first = 0
    for kind in strategies.kinds:
        at = np.arange(first, first + len(kind.groups))
        for piece in kind.pieces:
            everywhere = piece.device == EVERY_DEVICE
            on = np.arange(num_devices)[:, None] if everywhere else kind.groups[:, piece.device]
            embeddings[:, on, at] += next(embedded)[:, None, None] if everywhere else next(embedded)[:, None]
            added = piece_added_s(table, piece, devices)[:, piece.device]  # of any device, as they are alike
            added_s[:, on, at] += added[:, None, None] if everywhere else added[:, None]
        for place, own in enumerate(device_sums(space.tables, kind.pieces, kind.groups.shape[1]).T):
            sizes[:, kind.groups[:, place], at] += own[:, None]
        first += len(kind.groups)
    return LearnedStrategies(embeddings, added_s, sizes)


def solve(
    space: EmbeddingTableSpace,
    cost: LearnedTableCost,
    *,
    time_limit_s: float | None,
    key: jax.Array | int | None,
    progress: Progress | None = None,
) -> np.ndarray | None:
    """Returns the best strategies that are found, `[T]`; None where no placement was found that fits.

    Args:
      space: of tables on devices that are alike.
      time_limit_s: seconds after which no new cooling begins; None cools once.
      key: a JAX random key or a seed; None is seed 0.
      progress: called at each improvement, with a bound of 0.
    """
    start_s, rng = time.perf_counter(), numpy_generator(random_key(key))
    choice, best_s = None, np.inf
    while choice is None or time_limit_s is not None:
        for found, step_s in anneal(space, cost, rng):
            if step_s < best_s:
                choice, best_s = found, step_s
                if progress is not None:
                    progress(time.perf_counter() - start_s, best_s, 0.0)
        if time_limit_s is None or time.perf_counter() - start_s >= time_limit_s:
            break
    return choice
