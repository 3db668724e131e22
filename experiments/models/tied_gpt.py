"""A GPT-2 in bfloat16 over float32 state: learned positions, a head tied to the embedding, layers in `nn.remat`."""

from typing import Any

import optax
from flax import linen as nn

from experiments.models import gpt
from experiments.models.model import Model
from experiments.models.transformer import Block, Embedding, causal, norm


class TiedGPT(nn.Module):
    """The decoder; its feed-forward layers are four times as wide inside."""

    sizes: gpt.Sizes

    @nn.compact
    def __call__(self, tokens):
        """Returns float32 logits `[B, L, V]` of the next token from tokens `[B, L]`."""
        sizes = self.sizes
        embedding = Embedding(sizes.vocabulary, sizes.width, sizes.sequence, name="tokens")
        x = embedding(tokens)
        for index in range(sizes.layers):
            layer = nn.remat(Block)(sizes.heads, 4 * sizes.width, name=f"layer_{index}")
            x = layer(x, causal(sizes.sequence))
        return embedding.logits(norm("final_norm")(x))


def make(*, batch: int = 16, **sizes: Any) -> Model:
    """Makes a training step with adamw: `batch` is tokens `[B, L + 1]`; sizes are those of `experiments.models.gpt`."""
    network = TiedGPT(gpt.Sizes(**sizes))
    return gpt.training(network, batch, optax.adamw(1e-3), f"tied-gpt-{network.sizes.layers}")
