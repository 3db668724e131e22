"""The relaxed choice: softmax of logits, its cost, where its logits start, and how it becomes a discrete choice.

Logits start near uniform where strategies change the loss. Elsewhere they start at the marginals of the cooled dual,
which see all costs at once.

On the way back, the predicted increase of the loss is linear in the choice. So it is an amount of the problem whose
limit is the allowed increase, and the solver finds the cheapest choice within it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cost.base import Evaluation, Problem, is_forbidden, num_strategies
from cost.evaluation import Evaluator, evaluate, relaxed_cost
from diffshard.bilevel_search.base import LossPrediction
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.dual.ascent import cost_at_prices, initial_prices, softmin_weights
from diffshard.solving.dual.sweeps import lay_out, sweep
from diffshard.solving.solve import solve
from search_spaces.base import Choice, PerStrategy, RelaxedChoice

_TEMPERATURE = 0.05
"""Temperature of the marginals, in units of the mean spread of a node's and an edge's costs."""
_SWEEPS = 180  # of the dual
_LEAST_MARGINAL = 1e-4
"""Weight that every strategy starts with at least, so that a gradient can still raise it."""
SOLVER_S = 20.0
"""Seconds for each call of the solver; problems of bilevel searches have tens of nodes and take less than one."""


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
    """Returns V arrays `[S_v]`: logits whose softmax are the marginals of the dual, with memory free.

    Args:
      problem: whose limits, if any, are left to the steps that follow.
    """
    csr = with_ceiling(to_csr(problem._replace(amount=(), amount_limit=np.zeros(0))))
    layout, cost = lay_out(csr, np.float64), cost_at_prices(csr, initial_prices(csr))
    messages, absorbed_cost = np.zeros(layout.num_messages + 1), cost
    for _ in range(_SWEEPS):
        _, absorbed_cost = sweep(layout, cost, messages)
    scale = _mean_range([*problem.node_cost, *problem.edge_cost])
    marginals = np.maximum(softmin_weights(csr, absorbed_cost, _TEMPERATURE * scale), _LEAST_MARGINAL)
    return [jnp.log(jnp.asarray(row)) for row in np.split(marginals, csr.start[1:-1])]


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
      relaxed_choice: V arrays `[S_v]`.
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
    """Returns whether the exact choice is as cheap as one that does not lower the loss, and exceeds no memory more."""
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
    increases = [np.maximum(row - row[s], 0.0)[:, None] for row, s in zip(slopes, least_choice, strict=True)]
    bounded_problem = problem._replace(
        amount=[*map(np.column_stack, zip(problem.amount, increases, strict=True))]
        if len(problem.amount)
        else increases,
        amount_limit=np.append(problem.amount_limit, budget),
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
