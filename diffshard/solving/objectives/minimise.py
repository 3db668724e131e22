"""Minimises an objective over choices: tangents are problems, their solutions are choices, and mixtures give bounds.

The objective F of a mixture of choices is a function of the mixture's amounts, which are linear. One round

1. finds the best mixture of the choices that are known, and the mean tangent there (`mixtures.py`);
2. solves the tangent as a `Problem`. Its lower bound and the tangent's constant bound F over all choices, its solution
   is a choice that may be cheaper than the mixture's and is priced exactly by F;
3. descends from the best choice by changes of one or two nodes, whose exact prices count (`single_nodes.py`).

The tangent of a few known choices can be far off: where links bound the best step it counts links alone, and the
cheapest step by links alone is a hard problem with a useless answer. So the one that is solved is the mean of it and of
the tangent with the highest bound so far; where that leads to nothing new, the mixture's own is solved.

Once no choice is cheaper than the mixture under its tangent, the mixture is optimal, and what is left between its cost
and that of the best choice comes from choices being whole. It is closed by branching: a node that the mixture splits
takes its main strategy in one branch and any other in the second one, and the branch of the lowest bound goes on first.

Source: M. Frank and P. Wolfe, "An Algorithm for Quadratic Programming" (1956); C. Holloway, "An Extension of the
Frank and Wolfe Method of Feasible Directions" (1974), for mixtures of all solutions; P. Wentges, "Weighted
Dantzig-Wolfe Decomposition for Linear Mixed-Integer Programming" (1997), for means with the best tangent.
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from cost.base import FORBIDDEN, Problem
from cost.evaluation import Evaluator
from cost.quantities import with_weights
from diffshard.base import OPTIMAL_GAP, InfeasibleError, Solution
from diffshard.solving.objectives.mixtures import Descent, Mixture, Tangents, best_mixture
from diffshard.solving.objectives.objective import Affine, Objective, PricedObjective

SolveLinear = Callable[[Problem, np.ndarray | None, float], Solution]
"""`solve(problem, start, stop_gap)`: solves a problem, from a start `[V]` where one is known, until it is within a
relative gap; raises `InfeasibleError` where it finds nothing within the memory limit."""
TANGENT_SHARE = 0.2
"""The share of the time left that solving a tangent should take: one that is hard leaves time for others."""
_GAP_SHARE, _MOST_GAP = 0.1, 1e-2
"""A tangent is solved to this share of the objective's gap, and to this relative gap at least."""
_FEWEST_PROBLEMS, _MOST_PROBLEMS, _MOST_NODES = 3, 100, 1500
"""Tangents that are solved at least and at most where no time limit says so, and the nodes of those between, so that
large problems stay fast. On steps that links bound 8 led to as good plans as 80."""
_MOST_FRUITLESS, _PROGRESS = 6, 0.01
"""The search ends once this many tangents in a row have together closed less than this share of the gap. What remains
is there because choices are whole, and each level of branches closes little of it."""
_SETTLED = 1e-6
"""A mixture is optimal where the cheapest choice under its tangent gains less than this relative to its cost."""
_WHOLE = 1e-6
"""Weights in a mixture below this do not count as splitting a node."""


