"""Forest moves: all nodes of an induced forest choose anew at once, exactly, given the choices of the others.

A `Forest` is laid out once, level by level, and used many times.
"""

from typing import NamedTuple

import numpy as np

from diffshard.solving.flat import Flat, ragged


class _Level(NamedTuple):
    """The nodes at one depth below their roots, n of them, and their edges to their parents."""

    node: np.ndarray  # [n]
    parent: np.ndarray  # [n]
    entries: np.ndarray  # [Σ S_parent * S_node] the matrices, a row for each strategy of the parent
    own: np.ndarray  # the same length: positions of the node's strategies
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


def grow(flat: Flat, order: np.ndarray, *, edges: bool = True) -> Forest:
    """The nodes of `order`, one after the other, each taken unless it closes a cycle with those before it.

    Args:
      flat: the problem.
      order: nodes.
      edges: whether neighbours may be taken at all; without, every tree is one node.
    """
    taken = _acyclic(flat, order, edges)
    inside = np.flatnonzero(taken[flat.source] & taken[flat.target])
    near: dict[int, list[tuple[int, int]]] = {v: [] for v in np.flatnonzero(taken).tolist()}
    for e, u, v in zip(inside.tolist(), flat.source[inside].tolist(), flat.target[inside].tolist(), strict=True):
        near[u].append((v, e))
    roots, layers = _layers(order[taken[order]], near)
    levels = [_level(flat, np.array(layer, np.int64)) for layer in reversed(layers)]
    return Forest(np.array(roots, np.int64), levels, inside)


def _acyclic(flat: Flat, order: np.ndarray, edges: bool) -> np.ndarray:
    first, target = flat.first.tolist(), flat.target.tolist()
    boss = list(range(len(flat.sizes)))
    taken = [False] * len(boss)
    for v in order.tolist():
        met = set()
        for u in target[first[v] : first[v + 1]]:
            if taken[u]:
                while boss[u] != u:
                    boss[u] = boss[boss[u]]
                    u = boss[u]
                if u in met or not edges:
                    break
                met.add(u)
        else:
            taken[v] = True
            for u in met:
                boss[u] = v
    return np.array(taken, bool)


def _layers(order: np.ndarray, near: dict) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Breadth first from a root of each tree: the layers below the roots as (node, parent, edge to the parent)."""
    seen: set[int] = set()
    roots: list[int] = []
    layers: list[list[tuple[int, int, int]]] = []
    for root in order.tolist():
        if root in seen:
            continue
        roots.append(root)
        seen.add(root)
        layer, depth = [root], 0
        while layer:
            below = []
            for u in layer:
                for v, e in near[u]:
                    if v not in seen:
                        seen.add(v)
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
    own = ragged(np.repeat(flat.start[node], above), np.repeat(size, above))
    return _Level(
        node=node,
        parent=parent,
        entries=flat.entries[ragged(matrix, size * above)],
        own=own,
        row=np.concatenate([[0], row[:-1]]),
        above=ragged(flat.start[parent], above),
        matrix=matrix,
        size=size,
        start=flat.start[node],
    )


def best_choice(flat: Flat, forest: Forest, field: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """The best strategies of the forest's nodes.

    Args:
      flat: the problem.
      forest: of it.
      field: `[N]` what each strategy costs, given `choice` for all neighbours; changed in place.
      choice: `[V]`.

    Returns:
      `[V]`; outside the forest as in `choice`.
    """
    edge = forest.edge
    if len(edge):  # inside the forest the neighbours are not given
        target = flat.target[edge]
        size = flat.sizes[target]
        at = ragged(flat.matrix[edge] + choice[flat.source[edge]] * size, size)
        given = np.zeros(len(field))
        np.add.at(given, ragged(flat.start[target], size), flat.entries[at])
        field -= given
    for level in forest.levels:
        through = field[level.own] + level.entries
        np.add.at(field, level.above, np.minimum.reduceat(through, level.row))
    best, size = choice.copy(), flat.sizes[forest.roots]
    best[forest.roots] = first_least(field[ragged(flat.start[forest.roots], size)], size)
    for level in reversed(forest.levels):
        at = ragged(level.matrix + best[level.parent] * level.size, level.size)
        own = ragged(level.start, level.size)
        best[level.node] = first_least(field[own] + flat.entries[at], level.size)
    return best


def first_least(numbers: np.ndarray, size: np.ndarray) -> np.ndarray:
    """For each run of `size` numbers, one after the other, the position of its first smallest."""
    start = np.cumsum(size) - size
    least = np.repeat(np.minimum.reduceat(numbers, start), size)
    hits = np.flatnonzero(numbers == least)
    run = np.searchsorted(start, hits, side="right") - 1
    first = np.ones(len(hits), bool)
    first[1:] = run[1:] != run[:-1]
    return hits[first] - start
