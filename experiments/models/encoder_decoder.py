"""A Transformer with an encoder and a decoder, as for translation: two sequences, cross-attention, an untied head.

Layers are wrapped in `nn.remat`, so that their activations are computed again in the backward pass.

Source: Vaswani et al. (arXiv:1706.03762), section 3, with pre-norm layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models.model import Model, State, gradient_step
from experiments.models.transformer import Block, CrossBlock, Embedding, dense, norm


class EncoderDecoder(nn.Module):
    """As many layers in the encoder as in the decoder."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    source: int
    target: int

    @nn.compact
    def __call__(self, source, target):
        """Returns float32 logits `[B, T, V]` of the next token from tokens `[B, S]` and `[B, T]`."""
        memory = Embedding(self.vocabulary, self.width, self.source, name="source")(source)
        for index in range(self.layers):
            memory = nn.remat(Block)(self.heads, self.hidden, name=f"encoder_{index}")(memory)
        memory = norm("encoder_norm")(memory)
        x = Embedding(self.vocabulary, self.width, self.target, name="target")(target)
        for index in range(self.layers):
            x = nn.remat(CrossBlock)(self.heads, self.hidden, name=f"decoder_{index}")(x, memory)
        logits = dense(self.vocabulary, "head")(norm("decoder_norm")(x))
        return named(logits, ("batch", "sequence", "vocabulary")).astype(jnp.float32)


def make(
    *,
    batch: int = 16,
    layers: int = 1,
    width: int = 32,
    heads: int = 4,
    hidden: int = 64,
    vocabulary: int = 64,
    source: int = 16,
    target: int = 8,
) -> Model:
    """Makes a training step with adamw: a batch is source `[B, source]` and target `[B, target + 1]` tokens."""
    network = EncoderDecoder(layers, width, heads, hidden, vocabulary, source, target)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> State:
        shapes = jnp.zeros((1, source), jnp.int32), jnp.zeros((1, target), jnp.int32)
        params = network.init(key, *shapes)["params"]
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        tokens = batch["target"]
        logits: Any = network.apply({"params": params}, batch["source"], tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), statistics

    def make_batch(key: jax.Array) -> dict[str, jax.Array]:
        source_key, target_key = jax.random.split(key)
        return {
            "source": jax.random.randint(source_key, (batch, source), 0, vocabulary),
            "target": jax.random.randint(target_key, (batch, target + 1), 0, vocabulary),
        }

    return Model(f"encoder-decoder-{layers}", gradient_step(loss, optimizer), init, make_batch)
