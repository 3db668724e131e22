"""Candidates beside what a search found: simpler choices and schedules, of which training is to tell the best."""

import itertools
from bisect import bisect_right
from collections import Counter
from typing import NamedTuple

import numpy as np

from cost.base import Problem, is_forbidden, num_strategies
from cost.evaluation import evaluate
from diffshard.bilevel_search.rounding import Prediction
from diffshard.bilevel_search.space import Choice, Space, node_names
from diffshard.solving.solve import solve

_MOST_COMBINATIONS = 4096
_MOST_DESCRIBED = 3  # nodes in the name of a candidate
_SOLVER_S = 20.0


class Candidate(NamedTuple):
    """A choice, or a schedule: the exact choice for a share of training, then this one."""

    name: str
    choice: Choice
    exact_share: float = 0.0


def propose(
    space: Space,
    problem: Problem,
    proposal: Choice,
    prediction: Prediction,
    reference: Choice,
    *,
    most: int,
) -> list[Candidate]:
    """The search's proposal, every uniform choice, choices by type, schedules of the first two, and the cheapest.

    Choices by type are all combinations over nodes (whose sites share a type), or, where these are too many, those that
    take one strategy at all nodes of a kind (that choose from the same names), and those that differ from the exact
    choice in one or two nodes. Those that another is predicted to beat in loss and time go last, and so do uniform ones
    of a name that not every node knows. The cheapest of all is tried in any case: predictions are of damage alone, and
    what is less than the reference (a narrower window, fewer tokens for an expert) may train better than it.

    Args:
      space: names the strategies.
      problem: of the space.
      proposal: of the search.
      prediction: of the loss.
      reference: the exact choice.
      most: how many, at most, in this order; the cheapest comes on top.
    """
    proposed, (uniform, partly) = Candidate("found", proposal), _uniform(space, reference)
    seen = {reference, proposal, *(candidate.choice for candidate in (*uniform, *partly))}
    by_type = [choice for choice in _combinations(space, problem, reference) if choice not in seen]
    points = np.array([(prediction.increase(choice), space.seconds(choice)) for choice in by_type]).reshape(-1, 2)
    named = [Candidate(described(space, problem, choice, reference), choice) for choice in by_type]
    layer = _layers(points)
    best = [named[i] for i in np.flatnonzero(layer == 0)]
    rest = [named[i] for i in np.argsort(layer, kind="stable") if layer[i]]
    found = [proposed, *uniform, _late(proposed), *best, *partly, *map(_late, uniform), *rest]
    distinct: dict[tuple[Choice, float], Candidate] = {}
    for candidate in found:
        at = candidate.choice, candidate.exact_share
        if candidate.choice != reference and at not in distinct and _possible(problem, candidate.choice):
            distinct[at] = candidate
            if len(distinct) == most:
                break
    cheapest = tuple(int(s) for s in solve(problem, time_limit_s=_SOLVER_S).choice)
    if cheapest != reference and _possible(problem, cheapest):
        distinct.setdefault((cheapest, 0.0), Candidate("cheapest", cheapest))
    return list(distinct.values())


def _possible(problem: Problem, choice: Choice) -> bool:
    """Whether a choice keeps the problem's own limits and takes nothing that is forbidden."""
    found = evaluate(problem, choice)
    return bool(found.feasible) and not is_forbidden(np.asarray(found.cost))


def _late(candidate: Candidate) -> Candidate:
    return Candidate(f"{candidate.name}, second half", candidate.choice, 0.5)


def _uniform(space: Space, reference: Choice) -> tuple[list[Candidate], list[Candidate]]:
    """For each strategy's name the choice that takes it wherever it can be had.

    Names that begin with it serve as well, as "int4 with error feedback" does for "int4".

    Returns:
      Those of names that every node knows, and the others, which are exact elsewhere.
    """
    names = [list(space.strategy_names(v)) for v in range(len(reference))]
    everywhere, partly = [], []
    for name in dict.fromkeys(name for row in names for name in row):
        alike = [[s for s, other in enumerate(row) if f"{other} ".startswith(f"{name} ")] for row in names]
        exactly = [[row.index(name)] if name in row else found for row, found in zip(names, alike, strict=True)]
        choice = tuple(found[0] if found else r for found, r in zip(exactly, reference, strict=True))
        (everywhere if all(exactly) else partly).append(Candidate(f"all {name}", choice))
    return everywhere, partly


def _combinations(space: Space, problem: Problem, reference: Choice) -> list[Choice]:
    sizes = num_strategies(problem).tolist()
    if np.prod(sizes, dtype=float) <= _MOST_COMBINATIONS:
        return list(itertools.product(*map(range, sizes)))
    kinds: dict[tuple[str, ...], int] = {}
    kind_of = [kinds.setdefault(tuple(space.strategy_names(v)), len(kinds)) for v in range(len(sizes))]
    found: dict[Choice, None] = {}
    if np.prod([len(names) for names in kinds], dtype=float) <= _MOST_COMBINATIONS:
        for taken in itertools.product(*(range(len(names)) for names in kinds)):
            found[tuple(taken[kind] for kind in kind_of)] = None
    for first, second in itertools.combinations_with_replacement(range(len(sizes)), 2):
        for s, t in itertools.product(range(sizes[first]), range(sizes[second])):
            choice = list(reference)
            choice[first], choice[second] = s, t
            found[tuple(choice)] = None
            if len(found) >= 2 * _MOST_COMBINATIONS:
                return list(found)
    return list(found)


def _layers(at: np.ndarray) -> np.ndarray:
    """`[n]`: 0 for the points `[n, 2]` that none beats in both, 1 for those that none of the rest beats, and so on."""
    points, place = np.unique(at, axis=0, return_inverse=True)
    least: list[float] = []  # second coordinate so far in each layer: it rises from layer to layer
    layer = np.zeros(len(points), int)
    for i, second in enumerate(points[:, 1].tolist()):
        layer[i] = bisect_right(least, second)
        least[layer[i] : layer[i] + 1] = [second]
    return layer[place.ravel()]


def described(space: Space, problem: Problem, choice: Choice, reference: Choice) -> str:
    """Where a choice is not exact; of many nodes only how many take what."""
    nodes = node_names(space, problem)
    different = [v for v, (s, r) in enumerate(zip(choice, reference, strict=True)) if s != r]
    if len(different) <= _MOST_DESCRIBED:
        return ", ".join(f"{nodes[v]}: {space.strategy_names(v)[choice[v]]}" for v in different)
    counts = Counter(space.strategy_names(v)[choice[v]] for v in different)
    return ", ".join(f"{count}x {name}" for name, count in counts.items())
