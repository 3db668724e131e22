"""What a choice of strategies costs, exactly, and its relaxed cost: weights on strategies in place of a choice.

The relaxed cost is differentiable in the weights, and the exact one of weights that are 0 and 1.

What is wrong with an infeasible choice is also said in words: forbidden strategies and transfers, memory in excess.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Evaluation, Problem, edge_ends, is_forbidden, load_groups, num_memory_devices, num_strategies
from cost.edges import distinct_arrays
from cost.memory import memory_profile, numbered_times, sum_error
from cost.real_numbers import as_array

_LEAST_EXCESS = float(np.finfo(float).tiny)
"""What an excess is at least: the difference of large numbers may be rounded to 0."""


def evaluate(problem: Problem, choice: Sequence[int] | np.ndarray) -> Evaluation:
    """Prices `choice` (`[V]` strategy indices) exactly: integer sums are exact, float sums correctly rounded.

    Raises:
      ValueError: `choice` has the wrong length or an index that its node does not have.
    """
    return Evaluator(problem)(choice)


def checked_choice(problem: Problem, choice: Sequence[int] | np.ndarray, name: str = "choice") -> np.ndarray:
    """Returns `choice` as `[V]` 64-bit integers.

    Args:
      name: of the argument, for errors.

    Raises:
      ValueError: `choice` has the wrong length or an index that its node does not have.
    """
    return _checked_choice(num_strategies(problem), choice, name)


class ChosenCosts(NamedTuple):
    """The parts of a choice's cost, which are the sums of `nodes` and `edges` and the largest of each group of `loads`.

    Attributes:
      nodes: `[V]`.
      edges: `[E]`.
      loads: `[R]`; `[0]` where nothing is a maximum.
    """

    nodes: np.ndarray
    edges: np.ndarray
    loads: np.ndarray


def chosen_costs(problem: Problem, choice: Sequence[int] | np.ndarray) -> ChosenCosts:
    """Looks up what each node, each edge and each load is in a choice; integers stay integers."""
    pairs = edge_ends(problem).tolist()
    nodes = [cost[s] for cost, s in zip(problem.node_cost, choice, strict=True)]
    edges = [cost[choice[u], choice[v]] for (u, v), cost in zip(pairs, problem.edge_cost, strict=True)]
    if not len(problem.load):
        return ChosenCosts(np.array(nodes), np.array(edges), np.zeros(0))
    with np.errstate(over="ignore"):  # only what is forbidden is so large
        own = [np.asarray(load)[s] for load, s in zip(problem.load, choice, strict=True)]
        sent = [np.asarray(load)[choice[u], choice[v]] for (u, v), load in zip(pairs, problem.edge_load, strict=False)]
        loads = np.sum([*own, *sent], axis=0)
    return ChosenCosts(np.array(nodes), np.array(edges), loads)


def change_costs(problem: Problem, choice: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Computes what choosing each strategy would add to the cost, every other node unchanged: V arrays `[S_v]`."""
    total = [np.array(cost, float) for cost in problem.node_cost]
    pairs = edge_ends(problem).tolist()
    for (u, v), matrix in zip(pairs, problem.edge_cost, strict=True):
        total[u] = total[u] + matrix[:, choice[v]]
        total[v] = total[v] + matrix[choice[u], :]
    if len(problem.load):
        loads, groups = chosen_costs(problem, choice).loads, load_groups(problem)
        changes = [
            np.asarray(load, float) - np.asarray(load, float)[s] for load, s in zip(problem.load, choice, strict=True)
        ]
        for (u, v), load in zip(pairs, problem.edge_load, strict=False):
            changes[u] = changes[u] + load[:, choice[v]] - load[choice[u], choice[v]]
            changes[v] = changes[v] + load[choice[u]] - load[choice[u], choice[v]]
        for v, change in enumerate(changes):
            total[v] = total[v] + sum((loads + change)[:, group].max(axis=1) for group in groups)
    return [costs - costs[s] for costs, s in zip(total, choice, strict=True)]


