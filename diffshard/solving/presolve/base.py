"""What a reduction returns, how reductions follow one another, and how arrays that edges share stay shared."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cost.base import Problem


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


def compose(first: Problem | Reduction, *steps: Callable[[Problem], Reduction]) -> Reduction:
    """Applies reductions one after the other and returns them as one; the first may have been made already."""
    reduction = identity(first) if isinstance(first, Problem) else first
    for step in steps:
        reduction = _after(reduction, step(reduction.problem))
    return reduction


def _after(first: Reduction, second: Reduction) -> Reduction:
    return Reduction(
        second.problem, first.constant + second.constant, lambda choice: first.expand(second.expand(choice))
    )


class Memo:
    """Results of operations on arrays, so that the same operation on the same arrays runs once.

    Edges of equal layers share one matrix. With a memo a reduction transforms it once, and all of these edges share
    the result again. Arrays are told apart by identity; the memo keeps them alive, so that no identity is used twice.
    """

    def __init__(self):
        self._results: dict[tuple, tuple] = {}

    def __call__(self, operation: Callable, *arrays: np.ndarray, parameter: np.ndarray | None = None):
        """Returns `operation(*arrays)`, or `operation(*arrays, parameter)`, where the parameter counts by its value."""
        value = () if parameter is None else (parameter,)
        key = (operation, *(id(array) for array in arrays), *(array.tobytes() for array in value))
        if key not in self._results:
            self._results[key] = (operation(*arrays, *value), arrays)
        return self._results[key][0]

    def transpose(self, matrix: np.ndarray) -> np.ndarray:
        """Returns the transposed matrix as an array of its own, whose transposed one is `matrix` itself."""
        result = self(_transpose, matrix)
        self._results.setdefault((_transpose, id(result)), (matrix, (result,)))
        return result


def _transpose(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix.T)
