"""Products in float8: rounded as by hand, and the same numbers however they are sharded."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import diffshard
from cost.evaluation import evaluate
from diffshard.sharding_search.layout import layout_of
from diffshard.sharding_search.number_formats import groups_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.sharding import interpreter, reshard_costs, scheduling
from search_spaces.sharding.edge_costs import edge_transfer_s
from search_spaces.sharding.format_gains import best_formats, gains_s, in_formats, in_own_formats
from search_spaces.sharding.number_formats import MixedProducts
from search_spaces.sharding.number_formats import rounded as round_block
from search_spaces.sharding.product_formats import FORMATS, is_backward, takes, takes_formats
from search_spaces.sharding.reshard_costs import maximum_step, message_of

ROWS, WIDTH = 6, 8
OWN_SCALES = [name for name, to in FORMATS.items() if not to.is_delayed]


def product(x, weights):
    return x @ weights


def gradient(weights, x):
    return jax.grad(lambda weights: jnp.sum(jnp.sin(x @ weights) ** 2))(weights)


def arrays():
    keys = jax.random.split(jax.random.key(0))
    return 3 * jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(keys[1], (WIDTH, WIDTH))


def space_for(fn, *args):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    hardware = diffshard.preset("h100", dict(mesh.shape))
    options = Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=1e12)
    return space_of(options, trace_function(options, args)), mesh


def rounded(array, dtype, largest):
    scale = np.float32(np.abs(array).max()) / np.float32(largest)
    return np.asarray(jnp.asarray(array / scale).astype(dtype), np.float64) * np.float64(scale)


def products_of(space):
    return [vertex for vertex in space.graph.operations() if takes_formats(vertex)]


def test_a_product_has_the_numbers_of_rounded_operands_however_it_is_sharded():
    x, weights = arrays()
    space, mesh = space_for(product, x, weights)
    (vertex,) = products_of(space)
    expected = rounded(np.asarray(x), jnp.float8_e4m3fn, 448) @ rounded(np.asarray(weights), jnp.float8_e4m3fn, 448)
    assert not np.allclose(expected, x @ weights, rtol=1e-3, atol=1e-3)
    layouts = set()
    for strategy in range(0, len(space.nodes[vertex.index].strategies), 2):
        choice = [0] * len(space.nodes)
        choice[vertex.index] = strategy
        layout = space.layout(choice).with_formats([(vertex.index, "float8")])
        layouts.add(layout)
        result = jax.jit(space.device_program(layout, mesh))(x, weights)[0]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert len(layouts) > 4


def test_the_looks_ahead_have_the_numbers_of_the_program():
    x, weights = arrays()
    space, mesh = space_for(gradient, weights, x)
    products = products_of(space)
    assert [is_backward(vertex) for vertex in products] == [False, True]
    layout = space.layout([0] * len(space.nodes))
    mixed = MixedProducts(space.graph, layout, {v.index: i for i, v in enumerate(products)}, [FORMATS["float8"]])
    for switches in ([True, True], [False, True], [False, False]):
        on = frozenset((v.index, "float8") for v, is_on in zip(products, switches, strict=True) if is_on)
        program = space.device_program(layout.with_formats(on), mesh)
        expected = jax.jit(program)(weights, x)[0]
        results, _ = mixed(jnp.array(switches, jnp.float32)[:, None], {}, weights, x)
        np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(expected, gradient(weights, x), rtol=1e-5, atol=1e-5)


def test_a_cotangent_is_rounded_to_the_wider_range():
    x, weights = arrays()
    space, mesh = space_for(gradient, weights, x)
    backward = products_of(space)[1]
    layout = space.layout([0] * len(space.nodes)).with_formats([(backward.index, "float8")])
    text = str(jax.make_jaxpr(space.device_program(layout, mesh))(weights, x))
    assert text.count("new_dtype=float8_e5m2") == 1
    assert text.count("new_dtype=float8_e4m3fn") == 1


def test_a_product_of_zeros_is_zero():
    x, weights = arrays()
    space, mesh = space_for(product, x, weights)
    (vertex,) = products_of(space)
    layout = space.layout([0] * len(space.nodes)).with_formats([(vertex.index, "float8")])
    assert not np.any(space.device_program(layout, mesh)(0 * x, weights)[0])


def test_the_price_of_a_product_in_float8_by_hand():
    sizes = (16384, 8192, 16384)
    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (sizes[:2], sizes[1:]))
    space, _ = space_for(product, x, weights)
    hardware = dataclasses.replace(space.hardware, kernel_launch_s=1e-6)
    space = dataclasses.replace(space, hardware=hardware)
    (vertex,) = products_of(space)
    strategies = space.nodes[vertex.index].strategies
    whole = next(i for i, s in enumerate(strategies) if not any(map(any, s.operands)))
    free = space.with_formats({(vertex.index, "float8"): 0.0})
    m, k, n = sizes
    exact_s = 2 * m * k * n / hardware.reached_flops_per_s("bfloat16")
    product_s = 2 * m * k * n / hardware.reached_flops_per_s("float8_e4m3fn")
    rounding_s = 3 * (m * k + k * n) / hardware.reached_memory_bytes_per_s + 4e-6
    choice = np.array([next(i for i, s in enumerate(n.strategies) if not any(map(any, s.results))) for n in free.nodes])
    choice[vertex.index] = whole
    both_s = [
        free.predict(c.tolist()).compute_s.sum() for c in (choice, in_formats(free, choice, [(vertex.index, "float8")]))
    ]
    np.testing.assert_allclose(both_s[0] - both_s[1], exact_s - product_s - rounding_s, rtol=1e-9)


def test_the_price_of_a_message_by_hand():
    """Weights of which each device has a part of the rows are gathered as codes, or are too small for that."""
    for width, is_coded in ((8192, True), (64, False)):
        x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, width), (width, width)))
        space, _ = space_for(product, x, weights)
        (vertex,) = products_of(space)
        space = space.with_formats({(vertex.index, "float8"): 0.0})
        (edge,) = (e for e in space.edges if e.reader == vertex.index and e.operand == 1)
        stored = ((0,), ())
        source = next(i for i, s in enumerate(space.nodes[edge.node].strategies) if s.results[0] == stored)
        strategies = space.nodes[vertex.index].strategies
        whole = [i for i, s in enumerate(strategies) if not any(map(any, s.operands))]
        assert [strategies[i].format for i in whole] == ["", "float8"]
        costs = space.reshard_costs
        message = message_of(costs.path, edge.value, stored, ((), ()), vertex, 1, "float8")
        assert message[:3] == (is_coded, (1 if is_coded else 2) * width**2, (0,) if is_coded else ())
        (step,) = costs.path(stored, ((), ()))
        latency = space.node_costs.shares.latency(edge.value)
        share = space.node_costs.shares.exposed(edge.value)
        gather_s = share * costs.step_s(step, message.num_bytes, latency)
        maximum_s = share * costs.step_s(maximum_step(0), 4.0) if is_coded else 0.0
        matrix = edge_transfer_s(edge, space.nodes, costs, space.node_costs.shares)
        elements = width**2 / (2 if is_coded else 1)
        launches_s = 2 * space.hardware.kernel_launch_s
        rounding_s = 3 * elements / space.hardware.reached_memory_bytes_per_s + launches_s
        np.testing.assert_allclose(matrix[source, whole[1]], gather_s + maximum_s + rounding_s, rtol=1e-9)
        exact_s = share * costs.step_s(step, 2 * width**2, latency)
        np.testing.assert_allclose(matrix[source, whole[0]], exact_s, rtol=1e-9)
        # The steps of the program take as long, without what is hidden.
        choice = [next(i for i, s in enumerate(n.strategies) if not any(map(any, s.results))) for n in space.nodes]
        choice[edge.node] = source
        for number, num_bytes, num_maxima in ((0, 2 * width**2, 0), (1, message.num_bytes, int(is_coded))):
            choice[vertex.index] = whole[number]
            program = space.program_steps(space.layout(choice))
            seconds = {"all_gather": [], "all_reduce": []}
            for one, origin in zip(program.steps, program.origins, strict=True):
                seconds.get(origin.kind, []).append(one.seconds)
            np.testing.assert_allclose(seconds["all_gather"], [costs.step_s(step, num_bytes)], rtol=1e-9)
            np.testing.assert_allclose(seconds["all_reduce"], [costs.step_s(maximum_step(0), 4.0)] * num_maxima)


def layers_step(params, batch):
    def loss_of(params):
        x = batch
        for weights in params:
            x = jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def test_what_a_product_gains_is_the_difference_of_two_choices_of_the_problem():
    """Equal layers, whose neighbours' choices differ: what is priced once must not be taken for another."""
    weights, x = (
        [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 3,
        jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16),
    )
    space, _ = space_for(layers_step, weights, x)
    space = space.with_formats({(v.index, "float8"): 1e-5 * i for i, v in enumerate(products_of(space))})
    generator, gains = np.random.default_rng(0), {}
    for _ in range(3):
        choice = [int(generator.integers(len(node.strategies))) for node in space.nodes]
        choice = in_own_formats(space, choice)
        gains = gains_s(space, choice)
        assert len(gains) == 8  # three forward, three of weights, two of activations
        for key, gain_s in gains.items():
            changed_s = evaluate(space.problem, in_formats(space, choice, [key])).cost
            saved_s = evaluate(space.problem, choice).cost - changed_s + space.format_price_s[key]
            assert gain_s == pytest.approx(saved_s, rel=1e-9, abs=1e-12)
    assert len(set(gains.values())) > 4


