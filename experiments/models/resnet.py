"""A residual network with batch norm for small images, trained by adamw.

Source: He et al. (arXiv:1512.03385), section 4.2, the CIFAR form: three stages, the width doubled as the image halves.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.models.model import Model, State, gradient_step

CHANNELS = 3


class _Residual(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x):
        convolution = partial(nn.Conv, self.width, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(convolution((3, 3), strides=strides)(x)))
        y = norm()(convolution((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(convolution((1, 1), strides=strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stages of residual blocks, then a mean over the image and a linear classifier."""

    width: int
    blocks: int
    classes: int
    stages: int

    @nn.compact
    def __call__(self, x):
        """Returns logits `[B, classes]` from images `[B, H, W, 3]`."""
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        for stage in range(self.stages):
            for block in range(self.blocks):
                x = _Residual(self.width * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(self.classes)(jnp.mean(x, axis=(1, 2)))


def make(
    *, width: int = 16, stages: int = 3, blocks: int = 1, image: int = 16, classes: int = 10, batch: int = 32
) -> Model:
    """Makes a ResNet training step: stages of `blocks` residual blocks; running statistics are part of the state."""
    network = ResNet(width, blocks, classes, stages)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> State:
        variables = network.init(key, jnp.zeros((1, image, image, CHANNELS)))
        return State(variables["params"], optimizer.init(variables["params"]), variables["batch_stats"])

    def loss(params, statistics, batch):
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = network.apply(variables, batch["image"], mutable=["batch_stats"])
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return entropy.mean(), updated["batch_stats"]

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        image_key, label_key = jax.random.split(key)
        return {
            "image": jax.random.normal(image_key, (batch, image, image, CHANNELS)),
            "label": jax.random.randint(label_key, (batch,), 0, classes),
        }

    return Model(f"resnet-{2 * stages * blocks + 2}", gradient_step(loss, optimizer), init, make_batch)
