"""Polishing a choice: tree moves at memory prices that rise where a move exceeded the memory and fall elsewhere.

A tree move knows no memory limit, but it knows prices. Prices that answer to each move keep the choices near the
limit, on both sides, and those on the feasible side are kept. Noise on the costs leads out of local optima.
"""

import numpy as np

from diffshard.solving.csr import CSRProblem, chosen_cost, chosen_memory, memory_price
from diffshard.solving.dual.ascent import Prices
from diffshard.solving.moves.tree_moves import ChosenRows, Forest, Grow, best_choice, first_least, grow_forest

_MOST_POOL_NUMBERS = 1 << 25  # 256 MiB that the forests in a pool may hold; chosen by hand
_MOST_FORESTS = 40  # in a pool; chosen by hand on the contest's instances
_LEAST_FORESTS = 4  # that a pool grows before it draws any a second time; chosen by hand on the same
_REUSE_SHARE = 0.7  # of the draws, once there are so many; chosen by hand on the same
_LEAST_PRICE = 1e-5  # of a whole limit's memory, in parts of the bound; chosen by hand on the same
_MOST_PRICE_RATIO = 1e20  # of a memory price to the least one, so that sums stay finite where nothing fits
_MOST_PRICE = 1e200  # of memory, for the same reason
_FALL_SHARE = 0.2  # of the rate at which prices rise: they fall this much more slowly; chosen by hand on the same


class Field:
    """What every strategy would cost, given a choice for its neighbours."""

    def __init__(self, csr: CSRProblem):
        self.csr = csr
        self._edges = ChosenRows(csr, np.arange(len(csr.source)))

    def __call__(self, cost: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """Returns `[N]`: `cost` `[N]` and the edges to the chosen strategies of the neighbours."""
        return cost + self._edges(choice)


class Pool:
    """Random forests, kept because growing one takes longer than using it."""

    def __init__(self, csr: CSRProblem, rng: np.random.Generator, grow: Grow = grow_forest):
        self._csr, self._rng, self._grow = csr, rng, grow
        self._forests: list[Forest] = []
        self._numbers = 0

    def draw(self) -> Forest:
        """Returns a new forest or, once there are a few, often an old one."""
        full = len(self._forests) >= _MOST_FORESTS or self._numbers > _MOST_POOL_NUMBERS
        if full or (len(self._forests) >= _LEAST_FORESTS and self._rng.random() < _REUSE_SHARE):
            return self._forests[self._rng.integers(len(self._forests))]
        forest = self._grow(self._csr, self._rng.permutation(len(self._csr.sizes)))
        self._numbers += forest.num_kept
        self._forests.append(forest)
        return forest


class Polish:
    """A choice under improvement, with the prices that keep it inside the memory.

    Attributes:
      choice: where the search is; it may exceed the memory.
      fits: whether the choice that was offered last keeps the memory limit.
      best: the best feasible choice, or the one of least excess while none is feasible.
      best_cost: its cost; inf while none is feasible.
      best_excess: by how much it exceeds the memory, in bytes at the worst time; 0 if it is feasible.
      best_memory: `[T, D]` the prices of memory at that moment.
    """

    def __init__(
        self,
        csr: CSRProblem,
        rng: np.random.Generator,
        choice: np.ndarray,
        prices: Prices,
        bound: float,
        grow: Grow = grow_forest,
    ):
        """Begins at a choice.

        Args:
          csr: the problem, without infinite costs.
          rng: consumed by all moves.
          choice: `[V]`.
          prices: of memory, which will adapt, and of loads, which will not.
        """
        self.csr, self.rng, self.grow = csr, rng, grow
        self.field = Field(csr)
        self.pool = Pool(csr, rng, grow)
        self.memory, self.load = prices.memory.copy(), prices.load.copy()
        least = _LEAST_PRICE * max(abs(bound), 1e-30) / np.maximum(csr.limit, 1e-30)
        self._least_price = np.minimum(least, _MOST_PRICE)
        self._most_price = np.minimum(_MOST_PRICE_RATIO * self._least_price, _MOST_PRICE)
        self.best, self.best_cost, self.best_excess = choice, np.inf, np.inf
        self.best_memory = self.memory
        self.begin(choice, self.memory)

    @property
    def best_rank(self) -> tuple[float, float]:
        """The best choice's excess and cost: smaller is better."""
        return self.best_excess, self.best_cost

    def begin(self, choice: np.ndarray, memory: np.ndarray) -> None:
        """Goes on from another choice, at its memory prices `[T, D]`."""
        self.choice, self.memory = choice, memory.copy()
        self.offer(choice)

    def offer(self, choice: np.ndarray) -> np.ndarray:
        """Keeps the choice if it is the best so far; returns where it exceeds the memory, `[T, D]`."""
        excess = np.zeros((0, 1))
        if self.csr.base.size:
            excess = chosen_memory(self.csr, choice) - self.csr.limit
        most = max(excess.max(initial=0.0), 0.0)
        self.fits = most == 0
        if most < self.best_excess or (most == self.best_excess == 0):
            cost = float(chosen_cost(self.csr, choice))
            if most > 0 or cost < self.best_cost:
                self.best, self.best_excess = choice.copy(), most
                self.best_cost = np.inf if most > 0 else cost
                self.best_memory = self.memory.copy()
        return excess > 0

    def offers_better(self, choice: np.ndarray) -> bool:
        """Offers a choice and says whether it became the best."""
        rank = self.best_rank
        self.offer(choice)
        return self.best_rank < rank

    def costs(self, weight: np.ndarray | float = 1.0) -> np.ndarray:
        """Returns `[N]` node costs at the prices, those of memory times `weight` `[N]`."""
        cost = self.csr.cost
        if self.csr.load.shape[1]:
            cost = cost + self.csr.load @ self.load
        return cost + memory_price(self.csr, self.memory) * weight if self.memory.any() else cost

    def move(self, forest: Forest, temperature: np.ndarray | float = 0.0, weight: np.ndarray | float = 1.0) -> None:
        """Makes one tree move from the current choice.

        Args:
          temperature: of the Gumbel noise on costs, common or `[N]`.
          weight: factors on the prices of memory, common or `[N]`.
        """
        field = self.field(self.costs(weight), self.choice)
        if np.any(temperature):
            field -= temperature * self.rng.gumbel(size=len(field))
        self.choice = best_choice(self.csr, forest, field, self.choice)

    def reprice(self, is_exceeded: np.ndarray, rise: float, fall: float) -> None:
        """Raises the prices by a factor where the memory is exceeded, and lowers them elsewhere.

        Args:
          is_exceeded: `[T, D]`, as `offer` returns.
          rise: added to 1 for the factor.
          fall: subtracted from 1 for the factor.
        """
        if self.csr.base.size:
            risen = np.minimum(np.maximum(self.memory, self._least_price) * (1 + rise), self._most_price)
            self.memory = np.where(is_exceeded, risen, self.memory * (1 - fall))

    def anneal(self, temperature: float, rate: float) -> None:
        """Moves a random forest with noise of a temperature, and lets the prices answer at a rate."""
        self.move(self.pool.draw(), temperature)
        self.reprice(self.offer(self.choice), rate, _FALL_SHARE * rate)


def rounded_choice(csr: CSRProblem, absorbed_cost: np.ndarray) -> np.ndarray:
    """Returns `[V]` the cheapest strategy of each node by costs `[N]` with all messages absorbed."""
    return first_least(absorbed_cost, csr.sizes)
