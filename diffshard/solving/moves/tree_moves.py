"""Tree moves: the best strategies of many nodes at once are found exactly, because no cycle joins them.

If the nodes that may change induce a forest, min-sum dynamic programming from its leaves to its roots finds their best
strategies together, given the strategies of all other nodes. A random maximal forest holds about 70% of the nodes of a
typical graph. A `Forest` is laid out once, level by level, and used many times.

A tree move knows no memory limit, but it knows prices. Prices that answer to each move keep the choices near the
limit, on both sides, and those on the feasible side are kept. Noise on the costs leads out of local optima.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import scipy.sparse

from diffshard.solving.csr import (
    CSRProblem,
    chosen_cost,
    chosen_memory,
    even_parts,
    first_least,
    ragged_positions,
)
from diffshard.solving.dual.ascent import Prices, cost_at_prices

# Entries of matrices that a forest keeps, 64 MiB with their positions: a larger forest lays them out for each move.
_MOST_KEPT_ENTRIES = 1 << 22
_MOST_ENTRIES_AT_ONCE = 1 << 18  # that are laid out together, 4 MiB with their positions; chosen by hand


class _Rows(NamedTuple):
    """Some directed edges with consecutive sources, and the part of all strategies that their sources have."""

    row: np.ndarray  # [n] where the reverse edge's matrix starts
    size: np.ndarray  # [n] strategies of the source
    target: np.ndarray  # [n]
    strategies: slice
    to: np.ndarray  # [Σ size] positions of the sources' strategies in that slice


class ChosenRows:
    """Costs of strategies on some edges, where the neighbours' choice is given."""

    def __init__(self, csr: CSRProblem, edge: np.ndarray | None = None):
        """Lays out directed edges, which must be sorted, by default all; strategies of their sources pay."""
        self._csr, self._edge = csr, np.arange(len(csr.source)) if edge is None else edge
        self._size = csr.sizes[csr.source[self._edge]]
        is_kept = self._size.sum() <= _MOST_KEPT_ENTRIES
        self._parts = tuple(self._lay_out()) if is_kept else None

    def _lay_out(self) -> Iterator[_Rows]:
        csr = self._csr
        for some in even_parts(self._size, _MOST_ENTRIES_AT_ONCE):
            edge, size = self._edge[some], self._size[some]
            source = csr.source[edge]
            strategies = slice(int(csr.start[source[0]]), int(csr.start[source[-1] + 1]))
            to = ragged_positions(csr.start[source] - strategies.start, size)
            yield _Rows(csr.matrix[csr.reverse[edge]], size, csr.target[edge], strategies, to)

    def __call__(self, choice: np.ndarray) -> np.ndarray:
        """Returns `[N]` what the edges add to each strategy where their targets choose as in `choice` `[V]`."""
        total = np.zeros(len(self._csr.cost))
        for row, size, target, strategies, to in self._parts if self._parts is not None else self._lay_out():
            at = ragged_positions(row + choice[target] * size, size)
            total[strategies] += np.bincount(to, self._csr.entries[at], strategies.stop - strategies.start)
        return total


class _Part(NamedTuple):
    """Some edges of a level from parents to nodes, with all entries of their matrices."""

    entries: np.ndarray  # [Σ S_parent * S_node] the matrices, a row for each strategy of the parent
    own_position: np.ndarray  # the same length: positions of the node's strategies
    row: np.ndarray  # [Σ S_parent] where each row starts in `entries`
    above: np.ndarray  # [Σ S_parent] positions of the parent's strategies


class _Level(NamedTuple):
    """The nodes at one depth below their roots, n of them, and their edges to their parents."""

    node: np.ndarray  # [n]
    parent: np.ndarray  # [n]
    matrix: np.ndarray  # [n] where the matrix starts in the problem's entries
    size: np.ndarray  # [n]
    start: np.ndarray  # [n]
    parts: tuple[_Part, ...] | None  # the edges, or None where they are laid out anew for each move to save memory


class Forest(NamedTuple):
    """An induced forest of the graph."""

    roots: np.ndarray
    levels: list[_Level]
    inside: ChosenRows
    num_kept: int


Grow = Callable[[CSRProblem, np.ndarray], Forest]
"""Makes a forest of some of the nodes `[n]`, which come in the order in which they should be taken."""


def grow_forest(csr: CSRProblem, order: np.ndarray) -> Forest:
    """Returns the forest that takes the nodes of `order` `[n]` one by one, except those that would close a cycle."""
    in_forest = _acyclic(csr, order)
    inside = np.flatnonzero(in_forest[csr.source] & in_forest[csr.target])
    roots, layers = _layers(csr, order[in_forest[order]], inside)
    num_entries = int(_num_entries(csr, inside).sum()) // 2
    is_kept = num_entries <= _MOST_KEPT_ENTRIES
    levels = [_level(csr, layer, is_kept) for layer in reversed(layers)]
    return Forest(roots, levels, ChosenRows(csr, inside), 2 * num_entries if is_kept else 5 * len(inside))


