"""The contest's experiment: skips what is not there, and says what a run found."""

import pytest

from experiments import iopddl


def test_missing_instances_are_skipped_and_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(iopddl, "INSTANCES", tmp_path)
    iopddl.main(["--instances", "G", "V"])
    assert f"Skipped: {tmp_path} lacks G, V." in capsys.readouterr().out


@pytest.mark.skipif(not (iopddl.INSTANCES / "G.json.gz").exists(), reason="the contest's instances are not here")
@pytest.mark.parametrize("variant", iopddl.VARIANTS)
def test_every_variant_finds_a_feasible_plan(variant):
    found = iopddl.run("G", 3.0, 0, variant)
    assert found["feasible"]
    assert found["cost"] >= 217_039  # proven optimal within 0.01%
    assert found["bound"] <= 217_039 * 1.0001


def test_generated_problems_are_solved():
    found = iopddl.scale(80, 2.0)
    assert found["nodes"] == 80
    assert found["bound"] <= found["cost"]
