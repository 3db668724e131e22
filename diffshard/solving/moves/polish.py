"""Polishing a choice: forest moves at memory prices that adapt, annealed by noise on the costs."""

import numpy as np

from diffshard.solving.dual.ascent import Prices
from diffshard.solving.flat import Flat, chosen_cost, chosen_memory, memory_price, ragged
from diffshard.solving.moves.forest import Forest, best_choice, first_least, grow

_POOL_NUMBERS = 1 << 25  # numbers that the forests in the pool may hold
_CEILING = 1e20, 1e200  # of prices: of the least, and of any, so that sums stay finite where nothing fits


class Field:
    """What every strategy would cost, given the choice: recomputed from rows of the matrices, at any prices."""

    def __init__(self, flat: Flat):
        self.flat = flat
        self._size = flat.sizes[flat.target]
        self._row = flat.matrix
        self._to = ragged(flat.start[flat.target], self._size)

    def __call__(self, cost: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """`[N]`: `cost` `[N]` and the edges to the chosen strategies of the neighbours."""
        if not len(self._to):
            return cost.copy()
        flat = self.flat
        at = ragged(self._row + choice[flat.source] * self._size, self._size)
        return cost + np.bincount(self._to, flat.entries[at], len(cost))


class Pool:
    """Random forests, kept because growing one takes longer than using it."""

    def __init__(self, flat: Flat, rng: np.random.Generator, *, edges: bool = True, most: int = 40):
        self._flat, self._rng, self._edges, self._most = flat, rng, edges, most
        self._forests: list[Forest] = []
        self._numbers = 0

    def draw(self) -> Forest:
        """A new forest or, once there are many, one of those."""
        full = len(self._forests) >= self._most or self._numbers > _POOL_NUMBERS
        if full or (len(self._forests) > 3 and self._rng.random() < 0.7):
            return self._forests[self._rng.integers(len(self._forests))]
        forest = grow(self._flat, self._rng.permutation(len(self._flat.sizes)), edges=self._edges)
        self._numbers += sum(2 * len(level.entries) for level in forest.levels)
        self._forests.append(forest)
        return forest


class Polish:
    """A choice under improvement, with the prices that keep it inside the memory.

    Attributes:
      edges: whether neighbours move together (see `grow`).
      choice: where the search is; it may exceed the memory.
      best: the best feasible choice, or the one of least excess while none is feasible.
      best_cost: its cost; inf while none is feasible.
      best_memory: the prices of memory at which it was found.
    """

    def __init__(
        self,
        flat: Flat,
        rng: np.random.Generator,
        choice: np.ndarray,
        prices: Prices,
        bound: float,
        *,
        edges: bool = True,
    ):
        self.flat, self.rng, self.edges = flat, rng, edges
        self.field = Field(flat)
        self.pool = Pool(flat, rng, edges=edges)
        self.memory, self.load = prices.memory.copy(), prices.load.copy()
        self._floor = 1e-5 * max(abs(bound), 1e-30) / np.maximum(flat.limit, 1e-30)
        self._floor = np.minimum(self._floor, _CEILING[1])
        self._ceiling = np.minimum(_CEILING[0] * self._floor, _CEILING[1])
        self.best, self.best_cost, self.best_excess = choice, np.inf, np.inf
        self.best_memory = self.memory
        self.begin(choice, self.memory)

    def begin(self, choice: np.ndarray, memory: np.ndarray) -> None:
        """Goes on from another choice, at its memory prices `[T, D]`."""
        self.choice, self.memory = choice, memory.copy()
        self.offer(choice)

    def offer(self, choice: np.ndarray) -> np.ndarray:
        """Keeps the choice if it is the best so far; returns where it exceeds the memory, `[T, D]`."""
        excess = np.zeros((0, 1))
        if self.flat.base.size:
            excess = chosen_memory(self.flat, choice) - self.flat.limit
        most = max(excess.max(initial=0.0), 0.0)
        if most < self.best_excess or (most == self.best_excess == 0):
            cost = chosen_cost(self.flat, choice)
            if most > 0 or cost < self.best_cost:
                self.best, self.best_excess = choice.copy(), most
                self.best_cost = np.inf if most > 0 else cost
                self.best_memory = self.memory.copy()
        return excess > 0

    def offers_better(self, choice: np.ndarray) -> bool:
        """Offers a choice and says whether it became the best."""
        before = self.best_excess, self.best_cost
        self.offer(choice)
        return (self.best_excess, self.best_cost) < before

    def costs(self, weight: np.ndarray | float = 1.0) -> np.ndarray:
        """`[N]` node costs at the prices, those of memory times `weight` `[N]`."""
        cost = self.flat.cost
        if self.flat.load.shape[1]:
            cost = cost + self.flat.load @ self.load
        return cost + memory_price(self.flat, self.memory) * weight if self.memory.any() else cost

    def move(self, forest: Forest, temperature: np.ndarray | float = 0.0, weight: np.ndarray | float = 1.0) -> None:
        """One forest move from the current choice."""
        field = self.field(self.costs(weight), self.choice)
        if np.any(temperature):
            field -= temperature * self.rng.gumbel(size=len(field))
        self.choice = best_choice(self.flat, forest, field, self.choice)

    def reprice(self, over: np.ndarray, rise: float, fall: float) -> None:
        """Prices rise by a factor where the memory is exceeded and fall elsewhere."""
        if self.flat.base.size:
            risen = np.minimum(np.maximum(self.memory, self._floor) * (1 + rise), self._ceiling)
            self.memory = np.where(over, risen, self.memory * (1 - fall))

    def anneal(self, temperature: float, rate: float) -> None:
        """One move of a random forest and the prices' answer to it."""
        self.move(self.pool.draw(), temperature)
        self.reprice(self.offer(self.choice), rate, 0.2 * rate)


def rounded(flat: Flat, absorbed: np.ndarray) -> np.ndarray:
    """`[V]` the cheapest strategy of each node by costs with all messages absorbed."""
    return first_least(absorbed, flat.sizes)
