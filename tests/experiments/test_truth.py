"""Predictions beside what compilers make of the plans, as a table and as JSON."""

import json

from experiments import truth


def test_main_compares_predictions_with_the_programs_of_host_devices(tmp_path, capsys):
    output = tmp_path / "truth.json"
    arguments = ["--target", "host", "--models", "mlp", "--meshes", "2x4", "--hardware", "dear"]
    assert not truth.main([*arguments, "--time-limit", "5", "--output", str(output)])
    assert "Summary" in capsys.readouterr().out
    (result,) = json.loads(output.read_text())
    memory = result["memory"]
    assert memory["predicted"] > 0
    # State (parameters and adamw's two moments) and the batch come in, the state goes out in the donated memory.
    assert memory["arguments"] > memory["outputs"] >= memory["aliased"] > 0
    for row in result["sent"]:
        assert abs(row["shardy"] / row["predicted"] - 1) <= truth.COLLECTIVE_TOLERANCE
