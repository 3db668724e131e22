"""Plans of pipelines are saved and read back, and damaged files are refused."""

import json
import os
from dataclasses import replace

import pytest

import diffshard
from diffshard.command.line import main
from diffshard.pipelines.plans.consistency import from_json, to_json
from experiments.fuzzing.damage import Damage
from tests.diffshard.pipelines.small_pipeline_plan import small_pipeline_plan


def test_a_saved_plan_is_read_back(tmp_path):
    plan = small_pipeline_plan()
    plan.save(tmp_path / "plan.json")
    assert diffshard.PipelinePlan.load(tmp_path / "plan.json") == plan
    assert os.listdir(tmp_path) == ["plan.json"]


def test_other_kinds_of_plans_say_what_loads_them(tmp_path):
    small_pipeline_plan().save(tmp_path / "plan.json")
    with pytest.raises(diffshard.PlanError, match=r"load it with `diffshard.PipelinePlan.load`"):
        diffshard.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("path", [0, None, b"plan.json", ["plan.json"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(TypeError, match=r"`path` must be the path of a file, such as 'plan\.json', not"):
        small_pipeline_plan().save(path)
    for kind in (diffshard.PipelinePlan, diffshard.Plan):
        with pytest.raises(TypeError, match=r"`path` must be the path of a file, such as 'plan\.json', not"):
            kind.load(path)


def test_newer_versions_and_other_files_are_refused(tmp_path):
    document = to_json(small_pipeline_plan())
    for values, message in (
        (json.dumps({**document, "version": 99}), "has the plan version 99"),
        ("{}", "is not a plan file of diffshard"),
        ("}", "it is not JSON"),
    ):
        (tmp_path / "plan.json").write_text(values)
        with pytest.raises(diffshard.PlanError, match=message):
            diffshard.PipelinePlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("step_s",), 0.07, "`step_s` is 0.07, where the other numbers give 0.068"),
        (("step_s",), -1.0, "`step_s` must be a finite number"),
        (("bubble",), 0.2, "`bubble` is 0.2"),
        (("lower_bound_s",), 0.2, "`lower_bound_s` is 0.2, more than"),
        (("num_layers",), 13, "`stages` end with layer 11, where `num_layers` is 13"),
        (("num_devices",), 7, "different numbers below `num_devices`, 7"),
        (("num_microbatches",), 10**9, "`num_microbatches` must be from 1 to"),
        (("schedule",), "zb-h1", r"`in_flight` of the stages must be \[3, 3, 3\]"),
        (("schedule",), "gpipe", "`in_flight` of the stages must be"),
        (("schedule",), "none", "`schedule` is 'none', not one of"),
        (("stages",), [], "`stages` must be from 1 to"),
        (("stages", 1, "first_layer"), 5, "must begin with layer 4"),
        (("stages", 1, "last_layer"), 3, "must begin with layer 4 and end with a later one"),
        (("stages", 1, "devices"), [3, 4], "different numbers"),
        (("stages", 1, "devices"), [4], "not axes of a mesh of 1 devices"),
        (("stages", 1, "in_flight"), 5, "`in_flight` of the stages must be"),
        (("stages", 1, "peak_bytes"), 2**40, "more than `memory_limit_bytes`"),
        (("stages", 1, "memory_limit_bytes"), "nan", "`stages\\[1\\].memory_limit_bytes` must be a positive number"),
        (("stages", 1, "forward_s"), "inf", "`stages\\[1\\].forward_s` must be a finite number"),
        (("stages", 2, "send_forward_s"), 1.0, "must send nothing"),
        (("stages", 0, "arguments", 0, "spec"), [["z"], []], "no axis of `mesh_axes`"),
        (("stages", 0, "arguments", 0, "dtype"), "float99", "which is no type of arrays"),
        (("num_groups",), 0, "`num_groups` must be a whole number, 1 or more, not 0"),
        (("tried", 0, 2), "nan", "`tried\\[0\\]\\[2\\]` must be a number, zero or more, not nan"),
        (("tried", 1, 1), "1f1b", "twice"),
    ],
)
def test_what_cannot_be_is_refused(place, value, message):
    document = json.loads(json.dumps(to_json(small_pipeline_plan())))
    entry = document
    for key in place[:-1]:
        entry = entry[key]
    entry[place[-1]] = value
    with pytest.raises(diffshard.PlanError, match=message):
        from_json(document, "plan.json", diffshard.PipelinePlan)


def test_random_damage_is_refused_or_leaves_a_plan_that_can_be_shown():
    damage = Damage(json.loads(json.dumps(to_json(small_pipeline_plan()))))
    refused = 0
    for seed in range(200):
        try:
            plan = from_json(damage.document_of(seed), "plan.json", diffshard.PipelinePlan)
        except diffshard.PlanError:
            refused += 1
            continue
        assert str(plan)
        assert plan.html()
    assert refused > 100


def test_plans_are_compared_by_what_they_decide_and_predict(tmp_path, capsys):
    plan = small_pipeline_plan()
    slower = replace(plan.stages[1], in_flight=1, forward_s=5e-3)
    other = replace(plan, schedule="gpipe", stages=(plan.stages[0], slower, *plan.stages[2:]), search_s=99.0, tried=())
    assert plan.diff(plan) == ""
    assert plan.diff(other).splitlines() == [
        "schedule: 1f1b → gpipe",
        "stages[1].forward_s: 0.004 → 0.005",
        "stages[1].in_flight: 2 → 1",
    ]
    with pytest.raises(diffshard.PlanError, match="can be compared with its own kind, not a str"):
        plan.diff("plan.json")  # pyright: ignore[reportArgumentType]
    for name, one in (("a.json", plan), ("b.json", replace(plan, function="other_step"))):
        one.save(tmp_path / name)
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main(["diff", *paths]) == 0
    assert main(["diff", paths[0], paths[0]]) == 0
    out = capsys.readouterr().out
    assert out == f"function: {plan.function} → other_step\nBoth plans are the same, but for how they were found.\n"
