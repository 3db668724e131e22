"""Climbing the dual: sweeps of messages, and prices on memory and on loads that follow the relaxed choice.

The relaxed choice is the softmax of the costs with all messages absorbed; its memory and loads are the gradient of the
smoothed dual with respect to their prices. Prices take multiplicative steps along it while the temperature falls.
"""

import math
from typing import NamedTuple

import numpy as np

from diffshard.solving.dual.dual import Sweep, lay_out, sweep
from diffshard.solving.flat import Flat, memory_price, memory_use

_GAIN = 3.0  # 10 is slow and 30 fails
_LEAST_RATE = 0.02
_TEMPERATURES = 0.3, 1e-3  # first and last, of the bound for each node
_PRICE_FLOOR = 1e-5  # of the bound for one whole limit
_FACTORS = 0.8, 1.1  # on all prices, when perturbed
_SPREAD = 0.1  # standard deviation of the logarithm of each node's own factor
_CEILING = 1e30  # of a priced cost, so that float32's sums stay finite
ROUNDING = 1e-12
"""Of the numbers summed: more than float64's sums can err."""


class Prices(NamedTuple):
    """Lagrange multipliers.

    Attributes:
      memory: `[T, D]` cost of each byte at each time.
      load: `[D']` on the simplex, the part of each device's time that counts; empty where there are no loads.
    """

    memory: np.ndarray
    load: np.ndarray


def no_prices(flat: Flat) -> Prices:
    """Memory is free, and every device's time counts alike."""
    devices = flat.load.shape[1]
    return Prices(np.zeros(flat.base.shape), np.full(devices, 1 / max(devices, 1)))


def is_coupled(flat: Flat) -> bool:
    """Whether there is anything that prices are for: memory that can bind, or loads."""
    return bool(flat.base.size or flat.load.shape[1])


def priced(flat: Flat, prices: Prices) -> np.ndarray:
    """`[N]` node costs with their memory and loads at these prices."""
    cost = flat.cost + flat.load @ prices.load
    return cost + memory_price(flat, prices.memory) if prices.memory.any() else cost


def credit(flat: Flat, prices: Prices) -> float:
    """What a bound with these prices gives back for the limits."""
    limited = np.isfinite(flat.limit)
    over = flat.base[:, limited] - flat.limit[limited]
    return float((prices.memory[:, limited] * over).sum()) if prices.memory.any() else 0.0


