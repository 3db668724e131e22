"""Random problems of every scale, with ties, what is forbidden, loads and memory: every solver beside the truth.

A case is a small problem, a solver, a time limit and a presolve. Its numbers are small and tied, or as large as the
rules allow, or of sizes from 1e-12 to 1e17 side by side; limits are often exactly what some choice uses, or one less.
"""

import functools
import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from cost.base import FORBIDDEN, Problem, num_strategies
from diffshard.base import OPTIMAL_GAP, Solution
from diffshard.solving.form import identity
from diffshard.solving.presolve.pipeline import presolve
from diffshard.solving.solve import resolve, solve, solver_names
from diffshard.solving.solvers import gradient
from diffshard.solving.solvers.exhaustive import MOST_CHOICES
from experiments.fuzzing.outcomes import HELD, computing_s, error_outcome
from experiments.fuzzing.truth import Truth

_MOST_CHOICES = 400
"""Choices of a problem, each of which is priced exactly in about 20 µs."""
_TIME_LIMITS_S = (None, 0.05, 0.2)
_OVERRUN_SHARE, _OVERRUN_S = 1.05, 0.5
"""What a solver may compute for at most: this share of its time limit and these seconds beyond."""
_NUMBERS = ("small", "tied", "near ties", "large", "mixed", "mixed signs", "fractions", "negative", "zero")


class Case(NamedTuple):
    """One run of a solver.

    Attributes:
      problem: small.
      solver: the name of one.
      time_limit_s: for it.
      presolves: whether the problem is presolved.
      tied: `[V]`, or None.
    """

    problem: Problem
    solver: str
    time_limit_s: float | None
    presolves: bool
    tied: np.ndarray | None


SOLVERS = {name: resolve(name) for name in solver_names()}
SOLVERS["gradient, not enumerated"] = functools.partial(gradient.solve, most_enumerated=0)


