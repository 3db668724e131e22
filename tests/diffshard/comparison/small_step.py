"""A step of gradient descent on two matrices, with the shapes and the mesh that plans are compared for."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
STATE = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32), "down": jax.ShapeDtypeStruct((256, 64), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((128, 64), jnp.float32)


def step(state, x):
    def loss_fn(state):
        return jnp.mean((jax.nn.gelu(x @ state["up"]) @ state["down"] - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss
