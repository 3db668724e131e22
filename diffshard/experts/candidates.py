"""The groups that the solver chooses from, for one number of groups.

Workers stand in an order in which near ones are near each other. The candidates are runs of workers in this order, of
about equal size or about equal speed, and the groups of the best division that is known.

Letters for sizes: W workers, G groups.
"""

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from cost.expert_groups import ExpertStep, ExpertWorkers, Group, step_s
from diffshard.experts.merging import Division

_MOST_STARTS = 64
"""Places where a run begins: in larger clusters runs begin and end at every second, third, ... worker."""
_SIZES_AROUND = 2
"""Sizes of runs on each side of the equal one, in the same steps; chosen by hand."""


def nearest_order(workers: ExpertWorkers, step: ExpertStep) -> np.ndarray:
    """Returns the workers `[W]` in an order with near ones side by side, by average linkage of their links."""
    if workers.num_workers == 1:
        return np.zeros(1, np.int64)
    link_s = workers.latency_s + step.exchange_bytes / 2 * workers.s_per_byte
    return leaves_list(linkage(squareform((link_s + link_s.T) / 2, checks=False), "average"))


def equal_runs(workers: ExpertWorkers, step: ExpertStep, order: np.ndarray, num_groups: int) -> list[Division]:
    """Returns two divisions into runs: of equal sizes, and of about equal speeds."""
    equal = np.arange(1, num_groups) * len(order) / num_groups
    speed = np.cumsum(workers.flops_per_s[order])
    level = np.searchsorted(speed, speed[-1] * np.arange(1, num_groups) / num_groups) + 1
    divisions = []
    for cuts in (np.rint(equal).astype(int), level):
        runs = [tuple(sorted(map(int, run))) for run in np.split(order, cuts)]
        if all(runs):
            divisions.append(Division(tuple(sorted(runs)), step_s(workers, step, runs)))
    return divisions


def candidate_groups(order: np.ndarray, num_groups: int, known: Division) -> set[Group]:
    """Returns the groups that divisions into a number of groups are made of.

    Args:
      order: of the workers, `[W]`.
      num_groups: G.
      known: a division whose groups are candidates, too.
    """
    num_workers = len(order)
    stride = -(-num_workers // _MOST_STARTS)
    middle = num_workers / num_groups / stride
    sizes = range(max(int(middle) - _SIZES_AROUND, 1), int(np.ceil(middle)) + _SIZES_AROUND + 1)
    groups = set()
    for start in range(0, num_workers, stride):
        for size in sizes:
            run = order[start : start + size * stride]
            if start + size * stride - num_workers < stride:
                groups.add(tuple(sorted(map(int, run))))
    return groups.union(known.groups)
