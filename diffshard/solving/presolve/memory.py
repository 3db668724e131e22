"""Memory reduced to what can bind: fewer times, and only the part of a usage that depends on the choice."""

import numpy as np

from cost.base import Problem, num_memory_devices
from cost.memory import memory_profile
from diffshard.solving.presolve.reduction import Reduction

_DENSE = 1 << 24  # numbers in the table of what every strategy uses at every time
_COLUMNS = 16  # compared at a time
_COMPARED = 1 << 24  # numbers in all: about a tenth of a second


def compress_memory(problem: Problem) -> Reduction:
    """Keeps the times at which the limit can bind and moves every usage's least part into a base profile.

    Usage only rises where an interval starts, so its peaks are at starts followed by an end. A time at which even the
    largest usages fit never binds, nor does one that uses no more than another one, whatever is chosen. What all
    strategies of a node use is the same for every choice: it becomes a usage of node 0 that does not depend on its
    strategy. Times are renumbered from 0, and devices without a limit are left out.
    """
    problem = _on_limited_devices(problem)
    limit = np.atleast_1d(np.asarray(problem.memory_limit, float))
    usages = list(zip(problem.usage_node, problem.usage, strict=True))
    intervals = np.asarray(problem.usage_interval, np.int64).reshape(-1, 2)
    used = np.array([table.max(initial=0) > 0 for _, table in usages], bool)
    usages, intervals = [usage for usage, keep in zip(usages, used, strict=True) if keep], intervals[used]
    if not usages or np.isinf(limit).all():
        return _reduction(problem, [], np.zeros((0, 2), np.int64), np.zeros((0, 1)))
    intervals = _renumbered(intervals, _peaks(intervals))
    devices = num_memory_devices(problem)
    # A usage that is the same on all devices has one column; it widens to all.
    least = np.zeros((len(usages), devices)) + _stacked([table.min(axis=0) for _, table in usages], devices)
    most = np.zeros((len(usages), devices)) + _stacked([table.max(axis=0) for _, table in usages], devices)
    can_bind = np.flatnonzero((memory_profile(intervals, most, int(intervals.max(initial=0))) > limit).any(axis=1))
    intervals = _renumbered(intervals, can_bind)
    base = memory_profile(intervals, least, len(can_bind))
    varying = (least < most).any(axis=1) & (intervals[:, 0] < intervals[:, 1])
    rows = [(usages[k][0], usages[k][1] - usages[k][1].min(axis=0)) for k in np.flatnonzero(varying).tolist()]
    rows, intervals = _joined(rows, intervals[varying])
    worst = _worst_times(intervals, base - limit)
    intervals, base = _renumbered(intervals, worst), base[worst]
    kept = _undominated(problem, rows, intervals, base - limit)
    rows, intervals, base = *_joined(rows, _renumbered(intervals, kept)), base[kept]
    return _reduction(_without_misfits(problem, rows, intervals, limit - base), rows, intervals, base)


def _on_limited_devices(problem: Problem) -> Problem:
    """Leaves out the devices without a limit; all usages of the result are `[S_v, 1]` or `[S_v, D]` floats."""
    tables = [np.asarray(usage, float).reshape(len(usage), -1) for usage in problem.usage]
    limited = np.atleast_1d(np.isfinite(problem.memory_limit))
    if limited.all() or not limited.any():
        return problem._replace(usage=tables)
    tables = [table[:, limited] if table.shape[1] > 1 else table for table in tables]
    return problem._replace(usage=tables, memory_limit=np.asarray(problem.memory_limit)[limited])


def _without_misfits(problem: Problem, rows: list, intervals: np.ndarray, room: np.ndarray) -> Problem:
    """Forbids strategies that exceed the limit even when every other node takes its least."""
    at: dict[int, list[int]] = {}
    for k, (v, _) in enumerate(rows):
        at.setdefault(int(v), []).append(k)
    node_cost = list(problem.node_cost)
    for v, usages in at.items():
        cuts = np.unique(intervals[usages])
        least_room = np.minimum.reduceat(room, cuts[:-1], axis=0)  # between two events of the node, `[cuts - 1, D]`
        if cuts[-1] < len(room):
            least_room[-1] = room[cuts[-2] : cuts[-1]].min(axis=0)
        used = np.zeros((len(node_cost[v]), *least_room.shape))
        for k in usages:
            first, last = np.searchsorted(cuts, intervals[k])
            used[:, first:last] += rows[k][1][:, None, :]
        fits = (used <= least_room).all(axis=(1, 2))
        if fits.any() and not fits.all():  # where none fits the problem is infeasible, and the solver says by how much
            node_cost[v] = np.where(fits, node_cost[v], np.inf)
    return problem._replace(node_cost=node_cost)


