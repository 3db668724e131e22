"""Products in float8 with the scales of earlier steps: by hand, and the same on one device and on several."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces.sharding.delayed_scales import HISTORY, MARGIN, NAME, DelayedScales, Scales
from search_spaces.sharding.number_formats import MixedProducts
from search_spaces.sharding.product_formats import FORMATS, takes
from search_spaces.sharding.sum_residuals import MAXIMA
from tests.search_spaces.sharding.test_number_formats import gradient, product, products_of, space_for

LARGEST = 448.0


def rounded(array, scale):
    codes = np.clip(np.asarray(array, np.float32) / np.float32(scale), -LARGEST, LARGEST)
    return np.asarray(jnp.asarray(codes).astype(jnp.float8_e4m3fn), np.float32) * np.float32(scale)


def program_of(space, mesh, choice=None):
    layout = space.layout([0] * len(space.nodes) if choice is None else choice)
    return space.device_program(layout.with_formats([(v.index, NAME) for v in products_of(space)]), mesh)


def test_a_step_rounds_by_the_largest_magnitudes_of_the_steps_before_by_hand():
    space, mesh = space_for(product, jnp.ones((6, 8)), jnp.ones((8, 8)))
    run = jax.jit(program_of(space, mesh))
    sizes, maxima = [1.0, 3.0, 0.5, 40.0, 1.0], jnp.zeros((1, *Scales.of(space.graph).shape))
    seen = [[], []]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    for size, key in zip(sizes, keys, strict=True):
        operands = [size * jax.random.normal(key, (6, 8)), jax.random.normal(key, (8, 8))]
        scales = [MARGIN * max(own) / LARGEST if own else 1.0 for own in seen]
        expected = np.matmul(*(rounded(array, scale) for array, scale in zip(operands, scales, strict=True)))
        result, maxima = run(*operands, maxima)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
        for own, array in zip(seen, operands, strict=True):
            own.append(float(np.abs(array).max()))
    np.testing.assert_allclose(maxima[0, :, : len(sizes)], np.array(seen)[:, ::-1], rtol=1e-6)
    np.testing.assert_array_equal(maxima[0, :, len(sizes) : HISTORY], 0)
    np.testing.assert_array_equal(maxima[0, :, HISTORY], [2, 0])  # in the second and the fourth step


def test_numbers_beyond_the_scale_are_cut_off_and_what_is_not_finite_stays_visible():
    space, mesh = space_for(product, jnp.ones((6, 8)), jnp.ones((8, 8)))
    (vertex,) = products_of(space)
    maxima = jnp.zeros(Scales.of(space.graph).shape).at[:, 0].set(1.0)
    scales = DelayedScales(Scales.of(space.graph), [vertex.index], maxima)
    codes, scale = scales.rounded(jnp.array([0.5, -1.5, 7.0, jnp.inf, jnp.nan]), vertex, 0)
    scales.rounded(jnp.ones(1), vertex, 1)
    np.testing.assert_allclose(np.asarray(codes, np.float32) * scale, [0.5, -1.5, 2.0, np.nan, np.nan], rtol=1 / 16)
    np.testing.assert_array_equal(scales.after()[:, 0], [0.0, 1.0])  # no step after this has a scale of infinity
    np.testing.assert_array_equal(scales.after()[:, HISTORY], [1, 0])
    run = jax.jit(program_of(space, mesh))
    result, _ = run(jnp.ones((6, 8)).at[0, 0].set(jnp.inf), jnp.ones((8, 8)), maxima[None])
    assert np.all(np.isnan(result[0]))
    assert np.all(np.isfinite(result[1:]))


def scanned(weights, x):
    def loss(weights):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, weights)[0] ** 2)

    return weights - 0.1 * jax.grad(loss)(weights)


@pytest.mark.parametrize(("fn", "shape", "num_scales"), [(gradient, (8, 8), 3), (scanned, (3, 8, 8), 15)])
def test_several_devices_compute_what_one_does(fn, shape, num_scales):
    """A value that a forward and a backward product read has one scale, and each trip of a loop has its own."""
    weights, x = jax.random.normal(jax.random.key(0), shape), jnp.ones((8, 8))
    space, mesh = space_for(fn, weights, x)
    row_of = {vertex.index: row for row, vertex in enumerate(products_of(space))}
    mixed = MixedProducts(space.graph, space.layout([0] * len(space.nodes)), row_of, [FORMATS[NAME]])
    one_device, on_first = jax.jit(mixed), jnp.ones((len(row_of), 1))
    assert mixed.first_residuals()[MAXIMA].shape == (num_scales, HISTORY + 1)
    generator = np.random.default_rng(0)
    for _ in range(3):
        choice = [int(generator.integers(len(node.strategies))) for node in space.nodes]
        run = jax.jit(program_of(space, mesh, choice))
        residuals, maxima = mixed.first_residuals(), jnp.zeros((1, num_scales, HISTORY + 1))
        for step in range(3):
            batch = x * 1.5**step + jax.random.normal(jax.random.key(step), x.shape)
            (expected,), residuals = one_device(on_first, residuals, weights, batch)
            result, maxima = run(weights, batch, maxima)
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(maxima[0], residuals[MAXIMA], rtol=1e-4, atol=1e-6)
    exact, _ = one_device(jnp.zeros((len(row_of), 1)), mixed.first_residuals(), weights, x)
    np.testing.assert_allclose(exact[0], fn(weights, x), rtol=1e-4, atol=1e-4)


def test_no_product_waits_for_a_largest_magnitude():
    """All of a step are found by one collective over all mesh axes, and prices have none on the way to products."""
    x, weights = jnp.ones((64, 64)), jnp.ones((64, 64))
    space, mesh = space_for(gradient, weights, x)
    free = space.with_formats({(v.index, NAME): 0.0 for v in products_of(space)})
    generator = np.random.default_rng(0)
    for _ in range(3):
        choice = [int(generator.integers(len(node.strategies))) for node in free.nodes]
        layout = free.layout(choice)
        maxima = jnp.zeros((1, *Scales.of(space.graph).shape))
        is_any = bool(layout.rounded)
        text = str(jax.make_jaxpr(free.device_program(layout, mesh))(weights, x, *[maxima] * is_any))
        assert len(re.findall(r" = pmax", text)) == int(is_any)
        products = {v.index for v in products_of(space)}
        assert not [t for t in free.predict(choice).transfers if t.num_bytes == 4 and t.vertex in products]


def test_products_that_may_not_run_have_no_delayed_scales():
    def step(weights, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ weights, lambda: x)

    space, _ = space_for(step, jnp.ones((8, 8)), jnp.ones((8, 8)))
    (vertex,) = products_of(space)
    assert takes(vertex, "float8")
    assert not takes(vertex, NAME)
