"""The command from its words to its exit code, files and both output streams."""

import errno
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from cost.base import Problem
from diffshard.__main__ import main as entry
from diffshard.base import Solution
from diffshard.command.line import main
from diffshard.command.terminal import show_progress
from diffshard.sharding_search.plan import Plan
from diffshard.solving import contest
from tests.diffshard.plans.small_plan import small_plan

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


def test_search_lets_a_compiler_judge(module, capsys):
    assert search("--check", "shardy") == 0
    assert search("--target", "host") == 2
    assert "`--target` is for `--check compile`" in capsys.readouterr().err
    assert search("--check", "compile", hardware="tpu_v5e") == 2
    assert "there is none for 'TPU v5e'" in capsys.readouterr().err


def test_search_takes_plans_from_a_store(module, capsys):
    assert search("--cache", "store") == 0
    assert "taken from a store" not in capsys.readouterr().out
    assert search("--cache", "store") == 0
    assert "taken from a store of plans" in capsys.readouterr().out
    assert search("--cache", "user_module.py") == 2
    assert "`cache` must be a folder" in capsys.readouterr().err


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
    assert "`--donate` (0,) and `--static` (0,) share a position" in capsys.readouterr().err
    assert search("--donate", "state") == 2
    assert "the function has no argument 'state'; it has w, x" in capsys.readouterr().err
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
        (["--static", "5"], "the function has no argument 5; it has w, x"),
        (["--donate", "7"], "the function has no argument 7; it has w, x"),
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


def test_failures_have_code_1_and_leave_no_files(module, capsys):
    assert search("--memory-limit", "100B", "-o", "plan.json") == 1
    assert "needs at least" in capsys.readouterr().err
    assert search("-o", "plan.json", function="broken") == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().err
    assert sorted(p.name for p in module.iterdir() if p.name != "__pycache__") == ["user_module.py"]


def test_show_refuses_what_is_no_plan(tmp_path, capsys):
    assert main(["show", str(tmp_path / "none.json")]) == 2
    (tmp_path / "bad.json").write_text("{")
    assert main(["show", str(tmp_path / "bad.json")]) == 1
    assert "is not a plan file" in capsys.readouterr().err
    small_plan().save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]) == 0
    assert capsys.readouterr() == ("", f"wrote {tmp_path / 'plan.html'}\n")
    assert "<!doctype html>" in (tmp_path / "plan.html").read_text()


def instance(path, limit):
    """Two nodes and an edge; the best choice (0, 1) costs 1 + 2 + 3 and needs 5 + 6 bytes at time 1."""
    costs = [np.array([1, 9]), np.array([9, 2])]
    problem = Problem(
        costs, np.array([[0, 1]]), [np.array([[50, 3], [4, 50]])], np.arange(2),
        [np.array([5, 2]), np.array([3, 6])], np.array([[0, 2], [1, 3]]), limit,
    )  # fmt: skip
    contest.write(problem, path)


def test_solve_writes_the_solution(tmp_path, capsys):
    instance(tmp_path / "two.json.gz", 11)
    words = ["solve", str(tmp_path / "two.json.gz"), "--solver", "exhaustive", "--time-limit", "20"]
    assert main([*words, "--output", str(tmp_path / "solution.json")]) == 0
    found = json.loads((tmp_path / "solution.json").read_text())
    assert found["choice"] == [0, 1]
    assert (found["cost"], found["lower_bound"], found["feasible"]) == (6, 6, True)
    assert 0 < found["seconds"] < 20
    out, err = capsys.readouterr()
    assert out == ""
    assert "optimal: cost 6" in err
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["choice"] == [0, 1]


