"""Memory in use over time, from usages that each live for an interval.

Every amount is added where its interval starts and subtracted where it ends; the running sum of these changes is the
memory in use. That takes one pass over the usages, however long they live.

Letters for sizes: K usages, T times, D devices (1 where the memory is the same on all).
"""

from collections.abc import Sequence

import numpy as np

from cost.base import Problem, num_memory_devices
from cost.edges import map_distinct

_LARGEST_INT64_SUM = 2**62
"""Sums of integers beyond this are made of Python's integers, so that they stay exact; half of what int64 holds."""
LARGEST_EXACT_FLOAT = 2.0**53
"""Whole numbers below this are exact in float64, and so are their sums."""


def numbered_times(usage_interval: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the times `[T]` at which an interval starts or ends, and the intervals `[K, 2]` as positions in them."""
    times, positions = np.unique(np.asarray(usage_interval).reshape(-1, 2), return_inverse=True)
    return times, positions.reshape(-1, 2)


def memory_profile(interval: np.ndarray, amounts: np.ndarray, num_times: int) -> np.ndarray:
    """Sums, at each time, the amounts whose interval contains it: `[T, D]`.

    Args:
      interval: `[K, 2]` half-open intervals of times from 0 to `num_times`.
      amounts: `[K, D]`; integers are summed exactly, whatever their size and that of their type.
      num_times: T.
    """
    is_integer = np.issubdtype(amounts.dtype, np.integer)
    if is_integer and amounts.sum(dtype=float) > _LARGEST_INT64_SUM:
        amounts = amounts.astype(object)
    elif amounts.dtype != object:  # a narrower type may not hold the sum
        amounts = amounts.astype(np.int64 if is_integer else np.float64)
    change = np.zeros((num_times + 1, amounts.shape[1]), amounts.dtype)
    if np.issubdtype(amounts.dtype, np.floating):  # five times as fast as `np.add.at`, but for floats only
        for d, column in enumerate(amounts.T):
            change[:, d] = np.bincount(interval[:, 0], column, num_times + 1)
            change[:, d] -= np.bincount(interval[:, 1], column, num_times + 1)
    else:
        np.add.at(change, interval[:, 0], amounts)
        np.subtract.at(change, interval[:, 1], amounts)
    return np.cumsum(change, axis=0)[:num_times]


def sum_error(amounts: Sequence[np.ndarray], total: float) -> float:
    """Returns how far `memory_profile` of some of these amounts in float64 may be off: 0 for whole numbers below 2^53.

    Args:
      total: at least the sum of any amounts that are in use together, at all times.
    """
    if total < LARGEST_EXACT_FLOAT and all(map_distinct(are_whole, amounts)):
        return 0.0
    return 4.0 * (len(amounts) + 4) * float(np.finfo(float).eps) * total  # added, subtracted, and offset by the least


def usage_error(problem: Problem) -> float:
    """Returns how far the memory of a problem's choices in float64 may be off: 0 for whole numbers below 2^53."""
    tables = [np.asarray(usage) for usage in problem.usage]
    total = sum(map_distinct(lambda table: float(table.max(initial=0)), tables))
    finite = np.asarray(problem.memory_limit, float)
    largest_limit = float(np.max(finite[np.isfinite(finite)], initial=0.0))
    return sum_error(tables, max(total, min(largest_limit, 2 * total)))


def are_whole(array: np.ndarray) -> bool:
    """Returns whether all numbers are whole."""
    return bool(np.issubdtype(array.dtype, np.integer) or (array == np.trunc(array)).all())


def limit_unit(limit: np.ndarray) -> np.ndarray:
    """Returns the unit in which memory counts beside each limit: the limit itself, 1 where it is 0 or infinite."""
    return np.where(np.isfinite(limit) & (limit > 0), limit, 1.0)


def usage_tables(problem: Problem) -> list[np.ndarray]:
    """Returns each usage as floats `[S_v, D]`, D = 1 where it is the same on all devices; equal objects give one."""
    return map_distinct(lambda usage: np.asarray(usage, float).reshape(len(usage), -1), problem.usage)


def least_memory(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Returns times `[T]` and the memory `[T, D]` from each until the next if every usage took its least.

    No choice uses less at any time; one that uses no more need not exist where a node has several usages.
    """
    devices = num_memory_devices(problem)
    if not len(problem.usage):
        return np.zeros(1, np.int64), np.zeros((1, devices))
    least = map_distinct(lambda usage: np.broadcast_to(np.min(usage, axis=0), (devices,)), problem.usage)
    times, interval = numbered_times(problem.usage_interval)
    return times, memory_profile(interval, np.stack(least), len(times))
