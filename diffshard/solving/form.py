"""Every `Problem` in the form that solvers take, in which only nodes add to loads, and all limits are of memory.

An edge that adds to loads or amounts becomes a node, whose strategies are the pairs of strategies at its ends;
forbidden entries make it agree with them. An amount becomes the memory of one more device, in use for one moment.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost.base import Problem, num_loads, num_memory_devices, num_strategies
from cost.edges import map_distinct
from cost.evaluation import checked_choice, evaluate
from diffshard.base import Solution

_MOST_PAIRS = 4096
"""Pairs of strategies up to which edges that add to loads become nodes, whose dual is branched. Steps of 261 pairs that
links bound are solved to the optimum in 3 s, where tangents leave 14 and 20% in 3 to 7 s. But presolve shrinks pairs
less than tangents: those of a step on three axes, 119,035 of them, took minutes before the first sweep."""


class NodeForm(NamedTuple):
    """A problem in the form that solvers take, and the ways there and back.

    Attributes:
      problem: its first V nodes are those of the given problem, the others are edges.
      pairs: `[P, 2]` the two nodes of each such edge.
    """

    problem: Problem
    pairs: np.ndarray
    given: Problem

    def choice_of(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns what a choice `[V]` of the given problem is here, `[V + P]`; raises as `checked_choice`."""
        choice = checked_choice(self.given, choice)
        u, v = self.pairs.T
        return np.concatenate([choice, choice[u] * num_strategies(self.given)[v] + choice[v]])

    def solution(self, found: Solution) -> Solution:
        """Returns a solution of `problem` as one of the given problem."""
        choice = found.choice[: len(self.given.node_cost)]
        evaluation = evaluate(self.given, choice)
        if evaluation.feasible == found.feasible:
            return found._replace(choice=choice, cost=evaluation.cost)
        status = "finished" if found.status == "optimal" else found.status  # only rounding makes the difference
        gap = math.inf if found.feasible else found.gap
        return found._replace(
            choice=choice,
            cost=evaluation.cost,
            feasible=evaluation.feasible,
            excess=evaluation.excess,
            gap=gap,
            status=status,
        )

    def alike(self, alike: np.ndarray) -> np.ndarray:
        """Returns `[V + P]` numbers, equal for nodes of equal numbers `[V]`; no two edges are alike."""
        first = np.max(alike, initial=0) + 1
        return np.concatenate([alike, first + np.arange(len(self.pairs))])


def is_node_form(problem: Problem) -> bool:
    """Tells whether solvers take a problem as it is."""
    return not (len(problem.edge_load) or len(problem.amount))


def has_few_pairs(problem: Problem) -> bool:
    """Tells whether the edges that would become nodes have few pairs of strategies."""
    return sum(math.prod(np.shape(problem.edge_cost[e])) for e in _adding_edges(problem).tolist()) <= _MOST_PAIRS


def node_form(problem: Problem) -> NodeForm:
    """Returns a problem, which must be valid, in the form that solvers take."""
    edges = _adding_edges(problem)
    pairs = np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2)[edges]
    return NodeForm(_amounts_as_memory(_edges_as_nodes(problem, edges)), pairs, problem)


def _adding_edges(problem: Problem) -> np.ndarray:
    adds = np.zeros(len(problem.edge_cost), bool)
    for tables in (problem.edge_load, problem.edge_amount):
        adds |= np.array(map_distinct(np.any, tables) or adds, bool)
    return np.flatnonzero(adds)


def _edges_as_nodes(problem: Problem, edges: np.ndarray) -> Problem:
    """Returns a problem in which some edges are nodes, and no edge adds to loads or amounts."""
    pairs = np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2)
    others = np.setdiff1d(np.arange(len(pairs)), edges).tolist()
    ends, agreements = [pairs[others]], [problem.edge_cost[e] for e in others]
    for node, e in enumerate(edges.tolist(), start=len(problem.node_cost)):
        rows, columns = np.indices(np.shape(problem.edge_cost[e]))
        ends.append(np.stack([pairs[e], [node, node]], axis=1))
        own_strategies = rows.ravel(), columns.ravel()
        agreements += [np.where(np.arange(own.max() + 1)[:, None] == own, 0.0, np.inf) for own in own_strategies]

    def joined(of_nodes: Sequence[np.ndarray], of_edges: Sequence[np.ndarray]) -> list[np.ndarray]:
        empty = [np.zeros((np.size(problem.edge_cost[e]), *np.shape(of_nodes[0])[1:])) for e in edges.tolist()]
        flat = [np.reshape(of_edges[e], (-1, np.shape(of_edges[e])[2])) for e in edges.tolist()] if of_edges else empty
        return [*of_nodes, *flat]

    return problem._replace(
        node_cost=[*problem.node_cost, *(np.ravel(problem.edge_cost[e]) for e in edges.tolist())],
        edge_nodes=np.concatenate(ends),
        edge_cost=agreements,
        load=joined(problem.load, problem.edge_load) if num_loads(problem) else (),
        edge_load=(),
        amount=joined(problem.amount, problem.edge_amount) if len(problem.amount) else (),
        edge_amount=(),
    )


def _amounts_as_memory(problem: Problem) -> Problem:
    """Returns a problem whose amounts are the memory of further devices, one for each amount."""
    if not len(problem.amount):
        return problem
    amounts, limits = _not_negative(problem)
    devices = num_memory_devices(problem)
    memory_limit = np.broadcast_to(np.asarray(problem.memory_limit), (devices,))
    has_memory = len(problem.usage) and np.isfinite(memory_limit.astype(float)).any()
    usages, nodes = (problem.usage, problem.usage_node) if has_memory else ([], [])
    intervals = np.asarray(problem.usage_interval, np.int64).reshape(-1, 2)[: len(usages)]
    moment = int(intervals.min(initial=2**62)) if len(intervals) else 0

    def beside_zeros(usage: np.ndarray) -> np.ndarray:
        own = np.broadcast_to(np.reshape(usage, (len(usage), -1)), (len(usage), devices))
        return np.concatenate([own, np.zeros((len(own), len(limits)), own.dtype)], axis=1)

    return problem._replace(
        usage_node=np.concatenate([np.asarray(nodes, np.int64), np.arange(len(amounts))]),
        usage=[
            *map_distinct(beside_zeros, usages),
            *map_distinct(lambda rows: np.concatenate([np.zeros((len(rows), devices)), rows], axis=1), amounts),
        ],
        usage_interval=np.concatenate([intervals, np.tile([moment, moment + 1], (len(amounts), 1))]),
        memory_limit=np.concatenate([memory_limit, limits]),
        amount=(),
        amount_limit=np.zeros(0),
    )


def _not_negative(problem: Problem) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns amounts and limits that are not negative, as memory must be, and leave as much room; all are floats.

    What is moved is rounded, so that limits of negative amounts rise by as much as that may be.
    """
    amounts = map_distinct(lambda rows: np.asarray(rows, float), problem.amount)  # narrow integers would overflow
    limits = np.asarray(problem.amount_limit, float)
    least = np.stack(map_distinct(lambda rows: np.minimum(np.min(rows, axis=0), 0), amounts))
    if least.any():
        size = sum(np.abs(rows).max(axis=0) for rows in amounts) + np.abs(limits)
        amounts = [rows - row for rows, row in zip(amounts, least, strict=True)]
        limits = limits - least.sum(axis=0) + 4 * len(amounts) * np.finfo(float).eps * size
    if (limits < 0).any():  # no choice fits
        amounts[0] = amounts[0] - np.minimum(limits, 0)
        limits = np.maximum(limits, 0)
    return amounts, limits
