"""A plan of a pipeline runs from its file, also in another process, and a search takes it as its start."""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

import diffshard
from diffshard.processes import Processes
from tests.diffshard.pipelines.small_pipeline import arguments, check_close, train_step
from tests.diffshard.pipelines.test_pipelined_function import leave, search

_RUN = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import diffshard
from diffshard.pipelines import search
from tests.diffshard.pipelines.small_pipeline import arguments, train_step

def refuse(*args, **kwargs):
    raise AssertionError("it is searched")

search._chosen = refuse
step = diffshard.PipelinePlan.load(sys.argv[1]).apply(train_step, jax.devices())
result = step(*arguments())
leaves = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
          for x in jax.tree.leaves(result)]
np.savez(sys.argv[2], *leaves)
print(len(step.plan(*arguments()).stages), "stages")
"""


@dataclasses.dataclass(frozen=True)
class Tesla:
    """A device of another kind than that of the plan."""

    id: int
    platform: str = "gpu"
    device_kind: str = "Tesla T4"
    process_index: int = 0


@pytest.fixture(scope="module")
def planned():
    """A pipelined step of three stages, and its plan."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave(monkeypatch, 1, 3)
        step = search(train_step)
        return step, step.plan(*arguments())


def refuse_to_search(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("it is searched")

    monkeypatch.setattr("diffshard.pipelines.search._chosen", refuse)
    monkeypatch.setattr("diffshard.pipelines.stage_plans.find_plan", refuse)
    monkeypatch.setattr("diffshard.pipelines.planned_pipeline.StageVariants.chosen", refuse)


def applied(plan, fn=train_step, devices=4):
    cluster = diffshard.Cluster.from_devices(jax.devices()[:devices], hardware="h100")
    return plan.apply(fn, cluster)


def test_another_process_runs_a_saved_plan_with_the_same_numbers(planned, tmp_path):
    step, plan = planned
    plan.save(tmp_path / "plan.json")
    paths = [str(tmp_path / "plan.json"), str(tmp_path / "results.npz")]
    run = subprocess.run([sys.executable, "-c", _RUN, *paths], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{len(plan.stages)} stages\n"
    with np.load(paths[1]) as saved:
        there = [saved[name] for name in saved.files]
    here = jax.tree.leaves(step(*arguments()))
    check_close(there, [jax.random.key_data(x) if x.dtype == "key<fry>" else x for x in here])


def test_a_plan_is_applied_without_a_search_and_gives_the_results_of_one_device(planned, tmp_path, monkeypatch):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    refuse_to_search(monkeypatch)
    step = applied(diffshard.PipelinePlan.load(tmp_path / "plan.json"))
    assert step.plan(*arguments()) == plan
    check_close(step(*arguments()), jax.jit(train_step)(*arguments()))


def test_the_plans_of_the_programs_are_plans_of_their_own(planned):
    _, plan = planned
    programs = plan.programs()
    stages = range(len(plan.stages))
    assert {f"stage_{i}_backward" for i in stages} <= set(programs)
    assert set(programs) <= {f"stage_{i}_{kind}" for i in stages for kind in ("forward", "backward")}
    for name, program in programs.items():
        assert dict(program.mesh_axes) == dict(plan.stages[int(name.split("_")[1])].mesh_axes)


def test_a_search_takes_a_plan_for_the_same_question_as_it_is(planned, monkeypatch):
    _, plan = planned
    refuse_to_search(monkeypatch)
    step = search(train_step, start=plan, time_limit_s=3.0)
    assert step.plan(*arguments()) == plan
    check_close(step(*arguments()), jax.jit(train_step)(*arguments()))
    with pytest.raises(AssertionError, match="it is searched"):
        search(train_step, start=plan, memory_limit_bytes=1e9).plan(*arguments())


def test_a_search_for_another_question_plans_the_stages_of_its_start_as_well(planned, monkeypatch):
    _, plan = planned  # of three devices; a search that is free to choose takes all four
    free = search(train_step, memory_limit_bytes=1e9).plan(*arguments())
    assert sum(len(stage.devices) for stage in free.stages) == 4
    monkeypatch.setattr(diffshard.pipelines.search, "_LEAST_GAIN", 1.0)  # nothing else is planned
    begun = search(train_step, memory_limit_bytes=1e9, start=plan).plan(*arguments())
    assert [(s.first_layer, s.mesh_axes, s.arguments) for s in begun.stages] == [
        (s.first_layer, s.mesh_axes, s.arguments) for s in plan.stages
    ]
    assert begun.lower_bound_s <= free.lower_bound_s * (1 + 1e-9)


def test_the_start_of_the_first_process_is_that_of_all(planned, monkeypatch):
    _, plan = planned
    sent = []

    def first(self, what, name, make, pack, unpack):
        made = make()
        sent.append((what, pack(made)))
        return made

    def other(self, what, name, make, pack, unpack):
        asked_for, packed = sent.pop(0)
        assert asked_for == what
        return unpack(packed)

    monkeypatch.setattr(diffshard.pipelines.search, "_MOST_PLANNED", 1)
    monkeypatch.setattr(diffshard.pipelines.search, "_LEAST_GAIN", -math.inf)  # the start, and one pipeline more
    monkeypatch.setattr(Processes, "_from_first", first)
    found = search(train_step, memory_limit_bytes=1e9, start=plan).plan(*arguments())
    monkeypatch.setattr(Processes, "_from_first", other)
    assert search(train_step, memory_limit_bytes=1e9).plan(*arguments()) == found
    assert not sent


def test_a_plan_without_its_last_decisions_is_refused_before_anything_is_searched(planned, monkeypatch):
    refuse_to_search(monkeypatch)
    for left in (1, 2):  # without the shardings of the stages, and without the plans of their programs
        plan = dataclasses.replace(planned[1], decisions=planned[1].decisions[:left])
        with pytest.raises(diffshard.PlanError, match="The decisions of the plan are not those of its stages"):
            applied(plan).plan(*arguments())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda plan: applied(plan, devices=2), "for 1 host of 4 x H100-80GB, and `devices` are 1 host of 2 x H100"),
        (lambda plan: plan.apply(train_step, jax.devices()[:2]), "`devices` are 1 host of 2 x H100"),
        (lambda plan: plan.apply(train_step, [Tesla(i) for i in range(4)]), "`devices` are 1 host of 4 x T4"),
        (lambda plan: plan.apply(train_step, jax.devices()[:4], hardware="a100"), "`devices` are 1 host of 4 x A100"),
        (
            lambda plan: applied(plan, functools.partial(train_step, remat=True)).plan(*arguments()),
            "the program that the function traces to was another one",
        ),
        (
            lambda plan: applied(plan).plan(arguments()[0], [x[:8] for x in arguments()[1]]),
            r"`batch\[0\]` was int32\[16,6\], not int32\[8,6\]",
        ),
        (
            lambda plan: applied(dataclasses.replace(plan, decisions=())).plan(*arguments()),
            "The plan can only be shown",
        ),
        (
            lambda plan: applied(dataclasses.replace(plan, decisions=plan.decisions[:-1])).plan(*arguments()),
            "The decisions of the plan are not those of its stages.* It does not decide to",
        ),
        (
            lambda plan: applied(dataclasses.replace(plan, decisions=plan.decisions[1:])).plan(*arguments()),
            "The plan decides to find the shardings of a pipeline's stages, where the function asks to choose",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(planned, make, message):
    with pytest.raises(diffshard.PlanError, match=message):
        make(planned[1])


def test_a_plan_of_a_step_with_static_arguments_is_applied(monkeypatch):
    def step(params, batch, is_scaled):
        loss, gradients = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean() * (2.0 if is_scaled else 1.0))(params)
        return params - 0.1 * gradients, loss

    leave(monkeypatch, 1, 1)
    args = jax.numpy.ones((8, 8)), jax.numpy.ones((8, 8)), True
    plan = search(step, static_argnums=2).plan(*args)
    again = applied(plan, step)
    check_close(again(*args), jax.jit(step, static_argnums=2)(*args))
    with pytest.raises(diffshard.PlanError, match="the program that the function traces to was another one"):
        again.plan(*args[:2], False)
    with pytest.raises(diffshard.PlanError, match="does not fit the function: `static_argnums`"):
        applied(plan, train_step)


def test_a_file_of_an_older_version_is_refused(planned, tmp_path):
    planned[1].save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**document, "version": 1}))
    with pytest.raises(diffshard.PlanError, match=r"has the plan version 1; this diffshard reads version 3\. Update"):
        diffshard.PipelinePlan.load(tmp_path / "plan.json")
