"""Enumeration of all placements of few tables; those fit whose arrays do, as long as on the fullest device."""

import math
from collections.abc import Iterator

import numpy as np

from cost.base import Problem, num_strategies
from diffshard.base import Proposal
from diffshard.solving.solvers.exhaustive import price
from search_spaces.embedding_tables.device_arrays import DeviceArrays

_PLACEMENTS_PER_BLOCK = 1 << 12  # some milliseconds; chosen by hand


def enumerated(problem: Problem, arrays: DeviceArrays) -> Iterator[Proposal]:
    """Yields better and better placements, and in the end the optimum as the bound; inf where none fits.

    Args:
      problem: that of the space.
      arrays: those of its devices.
    """
    sizes = num_strategies(problem).tolist()
    count, least_excess, least_s = math.prod(sizes), math.inf, math.inf
    best: np.ndarray | None = None
    for start in range(0, count, _PLACEMENTS_PER_BLOCK):
        block = np.arange(start, min(start + _PLACEMENTS_PER_BLOCK, count))
        choices = np.stack(np.unravel_index(block, sizes), axis=1)
        excess = np.maximum(arrays.padded(arrays.needed(choices)) - arrays.limit_bytes[:, None], 0).max(0)
        step_s = price(problem, choices)[0]
        first = int(np.lexsort((step_s, excess))[0])
        if (excess[first], step_s[first]) < (least_excess, least_s):
            best, least_excess, least_s = choices[first], float(excess[first]), float(step_s[first])
        yield Proposal(None if least_excess else best)
    yield Proposal(best, math.inf if least_excess else least_s)
