"""A GPT in flax linen: pre-norm decoder with grouped-query attention and tied embeddings, trained by adamw.

Layers are stacked by a function (`unrolled` or `scanned`) and a layer is a module (`Block`, or `nn.remat(Block)` to
recompute activations), so each variant that people train is one argument. Activations carry flax's logical names, which
only a baseline's rules (`nn.logical_axis_rules`) turn into constraints; without rules the names do nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models.model import Model, State, gradient_step


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT; `key_value_heads` below `heads` is grouped-query attention, None is as many as heads."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    key_value_heads: int | None = None
    vocabulary: int = 256
    sequence: int = 64

    def __post_init__(self):
        """Holds the two divisibility rules of attention.

        Raises:
          ValueError: if heads do not divide the width, or key-value heads do not divide the heads.
        """
        if self.width % self.heads:
            raise ValueError(f"`heads` must divide `width`; got heads={self.heads} and width={self.width}.")
        if self.heads % self.groups:
            raise ValueError(
                f"`key_value_heads` must divide `heads`; got key_value_heads={self.key_value_heads} "
                f"and heads={self.heads}."
            )

    @property
    def groups(self) -> int:
        """Groups of query heads that share a key and a value."""
        return self.heads if self.key_value_heads is None else self.key_value_heads


class Attention(nn.Module):
    """Causal grouped-query attention, `[B, L, M] -> [B, L, M]`."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        """Mixes positions; heads are `[groups, queries of a group]`."""
        sizes, (batch, length, width) = self.sizes, x.shape
        head = width // sizes.heads
        # No biases: the softmax cancels a key bias's gradient, and adam would blow the rounding noise up to a step.
        query = nn.DenseGeneral((sizes.heads, head), use_bias=False, name="query")(x)
        key = nn.DenseGeneral((sizes.groups, head), use_bias=False, name="key")(x)
        value = nn.DenseGeneral((sizes.groups, head), use_bias=False, name="value")(x)
        query = named(query, ("batch", "sequence", "heads", "head"))
        key = named(key, ("batch", "sequence", "key_value_heads", "head"))
        value = named(value, ("batch", "sequence", "key_value_heads", "head"))
        query = query.reshape(batch, length, sizes.groups, sizes.heads // sizes.groups, head)
        scores = jnp.einsum("blgqh,bsgh->bgqls", query, key) / head**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), axis=-1)
        mixed = jnp.einsum("bgqls,bsgh->blgqh", weights, value).reshape(batch, length, sizes.heads, head)
        mixed = named(mixed, ("batch", "sequence", "heads", "head"))
        return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, name="out")(mixed)


class FeedForward(nn.Module):
    """Two dense layers with gelu, four times as wide inside, `[B, L, M] -> [B, L, M]`."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        """Applies both layers to each position."""
        hidden = nn.gelu(nn.Dense(4 * self.sizes.width, name="up")(x))
        hidden = named(hidden, ("batch", "sequence", "hidden"))
        return nn.Dense(self.sizes.width, name="down")(hidden)


class Block(nn.Module):
    """One decoder layer with residual connections around attention and feed-forward."""

    sizes: Sizes
    feed_forward: type[nn.Module] = FeedForward

    @nn.compact
    def __call__(self, x):
        """Applies the layer, `[B, L, M] -> [B, L, M]`."""
        stream = ("batch", "sequence", "width")
        x = named(x + Attention(self.sizes, name="attention")(nn.LayerNorm(name="attention_norm")(x)), stream)
        feed_forward = self.feed_forward(self.sizes, name="feed_forward")
        return named(x + feed_forward(nn.LayerNorm(name="feed_forward_norm")(x)), stream)


Stack = Callable[[type[nn.Module], Sizes, jax.Array], jax.Array]


def unrolled(block: type[nn.Module], sizes: Sizes, x: jax.Array) -> jax.Array:
    """Runs layers one after the other, each with parameters of its own."""
    for index in range(sizes.layers):
        x = block(sizes, name=f"layer_{index}")(x)
    return x


def scanned(block: type[nn.Module], sizes: Sizes, x: jax.Array) -> jax.Array:
    """Runs one `scan` over layers, whose parameters are stacked along a leading dimension."""
    scan = nn.scan(
        lambda module, carry, _: (module(carry), None),
        variable_axes={"params": 0, "losses": 0},
        split_rngs={"params": True},
        length=sizes.layers,
    )
    return scan(block(sizes, name="layers"), x, None)[0]


class GPT(nn.Module):
    """The decoder with learned positions and an output head tied to the embedding."""

    sizes: Sizes
    block: type[nn.Module] = Block
    stack: Stack = unrolled

    @nn.compact
    def __call__(self, tokens):
        """Returns logits `[B, L, V]` of the next token from tokens `[B, L]`."""
        embed = nn.Embed(self.sizes.vocabulary, self.sizes.width, name="embed")
        shape = (self.sizes.sequence, self.sizes.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        x = named(embed(tokens) + positions, ("batch", "sequence", "width"))
        x = nn.LayerNorm(name="final_norm")(self.stack(self.block, self.sizes, x))
        return named(embed.attend(x), ("batch", "sequence", "vocabulary"))


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns mean cross-entropy of tokens `[B, L + 1]` after the first, in nats; logits are `[B, L, V]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def training(network: Any, batch: int, optimizer: optax.GradientTransformation, name: str) -> Model:
    """Makes the training step of a decoder on tokens `[batch, L + 1]`; losses that its layers sow are added.

    The decoder is a flax module from tokens to logits with the attribute `sizes`.
    """
    shape = (batch, network.sizes.sequence + 1)

    def init(key: jax.Array) -> State:
        params = network.init(key, jnp.zeros((1, network.sizes.sequence), jnp.int32))["params"]
        return State(params, optimizer.init(params))

    def loss(params: Any, statistics: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits, sown = network.apply({"params": params}, tokens[:, :-1], mutable=["losses"])
        return next_token_loss(logits, tokens) + sum(map(jnp.sum, jax.tree.leaves(sown))), statistics

    def make_batch(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, shape, 0, network.sizes.vocabulary)

    return Model(name, gradient_step(loss, optimizer), init, make_batch)


def make(
    *,
    batch: int = 16,
    block: type[nn.Module] = Block,
    stack: Stack = unrolled,
    optimizer: optax.GradientTransformation | None = None,
    **sizes: Any,
) -> Model:
    """Makes a GPT training step: `batch` is tokens `[B, L + 1]`; other sizes are those of `Sizes`; adamw by default."""
    network = GPT(Sizes(**sizes), block, stack)
    optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
    return training(network, batch, optimizer, f"gpt-{network.sizes.layers}-{stack.__name__}")
