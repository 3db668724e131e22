"""The mixed-integer program of a problem, in numbers that HiGHS's absolute tolerances suit.

Costs count from the least entry of each node and edge, and only entries that a choice may have which is cheaper than
the best known one are left: the window. It is as wide as that choice costs beyond the sum of all least entries, so that
every number of the objective lies between zero and a constant, however different in size the problem's costs are.
What HiGHS may err by is then a known, small part of the window, by which its bounds are lowered.

Each constraint is built by one function:

    Σ_s x[v, s] = 1                                                        `_one_each`
    Σ_t y[e, s, t] = x[u, s] and Σ_s y[e, s, t] = x[v, t], e = (u, v)      `_marginals`
    m[i] >= m[i - 1] + what starts - what ends, m[i] <= limit              `_memory`
    z[g] >= Σ_v Σ_s L[v, s, r] x[v, s] - L0[r] for each load r of group g  `_loads`

over integer x in {0, 1} and continuous y in [0, 1], m and z >= 0, with the cost Σ c x + Σ T y + Σ z. Integer x make y
integer. The relaxation is the one whose dual the gradient solver maximises.

Source: Zheng et al., "Alpa" (OSDI 2022), section 4.2, with the tighter edge constraints of Wainwright and Jordan,
"Graphical Models, Exponential Families, and Variational Inference" (2008), eq. 4.4. That a bound from inexact duals is
valid if it is lowered by what each bounded variable may be off: Neumaier and Shcherbina, "Safe bounds in linear and
mixed-integer linear programming" (2004), section 3.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from cost.base import Problem, edge_ends, is_forbidden, load_groups, num_memory_devices, num_strategies
from cost.memory import limit_unit, numbered_times, usage_tables
from diffshard.solving.csr import ragged_positions

_WINDOW = 1e4
"""The width of the window in the objective's units: HiGHS advises costs of at most 1e6, and has tolerances of 1e-6."""
_OBJECTIVE_ERROR = 1e-5
"""What HiGHS's bound may be off in the objective's units, for each window of the objective: ten times the least
improvement that it looks for. Its relative gap makes that grow with the objective."""
_ERROR_PER_ROW = 4e-7
"""What each node, edge and limit may add to that: four times the tolerance of reduced costs."""
_ERROR_OF_LARGEST_LOAD = 2e-6
"""What a part of the largest load may add where no choice is known: twice what HiGHS takes a number for whole by. An x
that is off by this moves the largest load by as much of it."""
_MOST_ROOM = 1e5
"""Windows' worth of room beyond which a device's row is left out: HiGHS would drop the row's coefficient of z."""
_MARGIN = 1e-9
"""Relative: what a number must exceed another one by to be larger whatever the rounding of sums."""


class MixedIntegerProgram(NamedTuple):
    """Minimise cost·x for lower <= rows·x <= upper, column_lower <= x <= column_upper, integer x[:num_integers]."""

    cost: np.ndarray
    column_lower: np.ndarray
    column_upper: np.ndarray
    rows: Any
    lower: np.ndarray
    upper: np.ndarray
    num_integers: int


class Window(NamedTuple):
    """A program and what its objective means.

    Attributes:
      program: over the choices that may cost less than `most`.
      width: `most - least`, or the largest difference of entries where `most` is infinite.
      unit: the cost that counts as one in the objective.
      error: what a bound on the objective may be off.
      has_loads: whether the objective has a largest load z.
      top: the best choice, if there is any, has an objective of at most this.
    """

    program: MixedIntegerProgram
    least: float
    width: float
    most: float
    unit: float
    error: float
    has_loads: bool
    top: float

    def bound(self, objective_bound: float) -> float:
        """Returns a lower bound on the cost of every choice from a bound of HiGHS's on the objective."""
        if not math.isfinite(objective_bound):
            return -math.inf
        error = self.error + _OBJECTIVE_ERROR * max(objective_bound / _WINDOW - 1, 0.0)
        if self.has_loads and math.isinf(self.most):
            error += _ERROR_OF_LARGEST_LOAD * max(objective_bound, 0.0)
        if objective_bound > self.top * (1 + _MARGIN) + error:
            return -math.inf  # no choice costs as much, so the bound is false, or there is no choice
        return min(self.least + (objective_bound - error) * self.unit, self.most)


