"""Moves of one node or two: descents at exact prices, and moves that level loads.

The descent goes node after node, each to its best strategy given all others, for many choices side by side, which share
the lookups that one node's move needs. It minimises cost + weight · excess, where the excess is the memory above the
limit, summed over times and devices, in units of the limit. `repair` raises the weight until the excess is gone or
nothing moves any more.

The largest load is what all nodes share, and a single change that lowers it is soon not left: what helps then is to
exchange two nodes' devices. `Balance` minimises a norm of the loads in place of the largest one, because it also falls
where one of two equally busy devices is relieved.

Letters for sizes: V nodes, N strategies of all nodes one after the other, L loads, M numbers of memory (times by
devices).
"""

import itertools
from collections.abc import Iterator

import numpy as np
import scipy.sparse

from cost.memory import limit_unit
from diffshard.base import Proposal
from diffshard.solving.csr import (
    CSRProblem,
    chosen_memory,
    costs_without_load,
    excess_in_limits,
    group_sizes,
    largest_loads,
    memory_of_strategies,
    ragged_positions,
)
from diffshard.solving.moves.tree_moves import ChosenRows

_NODES_PER_YIELD = 256  # a few milliseconds; chosen by hand
_MOST_PASSES = 50  # over the nodes near a change; few problems need ten; chosen by hand
_WEIGHT_FACTOR = 32.0  # from one weight of the excess to the next; chosen by hand
_MOST_WEIGHTS = 8  # the last is 10^10 times the cost of the choice; chosen by hand
_MOST_TEMPORARY_NUMBERS = 1 << 22  # 32 MiB in one temporary array; chosen by hand


