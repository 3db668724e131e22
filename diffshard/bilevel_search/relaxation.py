"""The relaxed choice: softmax of logits, its cost, and where its logits start where the loss does not depend on it.

There the marginals of the cooled dual are a start that sees all costs at once; elsewhere weights start near uniform.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Problem, is_forbidden, num_strategies
from cost.evaluation import evaluate
from cost.relaxed import relaxed_cost
from diffshard.solving.dual.soft_dual import free_prices, soft_dual, soft_problem
from search_spaces.base import Choice, PerStrategy, RelaxedChoice

_TEMPERATURES = np.geomspace(1.0, 0.05, 6)
"""Temperatures of the dual as it cools, in units of the mean spread of a node's and an edge's costs."""
_SWEEPS = 30  # of the dual at each temperature
_LEAST_MARGINAL = 1e-4
"""Weight that every strategy starts with at least, so that a gradient can still raise it."""


def relaxed_choice(problem: Problem, logits: PerStrategy) -> RelaxedChoice:
    """Returns the softmax of logits, V arrays `[S_v]`; forbidden strategies have weight 0."""
    masked = zip(allowed(problem), logits, strict=True)
    return [jax.nn.softmax(jnp.where(mask, row, -jnp.inf)) for mask, row in masked]


def one_hot(problem: Problem, choice: Sequence[int]) -> RelaxedChoice:
    """Returns a discrete choice as weights, V arrays `[S_v]`."""
    sizes = num_strategies(problem).tolist()
    return [jax.nn.one_hot(strategy, size) for strategy, size in zip(choice, sizes, strict=True)]


def allowed(problem: Problem) -> list[np.ndarray]:
    """Returns V arrays `[S_v]`: which strategies may be chosen."""
    return [~is_forbidden(cost) for cost in problem.node_cost]


def relaxed_seconds(problem: Problem, relaxed: RelaxedChoice) -> jax.Array:
    """Returns the relaxed cost; forbidden strategies never have weight, so any finite cost does for them."""
    costs = [np.where(is_forbidden(cost), 0.0, np.asarray(cost, float)) for cost in problem.node_cost]
    return relaxed_cost(problem._replace(node_cost=costs), relaxed)


def marginal_logits(problem: Problem) -> PerStrategy:
    """Returns V arrays `[S_v]`: logits whose softmax are the marginals of the cooled dual, with memory free.

    Args:
      problem: whose memory limits, if any, are left to the steps that follow.
    """
    scale = _mean_range([*problem.node_cost, *problem.edge_cost])
    node_cost, edge_cost, load = (
        [np.asarray(cost, float) / scale for cost in costs]
        for costs in (problem.node_cost, problem.edge_cost, problem.load)
    )
    scaled = problem._replace(node_cost=node_cost, edge_cost=edge_cost, load=load)
    soft, prices = soft_problem(scaled), free_prices(scaled)
    messages, marginals = None, jnp.zeros(())
    for temperature in _TEMPERATURES:
        dual = soft_dual(soft, prices, temperature=float(temperature), sweeps=_SWEEPS, messages=messages)
        messages, marginals = dual.messages, dual.marginals
    return [
        jnp.log(jnp.maximum(marginals[v, :size], _LEAST_MARGINAL))
        for v, size in enumerate(num_strategies(problem).tolist())
    ]


def _mean_range(costs: Sequence[Any]) -> float:
    """The mean over arrays of the range of their allowed entries, where there is one; otherwise 1."""
    arrays = [np.asarray(cost, float) for cost in costs]
    allowed_entries = [cost[~is_forbidden(cost)] for cost in arrays]
    ranges = [np.ptp(entries) for entries in allowed_entries if entries.size and np.ptp(entries) > 0]
    return float(np.mean(ranges)) if ranges else 1.0


def first_allowed(problem: Problem) -> Choice:
    """Returns the first allowed strategy of each node, `[V]`."""
    return tuple(int(np.argmax(mask)) for mask in allowed(problem))


def exact_cost(problem: Problem, exact_choice: Sequence[int]) -> float:
    """Returns the seconds of the exact choice, which cost ratios are formed with.

    Raises:
      ValueError: they are not positive and finite, so that there is nothing to save.
    """
    return _checked_cost(float(evaluate(problem, exact_choice).cost), "its exact choice")


def mean_cost(problem: Problem) -> float:
    """Returns the relaxed cost of uniform weights, which cost ratios are formed with where every choice is exact.

    Raises:
      ValueError: it is not positive and finite, so that there is nothing to save.
    """
    uniform = relaxed_choice(problem, [jnp.zeros(size) for size in num_strategies(problem)])
    return _checked_cost(float(relaxed_seconds(problem, uniform)), "uniform weights")


def _checked_cost(seconds: float, where: str) -> float:
    if not 0 < seconds < np.inf:
        raise ValueError(f"`space` must have a positive finite cost at {where}, got {seconds} s.")
    return seconds
