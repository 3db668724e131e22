"""Ascent of the dual: the memory and loads that a relaxed choice takes tell each price whether to rise or to fall.

The relaxed choice is the softmax of the node costs with all messages absorbed. What it takes beyond the limits is the
gradient of the smoothed dual with respect to the prices, so prices follow it in multiplicative steps while the
temperature falls; between two steps a sweep brings the messages up to date.

Branch and bound on the dual: two halves of a problem have higher bounds than the whole.

The dual's bound is low because at its prices a relaxed choice mixes strategies of one node, which a discrete choice
cannot. A branch therefore forbids either the strategies of a node that use much or those that use little, and its dual
starts from its parent's messages and prices. The bound of the problem is the least over all open branches. It rises
because the branch with the least bound is split first.

Source: Land & Doig, "An automatic method of solving discrete programming problems" (1960); bounds of the Lagrangian
dual as in Fisher, "The Lagrangian Relaxation Method" (1981), section 5.
"""

import copy
import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diffshard.base import OPTIMAL_GAP
from diffshard.solving.csr import (
    CSRProblem,
    chosen_cost,
    chosen_memory,
    first_least,
    group_sizes,
    memory_price,
    memory_use,
)
from diffshard.solving.dual.sweeps import Sweep, lay_out, sweep

# How far a price moves in one step: its logarithm, for each limit's worth of excess. Measured on the contest's
# instances: 10 converges slowly and 30 not at all.
_MEMORY_GAIN = 3.0
_EXCESS_RANGE = -0.1, 0.3  # limits' worth of excess that count in one step; chosen by hand on the contest's instances
_LAST_RATE = 0.02  # of the steps at the end, where the first ones have rate 1; chosen by hand on the same
_TEMPERATURES = 0.3, 1e-3  # first and last, in the bound's cost per node; chosen by hand on the same
_LEAST_PRICE = 1e-5  # of a whole limit, in parts of the bound: lower prices are zero; chosen by hand on the same
_PERTURBED_MEMORY_FACTORS = 0.8, 1.1  # least and largest, on all memory prices; chosen by hand on the same
_PERTURBED_NODE_SPREAD = 0.1  # standard deviation of the logarithm of a node's own factor; chosen by hand on the same
_LARGEST_COST = 1e30  # of a strategy with its prices: sums of these stay finite in float32
SUM_ERROR = 1e-12
"""More than the error of float64's sums, in parts of the sum of the numbers' sizes."""


class Prices(NamedTuple):
    """The multipliers of the dual for memory limits and loads.

    Attributes:
      memory: `[T, D]` cost of each byte at each time.
      load: `[R]` on a simplex for each group, the part of each load that counts; empty where there are no loads.
    """

    memory: np.ndarray
    load: np.ndarray


def initial_prices(csr: CSRProblem) -> Prices:
    """Returns prices at which memory is free and every load of a group counts alike."""
    sizes = group_sizes(csr)
    return Prices(np.zeros(csr.base.shape), np.repeat(1 / sizes, sizes))


def is_coupled(csr: CSRProblem) -> bool:
    """Returns whether anything joins all nodes and so has prices: memory that can run out, or loads."""
    return bool(csr.base.size or csr.load.shape[1])


def cost_at_prices(csr: CSRProblem, prices: Prices, weight: np.ndarray | float = 1.0) -> np.ndarray:
    """Returns `[N]` node costs with their memory and loads at these prices, those of memory times `weight` `[N]`."""
    cost = csr.cost + csr.load @ prices.load
    return cost + memory_price(csr, prices.memory) * weight if prices.memory.any() else cost


def credit(csr: CSRProblem, prices: Prices) -> float:
    """Returns the term of the bound for the limits at these prices: Σ price · (base - limit)."""
    has_limit = np.isfinite(csr.limit)
    excess = csr.base[:, has_limit] - csr.limit[has_limit]
    return float((prices.memory[:, has_limit] * excess).sum()) if prices.memory.any() else 0.0


PriceStep = Callable[[CSRProblem, Prices, np.ndarray, float, float], Prices]
"""How prices answer to a relaxed choice: `step(csr, prices, weights, bound_size, progress)` returns the next ones, from
weights `[N]`, a size of the bound, which is positive, and the progress of the ascent, 0 to 1."""


