"""The one representation of everything searchable, and what a choice of strategies costs in it.

Letters for sizes: V nodes, S_v strategies of node v, E edges, K usages, D devices that differ from each other.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FORBIDDEN = 10**18
"""Costs from here on, infinity included, stand for what must not be chosen (IOPDDL's convention)."""


class Problem(NamedTuple):
    """Nodes with strategies, edges with transfer matrices, memory usages with live intervals, loads of devices.

    A choice is one strategy index for each node, `[V]` integers. Its cost is the sum of the chosen node costs and edge
    costs plus the largest device load; at every time the chosen usages that are live must fit the memory limit.
    Costs are in seconds and usages in bytes for our own spaces; contest instances have units of their own.

    Attributes:
      node_cost: V arrays `[S_v]`.
      edge_nodes: `[E, 2]` integers, the two ends u, v of each edge; u != v.
      edge_cost: E arrays `[S_u, S_v]`; edges with equal matrices may share one array.
      usage_node: `[K]` integers, the node that each usage belongs to; a node may have none or several.
      usage: K arrays `[S_v]` (the same on all devices) or `[S_v, D]`.
      usage_interval: `[K, 2]` integers, half-open `[start, end)` times at which the usage is live.
      memory_limit: a number, or `[D]` where devices differ; `inf` means no limit.
      load: V arrays `[S_v, D]`, seconds of each device's time, or `()` where all devices do equal work.
    """

    node_cost: Sequence[np.ndarray]
    edge_nodes: np.ndarray
    edge_cost: Sequence[np.ndarray]
    usage_node: np.ndarray
    usage: Sequence[np.ndarray]
    usage_interval: np.ndarray
    memory_limit: float | np.ndarray = np.inf
    load: Sequence[np.ndarray] = ()


def is_forbidden(cost: np.ndarray) -> np.ndarray:
    """Which entries must not be chosen."""
    return np.asarray(cost) >= FORBIDDEN


def num_strategies(problem: Problem) -> np.ndarray:
    """`[V]`: how many strategies each node has."""
    return np.fromiter((len(cost) for cost in problem.node_cost), np.int64, len(problem.node_cost))


def num_devices(problem: Problem) -> int:
    """D of the loads, 0 where all devices do equal work."""
    return np.asarray(problem.load[0]).shape[1] if len(problem.load) else 0


def validate(problem: Problem) -> None:
    """Holds a problem from outside against the rules of `Problem`.

    Raises:
      ValueError: names the field, the rule, the place and the value.
    """
    sizes = num_strategies(problem)
    for v, cost in enumerate(problem.node_cost):
        _check_costs(cost, (len(cost),), f"`node_cost[{v}]`")
    if sizes.size and sizes.min() == 0:
        raise ValueError(f"`node_cost[{sizes.argmin()}]` is empty; every node needs at least one strategy.")
    _check_edges(problem, sizes)
    _check_usages(problem, sizes)
    if len(problem.load) not in (0, len(sizes)):
        raise ValueError(f"`load` must be () or one array for each of the {len(sizes)} nodes, got {len(problem.load)}.")
    for v, load in enumerate(problem.load):
        _check_costs(load, (sizes[v], num_devices(problem)), f"`load[{v}]`")


def _check_edges(problem: Problem, sizes: np.ndarray) -> None:
    edges = _checked_pairs(problem.edge_nodes, len(problem.edge_cost), "`edge_nodes`")
    wrong = np.flatnonzero(((edges < 0) | (edges >= len(sizes))).any(axis=1))
    if wrong.size:
        e = wrong[0]
        raise ValueError(f"`edge_nodes[{e}]` is {edges[e].tolist()}, but the nodes are 0 to {len(sizes) - 1}.")
    loops = np.flatnonzero(edges[:, 0] == edges[:, 1])
    if loops.size:
        e = loops[0]
        raise ValueError(f"`edge_nodes[{e}]` joins node {edges[e, 0]} to itself; add its diagonal to `node_cost`.")
    seen: set[tuple[int, int, int]] = set()
    for e, (cost, (u, v)) in enumerate(zip(problem.edge_cost, edges.tolist(), strict=True)):
        if (id(cost), sizes[u], sizes[v]) not in seen:  # shared matrices are looked at once
            _check_costs(cost, (sizes[u], sizes[v]), f"`edge_cost[{e}]` between nodes {u} and {v}")
            seen.add((id(cost), sizes[u], sizes[v]))


def _check_usages(problem: Problem, sizes: np.ndarray) -> None:
    limit = np.asarray(problem.memory_limit, float)
    if limit.ndim > 1 or np.isnan(limit).any() or (limit < 0).any():
        raise ValueError(f"`memory_limit` must be a number or `[D]`, not negative, got {problem.memory_limit}.")
    nodes = np.asarray(problem.usage_node)
    if nodes.shape != (len(problem.usage),):
        raise ValueError(f"`usage_node` must have one node for each of {len(problem.usage)} usages, got {nodes.shape}.")
    intervals = _checked_pairs(problem.usage_interval, len(problem.usage), "`usage_interval`")
    for k, (usage, v, (start, end)) in enumerate(zip(problem.usage, nodes.tolist(), intervals.tolist(), strict=True)):
        if not 0 <= v < len(sizes):
            raise ValueError(f"`usage_node[{k}]` is {v}, but the nodes are 0 to {len(sizes) - 1}.")
        if start >= end:
            raise ValueError(f"`usage_interval[{k}]` is [{start}, {end}), which is empty; leave the usage out.")
        devices = np.shape(usage)[1:]
        if devices not in ((), (limit.size,)) and not (len(devices) == 1 and limit.ndim == 0):
            raise ValueError(
                f"`usage[{k}]` has shape {np.shape(usage)}, but `memory_limit` is for {limit.size} devices."
            )
        _check_costs(usage, (sizes[v], *devices), f"`usage[{k}]` of node {v}")
        if len(usage) and np.min(usage) < 0:
            raise ValueError(f"`usage[{k}]` of node {v} must not be negative, got {np.min(usage)}.")


def _check_costs(cost: np.ndarray, shape: tuple, name: str) -> None:
    if np.shape(cost) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(map(int, shape))}, got {np.shape(cost)}.")
    if not np.issubdtype(np.asarray(cost).dtype, np.number) or np.iscomplexobj(cost):
        raise ValueError(f"{name} must hold real numbers, got {np.asarray(cost).dtype}.")
    if np.isnan(cost).any() or np.isneginf(cost).any():
        raise ValueError(f"{name} must not hold NaN or -inf; `inf` marks what must not be chosen.")