class Evaluator:
    """The exact price of many choices of one problem, which is laid out once: `Evaluator(problem)(choice)`."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._sizes = num_strategies(problem)
        self._start = np.cumsum(self._sizes) - self._sizes
        self._node_cost = _concatenate(problem.node_cost)
        self._edges = edge_ends(problem)
        matrices, matrix_of = distinct_arrays(problem.edge_cost)
        lengths = np.array([np.size(matrix) for matrix in matrices], np.int64)
        self._edge_start = (np.cumsum(lengths) - lengths)[matrix_of]
        self._edge_cost = _concatenate([np.ravel(matrix) for matrix in matrices])
        self._load = list(_concatenate(problem.load).T)
        self._load_groups = load_groups(problem)
        self._edge_load = self._columns_of_edges(problem.edge_load)
        self._amount = list(_concatenate(problem.amount).T)
        self._edge_amount = self._columns_of_edges(problem.edge_amount)
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
        pair = choice[u] * self._sizes[v] + choice[v]
        edges = self._edge_cost[self._edge_start + pair]
        loads = _terms(self._load, self._edge_load, position, pair)
        largest = [_largest([loads[r] for r in group.tolist()]) for group in self._load_groups]
        cost = exact_sum(_concatenate([nodes, edges, *largest]))  # one sum, so that large parts may cancel
        limit = self._problem.memory_limit
        peak = self._peak(choice)
        amounts = _terms(self._amount, self._edge_amount, position, pair)
        excess = max(_largest_excess(peak, limit), _amounts_excess(amounts, self._problem.amount_limit))
        parts = (nodes, edges, *loads)
        forbidden = any(is_forbidden(part).any() for part in parts)
        peak = _plain(peak)
        scalar = peak.size == 1 and np.ndim(limit) == 0
        return Evaluation(cost, peak.tolist()[0] if scalar else peak, excess, bool(not forbidden and excess == 0))

    def _columns_of_edges(self, tables: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns where each edge's part starts `[E]`, and for each load or amount all distinct parts as one array."""
        distinct, table_of = distinct_arrays(tables)
        lengths = np.array([np.size(table[..., 0]) for table in distinct], np.int64)
        rows = _concatenate([np.reshape(table, (-1, np.shape(table)[2])) for table in distinct])
        return (np.cumsum(lengths) - lengths)[table_of], list(rows.T)

    def live_usage(self, choice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times `[T]` at which the live usage changes and the usage `[T, D]` from each until the next."""
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


def _terms(
    of_nodes: list[np.ndarray], of_edges: tuple[np.ndarray, list[np.ndarray]], position: np.ndarray, pair: np.ndarray
) -> list[np.ndarray]:
    """Returns for each load or amount what the chosen strategies and pairs of strategies add."""
    start, columns = of_edges
    if not columns:
        return [column[position] for column in of_nodes]
    at = start + pair
    return [_concatenate([own[position], sent[at]]) for own, sent in zip(of_nodes, columns, strict=True)]


def _largest(loads: list[np.ndarray]) -> np.ndarray:
    """Returns the terms of the largest load; loads that are equal only when rounded are told apart."""
    sums = [exact_sum(load) for load in loads]
    first, *others = [load for load, total in zip(loads, sums, strict=True) if total == max(sums)]
    if np.issubdtype(first.dtype, np.floating) and math.isfinite(max(sums)):
        for load in others:
            if exact_sum(np.concatenate([load, -first])) > 0:
                first = load
    return first


def _amounts_excess(amounts: list[np.ndarray], limits: np.ndarray) -> float:
    """Returns by how much an amount is above its limit, 0 only where none is; rounded once."""
    pairs = zip(amounts, np.asarray(limits).tolist(), strict=True)
    excess = [exact_sum(_concatenate([terms, np.array([-most])])) for terms, most in pairs if most < math.inf]
    return max((float(e) for e in excess if e > 0), default=0.0)


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


def _checked_choice(sizes: np.ndarray, choice: Sequence[int] | np.ndarray, name: str = "choice") -> np.ndarray:
    choice = as_array(choice)
    if choice.shape != sizes.shape or (not np.issubdtype(choice.dtype, np.integer) and choice.size):
        raise ValueError(
            f"`{name}` must be {len(sizes)} integers, one for each node; got {choice.dtype} {choice.shape}."
        )
    wrong = np.flatnonzero((choice < 0) | (choice >= sizes))
    if wrong.size:
        v = wrong[0]
        raise ValueError(
            f"`{name}` takes strategy {choice[v]} of node {v}, which has {sizes[v]} strategies, 0 to {sizes[v] - 1}."
        )
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

    J(p) = Σ_v ⟨c_v, p_v⟩ + Σ_e ⟨T_e, p_u p_vᵀ⟩ + Σ_g max_(r in g) load_r(p)

    with load_r(p) = Σ_v ⟨L_v[:, r], p_v⟩ + Σ_e ⟨L_e[..., r], p_u p_vᵀ⟩.

    Args:
      problem: its limits are constraints, not a part of J.
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
    source, target = _pairs(problem)
    entries = _float_array([np.ravel(matrix) for matrix in problem.edge_cost])
    total = _expected_cost(_float_array(problem.node_cost), flat)
    total = total + _expected_cost(entries, flat[source] * flat[target])
    if not len(problem.load):
        return total
    loads = flat @ jnp.asarray(_float_array(problem.load))
    if len(problem.edge_load):
        tables = _float_array([np.reshape(table, (-1, np.shape(table)[2])) for table in problem.edge_load])
        loads = loads + (flat[source] * flat[target]) @ jnp.asarray(tables)
    return total + sum(jnp.max(loads[group]) for group in load_groups(problem))


def _float_array(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(array, float) for array in arrays]) if len(arrays) else np.zeros(0)


def _expected_cost(costs: np.ndarray, weights: jax.Array) -> jax.Array:
    is_allowed = ~is_forbidden(costs)
    total = jnp.where(is_allowed, costs, 0.0) @ weights
    return total if is_allowed.all() else jnp.where(jnp.any(weights[~is_allowed] > 0), jnp.inf, total)


def _pairs(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two positions in the concatenated weights of every transfer matrix's entries."""
    sizes = num_strategies(problem)
    starts = (np.cumsum(sizes) - sizes).tolist()
    source, target = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for (u, v), cost in zip(edge_ends(problem).tolist(), problem.edge_cost, strict=True):
        rows, columns = np.indices(np.shape(cost))
        source.append(starts[u] + rows.ravel())
        target.append(starts[v] + columns.ravel())
    return np.concatenate(source), np.concatenate(target)


_MOST_OF_A_KIND = 5
"""Sentences about each kind of violation, and nodes that each one names; enough to see what they have in common."""


def violations(problem: Problem, choice: Sequence[int] | np.ndarray) -> list[str]:
    """Returns one sentence for each rule that a choice breaks, at most a few of each kind; none for a feasible choice.

    Args:
      problem: a valid problem.
      choice: `[V]` strategy indices.
    """
    choice = np.asarray(choice)
    node_cost, edge_cost, _ = chosen_costs(problem, choice)
    nodes = np.flatnonzero(is_forbidden(node_cost))[:_MOST_OF_A_KIND]
    edges = edge_ends(problem)[is_forbidden(edge_cost)][:_MOST_OF_A_KIND]
    return [
        *(f"Node {v} takes strategy {choice[v]}, which is forbidden." for v in nodes),
        *(
            f"Nodes {u} and {v} take strategies {choice[u]} and {choice[v]}, which exclude each other."
            for u, v in edges
        ),
        *_memory_violations(problem, choice),
    ]


def format_excess(excess: float) -> str:
    """Writes by how much a limit is exceeded: whole where that says something, else with the digits that do."""
    return f"{excess:,.0f}" if excess >= 1 or excess == 0 else f"{excess:.2g}"


def _memory_violations(problem: Problem, choice: np.ndarray) -> list[str]:
    """Returns a sentence for each of the times at which the memory is exceeded most."""
    times, memory = Evaluator(problem).live_usage(choice)
    excess = np.asarray(memory, float) - np.asarray(problem.memory_limit, float)
    peaks = excess.max(axis=1)
    sentences = []
    for t in np.argsort(-peaks, kind="stable")[:_MOST_OF_A_KIND]:
        if peaks[t] <= 0:
            break
        device = int(excess[t].argmax())
        where = f" on device {device}" if excess.shape[1] > 1 else ""
        users = _largest_users(problem, choice, int(times[t]), device)
        sentences.append(
            f"At time {times[t]} the memory{where} exceeds the limit by {format_excess(peaks[t])}; "
            f"its largest users are nodes {', '.join(f'{v} ({amount:,.0f})' for v, amount in users)}."
        )
    return sentences


def _largest_users(problem: Problem, choice: np.ndarray, time: int, device: int) -> list[tuple[int, float]]:
    """Returns the nodes that use most of a device's memory at a time, and how much each one uses."""
    amounts: dict[int, float] = {}
    for v, usage, (start, end) in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True):
        if start <= time < end:
            amount = np.ravel(np.asarray(usage)[choice[v]])
            amounts[int(v)] = amounts.get(int(v), 0.0) + float(amount[min(device, len(amount) - 1)])
    return sorted(amounts.items(), key=lambda item: -item[1])[:_MOST_OF_A_KIND]
