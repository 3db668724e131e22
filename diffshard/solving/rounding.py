"""What float64 can lose of a problem's costs: how far sums may be off, and costs whose sums would reach `FORBIDDEN`.

Solvers add costs in float64. Where all are whole numbers of moderate size these sums are exact. Elsewhere a sum of n
terms is off by at most about n ε times the sum of the terms' sizes, ε = 2^-53. For a choice of cost c that is at most
n ε (c + 2N), where N is the size of all negative costs that a choice can have. So a bound stays valid if it is lowered
by as much, however different in size the costs are.

Source: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 4.2.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from cost.base import FORBIDDEN, Problem, is_forbidden, load_groups
from cost.edges import distinct_arrays

_ERRORS_PER_TERM = 8
"""Roundings that a cost goes through between the problem and a bound: presolve adds it up, and so do solvers."""
_LARGEST_EXACT_SUM = 2.0**53
"""Whole numbers below this are exact in float64, and so are their sums."""


class Rounding:
    """How far the sums of a problem's costs may be off."""

    def __init__(self, problem: Problem):
        costs = list(_allowed(problem))
        size = sum(count * max(float(np.abs(allowed).max()), 0.0) for allowed, count in costs)
        is_whole = all(np.issubdtype(allowed.dtype, np.integer) or _are_whole(allowed) for allowed, _ in costs)
        most = sum(count * float(allowed.max()) for allowed, count in costs)
        least = sum(count * min(float(allowed.min()), 0.0) for allowed, count in costs)
        terms = len(problem.node_cost) * (1 + len(load_groups(problem))) + len(problem.edge_cost)
        is_exact = is_whole and size < _LARGEST_EXACT_SUM and not len(problem.load)
        self._share = 0.0 if is_exact else _ERRORS_PER_TERM * terms * float(np.finfo(float).eps)
        self._negative = -2 * least
        self.largest_cost = most + self._share * size

    def safe_bound(self, bound: float) -> float:
        """Returns a bound from float64 sums lowered by what the sums may be off.

        A bound above the largest cost that a choice can have is infinite: there is no choice.
        """
        if math.isfinite(bound):
            bound -= self._share * (abs(bound) + self._negative)
        return math.inf if bound > self.largest_cost else bound


def in_range(problem: Problem) -> tuple[Problem, float]:
    """Divides costs whose sums could reach `FORBIDDEN` by a power of two, so that no sum counts as forbidden.

    Returns:
      The problem, which is the one that was given wherever its sums are smaller, and what its costs were divided by.
    """
    size = sum(count * float(np.abs(allowed).max()) for allowed, count in _allowed(problem))
    if size < FORBIDDEN / 4:
        return problem, 1.0
    unit = 2.0 ** math.ceil(math.log2(size / FORBIDDEN) + 2)

    def divided(costs: np.ndarray) -> np.ndarray:
        return np.where(is_forbidden(costs), np.inf, np.asarray(costs, float) / unit)

    distinct, matrix_of = distinct_arrays(problem.edge_cost)
    matrices = [divided(matrix) for matrix in distinct]
    scaled = problem._replace(
        node_cost=[divided(cost) for cost in problem.node_cost],
        edge_cost=[matrices[m] for m in matrix_of],
        load=[divided(load) for load in problem.load],  # edges add none here
    )
    return scaled, unit


def _allowed(problem: Problem) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the allowed entries of each distinct array of costs, if any, and how many terms of a choice it gives."""
    num_groups = len(load_groups(problem))
    for arrays, per_array in ((problem.node_cost, 1), (problem.edge_cost, 1), (problem.load, num_groups)):
        distinct, which = distinct_arrays(arrays)
        yield from _allowed_of(distinct, (per_array * np.bincount(which, minlength=len(distinct))).tolist())


def _allowed_of(arrays: Sequence[np.ndarray], counts: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
    for array, count in zip(map(np.asarray, arrays), counts, strict=True):
        allowed = array[~is_forbidden(array)]
        if allowed.size:
            yield allowed, count


def _are_whole(numbers: np.ndarray) -> bool:
    return bool((numbers == np.trunc(numbers)).all())
