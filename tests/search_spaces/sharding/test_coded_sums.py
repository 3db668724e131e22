"""Partial sums that are sent as codes: the numbers of the program, of one device, and prices by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import diffshard
from cost.evaluation import evaluate
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.sharding.base import Coded
from search_spaces.sharding.coded_sums import coded_sum, sum_in_parts
from search_spaces.sharding.codes import CODES, directions, is_narrower, sums_in
from search_spaces.sharding.format_gains import gains_s, in_own_formats

ROWS, WIDTH = 16, 8


def product(x, cotangent):
    return jnp.einsum("rm,rn->mn", x, cotangent)


def lookup(x, cotangent):
    return jnp.zeros((4, WIDTH)).at[jnp.int32(x[:, 0]) % 4].add(cotangent)


def gradient(weights, x):
    return jax.grad(lambda weights: jnp.sum(jnp.sin(jnp.tanh(x @ weights) @ weights) ** 2))(weights)


def arrays():
    keys = jax.random.split(jax.random.key(0))
    return 3 * jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(keys[1], (ROWS, WIDTH))


def space_for(fn, args, sizes, links=None):
    names = ("hosts", "model")[: len(sizes)]
    axes = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(sizes, names, axes, devices=jax.devices()[: np.prod(sizes)])
    hardware = diffshard.preset("h100", dict(mesh.shape))
    hardware = dataclasses.replace(hardware, links=links or hardware.links)
    options = Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=1e12)
    return space_of(options, trace_function(options, args)), mesh


def summed(space):
    """Returns the operations whose partial sums can be sent as codes."""
    return [vertex for vertex in space.graph.operations() if sums_in(vertex, "int8")]


@pytest.mark.parametrize("fn", [product, lookup])
@pytest.mark.parametrize("name", CODES)
def test_one_device_sums_parts_as_devices_do(fn, name):
    args = arrays()
    space, mesh = space_for(fn, args, (4,))
    (vertex,) = summed(space)
    rule = space.rules[vertex.index]
    assert rule is not None
    expected = sum_in_parts(vertex, rule, _operands(fn, vertex, args), 4, CODES[name])[0]
    exact = fn(*args)
    assert not np.allclose(expected, exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(expected, exact, rtol=0.1, atol=2.5)
    results = []
    for number, strategy in enumerate(space.nodes[vertex.index].strategies):
        if any(step.kind == "reduce_scatter" for step in strategy.reductions[0]):
            choice = [0] * len(space.nodes)
            choice[vertex.index] = number
            layout = space.layout(choice).with_formats([Coded(vertex.index, name)])
            results.append(jax.jit(space.device_program(layout, mesh))(*args)[0])
    assert len(results) >= 1
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-5)


def _operands(fn, vertex, args):
    if fn is product:
        return args
    return [jnp.zeros((4, WIDTH)), (jnp.int32(args[0][:, :1]) % 4), args[1]]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_sums_over_two_axes_are_near_the_exact_ones_and_their_parts_in_order(kind):
    args = arrays()
    slow, fast = diffshard.Link(0.0, 1e-9), diffshard.Link(0.0, 1e-10)
    for links, exact_steps in (({"hosts": slow, "model": fast}, 1), ({"hosts": slow, "model": slow}, 0)):
        space, mesh = space_for(product, args, (2, 2), links)
        (vertex,) = summed(space)
        strategies = space.nodes[vertex.index].strategies
        number = next(i for i, s in enumerate(strategies) if [step.kind for step in s.reductions[0]] == [kind] * 2)
        coded = coded_sum(space.reshard_costs.path, vertex.results[0], strategies[number].reductions[0], "int8")
        assert coded.num_exact == exact_steps
        choice = [0] * len(space.nodes)
        choice[vertex.index] = number
        layout = space.layout(choice).with_formats([Coded(vertex.index, "int8")])
        result = jax.jit(space.device_program(layout, mesh))(*args)[0]
        scale = float(np.abs(product(*args)).max())
        error = np.abs(np.asarray(result) - np.asarray(product(*args))).max()
        assert 0 < error < 0.02 * scale


def test_the_price_of_a_sum_in_codes_by_hand():
    """Four hosts of two devices: the sums over a host's devices are exact, the half that is left goes as int8."""
    rows, width = 65536, 8192
    args = (jax.ShapeDtypeStruct((rows, width), jnp.float32),) * 2
    links = {"hosts": diffshard.Link(0.0, 1e-10), "model": diffshard.Link(0.0, 1e-12)}
    space, _ = space_for(product, args, (4, 2), links)
    (vertex,) = summed(space)
    scattered = [("reduce_scatter", 1), ("reduce_scatter", 0)]
    strategy = next(
        s for s in space.nodes[vertex.index].strategies if [step[:2] for step in s.reductions[0]] == scattered
    )
    free, finished = space.with_formats({Coded(vertex.index, "int8"): 1e-4}), strategy._replace(sent_in="int8")
    costs = free.node_costs
    elements = width**2 / 2  # a block of 128 has a scale of 4 bytes; each device sends 3 of 4 parts
    over_hosts_s = 3 / 4 * elements * (1 + 4 / 128) * 1e-10
    in_host_s = 1 / 2 * 4 * width**2 * 1e-12
    assert costs.reduction_s(vertex, finished) == pytest.approx(over_hosts_s + in_host_s)  # waited for in full
    coding_s = 2 * elements * 5 / space.hardware.reached_memory_bytes_per_s + 2 * space.hardware.kernel_launch_s
    assert costs.finish_s(vertex, finished) - costs.reduction_s(vertex, finished) == pytest.approx(coding_s)
    exact, coded = (free.strategy_numbers(vertex.index)[s] for s in (strategy, finished))
    cost_s = free.problem.node_cost[vertex.index]
    expected = costs.finish_s(vertex, finished) + 1e-4 - costs.finish_s(vertex, strategy)
    assert cost_s[coded] - cost_s[exact] == pytest.approx(expected)


