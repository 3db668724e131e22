"""A step with its end, and steps that overlap: numbers by hand, and a bound that links that are hidden reach."""

from dataclasses import replace

import numpy as np
import pytest

from cost.pipeline_steps import overlapped_lower_bound_s, overlapped_step_s, pipeline_step
from cost.pipeline_times import StageTimes

EQUAL = StageTimes([1] * 4, [2] * 4, [0] * 3, [0] * 3)


def test_steps_that_overlap_have_no_bubble():
    ends = [0.5, 0.25, 0.0, 0.5]
    flushed, overlapped = (pipeline_step(EQUAL, schedule, 8, ends) for schedule in ("1f1b", "2bw"))
    assert flushed.step_s == 33 + 0.5
    assert flushed.bubble == pytest.approx(1 - 24 / 33)
    assert overlapped.step_s == pytest.approx(24 + 0.5)
    assert overlapped.bubble == pytest.approx(1 - (4 * 24 + 1.25) / (4 * 24.5))
    assert overlapped.simulation.in_flight.tolist() == [4, 3, 2, 1]


def test_the_slowest_stage_decides_where_transfers_are_hidden():
    rng = np.random.default_rng(0)
    for _ in range(20):
        num_stages, count = rng.integers(1, 6), 8
        forward, ends = rng.uniform(0.5, 1.0, num_stages), rng.uniform(0, 2, num_stages)
        slowest = rng.integers(num_stages)
        forward[slowest], ends[slowest] = 2.0, 2.0
        times = StageTimes(forward, 2 * forward, np.zeros(num_stages - 1), np.zeros(num_stages - 1))
        bound = overlapped_lower_bound_s(times, count, ends)
        assert bound == pytest.approx(count * 6.0 + 2.0)
        assert overlapped_step_s(times, count, ends) == pytest.approx(bound, rel=1e-9)


def test_a_slow_link_or_few_micro_batches_in_flight_decide_otherwise():
    slow = replace(EQUAL, send_forward_s=[0, 9, 0])
    assert overlapped_lower_bound_s(slow, 8, [0] * 4) == 72
    # Stage 1 keeps 3 micro-batches; one comes back after 3 stages of 3 s and the link: 18 s for 3 of them.
    assert overlapped_step_s(slow, 24, [0] * 4) == pytest.approx(24 * 9)
    # Stage 0 keeps both of 2 micro-batches. They come back after 12 and 15 s, and then the next ones begin.
    assert overlapped_step_s(EQUAL, 2, [0] * 4, "none") == pytest.approx(15)
    assert overlapped_step_s(EQUAL, 2, [0] * 4) > 15
    assert pipeline_step(EQUAL, "2bw", 2, [0] * 4).step_s == pytest.approx(15)


def test_no_step_takes_less_than_the_bound():
    rng = np.random.default_rng(1)
    for _ in range(20):
        num_stages, count = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        times = StageTimes(*(rng.uniform(0, 1, num_stages - i) for i in (0, 0, 1, 1)))
        ends = rng.uniform(0, 1, num_stages)
        overlapped = pipeline_step(times, "2bw", count, ends).step_s
        assert overlapped_lower_bound_s(times, count, ends) <= overlapped * (1 + 1e-9)
        assert overlapped <= pipeline_step(times, "1f1b", count, ends).step_s * (1 + 1e-9)


def test_ends_that_are_no_seconds_are_refused():
    with pytest.raises(ValueError, match="`end_s` must be seconds, 0 or more and finite, for each of 4 stages"):
        pipeline_step(EQUAL, "2bw", 8, [0, 0, -1, 0])
    with pytest.raises(ValueError, match="`num_microbatches` must be a whole number"):
        overlapped_step_s(EQUAL, 0, [0] * 4)
