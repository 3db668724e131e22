"""Convolutions of float8 numbers as XLA compiles them for H100s."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra gpu-compile")
def test_convolutions_of_float8_are_widened_and_products_of_matrices_are_not():
    # A process of its own: JAX looks for plugins once, when its first backend starts.
    command = [sys.executable, "-m", "experiments.float8_convolutions", "--width", "64"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [line for line in result.stdout.splitlines() if " float32 " in line]
    assert len(rows) == 4
    assert all("f32 x f32" in row for row in rows if "product of matrices" not in row)
    assert "f8e4m3fn x f8e4m3fn" in next(row for row in rows if "product of matrices" in row)
