"""Greedy construction: node after node takes what is cheapest next to what is chosen, then single-node descent.

What is not chosen yet counts by the least that an edge to it can cost. The first order takes the nodes with the most at
stake first; further ones are shuffled around it.

Source: the construction and the descent of GRASP, Feo and Resende, "Greedy randomized adaptive search procedures"
(Journal of Global Optimization, 1995).
"""

from collections.abc import Iterator

import jax
import numpy as np

from cost.base import Problem
from diffshard.base import Proposal
from diffshard.solving.examples import chain
from diffshard.solving.flat import Flat, flatten, numpy_generator, ragged, with_ceiling
from diffshard.solving.moves.descent import Descent, spans

_ORDERS = 8
_SHUFFLE = 1.0  # standard deviation of the logarithm of the stakes


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the result of each order, until the time is over or for a fixed number of orders; has no bound."""
    rng, flat = numpy_generator(key), with_ceiling(flatten(problem))
    stake, hopeful = spans(flat), optimistic(flat)
    done = 0
    while time_limit_s is not None or done < _ORDERS:  # the loop of `diffshard.solve` watches the time
        noise = np.exp(_SHUFFLE * rng.normal(size=len(stake))) if done else 1.0
        order = np.argsort(-stake * noise, kind="stable")
        descent = Descent(flat, construct(flat, order, hopeful)[None])
        for _ in descent.repaired(order):
            yield Proposal()
        yield Proposal(descent.choice[0])
        done += 1


def optimistic(flat: Flat) -> np.ndarray:
    """For every row of every directed edge's matrix its least entry, one edge after the other."""
    rows, columns = flat.sizes[flat.source], flat.sizes[flat.target]
    if not len(rows):
        return np.zeros(0)
    width = np.repeat(columns, rows)
    return np.minimum.reduceat(flat.entries[ragged(flat.matrix, rows * columns)], np.cumsum(width) - width)


def construct(flat: Flat, order: np.ndarray, hopeful: np.ndarray) -> np.ndarray:
    """`[V]` a choice made in `order`; `hopeful` is what `optimistic` returns. Memory is left to what follows."""
    rows = flat.sizes[flat.source]
    at = ragged(flat.start[flat.source], rows)  # the strategy of each row
    price = flat.cost + np.bincount(at, hopeful, len(flat.cost))
    begin = np.cumsum(rows) - rows
    first, start, target = flat.first.tolist(), flat.start.tolist(), flat.target.tolist()
    sizes, reverse = flat.sizes.tolist(), flat.reverse.tolist()
    load = np.zeros(flat.load.shape[1])
    choice = np.zeros(len(sizes), np.int64)
    chosen = np.zeros(len(sizes), bool)
    for v in order.tolist():
        own = slice(start[v], start[v + 1])
        felt = price[own]
        if len(load):
            felt = felt + (load + flat.load[own]).max(axis=1)
        s = choice[v] = int(felt.argmin())
        chosen[v] = True
        if len(load):
            load += flat.load[start[v] + s]
        for e in range(first[v], first[v + 1]):
            u = target[e]
            if not chosen[u]:  # the edge's real cost takes the place of the hoped-for
                row = flat.matrix[e] + s * sizes[u]
                back = begin[reverse[e]]
                price[start[u] : start[u + 1]] += flat.entries[row : row + sizes[u]] - hopeful[back : back + sizes[u]]
    return choice


EXAMPLE = chain
