"""Dynamic programming: a node's best cost depends on its neighbours only, so nodes can be eliminated one by one.

The node with the smallest table goes first; it is replaced by a table of its best cost for every combination of its
neighbours' strategies. On a chain or a tree the tables are the min-plus products of the matrices. It is exact on all
graphs that a few nodes take apart.

Memory limits and the largest load join all nodes, which tables cannot follow. So the mean load takes the place of the
largest, and the limit is dropped: the result is then a lower bound, and its choice is brought into the memory by
single-node moves. Where devices do equal work and the choice fits, it is the optimum.

Source: Bertelè and Brioschi, "Nonserial Dynamic Programming" (1972), chapter 2; Dechter, "Bucket elimination" (1999).
"""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from cost.base import Problem, edge_ends, load_groups, num_strategies, with_infinities
from cost.evaluation import chosen_costs
from diffshard.base import Proposal
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.examples import chain
from diffshard.solving.moves.single_nodes import Descent

MOST_TABLE_ENTRIES = 1 << 24
"""Entries of a table at most: 128 MiB."""
_ERROR_PER_TERM = 4 * np.finfo(float).eps  # of a sum, in parts of the sum of its terms' sizes


class _Table(NamedTuple):
    """Costs `[S_a, S_b, ...]` of nodes a < b < ..."""

    nodes: tuple[int, ...]
    cost: np.ndarray


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array | None = None) -> Iterator[Proposal]:
    """Yields the optimum with its proof; where more than edges joins nodes, a lower bound and a choice near it.

    Raises:
      ValueError: a table would have more than `MOST_TABLE_ENTRIES` entries.
    """
    del time_limit_s, key  # the loop stops it; nothing is random
    tables = _tables(problem)
    decisions: list[_Table] = []
    constant = 0.0
    for v in _order(problem):
        mine = tables[v]
        total = _sum(mine, problem)
        axis = total.nodes.index(v)
        rest = total.nodes[:axis] + total.nodes[axis + 1 :]
        best = total.cost.argmin(axis=axis)
        decisions.append(_Table((v, *rest), best.astype(np.int32)))
        least = total.cost.min(axis=axis)
        for table in mine:
            for u in table.nodes:
                tables[u] = [other for other in tables[u] if other is not table]
        if rest:
            rest_table = _Table(rest, least)
            for u in rest:
                tables[u].append(rest_table)
        else:
            constant += float(least)
        yield Proposal()
    choice = _trace_back(decisions, len(problem.node_cost))
    size = len(problem.node_cost) + len(problem.edge_cost)
    bound = constant - _ERROR_PER_TERM * size * _magnitude(problem, choice) if math.isfinite(constant) else -math.inf
    if math.isinf(constant):  # every choice holds something forbidden
        yield Proposal(choice, math.inf)
        return
    yield Proposal(choice, bound)
    csr = with_ceiling(to_csr(problem))
    if csr.load.shape[1] or csr.base.size:
        yield from Descent(csr, choice[None]).proposals(np.arange(len(choice)))


def _tables(problem: Problem) -> list[list[_Table]]:
    """Returns for each node the tables that it is in."""
    tables: list[list[_Table]] = []
    for v, cost in enumerate(problem.node_cost):
        node_cost = with_infinities(cost)
        if len(problem.load):
            load = np.asarray(problem.load[v], float)
            node_cost = node_cost + sum(load[:, group].mean(axis=1) for group in load_groups(problem))
        tables.append([_Table((v,), node_cost)])
    for (u, v), cost in zip(edge_ends(problem).tolist(), problem.edge_cost, strict=True):
        matrix = with_infinities(cost)
        table = _Table((u, v), matrix) if u < v else _Table((v, u), matrix.T)
        tables[u].append(table)
        tables[v].append(table)
    return tables


def _order(problem: Problem) -> list[int]:
    """Returns the nodes in the order of their elimination: always the one whose table is smallest at that moment."""
    sizes = num_strategies(problem).tolist()
    near: list[set[int]] = [set() for _ in sizes]
    for u, v in edge_ends(problem).tolist():
        near[u].add(v)
        near[v].add(u)

    def entries(v: int) -> int:
        return sizes[v] * math.prod(sizes[u] for u in near[v])

    heap = [(entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    order, is_eliminated = [], [False] * len(sizes)
    while heap:
        count, v = heapq.heappop(heap)
        if is_eliminated[v] or count != entries(v):
            continue
        if count > MOST_TABLE_ENTRIES:
            raise ValueError(
                "`solver` 'dynamic_programming' takes graphs that come apart at few nodes, such as chains and trees; "
                f"this one needs a table of {count:.3g} entries for node {v} and its neighbours, and at most "
                f"{MOST_TABLE_ENTRIES:,} are allowed. Take 'gradient'."
            )
        is_eliminated[v] = True
        order.append(v)
        for u in near[v]:
            near[u] |= near[v]
            near[u] -= {u, v}
        for u in near[v]:
            heapq.heappush(heap, (entries(u), u))
    return order


def _sum(tables: list[_Table], problem: Problem) -> _Table:
    """Returns the sum of tables, over all of their nodes."""
    nodes = tuple(sorted({v for table in tables for v in table.nodes}))
    cost = np.zeros([len(problem.node_cost[v]) for v in nodes])
    for table in tables:
        cost += table.cost.reshape([len(problem.node_cost[v]) if v in table.nodes else 1 for v in nodes])
    return _Table(nodes, cost)


def _trace_back(decisions: list[_Table], count: int) -> np.ndarray:
    """Returns `[V]` the choice: each node's best strategy, given those of the nodes eliminated after it."""
    choice = np.zeros(count, np.int64)
    for table in reversed(decisions):
        v, *rest = table.nodes
        choice[v] = table.cost[tuple(choice[rest])]
    return choice


def _magnitude(problem: Problem, choice: np.ndarray) -> float:
    """Returns the sum of the absolute values of a choice's terms."""
    nodes, edges, _ = (costs.astype(float) for costs in chosen_costs(problem, choice))
    loads = sum(float(np.abs(load[s]).mean()) for load, s in zip(problem.load, choice, strict=False))
    return float(np.abs(nodes).sum() + np.abs(edges).sum() + loads)


EXAMPLE = chain
