"""The loop that drives every solver: it prices each proposal exactly, keeps the best, and watches the time and Ctrl-C.

It takes the solver as a function, so that a solver can run the loop on a smaller problem of its own.

What float64 can lose of a problem's costs: how far sums may be off, and costs whose sums would reach `FORBIDDEN`.

Solvers add costs in float64. Where all are whole numbers of moderate size these sums are exact. Elsewhere a sum of n
terms is off by at most about n ε times the sum of the terms' sizes, ε = 2^-53. For a choice of cost c that is at most
n ε (c + 2N), where N is the size of all negative costs that a choice can have. So a bound stays valid if it is lowered
by as much, however different in size the costs are.

Source: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 4.2.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cost.base import FORBIDDEN, Evaluation, Problem, is_forbidden, load_groups, num_strategies
from cost.edges import distinct_arrays
from cost.evaluation import Evaluator, checked_choice
from cost.memory import LARGEST_EXACT_FLOAT, are_whole, least_memory, usage_error, usage_tables
from cost.real_numbers import is_real
from cost.validation import validate, with_finite_loads
from diffshard.base import OPTIMAL_GAP, Deadline, InfeasibleError, Progress, Proposal, Solution, Solver
from diffshard.solving.form import Reduction, identity
from diffshard.solving.presolve.pipeline import presolve


def run_solver(
    problem: Problem,
    solver: Solver,
    *,
    time_limit_s: float | None,
    key: jax.Array,
    progress: Progress | None = None,
    reduce: Callable[[Problem], Reduction] = presolve,
    stop_gap: float = OPTIMAL_GAP,
    start: Sequence[int] | np.ndarray | None = None,
) -> Solution:
    """Checks and presolves a problem, lets the solver run until it ends or is stopped, and returns the best proposal.

    Args:
      time_limit_s: wall-clock seconds, presolve included; None lets the solver end by its own rule.
      key: a JAX random key.
      stop_gap: the relative gap at which the solver is stopped.
      start: `[V]` a choice that is offered before the solver's.

    Raises:
      ValueError: the problem breaks a rule of `Problem`, or the start or a proposal does not have a strategy for each
        node.
      TypeError: the solver yields something that is no `Proposal`.
    """
    problem, best, deadline = begun(problem, time_limit_s, progress)
    if best.has_no_room:
        return best.solution("finished")
    if start is not None:
        best.offer(identity(problem), Proposal(checked_choice(problem, start, "start")))
    status = "finished"
    try:
        for _ in proposals(best, reduced(best, problem, reduce), solver, deadline, key):
            if best.gap() <= stop_gap:
                break
            if deadline.is_over():
                status = "time limit"
                break
    except KeyboardInterrupt:
        status = "interrupted"
    return best.solution(status)


def begun(problem: Problem, time_limit_s: float | None, progress: Progress | None) -> tuple[Problem, "Best", Deadline]:
    """Checks a problem; returns it with costs whose sums stay in range, its best choice so far, and the deadline."""
    deadline = Deadline(time_limit_s, time.perf_counter())
    validate(problem)
    given = with_finite_loads(problem)
    problem, unit = in_range(given)
    return problem, Best(given, progress, deadline.begin_s, unit), deadline


def reduced(best: "Best", problem: Problem, reduce: Callable[[Problem], Reduction]) -> Reduction:
    """Returns the presolved problem; where nothing is allowed, which proves that no choice is, the problem as it is.

    There the solver still looks for what breaks the rules least.
    """
    try:
        return reduce(problem)
    except InfeasibleError:
        best.lower_bound = math.inf
        return identity(problem)


def proposals(
    best: "Best", reduction: Reduction, solver: Solver, deadline: Deadline, key: jax.Array
) -> Iterator[np.ndarray | None]:
    """Offers all that a solver proposes to `best`, and yields the choice `[V]` of each proposal, or None."""
    if not reduction.problem.node_cost:
        yield best.offer(reduction, Proposal(np.zeros(0, np.int64), 0.0))
        return
    proposed = solver(reduction.problem, time_limit_s=deadline.remaining_s(), key=key)
    if not isinstance(proposed, Iterable):
        raise TypeError(f"`solver` must be a generator of diffshard.solvers.Proposal, but it returned {proposed!r}.")
    sizes = num_strategies(reduction.problem)
    for proposal in proposed:
        _check_proposal(proposal, sizes)
        yield best.offer(reduction, proposal)


class Best:
    """The best proposal so far, by exact price: any feasible one before any other, then less excess, then less cost.

    Attributes:
      has_no_room: whether even the choice of least memory, which is then the best, exceeds the limit.
    """

    def __init__(self, problem: Problem, progress: Progress | None, start: float, unit: float = 1.0):
        self.problem, self.unit = problem, unit
        self._rounding = Rounding(problem)
        self.evaluate, self._progress, self._start = Evaluator(problem), progress, start
        cheapest = [int(np.argmin(cost)) for cost in problem.node_cost]
        self._choice = np.array(cheapest, np.int64)  # so that there is an answer whenever the loop is stopped
        self.evaluation = self.evaluate(self._choice)
        self.lower_bound = -math.inf
        self._history: list[tuple[float, float, float]] = []
        self._report()
        least = _least_choice(problem)
        self.has_no_room = least is not None
        if least is not None:
            self.offer(identity(problem), Proposal(least, math.inf))

    def offer(self, reduction: Reduction, proposal: Proposal) -> np.ndarray | None:
        """Prices a proposal for the reduced problem on the problem as it was given, and keeps what is better.

        Returns:
          The choice of the problem as it was given, `[V]`; None where the proposal has none.
        """
        bound = self._rounding.safe_bound(float(reduction.constant + proposal.lower_bound) * self.unit)
        is_better = bound > self.lower_bound
        self.lower_bound = max(self.lower_bound, bound)
        choice = None
        if proposal.choice is not None:
            choice = reduction.expand(np.asarray(proposal.choice, np.int64))
            evaluation = self.evaluate(choice)
            if _rank(evaluation) < _rank(self.evaluation):
                self._choice, self.evaluation, is_better = choice, evaluation, True
        if is_better:
            self._report()
        return choice

    def prefer(self, choice: np.ndarray) -> None:
        """Makes a choice `[V]` the best one, though another may be a little cheaper."""
        self._choice, self.evaluation = choice, self.evaluate(choice)

    def gap(self) -> float:
        """Returns how much cheaper the best possible choice can be, relative to the cost; inf if not feasible."""
        cost = self.evaluation.cost
        if not self.evaluation.feasible:
            return math.inf
        bound = min(self.lower_bound, cost)  # the last digit of a float must not lift the bound above the cost
        return (cost - bound) / abs(cost) if cost else (0.0 if bound == cost else math.inf)

    def solution(self, status: str) -> Solution:
        """Returns the best proposal as a solution; the status says how the loop ended."""
        cost, _, excess, feasible = self.evaluation
        bound, gap = min(self.lower_bound, cost) if feasible else self.lower_bound, self.gap()
        if gap <= OPTIMAL_GAP:
            status = "optimal"
        elif not feasible and bound == math.inf:
            status = "infeasible"
        return Solution(tuple(self._choice.tolist()), cost, bound, gap, feasible, excess, tuple(self._history), status)

    def _report(self) -> None:
        cost = float(self.evaluation.cost) if self.evaluation.feasible else math.inf
        self._history.append((time.perf_counter() - self._start, cost, self.lower_bound))
        if self._progress is not None:
            self._progress(*self._history[-1])


def _check_proposal(proposal: Any, sizes: np.ndarray) -> None:
    if not isinstance(proposal, Proposal):
        raise TypeError(f"`solver` must yield diffshard.solvers.Proposal(choice, lower_bound), not {proposal!r}.")
    bound = np.asarray(proposal.lower_bound)
    if bound.shape or not is_real(bound) or np.isnan(bound):
        raise ValueError(
            f"`solver` must propose a number as `lower_bound`, not {proposal.lower_bound!r}; -inf is no bound."
        )
    if proposal.choice is None:
        return
    choice = np.asarray(proposal.choice)
    if choice.shape != sizes.shape:
        raise ValueError(
            f"`solver` must propose one strategy index for each of the {len(sizes)} nodes of the problem that it gets, "
            f"`[{len(sizes)}]`, not a choice of shape {choice.shape}."
        )
    if choice.size and not np.issubdtype(choice.dtype, np.integer):
        raise ValueError(f"`solver` must propose strategy indices, which are integers, not {choice.dtype}.")
    for v in np.flatnonzero((choice < 0) | (choice >= sizes))[:1]:
        raise ValueError(
            f"`solver` proposed strategy {choice[v]} of node {v}, which has {sizes[v]} strategies in the problem that "
            f"the solver gets; propose 0 to {sizes[v] - 1}."
        )


def _least_choice(problem: Problem) -> np.ndarray | None:
    """Returns the choice `[V]` of least memory if even the least usages exceed the limit at some time, else None."""
    if not len(problem.usage):
        return None
    times, least = least_memory(problem)
    limit = np.asarray(problem.memory_limit)
    if np.issubdtype(least.dtype, np.floating) or np.issubdtype(limit.dtype, np.floating):
        excess, error = (np.asarray(least, float) - np.asarray(limit, float)).max(axis=1), usage_error(problem)
    else:
        excess, error = (least.astype(object) - limit.astype(object)).max(axis=1), 0.0
    if excess.max() <= error:
        return None
    worst = times[np.argmax(excess)]
    at_worst, total = ([np.zeros(len(cost)) for cost in problem.node_cost] for _ in range(2))
    for v, usage, (start, end) in zip(problem.usage_node, usage_tables(problem), problem.usage_interval, strict=True):
        total_use = usage.sum(axis=1)
        total[v] += total_use
        at_worst[v] += total_use * (start <= worst < end)
    orders = (
        np.lexsort((cost, total_use, used_then, is_forbidden(cost)))
        for cost, total_use, used_then in zip(problem.node_cost, total, at_worst, strict=True)
    )
    return np.array([order[0] for order in orders], np.int64)


def _rank(evaluation: Evaluation) -> tuple[bool, bool, float, float]:
    """Returns the key by which choices are sorted, the best first."""
    return (
        not evaluation.feasible,
        bool(is_forbidden(np.asarray(evaluation.cost))),
        evaluation.excess,
        evaluation.cost,
    )


_ERRORS_PER_TERM = 8
"""Roundings that a cost goes through between the problem and a bound: presolve adds it up, and so do solvers."""


class Rounding:
    """How far the sums of a problem's costs may be off."""

    def __init__(self, problem: Problem):
        costs = list(_allowed(problem))
        size = sum(count * max(float(np.abs(allowed).max()), 0.0) for allowed, count in costs)
        is_whole = all(are_whole(allowed) for allowed, _ in costs)
        most = sum(count * float(allowed.max()) for allowed, count in costs)
        least = sum(count * min(float(allowed.min()), 0.0) for allowed, count in costs)
        terms = len(problem.node_cost) * (1 + len(load_groups(problem))) + len(problem.edge_cost)
        is_exact = is_whole and size < LARGEST_EXACT_FLOAT and not len(problem.load)
        self._share = 0.0 if is_exact else _ERRORS_PER_TERM * terms * float(np.finfo(float).eps)
        self._negative = -2 * least
        self.largest_cost = most + self._share * size

    def safe_bound(self, bound: float) -> float:
        """Returns a bound from float64 sums lowered by what the sums may be off.

        A bound above the largest cost that a choice can have is infinite: there is no choice.
        """
        if math.isfinite(bound):
            bound -= self._share * (abs(bound) + self._negative)
        return math.inf if bound > self.largest_cost else bound


