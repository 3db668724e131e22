"""The fastest division of a few workers into groups, by trying all of them."""

from collections.abc import Iterator

import numpy as np

from cost.expert_groups import ExpertStep, ExpertWorkers, all_reduce_ms, group_ms
from diffshard.expert_groups.merging import Division

MOST_WORKERS = 9
"""Workers up to which all divisions are tried: there are 21,147 for 9 workers, and 115,975 for 10."""


def best_division(workers: ExpertWorkers, step: ExpertStep) -> Division:
    """Returns the fastest of all divisions; ties go to the one that is tried first."""
    num_workers = workers.num_workers
    ms_of = {
        subset: group_ms(workers, step, [w for w in range(num_workers) if subset >> w & 1])
        for subset in range(1, 1 << num_workers)
    }
    best = Division((tuple(range(num_workers)),), ms_of[(1 << num_workers) - 1])
    for subsets in _divisions(num_workers):
        slowest = max(ms_of[subset] for subset in subsets)
        if slowest < best.ms:  # the all-reduce only adds to it
            groups = tuple(tuple(w for w in range(num_workers) if subset >> w & 1) for subset in subsets)
            ms = slowest + all_reduce_ms(workers, step, groups)
            if np.isfinite(ms) and ms < best.ms:
                best = Division(groups, ms)
    return best


def _divisions(num_workers: int) -> Iterator[list[int]]:
    """Yields all divisions, each as bit masks of workers; the list changes after each yield."""
    subsets: list[int] = []

    def with_worker(worker: int) -> Iterator[list[int]]:
        if worker == num_workers:
            yield subsets
            return
        for index in range(len(subsets)):
            subsets[index] |= 1 << worker
            yield from with_worker(worker + 1)
            subsets[index] ^= 1 << worker
        subsets.append(1 << worker)
        yield from with_worker(worker + 1)
        subsets.pop()

    return with_worker(0)
