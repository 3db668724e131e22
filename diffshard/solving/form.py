"""Every `Problem` in the form that solvers take, in which only nodes add to loads, and all limits are of memory.

An edge that adds to loads or amounts becomes a node, whose strategies are the pairs of strategies at its ends;
forbidden entries make it agree with them. An amount becomes the memory of one more device, in use for one moment.

A quotient has one node for all that are tied, such as those of equal layers; its best choice is a start for the whole.
Presolve makes a reduction, which is smaller and has the same optimum.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from cost.base import Problem, edge_ends, num_loads, num_memory_devices, num_strategies
from cost.edges import distinct_arrays, map_distinct, merge_edges
from cost.evaluation import checked_choice, evaluate
from diffshard.base import Solution


class Reduction(NamedTuple):
    """A smaller problem with the same optimum, less a constant.

    For every choice c of `problem`: cost of `expand(c)` in the original <= cost of c + `constant`, with the same memory
    excess or less; and the optima are equal. So lower bounds and choices both carry over.

    Attributes:
      constant: what every choice costs beyond its cost in `problem`.
      expand: from a choice of `problem` to one of the original, `[V']` to `[V]`.
    """

    problem: Problem
    constant: float
    expand: Callable[[np.ndarray], np.ndarray]


def identity(problem: Problem) -> Reduction:
    """Returns the reduction that leaves the problem as it is."""
    return Reduction(problem, 0.0, lambda choice: choice)


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
        """Returns a start `[V]` of the given problem as one of this form, `[V + P]`; raises as `checked_choice`."""
        choice = checked_choice(self.given, choice, "start")
        u, v = self.pairs.T
        return np.concatenate([choice, choice[u] * num_strategies(self.given)[v] + choice[v]])

    def solution(self, found: Solution) -> Solution:
        """Returns a solution of `problem` as one of the given problem."""
        choice = found.choice[: len(self.given.node_cost)]
        evaluation = evaluate(self.given, choice)
        here = found._replace(choice=choice, cost=evaluation.cost)
        if evaluation.feasible == found.feasible:
            return here
        status = "finished" if found.status == "optimal" else found.status  # only rounding makes the difference
        gap = math.inf if found.feasible else found.gap
        return here._replace(feasible=evaluation.feasible, excess=evaluation.excess, gap=gap, status=status)

    def tied(self, tied: np.ndarray) -> np.ndarray:
        """Returns `[V + P]` numbers, equal for nodes of equal numbers `[V]`; no two edges are tied."""
        first = np.max(tied, initial=0) + 1
        return np.concatenate([tied, first + np.arange(len(self.pairs))])


def is_node_form(problem: Problem) -> bool:
    """Returns whether solvers take a problem as it is."""
    return all(isinstance(arrays, Sequence) and not len(arrays) for arrays in (problem.edge_load, problem.amount))


def has_few_pairs(problem: Problem) -> bool:
    """Returns whether the edges that would become nodes have few pairs of strategies."""
    return sum(math.prod(np.shape(problem.edge_cost[e])) for e in _adding_edges(problem).tolist()) <= _MOST_PAIRS


def node_form(problem: Problem) -> NodeForm:
    """Returns a problem, which must be valid, in the form that solvers take."""
    edges = _adding_edges(problem)
    pairs = edge_ends(problem)[edges]
    return NodeForm(_amounts_as_memory(_edges_as_nodes(problem, edges)), pairs, problem)


def _adding_edges(problem: Problem) -> np.ndarray:
    adds = np.zeros(len(problem.edge_cost), bool)
    for tables in (problem.edge_load, problem.edge_amount):
        adds |= np.array(map_distinct(np.any, tables) or adds, bool)
    return np.flatnonzero(adds)


def _edges_as_nodes(problem: Problem, edges: np.ndarray) -> Problem:
    """Returns a problem in which some edges are nodes, and no edge adds to loads or amounts."""
    pairs = edge_ends(problem)
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


# A node's class depends on what lies up to this many edges away: on the inside of a layer, not on its number. Chosen by
# hand on generated layers.
_REFINEMENT_ROUNDS = 4
_MOST_CLASSES_PER_NODE = 0.5  # a larger quotient is not worth solving; chosen by hand


def repeated_classes(problem: Problem, rounds: int = _REFINEMENT_ROUNDS) -> np.ndarray | None:
    """Returns `[V]` the class of each node as `classes`, or None if there are more than half as many as nodes."""
    node_class = classes(problem, rounds)
    has_few = len(node_class) and node_class.max() + 1 <= _MOST_CLASSES_PER_NODE * len(node_class)
    return node_class if has_few else None


def classes(problem: Problem, rounds: int = _REFINEMENT_ROUNDS) -> np.ndarray:
    """Returns `[V]` the class of each node, 0 and up: nodes that `rounds` of refinement do not tell apart.

    More rounds split more classes, from the ends of a repetition inwards.
    """
    source, target, label = _directed_edges(problem)
    colour = _node_numbers(problem)
    for _ in range(rounds):
        neighbours = np.zeros(len(colour), np.uint64)
        np.add.at(neighbours, source, _mix(label + _mix(colour[target])))  # the order of neighbours does not count
        finer = np.unique(_mix(colour) + neighbours, return_inverse=True)[1].astype(np.uint64)
        if finer.max(initial=0) == colour.max(initial=0):
            break
        colour = finer
    _, first, which = np.unique(colour, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which]  # in the order of their first nodes


def merge_classes(problem: Problem, node_class: np.ndarray) -> Problem:
    """Returns the problem in which all nodes of a class take the same strategy.

    Args:
      node_class: `[V]` classes, 0 and up; nodes of one class must have equally many strategies.
    """
    sizes = num_strategies(problem)
    size = np.zeros(node_class.max(initial=-1) + 1, np.int64)
    size[node_class] = sizes
    cost = [np.zeros(n) for n in size]
    for c, array in zip(node_class.tolist(), problem.node_cost, strict=True):
        cost[c] += array
    edges: list[tuple[int, int, np.ndarray]] = []
    for u, v, matrix, count in _count_edges(problem, node_class):
        if u == v:
            cost[u] += count * np.diagonal(matrix)
        else:
            edges.append((u, v, count * np.asarray(matrix, float)))
    between = merge_edges(edges)
    load = [np.zeros((n, num_loads(problem))) for n in size] if len(problem.load) else []
    for c, array in zip(node_class.tolist() if load else (), problem.load, strict=True):
        load[c] += array
    return problem._replace(
        node_cost=cost,
        edge_nodes=np.array(list(between), np.int64).reshape(-1, 2),
        edge_cost=list(between.values()),
        usage_node=node_class[np.asarray(problem.usage_node, np.int64)],
        load=load,
    )


def _count_edges(problem: Problem, node_class: np.ndarray) -> list[tuple[int, int, np.ndarray, int]]:
    """Returns (u, v, matrix, count) for classes u <= v: how many edges between them have one and the same array."""
    ends = node_class[edge_ends(problem)]
    matrices, matrix_of = distinct_arrays(problem.edge_cost)
    flip = ends[:, 0] > ends[:, 1]
    rows = np.column_stack([ends.min(axis=1, initial=1 << 62), ends.max(axis=1, initial=-1), matrix_of, flip])
    groups, counts = np.unique(rows, axis=0, return_counts=True)
    return [
        (u, v, matrices[m].T if is_flipped else matrices[m], count)
        for (u, v, m, is_flipped), count in zip(groups.tolist(), counts.tolist(), strict=True)
    ]


def _node_numbers(problem: Problem) -> np.ndarray:
    """Returns `[V]` a first class for each node: by its costs, its usages in any order and its loads."""
    names: dict[Hashable, int] = {}
    usages: list[list[int]] = [[] for _ in problem.node_cost]
    for v, usage in zip(np.asarray(problem.usage_node).tolist(), _contents(names, problem.usage), strict=True):
        usages[v].append(usage)
    loads = _contents(names, problem.load) or [0] * len(usages)
    costs = _contents(names, problem.node_cost)
    forms = [(cost, tuple(sorted(usage)), load) for cost, usage, load in zip(costs, usages, loads, strict=True)]
    numbers = [names.setdefault(form, len(names)) for form in forms]
    return np.unique(np.array(numbers, np.uint64), return_inverse=True)[1].astype(np.uint64)


def _directed_edges(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `[2E]` source, target and a number for the matrix from source to target, for both directions."""
    names: dict[Hashable, int] = {}
    matrices, matrix_of = distinct_arrays(problem.edge_cost)
    forward = np.array(_contents(names, matrices), np.uint64)[matrix_of]
    backward = np.array(_contents(names, [np.asarray(matrix).T for matrix in matrices]), np.uint64)[matrix_of]
    u, v = edge_ends(problem).T
    return np.concatenate([u, v]), np.concatenate([v, u]), _mix(np.concatenate([forward, backward]))


def _content(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    """Returns shape and float32 bytes: equal for most arrays that differ by rounding only."""
    with np.errstate(over="ignore"):  # large usages are infinite
        return np.shape(array), np.asarray(array, np.float32).tobytes()


def _contents(names: dict[Hashable, int], arrays: Sequence[np.ndarray]) -> list[int]:
    """Numbers the arrays by content, one number each; an array that appears several times is read once."""
    distinct, which = distinct_arrays(arrays)
    numbers = [names.setdefault(_content(array), len(names)) for array in distinct]
    return [numbers[i] for i in which.tolist()]


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Returns a pseudo-random 64-bit number for each number (SplitMix64)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
