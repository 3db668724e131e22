"""Beam search: nodes are decided in an order that keeps few of them open, and the best partial choices go on.

A partial choice costs what is decided and the least that its edges to open nodes can cost. Of partial choices that
agree on all nodes which still have open neighbours only the best goes on, so without memory and loads a beam that is
wide enough is dynamic programming. The width quadruples from run to run; each result comes down by single-node moves.
Memory has prices, which narrow beams learn first, one after the other: they rise where the last result exceeded the
limit and fall elsewhere.

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
from diffshard.solving.examples import chain
from diffshard.solving.flat import (
    Flat,
    chosen_cost,
    chosen_memory,
    flatten,
    memory_price,
    numpy_generator,
    with_ceiling,
)
from diffshard.solving.moves.descent import Descent, varying_usages
from diffshard.solving.solvers.greedy import optimistic

_WIDTHS = 4, 256, 1 << 14
_LESSONS = 24
_GAIN = 10.0
_LAST_RATE = 0.03


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the result of each width, until the time is over or the last width is done; has no bound."""
    rng, flat = numpy_generator(key), with_ceiling(flatten(problem))
    order = narrow_order(flat)
    search = _Beam(flat, order, rng)
    lessons = _LESSONS if flat.base.size else 0
    widths = [_WIDTHS[0]] * lessons
    widths += [w for w in 4 ** np.arange(10) if _WIDTHS[0] <= w <= _WIDTHS[1 if time_limit_s is None else 2]]
    for run, width in enumerate(widths):
        for _ in search.run(int(width), 0.0 if run < lessons else 1.0):
            yield Proposal()
        search.reprice(_LAST_RATE ** (run / len(widths)))
        descent = Descent(flat, search.choice[None])
        yield Proposal(search.choice)
        for _ in descent.repaired(order[::-1]):
            yield Proposal()
        yield Proposal(descent.choice[0])


def narrow_order(flat: Flat) -> np.ndarray:
    """`[V]` the nodes, neighbours close to each other."""
    count = len(flat.sizes)
    graph = scipy.sparse.csr_array((np.ones(len(flat.source)), (flat.source, flat.target)), shape=(count, count))
    return np.asarray(reverse_cuthill_mckee(scipy.sparse.csr_matrix(graph), symmetric_mode=True), np.int64)


class _Partials(NamedTuple):
    """B partial choices, the best first.

    Attributes:
      open: decided nodes with undecided neighbours.
      held: `[len(open), B]` their strategies.
      name: `[B]` equal where all held strategies are: the exclusive or of their random numbers.
      cost: `[B]` without loads.
      load: `[B, D']`.
      used: `[B, T, D]` live memory; undecided nodes count with their least.
      excess: `[B]` memory above the limit, in units of the limit.
    """

    open: list[int]
    held: np.ndarray
    name: np.ndarray
    cost: np.ndarray
    load: np.ndarray
    used: np.ndarray
    excess: np.ndarray


