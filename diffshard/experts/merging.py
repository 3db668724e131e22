"""The published heuristic: workers begin alone, and pairs of groups merge until one group is left.

While groups lack room for all experts, the one with the least room merges with the group that gives it room at the
least time, or with the nearest one. Then the slowest group merges with the partner with which it takes the least time.
Each division on the way is priced, and the fastest is the result.

Sums of each worker's links to each group are kept, so that a merger looks at each worker once.

Letters for sizes: W workers, G groups.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cost.expert_groups import ExpertStep, ExpertWorkers, Group, step_s


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
