"""Arrays that nodes and edges may share: equal layers have one object, and matrices of the same two nodes are one."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

S = TypeVar("S")
T = TypeVar("T")


def distinct_arrays(arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns which entries of a sequence are one and the same array object, as edges of equal matrices may share one.

    Returns:
      The distinct arrays in the order of their first appearance, and for each entry which of them it is, `[len]`.
    """
    first = {id(array): array for array in arrays}
    number = {name: i for i, name in enumerate(first)}
    return list(first.values()), np.array([number[id(array)] for array in arrays], np.int64)


def first_positions(arrays: Sequence[np.ndarray]) -> list[int]:
    """Returns where each distinct array object stands first, in this order."""
    return np.unique(distinct_arrays(arrays)[1], return_index=True)[1].tolist()


def map_distinct(operation: Callable[[np.ndarray], T], arrays: Sequence[np.ndarray]) -> list[T]:
    """Returns the operation's result for each array; arrays that are one object have one result, computed once."""
    distinct, which = distinct_arrays(arrays)
    results = [operation(array) for array in distinct]
    return [results[i] for i in which.tolist()]


def map_by_key(operation: Callable[[S], T], items: Iterable[S], key: Callable[[S], Hashable]) -> list[T]:
    """Returns the operation's result for each item; items of equal keys have one result, computed once."""
    results: dict[Hashable, T] = {}
    mapped = []
    for item in items:
        name = key(item)
        if name not in results:
            results[name] = operation(item)
        mapped.append(results[name])
    return mapped


def merge_edges(
    edges: Iterable[tuple[int, int, np.ndarray]],
    add: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.add,
    turn: Callable[[np.ndarray], np.ndarray] = np.transpose,
) -> dict[tuple[int, int], np.ndarray]:
    """Sums the matrices of all edges that join the same two nodes, whichever of them comes first.

    Args:
      edges: (u, v, matrix) with u's strategies as rows; u != v.
      add: adds two matrices.
      turn: gives a matrix with v's strategies as rows, where edges have more than a number for each pair.

    Returns:
      The sum for each pair of nodes, by the ends of its first edge. A matrix that is alone stays the array that it is.
    """
    matrices: dict[tuple[int, int], np.ndarray] = {}
    for u, v, matrix in edges:
        if (u, v) in matrices:
            matrices[u, v] = add(matrices[u, v], matrix)
        elif (v, u) in matrices:
            matrices[v, u] = add(matrices[v, u], turn(matrix))
        else:
            matrices[u, v] = matrix
    return matrices
