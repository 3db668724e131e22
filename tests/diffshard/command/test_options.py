"""Every option of the command reaches the search or the solver; neither is run."""

import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cost.base import Problem
from diffshard.command.line import main
from diffshard.solving import contest

MODULE = """
import jax, jax.numpy as jnp

def step(w, x, power):
    return w * x.sum() ** power

def args():
    return jnp.ones((8, 8)), jnp.ones((16, 8)), 2

shardings = (jax.sharding.PartitionSpec("data"), None)
"""


@pytest.fixture
def asked_for(monkeypatch):
    """Returns the arguments by name with which the command asks for its work, which ends there."""

    def arguments_of(work, words):
        asked = []

        def ask(*_, **options):
            asked.append(options)
            raise ValueError("enough")

        monkeypatch.setattr(f"diffshard.command.{work}", ask)
        assert main(words) == 2
        (options,) = asked
        options.pop("progress", None)
        return options

    return arguments_of


def test_options_of_search(asked_for, tmp_path, monkeypatch):
    (tmp_path / "options_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["search", "options_module:step", "--args", "options_module:args", "--mesh", "data=2,model=4"]
    words += ["--hardware", "h100"]
    defaults = asked_for("plan_commands.search", words)
    assert defaults.pop("hardware").name == "H100-80GB"
    assert {name: value for name, value in defaults.items() if value not in (None, ())} == {"key": 0}
    words += ["--memory-limit", "2GiB", "--donate", "x", "--static", "power", "--solver", "greedy", "--seed", "5"]
    words += ["--time-limit", "7", "--in-shardings", "options_module:shardings", "--executor", "program"]
    words += ["--check", "compile", "--target", "host", "--logical-axis-rules", "embed=data"]
    options = asked_for("plan_commands.search", words)
    sys.modules.pop("options_module")
    expected = {
        "memory_limit_bytes": 2 * 2**30,
        "donate_argnames": ("x",),
        "static_argnames": ("power",),
        "solver": "greedy",
        "key": 5,
        "time_limit_s": 7.0,
        "in_shardings": (PartitionSpec("data"), None),
        "executor": "program",
        "check": ("compile",),
        "target": "host",
        "logical_axis_rules": (("embed", ("data",)),),
    }
    assert {name: options[name] for name in expected} == expected


def test_options_of_solve(asked_for, tmp_path):
    none = np.zeros(0, int)
    empty = np.zeros((0, 2), int)
    contest.write(Problem([np.array([1, 2])], empty, [], none, [], empty, 0), tmp_path / "one.json")
    words = ["solve", str(tmp_path / "one.json")]
    assert asked_for("solve_command.solve", words) == {"time_limit_s": None, "key": 0}
    words += ["--solver", "greedy", "--time-limit", "7", "--seed", "5"]
    assert asked_for("solve_command.solve", words) == {"time_limit_s": 7.0, "key": 5, "solver": "greedy"}