def _worst_times(intervals: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Of times between which no varying usage starts or ends, those with the largest base, for each device."""
    if not len(over):
        return np.zeros(0, np.int64)
    starts = np.unique(np.append(intervals.ravel(), 0))
    starts = starts[starts < len(over)]
    segment = np.searchsorted(starts, np.arange(len(over)), side="right")
    kept = [np.lexsort((-column, segment))[np.searchsorted(segment, np.unique(segment))] for column in over.T]
    return np.unique(np.concatenate(kept))


def _joined(rows: list, intervals: np.ndarray) -> tuple[list, np.ndarray]:
    """Usages of one node over one interval as one; those of no time are gone."""
    joined: dict[tuple[int, int, int], np.ndarray] = {}
    for (v, table), (start, end) in zip(rows, intervals.tolist(), strict=True):
        if start < end:
            at = (int(v), start, end)
            joined[at] = joined[at] + table if at in joined else table
    return [(v, table) for (v, _, _), table in joined.items()], np.array([at[1:] for at in joined], int).reshape(-1, 2)


def _undominated(problem: Problem, rows: list, intervals: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Times without those at which no choice uses more than at another one, as far as that is not too much to compare.

    Args:
      problem: for the strategies of its nodes.
      rows: usages as (node, table).
      intervals: `[K, 2]`.
      over: `[T, D]` the base less the limit.
    """
    sizes = np.array([len(cost) for cost in problem.node_cost])
    times, devices = over.shape
    if not len(rows) or sizes.sum() * devices * times > _DENSE:
        return np.arange(times)
    at = np.concatenate([[0], np.cumsum(sizes)])
    use = np.zeros((times, int(at[-1]) * devices + devices))
    for (v, table), (start, end) in zip(rows, intervals, strict=True):
        own = np.broadcast_to(table, (int(sizes[v]), int(devices))).ravel()
        use[start:end, at[v] * devices : at[v + 1] * devices] += own
    use[:, -devices:] = over
    use = np.ascontiguousarray(use[:, np.argsort(-use.std(axis=0))])  # columns that tell times apart come first
    kept = np.zeros(times, np.int64)
    count = compared = 0
    order = np.argsort(-use.sum(axis=1), kind="stable")
    for i, t in enumerate(order.tolist()):
        if compared > _COMPARED:
            return np.sort(np.append(kept[:count], order[i:]))
        larger = kept[:count]
        for first in range(0, use.shape[1], _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            compared += len(larger) * _COLUMNS
            larger = larger[(use[larger, columns] >= use[t, columns]).all(axis=1)]
            if not len(larger):
                kept[count] = t
                count += 1
                break
    return np.sort(kept[:count])


def _stacked(rows: list[np.ndarray], devices: int) -> np.ndarray:
    if all(len(row) == 1 for row in rows):
        return np.concatenate(rows)[:, None]
    return np.stack([np.broadcast_to(row, (devices,)) for row in rows])


def _peaks(intervals: np.ndarray) -> np.ndarray:
    """Starts after which the next event is an end."""
    times = np.unique(intervals)
    is_start, is_end = np.isin(times, intervals[:, 0]), np.isin(times, intervals[:, 1])
    return times[:-1][is_start[:-1] & is_end[1:]]


def _renumbered(intervals: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Half-open intervals of positions in `times`."""
    return np.searchsorted(times, intervals)


def _reduction(problem: Problem, rows: list, intervals: np.ndarray, base: np.ndarray) -> Reduction:
    """The base profile is added as usages of node 0, one for each time."""
    scalar = base.shape[1] == 1 and np.ndim(problem.memory_limit) == 0
    times = np.flatnonzero(base.any(axis=1))
    if len(times):
        size = len(problem.node_cost[0])
        rows = [*rows, *((0, np.broadcast_to(base[t], (size, base.shape[1]))) for t in times)]
        intervals = np.concatenate([intervals, np.stack([times, times + 1], axis=1)])
    reduced = problem._replace(
        usage_node=np.array([v for v, _ in rows], np.int64),
        usage=[table[:, 0] if scalar else table for _, table in rows],
        usage_interval=intervals,
        memory_limit=problem.memory_limit if rows else np.inf,
    )
    return Reduction(reduced, 0.0, lambda choice: choice)
