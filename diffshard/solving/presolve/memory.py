"""Memory reduced to what can bind: fewer times, and only the part of a usage that depends on the choice.

Usage rises only where an interval starts, so that its peaks are at starts that are followed by an end. A time at which
even the largest usages fit never binds, and neither does one at which no choice uses more than at another time. What
all strategies of a node use is the same for every choice: it goes into a base profile.

Letters for sizes: K usages, T times, D devices (1 where the memory is the same on all).
"""

from typing import NamedTuple

import numpy as np

from cost.base import Problem, num_memory_devices, num_strategies
from cost.edges import map_distinct
from cost.memory import memory_profile, usage_error, usage_tables
from diffshard.solving.form import Reduction

_LARGEST_TABLE = 1 << 24
"""Numbers in the table of what every strategy uses at every time, 128 MB: beyond it times are not compared."""
_MOST_COMPARISONS = 1 << 24
"""Pairs of numbers that are compared to leave out times, about a tenth of a second."""
_COLUMNS_AT_ONCE = 16
"""Columns of that table that are compared at once: most pairs of times differ in the first few."""


class _Usages(NamedTuple):
    """Usages of nodes.

    Attributes:
      nodes: K node indices.
      tables: K arrays `[S_v, 1]` or `[S_v, D]`.
      interval: `[K, 2]` half-open.
    """

    nodes: list[int]
    tables: list[np.ndarray]
    interval: np.ndarray

    def at(self, index: np.ndarray) -> "_Usages":
        """Returns some of the usages, by their index."""
        return _Usages([self.nodes[k] for k in index], [self.tables[k] for k in index], self.interval[index])

    def at_times(self, times: np.ndarray) -> "_Usages":
        """Returns the usages with intervals of positions in `times`, which may have become empty."""
        return self._replace(interval=np.searchsorted(times, self.interval))


def compress_memory(problem: Problem) -> Reduction:
    """Keeps the times at which the limit can bind and moves every usage's least part into a base profile.

    The base becomes usages of node 0 that do not depend on its strategy. Times are renumbered from 0, devices without a
    limit are left out, and strategies that cannot fit are forbidden.
    """
    problem = _on_limited_devices(problem)
    limit = np.atleast_1d(np.asarray(problem.memory_limit, float))
    usages = _Usages(
        np.asarray(problem.usage_node).tolist(),
        list(problem.usage),
        np.asarray(problem.usage_interval, np.int64).reshape(-1, 2),
    )
    usages = usages.at(np.flatnonzero(map_distinct(lambda table: table.max(initial=0) > 0, usages.tables)))
    if not usages.nodes or np.isinf(limit).all():
        return _reduction(problem, _Usages([], [], np.zeros((0, 2), np.int64)), np.zeros((0, 1)))
    error = usage_error(problem)
    usages, base = _split_off_base(usages.at_times(_peaks(usages.interval)), limit, num_memory_devices(problem))
    base = np.maximum(base - error, 0.0)  # where float64 cannot tell, memory fits: the loop prices choices exactly
    worst = _worst_times(usages.interval, base - limit)
    usages, base = usages.at_times(worst), base[worst]
    binding = _undominated_times(problem, usages, base - limit)
    usages, base = _merge(usages.at_times(binding)), base[binding]
    return _reduction(_without_misfits(problem, usages, limit - base + error), usages, base)


def _on_limited_devices(problem: Problem) -> Problem:
    """Leaves out the devices without a limit; all usages of the result are `[S_v, 1]` or `[S_v, D]` floats."""
    tables = usage_tables(problem)
    has_limit = np.atleast_1d(np.isfinite(problem.memory_limit))
    if has_limit.all() or not has_limit.any():
        return problem._replace(usage=tables)
    tables = map_distinct(lambda table: table[:, has_limit] if table.shape[1] > 1 else table, tables)
    return problem._replace(usage=tables, memory_limit=np.asarray(problem.memory_limit)[has_limit])


