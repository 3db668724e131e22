"""Predicted work is near what XLA compiles, and the whole script runs."""

import math

import pytest

from cost.base import Hardware
from experiments import calibration
from experiments.models import gpt, mlp


@pytest.mark.parametrize("model", [mlp.make(width=128, batch=256), gpt.make(layers=1)])
def test_predicted_work_is_near_what_xla_compiles(model):
    free = Hardware("free", math.inf, math.inf, math.inf, {})
    work = calibration.whole_step(model, free, repeats=1)
    assert work.flops == pytest.approx(work.compiled_flops, rel=0.15)
    assert work.moved_bytes == pytest.approx(work.compiled_bytes, rel=0.35)
    assert work.unfused_bytes > 1.5 * work.compiled_bytes  # what the rule of fusion is for
    assert work.predicted_s == 0 < work.measured_s


def test_main_prints_every_table(capsys):
    sizes = ["--size", "64", "--matrix-size", "16", "--largest-bytes", str(2**18), "--width", "32", "--repeats", "1"]
    calibration.main([*sizes, "--models", "wide batch"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert float(rows["tanh"][0]) > 0
    flops, moved_bytes, unfused_bytes, predicted_ms, _, _, measured_ms, _ = rows["mlp-6"]  # ratios to XLA's counts
    assert 0.5 < float(flops) < 2
    assert float(moved_bytes) < float(unfused_bytes)
    assert min(float(predicted_ms), float(measured_ms)) >= 0
    (machine,) = (line for line in lines if line.startswith("this machine: "))
    assert "links={'devices': Link(latency_s=" in machine
