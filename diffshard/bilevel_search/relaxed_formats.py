"""Weights of number formats: the least of seconds less entropy whose mean increase of the loss is within a limit."""

from collections.abc import Sequence

import numpy as np

from diffshard.sharding_search.number_formats import ProductGroup

_BISECTIONS = 60
"""Steps that find the price of the loss to all digits of a double."""


def relaxed_within(
    gains_s: np.ndarray, increases: np.ndarray, limit: float, temperature_s: float, rows: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns the weights of formats with the least seconds less entropy whose mean increase is within a limit.

    Args:
      gains_s: `[groups]` seconds; -inf for those that are never chosen.
      increases: `[groups]` of the loss, 0 or more; those of groups that are never chosen may be anything.
      temperature_s: of the entropy, seconds.
      rows: `[groups]` numbers of the rows: equal for formats of the same operations, of which one at most is taken.

    Returns:
      `[groups]` weights, and the price of the loss, seconds for a unit.
    """
    increases = np.where(np.isfinite(gains_s), increases, 0.0)

    def at(price_s: float) -> np.ndarray:
        scores = (gains_s - price_s * increases) / max(temperature_s, np.finfo(float).tiny)
        most = np.zeros(len(rows))
        np.maximum.at(most, rows, scores)
        weights, exact = np.exp(scores - most[rows]), np.exp(-most)
        np.add.at(exact, rows, weights)
        return weights / exact[rows]

    low, high = 0.0, 0.0
    if at(0.0) @ increases > limit:
        high = max(float(np.max(gains_s)), temperature_s) / limit
        while at(high) @ increases > limit:
            low, high = high, 2 * high
    for _ in range(_BISECTIONS if high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) @ increases > limit else (low, middle)
    return at(high), high


def entropy_of(weights: np.ndarray, rows: np.ndarray) -> float:
    """Returns the mean entropy of rows as a share of that of uniform ones."""
    shares = []
    for row in np.unique(rows):
        own = weights[rows == row]
        p = np.clip(np.array([1.0 - own.sum(), *own]), 0.0, 1.0)
        shares.append(-np.sum(p * np.log(np.where(p > 0, p, 1.0))) / np.log(len(p)))
    return mean_or_0(np.array(shares))


def mean_or_0(values: np.ndarray) -> float:
    """Returns the mean of some numbers, 0 of none."""
    return float(np.mean(values)) if len(values) else 0.0


def rows_of(groups: Sequence[ProductGroup]) -> np.ndarray:
    """Returns `[groups]` the numbers of their rows: equal for those of one kind that share an operation."""
    rows, row_of = np.arange(len(groups)), {}
    for number, group in enumerate(groups):
        for vertex in group.vertices:
            other = row_of.setdefault((group.kind, vertex.index), number)
            rows[rows == rows[number]] = rows[other]
    return rows
