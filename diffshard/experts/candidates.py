"""The groups that the solver chooses from, for one number of groups, and what no division into groups is faster than.

Candidates: workers stand in an order in which near ones are near each other. The candidates are runs of workers in this
order, of about equal size or about equal speed, and the groups of the best division that is known.

Bounds: a worker in a group of n computes no faster than with the n - 1 fastest others, and exchanges no faster than
with its n - 1 nearest others. That is t(i, n), a bound on the time of each group of n with worker i. A division that
takes at most τ puts each worker i into a group of a size n_i with t(i, n_i) ≤ τ, and as a group of n has n workers,

    Σ_i 1/n_i = G,    so that    Σ_i 1/(largest n_i) ≤ G ≤ Σ_i 1/(smallest n_i).

The least τ for which this holds is a bound. So is the time of a group with at most the G-th part of all speed: each
division has one. The all-reduce comes on top: it crosses some link of each spanning tree, so that it takes at least as
long as the fastest link of the tree whose fastest link is slowest.

Letters for sizes: W workers, G groups.
"""

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial.distance import squareform

from cost.expert_groups import ExpertStep, ExpertWorkers, Group, all_reduce_link_s, group_s, step_s
from diffshard.experts.divisions import Division

_MOST_TIMES = 256
"""Values of τ that are tried; with more, evenly spread ones are, and the bound is a little lower. Chosen by hand."""
_ROUNDING = 1e-9
"""Relative: for what float64 sums of up to thousands of numbers may lose."""


def lower_bounds_s(workers: ExpertWorkers, step: ExpertStep) -> np.ndarray:
    """Returns `[W]`: no division into one, two, ... groups is faster; infinite where there is not enough room."""
    num_workers, passes = workers.num_workers, step.passes(workers.num_workers)
    work_s = passes * sum(step.expert_flops)
    exchanging_s = passes * step.num_exchanges * _nearest_s(workers, step)
    has_room = _best_sums(workers.capacity.astype(float)) >= step.num_experts
    times = np.where(has_room, work_s / _best_sums(workers.flops_per_s) + exchanging_s, np.inf)
    size_bounds = _by_number_of_groups(times)
    bounds = np.full(num_workers, np.inf)
    bounds[0] = group_s(workers, step, range(num_workers))
    least_exchanging_s = np.where(has_room, exchanging_s, np.inf).min(axis=0)  # by size
    for num_groups in range(2, min(num_workers, int(workers.capacity.sum()) // step.num_experts) + 1):
        largest = num_workers - num_groups + 1
        slow_group_s = work_s * num_groups / workers.flops_per_s.sum() + least_exchanging_s[:largest].min()
        own_s = max(size_bounds[num_groups - 1], slow_group_s)
        bounds[num_groups - 1] = own_s + _least_all_reduce_s(workers, step, num_groups)
    return bounds * (1 - _ROUNDING)


def _best_sums(numbers: np.ndarray) -> np.ndarray:
    """Returns `[W, W]`, for each worker (row) and size n the largest sum of its number and those of n - 1 others."""
    order = np.argsort(-numbers, kind="stable")
    rank = np.empty(len(numbers), np.int64)
    rank[order] = np.arange(len(numbers))
    sums = np.concatenate([[0.0], np.cumsum(numbers[order])])
    is_among = rank[:, None] < np.arange(1, len(numbers) + 1)
    return np.where(is_among, sums[1:], sums[:-1] + numbers[:, None])


def _nearest_s(workers: ExpertWorkers, step: ExpertStep) -> np.ndarray:
    """Returns `[W, W]`, for each worker and size n what the links to n - 1 others take together at least.

    The nearest others are counted once by latency and once by bandwidth, which is never more than of the same links.
    """
    num_workers = workers.num_workers
    off_diagonal = ~np.eye(num_workers, dtype=bool)
    sums = []
    for link in (workers.latency_s, workers.s_per_byte):
        others = np.sort(link[off_diagonal].reshape(num_workers, num_workers - 1), axis=1)
        sums.append(np.concatenate([np.zeros((num_workers, 1)), np.cumsum(others, axis=1)], axis=1))
    return sums[0] + step.exchange_bytes / np.arange(1, num_workers + 1) * sums[1]


def _by_number_of_groups(times: np.ndarray) -> np.ndarray:
    """Returns `[W]`, the least time for which sizes may sum to the number of workers, for each number of groups.

    Args:
      times: t(i, n), `[W, W]`, infinite where a worker cannot be in a group of that size.
    """
    num_workers = len(times)
    values = np.unique(times[np.isfinite(times)])
    tried = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_TIMES)).round().astype(np.int64))
    bounds = np.full(num_workers, np.inf)
    next_value = 0  # the least that is not known to be too small
    for index in tried:
        allowed = times <= values[index]
        if allowed.any(axis=1).all():
            largest = num_workers - allowed[:, ::-1].argmax(axis=1)
            smallest = allowed.argmax(axis=1) + 1
            fewest = int(np.ceil((1 / largest).sum() - 1e-6))
            most = int(np.floor((1 / smallest).sum() + 1e-6))
            reached = np.arange(1, num_workers + 1)
            now = (reached >= fewest) & (reached <= most) & np.isinf(bounds)
            bounds[now] = values[next_value]
        next_value = index + 1
    return bounds


def _least_all_reduce_s(workers: ExpertWorkers, step: ExpertStep, num_groups: int) -> float:
    """Returns the seconds of the all-reduce in the division whose slowest link between groups is fastest."""
    link_s = all_reduce_link_s(workers, step, num_groups)
    link_s = np.maximum(link_s, link_s.T)
    if link_s.shape[0] > _MOST_TIMES:  # the fastest link is a bound, too, and costs no tree for each number of groups
        return float(link_s[~np.eye(len(link_s), dtype=bool)].min())
    # The spanning tree of the slowest links; zeros are no links for SciPy, and all values must be negative.
    unit_s = float(link_s.max()) or 1.0
    tree = minimum_spanning_tree(-(link_s / unit_s + 1.0))
    return max(float((-tree.data).min()) - 1.0, 0.0) * unit_s


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
