"""The plain relaxation: a softmax over each node's logits makes the cost differentiable, and Adam minimises it.

It starts at several random logits, with an entropy whose temperature falls. The objective is the relaxed cost
(`cost.evaluation`) of rows p = softmax(logits), less temperature times their entropy, plus a penalty on the expected
memory in excess: an augmented Lagrangian whose multipliers rise where the limit is exceeded. Rows are rounded node by
node, each to the cheapest strategy given the other rows, and the choices come down by single-node moves. Uniform rows
are rounded first, so that there is an answer before the first step.

All edges are one sparse matrix Q over strategies, symmetric, so that the edges of rows p cost p Q p / 2 and their
gradient is Q p. Nothing is compiled, so that however short the time limit is, it is kept.

Source: the relaxation of Liu, Simonyan and Yang, "DARTS" (ICLR 2019), section 2.2, annealed as in mean-field annealing
(Peterson and Anderson, 1987); the rounding is the method of conditional expectations (Raghavan, 1988); the steps are
those of Kingma and Ba, "Adam" (ICLR 2015), algorithm 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import scipy.sparse

from cost.base import Problem
from cost.memory import limit_unit
from diffshard.base import Proposal
from diffshard.solving.csr import (
    CSRProblem,
    largest_loads,
    memory_price,
    memory_use,
    numpy_generator,
    ragged_positions,
    to_csr,
    with_ceiling,
)
from diffshard.solving.dual.ascent import softmin_weights
from diffshard.solving.examples import chain
from diffshard.solving.moves.single_nodes import Descent
from diffshard.solving.phases.starts import Clock

# All numbers were chosen by hand on generated layers.
_NUM_STARTS = 8  # random logits, side by side
_NUM_STEPS = 600  # of Adam, without a time limit
_LEARNING_RATE = 0.1
_DECAYS = 0.9, 0.999  # of Adam's two moments
_LEAST_DEVIATION = 1e-8  # of Adam: what a step is divided by at least
_TEMPERATURES = 0.3, 1e-3  # first and last, in the cost per node of a random choice
_MULTIPLIER_GAIN = 0.3  # of the multipliers in one step, for a whole limit's worth in excess
_DESCENT_TIME_SHARE = 0.6  # of the time limit, for the gradient
_NUM_ROUNDINGS = 4  # during the descent
_LARGEST_ENTRY_PER_NODE = 30.0  # in the energy's units: larger entries, such as forbidden ones, would hide all others
_LEAST_WEIGHT = 1e-30  # of a strategy, whose logarithm is taken


class _Energy(NamedTuple):
    """The relaxed cost's numbers, in units of a typical entry.

    Attributes:
      cost: `[N]`.
      edges: sparse `[N, N]`, each edge in both directions.
      unit: `[D]` that memory counts in.
      load: `[N, D']`.
    """

    csr: CSRProblem
    cost: np.ndarray
    edges: scipy.sparse.csr_array
    unit: np.ndarray
    load: np.ndarray


class _State(NamedTuple):
    logits: np.ndarray  # [R, N]
    mean: np.ndarray  # [R, N] of gradients
    square: np.ndarray  # [R, N] of squared gradients
    multiplier: np.ndarray  # [R, T, D]


def solve(problem: Problem, *, time_limit_s: float | None = None, key: jax.Array) -> Iterator[Proposal]:
    """Yields roundings of all starts, at several moments and at the end; has no bound."""
    progress = Clock(time_limit_s).progress(_NUM_STEPS, _DESCENT_TIME_SHARE)
    rng, csr = numpy_generator(key), with_ceiling(to_csr(problem))
    uniform = np.repeat(1.0 / csr.sizes, csr.sizes)
    yield from _roundings(csr, uniform[None], rng)
    energy = _energy(csr)
    yield Proposal()
    logits = rng.normal(size=(_NUM_STARTS, len(csr.cost)))
    zeros = np.zeros_like(logits)
    state = _State(logits, zeros, zeros, np.zeros((_NUM_STARTS, *csr.base.shape)))
    hot, cold = _TEMPERATURES
    typical = _typical(csr, rng)
    share, step, num_roundings = 0.0, 0, 0
    while share < 1:
        step += 1
        state = _descend(energy, state, typical * hot * (cold / hot) ** share, step)
        share = progress(step)
        if share >= (num_roundings + 1) / _NUM_ROUNDINGS or share >= 1:
            num_roundings += 1
            yield from _roundings(csr, softmin_weights(csr, -state.logits, 1.0), rng)
        else:
            yield Proposal()


def _descend(energy: _Energy, state: _State, temperature: float, step: int) -> _State:
    """Makes a step of Adam from every start; `step` counts from 1."""
    _, gradient, excess = objective(energy, state.logits, state.multiplier, temperature)
    first, second = _DECAYS
    mean = first * state.mean + (1 - first) * gradient
    square = second * state.square + (1 - second) * gradient**2
    deviation = np.sqrt(square / (1 - second**step)) + _LEAST_DEVIATION
    logits = state.logits - _LEARNING_RATE * mean / (1 - first**step) / deviation
    return _State(logits, mean, square, np.maximum(state.multiplier + _MULTIPLIER_GAIN * excess, 0.0))


def objective(
    energy: _Energy, logits: np.ndarray, multiplier: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the objective of every start and its gradient.

    The multipliers count in parts of the whole cost, which is a constant to the gradient.

    Args:
      energy: the relaxed cost.
      logits: `[R, N]`.
      multiplier: `[R, T, D]`.
      temperature: of the entropy.

    Returns:
      The objective `[R]`, its gradient `[R, N]`, and the expected excess of memory `[R, T, D]` in units of the limit,
      negative where there is room.
    """
    csr = energy.csr
    rows = softmin_weights(csr, -logits, 1.0)
    through_edges = (energy.edges @ rows.T).T
    total = rows @ energy.cost + 0.5 * (rows * through_edges).sum(axis=1)
    slope = energy.cost + through_edges
    if energy.load.shape[1]:
        loads = rows @ energy.load
        for group in np.split(np.arange(loads.shape[1]), csr.load_first[1:]):
            total += loads[:, group].max(axis=1)
            slope = slope + energy.load[:, group[loads[:, group].argmax(axis=1)]].T
    scale = np.abs(total)
    logarithm = np.log(np.maximum(rows, _LEAST_WEIGHT))
    total += temperature * (rows * logarithm).sum(axis=1)
    slope = slope + temperature * (logarithm + 1)
    excess = np.zeros_like(multiplier)
    if csr.base.size:
        limit = np.where(np.isfinite(csr.limit), csr.limit, 0.0)
        for r, row in enumerate(rows):
            used = memory_use(csr, csr.usage.T @ row)
            excess[r] = np.where(np.isfinite(csr.limit), (used - limit) / energy.unit, -1.0)
            price = multiplier[r] + _MULTIPLIER_GAIN * np.maximum(excess[r], 0.0)
            slope[r] += scale[r] * memory_price(csr, price / energy.unit)
        penalty = multiplier * excess + 0.5 * _MULTIPLIER_GAIN * np.maximum(excess, 0.0) ** 2
        total += scale * penalty.sum(axis=(1, 2))
    mean = np.add.reduceat(rows * slope, csr.start[:-1], axis=1)
    return total, rows * (slope - np.repeat(mean, csr.sizes, axis=1)), excess


