"""Gradients that are reduced once, delayed gradients and offloaded residuals together: the results of one device."""

import jax
import numpy as np
import pytest

import diffshard
from cost.pipeline_schedules import graph_of
from cost.pipeline_times import joined_graph
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.stage_run import possible_overlap
from search_spaces.pipelines.replicas import replicated_step
from search_spaces.pipelines.residuals import can_be_offloaded, residuals_of, with_offloaded
from tests.diffshard.pipelines.small_pipeline import check_close, meshes
from tests.diffshard.pipelines.test_gradient_reductions import grouped, mlp_arguments, mlp_step


def offloaded(staged):
    """Returns a step that offloads all residuals that can be."""
    keys = [
        key
        for stage in range(staged.num_stages)
        for key in residuals_of(staged, stage)
        if can_be_offloaded(staged, key)
    ]
    assert keys
    return with_offloaded(staged, keys)


@pytest.mark.parametrize(("num_groups", "offloads"), [(2, False), (2, True), (1, True)])
def test_steps_that_overlap_reduce_gradients_once_and_offload_residuals(num_groups, offloads):
    step = diffshard.pipelines.delayed(mlp_step)
    (params, batch), _ = step.with_versions(*mlp_arguments(8, 32))
    staged, cut = grouped(step, (params, batch), 2, 4, num_groups)
    assert cut.parts.num_groups == num_groups
    staged = offloaded(staged) if offloads else staged
    execution = StagedExecution(staged, meshes([2, 2]), graph_of("2bw", 2, 4), lambda stage, key: None)
    batches = [jax.tree.map(lambda x, shift=shift: x + shift, batch) for shift in np.array([0.0, 0.5, 1.0], np.float32)]
    overlap, one_device, expected = possible_overlap(staged), jax.jit(step), params
    assert overlap != "none"
    flat = [cut.flat_arguments(jax.tree.leaves((params, batch))) for batch in batches]
    for batch, results in zip(batches, execution.steps(overlap, flat), strict=True):
        expected, told = one_device(expected, batch)
        check_close(cut.result(results), (expected, told))


@pytest.mark.parametrize("num_groups", [1, 2])
def test_replicas_offload_residuals_and_reduce_gradients_once(num_groups):
    args = mlp_arguments(8, 32)
    staged, cut = grouped(mlp_step, args, 2, 4, num_groups)
    joined = replicated_step([staged, staged], [3, 1])
    graph = joined_graph([graph_of("1f1b", 2, 3), graph_of("1f1b", 2, 1)])
    execution = StagedExecution(offloaded(joined), meshes([2, 2, 1, 1]), graph, lambda stage, key: None)
    results = execution(cut.flat_arguments(jax.tree.leaves(args)))
    check_close(cut.result(results), jax.jit(mlp_step)(*args))


@pytest.mark.parametrize("options", [{"schedules": ("2bw",)}, {"gradient_reductions": ("once",)}])
def test_what_a_search_does_not_combine_with_replicas_is_refused(options):
    with pytest.raises(ValueError, match=r"`Pipeline.max_replicas` must be 1 with the schedule '2bw', and where grad"):
        diffshard.Pipeline(max_replicas=2, **options)
