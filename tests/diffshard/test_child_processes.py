"""Processes that are started find this process's modules, and run no file that merely lies in the working directory."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cost.base import Problem
from diffshard.checks.compilation import CompiledStep, Job, compile_steps
from diffshard.checks.targets import TARGETS
from diffshard.child_processes import python_command, python_environment
from diffshard.sharding_search.executors import FlatFunction
from diffshard.solving.solve import solve


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, from which this process imports, with files that have the names of Python's modules."""
    for name in ("json", "pickle", "random", "subprocess"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name} runs')")
    (tmp_path / "found_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return tmp_path


def test_modules_of_this_process_are_found_and_those_of_python_are_its_own(folder):
    script = "import json, random, subprocess, found_here, diffshard, cost; print(json.__file__, diffshard.__file__)"
    found = subprocess.run(
        python_command("-c", script), env=python_environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    assert not found[0].startswith(str(folder))
    assert found[1] == sys.modules["diffshard"].__file__


def test_a_package_that_only_the_prompt_finds_is_found(monkeypatch):
    package = sys.modules["diffshard"].__path__[0].removesuffix("/diffshard")
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if path != package)])
    command = python_command("-c", "import diffshard; print(diffshard.__path__[0])")
    found = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"{package}/diffshard"


@pytest.mark.usefixtures("folder")
def test_a_compilation_runs_none_of_them():
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    flat = FlatFunction(lambda w: [w + 1], (rows,), (rows,), (), {})
    job = Job(flat.export_for("cpu", [jax.ShapeDtypeStruct((4,), jnp.float32)]), (), {"x": 2}, TARGETS["host"])
    assert isinstance(compile_steps({"step": job}, timeout_s=120)["step"], CompiledStep)


@pytest.mark.usefixtures("folder")
def test_highs_runs_none_of_them():
    pytest.importorskip("highspy")
    rng = np.random.default_rng(0)
    edges = np.array([(u, v) for u in range(8) for v in range(u)])
    costs = [rng.integers(1, 99, (6, 6)) for _ in edges]
    problem = Problem([rng.integers(1, 99, 6) for _ in range(8)], edges, costs)
    assert solve(problem, solver="exact").status == "optimal"