def test_a_value_is_rounded_once_for_all_products_that_read_it():
    """Three products of one activation by hand: its rounding counts once, in the problem, the plan and the program."""

    def step(params, x):
        hidden = jnp.tanh(x)
        return tuple(hidden @ weights for weights in params)

    m, k = 8192, 4096
    params, x = [jax.ShapeDtypeStruct((k, k), jnp.bfloat16)] * 3, jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    space, _ = space_for(step, params, x)
    products = products_of(space)
    free = space.with_formats({(v.index, "float8"): 0.0 for v in products})
    (shared,) = free.shared_formats
    value = free.nodes[shared].shared_value
    assert value is not None
    assert value is products[0].operands[0]
    # All is split by rows over the axis data, weights are whole.
    rows = ((0,), ())
    choice = np.array(
        [next((i for i, s in enumerate(n.strategies) if s.results == (rows,) and not s.format), 0) for n in free.nodes]
    )
    hardware, costs = free.hardware, free.reshard_costs
    own_s = 3 * m * k / 2 / hardware.reached_memory_bytes_per_s + 2 * hardware.kernel_launch_s
    for number in (1, 2, 3):
        keys = [(v.index, "float8") for v in products[:number]]
        chosen = in_formats(free, choice, keys)
        alone = chosen.copy()
        alone[shared] = choice[shared]
        assert (free.nodes[shared].strategies[chosen[shared]].format == "float8") == (number > 1)
        saved_s = (number - 1) * (own_s + costs.maximum_s(0))
        costs_s = [evaluate(free.problem, c).cost for c in (alone, chosen)]
        np.testing.assert_allclose(costs_s[0] - costs_s[1], saved_s, rtol=1e-6, atol=1e-12)
        predictions = [free.predict(c.tolist()) for c in (alone, chosen)]
        steps_s = [p.compute_s.sum() + sum(t.seconds for t in p.transfers) for p in predictions]
        np.testing.assert_allclose(steps_s[0] - steps_s[1], saved_s, rtol=1e-6, atol=1e-12)
        program = free.program_steps(free.layout(chosen.tolist()))
        maxima = [o for o in program.origins if o.kind == "all_reduce" and o.vertex == value.vertex]
        assert len(maxima) == 1
        np.testing.assert_array_equal(in_own_formats(free, chosen), choice)
    keys, saved_s = best_formats(free, choice)
    costs_s = [evaluate(free.problem, c).cost for c in (choice, in_formats(free, choice, keys))]
    assert set(keys) == {(v.index, "float8") for v in products}
    np.testing.assert_allclose(costs_s[0] - costs_s[1], saved_s, rtol=1e-6)


