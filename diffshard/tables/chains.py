"""Chains of the default search: placements side by side, in which one table after the other draws its strategy.

Letters for sizes: C chains, T tables, S_t strategies of table t, D devices, A arrays of a device, O those of one table,
M memories of a device.

A strategy of a table changes few devices, and many strategies add the same seconds and bytes to the same device. So a
table has few *additions*, some tens or hundreds for all its strategies. What each addition does to the norm of the
loads is computed once for each placement, and a sparse matrix sums over the additions of each strategy.

Letters for sizes: C placements, S strategies of one table, D devices, O arrays of a device in which the table may have
rows, A additions of one table.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from diffshard.tables.bound import StrategyArrays
from search_spaces.embedding_tables.device_arrays import DeviceArrays

_LEAST_NOISE, _NOISE_PER_DRAW = 1 << 15, 4
"""Gumbel noise is drawn once, and each draw takes a part of it that begins anywhere: at least so many numbers, and so
many times those of the largest draw. New noise for each draw took a third of the time and found nothing better."""


@dataclass(frozen=True)
class Schedule:
    """How chains cool; all numbers were chosen by hand on generated tasks.

    Attributes:
      least_sweeps: times that each table is drawn, unless there are too many strategies.
      least_draws: of strategies of tables, so that few tables have more sweeps.
      most_chains: at most so many chains.
      least_chains: at least so many chains.
      sweep_energies: of strategies in all chains, for one sweep; of more strategies there are fewer chains.
      most_energies: for all sweeps; of more there are fewer sweeps, though not fewer than `fewest_sweeps`. They take
        about a tenth of a second.
      fewest_sweeps: at least so many sweeps.
      temperatures: the first and the last one, as shares of a step's mean seconds for one table.
      hottest: the first temperature of the hottest chain, the same way. Where memory is scarce, tables that fill half a
        device change their places at high temperatures only.
      squarings: the first and the last norm: the 2^n-norm takes n squarings.
      replace_every: sweeps after which the worse chains are replaced.
      replace_after: share of the sweeps after which that begins.
      memory_prices: the first and the last one of one device's whole memory too much, in steps' seconds.
      alone_limits: of the first and the last chain: a strategy may alone take so many times the bound. A placement near
        the bound has none that takes more, but one that takes much more is hard to leave for a large table.
    """

    least_sweeps: int = 30
    least_draws: int = 1000
    most_chains: int = 96
    least_chains: int = 8
    sweep_energies: int = 1 << 16
    most_energies: int = 3_000_000
    fewest_sweeps: int = 20
    temperatures: tuple[float, float] = (0.6, 6e-3)
    hottest: float = 4.0
    squarings: tuple[int, int] = (1, 4)
    replace_every: int = 3
    replace_after: float = 0.2
    memory_prices: tuple[float, float] = (0.3, 100.0)
    alone_limits: tuple[float, float] = (1.02, 2.0)

    def chains_of(self, num_strategies: int) -> int:
        """Returns the number of chains for tables with so many strategies together."""
        return min(max(self.sweep_energies // num_strategies, self.least_chains), self.most_chains)

    def sweeps_of(self, num_tables: int, num_strategies: int) -> int:
        """Returns the number of sweeps for so many tables with so many strategies together."""
        wanted = max(self.least_sweeps, -(-self.least_draws // num_tables))
        most = self.most_energies // (num_strategies * self.chains_of(num_strategies))
        return max(min(wanted, most), min(self.fewest_sweeps, wanted))


SCHEDULE = Schedule()


class Scaled(NamedTuple):
    """The costs that the strategies of one table add, relative to a step's seconds.

    Attributes:
      loads: of forward lookups and of the rest, `[2, D, S_t]`.
      alone: a step with this strategy only, `[S_t]`.
    """

    loads: np.ndarray
    alone: np.ndarray


def scaled(arrays: StrategyArrays, scale_s: float) -> list[Scaled]:
    """Returns the loads of each table's strategies, where a load of 1 is `scale_s` seconds."""
    loads = np.stack([arrays.forward_s, arrays.rest_s]) / scale_s
    alone = loads.max(1).sum(0)
    return [
        Scaled(np.ascontiguousarray(loads[:, :, first:end]), alone[first:end])
        for first, end in zip(arrays.start, arrays.start + arrays.sizes, strict=True)
    ]


