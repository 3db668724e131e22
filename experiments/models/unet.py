"""A U-Net that removes noise from images, as in diffusion models: convolutions, and attention among the smallest.

Blocks are wrapped in `nn.remat`, compute in bfloat16 and keep float32 parameters.

Source: Ho et al. (arXiv:2006.11239), appendix B.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models.model import Model, State, gradient_step
from experiments.models.transformer import Attention, dense, norm

_GROUPS = 8
# Source: Vaswani et al. (arXiv:1706.03762), section 3.5.
_LONGEST_WAVELENGTH = 10000.0


def _convolution(width: int, name: str, size: int = 3, stride: int = 1) -> nn.Conv:
    return nn.Conv(width, (size, size), strides=(stride, stride), dtype=jnp.bfloat16, name=name)


class Residual(nn.Module):
    """Two convolutions with group norm, shifted by the level of noise; `[B, H, W, C] -> [B, H, W, width]`."""

    width: int

    @nn.compact
    def __call__(self, x, noise):
        """Applies the block; the noise's features are `[B, F]`."""
        y = nn.silu(nn.GroupNorm(_GROUPS, dtype=jnp.bfloat16, name="first_norm")(x))
        y = _convolution(self.width, "first")(y) + dense(self.width, "shift")(noise)[:, None, None]
        y = nn.silu(nn.GroupNorm(_GROUPS, dtype=jnp.bfloat16, name="second_norm")(y))
        y = _convolution(self.width, "second")(y)
        if x.shape[-1] != self.width:
            x = _convolution(self.width, "widen", size=1)(x)
        return named(x + y, ("batch", None, None, "channels"))


class SpatialAttention(nn.Module):
    """Attention among all positions of an image, with a residual connection; `[B, H, W, C] -> [B, H, W, C]`."""

    heads: int

    @nn.compact
    def __call__(self, x):
        """Mixes positions."""
        positions = norm("norm")(x.reshape(x.shape[0], -1, x.shape[-1]))
        return x + Attention(self.heads, name="attention")(positions, positions).reshape(x.shape)


def noise_features(level: jax.Array, width: int) -> jax.Array:
    """Returns sines and cosines `[B, width]` of noise levels `[B]` from 0 to 1."""
    wavelengths = _LONGEST_WAVELENGTH ** (jnp.arange(width // 2) / (width // 2))
    angle = 1000 * level[:, None] / wavelengths
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


class UNet(nn.Module):
    """Levels of residual blocks, each with half the image and twice the width; attention at the last."""

    width: int
    levels: int
    blocks: int
    heads: int

    @nn.compact
    def __call__(self, image, level):
        """Returns the noise `[B, H, W, C]` in images `[B, H, W, C]` with noise levels `[B]`."""
        residual, attention = nn.remat(Residual), nn.remat(SpatialAttention)
        noise = nn.silu(dense(4 * self.width, "noise", use_bias=True)(noise_features(level, self.width)))
        x = _convolution(self.width, "input")(image)
        skips = []
        for depth in range(self.levels):
            width = self.width * 2**depth
            for block in range(self.blocks):
                x = residual(width, name=f"down_{depth}_{block}")(x, noise)
                if depth == self.levels - 1:
                    x = attention(self.heads, name=f"attention_{block}")(x)
                skips.append(x)
            if depth < self.levels - 1:
                x = _convolution(width, f"halve_{depth}", stride=2)(x)
        for depth in reversed(range(self.levels)):
            width = self.width * 2**depth
            for block in range(self.blocks):
                x = residual(width, name=f"up_{depth}_{block}")(jnp.concatenate([x, skips.pop()], axis=-1), noise)
            if depth:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = _convolution(width // 2, f"double_{depth}")(x)
        x = nn.silu(nn.GroupNorm(_GROUPS, dtype=jnp.bfloat16, name="final_norm")(x))
        return _convolution(image.shape[-1], "output")(x).astype(jnp.float32)


def make(
    *,
    batch: int = 16,
    width: int = 16,
    levels: int = 2,
    blocks: int = 1,
    heads: int = 2,
    image: int = 16,
    channels: int = 4,
) -> Model:
    """Makes a training step with adamw: images, noise, and its level `[B]`; the loss is squared error."""
    network = UNet(width, levels, blocks, heads)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> State:
        params = network.init(key, jnp.zeros((1, image, image, channels)), jnp.zeros(1))["params"]
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        level = batch["level"][:, None, None, None]
        mixed = jnp.cos(level * jnp.pi / 2) * batch["image"] + jnp.sin(level * jnp.pi / 2) * batch["noise"]
        predicted: Any = network.apply({"params": params}, mixed, batch["level"])
        return jnp.mean((predicted - batch["noise"]) ** 2), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 3)
        shape = (batch, image, image, channels)
        return {
            "image": jax.random.normal(keys[0], shape),
            "noise": jax.random.normal(keys[1], shape),
            "level": jax.random.uniform(keys[2], (batch,)),
        }

    return Model(f"unet-{levels}x{blocks}", gradient_step(loss, optimizer), init, make_batch)
