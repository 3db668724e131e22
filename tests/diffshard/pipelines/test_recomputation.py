"""Stages may make residuals again instead of keeping them: with the same results, in the memory that is there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from cost.compute import equation_flops
from cost.pipeline_schedules import graph_of
from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.stage_search import STAGE_GAP
from search_spaces.pipelines.recomputed_programs import recomputed_stage, working_bytes
from search_spaces.pipelines.residuals import StageResiduals
from search_spaces.pipelines.stage_labels import Label
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.pipelines.step_parts import num_bytes
from tests.diffshard.pipelines import scanned_models, small_pipeline
from tests.diffshard.pipelines.small_mlp import mlp_arguments, mlp_step
from tests.diffshard.pipelines.small_pipeline import check_close, meshes


def seconds(equation):
    return 1e-12 * equation_flops(equation) + 1e-10 * sum(num_bytes(v.aval) for v in equation.outvars)


def in_two_stages(model, args):
    """Returns a step that is cut in the middle, and its two stages."""
    uncut = uncut_step(model.train_step, 4, BatchArguments((1,), ()), args, {})
    candidates = uncut.candidates()
    trips = [c for c in candidates if c.cut.trip]
    middle = candidates[len(candidates) // 2 - 8 : len(candidates) // 2 + 8]
    step = cut_step(uncut, [trips[2].cut if trips else min(middle, key=lambda c: c.bytes_sent).cut])
    return step, staged_step(step.parts, step.cuts)


@pytest.mark.parametrize("model", [scanned_models, small_pipeline])
def test_what_is_made_again_is_not_kept_and_results_stay(model):
    args = model.arguments()
    step, staged = in_two_stages(model, args)
    received = sum(num_bytes(staged.avals[k]) for k in staged.programs[Label("forward", 1)].reads if k in staged.makers)
    for stage in range(2):
        residuals = StageResiduals(staged, stage, seconds)
        choices = residuals.candidates()
        assert len(choices) > 4
        assert bool(residuals.scans) == (model is scanned_models)
        for choice in choices:
            changed = recomputed_stage(residuals, choice)
            forward, backward = changed.programs[Label("forward", stage)], changed.programs[Label("backward", stage)]
            kept = set(backward.reads) & set(forward.makes) - {a.part for a in backward.accumulations}
            left = sum(num_bytes(changed.avals[key]) for key in kept)
            assert choice.kept_bytes - received * stage <= left <= choice.kept_bytes
        staged = recomputed_stage(residuals, choices[len(choices) // 2 if stage else -1])
    execution = StagedExecution(staged, meshes((1, 1)), graph_of("1f1b", 2, 4), lambda stage, key: None)
    found = step.result(execution(step.flat_arguments(jax.tree.leaves(args))))
    execution.wait()
    check_close(found, jax.jit(model.train_step)(*args))


def test_layers_that_run_again_one_by_one_need_the_least_memory():
    step = uncut_step(mlp_step, 8, BatchArguments((1,), ()), mlp_arguments(8, 64), {})
    residuals = StageResiduals(staged_step(step.parts, []), 0, seconds)
    changed = [recomputed_stage(residuals, choice) for choice in residuals.candidates()]
    bytes_of = [working_bytes(one, one.programs[Label("backward", 0)]) for one in changed]
    whole, least = bytes_of[0], bytes_of[-1]  # keeps everything; keeps the inputs of the step alone
    assert min(bytes_of) < 0.75 * min(whole, least)  # 0.56 with JAX 0.10; 0.72 with 0.11


def test_a_stage_makes_again_what_its_memory_cannot_keep():
    args = mlp_arguments(8, 64)
    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    options = {"microbatches": (3, 8), "schedules": ("1f1b",), "max_stages": 2}
    keeping = diffshard.search(
        mlp_step, cluster, pipeline=diffshard.Pipeline(residuals=("keep",), **options), memory_limit_bytes=1.5e6
    )
    with pytest.raises(diffshard.InfeasibleError):
        keeping.plan(*args)
    pipelined = diffshard.search(mlp_step, cluster, pipeline=diffshard.Pipeline(**options), memory_limit_bytes=1.5e6)
    plan = pipelined.plan(*args)
    assert plan.lower_bound_s <= plan.step_s
    assert all(stage.end_s > 0 for stage in plan.stages)
    assert any("divided into: [3]" in note for note in plan.notes)
    again = [stage for stage in plan.stages if stage.recomputed_operations]
    assert again
    assert all(stage.peak_bytes <= 1.5e6 for stage in plan.stages)
    assert str(again[0].recomputed_operations) in str(plan)
    assert "Made again" in plan.html()
    check_close(pipelined(*args), jax.jit(mlp_step)(*args))


def test_more_memory_never_gives_a_slower_plan_and_no_lack_of_it_is_needed_to_make_again_what_is_cheap():
    width, examples = 256, 16384
    up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, 2 * width), (2 * width, width)))
    args = [{"up": up, "down": down}] * 3, jax.ShapeDtypeStruct((examples, width), jnp.float32)
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=1, hardware="h100")])

    def planned(residuals, limit):
        pipeline = diffshard.Pipeline(microbatches=4, schedules=("1f1b",), max_stages=1, residuals=residuals)
        return diffshard.search(mlp_step, cluster, pipeline=pipeline, memory_limit_bytes=limit * 1e6).plan(*args)

    plans = [planned(("keep", "recompute"), limit) for limit in (80, 100, 160, 400)]
    seconds = np.array([plan.step_s for plan in plans])
    assert np.all(seconds[1:] <= seconds[:-1] * (1 + STAGE_GAP))
    assert plans[-1].stages[0].recomputed_operations  # also where all would fit
    assert seconds[-1] < 0.9 * planned(("keep",), 400).step_s


@pytest.mark.parametrize("residuals", [(), ("recompute",), ("keep", "forget")])
def test_residuals_that_are_no_ways_are_refused(residuals):
    with pytest.raises(ValueError, match=r"`Pipeline.residuals` must (be some of|have \"keep\" among) .* not "):
        diffshard.Pipeline(residuals=residuals)
