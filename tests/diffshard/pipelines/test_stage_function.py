"""The function by which a stage is planned has the memory that its programs take."""

from dataclasses import replace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from cost.presets import preset
from diffshard.pipelines import stage_function
from diffshard.pipelines.microbatches import BatchArguments, divided_call, traced_call
from diffshard.pipelines.stage_function import StageFunction, weigh
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.pipelines.stage_labels import NUMBER, Label
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.pipelines.step_parts import step_parts
from tests.diffshard.pipelines.small_pipeline import arguments, check_close, even_cuts, train_step


@pytest.fixture(scope="module")
def staged():
    traced = traced_call(train_step, 4, BatchArguments((1,), ()), arguments(), {})
    parts = step_parts(divided_call(traced, 4, estimates_sums=True))
    return staged_step(parts, even_cuts(parts, 2))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_residuals_are_in_memory_until_the_backward_program_ends(staged, in_flight):
    function = StageFunction(staged, 1, in_flight)
    forward, backward = (staged.programs[Label(kind, 1)] for kind in ("forward", "backward"))
    received = [key for key in function.received if key in forward.reads and key in backward.reads]
    made = [key for key in forward.makes if key in backward.reads]
    assert set(function.residuals) == {*received, *made}
    assert made

    mesh = AbstractMesh((2,), ("x",))
    options = Options(fn=function, mesh=mesh, hardware=preset("h100", {"x": 2}), memory_limit_bytes=np.inf)
    traced = trace_function(options, function.shapes)
    weigh(function, traced.graph, mesh)
    end = max(vertex.position for vertex in traced.graph.vertices if function.is_each(vertex))
    lifetimes = space_of(options, traced).lifetimes
    arrays = {key for key in function.residuals if is_array(staged, key)}
    kept = [v for v in traced.graph.stored_until if lifetimes.is_written[v] and lifetimes.last_use[v] > end]
    given_up = len(function.sent)  # a result takes the memory of a residual of its type, if there is one
    assert len(kept) >= len(arrays) - given_up > 0
    assert all(lifetimes.is_written[value] for value in traced.graph.stored_until)


def test_the_function_makes_a_step_of_one_micro_batch_and_what_the_other_made():
    traced = traced_call(train_step, 2, BatchArguments((1,), ()), arguments(), {})
    parts = step_parts(divided_call(traced, 2, estimates_sums=True), traced.feedback)
    staged = staged_step(parts, [])
    num_kept = len(jax.tree.leaves(arguments()[0]))  # the state, which the first results replace
    function = StageFunction(staged, 0, 1)
    array_of = dict(zip(staged.inputs, jax.tree.leaves(arguments()), strict=True))
    other = {**array_of, NUMBER: jnp.int32(1)}
    for kind in ("begin", "forward", "backward"):
        program = staged.programs[Label(kind, 0)]
        made = jax.jit(jax.extend.core.jaxpr_as_fun(program.program))(*(other[key] for key in program.reads))
        other.update(zip(program.makes, made, strict=True))
    kept, read = ([array_of[k] for k in keys] for keys in (function.kept, function.read))
    assert not function.received
    replaced, totals, _, _ = jax.jit(function)(kept, [other[a.part] for a in function.sums], [], read, [])
    expected = jax.tree.leaves(jax.jit(train_step)(*arguments()))
    positions = [staged.inputs.index(key) for key in function.kept]
    assert positions == list(range(num_kept))
    check_close(replaced, expected[:num_kept])
    assert [a.state for a in function.sums].count("max") == 1  # the largest logit
    assert all(total.shape == staged.avals[a.total].shape for total, a in zip(totals, function.sums, strict=True))


def is_array(staged, key):
    return bool(staged.avals[key].shape) and jax.numpy.issubdtype(staged.avals[key].dtype, jax.numpy.number)


def is_from(staged, stage, key):
    return staged.makers.get(key) == Label("forward", stage)


@jax.custom_vjp
def scaled_gradient(h, scale):
    """Returns h; its gradient is scaled."""
    return h


scaled_gradient.defvjp(lambda h, scale: (h, scale), lambda scale, gradient: (gradient * scale, None))


