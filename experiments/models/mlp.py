"""A multi-layer perceptron on plain arrays: dense layers with bias, squared error."""

import jax
import jax.numpy as jnp
import optax
from flax.linen.spmd import with_logical_constraint
from jax.sharding import PartitionSpec

from experiments.models.model import Model, State, gradient_step


def make(
    *,
    layers: int = 4,
    width: int = 64,
    batch: int = 64,
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """Makes an MLP of `layers` square dense layers with relu between them; adam unless another optimizer is given.

    Source: Alpa's test of the same network (alpa-projects/alpa, tests/shard_parallel/test_mlp.py), whose best plans
    are known by hand.
    """
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer

    def init(key: jax.Array) -> State:
        keys = jax.random.split(key, layers)
        params = [
            {"kernel": jax.random.normal(k, (width, width)) / width**0.5, "bias": jnp.zeros((width,))} for k in keys
        ]
        return State(params, optimizer.init(params))

    def loss(params, statistics, batch):
        x = batch["x"]
        for index, layer in enumerate(params):
            x = x @ layer["kernel"] + layer["bias"]
            x = jax.nn.relu(x) if index < layers - 1 else x
            # Does nothing without a baseline's rules, see `experiments.hand_plans`.
            x = with_logical_constraint(x, ("batch", PartitionSpec.UNCONSTRAINED))
        return jnp.mean((x - batch["y"]) ** 2), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        x_key, y_key = jax.random.split(key)
        return {"x": jax.random.normal(x_key, (batch, width)), "y": jax.random.normal(y_key, (batch, width))}

    return Model(f"mlp-{layers}", gradient_step(loss, optimizer), init, make_batch)