def in_range(problem: Problem) -> tuple[Problem, float]:
    """Divides costs whose sums could reach `FORBIDDEN` by a power of two, so that no sum counts as forbidden.

    Returns:
      The problem, which is the one that was given wherever its sums are smaller, and what its costs were divided by.
    """
    size = sum(count * float(np.abs(allowed).max()) for allowed, count in _allowed(problem))
    if size < FORBIDDEN / 4:
        return problem, 1.0
    unit = 2.0 ** math.ceil(math.log2(size / FORBIDDEN) + 2)

    def divided(costs: np.ndarray) -> np.ndarray:
        return np.where(is_forbidden(costs), np.inf, np.asarray(costs, float) / unit)

    distinct, matrix_of = distinct_arrays(problem.edge_cost)
    matrices = [divided(matrix) for matrix in distinct]
    scaled = problem._replace(
        node_cost=[divided(cost) for cost in problem.node_cost],
        edge_cost=[matrices[m] for m in matrix_of],
        load=[divided(load) for load in problem.load],  # edges add none here
    )
    return scaled, unit


def _allowed(problem: Problem) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the allowed entries of each distinct array of costs, if any, and how many terms of a choice it gives."""
    num_groups = len(load_groups(problem))
    for arrays, per_array in ((problem.node_cost, 1), (problem.edge_cost, 1), (problem.load, num_groups)):
        distinct, which = distinct_arrays(arrays)
        counts = per_array * np.bincount(which, minlength=len(distinct))
        for array, count in zip(map(np.asarray, distinct), counts.tolist(), strict=True):
            allowed = array[~is_forbidden(array)]
            if allowed.size:
                yield allowed, count
