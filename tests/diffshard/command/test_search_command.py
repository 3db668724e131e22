"""`diffshard search` from its words to its exit code, files and both output streams."""

import errno
import math
import sys

import pytest

from diffshard.command.line import main
from diffshard.sharding_search.plan import Plan

MODULE = """
import jax, jax.numpy as jnp

def step(w, x):
    gradient = jax.grad(lambda w: jnp.square(x @ w).mean())(w)
    return w - 0.1 * gradient

def args():
    return jnp.ones((8, 8)), jnp.ones((16, 8))

def large_state():
    return jnp.ones((64, 64)), jnp.ones((4, 64))

def shapes():
    return jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")

def broken(w, x):
    raise RuntimeError("no such luck")

def powered(w, x, power, name):
    return w * (x.sum() ** power if name == "sum" else 0)

def static_args():
    return jnp.ones((8, 8)), jnp.ones((16, 8)), 2, "sum"

def shardings():
    return jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data", "model")

def text():
    return "w"

def failing_args():
    raise OSError("no such file")

def args_of_the_wrong_type():
    return "w" + 1

bad_shardings = ("data", None)
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "user_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("user_module", None)


def search(*more, function="step", args="args", mesh="data=2,model=2", hardware="h100"):
    words = ["search", f"user_module:{function}", "--args", f"user_module:{args}", "--mesh", mesh]
    return main([*words, "--hardware", hardware, "--solver", "exact", *more])


def test_search_runs_a_plan_once_and_holds_its_numbers(module, capsys, monkeypatch):
    assert search("--check", "numbers") == 0
    assert "numbers  right: by program the first call" in capsys.readouterr().out
    assert search("--check", "shardy,numbers", "--executor", "constraints") == 0
    with pytest.raises(SystemExit):
        search("--check", "shardy,names")
    assert "it must be one of ('shardy', 'compile', 'numbers')" in capsys.readouterr().err
    assert search("--check", "numbers", args="shapes") == 2
    assert "--args has to return arrays, not shapes" in capsys.readouterr().err
    assert search("--check", "numbers", mesh="data=16") == 1
    assert "needs 16 devices, and there are 8" in capsys.readouterr().err
    monkeypatch.setattr("diffshard.sharding_search.numbers_check._ROUNDINGS", -1)
    monkeypatch.setattr("diffshard.sharding_search.numbers_check._NOISE_FACTOR", -1)
    assert search("--check", "numbers") == 1
    assert "This is a fault of diffshard" in capsys.readouterr().err


def test_search_lets_a_compiler_judge(module, capsys):
    assert search("--check", "shardy") == 0
    assert search("--target", "host") == 2
    assert "`--target` is for `--check compile`" in capsys.readouterr().err
    assert search("--check", "compile", hardware="tpu_v5e") == 2
    assert "there is none for 'TPU v5e'" in capsys.readouterr().err


def test_search_finds_the_shape_of_the_mesh(module, capsys):
    words = ["search", "user_module:step", "--args", "user_module:args", "--hardware", "h100", "-o", "plan.json"]
    assert main([*words, "--devices", "8"]) == 0
    assert "the fastest of 3 shapes" in capsys.readouterr().out
    plan = Plan.load("plan.json")
    assert math.prod(plan.mesh_axes.values()) == 8
    assert len(plan.shapes) == 3
    assert main([*words, "--devices", "12"]) == 2
    assert "`--devices` 12 does not fill hosts of 8" in capsys.readouterr().err
    for more in ([], ["--devices", "8", "--mesh", "data=8"]):
        with pytest.raises(SystemExit):
            main([*words, *more])


def test_search_takes_plans_from_a_store(module, capsys):
    assert search("--cache", "store") == 0
    assert "taken from a store" not in capsys.readouterr().out
    assert search("--cache", "store") == 0
    assert "taken from a store of plans" in capsys.readouterr().out
    assert search("--cache", "user_module.py") == 2
    assert "`--cache` must be a folder" in capsys.readouterr().err


def test_search_takes_given_shardings_static_arguments_rules_and_executors(module, capsys):
    words = ["--in-shardings", "user_module:shardings", "--executor", "constraints", "-o", "plan.json"]
    assert search(*words, "--logical-axis-rules", "embed=data+model,mlp=") == 0
    plan = Plan.load("plan.json")
    assert [(t.given, t.spec) for t in plan.arguments] == [(True, ((), ())), (True, (("data",), ("model",)))]
    assert plan.executor == "constraints"
    assert plan.logical_axis_rules == (("embed", ("data", "model")), ("mlp", ()))
    assert search("--static", "power,3", "-o", "plan.json", function="powered", args="static_args") == 0
    assert Plan.load("plan.json").static_argnums == (2, 3)
    assert any("integer_pow" in o.signature for o in Plan.load("plan.json").operations)
    capsys.readouterr()


def test_messages_name_the_options_of_the_command(module, capsys):
    assert search("--in-shardings", "user_module:bad_shardings") == 2
    assert "`--in-shardings`[0] must be a PartitionSpec" in capsys.readouterr().err
    assert search("--donate", "0", "--static", "0") == 2
    assert "`--donate` (0,) and `--static` (0,) share the argument 'w'" in capsys.readouterr().err
    assert search("--donate", "state") == 2
    assert "`--donate` has 'state', which is no argument of step; it has w, x" in capsys.readouterr().err
    assert search("--logical-axis-rules", "embed=modle") == 2
    assert "`--logical-axis-rules` has the mesh axis 'modle'" in capsys.readouterr().err
    assert search("--memory-limit", "100B", args="large_state") == 1
    err = capsys.readouterr().err
    assert "`--memory-limit` is 100" in err
    assert "donate the state (`--donate`)" in err


@pytest.mark.parametrize("args", ["args", "shapes"])
def test_search_prints_saves_and_draws(module, capsys, args):
    assert search("-o", "plan.json", "--html", "plan.html", "--donate", "0", "--memory-limit", "1GiB", args=args) == 0
    out, err = capsys.readouterr()
    assert "Plan of step on 4 devices (data 2 x model 2), H100-80GB" in out
    assert "1.00 GiB" in out
    assert err.startswith("searching user_module:step\n")
    assert "best " in err
    assert err.endswith("wrote plan.json\nwrote plan.html\n")
    plan = Plan.load("plan.json")
    assert plan.donate_argnums == (0,)
    assert [t.path for t in plan.arguments] == ["w", "x"]
    assert (module / "plan.html").read_text().startswith("<!doctype html>")
    assert main(["show", "plan.json"]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"function": "stepp"}, "user_module has no 'stepp'"),
        ({"function": "number"}, "is int, not a function"),
        ({"hardware": "h300"}, "'h300' is unknown; there are v100"),
        ({"args": "step"}, "--args: step is called without arguments, but needs w, x"),
        ({"args": "text"}, "--args gives 'w' as argument 0, which is no array"),
    ],
)
def test_usage_errors_have_code_2(module, capsys, words, said):
    assert search(**words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Or give a" not in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--static", "5"], "`--static` (5,) names a position that the 2 arguments of step with a position"),
        (["--donate", "7"], "`--donate` (7,) names a position that the 2 arguments of step with a position"),
        (["--in-shardings", "user_module:step"], "--in-shardings: step is called without arguments, but needs w, x"),
    ],
)
def test_options_that_do_not_fit_the_functions_have_code_2(module, capsys, words, said):
    assert search(*words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mesh", "data=0"], "is not AXIS=N"),
        (["--mesh", "data=2,data=2"], "'data' is there twice"),
        (["--memory-limit", "80XB"], "is not a positive size"),
        (["--time-limit", "nan"], "is not a positive number"),
        (["--donate", "0,"], "is not a list of argument numbers"),
        (["--logical-axis-rules", "embed"], "is not NAME=AXIS"),
    ],
)
def test_words_that_cannot_be_meant_have_code_2(module, capsys, words, said):
    with pytest.raises(SystemExit, match="2"):
        search(*words)
    assert said in capsys.readouterr().err


def test_missing_modules_folders_and_solvers_have_code_2(module, capsys):
    assert main(["search", "nowhere:f", "--args", "nowhere:g", "--mesh", "x=2", "--hardware", "h100"]) == 2
    assert "there is no module 'nowhere'" in capsys.readouterr().err
    assert search("-o", "missing/plan.json") == 2
    assert "not a file in a folder" in capsys.readouterr().err
    assert search("--solver", "magic") == 2
    assert "must be one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [("failing_args", "OSError: no such file"), ("args_of_the_wrong_type", "TypeError: can only concatenate")],
)
def test_arguments_that_cannot_be_made_have_code_1_and_the_users_traceback(module, capsys, args, said):
    assert search(args=args) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"diffshard search: --args failed: {said}")
    assert lines[0] == "Traceback (most recent call last):"
    assert any(f"in {args}" in line for line in lines)


def test_failures_have_code_1_and_leave_no_files(module, capsys):
    assert search("--memory-limit", "100B", "-o", "plan.json") == 1
    assert "needs at least" in capsys.readouterr().err
    assert search("-o", "plan.json", function="broken") == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().err
    assert sorted(p.name for p in module.iterdir() if p.name != "__pycache__") == ["user_module.py"]


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_a_full_disk_does_not_lose_the_plan(module, capsys, monkeypatch, option):
    real_open = open

    def full(path, mode="r", **options):
        file = real_open(path, mode, **options)
        if str(path).endswith(".part"):
            file.write(b"half")
            file.close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return file

    (module / "plan").write_text("the old one")
    monkeypatch.setattr("builtins.open", full)
    assert search(option, "plan") == 1
    monkeypatch.undo()
    out, err = capsys.readouterr()
    assert "Plan of step on 4 devices" in out
    assert f"diffshard search: {option} plan: No space left on device" in err
    assert "Traceback" not in err
    assert (module / "plan").read_text() == "the old one"
    assert [path.name for path in module.iterdir() if path.suffix == ".part"] == []