@dataclass
class Closest:
    """The placement that exceeds the memory least, mutable; there is none once one fits.

    Attributes:
      choice: strategies, `[T]`.
      excess: relative to a memory's size.
    """

    choice: np.ndarray | None = None
    excess: float = math.inf


class Chains:
    """The chains: strategies `[C, T]`, loads `[2, D, C]` and bytes that devices need in their arrays, `[A, D, C]`."""

    def __init__(
        self,
        tables: list[Scaled],
        device_arrays: DeviceArrays,
        num_chains: int,
        schedule: Schedule,
        rng: np.random.Generator,
    ):
        self._tables, self._schedule, self._rng = tables, schedule, rng
        self._device_arrays, self._limit = device_arrays, device_arrays.limit_bytes[:, None]
        hot, cold = schedule.temperatures
        spread = rng.permutation(np.geomspace(hot, max(hot, schedule.hottest), num_chains))
        self._memory_price = schedule.memory_prices[0]
        self._hot, self._cold = spread[:, None] / len(tables), cold / len(tables)
        self._choice = np.zeros((num_chains, len(tables)), np.int64)
        self._loads = np.zeros((*tables[0].loads.shape[:2], num_chains))
        self._needed = np.zeros((len(device_arrays.memory), device_arrays.num_devices, num_chains))
        self._may_not_fit = bool((device_arrays.most() > device_arrays.limit_bytes).any())
        self._room = [self._limit - device_arrays.padded_most(table)[:, None] for table in device_arrays.tables]
        limits = np.geomspace(*schedule.alone_limits, num_chains)[:, None]
        self._forbidden = [
            np.where(table.alone > np.maximum(limits, table.alone.min()), np.inf, 0.0)
            if (table.alone > schedule.alone_limits[0]).any()
            else None
            for table in tables
        ]
        most = num_chains * max(len(table.alone) for table in tables)
        noise = -np.log(rng.standard_exponential(max(_NOISE_PER_DRAW * most, _LEAST_NOISE)))
        self._noise = noise.astype(np.float32)
        # The costliest tables are placed first, as others can level what they leave.
        for t in sorted(range(len(tables)), key=lambda t: -self._least_work(t)):
            self._draw(t, self._hot, schedule.squarings[0] + 1)

    def cooled(self, num_sweeps: int, closest: Closest) -> Iterator[tuple[np.ndarray | None, float]]:
        """Cools all chains once; yields after each sweep what is better than all before, or None and inf.

        Args:
          num_sweeps: draws of each table.
          closest: becomes the placement that exceeds the memory least in a sweep in which none fits.

        Yields:
          Strategies `[T]`, and the scaled seconds of a step.
        """
        schedule, best = self._schedule, math.inf
        for sweep in range(num_sweeps):
            self._sweep(sweep / num_sweeps, (sweep + 1) / num_sweeps)
            steps = self.steps()
            first = int(steps.argmin())
            if math.isinf(steps[first]):
                excess = self._excess()
                if excess.min() < closest.excess:
                    closest.choice, closest.excess = self._choice[excess.argmin()].copy(), float(excess.min())
            if sweep >= schedule.replace_after * num_sweeps and sweep % schedule.replace_every == 1:
                self._replace_worse_half(steps)
            if steps[first] < best:
                best = float(steps[first])
                yield self._choice[first].copy(), best
            else:
                yield None, math.inf

    def _sweep(self, begin: float, end: float) -> None:
        """Draws each table's strategy once, in a new order, from one moment of the cooling to another."""
        (first, last), (low, high) = self._schedule.squarings, self._schedule.memory_prices
        moments = np.linspace(begin, end, len(self._tables), endpoint=False)
        for t, moment in zip(self._rng.permutation(len(self._tables)), moments, strict=True):
            self._add(int(t), -1)
            self._memory_price = low * (high / low) ** moment
            temperature = self._hot * (self._cold / self._hot) ** moment
            self._draw(int(t), temperature, first + round((last - first) * moment))

    def steps(self) -> np.ndarray:
        """Returns the scaled seconds of a step of each chain, `[C]`; inf where a memory is exceeded."""
        return np.where(self._excess() > 0, np.inf, self._loads.max(1).sum(0))

    def _excess(self) -> np.ndarray:
        """Returns by how much the arrays of each chain exceed a memory, relative to its size, `[C]`; 0 if they fit."""
        if not self._may_not_fit:
            return np.zeros(len(self._choice))
        return np.maximum(self._device_arrays.padded(self._needed) / self._limit - 1, 0).max(0)

    def _replace_worse_half(self, steps: np.ndarray) -> None:
        """Makes the worse half of the chains copies of the better half."""
        order, half = np.lexsort((steps, self._excess())), len(steps) // 2
        self._copy(order[:half], order[len(steps) - half :])

    def _copy(self, better: np.ndarray, worse: np.ndarray) -> None:
        """Makes some chains copies of others."""
        self._choice[worse] = self._choice[better]
        self._loads[:, :, worse] = self._loads[:, :, better]
        self._needed[:, :, worse] = self._needed[:, :, better]

    def _draw(self, t: int, temperature: np.ndarray, squarings: int) -> None:
        """Draws the strategy of a table that is on no device in all chains, by weights at temperatures `[C, 1]`."""
        energy = self._energy(t, squarings)
        forbidden = self._forbidden[t]
        if forbidden is not None:
            energy += forbidden
        # The least of energies less Gumbel noise is a draw by Boltzmann weights.
        first = int(self._rng.integers(len(self._noise) - energy.size))
        energy -= temperature.astype(np.float32) * self._noise[first : first + energy.size].reshape(energy.shape)
        self._choice[:, t] = energy.argmin(1)
        self._add(t, 1)

    def _energy(self, t: int, squarings: int) -> np.ndarray:
        """Returns the norms of the loads and the price of memory with each strategy of a table, `[C, S_t]`."""
        power = self._loads_with(t)
        for _ in range(squarings):
            np.multiply(power, power, out=power)
        norm = power.sum(1)
        for _ in range(squarings):
            np.sqrt(norm, out=norm)
        energy = norm[0] + norm[1]
        at, added = self._device_arrays.tables[t]
        self._price_memory(energy, t, lambda near: (self._needed[at][:, :, near, None] + added[:, :, None]).max(1))
        return energy

    def _price_memory(self, energy: np.ndarray, t: int, longest_with: Callable[[np.ndarray], np.ndarray]) -> None:
        """Adds the price of memory with each strategy of a table, which is on no device, to energies `[C, S_t]`.

        Args:
          longest_with: returns the bytes of the table's arrays with each strategy, `[O, C, S_t]`, in some chains.
        """
        if not self._may_not_fit:
            return
        at, memory = self._device_arrays.tables[t].arrays, self._device_arrays.memory
        padded = self._device_arrays.padded(self._needed)
        near = np.flatnonzero((padded > self._room[t]).any(0))
        if not near.size:
            return
        with_table = longest_with(near)
        with_table -= self._needed[at].max(1)[:, near, None]
        for m, limit in enumerate(self._limit):
            over = (with_table[memory[at] == m].sum(0) + padded[m, near, None]) / limit - 1
            energy[near] += self._memory_price * np.maximum(over, 0, out=over)

    def _least_work(self, t: int) -> float:
        """Returns the sum of all loads of a table with the strategy that needs the least."""
        return float(self._tables[t].loads.sum((0, 1)).min())

    def _loads_with(self, t: int) -> np.ndarray:
        """Returns the loads of all chains with each strategy of a table that is on no device, `[2, D, C, S_t]`."""
        return self._loads[:, :, :, None] + self._tables[t].loads[:, :, None, :]

    def _add(self, t: int, sign: int) -> None:
        """Adds what a table's strategies do to the devices, or takes it away."""
        chosen = self._choice[:, t]
        self._loads += sign * self._tables[t].loads[:, :, chosen]
        if self._may_not_fit:
            for at, num_bytes in zip(*self._device_arrays.tables[t], strict=True):
                self._needed[at] += sign * num_bytes[:, chosen]


