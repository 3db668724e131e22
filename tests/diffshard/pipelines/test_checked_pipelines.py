"""Checks of pipelines: results held against one device, and programs of stages that a compiler judges."""

from typing import Any

import jax
import pytest

import diffshard
from diffshard.pipelines.execution import StagedExecution
from tests.diffshard.pipelines import scanned_models
from tests.diffshard.pipelines.small_mlp import mlp_arguments, mlp_step
from tests.diffshard.pipelines.small_pipeline import check_close
from tests.diffshard.pipelines.test_given_options import PIPELINE, search
from tests.diffshard.pipelines.test_pipelined_function import PIPELINE as TWO_STAGES
from tests.diffshard.pipelines.test_pipelined_function import leave


def test_the_first_results_are_held_against_one_device_also_those_of_several_stages(monkeypatch):
    args = scanned_models.arguments()
    leave(monkeypatch, 1, 3)
    step = search(scanned_models.train_step, TWO_STAGES, devices=4, check="numbers", donate_argnums=0)
    assert len(step.plan(*args).stages) > 1
    expected = jax.jit(scanned_models.train_step)(*args)
    found = step(*args)
    check_close(found, expected)
    again = step(found[0], args[1])  # donates parts of stages, and is not checked any more
    check_close(again, jax.jit(scanned_models.train_step)(expected[0], args[1]))


def test_a_wrong_number_is_an_error_that_names_the_result(monkeypatch):
    step, args = search(check="numbers"), mlp_arguments(1)
    run = StagedExecution.__call__

    def wrong(self, arrays):
        *results, loss = run(self, arrays)
        return [*results, loss * 1.01]

    monkeypatch.setattr(StagedExecution, "__call__", wrong)
    with pytest.raises(diffshard.NumbersError, match=r"`result\[1\]` is .* by `pipeline`, and .* by one device"):
        step(*args)
    monkeypatch.setattr(StagedExecution, "__call__", run)
    check_close(step(*args), jax.jit(mlp_step)(*args))


def test_an_applied_plan_is_checked_too(monkeypatch):
    step, args = search(), mlp_arguments(1)
    plan = step.plan(*args)
    check_close(plan.apply(mlp_step, step.options.cluster, check="numbers")(*args), jax.jit(mlp_step)(*args))
    with pytest.raises(ValueError, match='`check` must be "numbers" or None'):
        plan.apply(mlp_step, step.options.cluster, check="compile")  # pyright: ignore[reportArgumentType]


def test_a_cluster_without_devices_has_no_numbers():
    step = diffshard.search(mlp_step, devices=8, hardware="h100", pipeline=PIPELINE, check="numbers")
    with pytest.raises(ValueError, match=r'`check` "numbers" .* `pipeline` is only described'):
        step.plan(*mlp_arguments(1))


@pytest.mark.parametrize("check", ["shardy", "compile"])
def test_a_compiler_judges_the_programs_of_the_stages_one_by_one(check):
    args = mlp_arguments(1)
    target: dict[str, Any] = {"target": "host"} if check == "compile" else {}
    step = search(devices=4, check=check, **target)
    plan = step.plan(*args)
    assert any("stage_0_backward runs by `executor`" in note for note in plan.notes)
    if check == "compile":
        compared = plan.programs()["stage_0_backward"].comparison
        assert compared is not None
        assert {row.executor for row in compared.rows} == {"program", "constraints"}
        assert any("stage_0_backward: of 2 programs compiled for host" in note for note in plan.notes)
    check_close(step(*args), jax.jit(mlp_step)(*args))


def test_a_target_without_a_compiler_is_refused():
    with pytest.raises(ValueError, match='`target` is for `check="compile"`, not None'):
        search(target="host")
