"""The loop that drives every solver: it prices each proposal exactly, keeps the best, and watches the time and Ctrl-C.

It takes the solver as a function, so that a solver can run the loop on a smaller problem of its own.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from cost.base import Evaluation, Problem, is_forbidden
from cost.evaluation import Evaluator
from cost.memory import least_memory
from cost.validation import validate
from diffshard.base import OPTIMAL_GAP, InfeasibleError, Progress, Proposal, Solution, Solver
from diffshard.solving.presolve.base import Reduction, identity
from diffshard.solving.presolve.pipeline import presolve

_LEAST_TIME_S = 1e-3
"""Seconds that a solver is given even where presolve has used them all, so that its limit stays positive."""


def run_solver(
    problem: Problem,
    solver: Solver,
    *,
    time_limit_s: float | None,
    key: jax.Array,
    progress: Progress | None = None,
    reduce: Callable[[Problem], Reduction] = presolve,
) -> Solution:
    """Checks and presolves a problem, lets the solver run until it ends or is stopped, and returns the best proposal.

    Args:
      problem: what to solve.
      solver: gets the presolved problem.
      time_limit_s: wall-clock seconds, presolve included; None lets the solver end by its own rule.
      key: a JAX random key.
      progress: called at each improvement.
      reduce: the presolve.

    Raises:
      ValueError: the problem breaks a rule of `Problem`, or a proposal does not have a strategy for each node.
      TypeError: the solver yields something that is no `Proposal`.
    """
    start = time.perf_counter()
    validate(problem)
    best = _Best(problem, progress, start)
    least = _least_choice(problem)
    if least is not None:
        best.offer(identity(problem), Proposal(least, math.inf))
        return best.solution("finished")
    deadline = None if time_limit_s is None else start + time_limit_s
    try:
        try:
            reduction = reduce(problem)
        except InfeasibleError:  # nothing is allowed: the solver still looks for what breaks the rules least
            reduction = identity(problem)
        status = _offer_all(best, reduction, solver, deadline, key)
    except KeyboardInterrupt:
        status = "interrupted"
    return best.solution(status)


def _offer_all(best: "_Best", reduction: Reduction, solver: Solver, deadline: float | None, key: jax.Array) -> str:
    """Offers all that the solver proposes, until it ends, the best is optimal or the time is over; returns a status."""
    if not reduction.problem.node_cost:
        best.offer(reduction, Proposal(np.zeros(0, np.int64), 0.0))
        return "finished"
    remaining_s = None if deadline is None else max(deadline - time.perf_counter(), _LEAST_TIME_S)
    proposals = solver(reduction.problem, time_limit_s=remaining_s, key=key)
    if not isinstance(proposals, Iterable):
        raise TypeError(f"`solver` must be a generator of diffshard.Proposal, but it returned {proposals!r}.")
    for proposal in proposals:
        best.offer(reduction, proposal)
        if best.is_optimal():
            break
        if deadline is not None and time.perf_counter() >= deadline:
            return "time limit"
    return "finished"


class _Best:
    """The best proposal so far, by exact price: any feasible one before any other, then less excess, then less cost."""

    def __init__(self, problem: Problem, progress: Progress | None, start: float):
        self._evaluate, self._progress, self._start = Evaluator(problem), progress, start
        cheapest = [int(np.argmin(cost)) for cost in problem.node_cost]
        self._choice = np.array(cheapest, np.int64)  # so that there is an answer whenever the loop is stopped
        self._evaluation = self._evaluate(self._choice)
        self._lower_bound = -math.inf
        self._history: list[tuple[float, float, float]] = []
        self._report()

    def offer(self, reduction: Reduction, proposal: Proposal) -> None:
        """Prices a proposal for the reduced problem on the problem as it was given, and keeps what is better."""
        _check_proposal(proposal, len(reduction.problem.node_cost))
        bound = float(reduction.constant + proposal.lower_bound)
        is_better = bound > self._lower_bound
        self._lower_bound = max(self._lower_bound, bound)
        if proposal.choice is not None:
            choice = reduction.expand(np.asarray(proposal.choice, np.int64))
            evaluation = self._evaluate(choice)
            if _rank(evaluation) < _rank(self._evaluation):
                self._choice, self._evaluation, is_better = choice, evaluation, True
        if is_better:
            self._report()

    def is_optimal(self) -> bool:
        """Tells whether the bound proves that no choice is cheaper, up to `OPTIMAL_GAP`."""
        cost = self._evaluation.cost
        return self._evaluation.feasible and cost - self._lower_bound <= OPTIMAL_GAP * abs(cost)

    def solution(self, status: str) -> Solution:
        """Returns the best proposal as a solution; the status says how the loop ended."""
        cost, _, excess, feasible = self._evaluation
        bound, gap = self._lower_bound, math.inf
        if feasible:
            bound = min(bound, cost)  # the last digit of a float must not lift the bound above the cost
            gap = (cost - bound) / abs(cost) if cost else (0.0 if bound == cost else math.inf)
        elif status == "finished":
            status = "infeasible"
        if self.is_optimal():
            status = "optimal"
        return Solution(tuple(self._choice.tolist()), cost, bound, gap, feasible, excess, tuple(self._history), status)

    def _report(self) -> None:
        cost = float(self._evaluation.cost) if self._evaluation.feasible else math.inf
        self._history.append((time.perf_counter() - self._start, cost, self._lower_bound))
        if self._progress is not None:
            self._progress(*self._history[-1])


def _check_proposal(proposal: Any, num_nodes: int) -> None:
    if not isinstance(proposal, Proposal):
        raise TypeError(f"`solver` must yield diffshard.Proposal(choice, lower_bound), not {proposal!r}.")
    if proposal.choice is not None and np.shape(proposal.choice) != (num_nodes,):
        raise ValueError(
            f"`solver` must propose one strategy index for each of the {num_nodes} nodes of the problem that it gets, "
            f"`[{num_nodes}]`, not a choice of shape {np.shape(proposal.choice)}."
        )


def _least_choice(problem: Problem) -> np.ndarray | None:
    """Returns the choice `[V]` of least memory if even the least usages exceed the limit at some time, else None."""
    if not len(problem.usage):
        return None
    times, least = least_memory(problem)
    excess = (least - problem.memory_limit).max(axis=1)
    if excess.max() <= 0:
        return None
    worst = times[np.argmax(excess)]
    at_worst, total = ([np.zeros(len(cost)) for cost in problem.node_cost] for _ in range(2))
    for v, usage, (start, end) in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True):
        total_use = np.asarray(usage, float).reshape(len(usage), -1).sum(axis=1)
        total[v] += total_use
        at_worst[v] += total_use * (start <= worst < end)
    orders = (
        np.lexsort((cost, total_use, used_then, is_forbidden(cost)))
        for cost, total_use, used_then in zip(problem.node_cost, total, at_worst, strict=True)
    )
    return np.array([order[0] for order in orders], np.int64)


def _rank(evaluation: Evaluation) -> tuple[bool, bool, float, float]:
    """Returns what choices are sorted by, the best first."""
    return (
        not evaluation.feasible,
        bool(is_forbidden(np.asarray(evaluation.cost))),
        evaluation.excess,
        evaluation.cost,
    )