class SummedChains(Chains):
    """Chains whose loads are sums over tables, so that a strategy's energy is the sum of what its pieces add."""

    def __init__(
        self,
        tables: list[Scaled],
        device_arrays: DeviceArrays,
        num_chains: int,
        schedule: Schedule,
        rng: np.random.Generator,
    ):
        self._additions = [
            additions_of(table.loads, own.num_bytes) for table, own in zip(tables, device_arrays.tables, strict=True)
        ]
        super().__init__(tables, device_arrays, num_chains, schedule, rng)

    def _energy(self, t: int, squarings: int) -> np.ndarray:
        additions, at = self._additions[t], self._device_arrays.tables[t].arrays
        norm = norms(additions, self._loads, squarings)
        energy = np.ascontiguousarray((norm[:, 0] + norm[:, 1]).T)

        def longest_with(near: np.ndarray) -> np.ndarray:
            return longest(additions, self._needed[at][:, :, near]).transpose(1, 2, 0)

        self._price_memory(energy, t, longest_with)
        return energy


class Additions(NamedTuple):
    """The costs that one table may add to one device.

    Attributes:
      device: of each addition, `[A]`.
      load: seconds of forward lookups and of the rest, `[A, 2, 1]`.
      needed: bytes in each array, `[A, O, 1]`.
      sums: 1 where a strategy has an addition, `[S, A]`.
    """

    device: np.ndarray
    load: np.ndarray
    needed: np.ndarray
    sums: csr_array


