"""Dominated strategies: another one of the same node is no worse, whatever the neighbours choose.

Strategy s dominates t if, at every neighbour's worst strategy for s, it costs no more than t and none of its usages and
loads is larger:

    c[s] - c[t] + Σ_e max_y (M_e[s, y] - M_e[t, y]) <= 0

Comparing all pairs exactly is expensive, so that pairs are first compared on a few mixtures of the neighbours'
strategies: s can dominate t only if it is no worse on each of them.
"""

import functools
from collections.abc import Sequence

import numpy as np

from cost.base import FORBIDDEN
from diffshard.solving.presolve.base import Memo

NUMBERS_PER_BLOCK = 1 << 20
"""Numbers in a temporary array, 8 MB: what fits a processor's cache several times over, but not its memory."""
_NUM_MIXTURES = 16
"""Mixtures of a neighbour's strategies on which pairs are compared first; more leave hardly fewer pairs."""
_ROUNDING = 1e-9
"""Relative tolerance of that first comparison, so that rounding hides no pair."""


def undominated_strategies(
    cost: np.ndarray, matrices: Sequence[np.ndarray], tables: Sequence[np.ndarray], memo: Memo
) -> np.ndarray:
    """Returns which strategies of a node are allowed and not dominated, `[S]` booleans.

    Args:
      cost: `[S]` node costs, infinite where forbidden.
      matrices: transfer matrices to the neighbours, the node's strategies as rows.
      tables: usages and loads `[S, ...]`.
      memo: of the reduction.
    """
    is_allowed = np.isfinite(cost)
    pairs = _candidates(cost, matrices, tables, memo, np.flatnonzero(is_allowed))
    better, worse = _dominations(cost, matrices, tables, *pairs)
    keep = is_allowed.copy()
    for t in np.unique(worse)[::-1]:  # of two that are equal, the first stays
        keep[t] = not keep[better[worse == t]].any()
    return keep


def _candidates(
    cost: np.ndarray, matrices: Sequence[np.ndarray], tables: Sequence[np.ndarray], memo: Memo, strategies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs (s, t) of allowed strategies where s is no worse than t on every mixture.

    This is necessary for domination and takes a hundredth of the time of comparing all pairs on everything.
    """
    marks = cost[strategies, None] * np.ones(_NUM_MIXTURES)
    for matrix in matrices:
        marks = marks + memo(_mixtures, matrix)[strategies]
    marks = np.concatenate([marks, *(table[strategies] for table in tables)], axis=1)
    marks_and_slack = marks + _ROUNDING * np.abs(marks).max(axis=0)
    no_worse = np.empty((len(strategies), len(strategies)), bool)
    block = max(NUMBERS_PER_BLOCK // marks.size, 1)
    for start in range(0, len(strategies), block):
        rows = marks[start : start + block, None]
        no_worse[start : start + block] = (rows <= marks_and_slack).all(axis=2)
    np.fill_diagonal(no_worse, False)
    better, worse = np.nonzero(no_worse)
    return strategies[better], strategies[worse]


def _dominations(
    cost: np.ndarray, matrices: Sequence[np.ndarray], tables: Sequence[np.ndarray], s: np.ndarray, t: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns those of the pairs (s, t) where s truly dominates t."""
    if not len(s):
        return s, t
    extra = cost[s] - cost[t]  # what s costs beyond t at worst
    possible = np.ones(len(s), bool)  # False where some neighbour forbids t with each of its strategies
    for matrix in matrices:
        largest = _largest_differences(matrix, s, t)
        possible &= largest > -np.inf
        extra = extra + np.where(largest > -np.inf, largest, 0.0)
    holds = (extra <= 0) | ~possible
    for table in tables:
        holds &= (table[s] <= table[t]).all(axis=1)
    return s[holds], t[holds]


def _mixtures(matrix: np.ndarray) -> np.ndarray:
    """Computes what each strategy costs for some columns and some weighted means of columns, `[S, _NUM_MIXTURES]`."""
    finite = matrix if np.isfinite(matrix).all() else np.where(np.isinf(matrix), FORBIDDEN, matrix)
    return finite @ _weights(matrix.shape[1])


@functools.cache
def _weights(columns: int) -> np.ndarray:
    rng = np.random.default_rng(columns)
    single = np.eye(columns)[:, rng.integers(columns, size=_NUM_MIXTURES // 2)]
    return np.concatenate([single, rng.dirichlet(np.ones(columns), size=_NUM_MIXTURES - single.shape[1]).T], axis=1)


def _largest_differences(matrix: np.ndarray, s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Computes max_y matrix[s, y] - matrix[t, y] for each pair, over the columns y where t is allowed."""
    largest = np.empty(len(s))
    finite = np.isfinite(matrix).all()
    block = max(NUMBERS_PER_BLOCK // matrix.shape[1], 1)
    for start in range(0, len(s), block):
        part = slice(start, start + block)
        rows, others = matrix[s[part]], matrix[t[part]]
        if not finite:
            rows, others = np.where(np.isinf(others), -np.inf, rows), np.where(np.isinf(others), 0.0, others)
        largest[part] = (rows - others).max(axis=1)
    return largest