@dataclass
class _Search:
    """The state that all branches share; mutable.

    Attributes:
      problem: the linear part of the cost, with the memory limit.
      is_over: tells whether there is no time for another problem.
      tell: is told the best cost and the bound of all choices.
      stop_gap: the relative gap at which the search ends.
      most_problems: tangents that are solved at most.
      choices, costs, amounts: the feasible choices that are known, their linear costs and amounts.
    """

    problem: Problem
    priced: PricedObjective
    solve: SolveLinear
    is_over: Callable[[], bool]
    tell: Callable[[float, float], None]
    stop_gap: float
    most_problems: float
    tangents: Tangents
    choices: list[np.ndarray] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    amounts: list[np.ndarray] = field(default_factory=list)
    best_price: float = math.inf
    best_choice: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    lower_bound: float = -math.inf
    num_problems: int = 0
    gap_at_progress: float = math.inf
    problems_at_progress: int = 0
    history: list[tuple[float, float, float]] = field(default_factory=list)

    def __post_init__(self):
        self.evaluate, self.begin_s = Evaluator(self.problem), time.perf_counter()
        self.descend = Descent(self.problem, self.priced, self.evaluate)

    def gap(self) -> float:
        """Returns the relative gap between the best price and the bound."""
        return (self.best_price - self.lower_bound) / (abs(self.best_price) or 1.0)

    def tangent_gap(self) -> float:
        """Returns the relative gap to which the next tangent is worth solving."""
        return min(_GAP_SHARE * max(self.gap(), self.stop_gap), _MOST_GAP)

    def is_done(self) -> bool:
        """Returns whether the search has to end."""
        is_stuck = self.num_problems - self.problems_at_progress >= _MOST_FRUITLESS and math.isfinite(self.gap())
        return self.gap() <= self.stop_gap or is_stuck or self.num_problems >= self.most_problems or self.is_over()

    def has_own_slopes(self) -> bool:
        """Returns whether the objective's own tangents lead elsewhere than those from which the bound comes."""
        return not self.tangents.is_convex or self.priced.objective.convex_below is not None

    def add(self, choice: np.ndarray) -> int | None:
        """Adds a choice to the known ones; returns its number, None where it was known or is not feasible."""
        if any(np.array_equal(choice, known) for known in self.choices):
            return None
        evaluation = self.evaluate(choice)
        if not evaluation.feasible:
            return None
        amounts = self.priced.amounts(choice)
        value = self.priced.price(amounts)
        if self.priced.objective.convex_below is None:
            self.tangents.check(amounts, value)
        cost = float(evaluation.cost)
        if cost + value < self.best_price:
            self.best_price, self.best_choice = cost + value, choice
            self.report()
        self.choices.append(choice)
        self.costs.append(cost)
        self.amounts.append(amounts)
        self.tangents.add(amounts)
        return len(self.choices) - 1

    def add_descended(self, starts: Sequence[np.ndarray]) -> list[int]:
        """Adds where descents end; nodes in which known choices differ come first. Returns the numbers of new ones."""
        added = []
        for start in starts:
            differs = np.mean([choice != start for choice in self.choices], axis=0)
            added.append(self.add(self.descend(start, np.argsort(-differs, kind="stable"))))
        return [k for k in added if k is not None]

    def raise_bound(self, bound: float) -> None:
        """Takes over a bound on all choices, if the objective is convex as far as is known."""
        if self.tangents.is_convex and bound > self.lower_bound:
            self.lower_bound = min(bound, self.best_price)
            self.report()

    def report(self) -> None:
        """Writes the best price and the bound down, and tells them."""
        if self.gap() < (1 - _PROGRESS) * self.gap_at_progress:
            self.gap_at_progress, self.problems_at_progress = self.gap(), self.num_problems
        bound = self.lower_bound if self.tangents.is_convex else -math.inf
        self.history.append((time.perf_counter() - self.begin_s, self.best_price, bound))
        self.tell(self.best_price, bound)


@dataclass(order=True)
class _Branch:
    """Choices that keep some strategies at some nodes; the one of the lowest bound goes on first.

    Attributes:
      bound: no choice of the branch costs less.
      allowed: by node, which strategies it may take, `[S_v]` booleans; nodes that are not there may take any.
      centre: the tangent that gave the bound, None if it came from elsewhere.
    """

    bound: float
    number: int
    allowed: dict[int, np.ndarray] = field(compare=False)
    centre: Affine | None = field(default=None, compare=False)

    def problem(self, problem: Problem) -> Problem:
        """Returns a problem in which only the branch's choices are allowed."""
        node_cost = list(problem.node_cost)
        for v, allowed in self.allowed.items():
            node_cost[v] = np.where(allowed, node_cost[v], float(FORBIDDEN))
        return problem._replace(node_cost=node_cost)

    def has(self, choice: np.ndarray) -> bool:
        """Returns whether a choice is in the branch."""
        return all(allowed[choice[v]] for v, allowed in self.allowed.items())


