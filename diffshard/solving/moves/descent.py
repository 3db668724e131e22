"""Single-node descent: node after node takes its best strategy given all others, for many choices side by side.

Moves are priced exactly, largest load and memory included, and choices share the lookups that one node's move needs.
The descent minimises cost + weight · excess, where the excess is the memory above the limit, summed over times and
devices, in units of the limit. `repair` raises the weight until the excess is gone or nothing moves any more.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import scipy.sparse

from cost.memory import limit_unit
from diffshard.solving.flat import Flat, costs_without_load, excess_in_limits, largest_loads, ragged_positions

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

    def __init__(self, flat: Flat, choice: np.ndarray):
        self.flat, self.choice = flat, np.array(choice, np.int64)
        count = len(choice)
        self._near = [np.arange(a, b) for a, b in zip(flat.first[:-1], flat.first[1:], strict=True)]
        times, devices = flat.base.shape
        self._limit = np.broadcast_to(flat.limit, (devices,)) if times else np.zeros(0)
        self._unit = limit_unit(self._limit)
        self._usages = varying_usages(flat)
        # What one node takes of memory and of a device's time changes what all of these should do.
        self._is_coupled = np.array([bool(usages) for usages in self._usages], bool) | (flat.load.shape[1] > 0)
        self.memory = np.repeat(flat.base[None], count, axis=0)
        self.load = np.zeros((count, flat.load.shape[1]))
        for v in range(len(flat.sizes)):
            self._add(v, self.choice[:, v], 1.0)

    def cost(self) -> np.ndarray:
        """Returns `[R]` node, edge and load cost of the choices."""
        return costs_without_load(self.flat, self.choice) + largest_loads(self.flat, self.load)

    def excess(self) -> np.ndarray:
        """Returns `[R]` memory above the limit, in units of the limit."""
        if not self.memory.size:
            return np.zeros(len(self.choice))
        return excess_in_limits(self.flat, self.memory).sum(axis=(1, 2))

    def descend(self, order: np.ndarray, weight: np.ndarray | float = 0.0) -> Iterator[None]:
        """Passes over `order`, then over the nodes near a change, until nothing changes; yields every few milliseconds.

        Args:
          weight: cost of one unit of excess, common or `[R]`.
        """
        dirty, since = np.ones(len(self.flat.sizes), bool), 0
        for _ in range(_MOST_PASSES):
            reached_coupled_node = False
            for v in order[dirty[order]].tolist():
                if dirty[v] and self._improve(v, weight):
                    dirty[self.flat.target[self._near[v]]] = True
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

    def price(self, v: int, weight: np.ndarray | float) -> np.ndarray:
        """Returns `[R, S_v]` what each strategy of a node costs, given the rest, up to a constant for each choice."""
        flat = self.flat
        first, size = int(flat.start[v]), int(flat.sizes[v])
        strategies = np.arange(size)
        price = np.repeat(flat.cost[None, first : first + size], len(self.choice), axis=0)
        near = self._near[v]
        if len(near):
            inward = flat.reverse[near]  # the neighbour's strategies are the rows: v's lie one after the other
            at = flat.matrix[inward] + self.choice[:, flat.target[near]] * size
            price += flat.entries[at[:, :, None] + strategies].sum(axis=1)
        if flat.load.shape[1]:
            others = self.load - flat.load[first + self.choice[:, v]]
            price += largest_loads(flat, others[:, None] + flat.load[first : first + size])
        if self._usages[v]:
            price += np.asarray(weight)[..., None] * self._excess(v)
        return price

    def _improve(self, v: int, weight: np.ndarray | float) -> bool:
        if self.flat.sizes[v] == 1:
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
        if self.flat.load.shape[1]:
            self.load += sign * self.flat.load[self.flat.start[v] + strategy]

    def _excess(self, v: int) -> np.ndarray:
        """Returns `[R, S_v]` the excess in the node's intervals with each of its strategies."""
        total = np.zeros((len(self.choice), int(self.flat.sizes[v])))
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
        room = self.memory[:, start:end, device] - rows[:, None] - self._limit[device]
        tight = np.flatnonzero((room + table.max() > 0).any(axis=0))
        total = np.zeros((len(room), len(table)))
        block = max(1, _MOST_TEMPORARY_NUMBERS // total.size)
        for i in range(0, len(tight), block):
            above = room[:, None, tight[i : i + block]] + table[:, None]
            total += np.maximum(above, 0.0).sum(axis=2)
        return total / self._unit[device]


def varying_usages(flat: Flat) -> list[list[tuple[int, int, int, np.ndarray]]]:
    """Returns for each node its varying usages on devices with a limit as (start, end, device, `[S_v]`)."""
    usages_of: list[list[tuple[int, int, int, np.ndarray]]] = [[] for _ in flat.sizes]
    times, devices = flat.base.shape
    if not times:
        return usages_of
    columns = scipy.sparse.csc_array(flat.usage)
    indices, values, first = columns.indices, columns.data, columns.indptr
    limit = np.broadcast_to(flat.limit, (devices,))
    for column in range(len(first) - 1):
        rows = indices[first[column] : first[column + 1]]
        usage, device = divmod(column, devices)
        if not len(rows) or np.isinf(limit[device]):
            continue
        v = int(np.searchsorted(flat.start, rows[0], side="right")) - 1
        table = np.zeros(int(flat.sizes[v]))
        table[rows - flat.start[v]] = values[first[column] : first[column + 1]]
        start, end = flat.interval[usage].tolist()
        usages_of[v].append((start, end, device, table))
    return usages_of


def spans(flat: Flat) -> np.ndarray:
    """Returns `[V]` how much can be at stake in a node: the spread of its costs and those of its edges."""
    least = np.minimum.reduceat(flat.cost, flat.start[:-1])
    most = np.maximum.reduceat(flat.cost, flat.start[:-1])
    length = flat.sizes[flat.source] * flat.sizes[flat.target]
    spread = most - least
    if len(length):
        entries = flat.entries[ragged_positions(flat.matrix, length)]
        begin = np.cumsum(length) - length
        edge = np.maximum.reduceat(entries, begin) - np.minimum.reduceat(entries, begin)
        spread = spread + np.bincount(flat.source, edge, len(flat.sizes))
    return spread
