"""Products in float8: rounded as by hand, and the same numbers however they are sharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import diffshard
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.sharding.number_formats import SwitchedProducts, is_backward, takes_float8

ROWS, WIDTH = 6, 8


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
    return [vertex for vertex in space.graph.operations() if takes_float8(vertex)]


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
        layout = space.layout(choice)._replace(rounded=frozenset([vertex.index]))
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
    switched = SwitchedProducts(space.graph, layout, {v.index: i for i, v in enumerate(products)})
    for switches in ([True, True], [False, True], [False, False]):
        on = frozenset(v.index for v, is_on in zip(products, switches, strict=True) if is_on)
        program = space.device_program(layout._replace(rounded=on), mesh)
        expected = jax.jit(program)(weights, x)[0]
        np.testing.assert_allclose(switched(jnp.array(switches), weights, x)[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(expected, gradient(weights, x), rtol=1e-5, atol=1e-5)


def test_a_cotangent_is_rounded_to_the_wider_range():
    x, weights = arrays()
    space, mesh = space_for(gradient, weights, x)
    backward = products_of(space)[1]
    layout = space.layout([0] * len(space.nodes))._replace(rounded=frozenset([backward.index]))
    text = str(jax.make_jaxpr(space.device_program(layout, mesh))(weights, x))
    assert text.count("new_dtype=float8_e5m2") == 1
    assert text.count("new_dtype=float8_e4m3fn") == 1


def test_a_product_of_zeros_is_zero():
    x, weights = arrays()
    space, mesh = space_for(product, x, weights)
    (vertex,) = products_of(space)
    layout = space.layout([0] * len(space.nodes))._replace(rounded=frozenset([vertex.index]))
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
    costs = space.with_float8({vertex.index: 0.0}).node_costs
    m, k, n = sizes
    exact_s = 2 * m * k * n / hardware.reached_flops_per_s("bfloat16")
    product_s = 2 * m * k * n / hardware.reached_flops_per_s("float8_e4m3fn")
    rounding_s = 3 * (m * k + k * n) / hardware.reached_memory_bytes_per_s + 4e-6
    np.testing.assert_allclose(
        costs.float8_gain_s(vertex, strategies)[whole], exact_s - product_s - rounding_s, rtol=1e-9
    )
    assert costs.own_collectives(vertex, strategies[whole]) == []
    split = next(s for s in strategies if s.operands == (((0,), ()), ((), (1,))))
    assert [(c.collective.kind, c.collective.axis) for c in costs.own_collectives(vertex, split)] == [
        ("all_reduce", 0),
        ("all_reduce", 1),
    ]