def test_a_choice_costs_what_its_prediction_adds_up_to():
    args = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    space, _ = space_for(gradient, args, (4,), {"hosts": diffshard.Link(1e-6, 1e-10)})
    free = space.with_formats({Coded(v.index, name): 0.0 for v in summed(space) for name in CODES})
    for seed in range(8):
        generator = np.random.default_rng(seed)
        choice = [int(generator.integers(len(node.strategies))) for node in free.nodes]
        predicted = free.predict(choice)
        seconds = predicted.compute_s.sum() + sum(t.seconds for t in predicted.transfers) + predicted.preference_s.sum()
        assert evaluate(free.problem, choice).cost == pytest.approx(seconds)
        exact = in_own_formats(free, choice)
        gains = gains_s(free, choice)
        for key in free.layout(choice).coded:
            other = choice.copy()
            other[key.vertex] = exact[key.vertex]
            added_s = evaluate(free.problem, other).cost - evaluate(free.problem, choice).cost
            assert gains[key] == pytest.approx(added_s, abs=1e-9)
        assert evaluate(free.problem, exact.tolist()).cost == pytest.approx(
            evaluate(space.problem, exact.tolist()).cost
        )


def test_which_sums_have_which_formats():
    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    space, _ = space_for(gradient, args, (2,))
    kinds = [directions(space.graph)[v.index] for v in summed(space)]
    assert kinds == ["forward", "forward", "gradient", "backward", "gradient"]
    assert [name for name in CODES if is_narrower(name, jnp.dtype("float32"))] == list(CODES)
    assert [name for name in CODES if is_narrower(name, jnp.dtype("bfloat16"))] == ["float8", "int8", "int4"]
    assert not any(is_narrower(name, jnp.dtype("int32")) for name in CODES)
