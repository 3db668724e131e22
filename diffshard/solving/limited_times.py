"""The memory limit at a few times only: most times never bind, and nodes that live at none of the few are easy.

A choice of the relaxed problem that keeps the limit at all times is one of the problem, and a bound of the relaxed
problem is one for the problem. So a search can begin without any limit and add the times at which its choices exceed
it: cutting planes, of which a training step needs few, because its memory has one or two peaks.

Source: Dantzig, Fulkerson and Johnson, "Solution of a large-scale traveling-salesman problem" (1954).
"""

import numpy as np

from cost.base import Problem
from cost.evaluation import Evaluator

_MOST_ADDITIONS = 4
"""Additions of times after which all are limited; each one costs another presolve. Chosen by hand."""


class LimitedTimes:
    """The times of a problem at which its relaxation keeps the memory limit; none to begin with.

    Attributes:
      all: whether these are all times, so that nothing is relaxed.
    """

    def __init__(self, problem: Problem):
        self._evaluator, self._limit = Evaluator(problem), np.asarray(problem.memory_limit, float)
        self._times = np.zeros(0, np.int64)
        self._num_additions = 0
        self.all = not len(problem.usage) or bool(np.isinf(self._limit).all())

    def relaxation(self, problem: Problem) -> Problem:
        """Returns the problem with the limit at these times only; `problem` has the usages' intervals of the first."""
        if self.all:
            return problem
        if not len(self._times):
            return problem._replace(memory_limit=np.inf)
        interval = np.searchsorted(self._times, np.asarray(problem.usage_interval, np.int64))
        live = np.flatnonzero(interval[:, 0] < interval[:, 1])
        return problem._replace(
            usage_node=np.asarray(problem.usage_node)[live],
            usage=[problem.usage[k] for k in live.tolist()],
            usage_interval=interval[live],
        )

    def exceeded_by(self, choice: np.ndarray) -> np.ndarray:
        """Returns the times at which a choice `[V]` of the problem exceeds the limit most: one of each run of times."""
        times, used = self._evaluator.live_usage(choice)
        excess = np.max(used - self._limit, axis=1)
        return np.array([times[i] for i in _peaks(excess)], np.int64)

    def permits(self, exceeded_times: np.ndarray) -> bool:
        """Tells whether a choice that exceeds the limit at some times keeps it at these."""
        return not np.isin(exceeded_times, self._times).any()

    def add(self, exceeded_times: np.ndarray) -> None:
        """Limits the memory at more times, in the end at all."""
        self._times = np.union1d(self._times, exceeded_times)
        self._num_additions += 1
        self.all = self.all or self._num_additions > _MOST_ADDITIONS


def _peaks(excess: np.ndarray) -> list[int]:
    """Returns the position of the largest number of each run of positive ones."""
    above = excess > 0
    starts = np.flatnonzero(above & ~np.append(False, above[:-1]))
    ends = np.flatnonzero(above & ~np.append(above[1:], False)) + 1
    return [int(start + excess[start:end].argmax()) for start, end in zip(starts, ends, strict=True)]