class Ascent:
    """The state of the climb. `step` is one iteration; `certified` turns the best of it into a valid bound.

    Attributes:
      flat: the problem.
      bound: the best so far, in float32 sums.
      best: the messages and prices that gave it.
      absorbed: `[N]` costs with all messages of the last sweep absorbed.
      weights: `[N]` the relaxed choice of the last step that had prices to move.
    """

    def __init__(self, flat: Flat, parent: "Ascent | None" = None, *, prices: bool = True):
        """From nothing, or from the best of a climb on the same graph with other node costs."""
        self.flat = flat
        self._reprices = parent._reprices if parent else prices and is_coupled(flat)
        self.layout: Sweep = parent.layout if parent else lay_out(flat)
        self.scale = parent.scale if parent else _scale(flat)
        self._most = self.scale * (len(flat.sizes) + len(flat.source)) + np.abs(flat.load).sum()  # any choice's cost
        messages, self.prices = parent.best if parent else (np.zeros(self.layout.num_messages + 1), no_prices(flat))
        self.messages = messages.astype(np.float32)
        self.bound, self._size = -math.inf, abs(parent.bound) if parent else 0.0
        self.best = (self.messages.copy(), self.prices)
        self.absorbed = self.weights = flat.cost

    def step(self, progress: float) -> float:
        """A sweep, then a step of the prices; returns the bound. `progress` goes from 0 to 1."""
        cost = np.minimum(priced(self.flat, self.prices), _CEILING).astype(np.float32)
        bound, self.absorbed = sweep(self.layout, cost, self.messages)
        bound += credit(self.flat, self.prices)
        if bound > self.bound:
            self.bound, self.best = bound, (self.messages.copy(), self.prices)
        if self._reprices and bound <= self._most:  # above, nothing fits: prices would rise for ever
            self._reprice(progress)
        return bound

    def perturbed(self, rng: np.random.Generator, sweeps: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
        """Costs with all messages absorbed `[N]`, and memory prices `[T, D]`, for a problem near this one.

        Other prices and noise on the costs bring the messages to another good choice: equal layers that all change at
        one price are told apart, and what the prices leave of the memory is used.

        Args:
          rng: consumed.
          sweeps: from the best messages.
          noise: temperature of the Gumbel noise on costs.
        """
        flat, (messages, prices) = self.flat, self.best
        low, high = _FACTORS
        memory = prices.memory * low * (high / low) ** rng.random()
        weight = np.repeat(np.exp(_SPREAD * rng.normal(size=len(flat.sizes))), flat.sizes)
        cost = flat.cost + flat.load @ prices.load + memory_price(flat, memory) * weight
        cost = np.minimum(cost - noise * rng.gumbel(size=len(cost)), _CEILING).astype(np.float32)
        messages, absorbed = messages.copy(), cost
        for _ in range(sweeps):
            _, absorbed = sweep(self.layout, cost, messages)
        return absorbed, memory

    def _reprice(self, progress: float) -> None:
        flat, size = self.flat, max(self._size, abs(self.bound), 1e-3 * self.scale)
        rate = _LEAST_RATE**progress
        hot, cold = _TEMPERATURES
        temperature = size / len(flat.sizes) * hot * (cold / hot) ** progress
        weights = self.weights = softmax_rows(flat, self.absorbed, temperature)
        memory, load = self.prices
        if flat.base.size:
            unit = np.where(flat.limit > 0, flat.limit, 1.0)
            over = memory_use(flat, flat.usage.T @ weights) / unit - (flat.limit > 0)
            floor = _PRICE_FLOOR * size / unit
            memory = np.maximum(memory, floor) * np.exp(_GAIN * rate * np.clip(over, -0.1, 0.3))
            memory = np.where(memory <= floor, 0.0, memory)
        if flat.load.shape[1]:
            loads = weights @ flat.load
            load = load * np.exp(rate * (loads / max(loads.max(), 1e-30) - 1))
            load = load / load.sum()
        self.prices = Prices(memory, load)

    def certified(self, layout: Sweep | None = None) -> float:
        """The best bound, again in float64 with the costs as they are; `layout` is the problem's in float64."""
        messages, prices = self.best
        layout = layout or lay_out(self.flat, np.float64)
        cost = priced(self.flat, prices)
        bound, _ = sweep(layout, np.minimum(cost, _CEILING), messages.astype(np.float64))
        numbers = np.abs(np.where(np.isfinite(cost), cost, 0)).sum() + np.abs(messages).sum(dtype=np.float64)
        return bound + credit(self.flat, prices) - ROUNDING * (numbers + abs(bound))


def softmax_rows(flat: Flat, cost: np.ndarray, temperature: float) -> np.ndarray:
    """`[N]` the softmax of -cost / temperature for each node."""
    starts = flat.start[:-1]
    least = np.repeat(np.minimum.reduceat(cost, starts), flat.sizes)
    weights = np.exp((least - cost) / max(temperature, 1e-30))
    return weights / np.repeat(np.add.reduceat(weights, starts), flat.sizes)


def _scale(flat: Flat) -> float:
    """A size of costs: the mean over nodes of the spread of theirs and their edges' costs."""
    finite = flat.cost[np.isfinite(flat.cost)]
    entries = flat.entries[np.isfinite(flat.entries)]
    return float(np.abs(finite).max(initial=0) + np.abs(entries).max(initial=0)) or 1.0
