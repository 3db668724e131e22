"""The demonstration on a tiny model."""

from diffshard import Plan
from experiments import demo


def test_main_prints_trains_times_and_writes(capsys, tmp_path):
    sizes = [
        "--layers",
        "1",
        "--width",
        "32",
        "--sequence",
        "16",
        "--batch",
        "8",
        "--steps",
        "3",
        "--rounds",
        "1",
        "--time-limit",
        "5",
    ]
    assert demo.main([*sizes, "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "Plan of step on 8 devices (data 2 x model 4)" in out
    assert "Equal: losses differ by at most" in out
    assert "times as fast as data parallelism" in out
    assert dict(Plan.load(tmp_path / "out" / "plan.json").mesh_axes) == {"data": 2, "model": 4}
    assert "</html>" in (tmp_path / "out" / "plan.html").read_text(encoding="utf-8")
