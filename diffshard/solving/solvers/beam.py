"""Beam search: nodes are decided one after the other, and after each only the best partial choices go on.

A decided node is open while it has undecided neighbours; the order of the nodes keeps few of them open. A partial
choice costs what is decided and the least that its edges to undecided nodes can cost. Among partial choices that agree
on all open nodes only the best goes on, so without memory and loads a beam that is wide enough is dynamic programming.
The width quadruples from run to run, and each result comes down by single-node moves. Memory has prices, which narrow
beams learn in the first runs: prices rise where the last result exceeded the limit and fall elsewhere.

Source: Lowerre, "The HARPY speech recognition system" (1976); the order is that of Cuthill and McKee, "Reducing the
bandwidth of sparse symmetric matrices" (1969).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import reverse_cuthill_mckee

from cost.base import Problem
from diffshard.base import Proposal
from diffshard.solving.csr import (
    CSRProblem,
    chosen_cost,
    chosen_memory,
    largest_loads,
    memory_price,
    numpy_generator,
    to_csr,
    with_ceiling,
)
from diffshard.solving.dual.ascent import step_memory_prices
from diffshard.solving.examples import chain
from diffshard.solving.moves.single_nodes import Descent, varying_usages
from diffshard.solving.solvers.greedy import least_entries

_FIRST_WIDTH = 4  # partial choices; chosen by hand on generated layers, as all numbers here
_LAST_WIDTH = 256  # without a time limit
_LAST_WIDTH_LIMITED = 1 << 14  # with one
_PRICE_RUNS = 24  # of the first width, in which the prices of memory are learned
_PRICE_GAIN = 10.0  # of the logarithm of a price, for each limit's worth of excess
_LEAST_PRICE = 1e-4  # of a whole limit, in parts of the cost: lower prices are zero
_LAST_RATE = 0.03  # of the price steps at the end, where the first ones have rate 1


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the result of each width, until the time is over or the last width is done; has no bound."""
    rng, csr = numpy_generator(key), with_ceiling(to_csr(problem))
    order = narrow_order(csr)
    search = _Beam(csr, order, rng)
    price_runs = _PRICE_RUNS if csr.base.size else 0
    last_width = _LAST_WIDTH if time_limit_s is None else _LAST_WIDTH_LIMITED
    widths = [_FIRST_WIDTH] * price_runs + [w for w in 4 ** np.arange(10) if _FIRST_WIDTH <= w <= last_width]
    for run, width in enumerate(widths):
        for _ in search.run(int(width), 0.0 if run < price_runs else 1.0):
            yield Proposal()
        search.reprice(_LAST_RATE ** (run / len(widths)))
        yield Proposal(search.choice)
        yield from Descent(csr, search.choice[None]).proposals(order[::-1])


def narrow_order(csr: CSRProblem) -> np.ndarray:
    """Returns `[V]` the nodes in an order that puts neighbours close to each other."""
    count = len(csr.sizes)
    graph = scipy.sparse.csr_array((np.ones(len(csr.source)), (csr.source, csr.target)), shape=(count, count))
    return np.asarray(reverse_cuthill_mckee(scipy.sparse.csr_matrix(graph), symmetric_mode=True), np.int64)


class _Partials(NamedTuple):
    """B partial choices, the best first.

    Attributes:
      strategy: `[len(open), B]` the strategies of the open nodes.
      digest: `[B]` equal where all strategies of open nodes are: the exclusive or of their random numbers.
      cost: `[B]` without loads.
      load: `[B, D']`.
      memory: `[B, T, D]` live memory; undecided nodes count with their least.
      excess: `[B]` memory above the limit, in units of the limit.
    """

    open: list[int]
    strategy: np.ndarray
    digest: np.ndarray
    cost: np.ndarray
    load: np.ndarray
    memory: np.ndarray
    excess: np.ndarray