def _peaks(intervals: np.ndarray) -> np.ndarray:
    """Returns the starts after which the next event is an end."""
    times = np.unique(intervals)
    is_start, is_end = np.isin(times, intervals[:, 0]), np.isin(times, intervals[:, 1])
    return times[:-1][is_start[:-1] & is_end[1:]]


def _split_off_base(usages: _Usages, limit: np.ndarray, devices: int) -> tuple[_Usages, np.ndarray]:
    """Returns the part of the usages that depends on the choice, at the times that can bind, and the base `[T, D]`."""
    least = _on_all_devices(map_distinct(lambda table: table.min(axis=0), usages.tables), devices)
    most = _on_all_devices(map_distinct(lambda table: table.max(axis=0), usages.tables), devices)
    largest = memory_profile(usages.interval, most, int(usages.interval.max(initial=0)))
    can_bind = np.flatnonzero((largest > limit).any(axis=1))
    usages = usages.at_times(can_bind)
    base = memory_profile(usages.interval, least, len(can_bind))
    varying = usages.at(np.flatnonzero((least < most).any(axis=1)))
    return _merge(varying._replace(tables=map_distinct(_above_least, varying.tables))), base


def _above_least(table: np.ndarray) -> np.ndarray:
    least = table.min(axis=0)
    return table - least if least.any() else table


def _on_all_devices(rows: list[np.ndarray], devices: int) -> np.ndarray:
    """Stacks rows `[1]` or `[D]` to `[K, D]`."""
    if all(len(row) == 1 for row in rows):  # one concatenation is faster than many broadcasts
        return np.zeros((len(rows), devices)) + np.concatenate(rows)[:, None]
    return np.stack([np.broadcast_to(row, (devices,)) for row in rows])


def _merge(usages: _Usages) -> _Usages:
    """Adds up usages of one node over one interval, and leaves out those with an empty interval."""
    tables: dict[tuple[int, int, int], np.ndarray] = {}
    for v, table, (start, end) in zip(usages.nodes, usages.tables, usages.interval.tolist(), strict=True):
        if start < end:
            where = (v, start, end)
            tables[where] = tables[where] + table if where in tables else table
    interval = np.array([where[1:] for where in tables], np.int64).reshape(-1, 2)
    return _Usages([v for v, _, _ in tables], list(tables.values()), interval)


