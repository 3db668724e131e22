"""A layer whose products are divided by tokens, on several devices, is the layer of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import divided_products, joined_products
from experiments.host_devices import host_mesh


@pytest.mark.parametrize("way", divided_products.WAYS)
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_pieces_on_four_devices_have_the_gradients_of_one_device(way, num_pieces):
    rng, widths = np.random.default_rng(num_pieces), joined_products.Widths(8, 16, 4, 12)
    weights = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in joined_products.weight_shapes(widths).items()
    }
    # Each device has whole heads, so that its queries meet the keys of the layer of one device.
    order = np.arange(16).reshape(4, 4).T.ravel()
    weights_of_one = weights | {"query": weights["query"][:, order], "out": weights["out"][order]}
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    expected, expected_x = joined_products.gradients(weights_of_one, x, joined_products.apart)
    step = divided_products.gradients(host_mesh((4,)), divided_products.WAYS[way])
    found, pieces = step(weights, jnp.split(x, num_pieces))
    np.testing.assert_allclose(jnp.concatenate(pieces), expected_x, rtol=1e-3, atol=1e-3)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, weights)
    inverse = np.argsort(order)
    expected |= {"query": expected["query"][:, inverse], "out": expected["out"][inverse]}
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-3, atol=1e-3, err_msg=name)