def _checked_pairs(pairs: np.ndarray, count: int, name: str) -> np.ndarray:
    pairs = np.asarray(pairs)
    if pairs.size == 0 and count == 0:
        return np.zeros((0, 2), np.int64)
    if pairs.shape != (count, 2) or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(f"{name} must be integers of shape {(count, 2)}, got {pairs.dtype} {pairs.shape}.")
    return pairs


class Evaluation(NamedTuple):
    """What one choice costs, exactly.

    Attributes:
      cost: node, edge and largest load cost; a Python integer when all chosen costs are integers, so sums are exact.
      peak: the largest live usage over time, a number or `[D]`.
      excess: by how much the peak is above the limit, 0 where it fits (the largest over devices).
      feasible: the memory fits and nothing forbidden is chosen.
    """

    cost: float
    peak: float | np.ndarray
    excess: float
    feasible: bool


def evaluate(problem: Problem, choice: Sequence[int] | np.ndarray) -> Evaluation:
    """The exact cost of `choice` (`[V]` strategy indices): integer sums are exact, float sums correctly rounded.

    Raises:
      ValueError: `choice` has the wrong length or an index that its node does not have.
    """
    choice = _checked_choice(problem, choice)
    terms = [cost[s] for cost, s in zip(problem.node_cost, choice, strict=True)]
    ends = choice[np.asarray(problem.edge_nodes)].tolist() if len(problem.edge_cost) else []
    terms += [cost[s, t] for cost, (s, t) in zip(problem.edge_cost, ends, strict=True)]
    if len(problem.load):
        loads = [[row[s, d] for row, s in zip(problem.load, choice, strict=True)] for d in range(num_devices(problem))]
        terms.append(max(_exact_sum(load) for load in loads))
    cost = _exact_sum(terms)
    _, usage = live_usage(problem, choice)
    peak = usage.max(axis=0)
    excess = np.maximum(peak - np.asarray(problem.memory_limit), 0).max()
    scalar = peak.size == 1 and np.ndim(problem.memory_limit) == 0
    allowed = not any(is_forbidden(np.asarray(term)) for term in terms)
    return Evaluation(cost, np.ravel(peak)[0].item() if scalar else peak, float(excess), bool(allowed and excess == 0))


