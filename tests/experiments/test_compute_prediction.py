"""Predicted seconds of computing against those of compiled GPU programs."""

import importlib.util
import subprocess
import sys

import pytest

from experiments import compute_prediction
from experiments.compute_prediction import ComputingTimes


def test_a_row_shows_milliseconds_and_the_error():
    row = ComputingTimes("gpt", "2x4", "found", 0.0225, 0.018)
    assert compute_prediction.cells(row) == ("gpt", "2x4", "found", "22.50", "18.00", "+25%")


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra gpu-compile")
def test_main_compiles_for_gpus():
    # A process of its own: JAX looks for plugins once, when its first backend starts.
    command = [sys.executable, "-m", "experiments.compute_prediction", "--models", "tiny", "--plans", "found"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "tiny  2x4  found" in result.stdout
    assert "largest error" in result.stdout
