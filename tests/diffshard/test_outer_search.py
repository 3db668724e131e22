"""The outer search finds what solving every candidate would find, with a bound on all, and leaves out what it can."""

import math

import numpy as np
import pytest

from diffshard.base import Deadline, InfeasibleError
from diffshard.outer_search import Candidate, CutOffError, Outcome, OuterSearch


def forever() -> Deadline:
    return Deadline.from_now(None)


def candidate(name, cost, bound_before=-math.inf, bound_after=-math.inf, status="finished", asked=None):
    """One whose solver finds a cost, or is cut off where its bound reaches the limit."""

    def solve(deadline: Deadline, cut_off: float) -> Outcome[str]:
        del deadline
        if asked is not None:
            asked.append(name)
        if cost is None:
            raise InfeasibleError("Nothing fits.", is_proven=bound_after == math.inf)
        if bound_after >= cut_off:
            raise CutOffError(bound_after)
        return Outcome(name, cost, bound_after, status)

    return Candidate(name, bound_before, solve)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_candidates_is_found_and_nothing_is_below_the_bound(seed):
    rng = np.random.default_rng(seed)
    optima = rng.uniform(1, 2, 6)  # what each candidate allows at best
    costs = optima * rng.uniform(1, 1.2, 6)  # what its solver finds
    before, after = optima * rng.uniform(0.5, 1, 6), optima * rng.uniform(0.8, 1, 6)
    search = OuterSearch[str](forever())
    search.run([candidate(str(i), *of_one) for i, of_one in enumerate(zip(costs, before, after, strict=True))])
    assert search.best is not None
    assert search.best.cost == costs.min()
    assert search.lower_bound <= optima.min()
    for tried, optimum, cost in zip(search.tried, optima, costs, strict=True):
        assert tried.lower_bound <= optimum
        assert tried.cost == (None if tried.status == "cut off" else cost)
        assert tried.status != "cut off" or tried.lower_bound >= search.best.cost


def test_what_is_known_to_be_worse_is_not_solved():
    asked: list[str] = []
    search = OuterSearch[str](forever(), least_gain=0.1)
    search.run([candidate("a", 10.0, asked=asked), candidate("b", 8.0, 9.1, asked=asked), candidate("c", 8.5, 8.0)])
    assert asked == ["a"]
    assert [tried.status for tried in search.tried] == ["finished", "cut off", "finished"]
    assert search.best is not None
    assert search.best.result == "c"


def test_candidates_without_a_result_keep_the_bound_unless_it_is_proven_that_they_allow_nothing():
    search = OuterSearch[str](forever())
    search.run([candidate("a", None, 1.0), candidate("b", None, 2.0, math.inf)])
    assert search.best is None
    assert [(tried.status, tried.lower_bound) for tried in search.tried] == [("no plan", 1.0), ("infeasible", math.inf)]
    search.run([candidate("c", 5.0, 3.0, 4.0)])
    assert search.lower_bound == 1.0
    assert len(search.errors) == 2


def test_candidates_made_one_by_one_see_what_became_of_those_before():
    search = OuterSearch[str](forever())

    def bisection():
        low, high = 0, 64
        while high - low > 1:
            middle = (low + high) // 2
            yield candidate(middle, float(abs(middle - 37)))
            assert search.tried[-1].name == middle
            low, high = (middle, high) if middle <= 37 else (low, middle)

    search.run(bisection())
    assert search.best is not None
    assert search.best.result == 37


def test_after_the_time_or_an_interruption_the_rest_is_not_tried_but_a_first_result_is_waited_for():
    late = OuterSearch[str](Deadline(1e-9, 0.0))
    late.run([candidate("a", None), candidate("b", 2.0), candidate("c", 1.0, 0.5)])
    assert [tried.status for tried in late.tried] == ["no plan", "finished", "not tried"]
    assert late.best is not None
    assert late.best.cost == 2.0
    interrupted = OuterSearch[str](forever())
    interrupted.run([candidate("a", 2.0, status="interrupted"), candidate("b", 1.0, 0.5)])
    assert [tried.status for tried in interrupted.tried] == ["interrupted", "not tried"]
    assert interrupted.lower_bound == -math.inf


def test_a_sequence_shares_the_time_in_equal_parts():
    parts: list[float] = []

    def solve(deadline: Deadline, cut_off: float) -> Outcome[int]:
        del cut_off
        assert deadline.limit_s is not None
        parts.append(deadline.limit_s)
        return Outcome(0, 1.0)

    OuterSearch[int](Deadline.from_now(12.0)).run([Candidate(i, 0.0, solve) for i in range(3)])
    assert parts == pytest.approx([4.0, 6.0, 12.0], abs=0.5)
