"""A problem in compressed sparse rows (CSR), which the dual, the moves and most solvers work on.

Nodes differ in how many strategies they have, so that arrays of one row for each node would be ragged. Here everything
lies one after the other in one array, with the position where each node's or edge's part starts, as in a sparse matrix
in CSR format; work on all nodes or edges is then a few calls of NumPy.

Letters for sizes: V nodes, N = ΣS_v strategies of all nodes one after the other, J = 2E directed edges, K usages,
T times, D devices (1 where the memory is the same on all), R loads in G groups.

Edges add nothing to loads here, and amounts are columns of the memory: `form.py` makes such problems of all.
"""

import itertools
from typing import NamedTuple

import jax
import numpy as np
import scipy.sparse

from cost.base import Problem, edge_ends, is_forbidden, load_groups, num_memory_devices, num_strategies
from cost.edges import distinct_arrays, map_distinct
from cost.memory import limit_unit, memory_profile, numbered_times, usage_tables


class CSRProblem(NamedTuple):
    """A problem laid out for vectorised work; every edge appears twice, once for each direction.

    Attributes:
      sizes: `[V]` strategies of each node.
      start: `[V + 1]`, where each node's strategies start in arrays of length N.
      cost: `[N]` node costs.
      source: `[J]` node of the rows of each directed edge, sorted; `first[v] : first[v + 1]` are v's.
      target: `[J]` node of its columns.
      reverse: `[J]` the same edge in the other direction.
      first: `[V + 1]`.
      matrix: `[J]` where its matrix starts in `entries`, row by row.
      entries: all distinct matrices, each in both directions.
      usage: sparse `[N, K]`: what each strategy adds to each usage, for each device one after the other `[N, K * D]`.
      interval: `[K, 2]`.
      base: `[T, D]` what is used whatever is chosen.
      limit: `[D]`.
      load: `[N, R]`, the loads of each group side by side.
      load_first: `[G]` where each group's loads start.
    """

    sizes: np.ndarray
    start: np.ndarray
    cost: np.ndarray
    source: np.ndarray
    target: np.ndarray
    reverse: np.ndarray
    first: np.ndarray
    matrix: np.ndarray
    entries: np.ndarray
    usage: scipy.sparse.csr_array
    interval: np.ndarray
    base: np.ndarray
    limit: np.ndarray
    load: np.ndarray
    load_first: np.ndarray


