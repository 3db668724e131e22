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
from diffshard.solving.csr import CSRProblem, largest_loads, numpy_generator, ragged_positions, to_csr, with_ceiling
from diffshard.solving.examples import chain
from diffshard.solving.moves.single_nodes import Descent, spans

_NUM_ORDERS = 8  # without a time limit; chosen by hand
_ORDER_SPREAD = 1.0  # standard deviation of the logarithm of the factors on what is at stake; chosen by hand


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the result of each order, until the time is over or for a fixed number of orders; has no bound."""
    rng, csr = numpy_generator(key), with_ceiling(to_csr(problem))
    stake, least_entry = spans(csr), least_entries(csr)
    num_done = 0
    while time_limit_s is not None or num_done < _NUM_ORDERS:  # the loop of `diffshard.solve` watches the time
        noise = np.exp(_ORDER_SPREAD * rng.normal(size=len(stake))) if num_done else 1.0
        order = np.argsort(-stake * noise, kind="stable")
        yield from Descent(csr, construct(csr, order, least_entry)[None]).proposals(order)
        num_done += 1


def least_entries(csr: CSRProblem) -> np.ndarray:
    """Returns for every row of every directed edge's matrix its least entry, one edge after the other."""
    rows, columns = csr.sizes[csr.source], csr.sizes[csr.target]
    if not len(rows):
        return np.zeros(0)
    width = np.repeat(columns, rows)
    return np.minimum.reduceat(csr.entries[ragged_positions(csr.matrix, rows * columns)], np.cumsum(width) - width)


def construct(csr: CSRProblem, order: np.ndarray, least_entry: np.ndarray) -> np.ndarray:
    """Returns a choice `[V]` made in `order` `[V]`, which may exceed the memory.

    Args:
      csr: the problem.
      order: all nodes.
      least_entry: what `least_entries` returns.
    """
    rows = csr.sizes[csr.source]
    at = ragged_positions(csr.start[csr.source], rows)  # the strategy of each row
    price = csr.cost + np.bincount(at, least_entry, len(csr.cost))
    begin = np.cumsum(rows) - rows
    first, start, target = csr.first.tolist(), csr.start.tolist(), csr.target.tolist()
    sizes, reverse = csr.sizes.tolist(), csr.reverse.tolist()
    load = np.zeros(csr.load.shape[1])
    choice = np.zeros(len(sizes), np.int64)
    is_chosen = np.zeros(len(sizes), bool)
    for v in order.tolist():
        positions = slice(start[v], start[v + 1])
        node_price = price[positions]
        if len(load):
            node_price = node_price + largest_loads(csr, load + csr.load[positions])
        s = choice[v] = int(node_price.argmin())
        is_chosen[v] = True
        if len(load):
            load += csr.load[start[v] + s]
        for e in range(first[v], first[v + 1]):
            u = target[e]
            if not is_chosen[u]:  # the edge's real cost takes the place of the least one
                row = csr.matrix[e] + s * sizes[u]
                inward = begin[reverse[e]]
                price[start[u] : start[u + 1]] += (
                    csr.entries[row : row + sizes[u]] - least_entry[inward : inward + sizes[u]]
                )
    return choice


EXAMPLE = chain
