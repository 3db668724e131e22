"""One protocol for every solver and one entry, `solve`: the same loop drives them all and keeps the best found.

A solver is a function in a file of its own under `solvers/`, called `solve` there: a generator that yields `Proposal`s
(a choice, a lower bound, or both) for as long as it likes. The loop prices every choice exactly, keeps the best,
watches the time and Ctrl-C, and reports. To add a solver, add the file: its name is the solver's name, and the
conformance tests find it.
"""

import importlib
import math
import numbers
import pkgutil
import time
from collections.abc import Callable

import jax
import numpy as np

from cost.base import Evaluation, Problem, is_forbidden
from cost.evaluation import Evaluator
from cost.memory import least_memory
from cost.validation import validate
from diffshard.base import CLOSED, Progress, Proposal, Solution, Solver
from diffshard.solving import presolve, solvers


def solve(
    problem: Problem,
    *,
    solver: str | Solver = "gradient",
    time_limit_s: float | None = None,
    key: jax.Array | int | None = None,
    progress: Progress | None = None,
    reduce: Callable[[Problem], presolve.Reduction] = presolve.reduce,
) -> Solution:
    """Finds a cheap choice of strategies and a bound on how cheap any can be.

    Args:
      problem: what to solve; it is checked first.
      solver: a name from `solver_names()`, or a function that follows `Solver`.
      time_limit_s: wall-clock seconds, presolve included, which is not interrupted (milliseconds for a hundred nodes,
        about two seconds for ten thousand); None lets the solver end by its own rule.
      key: a JAX random key or a seed; None is seed 0.
      progress: called at each improvement.
      reduce: the presolve; `presolve.unchanged` hands the problem to the solver as it is.

    Returns:
      The best choice found. It says so if it is not feasible, and by how much; Ctrl-C and the time limit return what
      was found until then.

    Raises:
      ValueError: the problem breaks a rule of `Problem`, the solver is unknown, the time limit is not positive, or the
        key is neither a key nor a seed.
    """
    start = time.perf_counter()
    run = resolve(solver)
    if time_limit_s is not None and not (isinstance(time_limit_s, numbers.Real) and time_limit_s > 0):
        raise ValueError(f"`time_limit_s` must be positive or None, got {time_limit_s!r}.")
    if not (key is None or isinstance(key, int | jax.Array)):
        raise ValueError(f"`key` must be a seed, a JAX random key or None, got {key!r}.")
    validate(problem)
    key = jax.random.key(0 if key is None else key) if key is None or isinstance(key, int) else key
    best = _Best(problem, progress, start)
    status = "finished"
    least = _least_choice(problem)
    if least is not None:
        best.offer(presolve.unchanged(problem), Proposal(least, math.inf))
        return best.solution(status)
    try:
        try:
            reduced = reduce(problem)
        except presolve.InfeasibleError:  # nothing is allowed: the solver still finds what breaks the rules least
            reduced = presolve.unchanged(problem)
        left_s = None if time_limit_s is None else max(time_limit_s - (time.perf_counter() - start), 1e-3)
        nothing_left = [Proposal(np.zeros(0, np.int64), 0.0)]
        for proposal in (
            run(reduced.problem, time_limit_s=left_s, key=key) if reduced.problem.node_cost else nothing_left
        ):
            best.offer(reduced, proposal)
            if best.closed():
                break
            if time_limit_s is not None and time.perf_counter() - start >= time_limit_s:
                status = "time limit"
                break
    except KeyboardInterrupt:
        status = "interrupted"
    return best.solution(status)


def solver_names() -> tuple[str, ...]:
    """The solvers that `solve` knows by name: the files of `diffshard/solving/solvers`."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(solvers.__path__) if module.name[0] != "_"))


def resolve(solver: str | Solver) -> Solver:
    """The solver of a name; a function is returned as it is.

    Raises:
      ValueError: no solver has this name.
    """
    if callable(solver):
        return solver
    if solver not in solver_names():
        raise ValueError(f"`solver` must be one of {', '.join(solver_names())}, or a function; got {solver!r}.")
    return importlib.import_module(f"diffshard.solving.solvers.{solver}").solve


class _Best:
    """The best proposal so far, by exact price: any feasible one before any other, then less excess, then less cost."""

    def __init__(self, problem: Problem, progress: Progress | None, start: float):
        self._evaluate, self._progress, self._start = Evaluator(problem), progress, start
        cheapest = [int(np.argmin(cost)) for cost in problem.node_cost]
        self._choice = np.array(cheapest, np.int64)  # so that there is an answer whenever the loop is stopped
        self._found = self._evaluate(self._choice)
        self._lower_bound = -math.inf
        self._history: list[tuple[float, float, float]] = []
        self._report()

    def offer(self, reduced: presolve.Reduction, proposal: Proposal) -> None:
        bound = float(reduced.constant + proposal.lower_bound)
        improved = bound > self._lower_bound
        self._lower_bound = max(self._lower_bound, bound)
        if proposal.choice is not None:
            choice = reduced.expand(np.asarray(proposal.choice, np.int64))
            found = self._evaluate(choice)
            if _rank(found) < _rank(self._found):
                self._choice, self._found, improved = choice, found, True
        if improved:
            self._report()

    def closed(self) -> bool:
        return self._found.feasible and self._found.cost - self._lower_bound <= CLOSED * abs(self._found.cost)

    def solution(self, status: str) -> Solution:
        found = self._found
        cost, gap = found.cost, math.inf
        if found.feasible:
            # A float's last digit must not make the bound exceed what was found.
            bound = min(self._lower_bound, cost)
            gap = (cost - bound) / abs(cost) if cost else (0.0 if bound == cost else math.inf)
        else:
            bound = self._lower_bound
        status = "optimal" if self.closed() else status if found.feasible else _unsolved(status)
        return Solution(self._choice, cost, bound, gap, found.feasible, found.excess, tuple(self._history), status)

    def _report(self) -> None:
        cost = float(self._found.cost) if self._found.feasible else math.inf
        self._history.append((time.perf_counter() - self._start, cost, self._lower_bound))
        if self._progress is not None:
            self._progress(*self._history[-1])


def _least_choice(problem: Problem) -> np.ndarray | None:
    """The choice `[V]` of least memory where even the least usages exceed the limit at some time, else None."""
    if not len(problem.usage):
        return None
    times, least = least_memory(problem)
    excess = (least - problem.memory_limit).max(axis=1)
    if excess.max() <= 0:
        return None
    worst = times[np.argmax(excess)]
    at_worst, total = ([np.zeros(len(cost)) for cost in problem.node_cost] for _ in range(2))
    for v, usage, (start, end) in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True):
        used = np.asarray(usage, float).reshape(len(usage), -1).sum(axis=1)
        total[v] += used
        at_worst[v] += used * (start <= worst < end)
    orders = (
        np.lexsort((cost, used, used_then, is_forbidden(cost)))
        for cost, used, used_then in zip(problem.node_cost, total, at_worst, strict=True)
    )
    return np.array([order[0] for order in orders], np.int64)


def _unsolved(status: str) -> str:
    return "infeasible" if status == "finished" else status


def _rank(found: Evaluation) -> tuple[bool, bool, float, float]:
    return (not found.feasible, bool(is_forbidden(np.asarray(found.cost))), found.excess, found.cost)
