"""Found plans against baselines' by their compiled programs' timelines."""

import dataclasses
import math
from pathlib import Path

import pytest

from experiments import timeline, timeline_table
from experiments.timeline_table import (
    Row,
    append_row,
    best_baseline_s,
    cells,
    geometric_mean,
    near_waits,
    over_best_baseline,
    ranking,
    read_rows,
    summary,
)
from tests.experiments.printed_tables import printed_rows

ARGUMENTS = ["--meshes", "2x4", "--batch", "4", "--sizes", "small", "--target", "host", "--time-limit", "1"]


def test_main_times_found_and_baseline_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output, traces = tmp_path / "rows.jsonl", tmp_path / "traces"
    # FSDP would split 4 sequences over 8 devices.
    chosen = ["--models", "decoder", "--baselines", "fsdp", "megatron", "-o", str(output)]
    assert timeline.main([*ARGUMENTS, *chosen, "--traces", str(traces)]) == 0
    rows = read_rows(output)
    assert [(row.plan, row.executor) for row in rows] == [("found", "program"), ("megatron", "propagation")]
    for row in rows:
        # The CPU backend runs every collective on the compute stream.
        assert row.timeline_s == pytest.approx(row.busy_s["compute"] + sum(row.waited_s.values()))
        assert min(row.predicted_s, *row.sent_bytes, *row.peak_bytes) > 0
    found, by_hand = (row.timeline_s for row in rows)
    printed = capsys.readouterr().out
    assert "decoder 2x4 fsdp is left out" in printed
    assert f"decoder 2x4: found / best baseline {found / by_hand:.3f}" in printed
    assert {path.stem for path in traces.iterdir()} == {"decoder 2x4 found", "decoder 2x4 megatron"}


def test_main_keeps_the_rows_that_its_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "rows.jsonl"
    append_row(_row("found", 1.0, 1.5, model="vision transformer"), output)
    chosen = ["--models", "vision transformer", "--baselines", "megatron", "-o", str(output)]
    assert timeline.main([*ARGUMENTS, *chosen]) == 0
    kept, made = read_rows(output)
    assert kept == _row("found", 1.0, 1.5, model="vision transformer")
    assert (made.model, made.plan, made.batch) == ("vision transformer", "megatron", 4)
    assert f"vision transformer 2x4: found / best baseline {1.5 / made.timeline_s:.3f}" in capsys.readouterr().out


def test_main_wants_a_batch_for_a_mesh_without_a_published_one(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        timeline.main(["--models", "decoder", "--meshes", "2x2"])
    assert "`--batch` must be given for a mesh without a published one; got 2x2." in capsys.readouterr().err


def test_the_ranking_of_plans():
    rows = [_row("found", 1.0, 4.0), _row("fsdp", 2.0, 5.0), _row("megatron", 3.0, 2.0)]
    # Of three pairs one is in the order of the prediction.
    assert ranking(rows) == pytest.approx((1 - 2) / 3)
    assert over_best_baseline(rows) == 2.0


def test_a_baseline_without_a_prediction_counts_as_a_baseline_but_not_in_the_ranking():
    rows = [_row("found", 1.0, 3.0), _row("fsdp", math.nan, 2.0), _row("megatron", 2.0, 4.0)]
    assert ranking(rows) == 1
    assert best_baseline_s(rows) == 2.0
    assert cells(rows[0], 2.0)[:8] == ("found", "3000.0", "1.50", "1000.0", "-67%", "", "", "0.0")


def test_the_geometric_mean_leaves_out_what_is_unknown():
    assert geometric_mean([0.5, math.nan, 2.0]) == pytest.approx(1.0)
    assert math.isnan(geometric_mean([math.nan]))


def test_the_five_longest_waits_of_a_row_are_near_if_the_plan_has_them_within_a_quarter():
    compiled = {"all_gather data": 0.4, "all_gather model": 0.2, "all_reduce data": 0.1, "reduce_scatter data": 1e-5}
    played = {"all_gather data": 0.5, "all_gather model": 0.26, "all_to_all data": 0.1}
    row = dataclasses.replace(_row("found", 1.0, 1.0), waited_s=compiled, played_s=1.0, played_waits_s=played)
    assert near_waits(row) == (1, 3)  # the fourth is too short to count


def test_what_settings_say_together():
    ahead = [dataclasses.replace(_row("found", 1.04, 1.0), played_s=0.9), _row("fsdp", 1.0, 2.0)]
    behind = [_row("found", 0.9, 1.0), _row("fsdp", 1.0, 1.0), _row("hybrid fsdp", 1.0, 0.5)]
    assert summary([ahead, behind]) == ("1.000", "1 of 2", "2.000", "1 of 2", "0 of 1", "0 of 0")


def test_the_table_of_a_file_divides_its_settings_into_tuned_and_held_out(tmp_path: Path, capsys):
    rows = [
        _row(plan, 1.0, s, model) for model, s in (("decoder", 1.0), ("contrastive", 3.0)) for plan in ("found", "fsdp")
    ]
    # Rows of one setting need not follow one another.
    for row in (*rows, _row("hybrid fsdp", 1.0, 0.8)):
        append_row(row, tmp_path / "rows.jsonl")
    timeline_table.main([str(tmp_path / "rows.jsonl")])
    first, second, tuned, held_out, both = printed_rows(capsys.readouterr().out)
    assert first == ["decoder, 2x4", "1000.0", "hybrid fsdp", "800.0", "1.250", "2"]
    assert second == ["contrastive, 2x4", "3000.0", "fsdp", "3000.0", "1.000", "1"]
    assert [row[:3] for row in (tuned, held_out)] == [
        ["tuned, 1", "1.250", "1 of 1"],
        ["held out, 1", "1.000", "0 of 1"],
    ]
    assert both[:4] == ["all, 2", "1.118", "1 of 2", "1.250"]
    timeline_table.main([str(tmp_path / "rows.jsonl"), "--baselines", "fsdp"])
    assert printed_rows(capsys.readouterr().out)[-1][:4] == ["all, 2", "1.000", "0 of 2", "1.000"]


def test_a_file_without_rows_is_refused(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        timeline_table.main([str(tmp_path / "none.jsonl")])
    assert "the file has no rows" in capsys.readouterr().err


def _row(plan: str, predicted_s: float, step_s: float, model: str = "decoder") -> Row:
    return Row(model, "2x4", 4, plan, "constraints", predicted_s, step_s, {}, {}, [1e9, 1e9], [], [], [], 0.0, 0.0)
