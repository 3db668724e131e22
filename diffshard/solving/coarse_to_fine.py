"""Problems of equal layers from coarse to fine: first what is small, the whole only where it has something to gain.

1. The tied problem, in which tied nodes take equal strategies, is solved. It has the nodes of one layer instead of
   all; its choices are choices of the problem, and treat equal layers equally.
2. The whole problem is presolved and its dual maximised for a bound. The tied choice is the answer where it is near.
3. Else the ties are loosened where the neighbours of tied nodes differ, as at the first and the last layer. If that is
   not near enough either, the solver goes on with the whole problem.

A start that is given, as the choice of a similar problem, counts as a tied choice, and stage 1 waits until the bound
shows that it is not near enough.

Every stage begins without the memory limit, and limits the memory at the times at which its choices exceed it.

Most times of the memory limit never bind, and nodes that live at none of the others are easy. A choice that keeps the
limit at all times is one of the problem, and a bound of the relaxed problem is one for the problem (cutting planes, of
which a training step needs few, because its memory has one or two peaks).

Source: Dantzig, Fulkerson and Johnson, "Solution of a large-scale traveling-salesman problem" (1954).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from cost.base import Problem
from cost.evaluation import Evaluator, checked_choice
from diffshard.base import OPTIMAL_GAP, Deadline, Progress, Proposal, Solution, Solver
from diffshard.solving.form import Reduction, classes, identity, merge_classes
from diffshard.solving.loop import Best, begun, proposals, reduced, run_solver

_MOST_ADDITIONS = 4
"""Additions of times after which all are limited; each one costs another presolve. Chosen by hand."""


class LazyMemoryLimit:
    """The times of a problem at which its relaxation keeps the memory limit; none to begin with.

    Attributes:
      all: whether these are all times, so that nothing is relaxed.
    """

    def __init__(self, problem: Problem):
        self._evaluator, self._limit = Evaluator(problem), np.asarray(problem.memory_limit, float)
        self._times = np.zeros(0, np.int64)
        self._num_additions = 0
        self.all = not len(problem.usage) or bool(np.isinf(self._limit).all())

    def relaxation(self, problem: Problem) -> Problem:
        """Returns the problem with the limit at these times only; `problem` has the usages' intervals of the first."""
        if self.all:
            return problem
        if not len(self._times):
            return problem._replace(memory_limit=np.inf)
        interval = np.searchsorted(self._times, np.asarray(problem.usage_interval, np.int64))
        live = np.flatnonzero(interval[:, 0] < interval[:, 1])
        return problem._replace(
            usage_node=np.asarray(problem.usage_node)[live],
            usage=[problem.usage[k] for k in live.tolist()],
            usage_interval=interval[live],
        )

    def exceeded_by(self, choice: np.ndarray) -> np.ndarray:
        """Returns the times at which a choice `[V]` of the problem exceeds the limit most: one of each run of times."""
        times, used = self._evaluator.live_usage(choice)
        excess = np.max(used - self._limit, axis=1)
        return np.array([times[i] for i in _peaks(excess)], np.int64)

    def permits(self, exceeded_times: np.ndarray) -> bool:
        """Returns whether a choice that exceeds the limit at some times keeps it at these."""
        return not np.isin(exceeded_times, self._times).any()

    def add(self, exceeded_times: np.ndarray) -> None:
        """Limits the memory at more times, in the end at all."""
        self._times = np.union1d(self._times, exceeded_times)
        self._num_additions += 1
        self.all = self.all or self._num_additions > _MOST_ADDITIONS


def _peaks(excess: np.ndarray) -> list[int]:
    """Returns the position of the largest number of each run of positive ones."""
    above = excess > 0
    starts = np.flatnonzero(above & ~np.append(False, above[:-1]))
    ends = np.flatnonzero(above & ~np.append(above[1:], False)) + 1
    return [int(start + excess[start:end].argmax()) for start, end in zip(starts, ends, strict=True)]


TIE_GAP = 1e-4
"""How much more a choice that treats equal layers equally may cost, relatively: far below what predictions are off."""
_LOOSE_ROUNDS = 2
"""Rounds of refinement that loosen ties: nodes stay tied whose neighbours' neighbours are equal. One round was enough
on GPTs and decoders of 8 to 32 layers."""
_SOLVED_GAP = 1e-5
"""The gap at which a tied problem counts as solved; a tenth of what ties may cost."""
_TIED_GAP_SHARE = 0.5
"""The share of the gap that is small enough which a tied problem may leave; the rest is for what ties cost."""
_TIED_TIME_SHARE = 0.2
"""The share of the time limit that each tied problem may take; chosen by hand."""


@dataclass
class _Run:
    """The state that all stages share; mutable.

    Attributes:
      key: a JAX random key.
      stop_gap: the relative gap that is small enough.
      tied_choices: the start and the tied choices that keep the limit, `[V]`, with their costs; the start first, then
        the strictest ties.
    """

    problem: Problem
    solver: Solver
    reduce: Callable[[Problem], Reduction]
    key: jax.Array
    deadline: Deadline
    best: Best
    times: LazyMemoryLimit
    stop_gap: float
    tied_choices: list[tuple[np.ndarray, float]] = field(default_factory=list)

    def is_good(self) -> bool:
        """Returns whether the best choice is optimal, or a tied one near enough to the bound."""
        bound = self.best.lower_bound
        return self.best.gap() <= self.stop_gap or any(
            cost - bound <= max(TIE_GAP, self.stop_gap) * abs(cost) for _, cost in self.tied_choices
        )


