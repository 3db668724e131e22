"""The command as a whole: showing plans, interrupting, progress, and its ways to be started."""

import itertools
import json
import os
import signal
import subprocess
import sys
from importlib import metadata

import pytest

from diffshard.__main__ import main as entry
from diffshard.command.arguments import show_progress
from diffshard.command.line import main
from tests.diffshard.plans.small_plan import small_plan


def test_show_refuses_what_is_no_plan(tmp_path, capsys):
    assert main(["show", str(tmp_path / "none.json")]) == 2
    (tmp_path / "bad.json").write_text("{")
    assert main(["show", str(tmp_path / "bad.json")]) == 1
    assert "is not a plan file" in capsys.readouterr().err
    small_plan().save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]) == 0
    assert capsys.readouterr() == ("", f"wrote {tmp_path / 'plan.html'}\n")
    assert "<!doctype html>" in (tmp_path / "plan.html").read_text()


def test_the_version_has_that_of_jax(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"diffshard {metadata.version('diffshard')}, jax {metadata.version('jax')}\n"


def test_diff_prints_what_differs(tmp_path, capsys):
    plan, other = small_plan(), small_plan(memory_limit_bytes=5e9)
    plan.save(tmp_path / "a.json")
    other.save(tmp_path / "b.json")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out == f"{plan.diff(other)}\n"
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


def test_compare_compiles_saved_plans_of_one_mesh(tmp_path, monkeypatch, capsys):
    (tmp_path / "steps.py").write_text(
        "import jax.numpy as jnp\n"
        "def product(w, x):\n    return x @ w\n"
        "def arrays():\n    return jnp.ones((64, 64)), jnp.ones((64, 64))\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["steps:product", "--args", "steps:arrays"]
    assert main(["search", *words, "--mesh", "a=2", "--hardware", "h100", "-o", "a.json"]) == 0
    assert main(["search", *words, "--mesh", "a=4", "--hardware", "h100", "-o", "b.json"]) == 0
    capsys.readouterr()
    assert main(["compare", *words, "--target", "host", "a.json", "b.json"]) == 2
    assert "b.json is for the mesh {'a': 4}, others for {'a': 2}" in capsys.readouterr().err
    assert main(["compare", *words, "--target", "host", "a.json"]) == 0
    assert "a.json" in capsys.readouterr().out


def test_a_size_without_a_unit_is_asked_about(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["search", "a:b", "--args", "a:c", "--mesh", "a=2", "--hardware", "h100", "--memory-limit", "80"])
    lines = capsys.readouterr().err.splitlines()
    assert "'80' is that many bytes: did you mean 80GiB? 80B for bytes" in lines[-1]
    assert len(lines) <= 3  # a short usage, then the error


def test_names_in_files_reach_the_terminal_without_what_it_would_obey(tmp_path, capsys):
    red = "\x1b[31mred\x07"
    small_plan(function=red, solver=red, notes=(red,)).save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "status": red}))
    assert main(["show", str(tmp_path / "plan.json")]) == 1
    for text in capsys.readouterr():
        assert "\x1b" not in text
        assert r"\x1b[31mred\x07" in text


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


def test_progress_goes_out_as_plain_lines_and_the_last_is_never_lost(capsys):
    with show_progress("working", str) as progress:
        for i in range(100):
            progress(i / 10, 100.0 - i, 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "working"
    assert 2 <= len(lines) < 10
    assert lines[-1].endswith(" s, best 1.0, lower bound 0.5, gap 50.00%")


def test_plain_lines_say_only_what_changed_in_seconds_of_the_whole_search(capsys, monkeypatch):
    clock = itertools.count(10.0)
    monkeypatch.setattr("diffshard.command.arguments.time.perf_counter", lambda: next(clock))
    with show_progress("working", str) as progress:
        for seconds in (0.5, 0.7, 0.1, 0.2):  # of two problems, one after the other
            progress(seconds, 2.0, 1.0)
        progress(0.3, 2.0, 1.5)
    assert capsys.readouterr().err.splitlines() == [
        "working",
        "  1.0 s, best 2.0, lower bound 1.0, gap 50.00%",
        "  5.0 s, best 2.0, lower bound 1.5, gap 25.00%",
    ]


def test_python_dash_m_is_the_same_command():
    command = [sys.executable, "-m", "diffshard", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0
    assert "search" in found.stdout
    of_plugin = ("absl::InitializeLog", "cudart_stub")  # what jaxlib's plugin for GPUs says where there is none
    assert [line for line in found.stderr.splitlines() if not any(word in line for word in of_plugin)] == []
