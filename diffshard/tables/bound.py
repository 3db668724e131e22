"""A lower bound on a step's time, in some milliseconds.

Two facts together. (1) The largest load is at least any weighted mean of the loads, so that with weights u, v of
devices and prices p of memory

    J >= g(u, v, p) = sum_t min_s (u F_ts + v R_ts + p M_ts) - p limit.

Where devices are alike, equal weights are the best ones by symmetry, and only prices of memory are to be found. (2) A
placement of J seconds has no strategy that alone takes more than J. So if g over the strategies of at most J seconds is
more than J, no placement takes J: bisection over J finds where that ends. Of a few large tables (2) matters more.
`largest_table_bound.py` raises it where one table decides.

Letters for sizes: as in `strategy_arrays.py`.
"""

import numpy as np

from diffshard.tables.largest_table_bound import Kinds, bisected, largest_table_bound_s
from diffshard.tables.strategy_arrays import StrategyArrays

_STEPS = 300
"""Steps along the supergradient where memory is scarce or devices differ, about 10 ms; chosen by hand."""
_STEP_SIZE = 0.3  # of the first step, in logarithms of weights; chosen by hand


def lower_bound_s(arrays: StrategyArrays, *, devices_are_alike: bool) -> float:
    """Returns seconds that every placement takes at least; inf where a table has no strategy that fits the memory.

    Args:
      arrays: the strategies.
      devices_are_alike: whether devices have equal hardware and limits.
    """
    alone_s = arrays.alone_s
    if np.isinf(np.minimum.reduceat(alone_s, arrays.start)).any():
        return np.inf
    if not devices_are_alike:
        weighted_s, _, constant_s = _weighted(arrays, alone_s)
        return max(bisected(weighted_s, constant_s, alone_s, arrays.start), 0.0)
    first, num_devices = arrays.first_of_kind, len(arrays.forward_s)
    alone_s, start = alone_s[first], np.searchsorted(first, arrays.start)
    reduced = arrays._replace(
        forward_s=arrays.forward_s[:, first].mean(0, keepdims=True),
        rest_s=arrays.rest_s[:, first].mean(0, keepdims=True),
        num_bytes=arrays.num_bytes[:, first].reshape(-1, num_devices, len(first)).mean(1),
        limit_bytes=arrays.limit_bytes.reshape(-1, num_devices).mean(1),
        sizes=np.diff(start, append=len(first)),
        start=start,
    )
    weighted_s, priced_s, constant_s = _weighted(reduced, alone_s)
    bound_s = max(bisected(weighted_s, constant_s, alone_s, start), 0.0)
    kinds = Kinds(arrays.forward_s[:, first], arrays.rest_s[:, first], priced_s, constant_s, alone_s, start)
    return largest_table_bound_s(kinds, bound_s)


def _weighted(arrays: StrategyArrays, alone_s: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the best weighted sums that are found and memory's part of them, `[N]`, and the price of all memory.

    The sum of tables' minima is to be lowered by the last.
    """
    forward, rest, num_bytes, limit = arrays.forward_s, arrays.rest_s, arrays.num_bytes, arrays.limit_bytes
    num_bytes, limit = num_bytes[np.isfinite(limit)], limit[np.isfinite(limit)]
    table = np.repeat(np.arange(len(arrays.sizes)), arrays.sizes)
    forward_weight, rest_weight = (np.full(len(loads), 1 / len(loads)) for loads in (forward, rest))
    price, scale_s = np.zeros(len(limit)), 0.0
    best = (-np.inf, np.zeros(0), np.zeros(0), 0.0)
    for i in range(_STEPS):
        weighted_s = np.where(
            np.isfinite(alone_s), forward_weight @ forward + rest_weight @ rest + price @ num_bytes, np.inf
        )
        least_s = np.minimum.reduceat(weighted_s, arrays.start)
        value = float(least_s.sum() - price @ limit)
        if value > best[0]:
            best = value, weighted_s, price @ num_bytes, float(price @ limit)
        scale_s = scale_s or max(value, np.finfo(float).tiny)
        at = np.flatnonzero(weighted_s == least_s[table])
        chosen = at[np.unique(table[at], return_index=True)[1]]
        excess = num_bytes[:, chosen].sum(1) / limit - 1
        if len(forward) == 1 and (excess <= 0).all() and not price.any():
            break  # memory is not scarce, and there is nothing else to weigh
        step = _STEP_SIZE / np.sqrt(i + 1)
        forward_weight = _reweighted(forward_weight, forward[:, chosen].sum(1), step)
        rest_weight = _reweighted(rest_weight, rest[:, chosen].sum(1), step)
        price = np.maximum(price + step * scale_s * excess / limit, 0)
    return best[1:]


def _reweighted(weight: np.ndarray, load: np.ndarray, step: float) -> np.ndarray:
    weight = weight * np.exp(step * (load / max(load.max(), np.finfo(float).tiny) - 1))
    return weight / weight.sum()
