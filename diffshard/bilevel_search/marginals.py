"""Where rows start in a lossless space: the marginals of the smoothed dual, which see all costs at once."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cost.base import Problem, is_forbidden, num_strategies
from diffshard.bilevel_search.space import Rows
from diffshard.solving.dual.soft_dual import free_prices, soft_dual, soft_problem

_TEMPERATURES = np.geomspace(1.0, 0.05, 6)
"""In units of the mean spread of a node's and an edge's costs."""
_SWEEPS = 30  # at each temperature
_LEAST = 1e-4
"""Weight that every strategy keeps, so that a gradient can still raise it."""


def marginal_logits(problem: Problem) -> Rows:
    """V arrays `[S_v]`: logits whose softmax are the marginals of the cooled dual, with memory free.

    Args:
      problem: whose memory limits, if any, are left to the steps that follow.
    """
    scale = _spread([*problem.node_cost, *problem.edge_cost])
    node_cost, edge_cost, load = (
        [np.asarray(cost, float) / scale for cost in costs]
        for costs in (problem.node_cost, problem.edge_cost, problem.load)
    )
    scaled = problem._replace(node_cost=node_cost, edge_cost=edge_cost, load=load)
    soft, prices = soft_problem(scaled), free_prices(scaled)
    messages, marginals = None, jnp.zeros(())
    for temperature in _TEMPERATURES:
        found = soft_dual(soft, prices, temperature=float(temperature), sweeps=_SWEEPS, messages=messages)
        messages, marginals = found.messages, found.marginals
    return [
        jnp.log(jnp.maximum(marginals[v, :size], _LEAST)) for v, size in enumerate(num_strategies(problem).tolist())
    ]


def _spread(costs: Sequence[Any]) -> float:
    """The mean over arrays that have any of the range of their allowed entries, or 1."""
    arrays = [np.asarray(cost, float) for cost in costs]
    allowed = [cost[~is_forbidden(cost)] for cost in arrays]
    ranges = [np.ptp(entries) for entries in allowed if entries.size and np.ptp(entries) > 0]
    return float(np.mean(ranges)) if ranges else 1.0
