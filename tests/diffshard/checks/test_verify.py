"""Predictions beside Shardy's collectives and XLA's program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from diffshard.checks.hlo import MemoryPlan
from diffshard.checks.verify import ComparedMemory, verify
from diffshard.plans.base import PredictedCollective
from tests.diffshard.checks.megatron_block import SHAPES, block_mesh, parallel_block


@pytest.fixture(scope="module")
def mesh():
    return block_mesh()


def test_three_witnesses_agree_on_a_megatron_block(mesh):
    lowered = parallel_block(mesh).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES))
    predicted = [
        PredictedCollective("all_reduce", "model", 8 * 32 * 4.0, 1.0, 1e-3, 0, 1e-3, 0, None),
        PredictedCollective("all_gather", "data", 100.0, 2.0, 1e-3, 0, 1e-3, 0, None),
    ]
    found = verify(lowered, mesh.shape, predicted, 5000.0)
    right, wrong = [row for row in found.collectives if row.kind == "all_reduce"], found.collectives[0]
    assert [(row.axis, row.predicted, row.shardy, row.compiled, row.error) for row in right] == [
        ("model", 1024.0, 1024.0, 1024.0, 0.0)
    ]
    assert (wrong.kind, wrong.axis, wrong.predicted, wrong.compiled, wrong.error) == (
        "all_gather",
        "data",
        200.0,
        0.0,
        np.inf,
    )
    sent = {row.axis: (row.predicted, row.compiled) for row in found.sent}
    assert sent == {"model": (2 * 1024 * 3 / 4, 2 * 1024 * 3 / 4), "data": (100.0, 0.0)}
    assert found.num_collectives == 1
    assert found.memory is not None
    assert found.memory.plan.arguments == (32 * 16 + 16 * 32 + 8 * 32) * 4
    assert found.memory.plan.outputs == 8 * 32 * 4
    assert found.memory.predicted == 5000.0
    table = str(found)
    assert "all_reduce" in table
    assert "+0.0%" in table
    assert "peak memory" in table


def test_outputs_over_donated_arguments_count_once():
    memory = ComparedMemory(150.0, MemoryPlan(arguments=60, outputs=40, aliased=30, temporaries=30))
    assert memory.compiled == 100
    assert memory.error == 0.5


def test_a_permutation_that_moves_nothing_is_no_row(mesh):
    def local(x):
        return jax.lax.ppermute(x, "data", [(0, 0), (1, 1)])

    function = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    found = verify(jax.jit(function).lower(jax.ShapeDtypeStruct((16, 32), jnp.float32)), mesh.shape, [], 0.0)
    assert not found.collectives
    assert not found.sent


def test_a_collective_in_a_loop_counts_as_often_as_it_runs(mesh):
    def local(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(jax.lax.psum(c, "model")), None), x, length=3)[0]

    function = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    predicted = [PredictedCollective("all_reduce", "model", 8 * 32 * 4.0, 3.0, 1e-3, 0, 1e-3, 0, None)]
    found = verify(jax.jit(function).lower(jax.ShapeDtypeStruct((16, 32), jnp.float32)), mesh.shape, predicted, 0.0)
    assert found.num_collectives == 3
    (row,) = found.collectives
    assert (row.predicted, row.shardy, row.compiled) == (3072.0, 3072.0, 3072.0)