def test_infeasible_instances_have_code_1_and_still_the_least_bad_choice(tmp_path, capsys):
    instance(tmp_path / "two.json", 4)
    assert main(["solve", str(tmp_path / "two.json"), "--solver", "exhaustive"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["feasible"] is False
    assert json.loads(out)["excess"] == 1  # 2 + 3 bytes
    assert "infeasible: the best choice exceeds the limit by 1" in err
    assert "At time 1 the memory exceeds the limit by 1; its largest users are nodes 1 (3), 0 (2)." in err


def test_damaged_instances_have_code_2(tmp_path, capsys):
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8bnot gzip")
    assert main(["solve", str(tmp_path / "bad.json.gz")]) == 2
    assert "is not gzipped JSON" in capsys.readouterr().err
    assert main(["solve", str(tmp_path / "none.json")]) == 2


def test_the_bound_of_a_cost_that_floats_round_up_is_not_above_it(tmp_path, capsys):
    cost = [np.array([10**18 - 1])] * 3
    none = np.zeros(0, int)
    problem = Problem(cost, np.zeros((0, 2), int), [], none, [], np.zeros((0, 2), int), 0)
    contest.write(problem, tmp_path / "three.json")
    assert main(["solve", str(tmp_path / "three.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cost"], found["status"]) == (3 * 10**18 - 3, "optimal")
    assert found["cost"] - 10**6 <= found["lower_bound"] <= found["cost"]


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


INTERRUPTS = """
import os, signal

def once(w, x):
    os.kill(os.getpid(), signal.SIGINT)

def swallowed(w, x):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pass
    os.kill(os.getpid(), signal.SIGINT)
    print("went on")

def args():
    import numpy
    return numpy.ones(4), numpy.ones(4)
"""


@pytest.mark.parametrize(("function", "code"), [("once", 130), ("swallowed", -2)])
def test_ctrl_c_is_one_line_and_a_second_one_ends_at_once(tmp_path, function, code):
    (tmp_path / "interrupts.py").write_text(INTERRUPTS)
    words = ["search", f"interrupts:{function}", "--args", "interrupts:args", "--mesh", "x=2", "--hardware", "h100"]
    command = [sys.executable, "-m", "diffshard", *words]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert "went on" not in ended.stdout
    if code > 0:
        assert ended.stderr.splitlines()[-1] == "diffshard search: interrupted"


def test_ctrl_c_while_the_command_is_imported_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("diffshard.command.line.main", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert entry() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "diffshard: interrupted\n"


def test_plot_is_a_picture_and_its_name_is_checked_first(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    instance(tmp_path / "two.json", 11)
    words = ["solve", str(tmp_path / "two.json"), "--solver", "exhaustive", "--plot"]
    assert main([*words, str(tmp_path / "curve.svg")]) == 0
    drawn = (tmp_path / "curve.svg").read_text()
    assert "<svg" in drawn
    assert "two.json" in drawn  # the title, which the picture keeps as a comment
    capsys.readouterr()
    assert main([*words, str(tmp_path / "curve.xyz")]) == 2
    assert "must end in one of" in capsys.readouterr().err


def test_a_solver_that_refuses_the_instance_has_code_2(tmp_path, monkeypatch, capsys):
    def refuses(*_, **__):
        raise ValueError("`problem` is too wide.")

    instance(tmp_path / "two.json", 11)
    monkeypatch.setattr("diffshard.command.solve_command.solve", refuses)
    assert main(["solve", str(tmp_path / "two.json")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "diffshard solve: `problem` is too wide."


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_solution_that_cannot_be_written_goes_to_stdout(tmp_path, monkeypatch, capsys):
    instance(tmp_path / "two.json", 11)
    monkeypatch.setattr("diffshard.command.solve_command.check_writable", lambda *_: None)  # `/dev` is for root alone
    assert main(["solve", str(tmp_path / "two.json"), "--output", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["choice"] == [0, 1]
    assert err.splitlines()[-1] == "diffshard solve: --output /dev/full: No space left on device"


def test_one_file_for_two_results_is_refused(tmp_path, capsys):
    instance(tmp_path / "two.json", 11)
    same = str(tmp_path / "same.svg")
    assert main(["solve", str(tmp_path / "two.json"), "--output", same, "--plot", same]) == 2
    assert "--output and --plot are the same file" in capsys.readouterr().err
    assert not os.path.exists(same)


def test_without_a_bound_there_is_no_gap(tmp_path, monkeypatch, capsys):
    instance(tmp_path / "two.json", 11)
    unbounded = Solution((0, 1), 6, -np.inf, np.inf, True, 0.0, ((0.1, 6.0, -np.inf),), "finished")
    monkeypatch.setattr("diffshard.command.solve_command.solve", lambda *_, **__: unbounded)
    assert main(["solve", str(tmp_path / "two.json")]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "finished: cost 6, no bound"


def test_interrupting_before_there_is_a_choice_has_code_130(monkeypatch, tmp_path, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    instance(tmp_path / "two.json", 11)
    monkeypatch.setattr("diffshard.command.solve_command.solve", interrupted)
    assert main(["solve", str(tmp_path / "two.json")]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("diffshard solve: interrupted\n")


def test_progress_goes_out_as_plain_lines_and_the_last_is_never_lost(capsys):
    with show_progress("working", str) as progress:
        for i in range(100):
            progress(i / 10, 100.0 - i, 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "working"
    assert 2 <= len(lines) < 10
    assert lines[-1] == "  9.9 s, best 1.0, lower bound 0.5, gap 50.00%"


def test_python_dash_m_is_the_same_command():
    found = subprocess.run(
        [sys.executable, "-m", "diffshard", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0
    assert "search" in found.stdout
    assert found.stderr == ""
