"""A Llama-like decoder in flax linen: rotary embedding, RMS norms, SwiGLU, an untied head, bfloat16 over float32 state.

Each layer is wrapped in `nn.remat`, so that its activations are computed again in the backward pass. Activations carry
flax's logical names, which only a baseline's rules turn into constraints, as in `experiments.models.gpt`.

Source: Touvron et al., LLaMA (arXiv:2302.13971), section 2; grouped-query attention by Ainslie et al.
(arXiv:2305.13245); rotary embedding by Su et al. (arXiv:2104.09864).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models import gpt
from experiments.models.model import Model

# Source: Su et al. (arXiv:2104.09864), section 3.3: wavelengths grow geometrically up to 2π times this base.
_ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Sizes(gpt.Sizes):
    """Sizes of a decoder; `hidden` is the width inside the feed-forward layer."""

    hidden: int = 128


def rotary(x: jax.Array) -> jax.Array:
    """Rotates pairs of features `[B, L, heads, D]` by angles that grow with the position; keeps the dtype."""
    length, features = x.shape[1], x.shape[-1]
    frequency = _ROTARY_BASE ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / features)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


def dense(features: Any, name: str, axis: Any = -1) -> nn.DenseGeneral:
    """Makes a dense layer that computes in bfloat16."""
    return nn.DenseGeneral(features, axis=axis, use_bias=False, dtype=jnp.bfloat16, name=name)


def _norm(name: str) -> nn.RMSNorm:
    return nn.RMSNorm(dtype=jnp.bfloat16, name=name)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embedding, `[B, L, M] -> [B, L, M]`; the softmax is in float32."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        """Mixes positions; heads are `[groups, queries of a group]`."""
        sizes, (batch, length, width) = self.sizes, x.shape
        head = width // sizes.heads
        query = named(dense((sizes.heads, head), "query")(x), ("batch", "sequence", "heads", "head"))
        key = named(dense((sizes.groups, head), "key")(x), ("batch", "sequence", "key_value_heads", "head"))
        value = named(dense((sizes.groups, head), "value")(x), ("batch", "sequence", "key_value_heads", "head"))
        query = rotary(query).reshape(batch, length, sizes.groups, sizes.heads // sizes.groups, head)
        scores = jnp.einsum("blgqh,bsgh->bgqls", query, rotary(key)).astype(jnp.float32) / head**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bgqls,bsgh->blgqh", weights, value).reshape(batch, length, sizes.heads, head)
        mixed = named(mixed, ("batch", "sequence", "heads", "head"))
        return dense(width, "out", axis=(-2, -1))(mixed)


class FeedForward(nn.Module):
    """SwiGLU, `[B, L, M] -> [B, L, M]`. Source: Shazeer, GLU Variants (arXiv:2002.05202)."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        """Applies the three matrices to each position."""
        inside = ("batch", "sequence", "hidden")
        gate = named(dense(self.sizes.hidden, "swish")(x), inside)
        hidden = nn.silu(gate) * named(dense(self.sizes.hidden, "up")(x), inside)
        return dense(self.sizes.width, "down")(hidden)


class Block(nn.Module):
    """One layer with residual connections around attention and feed-forward, `[B, L, M] -> [B, L, M]`."""

    sizes: Sizes
    feed_forward: type[nn.Module] = FeedForward
    attention: type[nn.Module] = Attention

    @nn.compact
    def __call__(self, x):
        """Applies the layer."""
        stream = ("batch", "sequence", "width")
        x = named(x + self.attention(self.sizes, name="attention")(_norm("attention_norm")(x)), stream)
        feed_forward = self.feed_forward(self.sizes, name="feed_forward")
        return named(x + feed_forward(_norm("feed_forward_norm")(x)), stream)


class Decoder(nn.Module):
    """The decoder with an output head of its own."""

    sizes: Sizes
    stack: gpt.Stack = gpt.unrolled
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, tokens):
        """Returns logits `[B, L, V]` in float32 of the next token from tokens `[B, L]`."""
        embed = nn.Embed(self.sizes.vocabulary, self.sizes.width, dtype=jnp.bfloat16, name="embed")
        x = named(embed(tokens), ("batch", "sequence", "width"))
        x = _norm("final_norm")(self.stack(nn.remat(self.block), self.sizes, x))
        logits = named(dense(self.sizes.vocabulary, "head")(x), ("batch", "sequence", "vocabulary"))
        return logits.astype(jnp.float32)


def make(
    *,
    batch: int = 16,
    stack: gpt.Stack = gpt.unrolled,
    optimizer: optax.GradientTransformation | None = None,
    **sizes: Any,
) -> Model:
    """Makes a decoder's training step: `batch` is tokens `[B, L + 1]`; sizes are those of `Sizes`; adamw by default."""
    network = Decoder(Sizes(**sizes), stack)
    optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
    return gpt.training(network, batch, optimizer, f"decoder-{network.sizes.layers}-{stack.__name__}")
