"""Proven optima by HiGHS, on a mixed-integer programme whose linear relaxation is tight. Needs the extra `exact`.

Each constraint is built by one function:

    Σ_s x[v, s] = 1                                                        `_one_each`
    Σ_t y[e, s, t] = x[u, s] and Σ_s y[e, s, t] = x[v, t], e = (u, v)      `_marginals`
    m[i] >= m[i - 1] + what starts - what ends, m[i] <= limit              `_memory`
    z >= Σ_v Σ_s L[v, s, d] x[v, s] for each device d                      `_programme`

over integer x in {0, 1} and continuous y in [0, 1], m and z, with the cost Σ c x + Σ T y + z. Integer x make y integer.
The relaxation is the one whose dual the gradient solver climbs.

Source: Zheng et al., "Alpa" (OSDI 2022), section 4.2, with the tighter edge constraints of Wainwright and Jordan,
"Graphical Models, Exponential Families, and Variational Inference" (2008), eq. 4.4.
"""

import contextlib
import importlib.util
import math
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.sparse

from cost.base import Problem, is_forbidden, num_memory_devices, num_strategies
from cost.memory import limit_unit, numbered_times
from diffshard.base import Proposal
from diffshard.solving.examples import coupled_ring
from diffshard.solving.flat import ragged_positions
from diffshard.solving.solvers import greedy

_RELATIVE_GAP = 1e-9  # at which HiGHS stops; far below `OPTIMAL_GAP`
_POLL_INTERVAL_S = 0.05  # between two looks at HiGHS's answers; chosen by hand
_HIGHS_TIME_SHARE = 0.95  # of the time limit: if HiGHS ends by itself, it gives its last bound; chosen by hand