def _worst_times(intervals: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Returns, of times between which no varying usage starts or ends, the one with the largest base on each device.

    Args:
      intervals: `[K, 2]` of the varying usages.
      over: `[T, D]` the base less the limit.
    """
    if not len(over):
        return np.zeros(0, np.int64)
    starts = np.unique(np.append(intervals.ravel(), 0))
    starts = starts[starts < len(over)]
    segment = np.searchsorted(starts, np.arange(len(over)), side="right")
    first = np.searchsorted(segment, np.unique(segment))
    worst = [np.lexsort((-column, segment))[first] for column in over.T]
    return np.unique(np.concatenate(worst))


def _undominated_times(problem: Problem, usages: _Usages, over: np.ndarray) -> np.ndarray:
    """Leaves out times at which no choice uses more than at another one, as far as comparing them is cheap.

    Args:
      usages: the part that depends on the choice.
      over: `[T, D]` the base less the limit.
    """
    times, devices = over.shape
    if not usages.nodes or num_strategies(problem).sum() * devices * times > _LARGEST_TABLE:
        return np.arange(times)
    use = _use_at_each_time(problem, usages, over)
    undominated_times = np.zeros(times, np.int64)
    count = comparisons = 0
    order = np.argsort(-use.sum(axis=1), kind="stable")
    for i, t in enumerate(order.tolist()):
        if comparisons > _MOST_COMPARISONS:
            return np.sort(np.append(undominated_times[:count], order[i:]))
        larger = undominated_times[:count]
        for first in range(0, use.shape[1], _COLUMNS_AT_ONCE):
            columns = slice(first, first + _COLUMNS_AT_ONCE)
            comparisons += len(larger) * _COLUMNS_AT_ONCE
            larger = larger[(use[larger, columns] >= use[t, columns]).all(axis=1)]
            if not len(larger):
                undominated_times[count] = t
                count += 1
                break
    return np.sort(undominated_times[:count])


def _use_at_each_time(problem: Problem, usages: _Usages, over: np.ndarray) -> np.ndarray:
    """Returns the memory of every strategy on each device, and the base less the limit, as columns at each time."""
    sizes = num_strategies(problem)
    times, devices = over.shape
    start = np.concatenate([[0], np.cumsum(sizes)])
    use = np.zeros((times, int(start[-1]) * devices + devices))
    for v, table, (begin, end) in zip(usages.nodes, usages.tables, usages.interval, strict=True):
        flat_table = np.broadcast_to(table, (int(sizes[v]), devices)).ravel()
        use[begin:end, start[v] * devices : start[v + 1] * devices] += flat_table
    use[:, -devices:] = over
    return np.ascontiguousarray(use[:, np.argsort(-use.std(axis=0))])  # columns that tell times apart come first


def _without_misfits(problem: Problem, usages: _Usages, room: np.ndarray) -> Problem:
    """Forbids strategies that exceed the limit even when every other node takes its least.

    Args:
      usages: the part that depends on the choice.
      room: `[T, D]` the limit less the base.
    """
    most = np.array(map_distinct(lambda table: float(table.max()), usages.tables))
    may_misfit = np.bincount(usages.nodes, most, len(problem.node_cost)) > room.min(initial=np.inf)
    of_node: dict[int, list[int]] = {}
    for k, v in enumerate(usages.nodes):
        if may_misfit[v]:
            of_node.setdefault(v, []).append(k)
    node_cost = list(problem.node_cost)
    for v, usage_numbers in of_node.items():
        events = np.unique(usages.interval[usage_numbers])
        least_room = np.minimum.reduceat(room, events[:-1], axis=0)  # from each event to the next, `[events - 1, D]`
        if events[-1] < len(room):
            least_room[-1] = room[events[-2] : events[-1]].min(axis=0)
        least_use = np.zeros((len(node_cost[v]), *least_room.shape))
        for k in usage_numbers:
            first, last = np.searchsorted(events, usages.interval[k])
            least_use[:, first:last] += usages.tables[k][:, None, :]
        fits = (least_use <= least_room).all(axis=(1, 2))
        if fits.any() and not fits.all():  # where none fits the problem is infeasible, and the solver says by how much
            node_cost[v] = np.where(fits, node_cost[v], np.inf)
    return problem._replace(node_cost=node_cost)


def _reduction(problem: Problem, usages: _Usages, base: np.ndarray) -> Reduction:
    """Returns the problem with these usages and the base profile, which node 0 uses whatever its strategy."""
    nodes, tables, interval = usages
    times = np.flatnonzero(base.any(axis=1))
    if len(times):
        size = len(problem.node_cost[0])
        nodes = [*nodes, *[0] * len(times)]
        values, which = np.unique(base[times], axis=0, return_inverse=True)  # equal amounts share one table
        of_values = [np.broadcast_to(value, (size, base.shape[1])) for value in values]
        tables = [*tables, *(of_values[i] for i in which.ravel().tolist())]
        interval = np.concatenate([interval, np.stack([times, times + 1], axis=1)])
    scalar = base.shape[1] == 1 and np.ndim(problem.memory_limit) == 0
    smaller = problem._replace(
        usage_node=np.array(nodes, np.int64),
        usage=map_distinct(lambda table: table[:, 0] if scalar else table, tables),
        usage_interval=interval,
        memory_limit=problem.memory_limit if nodes else np.inf,
    )
    return Reduction(smaller, 0.0, lambda choice: choice)