def _energy(csr: CSRProblem) -> _Energy:
    scale, most = _mean(np.concatenate([csr.cost, csr.entries])), _LARGEST_ENTRY_PER_NODE * len(csr.sizes)

    def scale_costs(costs: np.ndarray) -> np.ndarray:
        return np.clip(costs / scale, -most, most)

    return _Energy(
        csr=csr,
        cost=scale_costs(csr.cost),
        edges=_edges(csr, scale_costs(csr.entries)),
        unit=limit_unit(csr.limit),
        load=scale_costs(csr.load),
    )


def _edges(csr: CSRProblem, entries: np.ndarray) -> scipy.sparse.csr_array:
    """Returns all matrices as one; directed edges lie in the order of their sources, each row by row."""
    rows, columns = csr.sizes[csr.source], csr.sizes[csr.target]
    lengths = rows * columns
    row = np.repeat(ragged_positions(csr.start[csr.source], rows), np.repeat(columns, rows))
    within = ragged_positions(np.zeros(len(lengths), np.int64), lengths)
    column = np.repeat(csr.start[csr.target], lengths) + within % np.repeat(columns, lengths)
    values = entries[ragged_positions(csr.matrix, lengths)]
    size = len(csr.cost)
    return scipy.sparse.csr_array((values, (row, column)), shape=(size, size))


def _mean(costs: np.ndarray) -> float:
    """Returns a typical size of a cost: the mean of the lower 90% of sizes, so that forbidden entries do not count."""
    sizes = np.abs(costs[costs != 0])
    return float(sizes[sizes <= np.quantile(sizes, 0.9)].mean()) if len(sizes) else 1.0


def _typical(csr: CSRProblem, rng: np.random.Generator) -> float:
    """Returns the cost per node of a random choice, in units of the energy."""
    descent = Descent(csr, rng.integers(csr.sizes, size=(4, len(csr.sizes))))
    return float(np.median(np.abs(descent.cost()))) / len(csr.sizes) / _mean(np.concatenate([csr.cost, csr.entries]))


def _roundings(csr: CSRProblem, rows: np.ndarray, rng: np.random.Generator) -> Iterator[Proposal]:
    """Rounds all starts node by node, brings the choices down, and yields them and the best."""
    order = rng.permutation(len(csr.sizes))
    choices = []
    for row in rows:
        choices.append(_conditional(csr, row.copy(), order))
        yield Proposal(choices[-1])
    yield from Descent(csr, np.stack(choices)).proposals(order)


def _conditional(csr: CSRProblem, row: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns `[V]` strategies, each the cheapest given the rows of the nodes that follow in `order`.

    The relaxed cost is linear in the row of one node, so it does not rise.
    """
    choice = np.zeros(len(order), np.int64)
    load = row @ csr.load
    for v in order.tolist():
        positions = slice(csr.start[v], csr.start[v + 1])
        price = csr.cost[positions] + _expected_edges(csr, v, row)
        others = load - row[positions] @ csr.load[positions]
        s = choice[v] = int((price + largest_loads(csr, others + csr.load[positions])).argmin())
        row[positions] = 0.0
        row[csr.start[v] + s] = 1.0
        load = others + csr.load[csr.start[v] + s]
    return choice


def _expected_edges(csr: CSRProblem, v: int, row: np.ndarray) -> np.ndarray:
    """Returns `[S_v]` what the edges of each strategy cost at the neighbours' rows."""
    size, near = csr.sizes[v], np.arange(csr.first[v], csr.first[v + 1])
    if not len(near):
        return np.zeros(size)
    widths = csr.sizes[csr.target[near]]
    entries = csr.entries[ragged_positions(csr.matrix[near], size * widths)]
    each = np.repeat(widths, size)  # the width of every row of every matrix
    weights = row[ragged_positions(np.repeat(csr.start[csr.target[near]], size), each)]
    return np.add.reduceat(entries * weights, np.cumsum(each) - each).reshape(len(near), size).sum(axis=0)


EXAMPLE = chain
