"""A vision transformer: patches, a token for the class, learned positions; layers are wrapped in `nn.remat`.

Source: Dosovitskiy et al. (arXiv:2010.11929), section 3.1; sizes such as a width of 1408 by Zhai et al.
(arXiv:2106.04560).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models.model import Model, State, gradient_step
from experiments.models.transformer import Block, dense, norm

CHANNELS = 3


class VisionTransformer(nn.Module):
    """The class of an image from its patches."""

    layers: int
    width: int
    heads: int
    hidden: int
    patch: int
    classes: int

    @nn.compact
    def __call__(self, image):
        """Returns float32 logits `[B, classes]` from images `[B, H, W, 3]`."""
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", dtype=jnp.bfloat16, name="patches")(image)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, self.width)).astype(jnp.bfloat16)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = named(x + positions.astype(jnp.bfloat16), ("batch", "sequence", "width"))
        for index in range(self.layers):
            x = nn.remat(Block)(self.heads, self.hidden, name=f"layer_{index}")(x)
        return dense(self.classes, "classes", use_bias=True)(norm("final_norm")(x)[:, 0]).astype(jnp.float32)


def make(
    *,
    batch: int = 16,
    layers: int = 1,
    width: int = 24,
    heads: int = 2,
    hidden: int = 40,
    patch: int = 4,
    image: int = 16,
    classes: int = 10,
) -> Model:
    """Makes a training step with adamw for images `[B, image, image, 3]` and labels `[B]`."""
    network = VisionTransformer(layers, width, heads, hidden, patch, classes)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> State:
        params = network.init(key, jnp.zeros((1, image, image, CHANNELS)))["params"]
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits: Any = network.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        image_key, label_key = jax.random.split(key)
        return {
            "image": jax.random.normal(image_key, (batch, image, image, CHANNELS)),
            "label": jax.random.randint(label_key, (batch,), 0, classes),
        }

    return Model(f"vision-transformer-{layers}", gradient_step(loss, optimizer), init, make_batch)
