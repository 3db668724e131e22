"""An image classifier written as every device computes it: tensor parallel over "model", data parallel over "data".

An MLP-Mixer on the digits' 2x2 patches: hidden units are split over "model", rows of the batch over "data"; layers are
scanned, norms have no parameters.

Source: Tolstikhin et al., MLP-Mixer: An all-MLP Architecture for Vision (arXiv:2105.01601), section 2.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.models.digits import CLASSES, SIDE

PATCH = 2
NUM_PATCHES = (SIDE // PATCH) ** 2
SPECS = {
    "patches": P(),
    "layers": {
        "across_up": P(None, None, "model"),
        "across_down": P(None, "model"),
        "up": P(None, None, "model"),
        "down": P(None, "model"),
    },
    "head": P(),
}
BATCH_SPEC = P("data")


@dataclass(frozen=True)
class ImageSizes:
    """Sizes of the whole model; devices along "model" must divide `2 * NUM_PATCHES` and `4 * width`."""

    layers: int = 2
    width: int = 32


def init(key: jax.Array, sizes: ImageSizes) -> dict[str, Any]:
    """Returns whole parameters; those that write into the residual stream are smaller by the root of their number."""
    keys = jax.random.split(key, 6)
    layers, width, across = sizes.layers, sizes.width, 2 * NUM_PATCHES
    residual = (2 * layers) ** -0.5

    def normal(key: jax.Array, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
        return scale * shape[-2] ** -0.5 * jax.random.normal(key, shape)

    return {
        "patches": normal(keys[0], (PATCH * PATCH, width)),
        "layers": {
            "across_up": normal(keys[1], (layers, NUM_PATCHES, across)),
            "across_down": normal(keys[2], (layers, across, NUM_PATCHES), residual),
            "up": normal(keys[3], (layers, width, 4 * width)),
            "down": normal(keys[4], (layers, 4 * width, width), residual),
        },
        "head": normal(keys[5], (width, CLASSES)),
    }


def logits(params: dict[str, Any], images: jax.Array) -> jax.Array:
    """Returns one device's scores `[B, CLASSES]` of its images `[B, 8, 8]`."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        with jax.named_scope("patches"):
            hidden = jax.nn.gelu(jnp.einsum("bpm,ph->bmh", jax.nn.standardize(x), w["across_up"]))
            x = x + lax.psum(jnp.einsum("bmh,hp->bpm", hidden, w["across_down"]), "model")
        with jax.named_scope("channels"):
            x = x + lax.psum(jax.nn.gelu(jax.nn.standardize(x) @ w["up"]) @ w["down"], "model")
        return x, None

    across = SIDE // PATCH
    patches = images.reshape(-1, across, PATCH, across, PATCH).swapaxes(2, 3).reshape(-1, NUM_PATCHES, PATCH * PATCH)
    x, _ = lax.scan(layer, patches @ params["patches"], params["layers"])
    return jax.nn.standardize(x).mean(axis=1) @ params["head"]


def loss_fn(params: dict[str, Any], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns one device's mean cross-entropy in nats of its images `[B, 8, 8]` and digits `[B]`."""
    images, digits = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), digits).mean()
