"""What a step waits for where its links are busier than its arithmetic, and the search for the fastest such step.

A space prices collectives that can run beside arithmetic at a share ρ of their time, whatever runs beside them. That is
too little once they take longer than all arithmetic: then the step waits at least for the difference. With C seconds of
arithmetic, A seconds of collectives that arithmetic waits for, and O seconds of those that can run beside it,

    T(x) = A + max(C + ρ·O, O),

a maximum of two sums of node and edge costs. For every weight λ from 0 to 1 the sum

    f_λ(x) = λ·(A + C + ρ·O) + (1 - λ)·(A + O) = A + λ·C + (λ·ρ + 1 - λ)·O

is a problem of the same form and at most T(x). So its lower bound is one on T, and its best choice is a candidate. The
largest min_x f_λ(x) over λ is the Lagrangian dual of the maximum; as a function of λ the minimum is concave, and each
choice that is found gives a line above it. The next λ is where the lowest lines meet (Kelley's cutting planes).

Source: J. E. Kelley, "The Cutting-Plane Method for Solving Convex Programs" (1960).
"""

from collections.abc import Callable, Sequence
from itertools import combinations

from cost.base import Problem
from diffshard.base import InfeasibleError, Solution
from search_spaces.sharding.explaining import StepPrediction, Transfer
from search_spaces.sharding.space import ShardingSpace

_MOST_WEIGHTS = 5
_LEAST_GAIN = 1e-3  # of the bound; a further weight that promises less is not tried


def waiting_transfers(prediction: StepPrediction) -> tuple[Transfer, ...]:
    """Returns the collectives of a prediction with the seconds that a step waits for them, the links' limit included.

    Of collectives that can run beside arithmetic, with O seconds on their links and w seconds of waiting in the
    prediction, a step with C seconds of arithmetic waits max(w, O - C) seconds; each has its part of that.
    """
    has_time = _has_time(prediction)
    link_s = _total(prediction.transfers, has_time, "link_s")
    waited_s = _total(prediction.transfers, has_time, "seconds")
    least_s = link_s - float(prediction.compute_s.sum())
    if least_s <= waited_s:
        return prediction.transfers
    factor = least_s / link_s
    pairs = zip(prediction.transfers, has_time, strict=True)
    return tuple(t._replace(seconds=factor * t.link_s) if is_timely else t for t, is_timely in pairs)


def step_s(prediction: StepPrediction) -> float:
    """Returns the seconds of a step, the links' limit included."""
    return max(both_sums_s(prediction))


def is_bound_by_links(prediction: StepPrediction) -> bool:
    """Tells whether a step waits for its links longer than the prediction says."""
    priced_s, links_s = both_sums_s(prediction)
    return links_s > priced_s


def fastest_step(
    space: ShardingSpace,
    solve: Callable[[Problem], Solution],
    is_over: Callable[[], bool] = lambda: False,
    tell: Callable[[float, float], None] = lambda cost_s, bound_s: None,
) -> Solution:
    """Returns the choice with the fastest step among the best for several weights of the two sums.

    Its cost and lower bound are those of the step's seconds and the preference together.

    Args:
      space: its problem is solved first; only if links are busier than arithmetic there, others follow.
      solve: solves a problem, and raises `InfeasibleError` where it finds nothing within the memory limit.
      is_over: tells whether there is no time for another problem.
      tell: is told the seconds of the best step so far, preference included, and their bound, after each problem where
        links are busier. Costs within a problem are less than those of its steps.

    Raises:
      InfeasibleError: as `solve` for the first problem.
    """
    best = solve(space.problem)
    prediction = space.predict(best.choice)
    if not is_bound_by_links(prediction):
        return best
    lines, bound, history, weight = [both_sums_s(prediction)], best.lower_bound, list(best.history), 1.0
    tell(_cost_s(prediction), bound)
    while len(lines) < _MOST_WEIGHTS and not is_over():
        weight, most_s = _next_weight(lines, weight)
        if most_s - bound < _LEAST_GAIN * most_s:
            break
        try:
            other = solve(weighted_problem(space, weight))
        except InfeasibleError:  # the first choice fits because the solver found it; this search found none
            break
        other_prediction = space.predict(other.choice)
        lines.append(both_sums_s(other_prediction))
        bound, history = max(bound, other.lower_bound), [*history, *other.history]
        if step_s(other_prediction) < step_s(prediction):
            best, prediction = other, other_prediction
        tell(_cost_s(prediction), bound)
    if len(lines) == 1:
        return best
    return best._replace(cost=_cost_s(prediction), lower_bound=bound, history=tuple(history), status="finished")


def _cost_s(prediction: StepPrediction) -> float:
    return step_s(prediction) + float(prediction.preference_s.sum())


def weighted_problem(space: ShardingSpace, weight: float) -> Problem:
    """Returns the problem of the weighted mean of both sums; the weight is that of the seconds as priced."""
    if weight == 1:
        return space.problem
    return space.priced(weight, weight * space.hardware.exposed_share + 1 - weight)


def _next_weight(lines: Sequence[tuple[float, float]], weight: float) -> tuple[float, float]:
    """Returns the weight at which the lowest of the lines is highest, and how high it is there.

    Where all lines fall towards 1 they do not meet: then the weight is half of the last one.
    """
    if all(links_s > priced_s for priced_s, links_s in lines):
        return weight / 2, min(_line_s(line, weight / 2) for line in lines)
    weights = [0.0, 1.0]
    for (one_s, one_link_s), (two_s, two_link_s) in combinations(lines, 2):
        slopes = (one_s - one_link_s) - (two_s - two_link_s)
        if slopes:
            weights.append(min(max((two_link_s - one_link_s) / slopes, 0.0), 1.0))
    return max(((w, min(_line_s(line, w) for line in lines)) for w in weights), key=lambda pair: pair[1])


def _line_s(line: tuple[float, float], weight: float) -> float:
    return weight * line[0] + (1 - weight) * line[1]


def both_sums_s(prediction: StepPrediction) -> tuple[float, float]:
    """Returns the two sums of which a step takes the larger: as priced, and with links that are always busy."""
    has_time = _has_time(prediction)
    waits = [not timely for timely in has_time]
    waited_s = _total(prediction.transfers, waits, "seconds")
    compute_s = float(prediction.compute_s.sum())
    priced_s = compute_s + waited_s + _total(prediction.transfers, has_time, "seconds")
    return priced_s, waited_s + _total(prediction.transfers, has_time, "link_s")


def _has_time(prediction: StepPrediction) -> list[bool]:
    return [transfer.seconds < transfer.link_s for transfer in prediction.transfers]


def _total(transfers: Sequence[Transfer], is_counted: Sequence[bool], field: str) -> float:
    return sum(getattr(t, field) for t, counts in zip(transfers, is_counted, strict=True) if counts)
