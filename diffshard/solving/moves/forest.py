"""Forest moves: the best strategies of many nodes at once are found exactly, because no cycle joins them.

If the nodes that may change induce a forest, min-sum dynamic programming from its leaves to its roots finds their best
strategies together, given the strategies of all other nodes. A random maximal forest holds about 70% of the nodes of a
typical graph. A `Forest` is laid out once, level by level, and used many times.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diffshard.solving.flat import Flat, ragged_positions


class _Level(NamedTuple):
    """The nodes at one depth below their roots, n of them, and their edges to their parents."""

    node: np.ndarray  # [n]
    parent: np.ndarray  # [n]
    entries: np.ndarray  # [Σ S_parent * S_node] the matrices, a row for each strategy of the parent
    own_position: np.ndarray  # the same length: positions of the node's strategies
    row: np.ndarray  # [Σ S_parent] where each row starts in `entries`
    above: np.ndarray  # [Σ S_parent] positions of the parent's strategies
    matrix: np.ndarray  # [n] where the matrix starts in the problem's entries
    size: np.ndarray  # [n]
    start: np.ndarray  # [n]


class Forest(NamedTuple):
    """An induced forest of the graph.

    Attributes:
      roots: where each tree starts.
      levels: deepest first, without the roots.
      edge: the directed edges inside the forest.
    """

    roots: np.ndarray
    levels: list[_Level]
    edge: np.ndarray


Grow = Callable[[Flat, np.ndarray], Forest]
"""Makes a forest of some of the nodes `[n]`, which come in the order in which they should be taken."""


def grow_forest(flat: Flat, order: np.ndarray) -> Forest:
    """Returns the forest that takes the nodes of `order` `[n]` one by one, except those that would close a cycle."""
    in_forest = _acyclic(flat, order)
    inside = np.flatnonzero(in_forest[flat.source] & in_forest[flat.target])
    near: dict[int, list[tuple[int, int]]] = {v: [] for v in np.flatnonzero(in_forest).tolist()}
    for e, u, v in zip(inside.tolist(), flat.source[inside].tolist(), flat.target[inside].tolist(), strict=True):
        near[u].append((v, e))
    roots, layers = _layers(order[in_forest[order]], near)
    levels = [_level(flat, np.array(layer, np.int64)) for layer in reversed(layers)]
    return Forest(np.array(roots, np.int64), levels, inside)


def _acyclic(flat: Flat, order: np.ndarray) -> np.ndarray:
    """Returns `[V]` which nodes are taken, by union-find over the trees so far."""
    first, target = flat.first.tolist(), flat.target.tolist()
    parent = list(range(len(flat.sizes)))
    in_forest = [False] * len(parent)
    for v in order.tolist():
        trees = set()
        for u in target[first[v] : first[v + 1]]:
            if in_forest[u]:
                while parent[u] != u:
                    parent[u] = parent[parent[u]]
                    u = parent[u]
                if u in trees:
                    break
                trees.add(u)
        else:
            in_forest[v] = True
            for u in trees:
                parent[u] = v
    return np.array(in_forest, bool)


def _layers(order: np.ndarray, near: dict) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Returns the root of each tree, and breadth first the layers below as (node, parent, edge to the parent)."""
    visited_nodes: set[int] = set()
    roots: list[int] = []
    layers: list[list[tuple[int, int, int]]] = []
    for root in order.tolist():
        if root in visited_nodes:
            continue
        roots.append(root)
        visited_nodes.add(root)
        layer, depth = [root], 0
        while layer:
            below = []
            for u in layer:
                for v, e in near[u]:
                    if v not in visited_nodes:
                        visited_nodes.add(v)
                        below.append((v, u, e))
            if below:
                if depth == len(layers):
                    layers.append([])
                layers[depth] += below
            layer, depth = [v for v, _, _ in below], depth + 1
    return roots, layers


def _level(flat: Flat, layer: np.ndarray) -> _Level:
    node, parent, edge = layer.T  # the edge leads from parent to node: its matrix has the parent's strategies as rows
    size, above = flat.sizes[node], flat.sizes[parent]
    matrix = flat.matrix[edge]
    row = np.cumsum(np.repeat(size, above))
    own_position = ragged_positions(np.repeat(flat.start[node], above), np.repeat(size, above))
    return _Level(
        node=node,
        parent=parent,
        entries=flat.entries[ragged_positions(matrix, size * above)],
        own_position=own_position,
        row=np.concatenate([[0], row[:-1]]),
        above=ragged_positions(flat.start[parent], above),
        matrix=matrix,
        size=size,
        start=flat.start[node],
    )


def best_choice(flat: Flat, forest: Forest, field: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """Finds the best strategies of the forest's nodes.

    Args:
      flat: the problem.
      forest: of it.
      field: `[N]` what each strategy costs, given `choice` for all neighbours; changed in place.
      choice: `[V]`.

    Returns:
      `[V]`; outside the forest as in `choice`.
    """
    edge = forest.edge
    if len(edge):  # neighbours inside the forest change as well, so their present strategies do not count
        target = flat.target[edge]
        size = flat.sizes[target]
        at = ragged_positions(flat.matrix[edge] + choice[flat.source[edge]] * size, size)
        inside = np.zeros(len(field))
        np.add.at(inside, ragged_positions(flat.start[target], size), flat.entries[at])
        field -= inside
    for level in forest.levels:
        through = field[level.own_position] + level.entries
        np.add.at(field, level.above, np.minimum.reduceat(through, level.row))
    best, size = choice.copy(), flat.sizes[forest.roots]
    best[forest.roots] = first_least(field[ragged_positions(flat.start[forest.roots], size)], size)
    for level in reversed(forest.levels):
        at = ragged_positions(level.matrix + best[level.parent] * level.size, level.size)
        positions = ragged_positions(level.start, level.size)
        best[level.node] = first_least(field[positions] + flat.entries[at], level.size)
    return best


def first_least(numbers: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Returns for each run of `size` numbers, one after the other, the position of its first smallest."""
    start = np.cumsum(size) - size
    least = np.repeat(np.minimum.reduceat(numbers, start), size)
    hits = np.flatnonzero(numbers == least)
    run = np.searchsorted(start, hits, side="right") - 1
    first = np.ones(len(hits), bool)
    first[1:] = run[1:] != run[:-1]
    return hits[first] - start