class _Beam:
    """What all widths share, and the choice of the last run."""

    def __init__(self, flat: Flat, order: np.ndarray, rng: np.random.Generator):
        self._flat, self._order = flat, order
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        self._rank = rank
        self._hopeful = optimistic(flat)
        rows = flat.sizes[flat.source]
        self._begin = np.cumsum(rows) - rows
        self._numbers = rng.integers(1 << 62, size=len(flat.cost))
        last = rank.copy()
        np.maximum.at(last, flat.source, rank[flat.target])
        self._closing: list[set[int]] = [set() for _ in order]
        for v, step in enumerate(last.tolist()):
            self._closing[step].add(v)
        self._usages = varying_usages(flat)
        self._stake = 0.0
        self._memory = np.zeros(flat.base.shape)
        self._cost = flat.cost
        self.choice = np.zeros(len(order), np.int64)

    def run(self, width: int, strict: float = 0.0) -> Iterator[None]:
        """One pass over the nodes; sets `choice` at its end.

        Args:
          width: how many partial choices go on.
          strict: what a limit's worth too much memory at one time costs, in costs of the last result.
        """
        flat, none = self._flat, np.zeros(1)
        beam = _Partials(
            [],
            np.zeros((0, 1), np.int64),
            np.zeros(1, np.int64),
            none,
            none[:, None] * flat.load[:1],
            flat.base[None],
            none,
        )
        back = []
        for step, v in enumerate(self._order.tolist()):
            beam, parent, strategy = self._step(beam, v, self._closing[step], width, strict * self._stake)
            back.append((v, parent, strategy))
            yield
        at, self.choice = 0, np.zeros(len(self._order), np.int64)
        for v, parent, strategy in reversed(back):
            self.choice[v] = strategy[at]
            at = parent[at]
        self._stake = abs(chosen_cost(flat, self.choice))

    def reprice(self, rate: float) -> None:
        """The prices' answer to the choice of the last run."""
        flat = self._flat
        if flat.base.size:
            unit = np.maximum(flat.limit, 1e-30)
            over = np.clip(chosen_memory(flat, self.choice) / unit - 1, -0.1, 0.3)
            floor = 1e-4 * self._stake / unit
            price = np.maximum(self._memory, floor) * np.exp(_GAIN * rate * over)
            self._memory = np.where(price <= floor, 0.0, price)
            self._cost = flat.cost + memory_price(flat, self._memory)

    def _step(
        self, beam: _Partials, v: int, closing: set[int], width: int, weight: float
    ) -> tuple[_Partials, np.ndarray, np.ndarray]:
        """Decides a node: the partial choices that go on, which each comes from, and its strategy of the node."""
        flat = self._flat
        own = slice(flat.start[v], flat.start[v + 1])
        cost = beam.cost[:, None] + self._price(v, beam)
        excess = beam.excess[:, None] + self._excess(v, beam.used)
        load = beam.load[:, None] + flat.load[own]
        name = beam.name[:, None] ^ self._numbers[own]
        for row, u in enumerate(beam.open):
            if u in closing:
                name ^= self._numbers[flat.start[u] + beam.held[row]][:, None]
        if v in closing:
            name ^= self._numbers[own]
        felt = cost + load.max(axis=2, initial=0.0) + weight * excess
        kept = _best(felt.ravel(), name.ravel(), width)
        parent, strategy = np.divmod(kept, flat.sizes[v])
        staying = [row for row, u in enumerate(beam.open) if u not in closing]
        held, nodes = beam.held[staying][:, parent], [beam.open[row] for row in staying]
        if v not in closing:
            held, nodes = np.concatenate([held, strategy[None]]), [*nodes, v]
        used = beam.used[parent] if beam.used.size else np.repeat(beam.used[:1], len(parent), axis=0)
        for start, end, device, table in self._usages[v]:
            used[:, start:end, device] += table[strategy][:, None]
        survivors = _Partials(
            nodes, held, name.ravel()[kept], cost.ravel()[kept], load[parent, strategy], used, excess.ravel()[kept]
        )
        return survivors, parent, strategy

    def _price(self, v: int, beam: _Partials) -> np.ndarray:
        """`[B, S_v]` the node, its edges to decided nodes less what was hoped, and the least of those to open ones."""
        flat, size = self._flat, int(self._flat.sizes[v])
        row_of = {u: row for row, u in enumerate(beam.open)}
        price = np.repeat(self._cost[None, flat.start[v] : flat.start[v + 1]], len(beam.cost), axis=0)
        for e in range(flat.first[v], flat.first[v + 1]):
            u = int(flat.target[e])
            if u in row_of:
                held, back = beam.held[row_of[u]], int(flat.reverse[e])
                price += flat.entries[(flat.matrix[back] + held * size)[:, None] + np.arange(size)]
                price -= self._hopeful[self._begin[back] + held][:, None]
            else:
                price += self._hopeful[self._begin[e] : self._begin[e] + size]
        return price

    def _excess(self, v: int, used: np.ndarray) -> np.ndarray:
        """`[B, S_v]` what each strategy adds to the excess; usages of one node are looked at one by one."""
        total = np.zeros((len(used), int(self._flat.sizes[v])))
        for start, end, device, table in self._usages[v]:
            limit = float(self._flat.limit[device])
            room = used[:, start:end, device] - limit
            room = room[:, (room + table.max() > 0).any(axis=0)]
            for s, amount in enumerate(table):
                total[:, s] += (np.maximum(room + amount, 0.0) - np.maximum(room, 0.0)).sum(axis=1) / max(limit, 1.0)
        return total


def _best(felt: np.ndarray, name: np.ndarray, width: int) -> np.ndarray:
    """The `width` least of those that are the least of their name, sorted."""
    order = np.argsort(felt, kind="stable")
    _, first = np.unique(name[order], return_index=True)
    return order[np.sort(first)[:width]]


EXAMPLE = chain
