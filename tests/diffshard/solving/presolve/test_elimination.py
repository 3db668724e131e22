"""Dominated strategies by their definition: for every choice of the neighbours another strategy is no worse."""

import itertools

import numpy as np
import pytest

from diffshard.solving.presolve import elimination
from diffshard.solving.presolve.elimination import Memo, undominated_strategies


def dominates(s, t, cost, matrices, tables):
    """Tells whether s costs and uses no more than t whatever the neighbours choose."""
    if any((table[s] > table[t]).any() for table in tables):
        return False
    for columns in itertools.product(*(range(matrix.shape[1]) for matrix in matrices)):
        own, other = (cost[r] + sum(m[r, y] for m, y in zip(matrices, columns, strict=True)) for r in (s, t))
        if np.isfinite(other) and own > other:
            return False
    return True


def kept(cost, matrices, tables):
    """Returns which strategies remain if one after the other goes that another one dominates, the last ones first."""
    keep = np.isfinite(cost)
    for t in np.flatnonzero(keep)[::-1]:
        others = [s for s in np.flatnonzero(keep) if s != t]
        if any(dominates(s, t, cost, matrices, tables) for s in others):
            keep[t] = False
    return keep


@pytest.mark.parametrize("numbers_per_block", [1, 1 << 20])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_exactly_the_dominated_strategies_are_left_out(forbidden, numbers_per_block, monkeypatch):
    monkeypatch.setattr(elimination, "NUMBERS_PER_BLOCK", numbers_per_block)
    num_kept = num_left_out = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(1, 6))
        numbers = int(rng.choice([2, 4, 8]))  # few numbers have many ties
        cost = rng.integers(0, numbers, size).astype(float)
        cost[1:][rng.random(size - 1) < forbidden] = np.inf  # presolve asks for nodes with a strategy only
        matrices = [
            rng.integers(0, numbers, (size, rng.integers(1, 4))).astype(float) for _ in range(rng.integers(0, 3))
        ]
        for matrix in matrices:
            matrix[rng.random(matrix.shape) < forbidden] = np.inf
        tables = [rng.integers(0, 3, (size, 2)).astype(float) for _ in range(rng.integers(0, 3))]
        found = undominated_strategies(cost, matrices, tables, Memo())
        assert found.tolist() == kept(cost, matrices, tables).tolist(), f"seed {seed}"
        num_kept, num_left_out = num_kept + found.sum(), num_left_out + (np.isfinite(cost) & ~found).sum()
    assert min(num_kept, num_left_out) > 50


def test_of_equal_strategies_the_first_stays():
    found = undominated_strategies(np.array([2.0, 1.0, 1.0, 1.0]), [np.zeros((4, 2))], [], Memo())
    assert found.tolist() == [False, True, False, False]
