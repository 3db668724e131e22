"""Residuals that wait in memory of the host: the results of one device, and less on the devices."""

import jax
import pytest

from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.stage_calls import HOST_MEMORY
from diffshard.pipelines.stage_memory import stage_memory
from search_spaces.pipelines.offloading import can_be_offloaded, residuals_of, with_offloaded
from search_spaces.pipelines.stage_keys import Label
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
