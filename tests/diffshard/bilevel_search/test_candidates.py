"""Which candidates are tried, and how measurements correct the predictions that refinements follow from."""

import numpy as np
import pytest

from diffshard.bilevel_search.base import LossPrediction
from diffshard.bilevel_search.candidates import _layers, calibrated_prediction, propose
from diffshard.bilevel_search.plans.base import Candidate, Measurement
from tests.diffshard.bilevel_search.perturbed import ERRORS, SECONDS, Perturbed

SLOPES = [np.array([0.0, 1e-3, 4e-3]), np.array([0.0, 2e-3]), np.array([0.0, 1e-3])]
PREDICTION = LossPrediction(0.0, SLOPES)
EXACT = (0, 0, 0)
NAMES = [["exact", f"a{v}", f"b{v}"][: len(row)] for v, row in enumerate(SLOPES)]


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


def test_one_factor_for_all_is_found_from_one_measurement():
    """With several nodes in it, it says nothing of any one of them."""
    found = calibrated_prediction(PREDICTION, NAMES, EXACT, [Measurement((2, 1, 1), 7 * 7e-3)], noise=1e-5)
    for row, slopes in zip(found.slopes, SLOPES, strict=True):
        np.testing.assert_allclose(row, 7 * slopes, rtol=1e-3)


def test_nodes_that_measurements_tell_apart_get_their_own():
    increases = {(2, 0, 0): 8e-3, (0, 1, 0): 40e-3, (2, 1, 0): 48e-3, (1, 0, 0): 2e-3}
    measured = [Measurement(*found) for found in increases.items()] * 20
    found = calibrated_prediction(PREDICTION, NAMES, EXACT, measured, noise=1e-5)
    np.testing.assert_allclose(found.slopes[0], 2 * SLOPES[0], rtol=0.2)
    np.testing.assert_allclose(found.slopes[1], 20 * SLOPES[1], rtol=0.2)
    assert 2 < found.slopes[2][1] / SLOPES[2][1] < 20  # which nobody measured: what the others share


def test_names_that_measurements_tell_apart_get_their_own_at_every_node():
    """One strategy is 10 times as bad as predicted and the other as predicted, at eight nodes."""
    slopes, names = [np.array([0.0, 1e-3, 1e-3])] * 8, [["exact", "early", "late"]] * 8
    measured = [Measurement((1,) * n + (2,) * (8 - n), 1e-3 * (10 * n + (8 - n))) for n in range(9)]
    found = calibrated_prediction(LossPrediction(0.0, slopes), names, (0,) * 8, measured * 20, noise=1e-5)
    for row in found.slopes:
        assert row[1] / row[2] > 5
        np.testing.assert_allclose(row[1], 10e-3, rtol=0.25)


def test_noise_is_not_believed():
    """What raises the loss by less than the noise leaves factors where the clear measurement puts them."""
    measured = [Measurement((2, 1, 1), 5 * 7e-3), Measurement((1, 0, 0), -1e-3), Measurement((0, 0, 1), 1e-3)]
    found = calibrated_prediction(PREDICTION, NAMES, EXACT, measured, noise=0.1)
    for row, slopes in zip(found.slopes, SLOPES, strict=True):
        np.testing.assert_allclose(row, 5 * slopes, rtol=0.5)
        assert (row >= 0).all()


def test_the_beginning_of_a_training_is_extrapolated_and_believed_less():
    beginning = Measurement((2, 1, 1), 7e-3, 0.25)
    found = calibrated_prediction(PREDICTION, NAMES, EXACT, [beginning], noise=1e-5)
    assert found.increase((2, 1, 1)) == pytest.approx(4 * 7e-3, rel=1e-3)
    found = calibrated_prediction(PREDICTION, NAMES, EXACT, [beginning, Measurement((2, 1, 1), 2 * 7e-3)], noise=1e-5)
    assert found.increase((2, 1, 1)) == pytest.approx(2 * 7e-3, rel=0.1)


def test_that_nothing_raised_the_loss_is_no_reason_to_believe_that_nothing_can():
    assert calibrated_prediction(PREDICTION, NAMES, EXACT, [Measurement((1, 1, 1), -1e-3)], noise=1e-3) is PREDICTION


def test_the_exact_choice_adds_nothing_wherever_it_is_and_what_diverged_is_left_out():
    shifted = LossPrediction(3.0, [np.array([2e-3, 1e-3]), np.array([-1.0, 1.0])])
    found = calibrated_prediction(
        shifted,
        [["a", "exact"], ["exact", "b"]],
        (1, 0),
        [Measurement((0, 0), 4e-3), Measurement((0, 1), np.inf)],
        noise=1e-5,
    )
    assert found.increase((1, 0)) == 0
    assert found.increase((0, 0)) == pytest.approx(4e-3, rel=1e-2)


def test_without_anything_measured_or_predicted_it_stays():
    assert calibrated_prediction(PREDICTION, NAMES, EXACT, [], noise=1.0) is PREDICTION
    assert calibrated_prediction(PREDICTION, NAMES, EXACT, [Measurement(EXACT, 0.0)], noise=1.0) is PREDICTION
    with pytest.raises(ValueError, match="`noise` must be positive"):
        calibrated_prediction(PREDICTION, NAMES, EXACT, [], noise=0.0)
