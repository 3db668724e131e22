"""`diffshard calibrate` measures the devices that are here, and a search takes its file."""

import json

import jax
import pytest

import diffshard
from diffshard.command.line import main

SMALL = ("--matrix-size", "32", "--largest", "16KiB", "--repeats", "1", "--dtypes", "float32")
STEP = """
import jax, jax.numpy as jnp

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

def args():
    return jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "calibrated_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def searched(*more):
    return main(["search", "calibrated_step:step", "--args", "calibrated_step:args", *more])


def test_what_was_measured_is_printed_written_and_searched_for(folder, capsys):
    assert main(["calibrate", "--mesh", "data=2,model=4", *SMALL, "--name", "ours", "-o", "hardware.json"]) == 0
    printed = capsys.readouterr().out
    measured = diffshard.hardware.load_hardware("hardware.json")
    assert printed.startswith("ours\n")
    assert measured.name == "ours"
    assert f"{measured.peak_flops_per_s('float32') / 1e12:.3g} TFLOP/s" in printed
    assert f"{measured.memory_bytes_per_s / 1e9:.3g} GB/s" in printed
    assert "data 2" in printed
    assert set(measured.links) == {"data", "model"}
    assert searched("--mesh", "data=2,model=4", "--hardware", "hardware.json", "-o", "plan.json") == 0
    assert diffshard.Plan.load("plan.json").hardware == measured


def test_hardware_is_the_same_after_a_file(tmp_path):
    for hardware in (
        diffshard.preset("h100", {"data": 16, "model": 4}),
        diffshard.Hardware("one rate", 1e12, float("inf"), float("inf"), {"x": diffshard.Link(1e-6, 0.0)}),
    ):
        diffshard.hardware.save_hardware(hardware, tmp_path / "hardware.json")
        assert diffshard.hardware.load_hardware(tmp_path / "hardware.json") == hardware


def test_a_changed_file_is_refused(tmp_path):
    path = tmp_path / "hardware.json"
    diffshard.hardware.save_hardware(diffshard.preset("h100", {"data": 2}), path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "memory_bytes": 1.0}))
    with pytest.raises(diffshard.PlanError, match="`checksum`"):
        diffshard.hardware.load_hardware(path)
    del document["checksum"]
    path.write_text(json.dumps({**document, "memory_bytes": -1.0}))
    with pytest.raises(diffshard.PlanError, match=r"`Hardware\.memory_bytes` must be"):
        diffshard.hardware.load_hardware(path)
    with pytest.raises(diffshard.PlanError, match=r"load it with `diffshard\.hardware\.load_hardware`"):
        diffshard.Plan.load(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calibrate", "--mesh", "data=64"), f"--mesh has 64 devices, and there are {len(jax.devices())}"),
        (("calibrate", "--mesh", "data=2", "--repeats", "0"), "`repeats` must be at least 1, not 0"),
        (("calibrate", "--mesh", "data=2", "--matrix-size", "32", "--dtypes", "float33"), "float33"),
        (("calibrate", "--mesh", "data=2", "-o", "none/hardware.json"), "--output none/hardware.json"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, capsys, words, message):
    assert main(list(words)) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_other_axes_or_none_is_refused(folder, capsys):
    diffshard.hardware.save_hardware(diffshard.preset("h100", {"data": 2}), "hardware.json")
    assert searched("--mesh", "rows=2", "--hardware", "hardware.json") == 2
    assert "has no link for the mesh axis 'rows'" in capsys.readouterr().err
    assert searched("--mesh", "data=2", "--hardware", "other.json") == 2
    assert "--hardware other.json: No such file" in capsys.readouterr().err
    assert searched("--devices", "2", "--hardware", "hardware.json") == 2
    assert "has links for the axes of a mesh" in capsys.readouterr().err
