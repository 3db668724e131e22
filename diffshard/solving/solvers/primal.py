"""The plain relaxation: a softmax over each node's logits makes the cost differentiable, and Adam minimises it.

It starts at several random logits, with an entropy whose temperature falls. The objective is the relaxed cost
(`cost.relaxed`) of rows p = softmax(logits), less temperature times their entropy, plus a penalty on the expected
memory in excess: an augmented Lagrangian whose multipliers rise where the limit is exceeded. Rows are rounded node by
node, each to the cheapest strategy given the other rows, and the choices come down by single-node moves. Uniform rows
are rounded first, so that there is an answer while the gradient is compiled.

Source: the relaxation of Liu, Simonyan and Yang, "DARTS" (ICLR 2019), section 2.2, annealed as in mean-field annealing
(Peterson and Anderson, 1987); the rounding is the method of conditional expectations (Raghavan, 1988).
"""

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.base import Problem
from cost.memory import limit_unit
from diffshard.base import Proposal
from diffshard.solving.examples import chain
from diffshard.solving.flat import Flat, flatten, numpy_generator, ragged_positions, with_ceiling
from diffshard.solving.moves.descent import Descent

# All numbers were chosen by hand on generated layers.
_NUM_STARTS = 8  # random logits, side by side
_NUM_STEPS = 600  # of Adam, without a time limit
_MOST_STEPS_PER_CALL = 25  # of the compiled function, between two looks at the clock
_CALL_TIME_SHARE = 0.01  # of the time limit, for one call
_ADAM = optax.adam(0.1)
_TEMPERATURES = 0.3, 1e-3  # first and last, in the cost per node of a random choice
_MULTIPLIER_GAIN = 0.3  # of the multipliers in one step, for a whole limit's worth in excess
_DESCENT_TIME_SHARE = 0.6  # of the time limit, for the gradient
_NUM_ROUNDINGS = 4  # during the descent
_LARGEST_ENTRY_PER_NODE = 30.0  # in the energy's units: larger entries, such as forbidden ones, would hide all others
_UNLIMITED_ROOM = 1e6  # limits' worth of memory, where there is no limit
_LEAST_LENGTH = 32  # of an array
_LEAST_WIDTH = 4  # of a block
_MOST_SINGLE_BLOCK_ENTRIES = 1 << 18  # 1 MiB up to which all edges share one block, so that less is compiled


class _Energy(NamedTuple):
    """The relaxed cost's numbers, in units of a typical entry; lengths are rounded up to powers of two.

    Attributes:
      node: `[N]` the node of each strategy; padding belongs to a node of its own.
      cost: `[N]`.
      blocks: for each padded shape the edges' matrices `[n, A, B]` and positions of rows and columns; N is padding.
      usage: row, column and amount of the sparse usages, in units of the limit.
      interval: `[K, 2]` times.
      room: `[T, D]` limit less base, in units of the limit.
      load: `[N, D']`.
    """

    node: jax.Array
    cost: jax.Array
    blocks: list[tuple[jax.Array, jax.Array, jax.Array]]
    usage: tuple[jax.Array, jax.Array, jax.Array]
    interval: jax.Array
    room: jax.Array
    load: jax.Array