def step_along_excess(
    csr: CSRProblem, prices: Prices, weights: np.ndarray, bound_size: float, progress: float
) -> Prices:
    """Returns prices that rose where the relaxed choice exceeds a limit or loads a device most; follows `PriceStep`."""
    rate = _LAST_RATE**progress
    memory, load = prices
    if csr.base.size:
        unit = np.where(csr.limit > 0, csr.limit, 1.0)
        excess = memory_use(csr, csr.usage.T @ weights) / unit - (csr.limit > 0)
        least = _LEAST_PRICE * bound_size / unit
        memory = step_memory_prices(memory, excess, least, _MEMORY_GAIN * rate)
    if csr.load.shape[1]:
        loads, sizes = weights @ csr.load, group_sizes(csr)
        most = np.repeat(np.maximum.reduceat(loads, csr.load_first), sizes)
        unit = np.repeat(np.maximum(np.maximum.reduceat(np.abs(loads), csr.load_first), 1e-30), sizes)
        load = load * np.exp(rate * (loads - most) / unit)
        load = load / np.repeat(np.add.reduceat(load, csr.load_first), sizes)
    return Prices(memory, load)


def step_memory_prices(memory: np.ndarray, excess: np.ndarray, least: np.ndarray, gain: float) -> np.ndarray:
    """Returns memory prices `[T, D]` that rose where the limit is exceeded and fell elsewhere.

    Args:
      excess: `[T, D]` in units of the limit, negative where there is room.
      least: `[D]` the least price: a lower one becomes zero, and one that is zero rises from here.
      gain: how far the logarithm of a price moves for each limit's worth of excess.
    """
    risen = np.maximum(memory, least) * np.exp(gain * np.clip(excess, *_EXCESS_RANGE))
    return np.where(risen <= least, 0.0, risen)


