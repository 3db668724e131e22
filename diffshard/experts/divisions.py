"""Divisions of workers into groups: those of the published heuristic, and the fastest one of a few workers.

The heuristic: workers begin alone, and pairs of groups merge until one group is left. While groups lack room for all
experts, the one with the least room merges with the group that gives it room at the least time, or with the nearest
one. Then the slowest group merges with the partner with which it takes the least time. Each division on the way is
priced, and the fastest is the result. Sums of each worker's links to each group are kept, so that a merger looks at
each worker once.

The fastest division is found by dynamic programming over sets of workers. A step takes as long as its slowest group,
whose time T(A) depends on the group's members A only, and the all-reduce. Without the all-reduce, the slowest group of
the best division of a set S into k groups takes

    t(S, k) = min over A of max(T(A), t(S - A, k - 1)),    A ⊆ S with the last worker of S.

The all-reduce is over the slowest link that leaves a group. A division into as many groups that is faster than the
found one must have a faster all-reduce. So all groups that a link as slow as its slowest one leaves are forbidden, and
t is computed again, until even the fastest all-reduce would not make up for slower groups.

A set of workers is the number whose bits are its members. Letters for sizes: W workers, G groups, K groups at most.

For more workers a solver chooses from candidates, for one number of groups. Workers stand in an order in which near
ones are near each other. The candidates are runs of workers in this order, of about equal size or about equal speed,
and the groups of the best division that is known.

Bounds: a worker in a group of n computes no faster than with the n - 1 fastest others, and exchanges no faster than
with its n - 1 nearest others. That is t(i, n), a bound on the time of each group of n with worker i. A division that
takes at most τ puts each worker i into a group of a size n_i with t(i, n_i) ≤ τ, and as a group of n has n workers,

    Σ_i 1/n_i = G,    so that    Σ_i 1/(largest n_i) ≤ G ≤ Σ_i 1/(smallest n_i).

The least τ for which this holds is a bound. So is the time of a group with at most the G-th part of all speed: each
division has one. The all-reduce comes on top: it crosses some link of each spanning tree, so that it takes at least as
long as the fastest link of the tree whose fastest link is slowest.

Letters for sizes: W workers, G groups.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial.distance import squareform

from cost.expert_groups import (
    ExpertStep,
    ExpertWorkers,
    Group,
    all_reduce_link_s,
    computing_s,
    exchanging_s,
    group_s,
    step_s,
)


class Division(NamedTuple):
    """Groups with their time.

    Attributes:
      groups: that divide the workers, by their first workers.
      step_s: seconds of a step.
    """

    groups: tuple[Group, ...]
    step_s: float


def divisions_by_merging(workers: ExpertWorkers, step: ExpertStep) -> Iterator[Division]:
    """Yields the divisions in which all groups have room for all experts, from many groups to one."""
    merging = _Merging(workers, step)
    while True:
        if (merging.room[merging.alive] >= step.num_experts).all():
            groups = merging.groups()
            yield Division(groups, step_s(workers, step, groups))
        if merging.alive.sum() == 1:
            return
        merging.merge_one()


class _Merging:
    """The sums over groups that the prices of mergers need; a group is known by its root, dead ones are not alive."""

    def __init__(self, workers: ExpertWorkers, step: ExpertStep):
        self._step, self._passes = step, step.passes(workers.num_workers)
        self._latency_s, self._s_per_byte = workers.latency_s.copy(), workers.s_per_byte.copy()  # [W, W]: to a group
        np.fill_diagonal(self._latency_s, 0.0)
        np.fill_diagonal(self._s_per_byte, 0.0)
        self._speed, self.room = workers.flops_per_s.copy(), workers.capacity.copy()
        self._remoteness_s = (workers.latency_s + step.exchange_bytes * workers.s_per_byte).sum(axis=1)  # decides ties
        self._size = np.ones(workers.num_workers)
        self._root = np.arange(workers.num_workers)  # of each worker's group
        self.alive = np.ones(workers.num_workers, bool)
        self._own_s = self._computing_s(self._speed, self.room)  # of each group, without the all-reduce

    def groups(self) -> tuple[Group, ...]:
        """Returns the groups that there are."""
        order = np.argsort(self._root, kind="stable")
        starts = np.flatnonzero(np.diff(self._root[order])) + 1
        return tuple(sorted(tuple(map(int, members)) for members in np.split(order, starts)))

    def merge_one(self) -> None:
        """Merges the group that most needs it with its best partner."""
        roots = np.flatnonzero(self.alive)
        # Ties are decided by speed and links and not by number, so that workers may be in any order.
        need = np.minimum(self.room[roots], self._step.num_experts)
        group = int(roots[np.lexsort((self._remoteness_s[roots], self._speed[roots], -self._own_s[roots], need))[0]])
        exchanging = self._exchanging_s(group)
        merged = exchanging + self._computing_s(self._speed[group] + self._speed, self.room[group] + self.room)
        possible = self.alive.copy()
        possible[group] = False
        key = np.where(np.isfinite(merged), merged, np.inf)
        if not np.isfinite(key[possible]).any():
            key = exchanging
        partner = int(np.where(possible, key, np.inf).argmin())
        self._join(group, partner, float(merged[partner]))

    def _join(self, group: int, partner: int, own_s: float) -> None:
        for sums in (self._latency_s, self._s_per_byte):
            sums[:, group] += sums[:, partner]
        for sums in (self._speed, self.room, self._size, self._remoteness_s):
            sums[group] += sums[partner]
        self._root[self._root == partner] = group
        self.alive[partner] = False
        self._own_s[group] = own_s

    def _computing_s(self, speed: np.ndarray, room: np.ndarray) -> np.ndarray:
        computing_s = self._passes * sum(self._step.expert_flops) / speed
        return np.where(room >= self._step.num_experts, computing_s, np.inf)

    def _exchanging_s(self, group: int) -> np.ndarray:
        """Returns `[W]`, the seconds of exchanges if a group merged with each other one."""
        num_bytes = self._step.exchange_bytes / (self._size[group] + self._size)  # [W], by the other group's root
        members = np.flatnonzero(self._root == group)
        own = self._latency_s[members] + self._latency_s[members, group][:, None]
        own += num_bytes * (self._s_per_byte[members] + self._s_per_byte[members, group][:, None])
        slowest = own.max(axis=0)
        all_workers, root = np.arange(len(self._root)), self._root
        theirs = self._latency_s[all_workers, root] + self._latency_s[:, group]
        theirs += num_bytes[root] * (self._s_per_byte[all_workers, root] + self._s_per_byte[:, group])
        np.maximum.at(slowest, root, theirs)
        return self._passes * self._step.num_exchanges * slowest


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
