"""Every option of an experiment's command reaches what it is for; the work behind it is not done here."""

import json
import os
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from experiments import (
    bilevel,
    budgets,
    compute_prediction,
    demo,
    elastic,
    equal_results,
    iopddl,
    known_good,
    long_context,
    peers,
    plan_store,
    solvers,
    suspicious_gradients,
    suspicious_overhead,
    timeline,
    truth,
)
from experiments.layered import layered_problem
from experiments.zoo import __main__ as zoo
from tests.experiments.printed_tables import printed_rows

SOLVER = ["--solver", "greedy", "--time-limit", "3"]


class WasAskedForError(Exception):
    """Ends a command where its work would begin; has the arguments of the work."""


@pytest.fixture
def asked_for(monkeypatch):
    """Returns the arguments with which a command asks for its work."""

    def arguments_of(module, work, words):
        def ask(*args, **kwargs):
            raise WasAskedForError(args, kwargs)

        monkeypatch.setattr(module, work, ask)
        with pytest.raises(WasAskedForError) as asked:
            module.main(words)
        return asked.value.args

    return arguments_of


def test_options_of_plans_by_hand(asked_for):
    words = ["--models", "mlp", "--mesh", "4x2", "--hardware", "a100", "--memory-limit", "7e8"]
    (name, _, mesh), options = asked_for(peers, "compare", [*words, *SOLVER])
    assert (name, dict(mesh.shape)) == ("mlp", {"data": 4, "model": 2})
    assert options == {"hardware": "a100", "memory_limit_bytes": 7e8, "solver": "greedy", "time_limit_s": 3.0}


def test_options_of_known_good_plans(asked_for):
    (case, _), options = asked_for(known_good, "run", ["--cases", "2", *SOLVER])
    assert case is known_good.CASES[2]
    assert options == {"solver": "greedy", "time_limit_s": 3.0}


def test_options_of_predictions(asked_for):
    words = ["--target", "host", "--models", "gpt", "--meshes", "2x2x2", "--hardware", "dear"]
    (name, mesh, mesh_text, hardware), options = asked_for(truth, "check", [*words, *SOLVER])
    assert (name, mesh.devices.shape, mesh_text, hardware) == ("gpt", (2, 2, 2), "2x2x2", "dear")
    assert options == {"solver": "greedy", "time_limit_s": 3.0}


def test_options_of_predicted_computing(asked_for):
    words = ["--models", "tiny", "--plans", "found", "--time-limit", "3"]
    assert asked_for(compute_prediction, "compare", words) == (("tiny", "2x4", "found", 3.0), {})


def test_options_of_equal_results(asked_for, monkeypatch):
    monkeypatch.setattr(equal_results, "run_steps", lambda *_: (None, []))
    arguments, options = asked_for(equal_results, "check", ["--models", "mlp", "--meshes", "2x2", *SOLVER])
    assert arguments == ("mlp", "2x2", (None, []))
    assert options == {"solver": "greedy", "time_limit_s": 3.0}


def test_options_of_the_zoo(asked_for):
    words = ["--models", "lora", "--mesh", "8", "--devices", "slow", "--steps", "2", "--time-limit", "3"]
    assert asked_for(zoo, "run_models", words) == ((["lora"], "8", ["slow"], 2, 3.0), {})


def test_options_of_timelines(asked_for):
    words = ["--models", "decoder", "--meshes", "2x2", "--batch", "4", "--sizes", "small", "--target", "host"]
    words += ["--hardware", "achievable", "--time-limit", "3"]
    (setting, plan, time_limit_s), _ = asked_for(timeline, "time_plan", words)
    assert (setting.name, setting.batch, dict(setting.mesh.shape)) == ("decoder", 4, {"data": 2, "model": 2})
    assert setting.hardware == timeline.achievable(setting.mesh)
    assert (plan, time_limit_s) == ("found", 3.0)