class Ascent:
    """The state of the ascent. `step` is one iteration; `certified_bound` turns the best of it into a valid bound.

    Attributes:
      bound: the best so far, in float32 sums.
      best: the messages and prices that gave it.
      absorbed_cost: `[N]` costs with all messages of the last sweep absorbed.
      weights: `[N]` the relaxed choice of the last step that had prices to move.
    """

    def __init__(self, csr: CSRProblem, *, price_step: PriceStep = step_along_excess):
        """Starts from zero messages and from prices at which memory is free."""
        self.csr = csr
        self._price_step: PriceStep = price_step
        self.layout: Sweep = lay_out(csr)
        self.scale = _largest_cost(csr)
        # No choice costs more than this.
        self._most = self.scale * (len(csr.sizes) + len(csr.source)) + np.abs(csr.load).sum()
        self._parent_size = 0.0
        self._begin(np.zeros(self.layout.num_messages + 1), initial_prices(csr))

    def branch(self, csr: CSRProblem) -> "Ascent":
        """Returns an ascent that starts from the best of this one, for a problem with other node costs on its graph."""
        child = copy.copy(self)
        child.csr, child._parent_size = csr, abs(self.bound)
        child._begin(*self.best)
        return child

    def _begin(self, messages: np.ndarray, prices: Prices) -> None:
        self.messages, self.prices = messages.astype(np.float32), prices
        self.bound = -math.inf
        self.best = (self.messages.copy(), self.prices)
        self.absorbed_cost = self.weights = self.csr.cost

    def step(self, progress: float) -> float:
        """Makes a sweep and then a step of the prices; returns the bound. `progress` goes from 0 to 1."""
        cost = np.minimum(cost_at_prices(self.csr, self.prices), _LARGEST_COST).astype(np.float32)
        bound, self.absorbed_cost = sweep(self.layout, cost, self.messages)
        bound += credit(self.csr, self.prices)
        if bound > self.bound:
            self.bound, self.best = bound, (self.messages.copy(), self.prices)
        if is_coupled(self.csr) and bound <= self._most:  # above, nothing fits: prices would rise for ever
            self._reprice(progress)
        return bound

    def perturbed_costs(self, rng: np.random.Generator, sweeps: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns costs with all messages absorbed `[N]`, and memory prices `[T, D]`, for a problem near this one.

        Other prices and noise on the costs bring the messages to another good choice. A factor for each node's memory
        keeps equal layers from all changing at one price, so that memory which the prices leave free is used.
        """
        csr, (messages, prices) = self.csr, self.best
        low, high = _PERTURBED_MEMORY_FACTORS
        prices = prices._replace(memory=prices.memory * low * (high / low) ** rng.random())
        weight = np.repeat(np.exp(_PERTURBED_NODE_SPREAD * rng.normal(size=len(csr.sizes))), csr.sizes)
        cost = cost_at_prices(csr, prices, weight)
        cost = np.minimum(cost - noise * rng.gumbel(size=len(cost)), _LARGEST_COST).astype(np.float32)
        messages, absorbed_cost = messages.copy(), cost
        for _ in range(sweeps):
            _, absorbed_cost = sweep(self.layout, cost, messages)
        return absorbed_cost, prices.memory

    def _reprice(self, progress: float) -> None:
        size = max(self._parent_size, abs(self.bound), 1e-3 * self.scale)
        first, last = _TEMPERATURES
        temperature = size / len(self.csr.sizes) * first * (last / first) ** progress
        self.weights = softmin_weights(self.csr, self.absorbed_cost, temperature)
        self.prices = self._price_step(self.csr, self.prices, self.weights, size, progress)

    def certified_bound(self, layout: Sweep | None = None) -> float:
        """Returns the best bound, computed again in float64.

        Args:
          layout: the problem's in float64, where the caller has it already.
        """
        messages, prices = self.best
        layout = layout or lay_out(self.csr, np.float64)
        cost = cost_at_prices(self.csr, prices)
        bound, _ = sweep(layout, np.minimum(cost, _LARGEST_COST), messages.astype(np.float64))
        # Costs and loads may cancel, so that their own sizes count, not those of their sums.
        sizes = cost_at_prices(self.csr._replace(cost=np.abs(self.csr.cost), load=np.abs(self.csr.load)), prices)
        numbers = np.where(np.isfinite(sizes), sizes, 0).sum() + np.abs(messages).sum(dtype=np.float64)
        return bound + credit(self.csr, prices) - SUM_ERROR * (numbers + abs(bound))


def softmin_weights(csr: CSRProblem, cost: np.ndarray, temperature: float) -> np.ndarray:
    """Returns `[..., N]` weights for each node: the softmax of -cost / temperature, of costs `[..., N]`."""
    starts = csr.start[:-1]
    least = np.repeat(np.minimum.reduceat(cost, starts, axis=-1), csr.sizes, axis=-1)
    weights = np.exp((least - cost) / max(temperature, 1e-30))
    return weights / np.repeat(np.add.reduceat(weights, starts, axis=-1), csr.sizes, axis=-1)


def _largest_cost(csr: CSRProblem) -> float:
    """Returns the largest finite size of a node cost plus that of an edge's entry, 1 where both are 0."""
    finite = csr.cost[np.isfinite(csr.cost)]
    entries = csr.entries[np.isfinite(csr.entries)]
    return float(np.abs(finite).max(initial=0) + np.abs(entries).max(initial=0)) or 1.0


_SWEEPS_PER_BRANCH = 40  # chosen by hand on the contest's instances, as all numbers here
_PROGRESS = 0.2, 0.8  # of an ascent, in the first and the last sweep of a branch
_RANGE_WEIGHT = 0.1  # of the range of what a node's strategies use, beside the spread that the relaxed choice mixes
_MEMORY_TOLERANCE = 1e-7  # of the memory in use: what a choice may exceed the limit by, before its branch is closed
_NO_USE = 1e-12  # of the largest use at the prices: a smaller spread counts as none


class Branch(NamedTuple):
    """The choices that take no forbidden strategy.

    Attributes:
      bound: on the cost of all of them.
      forbidden: `[N]` bool.
      weights: `[N]` the mean of the relaxed choices in the second half of the ascent.
    """

    bound: float
    forbidden: np.ndarray
    ascent: Ascent
    weights: np.ndarray


class Branching:
    """The branches of one problem, each waiting for its ascent, open or closed."""

    def __init__(self, ascent: Ascent, bound: float):
        self.csr, self.last_ascent = ascent.csr, ascent
        self._exact = lay_out(self.csr, np.float64)
        self._count = itertools.count()
        self._open: list[tuple[float, int, Branch]] = []
        self._least_closed_bound = math.inf
        weights = softmin_weights(self.csr, ascent.absorbed_cost, ascent.scale)
        self._pending = [Branch(bound, np.zeros(len(self.csr.cost), bool), ascent, weights)]
        self._root = bound

    @property
    def bound(self) -> float:
        """A lower bound on the cost of every choice."""
        waiting = [branch.bound for branch in self._pending]
        return max(self._root, min([self._least_closed_bound, *waiting, *(self._open[0][:1] if self._open else ())]))

    def step(self, best_cost: float) -> bool:
        """Makes one branch; returns whether there are more.

        Args:
          best_cost: of the best choice so far; branches that cannot be cheaper are closed.
        """
        if not self._pending and not self._branch():
            return False
        branch = self._ascend(self._pending.pop(), best_cost)
        if branch.bound >= best_cost - OPTIMAL_GAP * abs(best_cost):
            self._least_closed_bound = min(self._least_closed_bound, branch.bound)
        else:
            heapq.heappush(self._open, (branch.bound, next(self._count), branch))
        return bool(self._pending or self._open)

    def _branch(self) -> bool:
        while self._open:
            _, _, branch = heapq.heappop(self._open)
            halves = _halves(self.csr, branch)
            if halves is None:
                self._least_closed_bound = min(
                    self._least_closed_bound, max(branch.bound, _least_cost(self.csr, ~branch.forbidden))
                )
                continue
            self._pending = [branch._replace(forbidden=branch.forbidden | half) for half in halves]
            return True
        return False

    def _ascend(self, branch: Branch, best_cost: float) -> Branch:
        """Maximises the branch's own dual; returns the branch with it and its certified bound."""
        penalty = 2 * (abs(best_cost) + abs(branch.bound))
        csr = self.csr._replace(cost=self.csr.cost + penalty * branch.forbidden)
        ascent = self.last_ascent = branch.ascent.branch(csr)
        first, last = _PROGRESS
        weights = np.zeros(len(csr.cost))
        for i in range(_SWEEPS_PER_BRANCH):
            ascent.step(first + (last - first) * i / _SWEEPS_PER_BRANCH)
            if i >= _SWEEPS_PER_BRANCH // 2:
                weights += (
                    ascent.weights if is_coupled(csr) else softmin_weights(csr, ascent.absorbed_cost, ascent.scale)
                )
            if ascent.bound >= best_cost:
                break
        bound = max(branch.bound, ascent.certified_bound(self._exact))
        total = np.maximum(np.add.reduceat(weights, csr.start[:-1]), 1e-30)
        return Branch(bound, branch.forbidden, ascent, weights / np.repeat(total, csr.sizes))


def _least_cost(csr: CSRProblem, is_allowed: np.ndarray) -> float:
    """Returns a bound on the only choice that `is_allowed` `[N]` leaves: its cost, or inf if it exceeds the memory."""
    choice = first_least((~is_allowed).astype(float), csr.sizes)
    memory = chosen_memory(csr, choice)
    if (memory - csr.limit > _MEMORY_TOLERANCE * memory.max(initial=0.0)).any():
        return math.inf
    sizes = csr._replace(cost=np.abs(csr.cost), entries=np.abs(csr.entries), load=np.abs(csr.load))
    size = chosen_cost(sizes, choice)
    return float(chosen_cost(csr, choice) - SUM_ERROR * size)


def _halves(csr: CSRProblem, branch: Branch) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns masks `[N]` of what each side forbids: the strategies of a node that use more, or less, than the mean.

    The node is the one whose use of memory and loads, at the prices, the relaxed choice spreads most. Returns None
    where only one choice remains.
    """
    _, prices = branch.ascent.best
    use = memory_price(csr, prices.memory) + csr.load @ prices.load
    is_allowed, starts = ~branch.forbidden, csr.start[:-1]
    mean = np.add.reduceat(branch.weights * use, starts)
    spread = np.add.reduceat(branch.weights * (use - np.repeat(mean, csr.sizes)) ** 2, starts)
    most = np.maximum.reduceat(np.where(is_allowed, use, -np.inf), starts)
    least = np.minimum.reduceat(np.where(is_allowed, use, np.inf), starts)
    score = np.where(most > least, np.sqrt(spread) + _RANGE_WEIGHT * (most - least), 0.0)
    node = int(score.argmax())
    if score[node] > _NO_USE * np.abs(use).max(initial=1e-300):
        middle = mean[node] if least[node] <= mean[node] < most[node] else (least[node] + most[node]) / 2
        large = use > middle
    else:  # no node's use is priced: split what the messages mix on cycles
        num_allowed = np.add.reduceat(is_allowed, starts)
        mixedness = np.where(num_allowed > 1, 1 - np.maximum.reduceat(branch.weights, starts), -1.0)
        node = int(mixedness.argmax())
        if mixedness[node] < 0:
            return None
        strategies = slice(starts[node], starts[node] + csr.sizes[node])
        large = np.ones(len(csr.cost), bool)
        large[csr.start[node] + np.where(is_allowed[strategies], branch.weights[strategies], -1.0).argmax()] = False
    inside = np.zeros(len(csr.cost), bool)
    inside[csr.start[node] : csr.start[node + 1]] = True
    return inside & large, inside & ~large