def window(problem: Problem, most: float) -> Window | None:
    """Returns the program of the choices that cost less than `most`; None where some node has no strategy left."""
    sizes = num_strategies(problem)
    starts = np.cumsum(sizes) - sizes
    arrays = [np.asarray(c, float) for c in (*problem.node_cost, *problem.edge_cost)]
    cost = np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)])
    lengths = np.array([array.size for array in arrays])
    allowed = ~is_forbidden(cost)
    allowed[: int(sizes.sum())] &= _fits_alone(problem, sizes, starts)
    least = np.minimum.reduceat(np.where(allowed, cost, np.inf), np.cumsum(lengths) - lengths)
    if np.isinf(least).any():
        return None
    base = least.sum()
    above = np.where(allowed, cost - np.repeat(least, lengths), 0.0)
    load, least_load, group = _load_above_least(problem)
    largest = [float(least_load[group == g].max()) for g in range(group.max(initial=-1) + 1)]
    base, largest_load = base + sum(largest), np.array(largest)[group]
    width = most - base if math.isfinite(most) else float(above.max() + load.max(initial=0.0))
    width = max(width * (1 + _MARGIN) + _MARGIN * _MARGIN * (abs(base) + abs(most if math.isfinite(most) else 0)), 0.0)
    if math.isfinite(most):
        allowed &= above <= width
        if len(least_load):
            allowed[: len(load)] &= (load + least_load - largest_load <= width).all(axis=1)
    unit = width / _WINDOW or 1.0
    above, load = np.where(allowed, above / unit, 0.0), np.where(allowed[: len(load), None], load / unit, 0.0)
    room = (largest_load - least_load) / unit
    program, num_rows = _mixed_integer_program(problem, sizes, starts, above, allowed, load, room, group)
    error = _OBJECTIVE_ERROR + _ERROR_PER_ROW * (len(arrays) + num_rows)
    top = _WINDOW if math.isfinite(most) else _largest_objective(above, load, group, lengths, sizes)
    return Window(program, float(base), float(width), most, unit, error, bool(load.size), top)


def _largest_objective(
    above: np.ndarray, load: np.ndarray, group: np.ndarray, lengths: np.ndarray, sizes: np.ndarray
) -> float:
    """Returns at least the objective of every choice: many windows, because each node and edge may cost one."""
    top = float(np.maximum.reduceat(above, np.cumsum(lengths) - lengths).sum())
    if load.size:
        most = np.maximum.reduceat(load, np.cumsum(sizes) - sizes, axis=0).sum(axis=0)
        top += sum(float(most[group == g].max()) for g in range(group.max() + 1))
    return top


def _fits_alone(problem: Problem, sizes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns `[N]` which strategies do not exceed the limit by a single usage."""
    fits = np.ones(int(sizes.sum()), bool)
    limit = np.asarray(problem.memory_limit, float)
    for table, v in zip(usage_tables(problem), problem.usage_node, strict=True):
        fits[starts[v] : starts[v] + sizes[v]] &= (table <= limit * (1 + _MARGIN)).all(axis=1)
    return fits


def _load_above_least(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `[N, R]` the loads counted from each node's least, `[R]` the sums of the least, and `[R]` the groups."""
    if not len(problem.load):
        return np.zeros((0, 0)), np.zeros(0), np.zeros(0, np.int64)
    tables = [np.asarray(load, float) for load in problem.load]
    least = np.stack([table.min(axis=0) for table in tables])
    group = np.zeros(least.shape[1], np.int64)
    for g, loads in enumerate(load_groups(problem)):
        group[loads] = g
    return np.concatenate([table - row for table, row in zip(tables, least, strict=True)]), least.sum(axis=0), group


def _mixed_integer_program(
    problem: Problem,
    sizes: np.ndarray,
    starts: np.ndarray,
    cost: np.ndarray,
    allowed: np.ndarray,
    load: np.ndarray,
    room: np.ndarray,
    group: np.ndarray,
) -> tuple[MixedIntegerProgram, int]:
    """Returns the program, and how many limits it has.

    Args:
      sizes: `[V]`.
      starts: `[V]` where each node's strategies start.
      cost: of all strategies and entries, in the objective's units.
      load: `[N, R]` in the objective's units.
      room: `[R]` how far each load may rise before it is the largest of its group.
      group: `[R]` of each load.
    """
    column_upper = allowed.astype(float)
    blocks: list[Any] = [_one_each(sizes), _marginals(problem, starts, sizes)]
    lower = upper = np.repeat([1.0, 0.0], [block.shape[0] for block in blocks])
    memory, limit = _memory(problem, starts, len(cost), allowed)
    blocks.append(memory)
    lower, upper = np.append(lower, np.zeros(len(limit))), np.append(upper, np.full(len(limit), np.inf))
    cost, column_upper = np.append(cost, np.zeros(len(limit))), np.append(column_upper, limit)
    column_lower = np.zeros(len(cost))
    load_rows, load_room = _loads(load, room, group, starts, len(cost))
    if len(load_room):  # last columns that are at least every load of a group
        blocks.append(load_rows)
        num_groups = group.max() + 1
        lower, upper = np.append(lower, np.full(len(load_room), -np.inf)), np.append(upper, load_room)
        cost, column_upper = np.append(cost, np.ones(num_groups)), np.append(column_upper, np.full(num_groups, np.inf))
        column_lower = np.append(column_lower, np.zeros(num_groups))
    rows = scipy.sparse.vstack([_widen(block, len(cost)) for block in blocks], format="csc")
    program = MixedIntegerProgram(cost, column_lower, column_upper, rows, lower, upper, int(sizes.sum()))
    return program, len(limit) + len(load_room)


def _loads(
    load: np.ndarray, room: np.ndarray, group: np.ndarray, starts: np.ndarray, columns: int
) -> tuple[Any, np.ndarray]:
    """Returns the rows Σ L x - z <= room of the loads that can be the largest of their groups, and their room."""
    if not load.shape[1]:
        return None, np.zeros(0)
    most = np.maximum.reduceat(load, starts, axis=0).sum(axis=0)
    can_be_largest = np.flatnonzero((most > room) & (room <= _MOST_ROOM * _WINDOW))
    count = len(can_be_largest)
    unit = np.maximum(room[can_be_largest] / _WINDOW, 1.0)  # of each row, whose room may be far above the window
    top = (-1 / unit, (np.arange(count), columns + group[can_be_largest]))
    width = columns + int(group.max()) + 1
    rows = _widen(load[:, can_be_largest].T / unit[:, None], width)
    return rows + scipy.sparse.coo_array(top, shape=(count, width)), room[can_be_largest] / unit


def _widen(block: Any, columns: int) -> scipy.sparse.coo_array:
    block = scipy.sparse.coo_array(block)
    return scipy.sparse.coo_array((block.data, (block.row, block.col)), shape=(block.shape[0], columns))


def _one_each(sizes: np.ndarray) -> scipy.sparse.coo_array:
    rows = np.repeat(np.arange(len(sizes)), sizes)
    return scipy.sparse.coo_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))


