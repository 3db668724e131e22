"""Equal layers take equal strategies: a small quotient problem whose best choice is a start for the whole.

Colour refinement puts nodes in one class that have equal tables and whose neighbours, through equal matrices, are in
equal classes. The quotient has one node for each class, and each of its choices costs what the expanded choice costs in
the problem, in the same memory at every time. It is the problem under the restriction that a class agrees, so its
choices are starts, while its bounds say nothing about the problem.

Source: Weisfeiler and Leman, "The reduction of a graph to canonical form" (1968); for programmes, Grohe et al.,
"Dimension reduction via colour refinement" (ESA 2014).
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from cost.base import Problem, num_loads, num_strategies
from cost.edges import distinct_arrays, merge_edges

# A node's class depends on what lies up to this many edges away: on the inside of a layer, not on its number. Chosen by
# hand on generated layers.
_REFINEMENT_ROUNDS = 4
_MOST_CLASSES_PER_NODE = 0.5  # a larger quotient is not worth solving; chosen by hand


class Quotient(NamedTuple):
    """A problem whose equal nodes take one strategy.

    Attributes:
      node_class: `[V]` the class of each node of the whole problem.
    """

    problem: Problem
    node_class: np.ndarray

    def expand(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the choice of the whole problem, `[V]`, for one strategy of each class."""
        return np.asarray(choice)[self.node_class]


def quotient_by_equality(problem: Problem, rounds: int = _REFINEMENT_ROUNDS) -> Quotient | None:
    """Returns the quotient of a problem by its classes, or None if it has more than half as many nodes.

    Args:
      rounds: of refinement; more rounds split more classes, from the ends of a repetition inwards.
    """
    node_class = classes(problem, rounds)
    if not len(node_class) or node_class.max() + 1 > _MOST_CLASSES_PER_NODE * len(node_class):
        return None
    return Quotient(merge_classes(problem, node_class), node_class)


def classes(problem: Problem, rounds: int = _REFINEMENT_ROUNDS) -> np.ndarray:
    """Returns `[V]` the class of each node, 0 and up: nodes that `rounds` of refinement do not tell apart."""
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
    ends = node_class[np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2)]
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
    numbers = [
        _name(names, (cost, tuple(sorted(usage)), load)) for cost, usage, load in zip(costs, usages, loads, strict=True)
    ]
    return np.unique(np.array(numbers, np.uint64), return_inverse=True)[1].astype(np.uint64)


def _directed_edges(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `[2E]` source, target and a number for the matrix from source to target, for both directions."""
    names: dict[Hashable, int] = {}
    matrices, matrix_of = distinct_arrays(problem.edge_cost)
    forward = np.array(_contents(names, matrices), np.uint64)[matrix_of]
    backward = np.array(_contents(names, [np.asarray(matrix).T for matrix in matrices]), np.uint64)[matrix_of]
    u, v = np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2).T
    return np.concatenate([u, v]), np.concatenate([v, u]), _mix(np.concatenate([forward, backward]))


def _name(names: dict[Hashable, int], content: Hashable) -> int:
    """Returns a number for each distinct content."""
    return names.setdefault(content, len(names))


def _content(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    """Returns shape and float32 bytes: equal for most arrays that differ by rounding only."""
    with np.errstate(over="ignore"):  # large usages are infinite
        return np.shape(array), np.asarray(array, np.float32).tobytes()


def _contents(names: dict[Hashable, int], arrays: Sequence[np.ndarray]) -> list[int]:
    """Numbers the arrays by content, one number each; an array that appears several times is read once."""
    distinct, which = distinct_arrays(arrays)
    numbers = [_name(names, _content(array)) for array in distinct]
    return [numbers[i] for i in which.tolist()]


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Returns a pseudo-random 64-bit number for each number (SplitMix64)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