def additions_of(loads: np.ndarray, needed: np.ndarray) -> Additions:
    """Returns the different additions of a table's strategies.

    Args:
      loads: of forward lookups and of the rest, `[2, D, S]`.
      needed: bytes in each array, `[O, D, S]`.
    """
    amounts = np.concatenate([loads, needed])
    strategy, device = np.nonzero(amounts.any(0).T)
    first, index = _distinct(np.concatenate([device[None], amounts[:, device, strategy]]))
    start = np.searchsorted(strategy, np.arange(amounts.shape[2] + 1))
    return Additions(
        device=device[first],
        load=amounts[:2, device[first], strategy[first], None].swapaxes(0, 1),
        needed=amounts[2:, device[first], strategy[first], None].swapaxes(0, 1),
        sums=csr_array((np.ones(len(index)), index, start), shape=(amounts.shape[2], len(first))),
    )


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns one position of each different column, and the number of each column's among them."""
    first, index = np.zeros(1, np.int64), np.zeros(rows.shape[1], np.int64)
    for row in rows:
        _, number = np.unique(row, return_inverse=True)
        _, first, index = np.unique(index * len(row) + number, return_index=True, return_inverse=True)
    return first, index


def norms(table: Additions, loads: np.ndarray, squarings: int) -> np.ndarray:
    """Computes the 2^squarings-norms of both loads with each strategy of a table, `[S, 2, C]`.

    Args:
      loads: of forward lookups and of the rest, `[2, D, C]`.
      squarings: at least 1.
    """
    before = loads.swapaxes(0, 1).copy()
    after = before.take(table.device, 0)
    after += table.load
    for _ in range(squarings):
        np.multiply(before, before, out=before)
        np.multiply(after, after, out=after)
    # Large powers fit float64 only; their roots differ by more than float32's rounding where a draw notices it.
    norm = np.sqrt(_summed(table, before, after)).astype(np.float32)
    for _ in range(squarings - 1):
        np.sqrt(norm, out=norm)
    return norm


def longest(table: Additions, needed: np.ndarray) -> np.ndarray:
    """Computes the bytes of arrays as long as on the fullest device, with each strategy of a table, `[S, O, C]`.

    Args:
      needed: bytes that each device needs in each array without it, `[O, D, C]`.
    """
    after = needed.swapaxes(0, 1).take(table.device, 0)
    after += table.needed
    fullest = np.maximum.reduceat(after[table.sums.indices], table.sums.indptr[:-1], axis=0)
    return np.maximum(fullest, needed.max(1), out=fullest)


def _summed(table: Additions, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Sums over devices: each one without the table, `[D, .., C]`, or with an addition, `[A, .., C]`; `[S, .., C]`."""
    after -= before.take(table.device, 0)
    others = after.shape[1:]
    sums = (table.sums @ after.reshape(len(after), math.prod(others))).reshape(-1, *others)
    sums += before.sum(0)
    return sums