def to_csr(problem: Problem) -> CSRProblem:
    """Returns a problem in compressed sparse rows; forbidden entries stay as they are."""
    sizes = num_strategies(problem)
    start = np.concatenate([[0], np.cumsum(sizes)])
    pairs = edge_ends(problem)
    matrix, entries = _matrices(problem)
    source, target = np.concatenate([pairs, pairs[:, ::-1]]).T
    order = np.argsort(source, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    usage, interval, base, limit = _memory(problem, start)
    load = [np.asarray(rows, float) for rows in problem.load]
    groups = load_groups(problem)
    return CSRProblem(
        sizes=sizes,
        start=start,
        cost=np.concatenate([np.zeros(0), *(np.asarray(cost, float) for cost in problem.node_cost)]),
        source=source[order],
        target=target[order],
        reverse=position[(order + len(pairs)) % max(2 * len(pairs), 1)],
        first=np.searchsorted(source[order], np.arange(len(sizes) + 1)),
        matrix=matrix[order],
        entries=entries,
        usage=usage,
        interval=interval,
        base=base,
        limit=limit,
        load=np.concatenate(load)[:, np.concatenate(groups)] if load else np.zeros((len(start) and start[-1], 0)),
        load_first=np.cumsum([0, *map(len, groups)])[:-1],
    )


def with_ceiling(csr: CSRProblem) -> CSRProblem:
    """Replaces forbidden entries by a number above every allowed choice's cost, so that all sums are finite.

    Only what must not be chosen changes, so a lower bound for the result is one for the problem.
    """
    bad_node, bad_entry = is_forbidden(csr.cost), is_forbidden(csr.entries)
    if not (bad_node.any() or bad_entry.any()):
        return csr
    node, entries = np.where(bad_node, 0.0, np.abs(csr.cost)), np.where(bad_entry, 0.0, np.abs(csr.entries))
    most = node.sum() + len(csr.source) * entries.max(initial=0.0) + np.abs(csr.load).sum()
    ceiling = 2.0 * most or 1.0
    cost, entries = np.where(bad_node, ceiling, csr.cost), np.where(bad_entry, ceiling, csr.entries)
    return csr._replace(cost=cost, entries=entries)


def _matrices(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each directed edge's matrix starts, and all distinct matrices in both directions as one array."""
    distinct, matrix_of = distinct_arrays(problem.edge_cost)
    matrices = [np.asarray(matrix, float) for matrix in distinct]
    lengths = np.array([matrix.size for matrix in matrices], np.int64)
    forward = (2 * (np.cumsum(lengths) - lengths))[matrix_of]
    backward = forward + lengths[matrix_of]
    entries = [part for matrix in matrices for part in (matrix.ravel(), matrix.T.ravel())]
    return np.concatenate([forward, backward]), np.concatenate([np.zeros(0), *entries])


def _memory(problem: Problem, start: np.ndarray) -> tuple[scipy.sparse.csr_array, np.ndarray, np.ndarray, np.ndarray]:
    """Returns `usage`, `interval`, `base` and `limit` of a `CSRProblem`; without a limit both are empty."""
    limit = np.atleast_1d(np.asarray(problem.memory_limit, float))
    tables = usage_tables(problem)
    devices = num_memory_devices(problem)
    limit = np.broadcast_to(limit, (devices,))
    nodes = np.asarray(problem.usage_node, np.int64)
    if np.isinf(limit).all() or not len(nodes):
        return scipy.sparse.csr_array((int(start[-1]), 0)), np.zeros((0, 2), np.int64), np.zeros((0, devices)), limit
    times, interval = numbered_times(problem.usage_interval)
    least = np.stack(map_distinct(lambda table: np.broadcast_to(table.min(axis=0), (devices,)), tables))
    base = memory_profile(interval, least, len(times) - 1)
    varying = np.flatnonzero(map_distinct(lambda table: bool((table != table[0]).any()), tables))
    rows, columns, values = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
    distinct, which = distinct_arrays([tables[k] for k in varying])
    members = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which, minlength=len(distinct)))[:-1])
    for table, column in zip(distinct, members, strict=False):
        above_least = np.broadcast_to(table - table.min(axis=0), (len(table), devices))
        s, d = np.nonzero(above_least)
        rows.append((start[nodes[varying[column]]][:, None] + s).ravel())
        columns.append((column[:, None] * devices + d).ravel())
        values.append(np.tile(above_least[s, d], len(column)))
    indices = (np.concatenate(rows), np.concatenate(columns))
    shape = (int(start[-1]), len(varying) * devices)
    usage = scipy.sparse.csr_array((np.concatenate(values), indices), shape=shape)
    return usage, interval[varying], base, limit


def ragged_positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns, for each i, the `lengths[i]` positions from `starts[i]` on, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def even_parts(lengths: np.ndarray, most: int) -> list[slice]:
    """Returns consecutive slices of `lengths`; the sum of each exceeds `most` by less than one length."""
    ends = np.cumsum(lengths)
    if not len(ends):
        return []
    cuts = np.searchsorted(ends, np.arange(most, int(ends[-1]), most), side="right")
    cuts = np.unique(np.concatenate([[0], cuts, [len(ends)]]))
    return [slice(a, b) for a, b in itertools.pairwise(cuts.tolist())]


