"""Metropolis chains: a random change of one node is taken if it is cheaper, or else with a probability that falls.

Many chains run at once, because NumPy takes about as long for one step of 32 as for one of a single chain. Changes
are priced exactly.

Source: Metropolis et al., "Equation of state calculations by fast computing machines" (1953).
"""

import numpy as np

from diffshard.solving.flat import (
    Flat,
    costs_of_choices,
    excess_in_limits,
    group_sizes,
    largest_loads,
    memory_of_strategies,
    ragged_positions,
)

_SMOOTH_MAX_NORM = 8  # of the loads, in the place of their maximum; chosen by hand on placements of layers
_EXCESS_PENALTY = 0.1  # of the whole cost, for a limit's worth of memory in excess at one time; chosen by hand
_MOST_TABLE_NUMBERS = 1 << 24  # 128 MiB in the table of what every strategy uses at every time; chosen by hand


class Chains:
    """R Markov chains of choices, side by side.

    Attributes:
      choice: `[R, V]`.
      cost: `[R]` node, edge and load cost.
      excess: `[R]` memory above the limit, summed over times and devices, in units of the limit.
      best: the feasible choice of least cost so far, None before there is one.
      best_cost: its cost, inf before there is one.
    """

    def __init__(self, flat: Flat, rng: np.random.Generator, choice: np.ndarray):
        self.flat, self._rng, self.choice = flat, rng, choice.copy()
        count = len(choice)
        position = flat.start[:-1] + choice
        self.load = flat.load[position].sum(axis=1)
        self.cost = costs_of_choices(flat, choice)
        self._odd = False
        self._movable = np.flatnonzero(flat.sizes > 1)
        self._use = _dense_use(flat) if flat.base.size * int(flat.start[-1]) <= _MOST_TABLE_NUMBERS else None
        chain = np.repeat(np.arange(count), len(flat.sizes))
        self._memory_in_use = (
            memory_of_strategies(flat, position.ravel(), np.ones(position.size), chain, count) + flat.base
        )
        self.excess = excess_in_limits(flat, self._memory_in_use).sum(axis=(1, 2))
        self.best, self.best_cost = None, np.inf
        self._keep(np.arange(count))

    def step(self, temperature: np.ndarray | float) -> None:
        """Makes one Metropolis step of every chain, at a common temperature or `[R]`, in units of cost."""
        if not len(self._movable):
            return
        flat, rng, rows = self.flat, self._rng, np.arange(len(self.choice))
        v = self._movable[rng.integers(len(self._movable), size=len(rows))]
        old = self.choice[rows, v]
        new = (old + 1 + rng.integers(flat.sizes[v] - 1)) % flat.sizes[v]
        change = flat.cost[flat.start[v] + new] - flat.cost[flat.start[v] + old] + self._edges(v, old, new)
        felt, load = change, self.load
        if load.shape[1]:
            load = load + flat.load[flat.start[v] + new] - flat.load[flat.start[v] + old]
            felt = change + _smooth_max(flat, load) - _smooth_max(flat, self.load)
            change = change + largest_loads(flat, load) - largest_loads(flat, self.load)
        threshold = np.asarray(temperature) * rng.exponential(size=len(rows))
        # A change that costs too much already is refused without a look at its memory, unless it might free some.
        maybe = np.flatnonzero((felt <= threshold) | (self.excess > 0))
        if not len(maybe):
            return
        memory, excess = self._memory(maybe, v[maybe], old[maybe], new[maybe])
        penalty = _EXCESS_PENALTY * np.abs(self.cost[maybe]) * (excess - self.excess[maybe])
        accept = felt[maybe] + penalty <= threshold[maybe]
        movers = maybe[accept]
        self.choice[movers, v[movers]] = new[movers]
        self.cost[movers] += change[movers]
        self.load[movers] = load[movers]
        if memory is not None:
            self._memory_in_use[movers], self.excess[movers] = memory[accept], excess[accept]
        self._keep(movers)

    def temper(self, temperatures: np.ndarray) -> None:
        """Lets neighbours in temperature `[R]` exchange places by chance: parallel tempering.

        Chains are kept in the order of their temperatures, which must not fall. Source: Syed et al., "Non-reversible
        parallel tempering" (2022).
        """
        energy = self.cost + _EXCESS_PENALTY * np.abs(self.cost) * self.excess
        inverse = 1 / temperatures
        self._odd = not self._odd  # in turn, not by chance: chains then travel instead of diffusing
        lower = np.arange(int(self._odd), len(energy) - 1, 2)
        gain = (energy[lower] - energy[lower + 1]) * (inverse[lower] - inverse[lower + 1])
        lower = lower[np.log(self._rng.random(len(lower))) < gain]
        order = np.arange(len(energy))
        order[lower], order[lower + 1] = lower + 1, lower
        self.choice, self.cost, self.load = self.choice[order], self.cost[order], self.load[order]
        self.excess, self._memory_in_use = self.excess[order], self._memory_in_use[order]

    def _edges(self, v: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        flat = self.flat
        degree = flat.first[v + 1] - flat.first[v]
        edge = ragged_positions(flat.first[v], degree)
        chain = np.repeat(np.arange(len(v)), degree)
        target = flat.target[edge]
        column = flat.matrix[edge] + self.choice[chain, target]
        width = flat.sizes[target]
        difference = flat.entries[column + new[chain] * width] - flat.entries[column + old[chain] * width]
        return np.bincount(chain, difference, len(v))

    def _memory(
        self, rows: np.ndarray, v: np.ndarray, old: np.ndarray, new: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns `[n, T, D]` and `[n]`: memory in use and excess of some chains after their change."""
        flat = self.flat
        if not flat.base.size:
            return None, self.excess[rows]
        if self._use is not None:
            memory = self._memory_in_use[rows] + self._use[flat.start[v] + new] - self._use[flat.start[v] + old]
            return memory, excess_in_limits(flat, memory).sum(axis=(1, 2))
        count = len(rows)
        strategies = np.concatenate([flat.start[v] + new, flat.start[v] + old])
        weight = np.repeat([1.0, -1.0], count)
        memory = self._memory_in_use[rows]
        memory += memory_of_strategies(flat, strategies, weight, np.tile(np.arange(count), 2), count)
        return memory, excess_in_limits(flat, memory).sum(axis=(1, 2))

    def _keep(self, chains: np.ndarray) -> None:
        fits = chains[self.excess[chains] <= 0]
        if len(fits):
            least = int(fits[self.cost[fits].argmin()])
            if self.cost[least] < self.best_cost:
                self.best, self.best_cost = self.choice[least].copy(), float(self.cost[least])


def _dense_use(flat: Flat) -> np.ndarray:
    """Returns `[N, T, D]` what every strategy adds to the memory in use."""
    strategies = np.arange(int(flat.start[-1]))
    return memory_of_strategies(flat, strategies, np.ones(len(strategies)), strategies, len(strategies))


def _smooth_max(flat: Flat, load: np.ndarray) -> np.ndarray:
    """Returns `[R]` norms of the loads, near their maxima but lower where fewer devices are busy."""
    most = np.maximum.reduceat(load, flat.load_first, axis=1)
    unit = np.where(most > 0, most, 1.0)
    shares = np.maximum(load / np.repeat(unit, group_sizes(flat), axis=1), 0.0)
    sums = np.add.reduceat(shares**_SMOOTH_MAX_NORM, flat.load_first, axis=1)
    return np.where(most > 0, most * sums ** (1 / _SMOOTH_MAX_NORM), most).sum(axis=1)
