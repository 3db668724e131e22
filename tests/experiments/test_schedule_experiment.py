"""The experiment on schedules prints a row for each variant, and leaves the schedule as it was."""

import math

import pytest

from experiments import schedule
from search_spaces.sharding import scheduling


def test_main_prints_a_row_for_each_variant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(schedule, "VARIANTS", ((math.inf, 1), (0, 4)))
    usual = scheduling._LATENCIES_IN_WINDOW
    assert (
        schedule.main(["--mesh", "2x4", "--batch", "8", "--sizes", "small", "--target", "host", "--time-limit", "1"])
        == 0
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line and line[0] in ("no", "0")]
    assert [row[0] for row in rows] == ["no", "0"]
    assert usual == scheduling._LATENCIES_IN_WINDOW
