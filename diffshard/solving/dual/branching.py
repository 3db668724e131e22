"""Branch and bound on the dual: two halves of a problem have higher bounds than the whole.

The dual's bound is low because at its prices a relaxed choice mixes strategies of one node, which a discrete choice
cannot. A branch therefore forbids either the strategies of a node that use much or those that use little, and its dual
starts from its parent's messages and prices. The bound of the problem is the least over all open branches. It rises
because the branch with the least bound is split first.

Source: Land & Doig, "An automatic method of solving discrete programming problems" (1960); bounds of the Lagrangian
dual as in Fisher, "The Lagrangian Relaxation Method" (1981), section 5.
"""

import heapq
import itertools
import math
from typing import NamedTuple

import numpy as np

from diffshard.base import OPTIMAL_GAP
from diffshard.solving.dual.ascent import SUM_ERROR, Ascent, is_coupled, softmin_weights
from diffshard.solving.dual.sweeps import lay_out
from diffshard.solving.flat import Flat, chosen_cost, chosen_memory, memory_price
from diffshard.solving.moves.forest import first_least

_SWEEPS_PER_BRANCH = 40  # chosen by hand on the contest's instances, as all numbers here
_PROGRESS = 0.2, 0.8  # of a climb, in the first and the last sweep of a branch
_RANGE_WEIGHT = 0.1  # of the range of what a node's strategies use, beside the spread that the relaxed choice mixes
_MEMORY_TOLERANCE = 1e-7  # of the memory in use: what a choice may exceed the limit by, before its branch is closed
_NO_USE = 1e-12  # of the largest use at the prices: a smaller spread counts as none


class Branch(NamedTuple):
    """The choices that take no forbidden strategy.

    Attributes:
      bound: on the cost of all of them.
      forbidden: `[N]` bool.
      ascent: the climb of its dual.
      weights: `[N]` the mean of the relaxed choices in the second half of the climb.
    """

    bound: float
    forbidden: np.ndarray
    ascent: Ascent
    weights: np.ndarray


class Branching:
    """The branches of one problem, each waiting to be climbed, open or closed."""

    def __init__(self, ascent: Ascent, bound: float):
        self.flat, self.last_ascent = ascent.flat, ascent
        self._exact = lay_out(self.flat, np.float64)
        self._count = itertools.count()
        self._open: list[tuple[float, int, Branch]] = []
        self._least_closed_bound = math.inf
        weights = softmin_weights(self.flat, ascent.absorbed_cost, ascent.scale)
        self._pending = [Branch(bound, np.zeros(len(self.flat.cost), bool), ascent, weights)]
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
        branch = self._climb(self._pending.pop(), best_cost)
        if branch.bound >= best_cost - OPTIMAL_GAP * abs(best_cost):
            self._least_closed_bound = min(self._least_closed_bound, branch.bound)
        else:
            heapq.heappush(self._open, (branch.bound, next(self._count), branch))
        return bool(self._pending or self._open)

    def _branch(self) -> bool:
        while self._open:
            _, _, branch = heapq.heappop(self._open)
            halves = _halves(self.flat, branch)
            if halves is None:
                self._least_closed_bound = min(
                    self._least_closed_bound, max(branch.bound, _least_cost(self.flat, ~branch.forbidden))
                )
                continue
            self._pending = [branch._replace(forbidden=branch.forbidden | half) for half in halves]
            return True
        return False

    def _climb(self, branch: Branch, best_cost: float) -> Branch:
        """Climbs the branch's own dual; returns the branch with it and its certified bound."""
        penalty = 2 * (abs(best_cost) + abs(branch.bound))
        flat = self.flat._replace(cost=self.flat.cost + penalty * branch.forbidden)
        ascent = self.last_ascent = branch.ascent.branch(flat)
        first, last = _PROGRESS
        weights = np.zeros(len(flat.cost))
        for i in range(_SWEEPS_PER_BRANCH):
            ascent.step(first + (last - first) * i / _SWEEPS_PER_BRANCH)
            if i >= _SWEEPS_PER_BRANCH // 2:
                weights += (
                    ascent.weights if is_coupled(flat) else softmin_weights(flat, ascent.absorbed_cost, ascent.scale)
                )
            if ascent.bound >= best_cost:
                break
        bound = max(branch.bound, ascent.certified_bound(self._exact))
        total = np.maximum(np.add.reduceat(weights, flat.start[:-1]), 1e-30)
        return Branch(bound, branch.forbidden, ascent, weights / np.repeat(total, flat.sizes))


def _least_cost(flat: Flat, is_allowed: np.ndarray) -> float:
    """Returns a bound on the only choice that `is_allowed` `[N]` leaves: its cost, or inf if it exceeds the memory."""
    choice = first_least((~is_allowed).astype(float), flat.sizes)
    memory = chosen_memory(flat, choice) if flat.base.size else flat.base
    if (memory - flat.limit > _MEMORY_TOLERANCE * memory.max(initial=0.0)).any():
        return math.inf
    sizes = flat._replace(cost=np.abs(flat.cost), entries=np.abs(flat.entries), load=np.abs(flat.load))
    size = chosen_cost(sizes, choice)
    return float(chosen_cost(flat, choice) - SUM_ERROR * size)


def _halves(flat: Flat, branch: Branch) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns what to forbid `[N]` on either side: the strategies of a node that use more, or less, than the mean.

    The node is the one whose use of memory and loads, at the prices, the relaxed choice spreads most. Returns None
    where only one choice remains.
    """
    _, prices = branch.ascent.best
    use = memory_price(flat, prices.memory) + flat.load @ prices.load
    is_allowed, starts = ~branch.forbidden, flat.start[:-1]
    mean = np.add.reduceat(branch.weights * use, starts)
    spread = np.add.reduceat(branch.weights * (use - np.repeat(mean, flat.sizes)) ** 2, starts)
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
        strategies = slice(starts[node], starts[node] + flat.sizes[node])
        large = np.ones(len(flat.cost), bool)
        large[flat.start[node] + np.where(is_allowed[strategies], branch.weights[strategies], -1.0).argmax()] = False
    inside = np.zeros(len(flat.cost), bool)
    inside[flat.start[node] : flat.start[node + 1]] = True
    return inside & large, inside & ~large