def test_weights_are_gathered_as_codes_with_the_same_numbers(monkeypatch):
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    hardware = dataclasses.replace(
        diffshard.preset("h100", dict(mesh.shape)), links={"data": diffshard.Link(1e-12, 1e-6)}, kernel_launch_s=0.0
    )
    keys = jax.random.split(jax.random.key(0), 7)
    params = [jax.random.normal(key, (64, 64)) / 8 for key in keys[1:]]
    batch = jax.random.normal(keys[0], (4096, 64))
    stored = diffshard.search(
        layers_step,
        mesh,
        hardware=hardware,
        in_shardings=(PartitionSpec("data"), PartitionSpec("data")),
        formats=diffshard.formats.Formats(1.0, increases=every_group(layers_step, mesh, hardware, params, batch)),
    )
    plan = stored.plan(params, batch)
    gathered = [c for c in plan.collectives if c.kind == "all_gather"]
    assert {c.num_bytes for c in gathered} == {64 * 64}
    space = space_of(
        options_of(layers_step, mesh, hardware),
        trace_function(options_of(layers_step, mesh, hardware), (params, batch)),
    )
    program = space.device_program(layout_of(plan, space), mesh)
    assert any(fetch.encoded_for is not None for fetch in program.schedule.fetches.values())
    coded = jax.jit(program)(*params, batch)
    text = str(jax.make_jaxpr(program)(*params, batch))
    assert re.findall(r"f8_e4m3fn\[64,64\] = all_gather", text)
    assert not re.findall(r"f32\[64,64\] = all_gather", text)
    for module in (reshard_costs, interpreter, scheduling):
        monkeypatch.setattr(module, "is_message_coded", lambda *arguments: False)
    after = space.device_program(layout_of(plan, space), mesh)
    assert re.findall(r"f32\[64,64\] = all_gather", str(jax.make_jaxpr(after)(*params, batch)))
    for array, other in zip(coded, jax.jit(after)(*params, batch), strict=True):
        np.testing.assert_array_equal(array, other)


