"""Moves that level loads: one node or two at once, priced for all strategies side by side.

The largest load is what all nodes share, and a single change that lowers it is soon not left: what helps then is to
exchange two nodes' devices. A norm of the loads stands in for the largest one, because it also falls where one of two
equally busy devices is relieved.

Letters for sizes: V nodes, N strategies of all nodes one after the other, L loads, M numbers of memory (times by
devices).
"""

import numpy as np

from diffshard.solving.flat import Flat, chosen_memory, group_sizes, largest_loads, memory_of_strategies
from diffshard.solving.moves.polish import Field

_MOST_PAIR_NUMBERS = 1 << 15
"""Loads and memory of the pairs that are looked at together: a random part of all pairs, in about a millisecond. Ten
times as many close little more of the gap and take five times as long, on tasks of 30 to 50 embedding tables."""
_EXCESS_PENALTY = 1.0  # of the whole cost, for memory of a limit above the limit; as much as a step may gain in all
_LEAST_GAIN = 1e-9  # relative; less is rounding


class Balance:
    """A choice whose loads are levelled.

    Attributes:
      choice: `[V]`.
    """

    def __init__(self, flat: Flat, rng: np.random.Generator):
        self._flat, self._rng = flat, rng
        self._field = Field(flat)
        strategies = np.arange(int(flat.start[-1]))
        memory = memory_of_strategies(flat, strategies, np.ones(len(strategies)), strategies, len(strategies))
        limit = np.broadcast_to(flat.limit, flat.base.shape).ravel()
        self._is_limited = np.flatnonzero(np.isfinite(limit))
        self._limit = limit[self._is_limited]
        self._use = memory.reshape(len(strategies), -1)[:, self._is_limited]  # [N, M]
        self._node = np.repeat(np.arange(len(flat.sizes)), flat.sizes)
        self._squarings: int | None = None
        self.choice = np.zeros(len(flat.sizes), np.int64)

    def begin(self, choice: np.ndarray) -> None:
        """Goes on from a choice `[V]`."""
        flat = self._flat
        self.choice = choice.copy()
        self._load = flat.load[flat.start[:-1] + choice].sum(axis=0)
        self._memory = chosen_memory(flat, choice).ravel()[self._is_limited]
        self._costs = self._field(flat.cost, choice)

    def begin_greedily(self, squarings: int | None) -> None:
        """Begins at a choice made node by node, from those that cannot but load a device most to the others."""
        flat, num_nodes = self._flat, len(self._flat.sizes)
        least = np.minimum.reduceat(largest_loads(flat, flat.load), flat.start[:-1])
        self.begin(np.zeros(num_nodes, np.int64))
        self._squarings = squarings
        self._load, self._memory = np.zeros(flat.load.shape[1]), flat.base.ravel()[self._is_limited]
        for v in np.argsort(-least, kind="stable").tolist():
            rows = np.arange(int(flat.start[v]), int(flat.start[v + 1]))
            best = int(
                np.argmin(self._value(self._load + flat.load[rows], self._memory + self._use[rows], self._costs[rows]))
            )
            self.choice[v] = best
            self._load = self._load + flat.load[rows[best]]
            self._memory = self._memory + self._use[rows[best]]
            self._costs = self._field(flat.cost, self.choice)
        self.begin(self.choice)

    def descend(self, squarings: int | None, most_pairs: int) -> bool:
        """Makes the best single change, or else the best change of some pair; returns whether there was one.

        Args:
          squarings: the norm of the loads is the 2^squarings-norm; None takes the largest load itself.
          most_pairs: nodes, drawn at random, that are changed together with another one.
        """
        self._squarings = squarings
        nodes = self._rng.permutation(self._movable())[:most_pairs]
        return self._change_one() or any(self._change_two(v) for v in nodes)

    def kick(self, num_nodes: int) -> None:
        """Gives a few random nodes random strategies."""
        movable = self._movable()
        nodes = self._rng.choice(movable, size=min(num_nodes, len(movable)), replace=False)
        choice = self.choice.copy()
        choice[nodes] = self._rng.integers(self._flat.sizes[nodes])
        self.begin(choice)

    def _movable(self) -> np.ndarray:
        return np.flatnonzero(self._flat.sizes > 1)

    def _value(self, load: np.ndarray, memory: np.ndarray, cost: np.ndarray | float) -> np.ndarray:
        """Returns what choices are compared by `[...]`, from loads `[..., L]`, memory `[..., M]` and other costs."""
        value = _norm_of(self._flat, load, self._squarings) + cost
        if not len(self._limit):
            return value
        excess = np.maximum(memory - self._limit, 0.0) @ (1.0 / np.maximum(self._limit, 1e-300))
        return value + _EXCESS_PENALTY * excess * (np.abs(value) + 1e-300)

    def _now(self) -> float:
        return float(self._value(self._load, self._memory, 0.0))

    def _changes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what strategies `[n]` change of loads `[n, L]`, memory `[n, M]` and other costs `[n]`."""
        old = (self._flat.start[:-1] + self.choice)[self._node[rows]]
        load, use, cost = self._flat.load, self._use, self._costs
        return load[rows] - load[old], use[rows] - use[old], cost[rows] - cost[old]

    def _change_one(self) -> bool:
        rows = np.arange(int(self._flat.start[-1]))
        load, memory, cost = self._changes(rows)
        values = self._value(self._load + load, self._memory + memory, cost)
        best = int(values.argmin())
        return self._take([best], float(values[best]))

    def _change_two(self, v: int) -> bool:
        """Makes the best change of node v together with one other node that no edge joins to it."""
        flat = self._flat
        neighbours = flat.target[flat.first[v] : flat.first[v + 1]]
        own = np.arange(flat.start[v], flat.start[v + 1])
        others = np.flatnonzero(~np.isin(self._node, [v, *neighbours]) & (flat.sizes > 1)[self._node])
        width = flat.load.shape[1] + len(self._limit)
        most = max(_MOST_PAIR_NUMBERS // width, 1)
        if len(own) * len(others) > most:
            own = self._rng.choice(own, size=min(len(own), max(int(most**0.5) // 2, 1)), replace=False)
            others = self._rng.choice(others, size=min(len(others), max(most // len(own), 1)), replace=False)
        if not len(others):
            return False
        load, memory, cost = self._changes(own)
        other_load, other_memory, other_cost = self._changes(others)
        values = self._value(
            self._load + load[:, None] + other_load,
            self._memory + memory[:, None] + other_memory,
            cost[:, None] + other_cost,
        )
        a, b = np.unravel_index(values.argmin(), values.shape)
        return self._take([int(own[a]), int(others[b])], float(values[a, b]))

    def _take(self, rows: list[int], value: float) -> bool:
        """Makes a change if it lowers the value."""
        now = self._now()
        if not value < now - _LEAST_GAIN * abs(now):
            return False
        choice = self.choice.copy()
        for row in rows:
            choice[self._node[row]] = row - self._flat.start[self._node[row]]
        self.begin(choice)
        return True


def _norm_of(flat: Flat, load: np.ndarray, squarings: int | None) -> np.ndarray:
    """Sums the 2^squarings-norms of each group of loads `[..., L]`, or the largest ones for None."""
    if squarings is None:
        return largest_loads(flat, load)
    most = np.maximum.reduceat(load, flat.load_first, axis=-1)
    powers = np.maximum(load, 0.0) / np.repeat(np.maximum(most, 1e-300), group_sizes(flat), axis=-1)
    for _ in range(squarings):
        powers *= powers
    sums = np.add.reduceat(powers, flat.load_first, axis=-1)
    return np.where(most > 0, most * sums ** (0.5**squarings), most).sum(axis=-1)
