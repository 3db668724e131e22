"""Three ways to compute a decoder's products give equal layers; the law makes narrow products slow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.measured_rates import ProductRate
from experiments import joined_products


@pytest.mark.parametrize("seed", range(4))
def test_all_ways_compute_the_same_layer_and_gradients(seed):
    rng = np.random.default_rng(seed)
    keys = int(rng.integers(1, 5))
    widths = joined_products.Widths(
        int(rng.integers(2, 9)), keys * int(rng.integers(1, 4)), keys, int(rng.integers(2, 9))
    )
    apart = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in joined_products.weight_shapes(widths).items()
    }
    joined = {name: apart[name] for name in ("out", "down")}
    joined["qkv"] = jnp.concatenate([apart[name] for name in ("query", "key", "value")], axis=1)
    joined["gate_up"] = jnp.concatenate([apart["gate"], apart["up"]], axis=1)
    x = jnp.asarray(rng.normal(size=(int(rng.integers(1, 9)), widths.model)), jnp.float32)
    found = {
        name: joined_products.gradients(joined if name == "stored joined" else apart, x, way)
        for name, way in joined_products.WAYS.items()
    }
    for weights, gradient in found.values():
        np.testing.assert_allclose(gradient, found["apart"][1], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(weights["down"], found["apart"][0]["down"], rtol=1e-4, atol=1e-4)
    of_group = jnp.concatenate([found["apart"][0][name] for name in ("query", "key", "value")], axis=1)
    np.testing.assert_allclose(found["stored joined"][0]["qkv"], of_group, rtol=1e-4, atol=1e-4)


def test_the_law_counts_every_product_of_both_passes():
    widths, rate = joined_products.Widths(8, 4, 2, 6), ProductRate(2.0, 0.0, 0.0, 1.0, 1e30)
    apart, joined = (joined_products.products(widths, is_joined, 3) for is_joined in (False, True))
    assert (len(apart), len(joined)) == (21, 12)
    flops = sum(m * n * k for m, n, k in apart)
    assert flops == sum(m * n * k for m, n, k in joined) == 3 * 3 * (8 * (4 + 2 + 2 + 6 + 6) + 4 * 8 + 6 * 8)
    assert joined_products.law_s(apart, rate) == pytest.approx(flops + 21)


def test_shapes_of_arguments_are_those_of_one_device():
    weights, x = joined_products.arguments(joined_products.MODELS["llama 8b"].part(8), "stored joined", 16)
    assert {name: array.shape for name, array in weights.items()} == {
        "out": (512, 4096), "down": (1792, 4096), "qkv": (4096, 768), "gate_up": (4096, 3584),
    }  # fmt: skip
    assert jax.eval_shape(lambda x: x, x).shape == (16, 4096)
