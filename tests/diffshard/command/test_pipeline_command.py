"""`diffshard search --pipeline` from its words to its files, and `diffshard show` of what it wrote."""

import sys

import pytest

from diffshard.command.line import main
from diffshard.pipelines.plan import PipelinePlan

MODULE = """
import jax, jax.numpy as jnp

def step(w, x):
    loss = lambda w: jnp.square(jnp.tanh(x @ w["a"]) @ w["b"]).mean()
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

def args():
    return {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 8))}, jnp.ones((16, 8))

def powered(w, power, x):
    assert type(power) is int
    return step(w, x**power)

def static_args():
    w, x = args()
    return w, 2, x
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "user_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("user_module", None)


def search(*more):
    return main(["search", "user_module:step", "--args", "user_module:args", *more])


def test_a_pipeline_is_searched_saved_and_shown(module, capsys):
    cluster = ("--cluster", "1x2xa100,1x1xt4", "--between", "10e-6,12.5e9", "--donate", "0")
    files = ("-o", "plan.json", "--html", "plan.html")
    limits = ("--microbatches", "2,4", "--schedules", "1f1b", "--max-stages", "2", "--batch", "x")
    assert search("--pipeline", *cluster, *limits, *files) == 0
    text = capsys.readouterr().out
    plan = PipelinePlan.load("plan.json")
    assert text == f"{plan}\n"
    assert {(count, schedule) for count, schedule, _ in plan.tried} == {(2, "1f1b"), (4, "1f1b")}
    assert (module / "plan.html").read_text() == plan.html()
    assert main(["show", "plan.json"]) == 0
    assert capsys.readouterr().out == text
    assert main(["show", "plan.json", "--html", "shown.html"]) == 0
    assert (module / "shown.html").read_text() == plan.html()


def test_a_pipeline_takes_static_arguments_and_is_kept_in_a_folder(module, capsys):
    words = ("search", "user_module:powered", "--args", "user_module:static_args", "--static", "power", "--batch", "x")
    limits = ("--microbatches", "2", "--schedules", "1f1b", "--max-stages", "1", "--cache", "plans")
    assert main([*words, "--pipeline", "--cluster", "1x2xa100", *limits]) == 0
    assert "taken from a store" not in capsys.readouterr().out
    assert main([*words, "--pipeline", "--cluster", "1x2xa100", *limits]) == 0
    assert "taken from a store" in capsys.readouterr().out


def test_a_cluster_without_a_pipeline_has_its_mesh_found(module, capsys):
    assert search("--cluster", "1x2xh100") == 0
    assert "Plan of step on 2 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pipeline", "--mesh", "data=2", "--hardware", "h100"), "give --cluster or --devices in place of --mesh"),
        (("--cluster", "2x8xa100", "--hardware", "h100"), "give --hardware, or --cluster"),
        (("--devices", "2"), "give --hardware, or --cluster"),
        (("--pipeline", "--cluster", "2x8xa100,2x4xt4"), "--between LATENCY_S,BYTES_PER_S must be given"),
        (("--between", "1e-6,1e9", "--devices", "2", "--hardware", "h100"), "--between is for --cluster"),
        (("--cluster", "2x8xa100", "--max-stages", "3"), "--max-stages is for --pipeline"),
        (("--cluster", "1x2xa100", "--pipeline", "--static", "1"), "share the argument 'x'"),
        (
            ("--cluster", "1x2xa100", "--pipeline", "--executor", "propagation"),
            "cannot be given together with `--execut",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(module, capsys, words, message):
    assert search(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cluster", "2x8"), "is not HOSTSxDEVICESxHARDWARE"),
        (("--cluster", "0x8xa100"), "`Hosts.count` must be a whole number"),
        (("--cluster", "2x8xa1000"), "`hardware` 'a1000' is unknown"),
        (("--cluster", "2x8xa100", "--between", "3"), "is not a latency and bytes per second"),
        (("--cluster", "2x8xa100", "--microbatches", "4,0"), "'0' is not a whole number, 1 or more"),
        (("--cluster", "2x8xa100", "--schedules", "zb-h9"), "'zb-h9' is none of gpipe"),
    ],
)
def test_wrong_words_are_refused(module, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        search("--pipeline", *words)
    assert message in " ".join(capsys.readouterr().err.split())
