"""A decoder of linen modules trained by optax's muon: Newton-Schulz products of matrices, adam for the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.zoo.base import TrainingStep


class Layer(nn.Module):
    """Attention and a gated MLP with remat, as residuals."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape."""
        width = x.shape[-1]
        normed = nn.RMSNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(normed, normed, mask=mask)
        normed = nn.RMSNorm()(x)
        gated = nn.silu(nn.Dense(2 * width, use_bias=False)(normed)) * nn.Dense(2 * width, use_bias=False)(normed)
        return x + nn.Dense(width, use_bias=False)(gated)


class Decoder(nn.Module):
    """Rematerialised layers between an embedding and its transpose."""

    layers: int
    width: int
    heads: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits for each of the tokens `[batch, time]`."""
        embed = nn.Embed(self.vocabulary, self.width)
        x, mask = embed(tokens), nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = nn.remat(Layer)(self.heads)(x, mask)
        return embed.attend(nn.RMSNorm()(x))


def make(
    layers: int = 2, width: int = 128, heads: int = 4, vocabulary: int = 256, batch: int = 16, sequence: int = 32
) -> TrainingStep:
    """Makes the decoder, on random tokens `[batch, sequence + 1]`."""
    model = Decoder(layers, width, heads, vocabulary)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 2, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(schedule))

    def train_step(params, opt_state, tokens):
        def loss_fn(params):
            logits: Any = model.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    tokens = jax.random.randint(jax.random.key(1), (batch, sequence + 1), 0, vocabulary)
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return TrainingStep(train_step, (params, optimizer.init(params)), (tokens,))
