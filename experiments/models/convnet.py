"""A small stack of convolution, batch norm, relu and pooling, whose best plan is known to be data parallel."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.models.model import Model, State, gradient_step


class _ConvNet(nn.Module):
    layers: int
    channels: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Conv(self.channels, kernel_size=(3, 3), strides=(2, 2), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.max_pool(x, window_shape=(2, 2), strides=(1, 1), padding="SAME")
        return x


def make(*, layers: int = 3, channels: int = 4, image: int = 16, batch: int = 16) -> Model:
    """Makes strided convolutions with batch norm; squared error on the last feature map; adam.

    Source: Alpa's test of the same network (alpa-projects/alpa, tests/shard_parallel/test_conv.py).
    """
    network = _ConvNet(layers, channels)
    optimizer = optax.adam(1e-2)
    out = image // 2**layers

    def init(key: jax.Array) -> State:
        variables = network.init(key, jnp.zeros((1, image, image, channels)))
        return State(variables["params"], optimizer.init(variables["params"]), variables["batch_stats"])

    def loss(params, statistics, batch):
        variables = {"params": params, "batch_stats": statistics}
        y, updated = network.apply(variables, batch["x"], mutable=["batch_stats"])
        return jnp.mean((y - batch["y"]) ** 2), updated["batch_stats"]

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        x_key, y_key = jax.random.split(key)
        return {
            "x": jax.random.normal(x_key, (batch, image, image, channels)),
            "y": jax.random.normal(y_key, (batch, out, out, channels)),
        }

    return Model(f"convnet-{layers}", gradient_step(loss, optimizer), init, make_batch)
