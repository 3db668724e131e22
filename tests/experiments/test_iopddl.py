"""The contest's experiment: skips what is not there, and says what a run result."""

import pytest

from experiments import iopddl


def test_missing_instances_are_skipped_and_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(iopddl, "INSTANCES", tmp_path)
    iopddl.main(["--instances", "G", "V"])
    assert f"Skipped: {tmp_path} lacks G, V." in capsys.readouterr().out


@pytest.mark.skipif(not (iopddl.INSTANCES / "G.json.gz").exists(), reason="the contest's instances are not here")
@pytest.mark.parametrize("variant", iopddl.VARIANTS)
def test_every_variant_finds_a_feasible_plan(variant):
    result = iopddl.run("G", 3.0, 0, variant)
    assert result["feasible"]
    assert result["cost"] >= 217_039  # proven optimal within 0.01%
    assert result["bound"] <= 217_039 * 1.0001


def test_generated_problems_are_solved():
    result = iopddl.scale(80, 2.0)
    assert result["nodes"] == 80
    assert result["bound"] <= result["cost"]