def test_options_of_the_demonstration(asked_for, monkeypatch):
    monkeypatch.setattr(
        demo.diffshard, "search", lambda *_, **options: (_ for _ in ()).throw(WasAskedForError(options))
    )
    with pytest.raises(WasAskedForError) as asked:
        demo.main(["--layers", "1", "--width", "32", "--sequence", "16", "--batch", "8", "--steps", "1", *SOLVER])
    assert (asked.value.args[0]["solver"], asked.value.args[0]["time_limit_s"]) == ("greedy", 3.0)


def test_options_of_the_comparison_of_solvers(monkeypatch, capsys):
    monkeypatch.setitem(solvers.PROBLEMS, "mlp 4", lambda: layered_problem(0, 1))
    (run,) = solvers.main(["--problems", "mlp 4", "--solvers", "greedy", "--seconds", "0.5"])
    assert (run.problem, run.solver) == ("mlp 4", "greedy")
    printed = capsys.readouterr().out
    assert "Solvers at 0.5 s each" in printed
    assert [row[:3] for row in printed_rows(printed)] == [["mlp 4", "greedy", "1.0000"]]


@pytest.fixture
def instance_g(monkeypatch, tmp_path):
    (tmp_path / "G.json.gz").write_bytes(b"")
    monkeypatch.setattr(iopddl, "INSTANCES", tmp_path)


@pytest.mark.parametrize(("words", "table"), [([], "contest_table"), (["--ablation"], "ablation_table")])
def test_options_of_the_contest(asked_for, instance_g, words, table):
    words = [*words, "--instances", "G", "--seeds", "2", "--share", "0.5", "--jobs", "4", "--records", "runs"]
    found, how = asked_for(iopddl, table, words)
    assert (found[:5], how) == ((["G"], 2, 0.5, 4, Path("runs")), {})
    assert found[5:] in ((), ("run",))  # whose seconds limit a run: only the table of the contest can be asked


