"""A small mesh, hardware on which splitting pays, and a training step, for the tests of the search."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import diffshard

SLOW = diffshard.Hardware(
    # Arithmetic that costs, so that plans split it.
    "slow",
    1e7,
    float("inf"),
    float("inf"),
    {a: diffshard.Link(1e-9, 1e-7) for a in ("x", "y")},
)


def mesh_2x2():
    return jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=1e-5)


def weights(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape) / shape[-2] ** 0.5


def train_step(state, batch):
    params, opt_state = state
    loss, gradients = jax.value_and_grad(lambda p: ((jnp.tanh(batch @ p["a"]) @ p["b"] - 1.0) ** 2).mean())(params)
    updates, opt_state = optax.adam(1e-2).update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def train_arguments():
    params = {"a": weights(8, 32), "b": weights(32, 4)}
    return (params, optax.adam(1e-2).init(params)), weights(16, 8)