class Descent:
    """R choices under descent.

    Attributes:
      choice: `[R, V]`.
      memory: `[R, T, D]` live memory.
      load: `[R, L]` of each choice.
    """

    def __init__(self, csr: CSRProblem, choice: np.ndarray):
        self.csr, self.choice = csr, np.array(choice, np.int64)
        count = len(choice)
        self._near = [np.arange(a, b) for a, b in zip(csr.first[:-1], csr.first[1:], strict=True)]
        self._unit = limit_unit(csr.limit)
        self._usages = varying_usages(csr)
        # What one node takes of memory and of a device's time changes what all of these should do.
        self._is_coupled = np.array([bool(usages) for usages in self._usages], bool) | (csr.load.shape[1] > 0)
        self.memory = np.repeat(csr.base[None], count, axis=0)
        self.load = np.zeros((count, csr.load.shape[1]))
        for v in range(len(csr.sizes)):
            self._add(v, self.choice[:, v], 1.0)

    def cost(self) -> np.ndarray:
        """Returns `[R]` node, edge and load cost of the choices."""
        return costs_without_load(self.csr, self.choice) + largest_loads(self.csr, self.load)

    def excess(self) -> np.ndarray:
        """Returns `[R]` memory above the limit, in units of the limit."""
        return excess_in_limits(self.csr, self.memory).sum(axis=(1, 2))

    def descend(self, order: np.ndarray, weight: np.ndarray | float = 0.0) -> Iterator[None]:
        """Passes over `order`, then over the nodes near a change, until nothing changes; yields every few milliseconds.

        Args:
          weight: cost of one unit of excess, common or `[R]`.
        """
        dirty, since = np.ones(len(self.csr.sizes), bool), 0
        for _ in range(_MOST_PASSES):
            reached_coupled_node = False
            for v in order[dirty[order]].tolist():
                if dirty[v] and self._improve(v, weight):
                    dirty[self.csr.target[self._near[v]]] = True
                    reached_coupled_node |= bool(self._is_coupled[v])
                dirty[v] = False
                since += 1
                if since % _NODES_PER_YIELD == 0:
                    yield
            if reached_coupled_node:
                dirty |= self._is_coupled
            if not dirty[order].any():
                return

    def repair(self, order: np.ndarray) -> Iterator[None]:
        """Descends at higher and higher weights, as long as some choice exceeds the memory."""
        weight = np.maximum(np.abs(self.cost()), 1e-30)
        for _ in range(_MOST_WEIGHTS):
            yield from self.descend(order, weight)
            over = self.excess() > 0
            if not over.any():
                return
            weight = np.where(over, weight * _WEIGHT_FACTOR, weight)

    def proposals(self, order: np.ndarray) -> Iterator[Proposal]:
        """Repairs the choices, and then yields the one of least excess and, of these, of least cost."""
        for _ in self.repair(order):
            yield Proposal()
        yield Proposal(self.choice[np.lexsort((self.cost(), self.excess()))[0]])

    def price(self, v: int, weight: np.ndarray | float) -> np.ndarray:
        """Returns `[R, S_v]` what each strategy of a node costs, given the rest, up to a constant for each choice."""
        csr = self.csr
        first, size = int(csr.start[v]), int(csr.sizes[v])
        strategies = np.arange(size)
        price = np.repeat(csr.cost[None, first : first + size], len(self.choice), axis=0)
        near = self._near[v]
        if len(near):
            inward = csr.reverse[near]  # the neighbour's strategies are the rows: v's lie one after the other
            at = csr.matrix[inward] + self.choice[:, csr.target[near]] * size
            price += csr.entries[at[:, :, None] + strategies].sum(axis=1)
        if csr.load.shape[1]:
            others = self.load - csr.load[first + self.choice[:, v]]
            price += largest_loads(csr, others[:, None] + csr.load[first : first + size])
        if self._usages[v]:
            price += np.asarray(weight)[..., None] * self._excess(v)
        return price

    def _improve(self, v: int, weight: np.ndarray | float) -> bool:
        if self.csr.sizes[v] == 1:
            return False
        price, rows = self.price(v, weight), np.arange(len(self.choice))
        now = self.choice[:, v]
        best = price.argmin(axis=1)
        least, current = price[rows, best], price[rows, now]
        better = least < current - 1e-12 * np.abs(current)  # rounding must not move a node to and fro
        if not better.any():
            return False
        self._add(v, now, -1.0)
        self.choice[:, v] = np.where(better, best, now)
        self._add(v, self.choice[:, v], 1.0)
        return True

    def _add(self, v: int, strategy: np.ndarray, sign: float) -> None:
        """Adds or takes away what a node uses with a strategy of each choice."""
        for start, end, device, table in self._usages[v]:
            self.memory[:, start:end, device] += sign * table[strategy][:, None]
        if self.csr.load.shape[1]:
            self.load += sign * self.csr.load[self.csr.start[v] + strategy]

    def _excess(self, v: int) -> np.ndarray:
        """Returns `[R, S_v]` the excess in the node's intervals with each of its strategies."""
        total = np.zeros((len(self.choice), int(self.csr.sizes[v])))
        usages = self._usages[v]
        # Usages of one node that live at the same time on a device are priced together.
        for device in sorted({device for _, _, device, _ in usages}):
            mine = [(start, end, table) for start, end, on, table in usages if on == device]
            cuts = sorted({time for start, end, _ in mine for time in (start, end)})
            for start, end in itertools.pairwise(cuts):
                live = [table for a, b, table in mine if a <= start and end <= b]
                if live:
                    total += self._excess_between(v, start, end, device, np.sum(live, axis=0))
        return total

    def _excess_between(self, v: int, start: int, end: int, device: int, table: np.ndarray) -> np.ndarray:
        rows = table[self.choice[:, v]]
        room = self.memory[:, start:end, device] - rows[:, None] - self.csr.limit[device]
        tight = np.flatnonzero((room + table.max() > 0).any(axis=0))
        total = np.zeros((len(room), len(table)))
        block = max(1, _MOST_TEMPORARY_NUMBERS // total.size)
        for i in range(0, len(tight), block):
            above = room[:, None, tight[i : i + block]] + table[:, None]
            total += np.maximum(above, 0.0).sum(axis=2)
        return total / self._unit[device]


def varying_usages(csr: CSRProblem) -> list[list[tuple[int, int, int, np.ndarray]]]:
    """Returns for each node its varying usages on devices with a limit as (start, end, device, `[S_v]`)."""
    usages_of: list[list[tuple[int, int, int, np.ndarray]]] = [[] for _ in csr.sizes]
    times, devices = csr.base.shape
    if not times:
        return usages_of
    columns = scipy.sparse.csc_array(csr.usage)
    indices, values, first = columns.indices, columns.data, columns.indptr
    for column in range(len(first) - 1):
        rows = indices[first[column] : first[column + 1]]
        usage, device = divmod(column, devices)
        if not len(rows) or np.isinf(csr.limit[device]):
            continue
        v = int(np.searchsorted(csr.start, rows[0], side="right")) - 1
        table = np.zeros(int(csr.sizes[v]))
        table[rows - csr.start[v]] = values[first[column] : first[column + 1]]
        start, end = csr.interval[usage].tolist()
        usages_of[v].append((start, end, device, table))
    return usages_of


def spans(csr: CSRProblem) -> np.ndarray:
    """Returns `[V]` how much can be at stake in a node: the spread of its costs and those of its edges."""
    least = np.minimum.reduceat(csr.cost, csr.start[:-1])
    most = np.maximum.reduceat(csr.cost, csr.start[:-1])
    length = csr.sizes[csr.source] * csr.sizes[csr.target]
    spread = most - least
    if len(length):
        entries = csr.entries[ragged_positions(csr.matrix, length)]
        begin = np.cumsum(length) - length
        edge = np.maximum.reduceat(entries, begin) - np.minimum.reduceat(entries, begin)
        spread = spread + np.bincount(csr.source, edge, len(csr.sizes))
    return spread


_MOST_PAIR_NUMBERS = 1 << 15
"""Loads and memory of the pairs that are looked at together: a random part of all pairs, in about a millisecond. Ten
times as many close little more of the gap and take five times as long, on tasks of 30 to 50 embedding tables."""
_EXCESS_PENALTY = 1.0  # of the whole cost, for memory of a limit above the limit; as much as a step may gain in all
_LEAST_GAIN = 1e-9  # relative; less is rounding


class Balance:
    """A choice whose loads are levelled.

    Attributes:
      choice: `[V]`.
    """

    def __init__(self, csr: CSRProblem, rng: np.random.Generator):
        self._csr, self._rng = csr, rng
        self._edges = ChosenRows(csr)
        strategies = np.arange(int(csr.start[-1]))
        memory = memory_of_strategies(csr, strategies, np.ones(len(strategies)), strategies, len(strategies))
        limit = np.broadcast_to(csr.limit, csr.base.shape).ravel()
        self._is_limited = np.flatnonzero(np.isfinite(limit))
        self._limit = limit[self._is_limited]
        self._use = memory.reshape(len(strategies), -1)[:, self._is_limited]  # [N, M]
        self._node = np.repeat(np.arange(len(csr.sizes)), csr.sizes)
        self._squarings: int | None = None
        self.choice = np.zeros(len(csr.sizes), np.int64)

    def begin(self, choice: np.ndarray) -> None:
        """Goes on from a choice `[V]`."""
        csr = self._csr
        self.choice = choice.copy()
        self._load = csr.load[csr.start[:-1] + choice].sum(axis=0)
        self._memory = chosen_memory(csr, choice).ravel()[self._is_limited]
        self._costs = csr.cost + self._edges(choice)

    def begin_greedily(self, squarings: int | None) -> None:
        """Begins at a choice made node by node, from those that cannot but load a device most to the others."""
        csr, num_nodes = self._csr, len(self._csr.sizes)
        least = np.minimum.reduceat(largest_loads(csr, csr.load), csr.start[:-1])
        self.begin(np.zeros(num_nodes, np.int64))
        self._squarings = squarings
        self._load, self._memory = np.zeros(csr.load.shape[1]), csr.base.ravel()[self._is_limited]
        for v in np.argsort(-least, kind="stable").tolist():
            rows = np.arange(int(csr.start[v]), int(csr.start[v + 1]))
            best = int(
                np.argmin(self._value(self._load + csr.load[rows], self._memory + self._use[rows], self._costs[rows]))
            )
            self.choice[v] = best
            self._load = self._load + csr.load[rows[best]]
            self._memory = self._memory + self._use[rows[best]]
            self._costs = csr.cost + self._edges(self.choice)
        self.begin(self.choice)

    def descend(self, squarings: int | None, most_pairs: int) -> bool:
        """Makes the best single change, or else the best change of some pair; returns whether there was one.

        Args:
          squarings: the norm of the loads is the 2^squarings-norm; None takes the largest load itself.
          most_pairs: nodes, drawn at random, that are changed together with another one.
        """
        self._squarings = squarings
        nodes = self._rng.permutation(self._movable())[:most_pairs]
        return self._change_one() or any(self._change_two(v) for v in nodes)

    def kick(self, num_nodes: int) -> None:
        """Gives a few random nodes random strategies."""
        movable = self._movable()
        nodes = self._rng.choice(movable, size=min(num_nodes, len(movable)), replace=False)
        choice = self.choice.copy()
        choice[nodes] = self._rng.integers(self._csr.sizes[nodes])
        self.begin(choice)

    def _movable(self) -> np.ndarray:
        return np.flatnonzero(self._csr.sizes > 1)

    def _value(self, load: np.ndarray, memory: np.ndarray, cost: np.ndarray | float) -> np.ndarray:
        """Returns the scores of choices, `[...]`, from loads `[..., L]`, memory `[..., M]` and other costs."""
        value = _norm_of(self._csr, load, self._squarings) + cost
        if not len(self._limit):
            return value
        excess = np.maximum(memory - self._limit, 0.0) @ (1.0 / np.maximum(self._limit, 1e-300))
        return value + _EXCESS_PENALTY * excess * (np.abs(value) + 1e-300)

    def _now(self) -> float:
        return float(self._value(self._load, self._memory, 0.0))

    def _changes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the changes by strategies `[n]` of loads `[n, L]`, memory `[n, M]` and other costs `[n]`."""
        old = (self._csr.start[:-1] + self.choice)[self._node[rows]]
        load, use, cost = self._csr.load, self._use, self._costs
        return load[rows] - load[old], use[rows] - use[old], cost[rows] - cost[old]

    def _change_one(self) -> bool:
        rows = np.arange(int(self._csr.start[-1]))
        load, memory, cost = self._changes(rows)
        values = self._value(self._load + load, self._memory + memory, cost)
        best = int(values.argmin())
        return self._take([best], float(values[best]))

    def _change_two(self, v: int) -> bool:
        """Makes the best change of node v together with one other node that no edge joins to it."""
        csr = self._csr
        neighbours = csr.target[csr.first[v] : csr.first[v + 1]]
        own = np.arange(csr.start[v], csr.start[v + 1])
        others = np.flatnonzero(~np.isin(self._node, [v, *neighbours]) & (csr.sizes > 1)[self._node])
        width = csr.load.shape[1] + len(self._limit)
        most = max(_MOST_PAIR_NUMBERS // width, 1)
        if len(own) * len(others) > most:
            own = self._rng.choice(own, size=min(len(own), max(int(most**0.5) // 2, 1)), replace=False)
            others = self._rng.choice(others, size=min(len(others), max(most // len(own), 1)), replace=False)
        if not len(others):
            return False
        load, memory, cost = self._changes(own)
        other_load, other_memory, other_cost = self._changes(others)
        values = self._value(
            self._load + load[:, None] + other_load,
            self._memory + memory[:, None] + other_memory,
            cost[:, None] + other_cost,
        )
        a, b = np.unravel_index(values.argmin(), values.shape)
        return self._take([int(own[a]), int(others[b])], float(values[a, b]))

    def _take(self, rows: list[int], value: float) -> bool:
        """Makes a change if it lowers the value."""
        now = self._now()
        if not value < now - _LEAST_GAIN * abs(now):
            return False
        choice = self.choice.copy()
        for row in rows:
            choice[self._node[row]] = row - self._csr.start[self._node[row]]
        self.begin(choice)
        return True


def _norm_of(csr: CSRProblem, load: np.ndarray, squarings: int | None) -> np.ndarray:
    """Sums the 2^squarings-norms of each group of loads `[..., L]`, or the largest ones for None."""
    if squarings is None:
        return largest_loads(csr, load)
    most = np.maximum.reduceat(load, csr.load_first, axis=-1)
    powers = np.maximum(load, 0.0) / np.repeat(np.maximum(most, 1e-300), group_sizes(csr), axis=-1)
    for _ in range(squarings):
        powers *= powers
    sums = np.add.reduceat(powers, csr.load_first, axis=-1)
    return np.where(most > 0, most * sums ** (0.5**squarings), most).sum(axis=-1)