class _State(NamedTuple):
    logits: Any  # [N]
    moments: optax.OptState
    multiplier: jax.Array  # [T, D]


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields roundings of all starts, at several moments and at the end; has no bound."""
    start, rng = time.perf_counter(), numpy_generator(key)
    flat = with_ceiling(flatten(problem))
    uniform = np.repeat(1.0 / flat.sizes, flat.sizes)
    yield from _roundings(flat, uniform[None], rng)
    energy = _energy(flat)
    count = _rounded_up(len(flat.sizes) + 1)
    state = _begin(energy, key)
    hot, cold = np.array(_TEMPERATURES) * _typical(flat, rng)
    state = jax.block_until_ready(_descend(energy, state, jnp.float32(hot), 0, count))  # compiles
    share, step, num_roundings, steps = 0.0, 0, 0, _MOST_STEPS_PER_CALL if time_limit_s is None else 1
    while share < 1:
        begun = time.perf_counter()
        state = jax.block_until_ready(_descend(energy, state, jnp.float32(hot * (cold / hot) ** share), steps, count))
        step += steps
        if time_limit_s is None:
            share = step / _NUM_STEPS
        else:
            now = time.perf_counter()
            share = (now - start) / (_DESCENT_TIME_SHARE * time_limit_s)
            steps = int(np.clip(_CALL_TIME_SHARE * time_limit_s * steps / (now - begun), 1, _MOST_STEPS_PER_CALL))
        if share >= (num_roundings + 1) / _NUM_ROUNDINGS or share >= 1:
            num_roundings += 1
            rows = np.asarray(_rows(energy, state.logits, count), float)
            yield from _roundings(flat, rows[:, : len(flat.cost)], rng)
        else:
            yield Proposal()


@jax.jit
def _begin(energy: _Energy, key: jax.Array) -> _State:
    logits = jax.random.normal(key, (_NUM_STARTS, len(energy.cost)))
    return jax.vmap(lambda row: _State(row, _ADAM.init(row), jnp.zeros_like(energy.room)))(logits)


@functools.partial(jax.jit, static_argnums=4)
def _descend(energy: _Energy, states: _State, temperature: jax.Array, steps: int, count: int) -> _State:
    """Makes some steps of every start at one temperature."""

    def step(_: int, state: _State) -> _State:
        gradient, excess = jax.grad(_objective, argnums=1, has_aux=True)(
            energy, state.logits, state.multiplier, temperature, count
        )
        update, moments = _ADAM.update(gradient, state.moments)
        multiplier = jnp.maximum(state.multiplier + _MULTIPLIER_GAIN * excess, 0.0)
        return _State(optax.apply_updates(state.logits, update), moments, multiplier)

    return jax.vmap(lambda state: jax.lax.fori_loop(0, steps, step, state))(states)


def _objective(
    energy: _Energy, logits: jax.Array, multiplier: jax.Array, temperature: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the objective of one start, and the expected excess of memory `[T, D]`, negative where there is room."""
    rows = _softmax(energy.node, logits, count)
    padded_rows = jnp.append(rows, 0.0)
    total = energy.cost @ rows
    for matrices, source, target in energy.blocks:
        total += jnp.einsum("na,nab,nb->", padded_rows[source], matrices, padded_rows[target])
    if energy.load.shape[1]:
        total += jnp.max(rows @ energy.load)
    scale = jax.lax.stop_gradient(jnp.abs(total))  # multipliers are in parts of the whole cost
    total += temperature * jnp.sum(rows * jnp.log(jnp.maximum(rows, 1e-30)))
    excess = _expected_memory(energy, rows) - energy.room
    return total + scale * jnp.sum(multiplier * excess + 0.5 * _MULTIPLIER_GAIN * jnp.maximum(excess, 0.0) ** 2), excess


def _softmax(node: jax.Array, logits: jax.Array, count: int) -> jax.Array:
    most = jax.lax.stop_gradient(jax.ops.segment_max(logits, node, count, indices_are_sorted=True))
    weights = jnp.exp(logits - most[node])
    return weights / jax.ops.segment_sum(weights, node, count, indices_are_sorted=True)[node]


@functools.partial(jax.jit, static_argnums=2)
def _rows(energy: _Energy, logits: jax.Array, count: int) -> jax.Array:
    return jax.vmap(lambda row: _softmax(energy.node, row, count))(logits)


def _expected_memory(energy: _Energy, rows: jax.Array) -> jax.Array:
    times, devices = energy.room.shape
    if not times:
        return energy.room
    row, column, amount = energy.usage
    memory = jax.ops.segment_sum(rows[row] * amount, column, len(energy.interval) * devices).reshape(-1, devices)
    change = (
        jnp.zeros((times + 1, devices)).at[energy.interval[:, 0]].add(memory).at[energy.interval[:, 1]].add(-memory)
    )
    return jnp.cumsum(change, axis=0)[:-1]


def _energy(flat: Flat) -> _Energy:
    """Lays the problem out; lengths are rounded up so that problems of about equal size share one compiled program."""
    scale, most = _mean(np.concatenate([flat.cost, flat.entries])), _LARGEST_ENTRY_PER_NODE * len(flat.sizes)

    def scale_costs(costs: np.ndarray) -> jax.Array:
        return jnp.asarray(np.clip(costs / scale, -most, most), jnp.float32)

    times, devices = flat.base.shape
    unit = limit_unit(flat.limit)
    room = np.where(np.isfinite(flat.limit), (flat.limit - flat.base) / unit, _UNLIMITED_ROOM)
    usage = flat.usage.tocoo()
    row, column = usage.coords
    amount = usage.data / unit[column % max(devices, 1)]
    node = np.repeat(np.arange(len(flat.sizes)), flat.sizes)
    return _Energy(
        node=jnp.asarray(_fill(node, _rounded_up(len(flat.sizes) + 1) - 1)),
        cost=scale_costs(_fill(flat.cost, 0.0)),
        blocks=[(scale_costs(m), jnp.asarray(a), jnp.asarray(b)) for m, a, b in _blocks(flat)],
        usage=(
            jnp.asarray(_fill(row, 0)),
            jnp.asarray(_fill(column, 0)),
            jnp.asarray(_fill(amount, 0.0), jnp.float32),
        ),
        interval=jnp.asarray(_fill(flat.interval, _rounded_up(times) if times else 0)),
        room=jnp.asarray(_fill(room, _UNLIMITED_ROOM) if times else room, jnp.float32),
        load=scale_costs(_fill(flat.load, 0.0)),
    )