def options_of(fn, mesh, hardware):
    return Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=1e12)


def every_group(fn, mesh, hardware, *arguments):
    options = options_of(fn, mesh, hardware)
    return {group.name: 0.0 for group in groups_of(trace_function(options, arguments).graph)}


def test_tiny_numbers_are_rounded_without_dividing_by_zero():
    x, weights = arrays()
    space, _ = space_for(product, x, weights)
    (vertex,) = products_of(space)
    tiny = jnp.array([[0.0, 1e-36, -1e-38]], jnp.float32)
    for name in ("float8", "float8_rows", "int8"):
        codes = round_block(tiny, vertex, 0, FORMATS[name], ())
        assert np.all(np.isfinite(np.asarray(codes.codes, np.float32)))
        assert np.all(np.asarray(codes.scale) > 0)


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes that float4 has."""


def int8_rows(array, dim):
    scale = np.abs(array).max(axis=dim, keepdims=True) / np.float32(127)
    return np.round(array / scale) * scale


def float4_blocks(array, dim):
    blocks = np.moveaxis(array, dim, -1).reshape(-1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(axis=1, keepdims=True) / 6))
    nearest = E2M1[np.abs(np.abs(blocks / scale)[..., None] - E2M1).argmin(-1)]
    numbers = (np.sign(blocks) * nearest * scale).reshape(np.moveaxis(array, dim, -1).shape)
    return np.moveaxis(numbers, -1, dim)


@pytest.mark.parametrize(("name", "by_hand", "width"), [("int8", int8_rows, 8), ("float4", float4_blocks, 128)])
def test_formats_with_several_scales_by_hand_however_they_are_sharded(name, by_hand, width):
    keys = jax.random.split(jax.random.key(0))
    x, weights = 3 * jax.random.normal(keys[0], (ROWS, width)), jax.random.normal(keys[1], (width, 8))
    space, mesh = space_for(product, x, weights)
    (vertex,) = products_of(space)
    expected = by_hand(np.asarray(x), 1) @ by_hand(np.asarray(weights), 0)
    assert not np.allclose(expected, x @ weights, rtol=1e-3, atol=1e-3)
    mixed = MixedProducts(space.graph, space.layout([0] * len(space.nodes)), {vertex.index: 0}, [FORMATS[name]])
    np.testing.assert_allclose(mixed(jnp.ones((1, 1)), {}, x, weights)[0][0], expected, rtol=1e-5, atol=1e-4)
    strategies, axes_of_contracted = space.nodes[vertex.index].strategies, set()
    for strategy in range(0, len(strategies), 2):
        choice = [0] * len(space.nodes)
        choice[vertex.index] = strategy
        axes_of_contracted.add(strategies[strategy].operands[0][1])
        program = space.device_program(space.layout(choice).with_formats([(vertex.index, name)]), mesh)
        np.testing.assert_allclose(jax.jit(program)(x, weights)[0], expected, rtol=1e-5, atol=1e-4)
    assert {(), (0,), (1,)} <= axes_of_contracted


def test_a_strategy_that_would_cut_blocks_is_never_taken():
    x, weights = jnp.ones((ROWS, 64)), jnp.ones((64, 8))
    space, _ = space_for(product, x, weights)
    (vertex,) = products_of(space)
    space = space.with_formats({(vertex.index, "float4"): 0.0})
    seconds = space.node_costs.compute_s(vertex, space.nodes[vertex.index].strategies)
    for s, strategy in enumerate(space.nodes[vertex.index].strategies):
        is_cut = strategy.format == "float4" and strategy.operands[0][1] == (0, 1)  # 4 parts of 16 numbers
        assert np.isinf(seconds[s]) == is_cut
    assert not takes(products_of(space_for(product, jnp.ones((ROWS, 40)), jnp.ones((40, 8)))[0])[0], "float4")


@pytest.mark.parametrize("name", OWN_SCALES)
def test_a_number_without_a_scale_stays_visible(name):
    x, weights = jnp.ones((ROWS, 64)).at[0, 0].set(jnp.inf), jnp.ones((64, 8))
    space, mesh = space_for(product, x, weights)
    (vertex,) = products_of(space)
    layout = space.layout([0] * len(space.nodes)).with_formats([(vertex.index, name)])
    assert np.all(np.isnan(jax.jit(space.device_program(layout, mesh))(x, weights)[0][0]))


@pytest.mark.parametrize("name", OWN_SCALES)
def test_the_derivative_in_a_weight_is_that_of_the_mixture(name):
    keys = jax.random.split(jax.random.key(0))
    x, weights = jax.random.normal(keys[0], (ROWS, 64)), jax.random.normal(keys[1], (64, 8))
    space, _ = space_for(product, x, weights)
    (vertex,) = products_of(space)
    mixed = MixedProducts(space.graph, space.layout([0] * len(space.nodes)), {vertex.index: 0}, [FORMATS[name]])

    def loss(share):
        return jnp.sum(jnp.sin(mixed(share * jnp.ones((1, 1)), {}, x, weights)[0][0]))

    for share in (0.25, 0.5):
        difference = (loss(share + 0.01) - loss(share - 0.01)) / 0.02
        np.testing.assert_allclose(jax.grad(loss)(share), difference, rtol=2e-2, atol=2e-3)
    rounded_product, exact = mixed(jnp.ones((1, 1)), {}, x, weights)[0][0], x @ weights
    np.testing.assert_allclose(mixed(jnp.zeros((1, 1)), {}, x, weights)[0][0], exact, rtol=1e-5, atol=1e-5)
    assert not np.allclose(rounded_product, exact, rtol=1e-3)
