"""What a step waits for exchanges."""

import pytest

from diffshard.checks.timeline import Timeline
from experiments.exchange_waits import EXCHANGES, waits_s


def test_waits_are_those_for_exchanges_on_all_axes():
    waited_s = {("all_to_all", "data"): 2.0, ("collective_permute", "model"): 0.5, ("all_gather", "data"): 4.0}
    timeline = Timeline(10.0, {}, {**waited_s, ("all_to_all", "model"): 1.0}, ())
    assert waits_s(timeline, EXCHANGES) == pytest.approx(3.5)
