"""What a choice of strategies costs, exactly, and its relaxed cost: weights on strategies in place of a choice.

The relaxed cost is differentiable in the weights, and the exact one of weights that are 0 and 1.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Evaluation, Problem, is_forbidden, num_memory_devices, num_strategies
from cost.edges import distinct_arrays
from cost.memory import memory_profile, numbered_times, sum_error

_LEAST_EXCESS = float(np.finfo(float).tiny)
"""What an excess is at least: the difference of large numbers may be rounded to 0."""


def evaluate(problem: Problem, choice: Sequence[int] | np.ndarray) -> Evaluation:
    """Prices `choice` (`[V]` strategy indices) exactly: integer sums are exact, float sums correctly rounded.

    Raises:
      ValueError: `choice` has the wrong length or an index that its node does not have.
    """
    return Evaluator(problem)(choice)


def live_usage(problem: Problem, choice: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the times `[T]` at which the live usage changes and the usage `[T, D]` from each until the next."""
    return Evaluator(problem).live_usage(np.asarray(choice))


def checked_choice(problem: Problem, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns `choice` as `[V]` 64-bit integers.

    Raises:
      ValueError: `choice` has the wrong length or an index that its node does not have.
    """
    return _checked_choice(num_strategies(problem), choice)


class ChosenCosts(NamedTuple):
    """The parts of a choice's cost, which are the sums of `nodes` and `edges` and the largest of `loads`.

    Attributes:
      nodes: `[V]`.
      edges: `[E]`.
      loads: `[D]` of each device; `[0]` where all devices do equal work.
    """

    nodes: np.ndarray
    edges: np.ndarray
    loads: np.ndarray


def chosen_costs(problem: Problem, choice: Sequence[int] | np.ndarray) -> ChosenCosts:
    """Looks up what each node, each edge and each device costs in a choice; integers stay integers."""
    pairs = np.asarray(problem.edge_nodes).reshape(-1, 2).tolist()
    nodes = [cost[s] for cost, s in zip(problem.node_cost, choice, strict=True)]
    edges = [cost[choice[u], choice[v]] for (u, v), cost in zip(pairs, problem.edge_cost, strict=True)]
    if not len(problem.load):
        return ChosenCosts(np.array(nodes), np.array(edges), np.zeros(0))
    with np.errstate(over="ignore"):  # only what is forbidden is so large
        loads = np.sum([np.asarray(load)[s] for load, s in zip(problem.load, choice, strict=True)], axis=0)
    return ChosenCosts(np.array(nodes), np.array(edges), loads)


def change_costs(problem: Problem, choice: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Computes what choosing each strategy would add to the cost, every other node unchanged: V arrays `[S_v]`."""
    total = [np.array(cost, float) for cost in problem.node_cost]
    pairs = np.asarray(problem.edge_nodes).reshape(-1, 2).tolist()
    for (u, v), matrix in zip(pairs, problem.edge_cost, strict=True):
        total[u] = total[u] + matrix[:, choice[v]]
        total[v] = total[v] + matrix[choice[u], :]
    if len(problem.load):
        loads = chosen_costs(problem, choice).loads
        for v, load in enumerate(np.asarray(load, float) for load in problem.load):
            total[v] = total[v] + (loads - load[choice[v]] + load).max(axis=1)
    return [costs - costs[s] for costs, s in zip(total, choice, strict=True)]


class Evaluator:
    """The exact price of many choices of one problem, which is laid out once: `Evaluator(problem)(choice)`."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._sizes = num_strategies(problem)
        self._start = np.cumsum(self._sizes) - self._sizes
        self._node_cost = _concatenate(problem.node_cost)
        self._edges = np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2)
        matrices, matrix_of = distinct_arrays(problem.edge_cost)
        lengths = np.array([np.size(matrix) for matrix in matrices], np.int64)
        self._edge_start = (np.cumsum(lengths) - lengths)[matrix_of]
        self._edge_cost = _concatenate([np.ravel(matrix) for matrix in matrices])
        self._load = list(_concatenate(problem.load).T)
        self._devices = num_memory_devices(problem)
        tables = [np.asarray(usage) for usage in problem.usage]
        if any(table.ndim > 1 for table in tables) or self._devices > 1:
            tables = [np.broadcast_to(t.reshape(len(t), -1), (len(t), self._devices)) for t in tables]
        lengths = np.array([len(table) for table in tables], np.int64)
        self._usage_start = np.cumsum(lengths) - lengths
        self._usage_node = np.asarray(problem.usage_node, np.int64)
        self._usage = _concatenate([table.ravel() for table in tables])
        if self._usage.dtype == object:  # large integers beside floats
            self._usage = np.array([Fraction(amount) for amount in self._usage.tolist()], object)
        self._times, self._interval = numbered_times(problem.usage_interval)

    def __call__(self, choice: Sequence[int] | np.ndarray) -> Evaluation:
        """Prices `choice` exactly; raises ValueError as `evaluate`."""
        choice = _checked_choice(self._sizes, choice)
        position = self._start + choice
        u, v = self._edges.T
        nodes = self._node_cost[position]
        edges = self._edge_cost[self._edge_start + choice[u] * self._sizes[v] + choice[v]]
        loads = [load[position] for load in self._load]
        sums = [exact_sum(load) for load in loads]
        largest = [[load] for load, total in zip(loads, sums, strict=True) if total == max(sums)] or [[]]
        # One sum, so that large parts may cancel; loads that are equal only when rounded are told apart by it.
        cost = max(exact_sum(_concatenate([nodes, edges, *load])) for load in largest)
        limit = self._problem.memory_limit
        peak = self._peak(choice)
        excess = _largest_excess(peak, limit)
        parts = (nodes, edges, *loads)
        forbidden = any(is_forbidden(part).any() for part in parts)
        peak = _plain(peak)
        scalar = peak.size == 1 and np.ndim(limit) == 0
        return Evaluation(cost, peak.tolist()[0] if scalar else peak, excess, bool(not forbidden and excess == 0))

    def live_usage(self, choice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the function `live_usage` returns."""
        if not len(self._usage_node):
            return np.zeros(1, np.int64), np.zeros((1, self._devices), np.int64)
        return self._times, memory_profile(self._interval, self._usage[self._rows(choice)], len(self._times))

    def _peak(self, choice: np.ndarray) -> np.ndarray:
        """Returns the peak `[D]`; where running sums of floats cannot tell it from the limit, exact ones rounded up."""
        _, used = self.live_usage(choice)
        if not np.issubdtype(used.dtype, np.floating):
            return used.max(axis=0)
        amounts = self._usage[self._rows(choice)].astype(float)
        error = sum_error([amounts], len(amounts) * float(amounts.max(axis=1).sum()))
        if error:
            near = np.abs(used - np.asarray(self._problem.memory_limit, float)) <= error
            for t in np.flatnonzero(near.any(axis=1)).tolist():
                is_live = (self._interval[:, 0] <= t) & (t < self._interval[:, 1])
                used[t] = [_sum_rounded_up(column) for column in amounts[is_live].T.tolist()]
        return used.max(axis=0)

    def _rows(self, choice: np.ndarray) -> np.ndarray:
        """Returns `[K, D]` the positions in `_usage` of what a choice uses."""
        return (self._usage_start + choice[self._usage_node])[:, None] * self._devices + np.arange(self._devices)


def _sum_rounded_up(amounts: list[float]) -> float:
    nearest = math.fsum(amounts)
    is_below = sum(map(Fraction, amounts), start=Fraction(0)) > nearest
    return math.nextafter(nearest, math.inf) if is_below else nearest


def _largest_excess(peak: np.ndarray, limit: float | np.ndarray) -> float:
    """Returns by how much a peak `[D]` is above the limit, 0 only where it is not; integers are compared exactly."""
    limits = np.broadcast_to(np.asarray(limit), peak.shape).tolist()
    above = [(used, most) for used, most in zip(peak.tolist(), limits, strict=True) if used > most]
    return max((max(float(used - most), _LEAST_EXCESS) for used, most in above), default=0.0)


def _plain(amounts: np.ndarray) -> np.ndarray:
    """Returns fractions as integers where they are whole, else as floats; other numbers as they are."""
    if amounts.dtype != object or not any(isinstance(amount, Fraction) for amount in amounts):
        return amounts
    return np.array([int(a) if a == int(a) else float(a) for a in amounts.tolist()], object)


def _checked_choice(sizes: np.ndarray, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    choice = np.asarray(choice)
    if choice.shape != sizes.shape or (not np.issubdtype(choice.dtype, np.integer) and choice.size):
        raise ValueError(
            f"`choice` must be {len(sizes)} integers, one for each node; got {choice.dtype} {choice.shape}."
        )
    wrong = np.flatnonzero((choice < 0) | (choice >= sizes))
    if wrong.size:
        v = wrong[0]
        raise ValueError(f"`choice` takes strategy {choice[v]} of node {v}, which has {sizes[v]} strategies.")
    return choice.astype(np.int64)


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates arrays; integers beside floats stay Python integers where a float could not hold them."""
    if not len(arrays):
        return np.zeros(0, np.int64)
    are_integers = [np.issubdtype(np.asarray(array).dtype, np.integer) for array in arrays]
    if any(are_integers) and not all(are_integers):
        largest = max(np.abs(a).max(initial=0) for a, is_whole in zip(arrays, are_integers, strict=True) if is_whole)
        if largest > 2**53:
            arrays = [np.asarray(array).astype(object) for array in arrays]
    return np.concatenate(arrays)


def exact_sum(terms: np.ndarray) -> float:
    """Sums integers as integers of any size and floats by fsum, without rounding until the last step.

    A sum that is too large for a float is infinite.
    """
    if np.issubdtype(terms.dtype, np.integer):
        small = np.abs(terms).sum(dtype=float) < 2**62
        return int(terms.sum()) if small else sum(terms.tolist())
    try:
        if terms.dtype != object:
            return math.fsum(terms.tolist())
        return math.inf if math.inf in terms else float(sum(map(Fraction, terms.tolist()), start=Fraction(0)))
    except OverflowError:  # only what is forbidden is so large
        return math.inf


def relaxed_cost(problem: Problem, relaxed: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """Computes J(p), the cost of weights, differentiable in them: exact for a choice, a lower estimate elsewhere.

    J(p) = Σ_v ⟨c_v, p_v⟩ + Σ_e ⟨T_e, p_u p_vᵀ⟩ + max_d Σ_v ⟨p_v, L_v[:, d]⟩

    Args:
      problem: its memory limit is a constraint, not a part of J.
      relaxed: the relaxed choice, V arrays `[S_v]` on the simplex, or their concatenation `[ΣS_v]`.

    Returns:
      A scalar. It is infinite where a forbidden entry has weight; its gradient is then that of the allowed entries.
    """
    flat = relaxed if isinstance(relaxed, jax.Array) else jnp.concatenate([jnp.ravel(weights) for weights in relaxed])
    if flat.shape != (num_strategies(problem).sum(),):
        raise ValueError(
            f"`relaxed` must have one weight for each strategy, {num_strategies(problem).sum()} in all, "
            f"got {flat.shape}."
        )
    source, target, entries = _flat_edges(problem)
    total = _expected_cost(np.concatenate([np.asarray(c, float) for c in problem.node_cost]), flat)
    total = total + _expected_cost(entries, flat[source] * flat[target])
    if len(problem.load):
        total = total + jnp.max(flat @ jnp.asarray(np.concatenate([np.asarray(row, float) for row in problem.load])))
    return total


def _expected_cost(costs: np.ndarray, weights: jax.Array) -> jax.Array:
    is_allowed = ~is_forbidden(costs)
    total = jnp.where(is_allowed, costs, 0.0) @ weights
    return total if is_allowed.all() else jnp.where(jnp.any(weights[~is_allowed] > 0), jnp.inf, total)


def _flat_edges(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns every transfer matrix entry's two positions in the concatenated weights, and its cost."""
    sizes = num_strategies(problem)
    starts = (np.cumsum(sizes) - sizes).tolist()
    source, target, entries = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for (u, v), cost in zip(np.asarray(problem.edge_nodes).reshape(-1, 2).tolist(), problem.edge_cost, strict=True):
        rows, columns = np.indices(np.shape(cost))
        source.append(starts[u] + rows.ravel())
        target.append(starts[v] + columns.ravel())
        entries.append(np.asarray(cost, float).ravel())
    return np.concatenate(source), np.concatenate(target), np.concatenate(entries)
