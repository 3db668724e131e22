"""A small training with everything that states have: a random key, an optimiser's state, and arrays of all kinds."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from diffshard.elastic.resume import resume
from diffshard.elastic.training import Training
from diffshard.sharding_search.plan import Plan
from experiments.host_devices import host_mesh

_OPTIMIZER = optax.adamw(1e-2)


def init() -> dict[str, Any]:
    """Makes a state whose sizes are divided by 2, 3, 4 and 8 devices."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(keys[0], (24, 48)) / 5,
        "down": jax.random.normal(keys[1], (48, 24)) / 7,
        "none": jnp.zeros((0, 4)),
    }
    return {
        "params": params,
        "optimizer": _OPTIMIZER.init(params),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(9, impl="rbg"), 6),
        "half": jnp.arange(8, dtype=jnp.bfloat16),
    }


def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Makes a step with dropout, whose key is in the state."""
    key, mask_key = jax.random.split(state["key"])

    def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
        hidden = jax.nn.gelu(batch @ params["up"])
        hidden = jnp.where(jax.random.bernoulli(mask_key, 0.9, hidden.shape), hidden, 0)
        return jnp.mean((hidden @ params["down"] - batch[:, ::-1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
    updates, optimizer = _OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "optimizer": optimizer, "key": key}, loss


def batch_of(number: int) -> jax.Array:
    """Makes the batch of a step."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (24, 24))


def resumed(directory: Any, shape: tuple[int, ...] = (2, 4), **options: Any) -> Training[Plan]:
    """Resumes the training on a mesh of host devices."""
    options = {"hardware": "h100", "executor": "constraints", "progress": "none"} | options
    return resume(directory, train_step, host_mesh(shape), init, batch_of(0), **options)


def train(directory: Any, until: int, shape: tuple[int, ...] = (2, 4), **options: Any) -> dict[int, float]:
    """Trains until a step on a mesh of host devices, and returns the loss of each step that it made."""
    losses = {}
    with resumed(directory, shape, **options) as training:
        state = training.restore()
        for number in range(training.num_steps, until):
            state, loss = training.step(state, batch_of(number))
            losses[number] = float(loss)
            training.save(number + 1, state, {"batches": number + 1})
    return losses
