"""The zoo's models train the same with a plan, and a missing package leaves a row that says so."""

import importlib.util
import sys

import pytest

from experiments.zoo import __main__ as zoo
from experiments.zoo.base import ZooModel
from experiments.zoo.catalogue import MODELS


@pytest.mark.parametrize("name", ["lora", "fourier operator", "gan"])  # they compile quickly
def test_models_of_core_packages_train_the_same_with_a_plan(name: str):
    assert MODELS[name].packages == ()
    (row,) = zoo.run_models([name], "2x4", ["slow"], steps=2, limit_s=5.0)
    assert not row.failed, row
    held, done = (float(cell.removesuffix("%")) for cell in row.cells[-2:])
    assert held < 80
    assert done < 20


def test_a_missing_package_leaves_a_row(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "experiments.zoo.t5", raising=False)
    assert zoo.main(["--models", "t5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not installed") >= 1
    assert "transformers" in printed


def test_a_model_that_fails_is_told(monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "broken", ZooModel("base", (), "has no make()"))
    assert zoo.main(["--models", "broken", "--devices", "h100"]) == 1
    assert "FAILS: AttributeError" in capsys.readouterr().out


def test_every_model_has_a_module():
    assert all(importlib.util.find_spec(f"experiments.zoo.{model.module}") for model in MODELS.values())
