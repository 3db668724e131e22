"""Two towers that learn which text belongs to which image: every image of a batch is compared with every text.

Layers are wrapped in `nn.remat`. An image is the mean of its patches; a text is its last position, which has seen all
others, as texts fill their whole length.

Source: Radford et al., CLIP (arXiv:2103.00020), figure 3 and section 2.4.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models.model import Model, State, gradient_step
from experiments.models.transformer import Block, Embedding, Patches, causal, dense, norm

CHANNELS = 3
_FIRST_TEMPERATURE = 0.07
_LARGEST_SCALE = 100.0


class Tower(nn.Module):
    """Layers and a last norm, `[B, L, M] -> [B, L, M]`."""

    layers: int
    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x, mask=None):
        """Applies all layers; a mask `[L, L]` is true where a position may look."""
        for index in range(self.layers):
            x = nn.remat(Block)(self.heads, self.hidden, name=f"layer_{index}")(x, mask)
        return norm("final_norm")(x)


def _unit(x: jax.Array) -> jax.Array:
    """Scales vectors `[B, E]` to length 1 in float32, and returns them in bfloat16."""
    x = x.astype(jnp.float32)
    unit = (x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-12)).astype(jnp.bfloat16)
    return named(unit, ("batch", "embedding"))


class Contrastive(nn.Module):
    """Both towers, of equal sizes, and the learned temperature."""

    layers: int
    width: int
    heads: int
    hidden: int
    embedding: int
    patch: int
    vocabulary: int
    sequence: int

    @nn.compact
    def __call__(self, image, text):
        """Returns float32 similarities `[B, B]` of images `[B, H, W, 3]`, in rows, and texts `[B, L]`, in columns."""
        x = Patches(self.patch, self.width, name="patches")(image)
        x = Tower(self.layers, self.heads, self.hidden, name="image_tower")(x).mean(axis=1)
        y = Embedding(self.vocabulary, self.width, self.sequence, name="tokens")(text)
        y = Tower(self.layers, self.heads, self.hidden, name="text_tower")(y, causal(self.sequence))[:, -1]
        images = _unit(dense(self.embedding, "image_projection")(x))
        texts = _unit(dense(self.embedding, "text_projection")(y))
        log_scale = self.param("log_scale", nn.initializers.constant(-math.log(_FIRST_TEMPERATURE)), ())
        scale = jnp.exp(jnp.minimum(log_scale, math.log(_LARGEST_SCALE)))
        return scale * named(images @ texts.T, ("batch", None)).astype(jnp.float32)


def symmetric_loss(similarities: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of telling each image's text and each text's image from `[B, B]`."""
    own = jnp.arange(similarities.shape[0])
    of_images = optax.softmax_cross_entropy_with_integer_labels(similarities, own)
    of_texts = optax.softmax_cross_entropy_with_integer_labels(similarities.T, own)
    return (of_images.mean() + of_texts.mean()) / 2


def make(
    *,
    batch: int = 16,
    layers: int = 1,
    width: int = 32,
    heads: int = 4,
    hidden: int = 64,
    embedding: int = 16,
    patch: int = 4,
    image: int = 16,
    vocabulary: int = 64,
    sequence: int = 8,
) -> Model:
    """Makes a training step with adamw for images `[B, image, image, 3]` and their texts `[B, sequence]`."""
    network = Contrastive(layers, width, heads, hidden, embedding, patch, vocabulary, sequence)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> State:
        shapes = jnp.zeros((1, image, image, CHANNELS)), jnp.zeros((1, sequence), jnp.int32)
        params = network.init(key, *shapes)["params"]
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        similarities: Any = network.apply({"params": params}, batch["image"], batch["text"])
        return symmetric_loss(similarities), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        image_key, text_key = jax.random.split(key)
        return {
            "image": jax.random.normal(image_key, (batch, image, image, CHANNELS)),
            "text": jax.random.randint(text_key, (batch, sequence), 0, vocabulary),
        }

    return Model(f"contrastive-{layers}", gradient_step(loss, optimizer), init, make_batch)