def first_least(numbers: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Returns for each run of `size` numbers, one after the other, the position of its first smallest."""
    start = np.cumsum(size) - size
    least = np.repeat(np.minimum.reduceat(numbers, start), size)
    hits = np.flatnonzero(numbers == least)
    run = np.searchsorted(start, hits, side="right") - 1
    first = np.ones(len(hits), bool)
    first[1:] = run[1:] != run[:-1]
    return hits[first] - start


def memory_use(csr: CSRProblem, column_use: np.ndarray) -> np.ndarray:
    """Sums the memory in use at each time, `[T, D]`, where the varying usages take `column_use` `[K * D]`."""
    times, devices = csr.base.shape
    return memory_profile(csr.interval, column_use.reshape(-1, devices), times) + csr.base


def excess_in_limits(csr: CSRProblem, memory: np.ndarray) -> np.ndarray:
    """Returns the part of memory in use `[..., T, D]` that is above the limit, in units of the limit."""
    return np.maximum(memory - csr.limit, 0.0) / limit_unit(csr.limit)


def memory_of_strategies(
    csr: CSRProblem, strategies: np.ndarray, weight: np.ndarray, group: np.ndarray, num_groups: int
) -> np.ndarray:
    """Sums what a few strategies add to the memory in use, `[G, T, D]`, without `base`.

    Unlike `memory_use` this takes time in proportion to the strategies' own usages, not to all usages.

    Args:
      strategies: `[n]` positions among all N strategies.
      weight: `[n]` what each one's memory is multiplied by; -1 takes it away.
      group: `[n]` to which of the G sums each one is added.
      num_groups: G.
    """
    times, devices = csr.base.shape
    change = np.zeros(num_groups * (times + 1) * devices)
    count, start, end, device, amount = _usages_of(csr, strategies, weight)
    first = np.repeat(group, count) * (times + 1)
    np.add.at(change, (first + start) * devices + device, amount)
    np.subtract.at(change, (first + end) * devices + device, amount)
    return np.cumsum(change.reshape(num_groups, times + 1, devices), axis=1)[:, :-1]


def memory_change(csr: CSRProblem, strategies: np.ndarray, weight: np.ndarray) -> tuple[slice, np.ndarray]:
    """Sums what a few strategies add to the memory in use, in time that does not depend on the size of the problem.

    Args:
      strategies: `[n]` positions among all N strategies.
      weight: `[n]` what each one's memory is multiplied by; -1 takes it away.

    Returns:
      The times from their first start to their last end, t of them, and the change at these, `[t, D]`.
    """
    devices = csr.base.shape[1]
    _, start, end, device, amount = _usages_of(csr, strategies, weight)
    if not len(amount):
        return slice(0, 0), np.zeros((0, devices))
    times = slice(int(start.min()), int(end.max()))
    change = np.zeros((times.stop - times.start + 1, devices))
    np.add.at(change, (start - times.start, device), amount)
    np.subtract.at(change, (end - times.start, device), amount)
    return times, np.cumsum(change, axis=0)[:-1]


def _usages_of(
    csr: CSRProblem, strategies: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns `[n]` how many usages each strategy adds to; start, end, device and weighted amount of all of these."""
    first = csr.usage.indptr[strategies]
    count = csr.usage.indptr[strategies + 1] - first
    at = ragged_positions(first, count)
    usage, device = np.divmod(csr.usage.indices[at], csr.base.shape[1])
    start, end = csr.interval[usage].T
    return count, start, end, device, np.repeat(weight, count) * csr.usage.data[at]


def memory_price(csr: CSRProblem, price: np.ndarray) -> np.ndarray:
    """Computes what each strategy's memory costs at prices `[T, D]`: `[N]`."""
    below = np.concatenate([np.zeros((1, price.shape[1])), np.cumsum(price, axis=0)])
    return csr.usage @ (below[csr.interval[:, 1]] - below[csr.interval[:, 0]]).ravel()


def chosen_cost(csr: CSRProblem, choice: np.ndarray) -> float:
    """Sums the node, edge and load cost of a choice `[V]`, in float64."""
    return float(costs_of_choices(csr, choice))


def costs_of_choices(csr: CSRProblem, choice: np.ndarray) -> np.ndarray:
    """Sums the node, edge and load cost of each of many choices `[..., V]`, in float64: `[...]`."""
    load = csr.load[csr.start[:-1] + choice].sum(axis=-2)
    return costs_without_load(csr, choice) + largest_loads(csr, load)


def largest_loads(csr: CSRProblem, load: np.ndarray) -> np.ndarray:
    """Sums the largest of each group of loads `[..., R]`, which may all be negative; 0 where there are none."""
    if len(csr.load_first) > 1:
        return np.maximum.reduceat(load, csr.load_first, axis=-1).sum(axis=-1)
    return load.max(axis=-1) if load.shape[-1] else np.zeros(load.shape[:-1])


def group_sizes(csr: CSRProblem) -> np.ndarray:
    """Returns `[G]` how many loads each group has."""
    return np.diff(np.append(csr.load_first, csr.load.shape[1]))


def costs_without_load(csr: CSRProblem, choice: np.ndarray) -> np.ndarray:
    """Sums the node and edge cost of each of many choices `[..., V]`, in float64: `[...]`."""
    one_way = csr.source < csr.target
    source, target = csr.source[one_way], csr.target[one_way]
    at = csr.matrix[one_way] + choice[..., source] * csr.sizes[target] + choice[..., target]
    return csr.cost[csr.start[:-1] + choice].sum(axis=-1) + csr.entries[at].sum(axis=-1)


def chosen_memory(csr: CSRProblem, choice: np.ndarray) -> np.ndarray:
    """Sums the memory in use at each time in a choice: `[T, D]`."""
    if not csr.base.size:
        return csr.base
    indicator = np.zeros(int(csr.start[-1]))
    indicator[csr.start[:-1] + choice] = 1.0
    return memory_use(csr, csr.usage.T @ indicator)


def numpy_generator(key: jax.Array) -> np.random.Generator:
    """Makes a NumPy generator from a JAX random key, for work on ragged arrays, which is faster in NumPy."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
