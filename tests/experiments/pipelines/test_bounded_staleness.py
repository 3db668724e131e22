"""Bounded staleness hides an exchange and absorbs noise, and does not balance unequal replicas."""

import pytest

from experiments.pipelines import bounded_staleness
from experiments.pipelines.bounded_staleness import COUNT, Replicas, best_wave_s, wave_s

UNEQUAL = Replicas("", (1.0, 3.0), 4.0, 2.0)


def test_waves_in_step_pay_for_the_exchange_and_later_ones_hide_it():
    assert wave_s(UNEQUAL, (24, 8), 0, 0.0) == pytest.approx(24 + 4 + 2, rel=0.01)
    assert wave_s(UNEQUAL, (24, 8), 1, 0.0) == pytest.approx(24, rel=0.02)


def test_unequal_replicas_with_equal_waves_are_as_slow_as_the_slowest_whatever_the_staleness():
    assert wave_s(UNEQUAL, (16, 16), 4, 0.0) == pytest.approx(16 * 3, rel=0.02)
    assert best_wave_s(UNEQUAL, 4, 0.0)[1] == 8
    assert best_wave_s(UNEQUAL, 4, 0.0)[0] == pytest.approx(COUNT / (1 / 1 + 1 / 3), rel=0.02)


def test_more_staleness_is_never_slower_and_a_table_is_printed(capsys):
    seconds = [best_wave_s(UNEQUAL, d, 0.3)[0] for d in (0, 1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True)
    bounded_staleness.main(["--spreads", "0"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == len(bounded_staleness.SETTINGS)
