"""Found plans against experts' by their compiled programs' timelines."""

import json
from pathlib import Path

import pytest

from experiments import timeline


def test_main_times_found_and_expert_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output, traces = tmp_path / "rows.json", tmp_path / "traces"
    arguments = ["--meshes", "2x4", "--batch", "4", "--sizes", "small", "--target", "host", "--time-limit", "1"]
    # FSDP would split 4 sequences over 8 devices.
    chosen = ["--experts", "fsdp", "megatron", "-o", str(output), "--traces", str(traces)]
    assert timeline.main([*arguments, *chosen]) == 0
    rows = json.loads(output.read_text())
    assert [row["plan"] for row in rows] == ["found", "megatron"]
    for row in rows:
        # The CPU backend runs every collective on the compute stream.
        assert row["timeline_s"] == pytest.approx(row["busy_s"]["compute"] + sum(row["waited_s"].values()))
        assert min(row["predicted_s"], *row["sent_bytes"], *row["peak_bytes"]) > 0
    found, by_hand = (row["timeline_s"] for row in rows)
    printed = capsys.readouterr().out
    assert "2x4 fsdp is left out" in printed
    assert f"2x4: found / best expert {found / by_hand:.2f}" in printed
    assert {path.stem for path in traces.iterdir()} == {"2x4 found", "2x4 megatron"}


def test_the_ranking_of_plans():
    plans = [_timed("found", 1.0, 4.0), _timed("fsdp", 2.0, 5.0), _timed("megatron", 3.0, 2.0)]
    # Of three pairs one is in the order of the prediction.
    assert timeline.ranking(plans) == pytest.approx((1 - 2) / 3)
    assert timeline.over_best_expert(plans) == 2.0


def _timed(name: str, predicted_s: float, step_s: float) -> timeline.TimedPlan:
    played = timeline.Timeline(step_s, {}, {}, ())
    verification = timeline.Verification((), (), None, 0)
    return timeline.TimedPlan("2x4", name, predicted_s, verification, played, 0.0, 0.0)