def _marginals(problem: Problem, starts: np.ndarray, sizes: np.ndarray) -> scipy.sparse.coo_array:
    """Returns for each edge the rows Σ_t y[s, t] - x[u, s] = 0 and Σ_s y[s, t] - x[v, t] = 0."""
    u, v = edge_ends(problem).T
    m, n = sizes[u], sizes[v]
    first = np.cumsum(m + n) - (m + n)  # row of each edge
    edge = np.repeat(np.arange(len(u)), m * n)
    s, t = np.divmod(ragged_positions(np.zeros(len(u), np.int64), m * n), n[edge])
    entry = int(sizes.sum()) + np.arange(len(edge))
    row = [first[edge] + s, first[edge] + m[edge] + t, ragged_positions(first, m), ragged_positions(first + m, n)]
    column = [entry, entry, ragged_positions(starts[u], m), ragged_positions(starts[v], n)]
    value = np.repeat([1.0, -1.0], [2 * len(entry), int((m + n).sum())])
    shape = (int((m + n).sum()), int(sizes.sum()) + len(entry))
    return scipy.sparse.coo_array((value, (np.concatenate(row), np.concatenate(column))), shape=shape)


def _memory(problem: Problem, starts: np.ndarray, columns: int, allowed: np.ndarray) -> tuple[Any, np.ndarray]:
    """Returns live memory m[i] in units of the limit, a column for each time and device, and the columns' limits.

    The rows are m[i] >= m[i - 1] + what starts - what ends: few entries, however long usages live. What is not allowed
    uses nothing.
    """
    limit = np.broadcast_to(np.asarray(problem.memory_limit, float), (max(np.size(problem.memory_limit), 1),))
    if not len(problem.usage) or np.isinf(limit).all():
        return scipy.sparse.coo_array((0, columns)), np.zeros(0)
    devices = num_memory_devices(problem)
    limit = np.broadcast_to(limit, (devices,))
    unit = limit_unit(limit)
    times, intervals = numbered_times(problem.usage_interval)
    count = len(times) * devices
    row, column = [np.arange(count), np.arange(devices, count)], [columns + np.arange(count)]
    column.append(column[0][: count - devices])
    value = [np.ones(count), -np.ones(count - devices)]
    for usage, v, interval in zip(usage_tables(problem), problem.usage_node, intervals, strict=True):
        table = np.broadcast_to(usage, (len(usage), devices)) / unit
        s, d = np.nonzero(table * allowed[starts[v] : starts[v] + len(table), None])
        for time_index, sign in zip(interval, (-1.0, 1.0), strict=True):
            row.append(time_index * devices + d)
            column.append(starts[v] + s)
            value.append(sign * table[s, d])
    indices = (np.concatenate(row), np.concatenate(column))
    rows = scipy.sparse.coo_array((np.concatenate(value), indices), shape=(count, columns + count))
    return rows, np.tile(limit / unit, len(times))
