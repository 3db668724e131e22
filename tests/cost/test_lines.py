"""Minima of lines by hand and against plain minima."""

import numpy as np
import pytest

from cost.lines import FREE, Line, added_lines, fastest_lines, fit_latency_and_slope, fit_lines, least_s

SIZES = np.concatenate([[0.0], np.geomspace(1e-3, 1e9, 200)])


def test_least_by_hand():
    lines = (Line(1.0, 4.0), Line(7.0, 1.0))  # equally fast at 2 bytes
    np.testing.assert_array_equal(least_s(lines, [0.0, 1.0, 2.0, 3.0]), [1.0, 5.0, 9.0, 10.0])
    # A quarter of a group of 12 bytes pays a quarter of what the group takes.
    assert least_s(lines, 3.0, 0.25) == 0.25 * least_s(lines, 12.0) == 0.25 * 19


def test_only_lines_that_are_fastest_somewhere_are_returned_in_order():
    first, last = Line(1.0, 4.0), Line(7.0, 1.0)
    above, dominated, same = Line(4.0, 3.9), Line(8.0, 1.0), Line(1.0, 4.0)
    assert fastest_lines([last, above, dominated, first, same]) == (first, last)
    middle = Line(2.0, 3.0)
    assert fastest_lines([last, middle, first]) == (first, middle, last)
    assert fastest_lines([Line(0.0, 0.0), first]) == FREE


@pytest.mark.parametrize("seed", range(20))
def test_fastest_lines_and_sums_have_the_least_seconds_of_all(seed):
    rng = np.random.default_rng(seed)
    first, second = ([Line(*10 ** rng.uniform(-3, 3, 2)) for _ in range(n)] for n in (6, 4))
    np.testing.assert_allclose(least_s(fastest_lines(first), SIZES), least_s(first, SIZES), rtol=1e-12)
    both = added_lines(fastest_lines(first), fastest_lines(second))
    np.testing.assert_allclose(least_s(both, SIZES), least_s(first, SIZES) + least_s(second, SIZES), rtol=1e-12)
    # A minimum of two has a corner more for each corner of the two, so no line is there in vain.
    assert len(both) <= len(fastest_lines(first)) + len(fastest_lines(second)) - 1


def test_adding_what_is_free_changes_nothing():
    lines = (Line(1.0, 4.0), Line(7.0, 1.0))
    assert added_lines(FREE, lines) == added_lines(lines, FREE) == lines


def test_fit_finds_latency_and_slope_from_exact_points():
    x = 4.0 ** np.arange(3, 14)
    np.testing.assert_allclose(fit_latency_and_slope(x, 2e-5 + 3e-9 * x), (2e-5, 3e-9), rtol=1e-6)


def test_fit_is_by_relative_error_so_small_messages_count_and_outliers_do_not():
    rng = np.random.default_rng(0)
    x = 4.0 ** np.arange(3, 14)
    seconds = (2e-5 + 3e-9 * x) * rng.uniform(0.97, 1.03, x.size)
    seconds[4] *= 10
    latency_s, slope = fit_latency_and_slope(x, seconds)
    assert latency_s == pytest.approx(2e-5, rel=0.05)
    assert slope == pytest.approx(3e-9, rel=0.05)
    plain_latency = np.polyfit(x, seconds, 1)[1]
    assert abs(plain_latency / 2e-5 - 1) > 0.2  # what least squares makes of the same points


def test_fit_is_never_negative():
    x = np.array([1.0, 2.0, 4.0])
    assert fit_latency_and_slope(x, np.array([4.0, 2.0, 1.0]))[1] == 0
    latency_s, slope = fit_latency_and_slope(x, np.array([1.0, 4.0, 16.0]))
    assert latency_s == 0
    assert slope > 0


def test_fit_finds_as_many_lines_as_there_are():
    x = 2.0 ** np.arange(6, 30)
    lines = (Line(7e-5, 1e-9), Line(1e-4, 2e-10), Line(3e-4, 4e-11))
    np.testing.assert_allclose(fit_lines(x, least_s(lines, x)), lines, rtol=1e-3)
    np.testing.assert_allclose(fit_lines(x, least_s(lines[:2], x)), lines[:2], rtol=1e-3)
    np.testing.assert_allclose(fit_lines(x, least_s(lines[:1], x)), lines[:1], rtol=1e-3)
    assert len(fit_lines(x, least_s(lines, x), most=2)) == 2


def test_fit_of_noise_stays_one_line_and_few_sizes_have_no_more_than_one():
    x = np.repeat(2.0 ** np.arange(6, 30), 2)
    noise = np.random.default_rng(0).uniform(0.95, 1.05, x.size)
    assert len(fit_lines(x, (1e-4 + 1e-10 * x) * noise)) == 1
    assert len(fit_lines(x[:10], least_s((Line(1e-4, 1e-6), Line(2e-4, 0.0)), x[:10]))) == 1


def test_the_last_of_several_lines_is_never_flat_where_larger_messages_follow_it():
    x = 2.0 ** np.arange(6, 26)
    seconds = least_s((Line(1e-5, 1e-9),), x)
    seconds[-3:] = seconds[-3]  # three outliers, by which larger messages would be free
    assert fit_lines(x, seconds)[-1].s_per_byte * x[-1] > 0.5 * seconds[-1]
    flat = np.full(x.shape, 1e-4)  # one line may be flat: these messages are too small to tell
    np.testing.assert_allclose(fit_lines(x, flat), [(1e-4, 0.0)], atol=1e-15)


@pytest.mark.parametrize(("x", "t"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([[1.0]], [[1.0]])])
def test_points_without_a_time_are_named(x, t):
    with pytest.raises(ValueError, match="`sent_bytes` and `seconds` must be equally long lists"):
        fit_lines(np.array(x), np.array(t))
