"""The decoder of `experiments.models.decoder` with cuDNN's attention, which keeps no scores: for long sequences.

Everything but the attention is the same module, rematerialised layers included.
"""

from typing import Any

import jax
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models import decoder, gpt
from experiments.models.model import Model


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embedding by cuDNN, `[B, L, M] -> [B, L, M]`."""

    sizes: decoder.Sizes

    @nn.compact
    def __call__(self, x):
        """Mixes positions."""
        sizes, width = self.sizes, x.shape[-1]
        head = width // sizes.heads

        def projected(name: str, heads: int, axis: str) -> jax.Array:
            return named(decoder.dense((heads, head), name)(x), ("batch", "sequence", axis, "head"))

        query = decoder.rotary(projected("query", sizes.heads, "heads"))
        key = decoder.rotary(projected("key", sizes.groups, "key_value_heads"))
        value = projected("value", sizes.groups, "key_value_heads")
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        mixed = named(mixed, ("batch", "sequence", "heads", "head"))
        return decoder.dense(width, "out", axis=(-2, -1))(mixed)


class Block(decoder.Block):
    """A layer of the decoder."""

    attention: type[nn.Module] = Attention


def make(*, batch: int = 4, optimizer: optax.GradientTransformation | None = None, **sizes: Any) -> Model:
    """Makes the training step; arguments are those of `decoder.make`."""
    network = decoder.Decoder(decoder.Sizes(**sizes), gpt.unrolled, Block)
    optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
    return gpt.training(network, batch, optimizer, f"long-decoder-{network.sizes.layers}")
