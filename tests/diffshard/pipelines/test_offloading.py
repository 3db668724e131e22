"""Residuals that wait in memory of the host: the results of one device, and less on the devices."""

import dataclasses

import jax
import pytest

import diffshard
from cost.base import Link
from diffshard.host_memory import HOST_MEMORY
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.plans.consistency import from_json, to_json
from experiments.pipelines.stage_memory import stage_memory
from search_spaces.pipelines.residuals import can_be_offloaded, residuals_of, with_offloaded
from search_spaces.pipelines.stage_labels import Label
from tests.diffshard.pipelines.small_mlp import mlp_arguments, mlp_step
from tests.diffshard.pipelines.small_pipeline import arguments, by_example, check_close, small_execution, train_step


@pytest.fixture(scope="module")
def kept():
    """A step in two stages that keep their residuals, of which the first has two micro-batches in flight."""
    return small_execution(train_step, (2, 2), 4, "1f1b", by_example)


def offloaded_execution(kept, every):
    staged, meshes = kept.calls.staged, kept.calls.meshes
    keys = [k for stage in range(2) for k in residuals_of(staged, stage) if can_be_offloaded(staged, k)]
    staged = with_offloaded(staged, keys[::every])
    return StagedExecution(staged, meshes, kept.graph, lambda stage, key: by_example(meshes[stage], staged.avals[key]))


@pytest.mark.parametrize("every", [1, 2])
def test_offloaded_residuals_give_the_results_of_one_device_and_take_the_predicted_memory(kept, every):
    kept, result = kept
    args = arguments()
    execution = offloaded_execution(kept, every)
    found = jax.tree.unflatten(result, execution(jax.tree.leaves(args)))
    execution.wait()
    check_close(found, jax.jit(train_step)(*args))
    before, after = (stage_memory(e.calls, e.graph)[0] for e in (kept, execution))
    assert after.host_bytes > 0
    assert before.host_bytes == 0
    assert before.microbatch_bytes - after.microbatch_bytes == pytest.approx(after.host_bytes, rel=0.05)
    # Two micro-batches are in flight, and a backward program has the residuals of its own on the devices.
    assert before.peak_bytes - after.peak_bytes == pytest.approx(after.host_bytes / 2, rel=0.05)


def test_offloaded_residuals_are_on_the_host_between_the_programs(kept):
    execution = offloaded_execution(kept[0], 1)
    forward = execution.calls.calls[Label("forward", 0)]
    left = {leaving.key: leaving.sharding.memory_kind for leaving in forward.leaves if leaving.is_kept}
    assert execution.calls.staged.offloaded & set(left)
    for key, kind in left.items():
        assert (kind == HOST_MEMORY) == (key in execution.calls.staged.offloaded)


def test_what_is_no_residual_cannot_be_offloaded(kept):
    staged = kept[0].calls.staged
    with pytest.raises(ValueError, match="no backward program reads"):
        with_offloaded(staged, [staged.inputs[0]])


def mlp_search(residuals, memory_limit_bytes):
    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="gh200")
    pipeline = diffshard.Pipeline(microbatches=4, schedules=("gpipe",), max_stages=2, residuals=residuals)
    return diffshard.search(mlp_step, cluster, pipeline=pipeline, memory_limit_bytes=memory_limit_bytes)


def test_a_stage_offloads_what_its_memory_cannot_keep():
    args, limit = mlp_arguments(), 1e6
    with pytest.raises(diffshard.InfeasibleError):
        mlp_search(("keep",), limit).plan(*args)
    offloading = mlp_search(("keep", "offload"), limit)
    plan = offloading.plan(*args)
    away = [stage for stage in plan.stages if stage.num_offloaded]
    assert away
    assert plan.lower_bound_s < plan.step_s
    assert all(stage.peak_bytes <= limit for stage in plan.stages)
    rate = diffshard.preset("gh200", {}).host_memory_bytes_per_s
    assert rate is not None
    assert [stage.offload_s for stage in away] == pytest.approx([s.offloaded_bytes / rate for s in away])
    assert "In memory of the host" in str(plan)
    assert "In memory of the host" in plan.html()
    assert from_json(to_json(plan), "plan.json", diffshard.PipelinePlan) == plan
    check_close(offloading(*args), jax.jit(mlp_step)(*args))


def test_hardware_without_a_known_rate_to_its_host_is_refused():
    device = dataclasses.replace(diffshard.preset("gh200", {}), name="other", host_memory_bytes_per_s=None)
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=2, hardware=device)], inside=Link(1e-6, 1e-11))
    pipeline = diffshard.Pipeline(residuals=("keep", "offload"))
    with pytest.raises(ValueError, match="'other' does not say how fast its devices copy to memory of their host"):
        diffshard.search(mlp_step, cluster, pipeline=pipeline)
