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
    sizes = ["--size", "64", "--matrix-size", "16", "--width", "32", "--repeats", "1", "--models", "wide batch"]
    calibration.main(sizes)
    out = capsys.readouterr().out
    for expected in ("tanh", "this machine: Hardware", "mlp-6"):
        assert expected in out
