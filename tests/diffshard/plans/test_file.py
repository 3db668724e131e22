"""Plans through JSON and back: numbers that JSON lacks, and names that look like them."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cost.base import CollectiveKind, Hardware, Link
from cost.lines import Line
from diffshard.base import PlanError
from diffshard.elastic import Budget
from diffshard.plans.file import from_json, to_json
from diffshard.plans.sections import MemoryProfile, PredictedComputing
from diffshard.sharding_search.plan import Plan
from tests.diffshard.plans.small_files import budget
from tests.diffshard.plans.small_plan import small_plan


def _through_json(plan):
    return from_json(json.loads(json.dumps(to_json(plan), allow_nan=False)), "plan.json", Plan)


def test_names_that_look_like_numbers_stay_names():
    plan = small_plan()
    arguments = (
        dataclasses.replace(plan.arguments[0], path="nan"),
        dataclasses.replace(plan.arguments[1], path="inf"),
        *plan.arguments[2:],
    )
    operations = (dataclasses.replace(plan.operations[0], scope="-inf", source="nan"), *plan.operations[1:])
    named = {"function": "nan", "notes": ("inf",), "parameters": ("nan", "inf", "batch")}
    plan = dataclasses.replace(plan, arguments=arguments, operations=operations, **named)
    assert _through_json(plan) == plan


def test_axes_that_look_like_numbers_stay_axes():
    link = Link(0.0, 1e-6)
    hardware = Hardware("inf", 1e9, 1e9, 4096.0, {"inf": link, "nan": link})
    plan = small_plan(mesh_axes={"inf": 2, "nan": 4}, hardware=hardware, arguments=(), outputs=(), operations=())
    spec = ("inf",), ("nan",)
    argument = dataclasses.replace(small_plan().arguments[0], spec=spec, next_best_spec=None)
    made = dataclasses.replace(small_plan().operations[0], unreduced=(spec,), results=(spec,), value_specs=(spec,))
    collective = dataclasses.replace(small_plan().collectives[0], axis="nan", operation=0, made_by=0, read_by=None)
    memory = MemoryProfile(((-1, plan.peak_bytes),), ())
    plan = dataclasses.replace(
        plan, arguments=(argument,), operations=(made,), collectives=(collective,), compute_s=0.0,
        lower_bound_s=0.0, memory=memory, computing=PredictedComputing(0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip
    assert _through_json(plan) == plan


def test_infinite_numbers_come_back_wherever_numbers_are():
    plan = small_plan()
    plan = dataclasses.replace(
        plan,
        hardware=Hardware("free", {"float32": math.inf}, math.inf, math.inf, plan.hardware.links),
        memory_limit_bytes=math.inf,
        lower_bound_s=-math.inf,
        arguments=(dataclasses.replace(plan.arguments[0], next_best_s=math.inf), *plan.arguments[1:]),
        operations=(dataclasses.replace(plan.operations[0], next_best_s=math.inf), *plan.operations[1:]),
        history=((0.1, math.inf, -math.inf), (0.2, 0.01, -math.inf)),
    )
    assert _through_json(plan) == plan
    one_rate = dataclasses.replace(plan, hardware=Hardware("free", math.inf, 1e9, 1e9, plan.hardware.links))
    assert _through_json(one_rate).hardware == one_rate.hardware


def test_a_saved_file_is_read_back(tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 4}, "m", 8])
def test_what_is_no_mesh_is_refused(mesh, tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    for use in (lambda: Plan.load(tmp_path / "plan.json", mesh), lambda: plan.apply(print, mesh)):
        with pytest.raises(TypeError, match=f"`mesh` must be a jax.sharding.Mesh or an AbstractMesh, not {mesh!r}"):
            use()


@pytest.mark.parametrize("path", [3, None])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(TypeError, match=f"`path` must be the path of a file, such as 'plan.json', not {path}"):
        small_plan().save(path)


def test_lines_by_kind_are_saved_and_links_without_a_latency_are_damage():
    lines: dict[CollectiveKind, tuple[Line, ...]] = {
        "all_to_all": (Line(1e-6, 4e-10), Line(1e-5, 1e-10)),
        "reduce_scatter": (Line(1e-6, 2e-10),),
    }
    hardware = Hardware("own rates", 1e9, 1e9, 4096.0, {a: Link(1e-6, 1e-10, lines) for a in ("data", "model")})
    plan = small_plan(hardware=hardware)
    assert _through_json(plan) == plan
    document = json.loads(json.dumps(to_json(plan)))
    del document["hardware"]["links"]["data"]["latency_s"]
    with pytest.raises(PlanError, match="damaged"):
        from_json(document, "plan.json", Plan)


@pytest.mark.parametrize("version", [0, 3, 5, "4", None])
def test_other_versions_are_refused(version):
    with pytest.raises(PlanError, match=r"reads version 4\. Update diffshard, or make the plan again"):
        from_json(to_json(small_plan()) | {"version": version}, "plan.json", Plan)


def test_a_budget_with_a_plan_of_another_version_is_not_called_damaged():
    document = Budget._file.to_json(budget())
    document["chosen"]["plans"][0]["version"] = 3
    with pytest.raises(PlanError, match=r"`b\.json` was made by another version of diffshard: .* the plan version 3; "):
        Budget._file.from_json(document, "b.json", Budget)


@pytest.mark.parametrize(
    ("field", "value"),
    [("search_s", "zzz"), ("search_s", None), ("gap", 0.1), ("compute_s", "1"), ("mesh_axes", "zzz"),
     ("mesh_axes", {"x": "4"}),     ("static_argnums", "zzz"), ("memory_limit_bytes", "zzz"), ("function", 3)],
)  # fmt: skip
def test_fields_of_the_wrong_type_are_damage(field, value):
    found = to_json(small_plan())
    found[field] = value
    with pytest.raises(PlanError, match="damaged"):
        from_json(found, "plan.json", Plan)


def test_a_memory_profile_is_read_back():
    plan = small_plan()
    assert _through_json(plan) == plan


@pytest.mark.parametrize(
    ("changes", "at_peak", "message"),
    [
        ([[0, 1024.0]], [], "must ascend from -1"),
        ([[-1, 0.0], [5, 1024.0], [4, 0.0]], [], "must ascend from -1"),
        ([[-1, 0.0], [8, 1024.0]], [], "to at most 7"),
        ([], [], "must ascend from -1"),
        ([[-1, 1023.0], [4, 2048.0]], [], "have the peak 2,048, where `peak_bytes` is 1,024"),
        ([[-1, 1024.0]], [{"operation": 8, "result": 0, "num_bytes": 1.0}], "none of the 8 operations makes"),
        ([[-1, 1024.0]], [{"operation": 4, "result": 1, "num_bytes": 1.0}], "none of the 8 operations makes"),
        ([[-1, 1024.0]], [{"operation": 4, "result": 0}], "lacks `num_bytes`"),
    ],
)
def test_a_profile_that_does_not_fit_its_plan_is_damage(changes, at_peak, message):
    found = to_json(small_plan()) | {"memory": {"changes": changes, "at_peak": at_peak}}
    with pytest.raises(PlanError, match=message):
        from_json(found, "plan.json", Plan)


_PRINTED = """
import json
from diffshard.plans.file import to_json
from tests.diffshard.plans.small_plan import small_plan
print(json.dumps(to_json(small_plan())))
"""


def test_equal_plans_are_equal_files_in_every_process():
    files = {
        subprocess.run(
            [sys.executable, "-c", _PRINTED],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(files) == 1