def _acyclic(csr: CSRProblem, order: np.ndarray) -> np.ndarray:
    """Returns `[V]` which nodes are taken, by union-find over the trees so far."""
    first, target = csr.first.tolist(), csr.target.tolist()
    parent = list(range(len(csr.sizes)))
    in_forest = [False] * len(parent)
    for v in order.tolist():
        trees = set()
        for u in target[first[v] : first[v + 1]]:
            if in_forest[u]:
                while parent[u] != u:
                    parent[u] = parent[parent[u]]
                    u = parent[u]
                if u in trees:
                    break
                trees.add(u)
        else:
            in_forest[v] = True
            for u in trees:
                parent[u] = v
    return np.array(in_forest, bool)


def _layers(csr: CSRProblem, order: np.ndarray, edge: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the root of each tree, and breadth first the directed edges that lead from each layer to the next.

    Args:
      order: the nodes of the forest; the first one of each tree is its root.
      edge: the directed edges inside the forest, sorted by their source.
    """
    count = len(csr.sizes)
    source, target = csr.source[edge], csr.target[edge]
    graph = scipy.sparse.csr_array((np.ones(len(edge), bool), (source, target)), shape=(count, count))
    tree = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
    roots = order[np.sort(np.unique(tree[order], return_index=True)[1])]
    first = np.searchsorted(source, np.arange(count + 1))
    layers, parent, layer = [], np.full(count, -1), roots
    while True:
        out = ragged_positions(first[layer], first[layer + 1] - first[layer])
        out = out[target[out] != parent[source[out]]]
        if not len(out):
            return roots, layers
        layers.append(edge[out])
        layer = target[out]
        parent[layer] = source[out]


def _num_entries(csr: CSRProblem, edge: np.ndarray) -> np.ndarray:
    """Returns how many entries the matrices of some directed edges have."""
    return csr.sizes[csr.source[edge]] * csr.sizes[csr.target[edge]]


def _level(csr: CSRProblem, edge: np.ndarray, is_kept: bool) -> _Level:
    node = csr.target[edge]  # the edges lead from parent to node: a matrix has the parent's strategies as rows
    level = _Level(node, csr.source[edge], csr.matrix[edge], csr.sizes[node], csr.start[node], None)
    return level._replace(parts=tuple(_parts(csr, level))) if is_kept else level


def _parts(csr: CSRProblem, level: _Level) -> Iterator[_Part]:
    """Yields the edges of a level laid out, a bounded number of entries at a time."""
    above = csr.sizes[level.parent]
    for some in even_parts(level.size * above, _MOST_ENTRIES_AT_ONCE):
        size, above_size, matrix = level.size[some], above[some], level.matrix[some]
        row = np.cumsum(np.repeat(size, above_size))
        yield _Part(
            entries=csr.entries[ragged_positions(matrix, size * above_size)],
            own_position=ragged_positions(np.repeat(level.start[some], above_size), np.repeat(size, above_size)),
            row=np.concatenate([[0], row[:-1]]),
            above=ragged_positions(csr.start[level.parent[some]], above_size),
        )


def best_choice(csr: CSRProblem, forest: Forest, field: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """Finds the best strategies of the forest's nodes.

    Args:
      field: `[N]` what each strategy costs, given `choice` for all neighbours; changed in place.
      choice: `[V]`.

    Returns:
      `[V]`; outside the forest as in `choice`.
    """
    field -= forest.inside(choice)  # neighbours inside change as well, so their present strategies do not count
    for level in forest.levels:
        for part in level.parts if level.parts is not None else _parts(csr, level):
            through = field[part.own_position] + part.entries
            np.add.at(field, part.above, np.minimum.reduceat(through, part.row))
    best, size = choice.copy(), csr.sizes[forest.roots]
    best[forest.roots] = first_least(field[ragged_positions(csr.start[forest.roots], size)], size)
    for level in reversed(forest.levels):
        at = ragged_positions(level.matrix + best[level.parent] * level.size, level.size)
        positions = ragged_positions(level.start, level.size)
        best[level.node] = first_least(field[positions] + csr.entries[at], level.size)
    return best


_MOST_POOL_NUMBERS = 1 << 25  # 256 MiB that the forests in a pool may hold; chosen by hand
_MOST_FORESTS = 40  # in a pool; chosen by hand on the contest's instances
_LEAST_FORESTS = 4  # that a pool grows before it draws any a second time; chosen by hand on the same
_REUSE_SHARE = 0.7  # of the draws, once there are so many; chosen by hand on the same
_LEAST_PRICE = 1e-5  # of a whole limit's memory, in parts of the bound; chosen by hand on the same
_MOST_PRICE_RATIO = 1e20  # of a memory price to the least one, so that sums stay finite where nothing fits
_MOST_PRICE = 1e200  # of memory, for the same reason
_FALL_SHARE = 0.2  # of the rate at which prices rise: they fall this much more slowly; chosen by hand on the same


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
        self._edges = ChosenRows(csr)
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
        return cost_at_prices(self.csr, Prices(self.memory, self.load), weight)

    def move(self, forest: Forest, temperature: np.ndarray | float = 0.0, weight: np.ndarray | float = 1.0) -> None:
        """Makes one tree move from the current choice.

        Args:
          temperature: of the Gumbel noise on costs, common or `[N]`.
          weight: factors on the prices of memory, common or `[N]`.
        """
        field = self.costs(weight) + self._edges(self.choice)
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
