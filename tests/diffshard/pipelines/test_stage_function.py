"""The function by which a stage is planned has the memory that its programs take."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from cost.presets import preset
from diffshard.pipelines.microbatches import BatchArguments, trace_in_microbatches
from diffshard.pipelines.stage_function import StageFunction
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.pipelines.stage_keys import Label
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.pipelines.step_parts import step_parts
from tests.diffshard.pipelines.small_pipeline import arguments, even_cuts, train_step


@pytest.fixture(scope="module")
def staged():
    traced = trace_in_microbatches(train_step, 4, BatchArguments((1,), ()), arguments(), {})
    parts = step_parts(traced.function)
    return staged_step(parts, even_cuts(parts, 2))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_residuals_are_in_memory_until_the_backward_program_ends(staged, in_flight):
    function = StageFunction(staged, 1, in_flight, [None] * len(staged.outputs + staged.inputs))
    forward, backward = (staged.programs[Label(kind, 1)] for kind in ("forward", "backward"))
    received = [key for key in function.arguments.received if key in forward.reads and key in backward.reads]
    made = [key for key in forward.makes if key in backward.reads]
    assert set(function.residuals) == {*received, *made}
    assert made

    mesh = AbstractMesh((2,), ("x",))
    options = Options(fn=function, mesh=mesh, hardware=preset("h100", {"x": 2}), memory_limit_bytes=np.inf)
    traced = trace_function(options, function.shapes)
    function.weigh(traced.graph)
    end = max(vertex.position for vertex in traced.graph.vertices if function.is_each(vertex))
    lifetimes = space_of(options, traced).lifetimes
    arrays = [key for key in function.residuals if jax.numpy.issubdtype(staged.avals[key].dtype, jax.numpy.number)]
    named = [v for v in traced.graph.stored_until if traced.graph.values[v].shape]
    assert len(named) >= len([key for key in arrays if staged.avals[key].shape])
    assert all(lifetimes.is_written[value] and lifetimes.last_use[value] > end for value in named)
