"""All strategies of all tables side by side, as the default search and its bound take them.

Letters for sizes: T tables, N strategies of all tables together, D devices, K memories (of the devices, and of their
hosts where rows may be there).
"""

from typing import NamedTuple

import numpy as np

from search_spaces.embedding_tables.device_arrays import DeviceArrays, TableBytes
from search_spaces.embedding_tables.space import EmbeddingTableSpace


class StrategyArrays(NamedTuple):
    """What each strategy costs each device.

    Attributes:
      forward_s: seconds of forward lookups, `[D, N]`.
      rest_s: seconds of exchanges and backward pass, `[D, N]`.
      num_bytes: in each memory, `[K, N]`.
      limit_bytes: of each memory, `[K]`.
      alone_fits: whether the memory holds the strategy alone, `[N]`.
      sizes: strategies of each table, `[T]`.
      start: the first strategy of each table, `[T]`.
      first_of_kind: the first strategy of each kind; others of the kind differ from it in devices only.
    """

    forward_s: np.ndarray
    rest_s: np.ndarray
    num_bytes: np.ndarray
    limit_bytes: np.ndarray
    alone_fits: np.ndarray
    sizes: np.ndarray
    start: np.ndarray
    first_of_kind: np.ndarray

    @property
    def alone_s(self) -> np.ndarray:
        """Seconds of a step with this one piece of work only, `[N]`; inf where it does not fit the memory."""
        return np.where(self.alone_fits, self.forward_s.max(0) + self.rest_s.max(0), np.inf)


def strategy_arrays(space: EmbeddingTableSpace) -> StrategyArrays:
    """Lays out the strategies of a space."""
    sizes = np.array([len(strategies) for strategies in space.strategies])
    groups = np.array([len(kind.groups) for strategies in space.strategies for kind in strategies.kinds])
    return StrategyArrays(
        forward_s=_side_by_side([price.forward_s for price in space.prices]),
        rest_s=_side_by_side([price.rest_s for price in space.prices]),
        num_bytes=_side_by_side([np.asarray(usage, float) for usage in space.problem.usage]),
        limit_bytes=np.asarray(space.problem.memory_limit, float),
        alone_fits=np.concatenate([_alone_fits(table, space.arrays) for table in space.arrays.tables]),
        sizes=sizes,
        start=np.cumsum(sizes) - sizes,
        first_of_kind=np.cumsum(groups) - groups,
    )


def _alone_fits(table: TableBytes, arrays: DeviceArrays) -> np.ndarray:
    """Returns whether the memory holds each strategy of a table alone, `[S_t]`."""
    longest, memory = table.num_bytes.max(1), arrays.memory[table.arrays]
    sums = np.stack([longest[memory == m].sum(0) for m in range(len(arrays.limit_bytes))])
    return np.all(sums <= arrays.limit_bytes[:, None], axis=0)


def _side_by_side(tables: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate(tables).T)
