"""A GPT in flax nnx: the state is the split module and optimizer, as nnx users pass it through `jax.jit`."""

from typing import Any

import jax
import optax
from flax import nnx

from experiments.models.gpt import Sizes, next_token_loss
from experiments.models.model import Model


class Block(nnx.Module):
    """One decoder layer with nnx's own attention."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        width = sizes.width
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(sizes.heads, width, use_bias=False, decode=False, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Applies the layer, `[B, L, M] -> [B, L, M]`, with a mask `[1, 1, L, L]`."""
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.feed_forward_norm(x))))


class GPT(nnx.Module):
    """The decoder with learned positions and an output head of its own."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (sizes.sequence, sizes.width)))
        self.layers = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.final_norm = nnx.LayerNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, sizes.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits `[B, L, V]` of the next token from tokens `[B, L]`."""
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.positions[...]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.final_norm(x))


def make(*, batch: int = 16, **sizes: Any) -> Model:
    """Makes a GPT training step on nnx states with adamw; sizes are those of `gpt.Sizes`."""
    config = Sizes(**sizes)

    def build(key: jax.Array) -> tuple[GPT, nnx.Optimizer]:
        module = GPT(config, nnx.Rngs(key))
        return module, nnx.Optimizer(module, optax.adamw(1e-3), wrt=nnx.Param)

    def init(key: jax.Array) -> Any:
        return nnx.state(build(key))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: build(jax.random.key(0))))

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        module, optimizer = nnx.merge(graphdef, state)
        loss, gradients = nnx.value_and_grad(lambda m: next_token_loss(m(tokens[:, :-1]), tokens))(module)
        optimizer.update(module, gradients)
        return nnx.state((module, optimizer)), loss

    def make_batch(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (batch, config.sequence + 1), 0, config.vocabulary)

    return Model(f"gpt-{config.layers}-nnx", step, init, make_batch)