class _Beam:
    """The state that all widths share, and the choice of the last run."""

    def __init__(self, csr: CSRProblem, order: np.ndarray, rng: np.random.Generator):
        self._csr, self._order = csr, order
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        self._least_entry = least_entries(csr)
        rows = csr.sizes[csr.source]
        self._begin = np.cumsum(rows) - rows
        self._numbers = rng.integers(1 << 62, size=len(csr.cost))
        last = rank.copy()
        np.maximum.at(last, csr.source, rank[csr.target])
        self._closing: list[set[int]] = [set() for _ in order]
        for v, step in enumerate(last.tolist()):
            self._closing[step].add(v)
        self._usages = varying_usages(csr)
        self._cost_size = 0.0
        self._memory_price = np.zeros(csr.base.shape)
        self._cost = csr.cost
        self.choice = np.zeros(len(order), np.int64)

    def run(self, width: int, excess_weight: float = 0.0) -> Iterator[None]:
        """Makes one pass over the nodes; sets `choice` at its end.

        Args:
          excess_weight: the cost of a limit's worth of memory in excess at one time, in costs of the last result.
        """
        csr, none = self._csr, np.zeros(1)
        beam = _Partials(
            [],
            np.zeros((0, 1), np.int64),
            np.zeros(1, np.int64),
            none,
            none[:, None] * csr.load[:1],
            csr.base[None],
            none,
        )
        steps = []
        for step, v in enumerate(self._order.tolist()):
            beam, parent, strategy = self._step(beam, v, self._closing[step], width, excess_weight * self._cost_size)
            steps.append((v, parent, strategy))
            yield
        partial, self.choice = 0, np.zeros(len(self._order), np.int64)
        for v, parent, strategy in reversed(steps):
            self.choice[v] = strategy[partial]
            partial = parent[partial]
        self._cost_size = abs(float(chosen_cost(csr, self.choice)))

    def reprice(self, rate: float) -> None:
        """Raises the prices of memory where the choice of the last run exceeds the limit, and lowers them elsewhere."""
        csr = self._csr
        if csr.base.size:
            unit = np.maximum(csr.limit, 1e-30)
            excess = chosen_memory(csr, self.choice) / unit - 1
            least = _LEAST_PRICE * self._cost_size / unit
            self._memory_price = step_memory_prices(self._memory_price, excess, least, _PRICE_GAIN * rate)
            self._cost = csr.cost + memory_price(csr, self._memory_price)

    def _step(
        self, beam: _Partials, v: int, closing: set[int], width: int, weight: float
    ) -> tuple[_Partials, np.ndarray, np.ndarray]:
        """Decides a node; returns the partial choices that go on, the one that each comes from, and its strategy."""
        csr = self._csr
        positions = slice(csr.start[v], csr.start[v + 1])
        cost = beam.cost[:, None] + self._price(v, beam)
        excess = beam.excess[:, None] + self._excess(v, beam.memory)
        load = beam.load[:, None] + csr.load[positions]
        digest = beam.digest[:, None] ^ self._numbers[positions]
        for row, u in enumerate(beam.open):
            if u in closing:
                digest ^= self._numbers[csr.start[u] + beam.strategy[row]][:, None]
        if v in closing:
            digest ^= self._numbers[positions]
        priority = cost + largest_loads(csr, load) + weight * excess
        best = _best(priority.ravel(), digest.ravel(), width)
        parent, strategy = np.divmod(best, csr.sizes[v])
        staying = [row for row, u in enumerate(beam.open) if u not in closing]
        open_strategy, nodes = beam.strategy[staying][:, parent], [beam.open[row] for row in staying]
        if v not in closing:
            open_strategy, nodes = np.concatenate([open_strategy, strategy[None]]), [*nodes, v]
        memory = beam.memory[parent]
        for start, end, device, table in self._usages[v]:
            memory[:, start:end, device] += table[strategy][:, None]
        survivors = _Partials(
            nodes,
            open_strategy,
            digest.ravel()[best],
            cost.ravel()[best],
            load[parent, strategy],
            memory,
            excess.ravel()[best],
        )
        return survivors, parent, strategy

    def _price(self, v: int, beam: _Partials) -> np.ndarray:
        """Returns `[B, S_v]` what each strategy adds: its cost, edges to decided nodes, and the least of other edges.

        The least of an edge to a decided node was added when that node was decided, so it is taken away again.
        """
        csr, size = self._csr, int(self._csr.sizes[v])
        row_of = {u: row for row, u in enumerate(beam.open)}
        price = np.repeat(self._cost[None, csr.start[v] : csr.start[v + 1]], len(beam.cost), axis=0)
        for e in range(csr.first[v], csr.first[v + 1]):
            u = int(csr.target[e])
            if u in row_of:
                neighbour_strategy, inward = beam.strategy[row_of[u]], int(csr.reverse[e])
                price += csr.entries[(csr.matrix[inward] + neighbour_strategy * size)[:, None] + np.arange(size)]
                price -= self._least_entry[self._begin[inward] + neighbour_strategy][:, None]
            else:
                price += self._least_entry[self._begin[e] : self._begin[e] + size]
        return price

    def _excess(self, v: int, memory: np.ndarray) -> np.ndarray:
        """Returns `[B, S_v]` what each strategy adds to the excess, one usage of the node after the other."""
        total = np.zeros((len(memory), int(self._csr.sizes[v])))
        for start, end, device, table in self._usages[v]:
            limit = float(self._csr.limit[device])
            room = memory[:, start:end, device] - limit
            room = room[:, (room + table.max() > 0).any(axis=0)]
            for s, amount in enumerate(table):
                total[:, s] += (np.maximum(room + amount, 0.0) - np.maximum(room, 0.0)).sum(axis=1) / max(limit, 1.0)
        return total


def _best(priority: np.ndarray, digest: np.ndarray, width: int) -> np.ndarray:
    """Returns the positions of the `width` least priorities, only the least of each digest, in their order."""
    order = np.argsort(priority, kind="stable")
    _, first = np.unique(digest[order], return_index=True)
    return order[np.sort(first)[:width]]


EXAMPLE = chain
