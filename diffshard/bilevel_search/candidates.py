"""Choices that are worth a training beside the search's proposal: simpler ones, schedules, the cheapest, refinements.

A prediction of the loss can be wrong, but it still says which choices another beats in both loss and time; those are
trained last. It is off by a factor that depends on where a strategy is and on what it does, so measurements of some
choices correct the predictions of others, which then propose refinements.
"""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from cost.base import is_forbidden, num_strategies
from cost.evaluation import Evaluator, evaluate
from diffshard.bilevel_search.base import LossPrediction, Objective
from diffshard.bilevel_search.plans.base import Candidate, Measurement
from diffshard.bilevel_search.relaxation import cheapest_choice
from search_spaces.base import Choice, LossySpace

_MAX_COMBINATIONS = 4096
"""Choices that are listed before candidates are picked; pricing them takes about a second."""
_MAX_NAMED_NODES = 3  # in the name of a candidate; more would not fit a table's line
_RELATIVE_NOISE = 0.25
"""Standard deviation of an increase that a whole training measured, as a share of it, beside that which does not shrink
with it."""


def propose(space: LossySpace, proposal: Choice, prediction: LossPrediction, *, max_candidates: int) -> list[Candidate]:
    """Returns the search's proposal, every uniform choice, choices by type, schedules of the first two, the cheapest.

    Choices by type are all combinations over nodes (whose operations share a type), or, where these are too many, those
    that take one strategy at all nodes of a kind (that choose from the same names), and those that differ from the
    exact choice in one or two nodes. Those that another is predicted to beat in loss and time go last, and so do
    uniform ones of a name that not every node knows. The cheapest of all is tried in any case: predictions are of
    increases alone, and what is less than the exact choice (a narrower window, fewer tokens for an expert) may train
    better than it.

    Args:
      max_candidates: how many, at most, in this order; the cheapest comes on top.
    """
    exact, evaluator = tuple(space.exact_choice()), Evaluator(space.problem)
    first, (uniform, uniform_in_part) = Candidate("proposal", proposal), _uniform_candidates(space, exact)
    known_choices = {exact, proposal, *(candidate.choice for candidate in (*uniform, *uniform_in_part))}
    by_type = [choice for choice in _combinations(space, exact) if choice not in known_choices]
    costs = [(prediction.increase(choice), float(evaluator(choice).cost)) for choice in by_type]
    layer = _layers(np.array(costs).reshape(-1, 2))
    candidates = [Candidate(choice_description(space, choice), choice) for choice in by_type]
    best_by_type = [candidates[i] for i in np.flatnonzero(layer == 0)]
    others_by_type = [candidates[i] for i in np.argsort(layer, kind="stable") if layer[i]]
    schedules = map(_second_half, uniform)
    queue = [first, *uniform, _second_half(first), *best_by_type, *uniform_in_part, *schedules, *others_by_type]
    by_content: dict[tuple[Choice, float], Candidate] = {}
    for candidate in queue:
        content = candidate.choice, candidate.exact_share
        if candidate.choice != exact and content not in by_content and _is_possible(evaluator, candidate.choice):
            by_content[content] = candidate
            if len(by_content) == max_candidates:
                break
    least_cost_choice = cheapest_choice(space.problem)
    if least_cost_choice != exact and _is_possible(evaluator, least_cost_choice):
        by_content.setdefault((least_cost_choice, 0.0), Candidate("cheapest", least_cost_choice))
    return list(by_content.values())


def choice_description(space: LossySpace, choice: Sequence[int]) -> str:
    """Returns where a choice is not exact; where that is at many nodes, only how many take which strategy."""
    nodes = space.node_names
    different_nodes = [v for v, (s, e) in enumerate(zip(choice, space.exact_choice(), strict=True)) if s != e]
    if len(different_nodes) <= _MAX_NAMED_NODES:
        return ", ".join(f"{nodes[v]}: {space.strategy_names(v)[choice[v]]}" for v in different_nodes)
    counts = Counter(space.strategy_names(v)[choice[v]] for v in different_nodes)
    return ", ".join(f"{count}x {name}" for name, count in counts.items())


def refined_candidates(
    space: LossySpace,
    prediction: LossPrediction,
    measurements: Sequence[Measurement],
    objective: Objective,
    *,
    noise: float,
) -> list[Candidate]:
    """Returns the choices that the prediction, corrected by measurements, proposes and that were not measured yet.

    Under a bound on the loss these are the cheapest choices within it and within shares of it; under a weight of the
    cost the choice of least loss and cost.

    Args:
      noise: standard deviation of a measured increase near 0, in units of the loss.
    """
    problem, exact = space.problem, tuple(space.exact_choice())
    names = [space.strategy_names(v) for v in range(len(exact))]
    corrected_prediction = calibrated_prediction(prediction, names, exact, measurements, noise)
    choices = objective.choices(problem, corrected_prediction, float(evaluate(problem, exact).cost))
    known_choices = {exact, *(measurement.choice for measurement in measurements)}
    return [
        Candidate(f"refined, {choice_description(space, choice)}", choice)
        for choice in dict.fromkeys(choices)
        if choice not in known_choices
    ]


