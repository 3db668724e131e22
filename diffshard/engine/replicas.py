"""Metropolis walks of many replicas at once: one node of each changes its strategy at a time, priced exactly."""

import numpy as np

from diffshard.engine.flat import Flat, ragged

_NORM = 8
_PENALTY = 0.1  # of the whole cost for each limit's worth of memory in excess at one time
_DENSE = 1 << 24  # numbers in the table of what every strategy uses at every time


class Replicas:
    """R choices that walk side by side.

    Attributes:
      choice: `[R, V]`.
      cost: `[R]` node, edge and load cost.
      excess: `[R]` memory above the limit, summed over times and devices, in units of the limit.
      best: the feasible choice of least cost seen, None before there is one.
      best_cost: its cost, inf before there is one.
    """

    def __init__(self, flat: Flat, rng: np.random.Generator, choice: np.ndarray):
        self.flat, self._rng, self.choice = flat, rng, choice.copy()
        count = len(choice)
        chosen = flat.start[:-1] + choice
        forward = flat.source < flat.target
        source, target = flat.source[forward], flat.target[forward]
        at = flat.matrix[forward] + choice[:, source] * flat.sizes[target] + choice[:, target]
        self.load = flat.load[chosen].sum(axis=1)
        self.cost = flat.cost[chosen].sum(axis=1) + flat.entries[at].sum(axis=1) + self.load.max(axis=1, initial=0.0)
        self._movable = np.flatnonzero(flat.sizes > 1)
        self._limit = np.broadcast_to(flat.limit, flat.base.shape)
        self._use = _dense_use(flat) if flat.base.size * int(flat.start[-1]) <= _DENSE else None
        self._used = np.empty((count, *flat.base.shape))
        for r in range(count):
            self._used[r] = self._profile(chosen[r], np.ones(len(flat.sizes))) + flat.base
        self.excess = self._over(self._used).sum(axis=(1, 2))
        self.best, self.best_cost = None, np.inf
        self._keep(np.ones(count, bool))

    def step(self, temperature: np.ndarray | float) -> None:
        """One Metropolis step of every replica, `[R]` or common temperature in units of cost."""
        if not len(self._movable):
            return
        flat, rng, rows = self.flat, self._rng, np.arange(len(self.choice))
        v = rng.choice(self._movable, len(rows))
        old = self.choice[rows, v]
        new = (old + 1 + rng.integers(flat.sizes[v] - 1)) % flat.sizes[v]
        change = flat.cost[flat.start[v] + new] - flat.cost[flat.start[v] + old] + self._edges(v, old, new)
        load = self.load + flat.load[flat.start[v] + new] - flat.load[flat.start[v] + old]
        felt = change + _smooth_max(load) - _smooth_max(self.load)
        change += load.max(axis=1, initial=0.0) - self.load.max(axis=1, initial=0.0)
        used, excess = self._memory(v, old, new)
        penalty = _PENALTY * np.abs(self.cost) * (excess - self.excess)
        accept = felt + penalty <= np.asarray(temperature) * rng.exponential(size=len(rows))
        self.choice[rows[accept], v[accept]] = new[accept]
        self.cost = np.where(accept, self.cost + change, self.cost)
        self.load[accept] = load[accept]
        if used is not None:
            self._used[accept], self.excess = used[accept], np.where(accept, excess, self.excess)
        self._keep(accept)

    def _edges(self, v: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        flat = self.flat
        degree = flat.first[v + 1] - flat.first[v]
        edge = ragged(flat.first[v], degree)
        replica = np.repeat(np.arange(len(v)), degree)
        target = flat.target[edge]
        column = flat.matrix[edge] + self.choice[replica, target]
        width = flat.sizes[target]
        difference = flat.entries[column + new[replica] * width] - flat.entries[column + old[replica] * width]
        return np.bincount(replica, difference, len(v))

    def _memory(self, v: np.ndarray, old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        flat = self.flat
        if not flat.base.size:
            return None, self.excess
        if self._use is not None:
            used = self._used + self._use[flat.start[v] + new] - self._use[flat.start[v] + old]
            return used, self._over(used).sum(axis=(1, 2))
        used = self._used.copy()
        for r in range(len(v)):
            pair = flat.start[v[r]] + np.array([new[r], old[r]])
            used[r] += self._profile(pair, np.array([1.0, -1.0]))
        return used, self._over(used).sum(axis=(1, 2))

    def _profile(self, rows: np.ndarray, sign: np.ndarray) -> np.ndarray:
        """`[T, D]` what strategies add to the memory in use."""
        flat = self.flat
        times, devices = flat.base.shape
        change = np.zeros((times + 1, devices))
        if times:
            taken = flat.usage[rows]
            amount = np.repeat(sign, np.diff(taken.indptr)) * taken.data
            usage, device = np.divmod(taken.indices, devices)
            np.add.at(change, (flat.interval[usage, 0], device), amount)
            np.subtract.at(change, (flat.interval[usage, 1], device), amount)
        return np.cumsum(change, axis=0)[:-1]

    def _over(self, used: np.ndarray) -> np.ndarray:
        unit = np.where(np.isfinite(self._limit) & (self._limit > 0), self._limit, 1.0)
        return np.maximum(used - self._limit, 0.0) / unit

    def _keep(self, changed: np.ndarray) -> None:
        cost = np.where(changed & (self.excess <= 0), self.cost, np.inf)
        least = int(cost.argmin())
        if cost[least] < self.best_cost:
            self.best, self.best_cost = self.choice[least].copy(), float(cost[least])


def _dense_use(flat: Flat) -> np.ndarray:
    """`[N, T, D]` what every strategy adds to the memory in use."""
    times, devices = flat.base.shape
    change = np.zeros((int(flat.start[-1]), times + 1, devices))
    rows = np.repeat(np.arange(len(change)), np.diff(flat.usage.indptr))
    usage, device = np.divmod(flat.usage.indices, devices)
    np.add.at(change, (rows, flat.interval[usage, 0], device), flat.usage.data)
    np.subtract.at(change, (rows, flat.interval[usage, 1], device), flat.usage.data)
    return np.cumsum(change, axis=1)[:, :-1]


def _smooth_max(load: np.ndarray) -> np.ndarray:
    """`[R]` a norm near the maximum: what the walk feels, or all plans with one busiest device would feel the same."""
    most = load.max(axis=1, initial=0.0)
    unit = np.where(most > 0, most, 1.0)
    return most * ((load / unit[:, None]) ** _NORM).sum(axis=1) ** (1 / _NORM)
