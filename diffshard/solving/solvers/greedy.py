"""Greedy construction: node after node takes its cheapest strategy given those before it; then single-node descent.

An edge to a node that comes later counts with the least that it can cost. The first order begins with the nodes that
have the most at stake; further orders are shuffled around it.

Source: the construction and the descent of GRASP, Feo and Resende, "Greedy randomized adaptive search procedures"
(Journal of Global Optimization, 1995).
"""

from collections.abc import Iterator

import jax
import numpy as np

from cost.base import Problem
from diffshard.base import Proposal
from diffshard.solving.examples import chain
from diffshard.solving.flat import Flat, flatten, largest_loads, numpy_generator, ragged_positions, with_ceiling
from diffshard.solving.moves.single_nodes import Descent, spans

_NUM_ORDERS = 8  # without a time limit; chosen by hand
_ORDER_SPREAD = 1.0  # standard deviation of the logarithm of the factors on what is at stake; chosen by hand


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the result of each order, until the time is over or for a fixed number of orders; has no bound."""
    rng, flat = numpy_generator(key), with_ceiling(flatten(problem))
    stake, least_entry = spans(flat), least_entries(flat)
    num_done = 0
    while time_limit_s is not None or num_done < _NUM_ORDERS:  # the loop of `diffshard.solve` watches the time
        noise = np.exp(_ORDER_SPREAD * rng.normal(size=len(stake))) if num_done else 1.0
        order = np.argsort(-stake * noise, kind="stable")
        descent = Descent(flat, construct(flat, order, least_entry)[None])
        for _ in descent.repair(order):
            yield Proposal()
        yield Proposal(descent.choice[0])
        num_done += 1


def least_entries(flat: Flat) -> np.ndarray:
    """Returns for every row of every directed edge's matrix its least entry, one edge after the other."""
    rows, columns = flat.sizes[flat.source], flat.sizes[flat.target]
    if not len(rows):
        return np.zeros(0)
    width = np.repeat(columns, rows)
    return np.minimum.reduceat(flat.entries[ragged_positions(flat.matrix, rows * columns)], np.cumsum(width) - width)


def construct(flat: Flat, order: np.ndarray, least_entry: np.ndarray) -> np.ndarray:
    """Returns a choice `[V]` made in `order` `[V]`, which may exceed the memory.

    Args:
      flat: the problem.
      order: all nodes.
      least_entry: what `least_entries` returns.
    """
    rows = flat.sizes[flat.source]
    at = ragged_positions(flat.start[flat.source], rows)  # the strategy of each row
    price = flat.cost + np.bincount(at, least_entry, len(flat.cost))
    begin = np.cumsum(rows) - rows
    first, start, target = flat.first.tolist(), flat.start.tolist(), flat.target.tolist()
    sizes, reverse = flat.sizes.tolist(), flat.reverse.tolist()
    load = np.zeros(flat.load.shape[1])
    choice = np.zeros(len(sizes), np.int64)
    is_chosen = np.zeros(len(sizes), bool)
    for v in order.tolist():
        positions = slice(start[v], start[v + 1])
        node_price = price[positions]
        if len(load):
            node_price = node_price + largest_loads(flat, load + flat.load[positions])
        s = choice[v] = int(node_price.argmin())
        is_chosen[v] = True
        if len(load):
            load += flat.load[start[v] + s]
        for e in range(first[v], first[v + 1]):
            u = target[e]
            if not is_chosen[u]:  # the edge's real cost takes the place of the least one
                row = flat.matrix[e] + s * sizes[u]
                inward = begin[reverse[e]]
                price[start[u] : start[u + 1]] += (
                    flat.entries[row : row + sizes[u]] - least_entry[inward : inward + sizes[u]]
                )
    return choice


EXAMPLE = chain
