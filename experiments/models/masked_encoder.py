"""A masked language model: an encoder whose norms stand after the sums, with a tied head; layers are in `nn.remat`.

Source: Devlin et al., BERT (arXiv:1810.04805), section 3, without segments and the prediction of the next sentence.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models.model import Model, State, gradient_step
from experiments.models.transformer import Attention, Embedding, FeedForward, dense, norm

MASKED_SHARE = 0.15
MASK = 0
"""The token that stands for those to be predicted."""


class Block(nn.Module):
    """One layer, `[B, L, M] -> [B, L, M]`: a norm after each residual sum."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        """Applies the layer."""
        stream = ("batch", "sequence", "width")
        x = named(norm("attention_norm")(x + Attention(self.heads, name="attention")(x, x)), stream)
        return named(norm("feed_forward_norm")(x + FeedForward(self.hidden, name="feed_forward")(x)), stream)


class MaskedEncoder(nn.Module):
    """Logits of all tokens from those that are not masked."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int

    @nn.compact
    def __call__(self, tokens):
        """Returns float32 logits `[B, L, V]` from tokens `[B, L]`."""
        embedding = Embedding(self.vocabulary, self.width, self.sequence, name="tokens")
        x = norm("embedding_norm")(embedding(tokens))
        for index in range(self.layers):
            x = nn.remat(Block)(self.heads, self.hidden, name=f"layer_{index}")(x)
        x = norm("head_norm")(nn.gelu(dense(self.width, "head", use_bias=True)(x)))
        return embedding.logits(x)


def make(
    *,
    batch: int = 16,
    layers: int = 1,
    width: int = 32,
    heads: int = 2,
    hidden: int = 64,
    vocabulary: int = 64,
    sequence: int = 16,
) -> Model:
    """Makes a training step with adamw for tokens `[B, L]` and which of them are masked, `[B, L]`."""
    network = MaskedEncoder(layers, width, heads, hidden, vocabulary, sequence)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> State:
        params = network.init(key, jnp.zeros((1, sequence), jnp.int32))["params"]
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        is_masked = batch["is_masked"]
        logits: Any = network.apply({"params": params}, jnp.where(is_masked, MASK, batch["tokens"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return jnp.sum(losses * is_masked) / jnp.maximum(1, jnp.sum(is_masked)), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        token_key, mask_key = jax.random.split(key)
        return {
            "tokens": jax.random.randint(token_key, (batch, sequence), 1, vocabulary),
            "is_masked": jax.random.bernoulli(mask_key, MASKED_SHARE, (batch, sequence)),
        }

    return Model(f"masked-encoder-{layers}", gradient_step(loss, optimizer), init, make_batch)
