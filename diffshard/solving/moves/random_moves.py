"""Random walks: Metropolis chains that change single nodes, and neighbourhoods that change many nodes at once.

A random change is taken if it is cheaper, or else with a probability that falls. Many chains run at once, because NumPy
takes about as long for one step of 32 as for one of a single chain. Changes are priced exactly.

A partition splits the graph into neighbourhoods that no edge joins, by freezing nodes between them. What a change in
one neighbourhood costs then does not depend on the others, so all neighbourhoods are perturbed at once and each is
accepted by itself; only the memory is shared, so neighbourhoods are accepted while it lasts.

Sources: Metropolis et al., "Equation of state calculations by fast computing machines" (1953); Shaw, "Using constraint
programming and local search methods to solve vehicle routing problems" (1998) for large neighbourhoods.
"""

from typing import NamedTuple

import numpy as np

from diffshard.solving.csr import (
    CSRProblem,
    chosen_memory,
    costs_of_choices,
    excess_in_limits,
    group_sizes,
    largest_loads,
    memory_change,
    memory_of_strategies,
    ragged_positions,
)
from diffshard.solving.moves.tree_moves import Forest, Grow, Polish, grow_forest

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

    def __init__(self, csr: CSRProblem, rng: np.random.Generator, choice: np.ndarray):
        self.csr, self._rng, self.choice = csr, rng, choice.copy()
        count = len(choice)
        position = csr.start[:-1] + choice
        self.load = csr.load[position].sum(axis=1)
        self.cost = costs_of_choices(csr, choice)
        self._odd = False
        self._movable = np.flatnonzero(csr.sizes > 1)
        self._use = _dense_use(csr) if csr.base.size * int(csr.start[-1]) <= _MOST_TABLE_NUMBERS else None
        chain = np.repeat(np.arange(count), len(csr.sizes))
        self._memory_in_use = (
            memory_of_strategies(csr, position.ravel(), np.ones(position.size), chain, count) + csr.base
        )
        self.excess = excess_in_limits(csr, self._memory_in_use).sum(axis=(1, 2))
        self.best, self.best_cost = None, np.inf
        self._keep(np.arange(count))

    def step(self, temperature: np.ndarray | float) -> None:
        """Makes one Metropolis step of every chain, at a common temperature or `[R]`, in units of cost."""
        if not len(self._movable):
            return
        csr, rng, rows = self.csr, self._rng, np.arange(len(self.choice))
        v = self._movable[rng.integers(len(self._movable), size=len(rows))]
        old = self.choice[rows, v]
        new = (old + 1 + rng.integers(csr.sizes[v] - 1)) % csr.sizes[v]
        change = csr.cost[csr.start[v] + new] - csr.cost[csr.start[v] + old] + self._edges(v, old, new)
        felt, load = change, self.load
        if load.shape[1]:
            load = load + csr.load[csr.start[v] + new] - csr.load[csr.start[v] + old]
            felt = change + _smooth_max(csr, load) - _smooth_max(csr, self.load)
            change = change + largest_loads(csr, load) - largest_loads(csr, self.load)
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
        csr = self.csr
        degree = csr.first[v + 1] - csr.first[v]
        edge = ragged_positions(csr.first[v], degree)
        chain = np.repeat(np.arange(len(v)), degree)
        target = csr.target[edge]
        column = csr.matrix[edge] + self.choice[chain, target]
        width = csr.sizes[target]
        difference = csr.entries[column + new[chain] * width] - csr.entries[column + old[chain] * width]
        return np.bincount(chain, difference, len(v))

    def _memory(
        self, rows: np.ndarray, v: np.ndarray, old: np.ndarray, new: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns `[n, T, D]` and `[n]`: memory in use and excess of some chains after their change."""
        csr, count = self.csr, len(rows)
        if self._use is not None:
            memory = self._memory_in_use[rows] + self._use[csr.start[v] + new] - self._use[csr.start[v] + old]
        else:
            strategies = np.concatenate([csr.start[v] + new, csr.start[v] + old])
            weight = np.repeat([1.0, -1.0], count)
            change = memory_of_strategies(csr, strategies, weight, np.tile(np.arange(count), 2), count)
            memory = self._memory_in_use[rows] + change
        return memory, excess_in_limits(csr, memory).sum(axis=(1, 2))

    def _keep(self, chains: np.ndarray) -> None:
        fits = chains[self.excess[chains] <= 0]
        if len(fits):
            least = int(fits[self.cost[fits].argmin()])
            if self.cost[least] < self.best_cost:
                self.best, self.best_cost = self.choice[least].copy(), float(self.cost[least])


def _dense_use(csr: CSRProblem) -> np.ndarray:
    """Returns `[N, T, D]` what every strategy adds to the memory in use."""
    strategies = np.arange(int(csr.start[-1]))
    return memory_of_strategies(csr, strategies, np.ones(len(strategies)), strategies, len(strategies))


def _smooth_max(csr: CSRProblem, load: np.ndarray) -> np.ndarray:
    """Returns `[R]` norms of the loads, near their maxima but lower where fewer devices are busy."""
    most = np.maximum.reduceat(load, csr.load_first, axis=1)
    unit = np.where(most > 0, most, 1.0)
    shares = np.maximum(load / np.repeat(unit, group_sizes(csr), axis=1), 0.0)
    sums = np.add.reduceat(shares**_SMOOTH_MAX_NORM, csr.load_first, axis=1)
    return np.where(most > 0, most * sums ** (1 / _SMOOTH_MAX_NORM), most).sum(axis=1)


_FORESTS_PER_PARTITION = 4  # chosen by hand on the contest's instances, as all numbers here
# A node of this many times the mean degree mostly stays frozen: otherwise its neighbourhood would be the whole graph.
_HUB_DEGREE_RATIO = 4.0
_FROZEN_HUB_SHARE = 0.7
_TEMPERATURE_POWER = 3.0  # of a uniform number: most neighbourhoods are perturbed a little
_PRICE_RISE, _PRICE_FALL = 0.1, 0.02  # of the memory's prices after each move, as shares


class Partition(NamedTuple):
    """Neighbourhoods and the forests grown inside them.

    Attributes:
      label: `[V]` the neighbourhood of each node, -1 if frozen.
      num_neighbourhoods: labels are 0 to `num_neighbourhoods` - 1.
      edge: the directed edges whose source is in a neighbourhood.
      share: `[len(edge)]` 1/2 where the other direction is there too.
      node: the nodes in neighbourhoods, sorted by label; neighbourhood b has `node[first[b] : first[b + 1]]`.
      first: `[num_neighbourhoods + 1]`.
    """

    label: np.ndarray
    num_neighbourhoods: int
    forests: list[Forest]
    edge: np.ndarray
    share: np.ndarray
    node: np.ndarray
    first: np.ndarray


def split(csr: CSRProblem, rng: np.random.Generator, num_neighbourhoods: int, grow: Grow = grow_forest) -> Partition:
    """Grows neighbourhoods around random nodes, breadth first, and freezes what separates them."""
    label = _voronoi(csr, rng, num_neighbourhoods) if num_neighbourhoods > 1 else np.zeros(len(csr.sizes), np.int64)
    if num_neighbourhoods > 1:
        label = np.where(_inside(csr, rng, label), label, -1)
    node = np.flatnonzero(label >= 0)
    node = node[np.argsort(label[node], kind="stable")]
    names, label_of = np.unique(label[node], return_inverse=True)
    label = np.full(len(label), -1)
    label[node] = label_of
    edge = np.flatnonzero(label[csr.source] >= 0)
    share = np.where(label[csr.target[edge]] >= 0, 0.5, 1.0)
    forests = [grow(csr, rng.permutation(node)) for _ in range(_FORESTS_PER_PARTITION)]
    first = np.searchsorted(label[node], np.arange(len(names) + 1))
    return Partition(label, len(names), forests, edge, share, node, first)


def _voronoi(csr: CSRProblem, rng: np.random.Generator, num_neighbourhoods: int) -> np.ndarray:
    label = np.full(len(csr.sizes), -1)
    num_seeds = min(num_neighbourhoods, len(label))
    label[rng.choice(len(label), num_seeds, replace=False)] = np.arange(num_seeds)
    while True:
        edge = np.flatnonzero((label[csr.source] >= 0) & (label[csr.target] < 0))
        if not len(edge):
            break
        edge = rng.permutation(edge)
        label[csr.target[edge]] = label[csr.source[edge]]
    alone = np.flatnonzero(label < 0)
    label[alone] = num_neighbourhoods + np.arange(len(alone))
    return label


def _inside(csr: CSRProblem, rng: np.random.Generator, label: np.ndarray) -> np.ndarray:
    """Returns `[V]` which nodes stay where they are: greedily, those without neighbours inside another one."""
    degree = np.diff(csr.first)
    frozen = (degree > _HUB_DEGREE_RATIO * max(degree.mean(), 1.0)) & (rng.random(len(label)) < _FROZEN_HUB_SHARE)
    rank = rng.permutation(label.max() + 1)
    first, target, names = csr.first.tolist(), csr.target.tolist(), label.tolist()
    inside = [False] * len(names)
    for v in np.argsort(rank[label], kind="stable").tolist():
        if not frozen[v]:
            name = names[v]
            inside[v] = not any(inside[u] and names[u] != name for u in target[first[v] : first[v + 1]])
    return np.array(inside, bool)


def perturb(polish: Polish, partition: Partition, num_moves: int, temperature: float, spread: float) -> int:
    """Perturbs and polishes all neighbourhoods, and accepts those that together are cheaper and fit; returns how many.

    Args:
      polish: where the search is; its best feasible choice is where all neighbourhoods start.
      num_moves: of random forests.
      temperature: of the noise on costs, largest first and none in the last moves; each neighbourhood draws its own
        below it.
      spread: standard deviation of the logarithm of the factors on the price of memory, of neighbourhoods and of nodes.
    """
    csr, rng = polish.csr, polish.rng
    start = polish.choice = polish.best.copy()
    heat = temperature * rng.random(partition.num_neighbourhoods) ** _TEMPERATURE_POWER
    of_node = np.zeros(len(csr.sizes))
    of_node[partition.node] = heat[partition.label[partition.node]]
    noise = np.repeat(of_node, csr.sizes)
    # At one price equal layers would all change together; a neighbourhood or node that pays less changes before the
    # others.
    factors = np.exp(spread * rng.normal(size=len(csr.sizes)))
    if partition.num_neighbourhoods > 1:
        factors[partition.node] *= np.exp(spread * rng.normal(size=partition.num_neighbourhoods))[
            partition.label[partition.node]
        ]
    weight = np.repeat(factors, csr.sizes) if csr.base.size else 1.0
    for i in range(num_moves):
        cooling = max(1 - i / max(num_moves - 2, 1), 0.0)
        polish.move(partition.forests[rng.integers(len(partition.forests))], noise * cooling, weight)
        is_exceeded = polish.offer(polish.choice)
        polish.reprice(is_exceeded, _PRICE_RISE, _PRICE_FALL)
    return _accept(polish, partition, start, polish.choice)


def _accept(polish: Polish, partition: Partition, start: np.ndarray, target_choice: np.ndarray) -> int:
    """Takes over the neighbourhoods of a choice that are cheaper, and in a second try those that free memory cheaply.

    Returns:
      How many neighbourhoods were taken over in the last try that gave a better choice.
    """
    csr = polish.csr
    change = _change(csr, partition, start, target_choice, csr.cost)
    orders = [np.argsort(change)[: (change < 0).sum()]]
    if csr.base.size:
        at_prices = _change(csr, partition, start, target_choice, polish.costs())
        good = np.flatnonzero(at_prices < 0)
        frees = change[good] > at_prices[good]
        orders.append(good[np.lexsort((at_prices[good], ~frees))])
    num_accepted = 0
    for order in orders:
        current, memory, count = start.copy(), chosen_memory(csr, start), 0
        for b in order.tolist():
            nodes = partition.node[partition.first[b] : partition.first[b + 1]]
            nodes = nodes[target_choice[nodes] != start[nodes]]
            if len(nodes) and _takes(csr, memory, nodes, start[nodes], target_choice[nodes]):
                current[nodes] = target_choice[nodes]
                count += 1
        if count and polish.offers_better(current):
            num_accepted = count
    return num_accepted


def _change(
    csr: CSRProblem, partition: Partition, start: np.ndarray, target_choice: np.ndarray, cost: np.ndarray
) -> np.ndarray:
    """Returns `[num_neighbourhoods]` what each neighbourhood's change costs, with node costs `cost` `[N]`."""
    edge, node = partition.edge, partition.node
    source, target = csr.source[edge], csr.target[edge]
    row = csr.matrix[edge]
    before = csr.entries[row + start[source] * csr.sizes[target] + start[target]]
    after = csr.entries[row + target_choice[source] * csr.sizes[target] + target_choice[target]]
    change = np.bincount(partition.label[source], (after - before) * partition.share, partition.num_neighbourhoods)
    node_change = cost[csr.start[node] + target_choice[node]] - cost[csr.start[node] + start[node]]
    return change + np.bincount(partition.label[node], node_change, partition.num_neighbourhoods)


def _takes(csr: CSRProblem, memory: np.ndarray, nodes: np.ndarray, before: np.ndarray, after: np.ndarray) -> bool:
    """Adds the change of some nodes to the memory in use `[T, D]` if it fits; returns whether it did."""
    strategies = np.concatenate([csr.start[nodes] + after, csr.start[nodes] + before])
    times, change = memory_change(csr, strategies, np.repeat([1.0, -1.0], len(nodes)))
    fits = not ((change > 0) & (memory[times] + change > csr.limit)).any()
    if fits:
        memory[times] += change
    return fits
