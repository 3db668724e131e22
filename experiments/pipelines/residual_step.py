"""A training step of a network that is no GPT: layers of a gated product on vectors, with AdamW."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

OPTIMIZER = optax.adamw(1e-4)


def residual_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Returns the state after a step, and the loss.

    Args:
      state: weights in float32, stacked by layer, and the optimiser's state.
      batch: inputs and targets, `[B, D]` each.
    """
    weights, opt_state = state
    inputs, targets = batch

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda a: a.astype(jnp.float16), w)
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    def loss_fn(weights: Any) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(layer), inputs.astype(jnp.float16), weights)
        return jnp.mean((x.astype(jnp.float32) - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, weights)
    return (optax.apply_updates(weights, updates), opt_state), loss


def residual_shapes(layers: int, width: int, batch_size: int) -> tuple[Any, Any]:
    """Returns the types of the arguments of `residual_step`."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = {"gate": array(layers, width, 4 * width), "up": array(layers, width, 4 * width)}
    weights["down"] = array(layers, 4 * width, width)
    examples = array(batch_size, width)
    return (weights, jax.eval_shape(OPTIMIZER.init, weights)), (examples, examples)