def calibrated_prediction(
    prediction: LossPrediction,
    names: Sequence[Sequence[str]],
    exact: Sequence[int],
    measurements: Sequence[Measurement],
    noise: float,
) -> LossPrediction:
    """Returns the prediction with each slope multiplied by a factor, so that it meets measured increases.

    Slopes are over the exact choice's, and what is predicted to lower the loss counts as 0: no factor mends a sign.

    A slope's factor is the sum of its node's and of its strategy's, which nodes that choose from the same names share.
    The factors are the least squares of (Σ_v factor · predicted_v - measured) / noise, none negative, and each is drawn
    to what all share as if that were measured to 100%: what no candidate tells apart stays there. What was measured
    after a share of the training is taken to grow with the steps, and its noise with the share's inverse.

    Args:
      prediction: of the search; returned as it is where it says nothing of what was measured.
      measurements: by training; those that are not finite are left out.
      noise: standard deviation of a measured increase near 0, in units of the loss.
    """
    if not noise > 0:
        raise ValueError(f"`noise` must be positive, in units of the loss; got {noise}.")
    over_exact = [np.maximum(row - row[s], 0.0) for row, s in zip(prediction.slopes, exact, strict=True)]
    measurements = [measurement for measurement in measurements if np.isfinite(measurement.increase)]
    terms, columns = _terms(over_exact, [tuple(row) for row in names], measurements)
    if not terms.any():
        return prediction
    shares = np.array([measurement.share for measurement in measurements])
    increases = np.array([measurement.increase for measurement in measurements]) / shares
    deviation = (noise + _RELATIVE_NOISE * np.abs(increases)) / shares
    terms, targets = terms / deviation[:, None], increases / deviation
    shared_factor = nnls(terms.sum(axis=1, keepdims=True), targets)[0][0]
    if not shared_factor:  # nothing raised the loss, which does not mean that nothing can
        return prediction
    count = terms.shape[1]
    rows, targets = np.vstack([terms * shared_factor, np.eye(count)]), np.concatenate([targets, np.ones(count)])
    factors = shared_factor * nnls(rows, targets)[0]
    slopes = [
        row * (factors[v] + factors[column]) for v, (row, column) in enumerate(zip(over_exact, columns, strict=True))
    ]
    return LossPrediction(0.0, slopes)


def _is_possible(evaluator: Evaluator, choice: Choice) -> bool:
    """Returns whether a choice keeps the problem's own limits and takes nothing that is forbidden."""
    evaluation = evaluator(choice)
    return bool(evaluation.feasible) and not is_forbidden(np.asarray(evaluation.cost))


def _second_half(candidate: Candidate) -> Candidate:
    return Candidate(f"{candidate.name}, second half", candidate.choice, 0.5)


def _uniform_candidates(space: LossySpace, exact: Choice) -> tuple[list[Candidate], list[Candidate]]:
    """Finds for each strategy's name the choice that takes it wherever it can be had.

    Names that begin with it serve as well, as "int4 with error feedback" does for "int4".

    Returns:
      Those of names that every node knows, and the others, which are exact elsewhere.
    """
    names = [list(space.strategy_names(v)) for v in range(len(exact))]
    everywhere, in_part = [], []
    for name in dict.fromkeys(name for row in names for name in row):
        begins = [[s for s, other in enumerate(row) if f"{other} ".startswith(f"{name} ")] for row in names]
        takers = [[row.index(name)] if name in row else similar for row, similar in zip(names, begins, strict=True)]
        choice = tuple(taker[0] if taker else e for taker, e in zip(takers, exact, strict=True))
        (everywhere if all(takers) else in_part).append(Candidate(f"all {name}", choice))
    return everywhere, in_part


def _combinations(space: LossySpace, exact: Choice) -> list[Choice]:
    sizes = num_strategies(space.problem).tolist()
    if np.prod(sizes, dtype=float) <= _MAX_COMBINATIONS:
        return list(itertools.product(*map(range, sizes)))
    kinds: dict[tuple[str, ...], int] = {}
    kind_of = [kinds.setdefault(tuple(space.strategy_names(v)), len(kinds)) for v in range(len(sizes))]
    choices: dict[Choice, None] = {}
    if np.prod([len(names) for names in kinds], dtype=float) <= _MAX_COMBINATIONS:
        for strategies in itertools.product(*(range(len(names)) for names in kinds)):
            choices[tuple(strategies[kind] for kind in kind_of)] = None
    for first, second in itertools.combinations_with_replacement(range(len(sizes)), 2):
        for s, t in itertools.product(range(sizes[first]), range(sizes[second])):
            choice = list(exact)
            choice[first], choice[second] = s, t
            choices[tuple(choice)] = None
            if len(choices) >= 2 * _MAX_COMBINATIONS:
                return list(choices)
    return list(choices)


def _layers(costs: np.ndarray) -> np.ndarray:
    """Returns the layer `[n]` of points `[n, 2]`: 0 where no other beats it in both, 1 where none of the rest does."""
    points, index = np.unique(costs, axis=0, return_inverse=True)
    least_second: list[float] = []  # second coordinate so far in each layer: it rises from layer to layer
    layer = np.zeros(len(points), int)
    for i, second in enumerate(points[:, 1].tolist()):
        layer[i] = bisect_right(least_second, second)
        least_second[layer[i] : layer[i] + 1] = [second]
    return layer[index.ravel()]


def _terms(
    over_exact: Sequence[np.ndarray], names: Sequence[tuple[str, ...]], measurements: Sequence[Measurement]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the least squares' matrix `[measurements, factors]`, and for each node its strategies' columns `[S_v]`.

    The first V factors are the nodes', the others those of strategies of nodes that choose from the same names.
    """
    strategies = dict.fromkeys((row, name) for row in names for name in row)
    column_of = {strategy: len(over_exact) + i for i, strategy in enumerate(strategies)}
    columns = [np.array([column_of[row, name] for name in row], np.int64) for row in names]
    terms = np.zeros((len(measurements), len(over_exact) + len(column_of)))
    for row, measurement in zip(terms, measurements, strict=True):
        for v, s in enumerate(measurement.choice):
            row[v] += over_exact[v][s]
            row[columns[v][s]] += over_exact[v][s]
    return terms, columns