def run_coarse_to_fine(
    problem: Problem,
    solver: Solver,
    tied: np.ndarray,
    *,
    time_limit_s: float | None,
    key: jax.Array,
    progress: Progress | None,
    reduce: Callable[[Problem], Reduction],
    start: Sequence[int] | np.ndarray | None = None,
    stop_gap: float = OPTIMAL_GAP,
) -> Solution:
    """Solves a problem, and prefers choices in which tied nodes take equal strategies.

    Args:
      solver: for the tied problems and for the whole.
      tied: `[V]` numbers, equal for tied nodes, which have equally many strategies.
      key: a JAX random key.
      start: `[V]` a choice to begin with.
      stop_gap: the relative gap at which the search ends.

    Returns:
      The start, or else the choice of the strictest ties, that costs at most `TIE_GAP` more than the best choice; else
      the best one.

    Raises:
      ValueError: the problem breaks a rule of `Problem`, tied nodes have different numbers of strategies, or the
        start is no choice of the problem.
    """
    problem, best, deadline = begun(problem, time_limit_s, progress)
    if best.has_no_room:
        return best.solution("finished")
    run = _Run(problem, solver, reduce, key, deadline, best, LazyMemoryLimit(problem), stop_gap)
    tied = np.unique(tied, return_inverse=True)[1].ravel()
    ties = [lambda: tied, lambda: _loosened(problem, tied)]
    if start is not None:
        _offer_tied(run, checked_choice(problem, start, "start"))
    try:
        if not run.tied_choices:
            _solve_tied(run, ties.pop(0)())
        status = _solve_whole(run, ties)
    except KeyboardInterrupt:
        status = "interrupted"
    for choice, cost in run.tied_choices:
        if cost <= best.evaluation.cost + TIE_GAP * abs(best.evaluation.cost):
            best.prefer(choice)
            break
    return best.solution(status)


def _solve_tied(run: _Run, node_class: np.ndarray) -> None:
    """Offers the best choice in which the nodes of a class `[V]` take equal strategies, if any are in one class.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed; it means to stop the whole search.
    """
    if node_class.max(initial=-1) + 1 == len(node_class):
        return
    quotient = merge_classes(run.problem, node_class)
    limit_s = None if run.deadline.limit_s is None else _TIED_TIME_SHARE * run.deadline.limit_s
    stop_gap = max(_SOLVED_GAP, _TIED_GAP_SHARE * run.stop_gap)
    while True:
        relaxation = run.times.relaxation(quotient)
        solution = run_solver(
            relaxation, run.solver, time_limit_s=limit_s, key=run.key, reduce=run.reduce, stop_gap=stop_gap
        )
        if solution.status == "interrupted":
            raise KeyboardInterrupt
        choice = np.array(solution.choice)[node_class]
        if _offer_tied(run, choice):
            return
        exceeded_times = run.times.exceeded_by(choice)
        if run.deadline.is_over() or run.times.all or not len(exceeded_times) or not run.times.permits(exceeded_times):
            return
        run.times.add(exceeded_times)


def _offer_tied(run: _Run, choice: np.ndarray) -> bool:
    """Offers a choice `[V]` that is preferred to others of nearly its cost; returns whether it keeps the limit."""
    run.best.offer(identity(run.problem), Proposal(choice))
    evaluation = run.best.evaluate(choice)
    if evaluation.feasible:
        run.tied_choices.append((choice, float(evaluation.cost)))
    return bool(evaluation.feasible)


def _solve_whole(run: _Run, ties: list[Callable[[], np.ndarray]]) -> str:
    """Lets the solver work on the whole problem, at first for a bound; returns how it ended.

    Where the bound is too low for what there is, the problems of `ties`, classes `[V]` of nodes, are solved in order.
    """
    while not (run.deadline.is_over() and run.tied_choices):  # however short the time is, there is an answer
        exceeded_times = np.zeros(0, np.int64)
        cheapest = np.inf
        bound = run.best.lower_bound
        for choice in _proposals(run):
            if run.is_good():
                return "finished"
            if run.deadline.is_over():
                return "time limit"
            if choice is not None and not run.times.all:
                cost, here = run.best.evaluate(choice).cost, run.times.exceeded_by(choice)
                if cost < cheapest and run.times.permits(here):
                    cheapest, exceeded_times = cost, here
            if run.best.lower_bound > bound:
                bound = run.best.lower_bound
                if len(exceeded_times):
                    break  # the limit binds: a bound without it is low, and so are the choices
            elif bound > -np.inf and ties:  # the bound no longer rises at each proposal
                _solve_tied(run, ties.pop(0)())
                if run.is_good():
                    return "finished"
        if not len(exceeded_times):
            return "finished"
        run.times.add(exceeded_times)
    return "time limit"


def _proposals(run: _Run) -> Iterator[np.ndarray | None]:
    reduction = reduced(run.best, run.times.relaxation(run.problem), run.reduce)
    return proposals(run.best, reduction, run.solver, run.deadline, run.key)


def _loosened(problem: Problem, tied: np.ndarray) -> np.ndarray:
    """Returns `[V]` classes of tied nodes whose neighbourhoods are equal as well."""
    return np.unique(np.stack([tied, classes(problem, _LOOSE_ROUNDS)]), axis=1, return_inverse=True)[1].ravel()
