"""Predictions corrected by measurements."""

import numpy as np
import pytest

from diffshard.bilevel_search.base import LossPrediction
from diffshard.bilevel_search.plans.base import Measurement
from diffshard.bilevel_search.refinement import calibrated

SLOPES = [np.array([0.0, 1e-3, 4e-3]), np.array([0.0, 2e-3]), np.array([0.0, 1e-3])]
PREDICTION = LossPrediction(0.0, SLOPES)
EXACT = (0, 0, 0)
NAMES = [["exact", f"a{v}", f"b{v}"][: len(row)] for v, row in enumerate(SLOPES)]


def test_one_factor_for_all_is_found_from_one_measurement():
    """With several nodes in it, it says nothing of any one of them."""
    found = calibrated(PREDICTION, NAMES, EXACT, [Measurement((2, 1, 1), 7 * 7e-3)], noise=1e-5)
    for row, slopes in zip(found.slopes, SLOPES, strict=True):
        np.testing.assert_allclose(row, 7 * slopes, rtol=1e-3)


def test_nodes_that_measurements_tell_apart_get_their_own():
    increases = {(2, 0, 0): 8e-3, (0, 1, 0): 40e-3, (2, 1, 0): 48e-3, (1, 0, 0): 2e-3}
    measured = [Measurement(*found) for found in increases.items()] * 20
    found = calibrated(PREDICTION, NAMES, EXACT, measured, noise=1e-5)
    np.testing.assert_allclose(found.slopes[0], 2 * SLOPES[0], rtol=0.2)
    np.testing.assert_allclose(found.slopes[1], 20 * SLOPES[1], rtol=0.2)
    assert 2 < found.slopes[2][1] / SLOPES[2][1] < 20  # which nobody measured: what the others share


def test_names_that_measurements_tell_apart_get_their_own_at_every_node():
    """One strategy is 10 times as bad as predicted and the other as predicted, at eight nodes."""
    slopes, names = [np.array([0.0, 1e-3, 1e-3])] * 8, [["exact", "early", "late"]] * 8
    measured = [Measurement((1,) * n + (2,) * (8 - n), 1e-3 * (10 * n + (8 - n))) for n in range(9)]
    found = calibrated(LossPrediction(0.0, slopes), names, (0,) * 8, measured * 20, noise=1e-5)
    for row in found.slopes:
        assert row[1] / row[2] > 5
        np.testing.assert_allclose(row[1], 10e-3, rtol=0.25)


def test_noise_is_not_believed():
    """What raises the loss by less than the noise leaves factors where the clear measurement puts them."""
    measured = [Measurement((2, 1, 1), 5 * 7e-3), Measurement((1, 0, 0), -1e-3), Measurement((0, 0, 1), 1e-3)]
    found = calibrated(PREDICTION, NAMES, EXACT, measured, noise=0.1)
    for row, slopes in zip(found.slopes, SLOPES, strict=True):
        np.testing.assert_allclose(row, 5 * slopes, rtol=0.5)
        assert (row >= 0).all()


def test_the_beginning_of_a_training_is_extrapolated_and_believed_less():
    beginning = Measurement((2, 1, 1), 7e-3, 0.25)
    found = calibrated(PREDICTION, NAMES, EXACT, [beginning], noise=1e-5)
    assert found.increase((2, 1, 1)) == pytest.approx(4 * 7e-3, rel=1e-3)
    found = calibrated(PREDICTION, NAMES, EXACT, [beginning, Measurement((2, 1, 1), 2 * 7e-3)], noise=1e-5)
    assert found.increase((2, 1, 1)) == pytest.approx(2 * 7e-3, rel=0.1)


def test_that_nothing_raised_the_loss_is_no_reason_to_believe_that_nothing_can():
    assert calibrated(PREDICTION, NAMES, EXACT, [Measurement((1, 1, 1), -1e-3)], noise=1e-3) is PREDICTION


def test_the_exact_choice_adds_nothing_wherever_it_is_and_what_diverged_is_left_out():
    shifted = LossPrediction(3.0, [np.array([2e-3, 1e-3]), np.array([-1.0, 1.0])])
    found = calibrated(
        shifted,
        [["a", "exact"], ["exact", "b"]],
        (1, 0),
        [Measurement((0, 0), 4e-3), Measurement((0, 1), np.inf)],
        noise=1e-5,
    )
    assert found.increase((1, 0)) == 0
    assert found.increase((0, 0)) == pytest.approx(4e-3, rel=1e-2)


def test_without_anything_measured_or_predicted_it_stays():
    assert calibrated(PREDICTION, NAMES, EXACT, [], noise=1.0) is PREDICTION
    assert calibrated(PREDICTION, NAMES, EXACT, [Measurement(EXACT, 0.0)], noise=1.0) is PREDICTION
    with pytest.raises(ValueError, match="`noise` must be positive"):
        calibrated(PREDICTION, NAMES, EXACT, [], noise=0.0)
