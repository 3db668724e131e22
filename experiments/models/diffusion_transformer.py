"""A diffusion transformer: it predicts the noise in latents, given the level of noise and a class.

Both are embedded in one vector, and each layer makes from it the shifts and scales of its layer norms and the gates of
its residual connections. These start at zero, so that a layer starts as the identity. Layers are wrapped in `nn.remat`.

Source: Peebles and Xie, DiT (arXiv:2212.09748), section 3.2, with learned positions and without learned variances; the
schedule of noise by Ho et al. (arXiv:2006.11239), section 4.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models.model import Model, State, gradient_step
from experiments.models.transformer import Attention, FeedForward, Patches, dense
from experiments.models.unet import noise_features

_STREAM = ("batch", "sequence", "width")
# Sines and cosines of the level of noise, as in the code of the paper.
_NOISE_FEATURES = 256
_STEPS = 1000
# The part of the signal's variance that is left after each of the diffusion's steps.
_SIGNAL = np.cumprod(1 - np.linspace(1e-4, 0.02, _STEPS)).astype(np.float32)


def _zero_dense(features: Any, name: str) -> nn.DenseGeneral:
    zeros = nn.initializers.zeros
    return nn.DenseGeneral(features, kernel_init=zeros, dtype=jnp.bfloat16, name=name)


def _modulated_norm(x: jax.Array, shift: jax.Array, scale: jax.Array, name: str) -> jax.Array:
    """Returns the layer norm of `[B, L, M]`, scaled and shifted by vectors `[B, 1, M]`."""
    plain = nn.LayerNorm(epsilon=1e-6, use_scale=False, use_bias=False, dtype=jnp.bfloat16, name=name)
    return plain(x) * (1 + scale) + shift


class Modulation(nn.Module):
    """Vectors that shift, scale or gate, made from the condition."""

    vectors: int

    @nn.compact
    def __call__(self, condition):
        """Returns the vectors, each `[B, 1, M]`, from the condition `[B, M]`."""
        made = _zero_dense((self.vectors, condition.shape[-1]), "modulation")(nn.silu(condition))
        return [made[:, index, None] for index in range(self.vectors)]


class AdaptiveBlock(nn.Module):
    """One layer whose norms and residual connections follow the condition, `[B, L, M] -> [B, L, M]`."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x, condition):
        """Applies the layer under the condition `[B, M]`."""
        shift, scale, gate, hidden_shift, hidden_scale, hidden_gate = Modulation(6, name="adaptive")(condition)
        y = _modulated_norm(x, shift, scale, "attention_norm")
        x = named(x + gate * Attention(self.heads, name="attention")(y, y), _STREAM)
        y = _modulated_norm(x, hidden_shift, hidden_scale, "feed_forward_norm")
        return named(x + hidden_gate * FeedForward(self.hidden, name="feed_forward")(y), _STREAM)


class DiffusionTransformer(nn.Module):
    """The noise in latents from their patches."""

    layers: int
    width: int
    heads: int
    hidden: int
    patch: int
    classes: int

    @nn.compact
    def __call__(self, latent, level, label):
        """Returns the noise `[B, H, W, C]` in latents `[B, H, W, C]` with noise levels `[B]` and classes `[B]`."""
        time = nn.silu(dense(self.width, "time_in", use_bias=True)(noise_features(level, _NOISE_FEATURES)))
        time = dense(self.width, "time_out", use_bias=True)(time)
        condition = time + nn.Embed(self.classes, self.width, dtype=jnp.bfloat16, name="classes")(label)
        condition = named(condition, ("batch", "width"))
        x = Patches(self.patch, self.width, name="patches")(latent)
        for index in range(self.layers):
            x = nn.remat(AdaptiveBlock)(self.heads, self.hidden, name=f"layer_{index}")(x, condition)
        shift, scale = Modulation(2, name="final_adaptive")(condition)
        batch, height, width, channels = latent.shape
        x = _modulated_norm(x, shift, scale, "final_norm")
        x = _zero_dense(self.patch**2 * channels, "pixels")(x).astype(jnp.float32)
        x = x.reshape(batch, height // self.patch, width // self.patch, self.patch, self.patch, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(latent.shape)


def make(
    *,
    batch: int = 16,
    layers: int = 1,
    width: int = 32,
    heads: int = 4,
    hidden: int = 64,
    patch: int = 2,
    latent: int = 8,
    channels: int = 4,
    classes: int = 10,
) -> Model:
    """Makes a training step with adamw: latents `[B, latent, latent, channels]`, labels `[B]` and a random key.

    The key draws the noise and its level; the loss is the squared error of the predicted noise.
    """
    network = DiffusionTransformer(layers, width, heads, hidden, patch, classes)
    optimizer = optax.adamw(1e-3)
    shape = (batch, latent, latent, channels)

    def init(key: jax.Array) -> State:
        params = network.init(key, jnp.zeros((1, *shape[1:])), jnp.zeros(1), jnp.zeros(1, jnp.int32))["params"]
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        noise_key, step_key = jax.random.split(batch["key"])
        noise = jax.random.normal(noise_key, shape)
        step = jax.random.randint(step_key, shape[:1], 0, _STEPS)
        signal = jnp.asarray(_SIGNAL)[step][:, None, None, None]
        mixed = jnp.sqrt(signal) * batch["latent"] + jnp.sqrt(1 - signal) * noise
        predicted: Any = network.apply({"params": params}, mixed, step / _STEPS, batch["label"])
        return jnp.mean((predicted - noise) ** 2), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        latent_key, label_key, noise_key = jax.random.split(key, 3)
        return {
            "latent": jax.random.normal(latent_key, shape),
            "label": jax.random.randint(label_key, shape[:1], 0, classes),
            "key": noise_key,
        }

    return Model(f"diffusion-transformer-{layers}", gradient_step(loss, optimizer), init, make_batch)
