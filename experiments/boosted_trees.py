"""Gradient-boosted regression trees: each tree is fitted to what the sum of those before it leaves.

All nodes of a level are split at once: targets are summed in bins of each feature, and the best threshold of each node
is read off the cumulative sums. A tree of fixed depth then is two arrays, and prediction follows bits.

Letters for sizes: N rows, F features, K trees, H depth, B bins.

Source: Friedman, "Greedy function approximation" (2001); bins as in Ke et al., "LightGBM" (NeurIPS 2017).
"""

from typing import NamedTuple

import numpy as np

_BINS = 32
_VALIDATION_SHARE = 0.2
_DEPTHS = (2, 3, 5)
MOST_TREES = 400


class Trees(NamedTuple):
    """A sum of trees.

    Attributes:
      mean: of the targets.
      feature: of the split of each inner node, `[K, 2^H - 1]`, level after level.
      threshold: rows whose feature is above it go to the right, `[K, 2^H - 1]`; inf where a node is not split.
      value: of each leaf, `[K, 2^H]`.
    """

    mean: float
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray

    def stages(self, features: np.ndarray) -> np.ndarray:
        """Returns predictions of the first tree, of the first two, ..., `[K, N]`, from features `[N, F]`."""
        rows, depth = np.arange(len(features)), int(np.log2(self.value.shape[1]))
        added = np.empty((len(self.value), len(features)))
        for k, (feature, threshold, value) in enumerate(zip(self.feature, self.threshold, self.value, strict=True)):
            node = np.zeros(len(features), np.int64)
            for _ in range(depth):
                node = 2 * node + 1 + (features[rows, feature[node]] > threshold[node])
            added[k] = value[node - (len(value) - 1)]
        return self.mean + np.cumsum(added, axis=0)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Returns the prediction of all trees, `[N]`, from features `[N, F]`."""
        return self.stages(features)[-1]


def fit(features: np.ndarray, targets: np.ndarray, rng: np.random.Generator, *, rate: float = 0.1) -> Trees:
    """Fits trees whose depth and number are the best ones on a fifth of the rows, then again to all rows.

    Args:
      features: `[N, F]`.
      targets: `[N]`.
      rng: draws the fifth.
      rate: by which each tree's values are multiplied.
    """
    chosen = rng.random(len(targets)) < _VALIDATION_SHARE
    best = (np.inf, 0, 0)
    for depth in _DEPTHS:
        trees = boosted(features[~chosen], targets[~chosen], depth, MOST_TREES, rate=rate)
        errors = np.abs(trees.stages(features[chosen]) - targets[chosen]).mean(1)
        best = min(best, (float(errors.min()), depth, int(errors.argmin()) + 1))
    return boosted(features, targets, best[1], best[2], rate=rate)


def boosted(
    features: np.ndarray, targets: np.ndarray, depth: int, num_trees: int, *, rate: float, least_rows: int = 3
) -> Trees:
    """Fits a number of trees of one depth by the squared error; a leaf has at least `least_rows` rows."""
    edges = [np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)[1:-1])) for column in features.T]
    bins = np.stack([np.searchsorted(e, column, side="left") for e, column in zip(edges, features.T, strict=True)], 1)
    thresholds = np.full((features.shape[1], _BINS), np.inf)
    for row, e in zip(thresholds, edges, strict=True):
        row[: len(e)] = e
    mean, left = float(targets.mean()), targets - targets.mean()
    found = []
    for _ in range(num_trees):
        feature, threshold, value, leaf = _tree(bins, thresholds, left, depth, least_rows)
        found.append((feature, threshold, rate * value))
        left = left - rate * value[leaf]
    feature, threshold, value = (np.stack(part) for part in zip(*found, strict=True))
    return Trees(mean, feature, threshold, value)


def _tree(bins: np.ndarray, thresholds: np.ndarray, targets: np.ndarray, depth: int, least_rows: int) -> tuple:
    """Returns features and thresholds of a tree's inner nodes, values of its leaves, and the leaf of each row."""
    num_features, places = bins.shape[1], np.arange(bins.shape[1]) * _BINS
    features, cuts, node = [], [], np.zeros(len(bins), np.int64)
    for level in range(depth):
        count = 2**level
        index = ((node * num_features * _BINS)[:, None] + places + bins).ravel()
        shape = count, num_features, _BINS
        size = count * num_features * _BINS
        sums = np.bincount(index, np.repeat(targets, num_features), size).reshape(shape).cumsum(2)
        rows = np.bincount(index, minlength=size).reshape(shape).cumsum(2)
        total, all_rows = sums[:, :, -1:], rows[:, :, -1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = sums**2 / rows + (total - sums) ** 2 / (all_rows - rows) - total**2 / all_rows
        gain[(rows < least_rows) | (all_rows - rows < least_rows)] = -np.inf
        best = gain.reshape(count, -1).argmax(1)
        feature, cut = best // _BINS, best % _BINS
        is_split = gain.reshape(count, -1).max(1) > 0
        features.append(np.where(is_split, feature, 0))
        cuts.append(np.where(is_split, thresholds[feature, cut], np.inf))
        goes_right = is_split[node] & (bins[np.arange(len(bins)), feature[node]] > cut[node])
        node = 2 * node + goes_right
    rows = np.bincount(node, minlength=2**depth)
    value = np.bincount(node, targets, 2**depth) / np.maximum(rows, 1)
    return np.concatenate(features), np.concatenate(cuts), value, node