def case_of(seed: int, solver: str | None = None) -> Case:
    """Returns the case of a seed; the solvers take turns unless one is named."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    tied = num_strategies(problem) if rng.random() < 0.15 else None
    return Case(
        problem,
        solver or list(SOLVERS)[seed % len(SOLVERS)],
        _TIME_LIMITS_S[rng.integers(len(_TIME_LIMITS_S))],
        bool(rng.random() < 0.6),
        tied,
    )


def outcome(seed: int, solver: str | None = None) -> str:
    """Returns `HELD` if all that a solver says about a case is true, else what is not, or the error."""
    case = case_of(seed, solver)
    start_s = computing_s()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            solution = solve(
                case.problem,
                solver=SOLVERS[case.solver],
                time_limit_s=case.time_limit_s,
                key=seed,
                reduce=presolve if case.presolves else identity,
                tied=case.tied,
            )
    except Exception as error:  # whatever it is, it is counted
        return error_outcome(error, seed)
    seconds = computing_s() - start_s
    wrong = false_claim(case.problem, solution)
    if wrong is None and seconds > _OVERRUN_SHARE * (case.time_limit_s or math.inf) + _OVERRUN_S:
        wrong = "overrun"
    return HELD if wrong is None else f"{wrong} by {case.solver!r}, seed {seed}"


def false_claim(problem: Problem, solution: Solution) -> str | None:
    """Returns which claim of a solution is false, None where all are true."""
    truth = Truth(problem)
    chosen_cost, least_cost = truth.cost_of(solution.choice), truth.least_cost()
    if solution.feasible != (chosen_cost is not None):
        return "feasible though it is not" if solution.feasible else "not feasible though it is"
    if chosen_cost is not None and solution.cost != _rounded(chosen_cost, solution.cost):
        return "wrong cost"
    if least_cost is None:
        return "optimal though nothing is feasible" if solution.status == "optimal" else None
    if max(solution.lower_bound, *(bound for *_, bound in solution.history)) > least_cost:
        return "bound above the optimum"
    if solution.status == "infeasible" or (solution.status == "optimal" and chosen_cost is None):
        return f"{solution.status} though it is not"
    is_near = chosen_cost is None or chosen_cost - least_cost <= (1 + 1e-9) * OPTIMAL_GAP * abs(chosen_cost)
    return "optimal though it is not" if solution.status == "optimal" and not is_near else None


def _rounded(exact: Any, like: float) -> Any:
    return int(exact) if isinstance(like, int) and exact.denominator == 1 else float(exact)


def random_problem(rng: np.random.Generator, numbers: str | None = None, memory_share: float = 0.5) -> Problem:
    """Returns a problem of at most six nodes and `_MOST_CHOICES` choices.

    Args:
      rng: consumed.
      numbers: the kind of its costs; None takes any.
      memory_share: of the problems that have a memory limit.
    """
    count = int(rng.integers(1, 7))
    sizes = rng.integers(1, 5, count)
    while math.prod(sizes.tolist()) > _MOST_CHOICES:
        sizes[rng.integers(count)] = 1
    numbers = numbers or str(rng.choice(_NUMBERS))
    forbidden = float(rng.choice([0.0, 0.0, 0.1, 0.3]))
    density = float(rng.choice([0.1, 0.3, 0.6]))
    pairs = [(u, v) for u in range(count) for v in range(count) if u != v and rng.random() < density]
    node_cost = [_costs(rng, numbers, (int(size),), forbidden / 2) for size in sizes]
    edge_cost = [_costs(rng, numbers, (int(sizes[u]), int(sizes[v])), forbidden) for u, v in pairs]
    for e in range(1, len(pairs)):  # some edges share one array, or are the same up to a separable part
        if edge_cost[e].shape == edge_cost[e - 1].shape and rng.random() < 0.2:
            edge_cost[e] = edge_cost[e - 1]
    devices = int(rng.choice([0, 0, 0, 1, 3]))
    load = [_costs(rng, numbers, (int(size), devices), forbidden / 10) for size in sizes] if devices else ()
    problem = Problem(node_cost, np.array(pairs, np.int64).reshape(-1, 2), edge_cost, load=load)
    if devices == 3 and rng.random() < 0.5:
        problem = problem._replace(load_group=np.array([0, 1, 0]))
        pairs_product = math.prod(sizes.tolist()) * math.prod(np.size(matrix) for matrix in edge_cost)
        if rng.random() < 0.5 and pairs_product < MOST_CHOICES:  # pairs become strategies, which are enumerated
            edge_load = [_costs(rng, numbers, (*np.shape(matrix), devices), 0.0) for matrix in edge_cost]
            problem = problem._replace(edge_load=edge_load)
    if rng.random() < 0.2:
        amount = [_costs(rng, numbers, (int(size), 2), 0.0) for size in sizes]
        limit = np.sum([np.asarray(rows, float).mean(axis=0) for rows in amount], axis=0)
        problem = problem._replace(amount=amount, amount_limit=limit)
    return _with_memory(rng, problem, sizes) if rng.random() < memory_share else problem


def _costs(rng: np.random.Generator, numbers: str, shape: tuple[int, ...], forbidden: float) -> np.ndarray:
    costs = _numbers(rng, numbers, shape)
    if len(shape) == 2 and rng.random() < 0.2:  # separable, up to rounding
        with np.errstate(over="ignore"):
            largest = FORBIDDEN - 1000 if costs.dtype == np.int64 else 9e17
            costs = np.clip(costs[:, :1] + costs[:1], -largest, largest)
    if not forbidden:
        return costs
    mask = rng.random(shape) < forbidden
    if costs.dtype == np.int64:
        return np.where(mask, FORBIDDEN, costs)
    return np.where(mask, rng.choice([np.inf, 1e18, 3e18, 1e300]), costs)


def _numbers(rng: np.random.Generator, numbers: str, shape: tuple[int, ...]) -> np.ndarray:
    if numbers == "small":
        return rng.integers(0, 30, shape)
    if numbers == "tied":
        return rng.integers(0, 2, shape) * rng.choice([1, 7])
    if numbers == "near ties":
        return rng.choice([1e-9, 1.0, 1e9]) * (rng.integers(1, 3, shape) + 1e-7 * rng.integers(-3, 4, shape))
    if numbers == "large":
        return rng.integers(0, FORBIDDEN, shape)
    if numbers == "mixed":
        return 10.0 ** rng.uniform(-12, 17.9, shape)
    if numbers == "mixed signs":
        return 10.0 ** rng.uniform(-12, 17.9, shape) * rng.choice([-1, 1], shape)
    if numbers == "fractions":
        return rng.integers(0, 10, shape) * 0.1
    if numbers == "negative":
        return -rng.integers(0, 30, shape).astype(float) * rng.choice([1.0, 1e-9, 1e9])
    return np.zeros(shape)


def _with_memory(rng: np.random.Generator, problem: Problem, sizes: np.ndarray) -> Problem:
    count, num_usages = len(sizes), int(rng.integers(1, 2 * len(sizes) + 1))
    kind = str(rng.choice(["small", "tied", "huge", "mixed", "fractions", "zero"]))
    devices = int(rng.choice([0, 0, 2]))
    nodes = rng.integers(0, count, num_usages)
    starts = rng.integers(0, 8, num_usages)
    usage = [_usages(rng, kind, (int(sizes[v]), *([devices] if devices else []))) for v in nodes]
    interval = np.stack([starts, starts + rng.integers(1, 6, num_usages)], axis=1)
    problem = problem._replace(usage_node=nodes, usage=usage, usage_interval=interval)
    return problem._replace(memory_limit=_limit(rng, problem, devices))


def _usages(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "huge":
        return rng.integers(0, 2**63 - 1, shape)
    if kind == "mixed":
        return 10.0 ** rng.uniform(-9, 20, shape)
    return np.abs(_numbers(rng, kind, shape))


def _limit(rng: np.random.Generator, problem: Problem, devices: int) -> Any:
    """Returns a limit: what one choice uses at its peak, a little less or more, none, zero, or one for each device."""
    choice = [int(rng.integers(len(cost))) for cost in problem.node_cost]
    peak: Any = 0
    for time_ in problem.usage_interval[:, 0].tolist():
        used = [
            np.asarray(table)[choice[v]].max().item()
            for v, table, (start, end) in zip(problem.usage_node, problem.usage, problem.usage_interval, strict=True)
            if start <= time_ < end
        ]
        peak = max(peak, sum(used))
    kind = rng.integers(8)
    if kind == 0:
        return math.inf
    if kind == 1:
        return 0
    if kind == 2:
        peak = peak - 1 if isinstance(peak, int) else math.nextafter(peak, -math.inf)
    elif kind == 3:
        peak = peak // 2 if isinstance(peak, int) else peak / 2
    peak = max(peak, 0)
    if isinstance(peak, int) and peak >= 2**63:
        peak = float(peak)
    return np.array([peak] * devices) if devices and rng.random() < 0.5 else peak
