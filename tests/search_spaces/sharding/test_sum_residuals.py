"""Sums with error feedback lose nothing, on any mesh, inside loops, and on one device; their prices by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffshard
from search_spaces.sharding.base import Coded
from search_spaces.sharding.coded_sums import can_be_coded, part_residuals, sum_in_parts
from search_spaces.sharding.codes import CODES, SUMS, has_feedback, precision_of, sums_in
from search_spaces.sharding.memory import memory_use
from search_spaces.sharding.sum_residuals import refitted, residual_of, trips_of
from tests.search_spaces.sharding.test_coded_sums import WIDTH, arrays, product, space_for, summed

INT4 = "int4 with error feedback"
SLOW, FAST = diffshard.Link(0.0, 1e-9), diffshard.Link(0.0, 1e-10)


def program_with(space, mesh, vertex, number, name=INT4):
    choice = [0] * len(space.nodes)
    choice[vertex.index] = number
    return space.device_program(space.layout(choice).with_formats([Coded(vertex.index, name)]), mesh)


@pytest.mark.parametrize(
    ("kinds", "links"),
    [
        ([("all_reduce", 1), ("all_reduce", 0)], {"hosts": SLOW, "model": FAST}),
        ([("reduce_scatter", 1), ("reduce_scatter", 0)], {"hosts": SLOW, "model": FAST}),
        ([("reduce_scatter", 0), ("reduce_scatter", 1)], {"hosts": FAST, "model": SLOW}),
        ([("reduce_scatter", 1), ("reduce_scatter", 0)], {"hosts": SLOW, "model": SLOW}),
        ([("reduce_scatter", 0)], {"hosts": SLOW, "model": SLOW}),  # the other axis splits the result
    ],
)
def test_what_is_sent_and_what_is_not_yet_are_the_sum(kinds, links):
    x, cotangent = arrays()
    space, mesh = space_for(product, (x, cotangent), (2, 2), links)
    (vertex,) = summed(space)
    fitting = [
        number
        for number, strategy in enumerate(space.nodes[vertex.index].strategies)
        if [step[:2] for step in strategy.reductions[0]] == kinds
        and (len(kinds) > 1 or any(strategy.unreduced[0]))
        and can_be_coded(vertex, strategy, INT4, space.axis_sizes)
    ]
    program = program_with(space, mesh, vertex, fitting[0])
    (form,) = program.residuals.values()
    residual, sent, exact = jnp.zeros(form.shape), 0.0, 0.0
    step = jax.jit(program)
    for number in range(3):
        result, residual = step((1 + number) * x, cotangent, residual)
        sent, exact = sent + result, exact + product((1 + number) * x, cotangent)
    not_sent = refitted(residual, (1, *form.shape[1:])).reshape(WIDTH, WIDTH)
    np.testing.assert_allclose(sent + not_sent, exact, rtol=1e-5, atol=1e-4)
    assert np.abs(not_sent).max() > 0.1


def test_residuals_of_one_mesh_fit_another():
    residual = jnp.arange(2 * 4 * 6.0).reshape(2, 2, 2, 6)
    other = refitted(residual, (3, 2, 2, 2, 3))
    np.testing.assert_allclose(other.sum(0).reshape(4, 6), residual.sum(0).reshape(4, 6), rtol=1e-6)
    assert all(np.array_equal(part, other[0]) for part in other)


@pytest.mark.parametrize("name", ["int4", "bfloat16"])
def test_one_device_sums_parts_as_devices_do_in_several_steps(name):
    args = arrays()
    space, mesh = space_for(product, args, (4,))
    (vertex,) = summed(space)
    strategies, rule = space.nodes[vertex.index].strategies, space.rules[vertex.index]
    assert rule is not None
    number = next(i for i, s in enumerate(strategies) if [step.kind for step in s.reductions[0]] == ["reduce_scatter"])
    program = jax.jit(program_with(space, mesh, vertex, number, f"{name} with error feedback"))
    (form,) = space.device_program(program_layout(space, vertex, number, name), mesh).residuals.values()
    result, of_parts, of_devices = None, part_residuals(vertex, rule, 4), jnp.zeros(form.shape)
    for _ in range(3):
        result, of_parts = sum_in_parts(vertex, rule, args, 4, CODES[name], of_parts)
        on_devices, of_devices = program(*args, of_devices)
        np.testing.assert_allclose(result, on_devices, rtol=1e-5, atol=1e-4)
    assert result is not None
    assert not np.allclose(result, sum_in_parts(vertex, rule, args, 4, CODES[name])[0], atol=1e-3)


def program_layout(space, vertex, number, name):
    choice = [0] * len(space.nodes)
    choice[vertex.index] = number
    return space.layout(choice).with_formats([Coded(vertex.index, f"{name} with error feedback")])


def scanned(weights, x):
    """The gradient of three layers in a scan, whose products have residuals of their own in each trip."""

    def loss(weights):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    return jax.grad(loss)(weights)


def test_each_trip_of_a_loop_has_a_residual_of_its_own():
    args = jax.random.normal(jax.random.key(0), (3, WIDTH, WIDTH)), jax.random.normal(jax.random.key(1), (4, WIDTH))
    space, mesh = space_for(scanned, args, (2,))
    vertex = next(v for v in summed(space) if trips_of(v) == (3,) and v.results[0].shape == (WIDTH, WIDTH))
    strategies = space.nodes[vertex.index].strategies
    number = next(i for i, s in enumerate(strategies) if [step.kind for step in s.reductions[0]] == ["all_reduce"])
    program = program_with(space, mesh, vertex, number)
    (form,) = program.residuals.values()
    assert form.shape == (2, 3, WIDTH, WIDTH)
    residual, sent, step = jnp.zeros(form.shape), 0.0, jax.jit(program)
    for _ in range(2):
        result, residual = step(*args, residual)
        sent = sent + result
    not_sent = residual.sum(0).swapaxes(1, 2)  # JAX transposes the product to the gradient
    np.testing.assert_allclose(sent + not_sent, 2 * scanned(*args), rtol=1e-4, atol=1e-4)
    assert all(np.abs(own).max() > 1e-3 for own in residual.sum(0))


def test_a_sum_that_may_not_run_has_no_residual():
    def step(weights, x, is_on):
        return jax.lax.cond(is_on, lambda: x.T @ (x @ weights), lambda: weights)

    args = jnp.ones((4, 4)), jnp.ones((8, 4)), True
    space, _ = space_for(step, args, (2,))
    sums = [vertex for vertex in space.graph.operations() if sums_in(vertex, "int8")]
    assert sums
    assert not any(sums_in(vertex, "int8 with error feedback") for vertex in sums)


def test_the_memory_and_the_seconds_of_residuals_by_hand():
    rows, width = 4096, 1024
    args = (jax.ShapeDtypeStruct((rows, width), jnp.float32),) * 2
    space, _ = space_for(product, args, (4, 2), {"hosts": SLOW, "model": FAST})
    (vertex,) = summed(space)
    scattered = [("reduce_scatter", 1), ("reduce_scatter", 0)]
    strategies = space.nodes[vertex.index].strategies
    strategy = next(s for s in strategies if [step[:2] for step in s.reductions[0]] == scattered)
    names = ["int8", "int8 with error feedback"]
    free = space.with_formats({Coded(vertex.index, name): 0.0 for name in names})
    without, with_residual = (strategy._replace(sent_in=name) for name in names)
    elements = width**2 / 2  # what the sums within a host have left
    form = residual_of(space.reshard_costs.path, vertex, with_residual)
    assert form is not None
    assert form.local_elements(space.axis_sizes) == elements
    added_s = free.node_costs.finish_s(vertex, with_residual) - free.node_costs.finish_s(vertex, without)
    assert added_s == pytest.approx(2 * 4 * elements / space.hardware.reached_memory_bytes_per_s)
    choice = [0] * len(free.nodes)
    peaks = []
    for chosen in (without, with_residual):
        choice[vertex.index] = free.strategy_numbers(vertex.index)[chosen]
        peaks.append(memory_use(free.usages, choice)[1].max())
    assert peaks[1] - peaks[0] == 2 * 4 * elements  # nothing is donated: both steps' residuals are there


def test_names_of_formats():
    assert [name for name in SUMS if not has_feedback(name)] == list(CODES)
    assert precision_of("float8 with error feedback") == CODES["float8"]
    assert not has_feedback("")
