"""The default search: chains that draw one strategy after the other, while temperature falls and norms sharpen.

Every chain is a placement. A step takes one table and prices all its strategies in all chains in a few array
operations, so that drawing among all of them, by their weights at the temperature, costs little more than trying one.
Loads are levelled by the norm of the devices' loads: at first it is smooth, so that a step also helps that changes no
largest load, and later nearly the largest load itself. Now and then the worse half of the chains is replaced by the
better one.

Letters for sizes: C chains, T tables, S_t strategies of table t, D devices, K memories.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from cost.base import Problem, num_strategies
from diffshard.base import OPTIMAL_GAP, Proposal
from diffshard.embedding_tables.additions import additions_of, excess, norms
from diffshard.embedding_tables.bound import lower_bound_s
from diffshard.embedding_tables.strategy_arrays import StrategyArrays, strategy_arrays
from diffshard.solving.flat import numpy_generator
from diffshard.solving.phases.balancing import Balancing
from diffshard.solving.phases.base import Clock
from diffshard.solving.solvers import exhaustive, gradient
from search_spaces.embedding_tables.space import EmbeddingTableSpace

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
    """What the strategies of one table add, relative to a step's seconds and to the memory.

    Attributes:
      loads: of forward lookups and of the rest, `[2, D, S_t]`.
      usage: of each memory, `[K, S_t]`; 0 where it has no limit.
      alone: a step with this strategy only, `[S_t]`.
    """

    loads: np.ndarray
    usage: np.ndarray
    alone: np.ndarray


def solve(
    space: EmbeddingTableSpace,
    problem: Problem,
    *,
    time_limit_s: float | None,
    key: jax.Array,
    schedule: Schedule = SCHEDULE,
) -> Iterator[Proposal]:
    """Yields the bound and better and better placements; with a time limit, of slower and slower cooling.

    Args:
      space: of the tables.
      problem: that of the space, not presolved.
      time_limit_s: see `diffshard.base.Solver`.
      key: the same.
      schedule: how chains cool.
    """
    if math.prod(num_strategies(problem).tolist()) <= gradient.MOST_ENUMERATED:
        yield from exhaustive.solve(problem)
        return
    clock, rng, arrays = Clock(time_limit_s), numpy_generator(key), strategy_arrays(space)
    limits = arrays.limit_bytes.reshape(-1, space.devices.num_devices)
    alike = len(set(space.devices.hardware)) == 1 and (limits == limits[:, :1]).all()
    bound_s = lower_bound_s(arrays, devices_are_alike=bool(alike))
    yield Proposal(lower_bound=bound_s)
    best_s = math.inf
    num_sweeps = schedule.sweeps_of(len(arrays.sizes), int(arrays.sizes.sum()))
    num_sweeps = num_sweeps if time_limit_s is None else max(num_sweeps // 4, 2)  # a first placement should come early
    while bound_s < best_s * (1 - OPTIMAL_GAP):
        for choice, step_s in _anneal(arrays, bound_s, num_sweeps, schedule, rng):
            best_s = min(best_s, step_s)
            yield Proposal(choice)
        if math.isinf(best_s):  # memory is so scarce that its prices have to be found
            yield from gradient.solve(problem, time_limit_s=time_limit_s, key=key, phases=lambda _: (Balancing(),))
            return
        if time_limit_s is None or clock.elapsed_share() >= 1:
            return
        num_sweeps *= 2


def _anneal(
    arrays: StrategyArrays, scale_s: float, num_sweeps: int, schedule: Schedule, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray | None, float]]:
    """Cools all chains once; yields after each sweep a placement that is the best one so far, or None and inf."""
    scale_s = scale_s or float(arrays.forward_s.sum(1).max()) or 1.0
    tables = scaled(arrays, scale_s)
    chains = SummedChains(tables, schedule.chains_of(int(arrays.sizes.sum())), schedule, rng)
    best = math.inf
    for sweep in range(num_sweeps):
        chains.sweep(sweep / num_sweeps, (sweep + 1) / num_sweeps)
        steps = chains.steps()
        if sweep >= schedule.replace_after * num_sweeps and sweep % schedule.replace_every == 1:
            chains.replace_worse_half(steps)
        first = int(steps.argmin())
        if steps[first] < best:
            best = float(steps[first])
            yield chains.choice_of(first), best * scale_s
        else:
            yield None, math.inf


def scaled(arrays: StrategyArrays, scale_s: float) -> list[Scaled]:
    """Returns what the strategies of each table add, where a load of 1 is `scale_s` seconds."""
    loads = np.stack([arrays.forward_s, arrays.rest_s]) / scale_s
    usage = np.where(np.isinf(arrays.limit_bytes)[:, None], 0.0, arrays.num_bytes / arrays.limit_bytes[:, None])
    alone = loads.max(1).sum(0)
    return [
        Scaled(
            np.ascontiguousarray(loads[:, :, first:end]), np.ascontiguousarray(usage[:, first:end]), alone[first:end]
        )
        for first, end in zip(arrays.start, arrays.start + arrays.sizes, strict=True)
    ]


class Chains:
    """The chains: strategies `[C, T]`, loads `[2, D, C]` and used memory `[K, C]`."""

    def __init__(self, tables: list[Scaled], num_chains: int, schedule: Schedule, rng: np.random.Generator):
        self._tables, self._schedule, self._rng = tables, schedule, rng
        hot, cold = schedule.temperatures
        spread = rng.permutation(np.geomspace(hot, max(hot, schedule.hottest), num_chains))
        self._memory_price = schedule.memory_prices[0]
        self._hot, self._cold = spread[:, None] / len(tables), cold / len(tables)
        self._choice = np.zeros((num_chains, len(tables)), np.int64)
        self._loads = np.zeros((*tables[0].loads.shape[:2], num_chains))
        self._usage = np.zeros((len(tables[0].usage), num_chains))
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

    def sweep(self, begin: float, end: float) -> None:
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
        fits = (self._usage <= 1 + 1e-12).all(0)
        return np.where(fits, self._loads.max(1).sum(0), np.inf)

    def choice_of(self, chain: int) -> np.ndarray:
        """Returns a copy of the strategies of one chain, `[T]`."""
        return self._choice[chain].copy()

    def replace_worse_half(self, steps: np.ndarray) -> None:
        """Makes the worse half of the chains copies of the better half."""
        order, half = steps.argsort(), len(steps) // 2
        worse, better = order[len(steps) - half :], order[:half]
        self._choice[worse] = self._choice[better]
        self._loads[:, :, worse], self._usage[:, worse] = self._loads[:, :, better], self._usage[:, better]

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
        table = self._tables[t]
        power = self._loads_with(t)
        for _ in range(squarings):
            np.multiply(power, power, out=power)
        norm = power.sum(1)
        for _ in range(squarings):
            np.sqrt(norm, out=norm)
        energy = norm[0] + norm[1]
        if table.usage.any():
            over = self._usage[:, :, None] + (table.usage[:, None, :] - 1)
            energy += self._memory_price * np.maximum(over, 0, out=over).sum(0)
        return energy

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
        self._usage += sign * self._tables[t].usage[:, chosen]


class SummedChains(Chains):
    """Chains whose loads are sums over tables, so that a strategy's energy is the sum of what its pieces add."""

    def __init__(self, tables: list[Scaled], num_chains: int, schedule: Schedule, rng: np.random.Generator):
        num_devices = tables[0].loads.shape[1]
        self._additions = [
            additions_of(table.loads, table.usage.reshape(-1, num_devices, table.usage.shape[1])) for table in tables
        ]
        super().__init__(tables, num_chains, schedule, rng)

    def _energy(self, t: int, squarings: int) -> np.ndarray:
        additions = self._additions[t]
        norm = norms(additions, self._loads, squarings)
        energy = norm[:, 0] + norm[:, 1]
        if self._usage.max() + additions.used.max(initial=0.0) > 1:
            usage = self._usage.reshape(-1, *self._loads.shape[1:])
            energy += self._memory_price * excess(additions, usage).sum(1)
        return np.ascontiguousarray(energy.T)
