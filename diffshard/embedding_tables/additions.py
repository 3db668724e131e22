"""What the strategies of one table add to devices, laid out so that all of them are priced in many placements at once.

A strategy of a table changes few devices, and many strategies add the same seconds and bytes to the same device. So a
table has few *additions*, some tens or hundreds for all its strategies. What each addition does to the norm of the
loads is computed once for each placement, and a sparse matrix sums over the additions of each strategy.

Letters for sizes: C placements, S strategies of one table, D devices, M memories of a device (its own, and that of its
host where rows may be there), A additions of one table.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array


class Additions(NamedTuple):
    """What one table may add to one device.

    Attributes:
      device: of each addition, `[A]`.
      load: seconds of forward lookups and of the rest, `[A, 2, 1]`.
      used: of each memory, `[A, M, 1]`.
      sums: 1 where a strategy has an addition, `[S, A]`.
    """

    device: np.ndarray
    load: np.ndarray
    used: np.ndarray
    sums: csr_array


def additions_of(loads: np.ndarray, usage: np.ndarray) -> Additions:
    """Returns the different additions of a table's strategies.

    Args:
      loads: of forward lookups and of the rest, `[2, D, S]`.
      usage: of each memory, `[M, D, S]`.
    """
    amounts = np.concatenate([loads, usage])
    strategy, device = np.nonzero(amounts.any(0).T)
    rows = np.column_stack([device, amounts[:, device, strategy].T])
    unique, index = np.unique(rows, axis=0, return_inverse=True)
    start = np.searchsorted(strategy, np.arange(amounts.shape[2] + 1))
    return Additions(
        device=unique[:, 0].astype(np.int64),
        load=unique[:, 1:3, None],
        used=unique[:, 3:, None],
        sums=csr_array((np.ones(len(index)), index.reshape(-1), start), shape=(amounts.shape[2], len(unique))),
    )


def norms(table: Additions, loads: np.ndarray, squarings: int) -> np.ndarray:
    """Computes the 2^squarings-norms of both loads with each strategy of a table, `[S, 2, C]`.

    Args:
      table: that is on no device yet.
      loads: of forward lookups and of the rest, `[2, D, C]`.
      squarings: at least 0.
    """
    before = loads.swapaxes(0, 1).copy()
    after = before.take(table.device, 0)
    after += table.load
    for _ in range(squarings):
        np.multiply(before, before, out=before)
        np.multiply(after, after, out=after)
    norm = _summed(table, before, after)
    for _ in range(squarings):
        np.sqrt(norm, out=norm)
    return norm


def excess(table: Additions, usage: np.ndarray) -> np.ndarray:
    """Computes what exceeds the memories, of a size of 1 each, with each strategy of a table, `[S, M, C]`.

    Args:
      table: that is on no device yet.
      usage: of each memory, `[M, D, C]`.
    """
    before = usage.swapaxes(0, 1) - 1
    after = before.take(table.device, 0)
    after += table.used
    return _summed(table, np.maximum(before, 0), np.maximum(after, 0))


def _summed(table: Additions, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Sums over devices: each one without the table, `[D, .., C]`, or with an addition, `[A, .., C]`; `[S, .., C]`."""
    after -= before.take(table.device, 0)
    sums = (table.sums @ after.reshape(len(after), -1)).reshape(-1, *after.shape[1:])
    sums += before.sum(0)
    return sums