@pytest.fixture(scope="module")
def staged_with_early_scale():
    """Two stages; of what the first one makes, only the backward program of the second one reads the scale."""

    def step(weights, batch):
        def loss(weights):
            h = batch @ weights[0]
            scale = jax.lax.stop_gradient(jnp.tanh(h))
            return jnp.sum((scaled_gradient(h @ weights[1], scale) @ weights[2]) ** 2)

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    weights = [jax.ShapeDtypeStruct((16, 16), "float32")] * 3
    batch = jax.ShapeDtypeStruct((64, 16), "float32")
    traced = traced_call(step, 4, BatchArguments((1,), ()), (weights, batch), {})
    parts = step_parts(divided_call(traced, 4, estimates_sums=True))
    names = [e.primitive.name for e in parts.each.program.jaxpr.eqns]
    staged = staged_step(parts, [names.index("tanh") + 1])
    forward, backward = (staged.programs[Label(kind, 1)] for kind in ("forward", "backward"))
    equations = [e for e in forward.program.jaxpr.eqns if e.primitive.name == "stop_gradient"]
    (passed,) = equations  # the scale goes through the forward program, which the backward program can do without
    place, result = (
        variables.index(v)
        for variables, v in (
            (forward.program.jaxpr.invars, passed.invars[0]),
            (forward.program.jaxpr.outvars, passed.outvars[0]),
        )
    )
    scale, run = forward.reads[place], jax.extend.core.jaxpr_as_fun(forward.program)

    def without_scale(*arrays):
        arrays = (*arrays[:place], jnp.zeros(staged.avals[scale].shape), *arrays[place:])
        return without(run(*arrays), result)

    reads = without(forward.reads, place)
    types = [jax.ShapeDtypeStruct(staged.avals[k].shape, staged.avals[k].dtype) for k in reads]
    program = jax.make_jaxpr(without_scale)(*types)
    made = forward.makes[result]
    programs = {
        forward.label: replace(forward, program=program, reads=reads, makes=without(forward.makes, result)),
        backward.label: replace(backward, reads=tuple(scale if key is made else key for key in backward.reads)),
    }
    return replace(staged, programs={**staged.programs, **programs})


def without(items, place):
    return (*items[:place], *items[place + 1 :])


def peak_bytes(staged, in_flight, mesh):
    function = StageFunction(staged, 1, in_flight)
    options = Options(fn=function, mesh=mesh, hardware=preset("h100", {"x": 2}), memory_limit_bytes=np.inf)
    traced = trace_function(options, function.shapes)
    weigh(function, traced.graph, mesh)
    space = space_of(options, traced)
    return space.summarize([0] * len(space.nodes)).peak_bytes, function, traced.graph


def test_what_only_the_backward_program_reads_waits_for_it_with_each_micro_batch(staged_with_early_scale):
    staged, mesh = staged_with_early_scale, AbstractMesh((2,), ("x",))
    forward, backward = (staged.programs[Label(kind, 1)] for kind in ("forward", "backward"))
    (early,) = (key for key in backward.reads if is_from(staged, 0, key) and key not in forward.reads)
    (few, function, _), (many, _, graph) = (peak_bytes(staged, in_flight, mesh) for in_flight in (2, 3))
    assert early in function.queued
    received = [key for key in function.queued if is_from(staged, 0, key)]
    made = [key for key in function.queued if is_from(staged, 1, key)]
    sizes = {key: staged.avals[key].size * staged.avals[key].dtype.itemsize for key in function.queued}
    parts = list(graph.stored_parts.values())
    assert parts == [2] * len(parts)
    assert len(parts) >= 2 * len(received)  # sent in equal parts, however it is read
    assert many - few == sum(sizes[key] / 2 for key in received) + sum(sizes[key] for key in made)


def test_small_gradients_wait_for_the_collective_that_reduces_them_all(staged, monkeypatch):
    mesh = AbstractMesh((2,), ("x",))
    _, function, graph = peak_bytes(staged, 1, mesh)
    made_at = {graph.values[value].made_at for value in graph.reduced_until}
    assert 2 < len(made_at) <= len(function.sums)
    assert set(graph.reduced_until.values()) == {max(made_at)}
    monkeypatch.setattr(stage_function, "_COMBINED_BYTES", 0)
    _, _, graph = peak_bytes(staged, 1, mesh)
    assert all(graph.values[value].made_at == until for value, until in graph.reduced_until.items())
