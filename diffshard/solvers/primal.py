"""The plain relaxation: softmax logits descended by Adam while the temperature falls, many restarts side by side.

The relaxed cost is that of `cost.relaxed`; memory above the limit adds a penalty that grows with the time. Kept for
small problems, for the ablation, and as the form in which other losses can join the cost.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.problem import Problem
from diffshard.flat import Flat, flatten, ragged, with_ceiling
from diffshard.solve import Proposal

_RESTARTS = 16
_STEPS = 600
_BLOCK = 50  # steps of one compiled call
_RATE = 0.3
_TEMPERATURES = 1.0, 0.05
_PENALTIES = 1.0, 100.0  # first and last, of the whole cost for each limit's worth of memory in excess


class _Tables(NamedTuple):
    """The problem in units of its mean cost of a node."""

    node: jax.Array  # [N] which node a strategy belongs to
    cost: jax.Array  # [N]
    left: jax.Array  # [Σ entries] positions of an entry's two strategies
    right: jax.Array
    entries: jax.Array
    load: jax.Array  # [N, D]
    usage: jax.Array  # [nonzeros] in units of the limit
    usage_row: jax.Array
    usage_column: jax.Array
    interval: jax.Array  # [K, 2]
    base: jax.Array  # [T, D]


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields the roundings of all restarts after each block of steps; has no bound."""
    flat = with_ceiling(flatten(problem))
    tables = _tables(flat)
    optimiser = optax.adam(_RATE)
    logits = jax.random.normal(key, (_RESTARTS, len(flat.cost)))
    state = jax.vmap(optimiser.init)(logits)
    count, devices = len(flat.sizes), flat.base.shape[1]

    @jax.jit
    def block(logits: jax.Array, state: optax.OptState, done: jax.Array) -> tuple[Any, optax.OptState]:
        def step(carry, i):
            logits, state = carry
            progress = jnp.minimum(done + i / _STEPS, 1.0)
            gradient = jax.vmap(jax.grad(lambda a: _objective(tables, a, progress, count, devices)))(logits)
            updates, state = jax.vmap(optimiser.update)(gradient, state)
            return (optax.apply_updates(logits, updates), state), None

        return jax.lax.scan(step, (logits, state), jnp.arange(_BLOCK))[0]

    start, progress = time.perf_counter(), 0.0
    for i in range(0, _STEPS, _BLOCK):
        progress = i / _STEPS
        if time_limit_s is not None:
            progress = max(progress, (time.perf_counter() - start) / time_limit_s)
        logits, state = block(logits, state, jnp.float32(progress))
        for row in np.asarray(logits):
            yield Proposal(_rounded(flat, row))


def _rounded(flat: Flat, logits: np.ndarray) -> np.ndarray:
    return np.array([part.argmax() for part in np.split(logits, flat.start[1:-1])], np.int64)


def _objective(tables: _Tables, logits: jax.Array, progress: jax.Array, count: int, devices: int) -> jax.Array:
    hot, cold = _TEMPERATURES
    rows = _softmax(logits / (hot * (cold / hot) ** progress), tables.node, count)
    cost = tables.cost @ rows + tables.entries @ (rows[tables.left] * rows[tables.right])
    if tables.load.shape[1]:
        cost += jnp.max(rows @ tables.load)
    if tables.base.size:
        low, high = _PENALTIES
        over = jax.nn.relu(_memory(tables, rows, devices) - 1.0)
        cost += low * (high / low) ** progress * count * over.sum()
    return cost


def _softmax(logits: jax.Array, node: jax.Array, count: int) -> jax.Array:
    most = jax.ops.segment_max(logits, node, count, indices_are_sorted=True)
    weights = jnp.exp(logits - most[node])
    return weights / jax.ops.segment_sum(weights, node, count, indices_are_sorted=True)[node]


def _memory(tables: _Tables, rows: jax.Array, devices: int) -> jax.Array:
    """`[T, D]` in units of the limit."""
    times, usages = tables.base.shape[0], tables.interval.shape[0]
    used = jax.ops.segment_sum(tables.usage * rows[tables.usage_row], tables.usage_column, usages * devices)
    used = used.reshape(usages, devices)
    change = jnp.zeros((times + 1, devices)).at[tables.interval[:, 0]].add(used).at[tables.interval[:, 1]].add(-used)
    return jnp.cumsum(change, axis=0)[:-1] + tables.base


def _tables(flat: Flat) -> _Tables:
    forward = np.flatnonzero(flat.source < flat.target)
    rows, columns = flat.sizes[flat.source[forward]], flat.sizes[flat.target[forward]]
    size = rows * columns
    within = ragged(np.zeros(len(size), np.int64), size)
    width = np.repeat(columns, size)
    unit = max(float(np.median(np.abs(flat.cost[flat.cost != 0]))) if flat.cost.any() else 0.0, 1e-30)
    usage = flat.usage.tocoo()
    limit = np.maximum(flat.limit, 1e-30)
    return _Tables(
        node=jnp.asarray(np.repeat(np.arange(len(flat.sizes)), flat.sizes)),
        cost=jnp.asarray(flat.cost / unit, jnp.float32),
        left=jnp.asarray(np.repeat(flat.start[flat.source[forward]], size) + within // width),
        right=jnp.asarray(np.repeat(flat.start[flat.target[forward]], size) + within % width),
        entries=jnp.asarray(flat.entries[ragged(flat.matrix[forward], size)] / unit, jnp.float32),
        load=jnp.asarray(flat.load / unit, jnp.float32),
        usage=jnp.asarray(usage.data / limit[usage.col % len(limit)], jnp.float32),
        usage_row=jnp.asarray(usage.row),
        usage_column=jnp.asarray(usage.col),
        interval=jnp.asarray(flat.interval),
        base=jnp.asarray(flat.base / limit, jnp.float32),
    )