def test_generated_problems_of_all_sizes_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(iopddl, "_apart", lambda call, records: iopddl.scale(*call[1:]))
    iopddl.main(["--scaling", "--nodes", "40", "80", "--seconds", "0.5"])
    rows = printed_rows(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["40", "80"]
    for nodes, (_, _, processor_s, milliseconds, *_) in zip((40, 80), rows, strict=True):
        assert float(milliseconds) == pytest.approx(1e3 * float(processor_s) / nodes, abs=1e3 * 0.05 / nodes + 0.01)


def test_a_call_of_the_contest_is_one_line_of_json(capsys):
    iopddl.main(["--call", json.dumps(["scale", 40, 0.5])])
    assert json.loads(capsys.readouterr().out)["nodes"] == 40


def test_options_of_the_bilevel_tables(monkeypatch):
    asked = {}

    def keep(name):
        return lambda *args, **kwargs: asked.update({name: (args, kwargs)})

    for module in ("loss", "estimators", "relaxation", "initialisation", "overhead"):
        monkeypatch.setattr(getattr(bilevel, f"bilevel_{module}"), "main", keep(module))
    words = ["--seeds", "2", "--steps", "40", "--records", "runs", "--model", "experts"]
    for table in ("loss", "estimators", "overhead"):
        bilevel.main([table, *words, "--links", "fast", "--seconds", "2"])
    trainings = {"seeds": 2, "records": Path("runs")}
    (loss_setting, links), options = asked["loss"]
    assert (loss_setting.name, loss_setting.steps, links, options) == ("experts", 40, ["fast"], trainings)
    assert asked["estimators"] == ((loss_setting,), trainings)
    assert asked["overhead"] == ((loss_setting, 30), {})
    for table in ("relaxation", "initialisation"):
        bilevel.main([table, "--seeds", "2", "--seconds", "2"])
    assert asked["relaxation"] == ((False, 2, 200, 2.0), {})
    assert asked["initialisation"] == ((False, 2), {})


def test_options_of_changing_devices(asked_for):
    words = ["--models", "mlp", "--steps", "7", "--link-gb-per-s", "25"]
    (name, num_steps, link), _ = asked_for(budgets, "row_of", words)
    assert (name, num_steps, link.s_per_byte) == ("mlp", 7, pytest.approx(1 / 25e9))
    assert asked_for(budgets, "row_of", words[:4])[0] == ("mlp", 7, None)


def test_options_of_long_sequences(asked_for):
    words = ["--sequence", "64", "--batch", "2", "--mesh", "2x4", "--layers", "1", "--sizes", "small"]
    words += ["--target", "host", "--plans", "megatron", "--time-limit", "3"]
    (name, model, mesh, hardware, options), _ = asked_for(long_context, "row_of", words)
    assert (name, dict(mesh.shape)) == ("megatron", {"data": 2, "model": 4})
    assert hardware.name == "H100-80GB"
    assert {leaf.shape[0] for leaf in jax.tree.leaves(jax.eval_shape(model.make_batch, jax.random.key(0)))} == {2}
    assert (options.timeline, options.time_limit) == (True, 3.0)


def test_options_of_suspicious_gradients(monkeypatch):
    asked = []
    monkeypatch.setattr(suspicious_gradients, "rows_of", lambda *args: asked.append(args) or [])
    words = ["--tasks", "autoencoder", "--faults", "times -10", "--faulty", "2", "--steps", "9", "--seeds", "3"]
    assert suspicious_gradients.main(words) == 0
    assert asked == [("autoencoder", ["times -10"], [2], 9, 3)]
    asked.clear()
    assert suspicious_gradients.main([*words, "--held-out"]) == 0
    held_out = suspicious_gradients.HELD_OUT_FAULT
    assert asked == [
        (suspicious_gradients.HELD_OUT_TASK, ["times -10", held_out], [2], 9, 3),
        ("autoencoder", [held_out], [2], 9, 3),
    ]


def test_options_of_the_overhead_of_suspicion(monkeypatch):
    asked = []

    def measured(step, args, mesh, with_timeline):
        asked.append(([leaf.shape for leaf in args[1:]], dict(mesh.shape), with_timeline))
        return (1.0,) * 5

    monkeypatch.setattr(suspicious_overhead, "_measured", measured)
    monkeypatch.setattr(suspicious_overhead, "h100_mesh", lambda shape: AbstractMesh(shape, ("data", "model")))
    words = ["--mesh", "4x2", "--shares", "8", "--per-replica", "16", "--sequence", "32", "--width", "64"]
    for more in ([], ["--timeline"]):
        assert suspicious_overhead.main([*words, "--layers", "1", *more]) == 0
    mesh = {"data": 4, "model": 2}
    shapes = [[(64, 33)], [(64, 33), (2, 33)]]  # 16 sequences for each of 4 replicas, and an eighth of one's part
    assert asked == [(arguments, mesh, timeline) for timeline in (False, True) for arguments in shapes]


def test_options_of_a_start_with_a_store(asked_for):
    words = ["--layers", "3", "--quick"]
    assert asked_for(plan_store, "start", ["--start", "store", *words]) == ((3, "store", plan_store.SMALL), {})
    assert asked_for(plan_store, "tracing", ["--tracing", *words]) == ((3, plan_store.SMALL), {})
    assert asked_for(plan_store, "tracing", ["--tracing"]) == ((plan_store.LAYERS[0], plan_store.DECODER), {})


def test_options_of_interrupted_trainings(monkeypatch):
    asked = []

    class Recorded(elastic.Jobs):
        def run(self, settings, num_processes, directory=None):
            asked.append((self.devices_each, settings["until"], settings["save_interval_steps"], num_processes))
            return [[]]

    def interrupt(job, settings, num_processes, kill_after):
        asked.append((settings["until"], num_processes, kill_after))
        raise WasAskedForError

    monkeypatch.setattr(elastic, "Jobs", Recorded)
    monkeypatch.setattr(elastic, "interrupt", interrupt)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    words = ["--processes", "3", "--devices", "1", "--steps", "9", "--kill-after", "5", "--interval", "2"]
    with pytest.raises(WasAskedForError):
        elastic.main(words)
    assert asked == [(1, 9, 2, 3), (9, 3, 5)]