def minimise(
    problem: Problem,
    objective: Objective,
    solve: SolveLinear,
    start: np.ndarray,
    *,
    is_over: Callable[[], bool] = lambda: False,
    tell: Callable[[float, float], None] = lambda cost, bound: None,
    stop_gap: float = OPTIMAL_GAP,
    most_problems: float | None = None,
    lower_bound: float = -math.inf,
    bounded: Affine | None = None,
    history: tuple[tuple[float, float, float], ...] = (),
) -> Solution:
    """Finds a choice for which the problem's cost plus an objective is small, and a bound on how small it can be.

    Args:
      problem: the linear part of the cost, and the memory limit.
      objective: the part that is a function of quantities.
      solve: solves the tangents.
      start: `[V]` a feasible choice to begin with.
      is_over: tells whether there is no time for another problem.
      tell: is told the best cost and the bound at each improvement.
      stop_gap: the relative gap at which the search ends.
      most_problems: tangents that are solved at most; None takes 5 to 100 by the number of nodes.
      lower_bound: a bound that is known already.
      bounded: a linear function of the amounts, nowhere above the objective, of whose problem that is the bound.
      history: of the search for the start.

    Returns:
      The best choice; its cost includes the objective. The bound is -inf where the objective turned out not to be
      convex and has no `convex_below`.

    Raises:
      TypeError, ValueError: the objective is no scalar, not finite, 1e18 or more, or has no gradient; the start is not
        feasible.
    """
    priced = PricedObjective(objective, problem)
    if most_problems is None:
        most_problems = min(_FEWEST_PROBLEMS + _MOST_NODES // max(len(problem.node_cost), 1), _MOST_PROBLEMS)
    search = _Search(problem, priced, solve, is_over, tell, stop_gap, most_problems, Tangents(priced.tangent_below))
    search.lower_bound = lower_bound
    search.tangents.known += [] if bounded is None else [bounded]
    start = np.asarray(start, np.int64)
    priced.check_size(priced.amounts(start))
    if search.add(start) is None:
        raise ValueError("`start` must be a feasible choice of `problem`.")
    if not is_over():
        search.add_descended([search.best_choice])
    status = _run(search, bounded)
    if len(start):
        _check_gradient(priced, search.amounts)
    bound = search.lower_bound if search.tangents.is_convex else -math.inf
    gap = (search.best_price - bound) / abs(search.best_price) if search.best_price else 0.0
    return Solution(
        choice=tuple(search.best_choice.tolist()),
        cost=search.best_price,
        lower_bound=bound,
        gap=gap,
        feasible=True,
        excess=0.0,
        history=(*history, *search.history),
        status="optimal" if gap <= OPTIMAL_GAP else status,
    )


def _run(search: _Search, bounded: Affine | None) -> str:
    """Works on branches until the gap is closed or the search has to end; returns how it ended."""
    numbers = count()
    branches = [_Branch(search.lower_bound, next(numbers), {}, bounded)]
    closed_bound = math.inf  # of branches that cannot be split further
    try:
        while branches and not search.is_done():
            branch = heapq.heappop(branches)
            open_bound = min((other.bound for other in branches), default=math.inf)
            mixture, members = _settle(search, branch, min(open_bound, closed_bound))
            if mixture is not None and branch.bound < search.best_price:
                children = _split(search, branch, mixture, members)
                if not children:
                    closed_bound = min(closed_bound, branch.bound)
                for allowed in children:
                    heapq.heappush(branches, _Branch(branch.bound, next(numbers), allowed))
            elif mixture is None:
                closed_bound = min(closed_bound, branch.bound)
            search.raise_bound(min(closed_bound, min((b.bound for b in branches), default=search.best_price)))
    except KeyboardInterrupt:
        return "interrupted"
    return "time limit" if search.is_over() and search.gap() > search.stop_gap else "finished"


def _settle(search: _Search, branch: _Branch, others_bound: float) -> tuple[Mixture | None, list[int]]:
    """Makes the best mixture of a branch's choices, and raises its bound; returns it with the numbers of its choices.

    Returns None where the branch has no choice within the memory limit, or the search has to end.
    """
    restricted = branch.problem(search.problem)
    members = [k for k, choice in enumerate(search.choices) if branch.has(choice)]
    mixture, is_own, share = None, False, 1.0
    while not search.is_done():
        share /= 2  # of the centre: mixtures of many choices, and so those of branches, need it less
        if members:
            mixture = _mixture_of(search, members)
            own = mixture.tangent
        else:  # no choice of the branch is known: the tangent of the best one leads to one
            own = search.tangents.add(search.priced.amounts(search.best_choice))
        is_own = is_own or bool(branch.allowed)
        tangent = own if is_own or branch.centre is None else _mean(branch.centre, own, share)
        try:
            is_new, bound = _follow(search, branch, restricted, tangent.gradient, members)
            if tangent.constant + bound > branch.bound:
                branch.bound, branch.centre = tangent.constant + bound, tangent
                search.raise_bound(min(branch.bound, others_bound))
            if search.has_own_slopes() and mixture is not None and not search.is_done():
                here = mixture.weights @ np.array([search.amounts[k] for k in members[: len(mixture.weights)]])
                is_new |= _follow(search, branch, restricted, search.priced.tangent(here).affine.gradient, members)[0]
        except InfeasibleError:
            return None, members
        if mixture is not None and branch.bound >= mixture.cost - _SETTLED * abs(mixture.cost):
            break
        if not is_new and mixture is not None and (is_own or tangent is own):
            break
        is_own = not is_new and not is_own
    return mixture, members


def _mean(one: Affine, other: Affine, share: float) -> Affine:
    """Returns the mean of two functions, the first with a share; where both are nowhere above F it is not either."""
    constant = share * one.constant + (1 - share) * other.constant
    return Affine(constant, share * one.gradient + (1 - share) * other.gradient)


def _follow(
    search: _Search, branch: _Branch, restricted: Problem, gradient: np.ndarray, members: list[int]
) -> tuple[bool, float]:
    """Solves the tangent of a gradient over a branch, and adds what it finds to the branch's choices.

    Returns:
      Whether the choice was new, and the lower bound of the tangent's problem.

    Raises:
      InfeasibleError: the solver found nothing within the memory limit.
      KeyboardInterrupt: it was interrupted; what it found is kept.
    """
    weights = search.priced.by_name(gradient)
    tangent = with_weights(restricted, search.priced.objective.quantities, weights)
    solution = search.solve(tangent, _cheapest_under(search, members, gradient), search.tangent_gap())
    search.num_problems += 1
    found = np.asarray(solution.choice, np.int64)
    number = search.add(found)
    starts = [search.best_choice] if number is None else [found, search.best_choice]
    added = [*([] if number is None else [number]), *search.add_descended(starts)]
    members += [k for k in added if branch.has(search.choices[k])]
    if solution.status == "interrupted":
        raise KeyboardInterrupt
    return number is not None, solution.lower_bound


def _mixture_of(search: _Search, members: list[int]) -> Mixture:
    costs, amounts = np.array([search.costs[k] for k in members]), np.array([search.amounts[k] for k in members])
    if not search.tangents.known:
        search.tangents.add(amounts[-1])
    return best_mixture(costs, amounts, search.tangents)


def _cheapest_under(search: _Search, members: list[int], gradient: np.ndarray) -> np.ndarray | None:
    """Returns the known choice that is the cheapest under a tangent."""
    if not members:
        return None
    return search.choices[min(members, key=lambda k: search.costs[k] + float(gradient @ search.amounts[k]))]


def _split(search: _Search, branch: _Branch, mixture: Mixture, members: list[int]) -> list[dict[int, np.ndarray]]:
    """Returns two branches: the node that the mixture splits most evenly takes its main strategy, or not."""
    used = [(search.choices[k], w) for k, w in zip(members, mixture.weights, strict=False) if w > _WHOLE]
    choices, weights = np.array([choice for choice, _ in used]), np.array([w for _, w in used])
    main = choices[np.argmax(weights)]
    share = (weights[:, None] * (choices == main)).sum(axis=0) / weights.sum()
    v = int(np.argmin(np.abs(share - 0.5)))
    if share[v] > 1 - _WHOLE:
        return []
    size = len(search.problem.node_cost[v])
    is_main = np.arange(size) == main[v]
    allowed = branch.allowed.get(v, np.ones(size, bool))
    return [branch.allowed | {v: allowed & is_main}, branch.allowed | {v: allowed & ~is_main}]


def _check_gradient(priced: PricedObjective, amounts: list[np.ndarray]) -> None:
    """Raises `ValueError` where an objective is flat at the first choices and far around them."""
    for here in amounts:
        if any(np.any(priced.tangent(factor * here).affine.gradient) for factor in (1.0, 0.5, 2.0, 0.0)):
            return
    raise ValueError(
        f"`{priced.objective.name}` has no gradient with respect to {', '.join(priced.objective.quantities)}, so that "
        "it cannot choose. Rounding, comparisons and integers have none: write it with differentiable operations."
    )
