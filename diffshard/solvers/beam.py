"""Beam search: nodes in breadth-first order, the cheapest partial choices kept, as compilers search for layouts.

Partial choices that differ only in nodes without open edges are merged to the cheapest, so a chain is solved exactly
once the beam is as wide as two neighbours' strategies.

Source: Lowerre, "The HARPY speech recognition system" (1976).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import breadth_first_order

from cost.problem import Problem
from diffshard.flat import Flat, flatten, with_ceiling
from diffshard.solve import Proposal

_WIDTH = 32
_WIDEST = 1 << 14
_PENALTY = 10.0  # of the mean cost for each limit's worth of memory in excess


class _Beam(NamedTuple):
    choice: np.ndarray  # [B, V]
    cost: np.ndarray  # [B]
    load: np.ndarray  # [B, D]
    used: np.ndarray  # [B, T, D]


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the best of a beam, then of wider and wider ones while there is time; has no bound."""
    del key  # nothing is random
    flat = with_ceiling(flatten(problem))
    width = _WIDTH
    while True:
        yield from _search(flat, width)
        width *= 4
        if time_limit_s is None or width > _WIDEST:
            return


def _search(flat: Flat, width: int) -> Iterator[Proposal]:
    beam = _Beam(
        np.full((1, len(flat.sizes)), -1),
        np.zeros(1),
        np.zeros((1, flat.load.shape[1])),
        flat.base[None].copy(),
    )
    order = _breadth_first(flat)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    last = np.array([rank[flat.target[flat.first[v] : flat.first[v + 1]]].max(initial=-1) for v in range(len(order))])
    scale = max(np.abs(flat.cost).mean() if len(flat.cost) else 0.0, 1e-30)
    for i, v in enumerate(order.tolist()):
        beam = _kept(_extended(flat, beam, v), flat, np.flatnonzero((rank <= i) & (last > i)), width, scale)
        if i % 100 == 99:
            yield Proposal()
    yield Proposal(beam.choice[0])


def _breadth_first(flat: Flat) -> np.ndarray:
    count = len(flat.sizes)
    graph = scipy.sparse.csr_array((np.ones(len(flat.source)), (flat.source, flat.target)), shape=(count, count))
    order, seen = [], np.zeros(count, bool)
    for v in range(count):
        if not seen[v]:
            part = breadth_first_order(graph, v, return_predecessors=False)
            seen[part] = True
            order.append(part)
    return np.concatenate(order)


def _extended(flat: Flat, beam: _Beam, v: int) -> _Beam:
    size, width = int(flat.sizes[v]), len(beam.cost)
    own = slice(flat.start[v], flat.start[v + 1])
    cost = beam.cost[:, None] + flat.cost[own]
    for e in range(flat.first[v], flat.first[v + 1]):
        u = flat.target[e]
        if beam.choice[0, u] >= 0:
            at = flat.matrix[flat.reverse[e]] + beam.choice[:, u] * size
            cost += flat.entries[at[:, None] + np.arange(size)]
    choice = np.repeat(beam.choice, size, axis=0)
    choice[:, v] = np.tile(np.arange(size), width)
    load = (beam.load[:, None] + flat.load[own]).reshape(width * size, -1)
    used = np.repeat(beam.used, size, axis=0)
    if flat.base.size:
        devices = flat.base.shape[1]
        table = flat.usage[own].toarray().reshape(size, -1, devices)
        for k in np.flatnonzero(table.any(axis=(0, 2))):
            used[:, slice(*flat.interval[k])] += np.tile(table[:, k], (width, 1))[:, None]
    return _Beam(choice, cost.ravel(), load, used)


def _kept(beam: _Beam, flat: Flat, open_nodes: np.ndarray, width: int, scale: float) -> _Beam:
    """The cheapest, one for each choice of the nodes that later ones will meet."""
    over = (
        np.maximum(beam.used - flat.limit, 0) / np.maximum(flat.limit, 1e-30) if flat.base.size else np.zeros((1, 1, 1))
    )
    rank = beam.cost + beam.load.max(axis=1, initial=0.0) + _PENALTY * len(flat.sizes) * scale * over.sum(axis=(1, 2))
    order = np.argsort(rank, kind="stable")
    if not (flat.base.size or flat.load.shape[1]):  # these may still differ in what they leave for the others
        _, first = np.unique(beam.choice[order][:, open_nodes], axis=0, return_index=True)
        order = order[np.sort(first)]
    order = order[:width]
    return _Beam(*(part[order] for part in beam))
