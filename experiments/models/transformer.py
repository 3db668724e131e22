"""Pre-norm Transformer layers in flax linen for models of several kinds: bfloat16 arithmetic over float32 parameters.

Activations carry flax's logical names, which only a baseline's rules turn into constraints, as in
`experiments.models.gpt`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

_STREAM = ("batch", "sequence", "width")


def dense(features: Any, name: str, axis: Any = -1, *, use_bias: bool = False) -> nn.DenseGeneral:
    """Makes a dense layer that computes in bfloat16."""
    return nn.DenseGeneral(features, axis=axis, use_bias=use_bias, dtype=jnp.bfloat16, name=name)


def norm(name: str) -> nn.LayerNorm:
    """Makes a layer norm that returns bfloat16."""
    return nn.LayerNorm(dtype=jnp.bfloat16, name=name)


class Attention(nn.Module):
    """Attention of positions `[B, L, M]` to a memory `[B, S, M]`; the softmax is in float32."""

    heads: int

    @nn.compact
    def __call__(self, x, memory, mask=None):
        """Mixes positions of the memory; a mask `[L, S]` is true where a position may look."""
        head = x.shape[-1] // self.heads
        per_head = ("batch", "sequence", "heads", "head")
        query, key, value = (
            named(dense((self.heads, head), name)(source), per_head)
            for name, source in (("query", x), ("key", memory), ("value", memory))
        )
        scores = jnp.einsum("blgh,bsgh->bgls", query, key).astype(jnp.float32) / head**0.5
        if mask is not None:
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = named(jnp.einsum("bgls,bsgh->blgh", weights, value), per_head)
        return dense(x.shape[-1], "out", axis=(-2, -1))(mixed)


class FeedForward(nn.Module):
    """Two dense layers with gelu, `[B, L, M] -> [B, L, M]`."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        """Applies both layers to each position."""
        inside = nn.gelu(dense(self.hidden, "up", use_bias=True)(x))
        return dense(x.shape[-1], "down", use_bias=True)(named(inside, ("batch", "sequence", "hidden")))


class Block(nn.Module):
    """One layer with residual connections around attention and feed-forward, `[B, L, M] -> [B, L, M]`."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x, mask=None):
        """Applies the layer; a mask `[L, L]` is true where a position may look."""
        y = norm("attention_norm")(x)
        x = named(x + Attention(self.heads, name="attention")(y, y, mask), _STREAM)
        return named(x + FeedForward(self.hidden, name="feed_forward")(norm("feed_forward_norm")(x)), _STREAM)


class CrossBlock(nn.Module):
    """One decoder layer: causal attention, attention to an encoder's output, feed-forward."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x, memory):
        """Applies the layer to `[B, L, M]` and the encoder's output `[B, S, M]`."""
        y = norm("attention_norm")(x)
        x = named(x + Attention(self.heads, name="attention")(y, y, causal(x.shape[1])), _STREAM)
        cross = Attention(self.heads, name="cross_attention")
        x = named(x + cross(norm("cross_attention_norm")(x), memory), _STREAM)
        return named(x + FeedForward(self.hidden, name="feed_forward")(norm("feed_forward_norm")(x)), _STREAM)


def causal(length: int) -> jax.Array:
    """Returns the mask `[L, L]` with which a position sees itself and what came before."""
    return jnp.tril(jnp.ones((length, length), bool))


class Embedding(nn.Module):
    """Embeddings of tokens and of their positions; the table of tokens may also be the output head."""

    vocabulary: int
    width: int
    length: int

    def setup(self):
        """Makes the two tables."""
        self.embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        self.positions = self.param("positions", nn.initializers.normal(0.02), (self.length, self.width))

    def __call__(self, tokens):
        """Returns `[B, L, M]` for tokens `[B, L]`."""
        return named(self.embed(tokens) + self.positions.astype(jnp.bfloat16), _STREAM)

    def logits(self, x):
        """Returns float32 logits `[B, L, V]` of `[B, L, M]` by the table of tokens."""
        return named(self.embed.attend(x), ("batch", "sequence", "vocabulary")).astype(jnp.float32)


class Patches(nn.Module):
    """Embeddings of an image's square patches and of their positions."""

    patch: int
    width: int

    @nn.compact
    def __call__(self, image):
        """Returns `[B, L, M]` for images `[B, H, W, C]`.

        Raises:
          ValueError: patches do not cut height and width evenly.
        """
        if image.shape[1] % self.patch or image.shape[2] % self.patch:
            raise ValueError(f"`patch` must divide height and width, {image.shape[1:3]}; got {self.patch}.")
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size, padding="VALID", dtype=jnp.bfloat16, name="pixels")(image)
        x = x.reshape(x.shape[0], -1, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        return named(x + positions.astype(jnp.bfloat16), _STREAM)
