"""The relaxed choice: softmax of logits, its cost, where its logits start, and how it becomes a discrete choice.

Logits start near uniform where strategies change the loss. Elsewhere they start at the marginals of the cooled dual,
which see all costs at once.

On the way back, a bound on the predicted increase of the loss is linear in the choice, as a memory limit is. So the
solver finds the cheapest choice within the bound on a problem with one more device, whose memory is the allowed
increase.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Evaluation, Problem, is_forbidden, num_memory_devices, num_strategies
from cost.evaluation import Evaluator, evaluate, relaxed_cost
from diffshard.bilevel_search.base import LossPrediction
from diffshard.solving.dual.soft_dual import free_prices, soft_dual, soft_problem
from diffshard.solving.solve import solve
from search_spaces.base import Choice, PerStrategy, RelaxedChoice

_TEMPERATURES = np.geomspace(1.0, 0.05, 6)
"""Temperatures of the dual as it cools, in units of the mean spread of a node's and an edge's costs."""
_SWEEPS = 30  # of the dual at each temperature
_LEAST_MARGINAL = 1e-4
"""Weight that every strategy starts with at least, so that a gradient can still raise it."""
SOLVER_S = 20.0
"""Seconds for each call of the solver; problems of bilevel searches have tens of nodes and take less than one."""
_BUDGET_UNITS = 1e6
"""The allowed increase as a memory limit, in bytes: far above rounding errors, far below what a float can hold."""


def softmax_choice(problem: Problem, logits: PerStrategy) -> RelaxedChoice:
    """Returns the softmax of logits, V arrays `[S_v]`; forbidden strategies have weight 0."""
    rows = zip(allowed_strategies(problem), logits, strict=True)
    return [jax.nn.softmax(jnp.where(mask, row, -jnp.inf)) for mask, row in rows]


def one_hot(problem: Problem, choice: Sequence[int]) -> RelaxedChoice:
    """Returns a discrete choice as weights, V arrays `[S_v]`."""
    sizes = num_strategies(problem).tolist()
    return [jax.nn.one_hot(strategy, size) for strategy, size in zip(choice, sizes, strict=True)]


def allowed_strategies(problem: Problem) -> list[np.ndarray]:
    """Returns V arrays `[S_v]`: which strategies may be chosen."""
    return [~is_forbidden(cost) for cost in problem.node_cost]


def relaxed_seconds(problem: Problem, relaxed_choice: RelaxedChoice) -> jax.Array:
    """Returns the relaxed cost; forbidden strategies never have weight, so any finite cost does for them."""
    costs = [np.where(is_forbidden(cost), 0.0, np.asarray(cost, float)) for cost in problem.node_cost]
    return relaxed_cost(problem._replace(node_cost=costs), relaxed_choice)


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
    scaled_problem = problem._replace(node_cost=node_cost, edge_cost=edge_cost, load=load)
    soft, prices = soft_problem(scaled_problem), free_prices(scaled_problem)
    messages, marginals = None, jnp.zeros(())
    for temperature in _TEMPERATURES:
        dual = soft_dual(soft, prices, temperature=float(temperature), sweeps=_SWEEPS, messages=messages)
        messages, marginals = dual.messages, dual.marginals
    return [
        jnp.log(jnp.maximum(marginals[v, :size], _LEAST_MARGINAL))
        for v, size in enumerate(num_strategies(problem).tolist())
    ]


def _mean_range(costs: Sequence[Any]) -> float:
    """Returns the mean over arrays of the range of their allowed entries, where there is one; otherwise 1."""
    arrays = [np.asarray(cost, float) for cost in costs]
    allowed_entries = [cost[~is_forbidden(cost)] for cost in arrays]
    ranges = [np.ptp(entries) for entries in allowed_entries if entries.size and np.ptp(entries) > 0]
    return float(np.mean(ranges)) if ranges else 1.0


def first_allowed(problem: Problem) -> Choice:
    """Returns the first allowed strategy of each node, `[V]`."""
    return tuple(int(np.argmax(mask)) for mask in allowed_strategies(problem))


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
    uniform = softmax_choice(problem, [jnp.zeros(size) for size in num_strategies(problem)])
    return _checked_cost(float(relaxed_seconds(problem, uniform)), "uniform weights")


def _checked_cost(seconds: float, where: str) -> float:
    if not 0 < seconds < np.inf:
        raise ValueError(f"`space` must have a positive finite cost at {where}, got {seconds} s.")
    return seconds


class RoundedChoice(NamedTuple):
    """A discrete choice with what it costs and does.

    Attributes:
      choice: V strategy indices.
      evaluation: its exact cost and memory.
      increase: its predicted or measured increase of the loss.
      message: which bound or limit it breaks and by how much; empty if none.
    """

    choice: Choice
    evaluation: Evaluation
    increase: float
    message: str


def proposals(
    problem: Problem,
    relaxed_choice: Sequence[np.ndarray],
    prediction: LossPrediction,
    exact: Choice,
    limit: float | None,
) -> dict[Choice, float]:
    """Returns choices that the search stands for, with their predicted increase.

    Args:
      problem: of the space.
      relaxed_choice: V arrays `[S_v]`.
      prediction: of the loss.
      exact: the exact choice, which is among them under a bound, in case nothing else keeps it.
      limit: the bound on the increase of the loss, or None.
    """
    largest = largest_weights(relaxed_choice)
    if limit is None:
        return {largest: prediction.increase(largest)}
    choices = (largest, cheapest_within(problem, prediction, limit))
    return {**{choice: prediction.increase(choice) for choice in choices}, exact: 0.0}


def largest_weights(relaxed_choice: Sequence[np.ndarray]) -> Choice:
    """Returns the strategy of largest weight at each node, `[V]`."""
    return tuple(int(weights.argmax()) for weights in relaxed_choice)


def best_of(problem: Problem, increases: Mapping[Choice, float], limit: float | None) -> RoundedChoice:
    """Returns the cheapest choice that keeps the bound and the problem's limits, or the one that breaks them least.

    Among choices of the same cost it takes the one of least increase.

    Args:
      problem: prices the choices.
      increases: of the loss, by choice.
      limit: the bound on the increase, or None.
    """
    largest_increase = np.inf if limit is None else limit * (1 + 1e-6)
    evaluator = Evaluator(problem)
    evaluations = {choice: evaluator(choice) for choice in increases}

    def rank(choice: Choice) -> tuple[Any, ...]:
        increase, evaluation = increases[choice], evaluations[choice]
        over_limit = max(increase - largest_increase, 0.0)
        return over_limit, not evaluation.feasible, evaluation.excess, evaluation.cost, increase

    choice = min(increases, key=rank)
    increase, evaluation, message = increases[choice], evaluations[choice], ""
    if not increase <= largest_increase:
        message = (
            f"infeasible: the least increase of the loss that was reached is {increase:.4g}, above "
            f"`max_loss_increase` {limit:.4g}; allow more, or give the space more exact strategies"
        )
    elif not evaluation.feasible:
        message = (
            f"infeasible: the memory limit is exceeded by {evaluation.excess:,.0f} bytes; `diffshard.solve` keeps it"
        )
    return RoundedChoice(choice, evaluation, increase, message)


def dominates(problem: Problem, exact: Choice, choice: Choice, increase: float) -> bool:
    """Returns whether the exact choice is as cheap as another that does not lower the loss, and exceeds no memory more.

    Args:
      problem: prices both.
      exact: the exact choice.
      choice: the other.
      increase: of the loss by the other.
    """
    if choice == exact or increase < 0:
        return False
    exact_evaluation, other = evaluate(problem, exact), evaluate(problem, choice)
    return bool(exact_evaluation.cost <= other.cost and exact_evaluation.excess <= other.excess)


def cheapest_within(problem: Problem, prediction: LossPrediction, limit: float) -> Choice:
    """Returns the cheapest choice whose predicted increase is within a limit, or the one of least increase."""
    slopes = prediction.slopes
    least_choice = tuple(
        int(np.where(is_forbidden(cost), np.inf, row).argmin())
        for cost, row in zip(problem.node_cost, slopes, strict=True)
    )
    budget = limit - prediction.increase(least_choice)
    if budget <= 0:
        return least_choice
    increases = [
        np.maximum(row - row[s], 0.0) / budget * _BUDGET_UNITS for row, s in zip(slopes, least_choice, strict=True)
    ]
    memory_limit, usages = _finite_memory(problem)
    bounded_problem = problem._replace(
        usage_node=np.concatenate([np.asarray(problem.usage_node, np.int64), np.arange(len(slopes))]),
        usage=[
            *(np.pad(u, ((0, 0), (0, 1))) for u in usages),
            *(np.pad(u[:, None], ((0, 0), (memory_limit.size, 0))) for u in increases),
        ],
        usage_interval=np.concatenate(
            [np.asarray(problem.usage_interval, np.int64).reshape(-1, 2), np.tile([0, 1], (len(slopes), 1))]
        ),
        memory_limit=np.append(memory_limit, _BUDGET_UNITS),
    )
    return cheapest_choice(bounded_problem)


def cheapest_at_price(problem: Problem, prediction: LossPrediction, seconds_per_loss: float) -> Choice:
    """Returns the choice of least cost, with its predicted increase of the loss at a price."""
    node_cost = [
        np.asarray(cost, float) + seconds_per_loss * row
        for cost, row in zip(problem.node_cost, prediction.slopes, strict=True)
    ]
    return cheapest_choice(problem._replace(node_cost=node_cost))


def cheapest_choice(problem: Problem) -> Choice:
    """Returns the solver's choice."""
    return tuple(int(s) for s in solve(problem, time_limit_s=SOLVER_S).choice)


def _finite_memory(problem: Problem) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns limits `[D]` of the devices that have one, and the usages `[S_v, D]` there."""
    devices = num_memory_devices(problem)
    limit = np.broadcast_to(np.asarray(problem.memory_limit, float), (devices,))
    usages = [np.asarray(usage, float).reshape(len(usage), -1) for usage in problem.usage]
    usages = [np.broadcast_to(usage, (len(usage), devices))[:, np.isfinite(limit)] for usage in usages]
    return limit[np.isfinite(limit)], usages
