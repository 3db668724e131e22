"""A decoder whose attention and feed-forward layers read one norm and are added together, with one key-value head.

Source: Chowdhery et al., PaLM (arXiv:2204.02311), section 2: parallel layers, SwiGLU, multi-query attention, rotary
embedding, no biases. Everything else is `experiments.models.decoder`.
"""

from typing import Any

import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models import decoder, gpt
from experiments.models.model import Model


class Block(decoder.Block):
    """One layer, `[B, L, M] -> [B, L, M]`: both halves read the same norm."""

    @nn.compact
    def __call__(self, x):
        """Applies the layer."""
        y = nn.RMSNorm(dtype=x.dtype, name="norm")(x)
        feed_forward = self.feed_forward(self.sizes, name="feed_forward")(y)
        x = x + self.attention(self.sizes, name="attention")(y) + feed_forward
        return named(x, ("batch", "sequence", "width"))


def make(*, batch: int = 16, **sizes: Any) -> Model:
    """Makes its training step with adamw: `batch` is tokens `[B, L + 1]`; sizes are those of `decoder.Sizes`."""
    network = decoder.Decoder(decoder.Sizes(**sizes), block=Block)
    return gpt.training(network, batch, optax.adamw(1e-3), f"parallel-decoder-{network.sizes.layers}")
