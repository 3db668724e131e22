"""One node after the other takes what is cheapest given those before it; repeated from random orders.

Memory: a node takes the cheapest of what fits while the rest take their least, if anything does.
"""

from collections.abc import Iterator

import jax
import numpy as np

from cost.problem import Problem
from diffshard.flat import Flat, flatten, with_ceiling
from diffshard.solve import Proposal, seeded

_ORDERS = 20


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields a choice for the nodes' own order, then for random ones; has no bound."""
    rng, flat = seeded(key), with_ceiling(flatten(problem))
    order, count = np.arange(len(flat.sizes)), 0
    while count < _ORDERS or time_limit_s is not None:
        yield Proposal(_complete(flat, order))
        order, count = rng.permutation(len(flat.sizes)), count + 1


def _complete(flat: Flat, order: np.ndarray) -> np.ndarray:
    choice = np.full(len(flat.sizes), -1)
    room = flat.limit - flat.base
    load = np.zeros(flat.load.shape[1])
    for v in order.tolist():
        own = slice(flat.start[v], flat.start[v + 1])
        cost = flat.cost[own].copy()
        for e in range(flat.first[v], flat.first[v + 1]):
            u = flat.target[e]
            if choice[u] >= 0:
                at = flat.matrix[flat.reverse[e]] + choice[u] * flat.sizes[v]
                cost += flat.entries[at : at + flat.sizes[v]]
        if len(load):
            cost += (load + flat.load[own]).max(axis=1) - load.max()
        choice[v], room = _take(flat, v, cost, room)
        load = load + flat.load[flat.start[v] + choice[v]]
    return choice


def _take(flat: Flat, v: int, cost: np.ndarray, room: np.ndarray) -> tuple[int, np.ndarray]:
    """The cheapest strategy that fits into the room, or the one that exceeds it least; and the room that is left."""
    if not room.size:
        return int(cost.argmin()), room
    left = [room - _profile(flat, flat.start[v] + s) for s in range(flat.sizes[v])]
    short = np.array([np.maximum(-rest, 0).max() for rest in left])
    best = int(np.lexsort((cost, short))[0])
    return best, left[best]


def _profile(flat: Flat, row: int) -> np.ndarray:
    """`[T, D]` the memory that a strategy holds."""
    times, devices = flat.base.shape
    part = slice(flat.usage.indptr[row], flat.usage.indptr[row + 1])
    usage, device = np.divmod(flat.usage.indices[part], devices)
    held = np.zeros((times, devices))
    for k, d, amount in zip(usage, device, flat.usage.data[part], strict=True):
        held[slice(*flat.interval[k]), d] += amount
    return held