def live_usage(problem: Problem, choice: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times `[T]` at which the live usage changes and the usage `[T, D]` from each until the next (D = 1 if scalar)."""
    devices = max([np.size(problem.memory_limit), *(np.size(u[0]) for u in problem.usage)])
    if not len(problem.usage):
        return np.zeros(1, np.int64), np.zeros((1, devices), np.int64)
    chosen = [np.asarray(u)[choice[v]] for u, v in zip(problem.usage, problem.usage_node, strict=True)]
    chosen = np.stack([np.broadcast_to(row, (devices,)) for row in chosen])
    if np.issubdtype(chosen.dtype, np.integer) and np.abs(chosen).sum(dtype=float) > 2**62:
        chosen = chosen.astype(object)  # beyond 64 bits Python's integers stay exact
    intervals = np.asarray(problem.usage_interval)
    times, index = np.unique(intervals, return_inverse=True)
    index = index.reshape(intervals.shape)
    delta = np.zeros((len(times), devices), chosen.dtype)
    np.add.at(delta, index[:, 0], chosen)
    np.subtract.at(delta, index[:, 1], chosen)
    return times, np.cumsum(delta, axis=0)


def relaxed_cost(problem: Problem, rows: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """J(p): the cost of rows of weights, differentiable in them; exact on one-hot rows, a lower estimate elsewhere.

    J(p) = Σ_v ⟨c_v, p_v⟩ + Σ_e ⟨T_e, p_u p_vᵀ⟩ + max_d Σ_v ⟨p_v, L_v[:, d]⟩

    Args:
      problem: its memory limit is a constraint, not a part of J.
      rows: V arrays `[S_v]` on the simplex, or their concatenation `[ΣS_v]`.

    Returns:
      A scalar. It is infinite where a forbidden entry has weight; its gradient is then that of the allowed entries.
    """
    flat = rows if isinstance(rows, jax.Array) else jnp.concatenate([jnp.ravel(row) for row in rows])
    if flat.shape != (num_strategies(problem).sum(),):
        raise ValueError(
            f"`rows` must have one weight for each strategy, {num_strategies(problem).sum()} in all, got {flat.shape}."
        )
    source, target, entries = _flat_edges(problem)
    total = _weighed(np.concatenate([np.asarray(c, float) for c in problem.node_cost]), flat)
    total = total + _weighed(entries, flat[source] * flat[target])
    if len(problem.load):
        total = total + jnp.max(flat @ jnp.asarray(np.concatenate([np.asarray(row, float) for row in problem.load])))
    return total


def _weighed(costs: np.ndarray, weights: jax.Array) -> jax.Array:
    allowed = ~is_forbidden(costs)
    total = jnp.where(allowed, costs, 0.0) @ weights
    return total if allowed.all() else jnp.where(jnp.any(weights[~allowed] > 0), jnp.inf, total)


def _flat_edges(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every entry of every transfer matrix its two positions in the concatenated rows, and its cost."""
    sizes = num_strategies(problem)
    starts = np.cumsum(sizes) - sizes
    edges = np.asarray(problem.edge_nodes, np.int64).reshape(-1, 2)
    empty = np.zeros(0, np.int64)
    source = [np.repeat(starts[u] + np.arange(sizes[u]), sizes[v]) for u, v in edges]
    target = [np.tile(starts[v] + np.arange(sizes[v]), sizes[u]) for u, v in edges]
    entries = [np.asarray(cost, float).ravel() for cost in problem.edge_cost]
    return np.concatenate([empty, *source]), np.concatenate([empty, *target]), np.concatenate([empty * 0.0, *entries])


def _exact_sum(terms: list) -> float:
    """Integers as Python integers, floats by fsum: no rounding until the last step."""
    whole = sum(int(term) for term in terms if isinstance(term, (int, np.integer)))
    rest = [float(term) for term in terms if not isinstance(term, (int, np.integer))]
    return whole + math.fsum(rest) if rest else whole


def _checked_choice(problem: Problem, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    choice, sizes = np.asarray(choice), num_strategies(problem)
    if choice.shape != sizes.shape or (not np.issubdtype(choice.dtype, np.integer) and choice.size):
        raise ValueError(
            f"`choice` must be {len(sizes)} integers, one for each node; got shape {choice.shape} of {choice.dtype}."
        )
    wrong = np.flatnonzero((choice < 0) | (choice >= sizes))
    if wrong.size:
        v = wrong[0]
        raise ValueError(f"`choice` takes strategy {choice[v]} of node {v}, which has {sizes[v]} strategies.")
    return choice.astype(np.int64)