class _Programme(NamedTuple):
    """Minimise cost·x for lower <= rows·x <= upper, column_lower <= x <= column_upper, integer x[:num_integers]."""

    cost: np.ndarray
    column_lower: np.ndarray
    column_upper: np.ndarray
    rows: Any
    lower: np.ndarray
    upper: np.ndarray
    num_integers: int


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array | None = None) -> Iterator[Proposal]:
    """Yields HiGHS's choices and bounds as they improve, until it has proven its optimum or the time is over.

    While HiGHS presolves, which can take longer than a short time limit, a greedy choice is made beside it.

    Raises:
      ModuleNotFoundError: `highspy` is not installed.
    """
    if importlib.util.find_spec("highspy") is None:
        raise ModuleNotFoundError(
            "`solver` 'exact' needs HiGHS, which is not installed: pip install highspy (the extra `exact`), "
            "or take 'gradient'."
        )
    del key  # HiGHS and the first greedy order have none
    start, sizes = time.perf_counter(), num_strategies(problem)
    command = [sys.executable, str(Path(__file__).with_name("_highs.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # starts while we build
        try:
            scale = _scale(problem)
            programme = _programme(problem, scale)
            yield Proposal()
            options = {"output_flag": False, "mip_rel_gap": _RELATIVE_GAP, "mip_abs_gap": 0.0}
            if time_limit_s is not None:
                options["time_limit"] = max(_HIGHS_TIME_SHARE * time_limit_s - (time.perf_counter() - start), 0.1)
            with contextlib.closing(_messages(process, programme, options)) as messages:
                for i, (values, bound) in enumerate(messages):
                    yield _proposal(sizes, values, bound * scale)
                    if i == 0:
                        yield from _greedy_choice(problem)
            while time_limit_s is not None and _HIGHS_TIME_SHARE < (time.perf_counter() - start) / time_limit_s < 1:
                time.sleep(_POLL_INTERVAL_S)  # HiGHS ended by its own limit; the loop says so when ours is over
                yield Proposal()
        finally:
            process.kill()


def _greedy_choice(problem: Problem) -> Iterator[Proposal]:
    for proposal in greedy.solve(problem, key=jax.random.key(0)):
        yield proposal
        if proposal.choice is not None:
            return


def _proposal(sizes: np.ndarray, values: np.ndarray | None, bound: float) -> Proposal:
    choice = None
    if values is not None:
        choice = np.array([np.argmax(row) for row in np.split(values, np.cumsum(sizes)[:-1])], np.int64)
    # HiGHS may err by its tolerance, so the bound is lowered by as much.
    return Proposal(choice, bound - _RELATIVE_GAP * abs(bound) if math.isfinite(bound) else -math.inf)


def _messages(
    process: subprocess.Popen[bytes], programme: _Programme, options: dict[str, Any]
) -> Generator[tuple[np.ndarray | None, float]]:
    """Yields HiGHS's answers, values and a bound, until it ends; (None, -inf) several times a second without one.

    Raises:
      RuntimeError: HiGHS ended with an error.
    """
    rows = programme.rows.indptr, programme.rows.indices, programme.rows.data
    message = programme._asdict() | {"rows": rows, "options": options}
    told: queue.SimpleQueue[tuple[np.ndarray | None, float] | None] = queue.SimpleQueue()

    def talk() -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
            with process.stdin as stdin:
                pickle.dump(message, stdin)
            while True:
                told.put(pickle.load(process.stdout))
        told.put(None)

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        while True:
            try:
                message = told.get(timeout=_POLL_INTERVAL_S)
            except queue.Empty:
                yield None, -math.inf
                continue
            if message is None:
                break
            yield message
        if code := process.wait():
            raise RuntimeError(f"HiGHS ended with exit code {code}; take 'gradient', or a smaller problem.")
    finally:
        process.kill()
        talking.join()


def _scale(problem: Problem) -> float:
    """Returns what costs are divided by, so that HiGHS's absolute tolerances mean the same in all units."""
    arrays = [*problem.node_cost, *problem.edge_cost, *problem.load]
    largest = [np.max(np.abs(a), initial=0, where=~is_forbidden(a)) for a in arrays]
    return float(max([*largest, 0])) / 1e3 or 1.0


def _programme(problem: Problem, scale: float) -> _Programme:
    sizes = num_strategies(problem)
    starts = np.cumsum(sizes) - sizes
    entries = [np.asarray(cost, float).ravel() for cost in problem.edge_cost]
    cost = np.concatenate([np.zeros(0), *(np.asarray(c, float) for c in problem.node_cost), *entries])
    column_upper = np.where(is_forbidden(cost), 0.0, 1.0)
    cost = np.where(is_forbidden(cost), 0.0, cost / scale)
    blocks: list[Any] = [_one_each(sizes), _marginals(problem, starts, sizes)]
    lower = upper = np.repeat([1.0, 0.0], [block.shape[0] for block in blocks])
    memory, limit = _memory(problem, starts, len(cost))
    blocks.append(memory)
    lower, upper = np.append(lower, np.zeros(len(limit))), np.append(upper, np.full(len(limit), np.inf))
    cost, column_upper = np.append(cost, np.zeros(len(limit))), np.append(column_upper, limit)
    if len(problem.load):  # a last column that is at least every device's load
        load = np.concatenate([np.asarray(row, float) for row in problem.load]).T / scale
        devices = len(load)
        top = (np.full(devices, -1.0), (np.arange(devices), np.full(devices, len(cost))))
        blocks.append(_widen(load, len(cost) + 1) + scipy.sparse.coo_array(top, shape=(devices, len(cost) + 1)))
        lower, upper = np.append(lower, np.full(devices, -np.inf)), np.append(upper, np.zeros(devices))
        cost, column_upper = np.append(cost, 1.0), np.append(column_upper, np.inf)
    column_lower = np.zeros(len(cost))
    column_lower[len(cost) - bool(len(problem.load)) :] = -np.inf  # loads may be negative
    rows = scipy.sparse.vstack([_widen(block, len(cost)) for block in blocks], format="csc")
    return _Programme(cost, column_lower, column_upper, rows, lower, upper, int(sizes.sum()))


def _widen(block: Any, columns: int) -> scipy.sparse.coo_array:
    block = scipy.sparse.coo_array(block)
    return scipy.sparse.coo_array((block.data, (block.row, block.col)), shape=(block.shape[0], columns))


def _one_each(sizes: np.ndarray) -> scipy.sparse.coo_array:
    rows = np.repeat(np.arange(len(sizes)), sizes)
    return scipy.sparse.coo_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))


def _marginals(problem: Problem, starts: np.ndarray, sizes: np.ndarray) -> scipy.sparse.coo_array:
    """Returns for each edge the rows Σ_t y[s, t] - x[u, s] = 0 and Σ_s y[s, t] - x[v, t] = 0."""
    u, v = np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2).T
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


def _memory(problem: Problem, starts: np.ndarray, columns: int) -> tuple[Any, np.ndarray]:
    """Returns live memory m[i] in units of the limit, a column for each time and device, and the columns' limits.

    The rows are m[i] >= m[i - 1] + what starts - what ends: few entries, however long usages live.
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
    for usage, v, interval in zip(problem.usage, problem.usage_node, intervals, strict=True):
        table = np.broadcast_to(np.asarray(usage, float).reshape(len(usage), -1), (len(usage), devices)) / unit
        s, d = np.nonzero(table)
        for time_index, sign in zip(interval, (-1.0, 1.0), strict=True):
            row.append(time_index * devices + d)
            column.append(starts[v] + s)
            value.append(sign * table[s, d])
    indices = (np.concatenate(row), np.concatenate(column))
    rows = scipy.sparse.coo_array((np.concatenate(value), indices), shape=(count, columns + count))
    return rows, np.tile(limit / unit, len(times))


EXAMPLE = coupled_ring
