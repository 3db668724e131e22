"""The fastest division of a few workers into groups, by dynamic programming over sets of workers.

A step takes as long as its slowest group, whose time T(A) depends on the group's members A only, and the all-reduce.
Without the all-reduce, the slowest group of the best division of a set S into k groups takes

    t(S, k) = min over A of max(T(A), t(S - A, k - 1)),    A ⊆ S with the last worker of S.

The all-reduce is over the slowest link that leaves a group. A division into as many groups that is faster than the
found one must have a faster all-reduce. So all groups that a link as slow as its slowest one leaves are forbidden, and
t is computed again, until even the fastest all-reduce would not make up for slower groups.

A set of workers is the number whose bits are its members. Letters for sizes: W workers, K groups at most.
"""

from itertools import combinations

import numpy as np

from cost.expert_groups import ExpertStep, ExpertWorkers, Group, all_reduce_link_s, computing_s, exchanging_s
from diffshard.experts.merging import Division

MOST_WORKERS = 12
"""Workers up to which the default is exact: twelve take a tenth of a second, each further one four times as long."""


def best_division(workers: ExpertWorkers, step: ExpertStep, known: Division) -> Division:
    """Returns the fastest of all divisions.

    Args:
      workers: at most `MOST_WORKERS`.
      step: what a training step computes and sends.
      known: a division that is no slower than one group of all workers; it is the result if nothing is faster.
    """
    most_groups = min(workers.num_workers, int(workers.capacity.sum()) // step.num_experts)
    own_s = _own_s(workers, step)
    slowest_s = _slowest_s(own_s, most_groups)
    best = known
    for num_groups in range(2, most_groups + 1):
        leaving_s = _leaving_s(all_reduce_link_s(workers, step, num_groups))
        least_s = leaving_s[1:-1].min()
        allowed_s, table = own_s, slowest_s
        while True:
            groups = _fastest_groups(allowed_s, table, num_groups)
            if not groups or allowed_s[groups].max() + least_s >= best.step_s:
                break
            all_reduce_s = leaving_s[groups].max()
            step_s = float(own_s[groups].max() + all_reduce_s)
            if step_s < best.step_s:
                best = Division(tuple(sorted(_members(group) for group in groups)), step_s)
            allowed_s = np.where(leaving_s < all_reduce_s, allowed_s, np.inf)
            table = _slowest_s(allowed_s, num_groups)
    return best


def _members(workers: int) -> Group:
    return tuple(worker for worker in range(workers.bit_length()) if workers >> worker & 1)


def _own_s(workers: ExpertWorkers, step: ExpertStep) -> np.ndarray:
    """Returns T, the seconds of each set of workers as a group, `[2^W]`; the empty set has infinite ones."""
    own_s = np.full(1 << workers.num_workers, np.inf)
    for size in range(1, workers.num_workers + 1):
        groups = np.array(list(combinations(range(workers.num_workers), size)))
        own_s[(1 << groups).sum(axis=1)] = computing_s(workers, step, groups) + exchanging_s(workers, step, groups)
    return own_s


def _leaving_s(link_s: np.ndarray) -> np.ndarray:
    """Returns the largest of the numbers `[W, W]` from a member of each set to another worker, `[2^W]`."""
    to_worker = np.zeros((1, len(link_s)))
    is_member = np.zeros((1, len(link_s)), bool)
    for worker, own_s in enumerate(link_s):
        to_worker = np.concatenate([to_worker, np.maximum(to_worker, own_s)])
        is_member = np.concatenate([is_member, is_member | (np.arange(len(link_s)) == worker)])
    return np.where(is_member, 0.0, to_worker).max(axis=1)


def _slowest_s(own_s: np.ndarray, most_groups: int) -> np.ndarray:
    """Returns t, `[K, 2^(W - 1)]`, for 0 to K - 1 groups of each set without the last worker."""
    table = np.full((most_groups, len(own_s) // 2), np.inf)
    table[0, 0] = 0.0
    sets = np.arange(max(len(own_s) // 4, 1))
    whole, part = np.nonzero((sets[:, None] & sets) == sets)
    starts = np.searchsorted(whole, sets)
    for worker in range(table.shape[1].bit_length() - 1):
        last, num_pairs = 1 << worker, 3**worker  # sets of the workers before, and their subsets
        rest = whole[:num_pairs] ^ part[:num_pairs]
        slowest_s = np.maximum(own_s[last + part[:num_pairs]], table[:-1, rest])
        table[1:, last : 2 * last] = np.minimum.reduceat(slowest_s, starts[:last], axis=1)
    return table


def _fastest_groups(own_s: np.ndarray, slowest_s: np.ndarray, num_groups: int) -> list[int]:
    """Returns the division into a number of groups whose slowest group is fastest; no groups if there is none."""
    groups, rest = [], len(own_s) - 1
    for num_others in reversed(range(num_groups)):
        last = 1 << rest.bit_length() - 1
        sets = np.arange(last, 2 * last)
        ends = sets[(sets & ~rest) == 0]
        ends_s = np.maximum(own_s[ends], slowest_s[num_others, rest ^ ends])
        if np.isinf(ends_s.min()):
            return []
        groups.append(int(ends[ends_s.argmin()]))
        rest ^= groups[-1]
    return groups
