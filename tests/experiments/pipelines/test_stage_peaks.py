"""Predicted peaks of stages stand beside those that XLA plans, here for the host's own devices."""

import jax
import pytest

from experiments.models import mlp
from experiments.pipelines import stage_peaks
from tests.experiments.printed_tables import printed_rows


@pytest.fixture(scope="module")
def peaks():
    model = mlp.make(layers=6, width=64, batch=4096)
    return stage_peaks.measure("mlp", model, 2, "1f1b", jax.devices()[:8])


def test_predictions_are_near_what_xla_plans(peaks):
    assert [peak.in_flight for peak in peaks] == [2, 1]
    assert [tuple(peak.mesh_axes.values()) for peak in peaks] == [(2, 2), (2, 2)]
    assert all(abs(peak.ratio - 1) <= 0.1 for peak in peaks)
    assert all(peak.compiled.peak_bytes > peak.compiled.step_bytes + peak.compiled.sum_bytes for peak in peaks)


def test_tables_have_a_row_for_each_stage_and_say_how_many_are_near(peaks, capsys):
    far = peaks[0]._replace(predicted_bytes=1.2 * peaks[0].compiled.peak_bytes)
    stage_peaks.print_tables([far, peaks[1]])
    rows = printed_rows(capsys.readouterr().out)
    assert [row[:3] for row in rows] == [["mlp", "2", "0"], ["mlp", "2", "1"], ["mlp", "2", "1"], ["all", "2", "1"]]
    assert rows[0][-2:] == ["1.20", far.compiled.peak.kind]
    assert rows[-1][-1] == "1.20"