def _rounded_up(length: int) -> int:
    return max(_LEAST_LENGTH, 1 << max(length - 1, 0).bit_length())


def _fill(array: np.ndarray, value: float) -> np.ndarray:
    """Returns the array with `value`s at its end, up to a power of two."""
    rest = np.full((_rounded_up(len(array)) - len(array), *array.shape[1:]), value, array.dtype)
    return np.concatenate([array, rest])


def _blocks(flat: Flat) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields edges of about equal shape together: padded matrices, and the positions of their rows and columns."""
    forward = np.flatnonzero(flat.source < flat.target)
    width = 4 ** np.ceil(np.log2(np.maximum(flat.sizes, _LEAST_WIDTH)) / 2).astype(
        int
    )  # each shape takes long to compile
    if len(forward) * width.max() ** 2 <= _MOST_SINGLE_BLOCK_ENTRIES:
        width[:] = width.max()
    shapes = np.stack([width[flat.source[forward]], width[flat.target[forward]]], axis=1)
    nothing = _rounded_up(len(flat.cost))
    for a, b in np.unique(shapes, axis=0).tolist():
        edges = forward[(shapes == (a, b)).all(axis=1)]
        source, target = flat.source[edges], flat.target[edges]
        matrices = np.zeros((len(edges), a, b))
        for m, e, rows, columns in zip(matrices, edges, flat.sizes[source], flat.sizes[target], strict=True):
            m[:rows, :columns] = flat.entries[flat.matrix[e] + np.arange(rows * columns)].reshape(rows, columns)
        yield (
            _fill(matrices, 0.0),
            _fill(_positions(flat, source, a, nothing), nothing),
            _fill(_positions(flat, target, b, nothing), nothing),
        )


def _positions(flat: Flat, nodes: np.ndarray, width: int, nothing: int) -> np.ndarray:
    """Returns `[n, width]` positions of the nodes' strategies, filled up with `nothing`."""
    steps = np.arange(width)
    return np.where(steps < flat.sizes[nodes][:, None], flat.start[nodes][:, None] + steps, nothing)


def _mean(costs: np.ndarray) -> float:
    """Returns a typical size of a cost: the mean of the lower 90% of sizes, so that forbidden entries do not count."""
    sizes = np.abs(costs[costs != 0])
    return float(sizes[sizes <= np.quantile(sizes, 0.9)].mean()) if len(sizes) else 1.0


def _typical(flat: Flat, rng: np.random.Generator) -> float:
    """Returns the cost per node of a random choice, in units of the energy."""
    descent = Descent(flat, rng.integers(flat.sizes, size=(4, len(flat.sizes))))
    return float(np.median(np.abs(descent.cost()))) / len(flat.sizes) / _mean(np.concatenate([flat.cost, flat.entries]))


def _roundings(flat: Flat, rows: np.ndarray, rng: np.random.Generator) -> Iterator[Proposal]:
    """Rounds all starts node by node, brings the choices down, and yields them and the best."""
    order = rng.permutation(len(flat.sizes))
    choices = []
    for row in rows:
        choices.append(_conditional(flat, row.copy(), order))
        yield Proposal(choices[-1])
    descent = Descent(flat, np.stack(choices))
    for _ in descent.repair(order):
        yield Proposal()
    yield Proposal(descent.choice[np.lexsort((descent.cost(), descent.excess()))[0]])


def _conditional(flat: Flat, row: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns `[V]` strategies, each the cheapest given the rows of the nodes that follow in `order`.

    The relaxed cost is linear in the row of one node, so it does not rise.
    """
    choice = np.zeros(len(order), np.int64)
    load = row @ flat.load
    for v in order.tolist():
        positions = slice(flat.start[v], flat.start[v + 1])
        price = flat.cost[positions] + _expected_edges(flat, v, row)
        others = load - row[positions] @ flat.load[positions]
        s = choice[v] = int((price + (others + flat.load[positions]).max(axis=1, initial=0.0)).argmin())
        row[positions] = 0.0
        row[flat.start[v] + s] = 1.0
        load = others + flat.load[flat.start[v] + s]
    return choice


def _expected_edges(flat: Flat, v: int, row: np.ndarray) -> np.ndarray:
    """Returns `[S_v]` what the edges of each strategy cost at the neighbours' rows."""
    size, near = flat.sizes[v], np.arange(flat.first[v], flat.first[v + 1])
    if not len(near):
        return np.zeros(size)
    widths = flat.sizes[flat.target[near]]
    entries = flat.entries[ragged_positions(flat.matrix[near], size * widths)]
    each = np.repeat(widths, size)  # the width of every row of every matrix
    weights = row[ragged_positions(np.repeat(flat.start[flat.target[near]], size), each)]
    return np.add.reduceat(entries * weights, np.cumsum(each) - each).reshape(len(near), size).sum(axis=0)


EXAMPLE = chain
