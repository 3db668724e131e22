"""An MLP-mixer on handwritten digits: layers that mix patches, and layers that mix channels.

Source: Tolstikhin et al., "MLP-Mixer: An all-MLP Architecture for Vision" (arXiv:2105.01601), figure 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.models.model import Model, State, gradient_step


class Mixer(nn.Module):
    """The class of an image from its patches, `[B, patches, pixels] -> [B, classes]`."""

    layers: int
    width: int
    classes: int

    @nn.compact
    def __call__(self, x):
        """Returns float32 logits."""
        patches = x.shape[1]
        x = nn.Dense(self.width, name="patches")(x)
        for index in range(self.layers):
            mixed = nn.LayerNorm(name=f"token_norm_{index}")(x).swapaxes(1, 2)
            mixed = nn.gelu(nn.Dense(2 * patches, name=f"token_up_{index}")(mixed))
            x = x + nn.Dense(patches, name=f"token_down_{index}")(mixed).swapaxes(1, 2)
            mixed = nn.LayerNorm(name=f"channel_norm_{index}")(x)
            mixed = nn.gelu(nn.Dense(4 * self.width, name=f"channel_up_{index}")(mixed))
            x = x + nn.Dense(self.width, name=f"channel_down_{index}")(mixed)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm(name="norm")(x).mean(axis=1))


def make(
    *, batch: int = 64, layers: int = 2, width: int = 32, patches: int = 16, pixels: int = 4, classes: int = 10
) -> Model:
    """Makes a training step with adamw on patches `[B, patches, pixels]` and labels `[B]`."""
    network, optimizer = Mixer(layers, width, classes), optax.adamw(3e-3)

    def init(key: jax.Array) -> State:
        params = network.init(key, jnp.zeros((1, patches, pixels)))
        return State(params, optimizer.init(params))

    def loss(params, statistics, batch):
        logits: Any = network.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        image_key, label_key = jax.random.split(key)
        labels = jax.random.randint(label_key, (batch,), 0, classes)
        return {"image": jax.random.uniform(image_key, (batch, patches, pixels)), "label": labels}

    return Model(f"mixer-{layers}", gradient_step(loss, optimizer), init, make_batch)
