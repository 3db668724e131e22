"""Which candidates are tried."""

import numpy as np
import pytest

from diffshard.bilevel_search.base import LossPrediction
from diffshard.bilevel_search.candidates import _layers, propose
from diffshard.bilevel_search.plans.base import Candidate
from tests.diffshard.bilevel_search.perturbed import Perturbed

ERRORS, SECONDS = [[0.0, 0.3, 0.7], [0.0, 0.5]], [[2.0, 1.5, 1.0], [3.0, 1.0]]


def _prediction(space: Perturbed) -> LossPrediction:
    return LossPrediction(0.0, [0.5 * errors**2 for errors in space.errors])


def test_the_proposal_uniform_choices_schedules_and_choices_by_type_are_tried_once():
    space = Perturbed(ERRORS, SECONDS)
    found = propose(space, (1, 1), _prediction(space), max_candidates=24)
    names = [c.name for c in found]
    # All rough is what was found. None of the choices by type beats another: each costs less and loses more.
    assert names[:2] == ["proposal", "proposal, second half"]
    assert sorted(names[2:5]) == ["0: rough", "0: rougher, 1: rough", "1: rough"]
    assert names[5:] == ["all rougher"]
    assert len({(c.choice, c.exact_share) for c in found}) == len(found)
    assert {c.choice for c in found if not c.exact_share} == {
        (s, t) for s in range(3) for t in range(2) if (s, t) != (0, 0)
    }
    assert Candidate("all rougher", (2, 0)) in found  # node 1 has no strategy of that name and stays exact
    assert Candidate("proposal, second half", (1, 1), 0.5) in found
    without = propose(space, (1, 1), _prediction(space), max_candidates=3)
    assert without == [*found[:3], Candidate("cheapest", (2, 1))]


def test_uniform_choices_take_names_that_begin_alike_and_kinds_of_nodes_are_combined():
    """int4 gradients have feedback under a longer name; thirteen nodes are too many for all combinations."""

    class Named(Perturbed):
        def strategy_names(self, node: int) -> tuple[str, ...]:
            return ("exact", "int8", "int4" if node < 7 else "int4 with error feedback")

    space = Named([[0.0, 0.1, 0.2]] * 13, [[3.0, 2.0, 1.0]] * 13)
    found = {
        c.name: c.choice
        for c in propose(space, (0,) * 13, _prediction(space), max_candidates=10_000)
        if not c.exact_share
    }
    assert found["all int4"] == (2,) * 13
    assert found["all int8"] == (1,) * 13
    assert found["all int4 with error feedback"] == (0,) * 7 + (2,) * 6
    assert (1,) * 7 + (2,) * 6 in found.values()
    assert found["7x int8, 6x int4 with error feedback"] == (1,) * 7 + (2,) * 6


def test_what_another_is_predicted_to_beat_goes_last():
    """Node 0's second strategy costs more than the third and loses more; a second node of two leaves two by type."""
    space = Perturbed([[0.0, 0.9, 0.3], [0.0, 0.5]], [[2.0, 1.5, 1.0], [3.0, 1.0]])
    found = propose(space, (2, 1), _prediction(space), max_candidates=24)
    names = [candidate.name for candidate in found]
    assert names[:3] == ["proposal", "all rough", "proposal, second half"]
    assert names[3:] == ["1: rough", "all rougher", "all rough, second half", "0: rough"]


@pytest.mark.parametrize("most", [3, 1000])
def test_layers_are_what_is_beaten_by_no_other_of_the_rest(most: int):
    """Points that are equal, in one coordinate or in both, and infinite ones."""
    at = np.random.default_rng(0).integers(most, size=(60, 2)).astype(float)
    at[:2, 1] = np.inf
    remaining, expected, depth = set(range(60)), np.full(60, -1), 0
    while remaining:
        unbeaten = {
            i for i in remaining if not any((at[j] <= at[i]).all() and (at[j] < at[i]).any() for j in remaining)
        }
        expected[list(unbeaten)], remaining, depth = depth, remaining - unbeaten, depth + 1
    np.testing.assert_array_equal(_layers(at), expected)
    assert depth > 2


def test_too_many_combinations_become_changes_of_one_or_two_nodes():
    space = Perturbed([[0.0, 0.1]] * 14, [[2.0, 1.0]] * 14)
    found = propose(space, (0,) * 14, _prediction(space), max_candidates=1000)
    assert sum(not c.exact_share for c in found) == 1 + 14 + 14 * 13 // 2


def test_candidates_keep_the_problems_own_limits():
    """Node 0's cheapest takes 50 of 40 bytes, and node 1's second strategy is forbidden."""
    fields = {
        "usage_node": np.array([0]),
        "usage": [np.array([5.0, 20.0, 50.0])],
        "usage_interval": np.array([[0, 1]]),
        "memory_limit": 40.0,
    }
    space = Perturbed(ERRORS, [[2.0, 1.5, 1.0], [3.0, np.inf]], **fields)
    found = propose(space, (1, 0), _prediction(space), max_candidates=24)
    assert {candidate.choice for candidate in found} == {(1, 0)}
