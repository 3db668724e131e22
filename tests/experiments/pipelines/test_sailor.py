"""Predictions of measured plans: a plan worked by hand, and the published table where its data are."""

import numpy as np
import pytest

from experiments.pipelines import sailor
from tests.experiments.printed_tables import printed_rows

SEND_S = sailor.RESULT_BYTES / 22.9e9
PROFILES = {"GH-96": {"1": {"4": {str(layer): [1.0, 2.0, 0.25] for layer in range(26)}}, "2": {"4": {}}}}
PROFILES["GH-96"]["2"]["4"] = {str(layer): [3.0, 1.5, 0.25] for layer in range(26)}


def plan(layers, num_replicas, num_microbatches):
    devices = [[("GH-96", 4)] * num_replicas for _ in layers]
    return sailor.Plan("clariden/test", "clariden", 2, num_microbatches, 1, layers, devices, 1.0)


def test_one_stage_computes_then_reduces_then_updates():
    """Forward takes 1 s with one sample, backward 1.5 s, as two samples do; a ring sends 3/4 of the bytes twice."""
    reduction_s = 2 * (3 / 4) * 4 * 2 * 12_596_224 / (4 * 22.9e9)
    seconds = sailor.predicted_s(plan([[1, 2]], 4, 3), PROFILES, sailor.ASYNCHRONOUS)
    assert seconds == pytest.approx(3 * 2 * 2.5 + 2 * 0.25 + reduction_s)


@pytest.mark.parametrize(
    ("waiting", "cycle_s"), [("neither", 2.5 * 2), ("receiver", 2.5 * 2 + SEND_S), ("both", 2.5 * 2 + 2 * SEND_S)]
)
def test_each_microbatch_takes_the_transfers_for_which_a_stage_waits(waiting, cycle_s):
    """Two equal stages: more micro-batches take the time of a stage and of what it waits for."""
    steps = [sailor.predicted_s(plan([[1, 2], [3, 4]], 1, m), PROFILES, (waiting, True)) for m in (20, 30)]
    assert steps[1] - steps[0] == pytest.approx(10 * cycle_s, rel=1e-3)


def test_whole_tensors_take_as_long_as_the_parts_of_all_devices():
    whole, part = (sailor.predicted_s(plan([[1], [2]], 1, 1), PROFILES, ("both", whole)) for whole in (True, False))
    assert whole - part == pytest.approx((1 - 1 / 4) * 4 * SEND_S, rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [([1, 2, 3], [10, 20, 30], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 3], [1, 3, 2], 1 / 3)],
)
def test_the_agreement_of_two_orders(first, second, tau):
    assert sailor.kendall_tau(first, second) == pytest.approx(tau)


def test_without_data_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sailor, "SAILOR", tmp_path / "none")
    sailor.main([])
    assert "Skipped: there is no" in capsys.readouterr().out


@pytest.mark.skipif(not sailor.SAILOR.exists(), reason="the measured plans are not here")
def test_held_out_plans_are_predicted(capsys):
    sailor.main([])
    rows = [row for row in printed_rows(capsys.readouterr().out) if len(row) == 9]
    assert len(rows) == 24
    errors = [abs(float(row[6].strip("%+"))) for row in rows if row[8] == "held out"]
    assert len(errors) == 11
    assert np.mean(errors) < 5
