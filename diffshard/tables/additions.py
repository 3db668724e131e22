"""What the strategies of one table add to devices, laid out so that all of them are priced in many placements at once.

A strategy of a table changes few devices, and many strategies add the same seconds and bytes to the same device. So a
table has few *additions*, some tens or hundreds for all its strategies. What each addition does to the norm of the
loads is computed once for each placement, and a sparse matrix sums over the additions of each strategy.

Letters for sizes: C placements, S strategies of one table, D devices, O arrays of a device in which the table may have
rows, A additions of one table.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array


class Additions(NamedTuple):
    """What one table may add to one device.

    Attributes:
      device: of each addition, `[A]`.
      load: seconds of forward lookups and of the rest, `[A, 2, 1]`.
      needed: bytes in each array, `[A, O, 1]`.
      sums: 1 where a strategy has an addition, `[S, A]`.
    """

    device: np.ndarray
    load: np.ndarray
    needed: np.ndarray
    sums: csr_array


def additions_of(loads: np.ndarray, needed: np.ndarray) -> Additions:
    """Returns the different additions of a table's strategies.

    Args:
      loads: of forward lookups and of the rest, `[2, D, S]`.
      needed: bytes in each array, `[O, D, S]`.
    """
    amounts = np.concatenate([loads, needed])
    strategy, device = np.nonzero(amounts.any(0).T)
    first, index = _distinct(np.concatenate([device[None], amounts[:, device, strategy]]))
    start = np.searchsorted(strategy, np.arange(amounts.shape[2] + 1))
    return Additions(
        device=device[first],
        load=amounts[:2, device[first], strategy[first], None].swapaxes(0, 1),
        needed=amounts[2:, device[first], strategy[first], None].swapaxes(0, 1),
        sums=csr_array((np.ones(len(index)), index, start), shape=(amounts.shape[2], len(first))),
    )


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns one position of each different column, and the number of each column's among them."""
    first, index = np.zeros(1, np.int64), np.zeros(rows.shape[1], np.int64)
    for row in rows:
        _, number = np.unique(row, return_inverse=True)
        _, first, index = np.unique(index * len(row) + number, return_index=True, return_inverse=True)
    return first, index


def norms(table: Additions, loads: np.ndarray, squarings: int) -> np.ndarray:
    """Computes the 2^squarings-norms of both loads with each strategy of a table, `[S, 2, C]`.

    Args:
      loads: of forward lookups and of the rest, `[2, D, C]`.
      squarings: at least 1.
    """
    before = loads.swapaxes(0, 1).copy()
    after = before.take(table.device, 0)
    after += table.load
    for _ in range(squarings):
        np.multiply(before, before, out=before)
        np.multiply(after, after, out=after)
    # Large powers fit float64 only; their roots differ by more than float32's rounding where a draw notices it.
    norm = np.sqrt(_summed(table, before, after)).astype(np.float32)
    for _ in range(squarings - 1):
        np.sqrt(norm, out=norm)
    return norm


def longest(table: Additions, needed: np.ndarray) -> np.ndarray:
    """Computes the bytes of arrays as long as on the fullest device, with each strategy of a table, `[S, O, C]`.

    Args:
      needed: bytes that each device needs in each array without it, `[O, D, C]`.
    """
    after = needed.swapaxes(0, 1).take(table.device, 0)
    after += table.needed
    fullest = np.maximum.reduceat(after[table.sums.indices], table.sums.indptr[:-1], axis=0)
    return np.maximum(fullest, needed.max(1), out=fullest)


def _summed(table: Additions, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Sums over devices: each one without the table, `[D, .., C]`, or with an addition, `[A, .., C]`; `[S, .., C]`."""
    after -= before.take(table.device, 0)
    others = after.shape[1:]
    sums = (table.sums @ after.reshape(len(after), math.prod(others))).reshape(-1, *others)
    sums += before.sum(0)
    return sums
