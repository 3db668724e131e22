"""A selective state space model of nnx modules: associative scans over time, layers in `nnx.scan`, dropout."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.zoo.base import TrainingStep

VOCABULARY, WIDTH, INNER, STATES, LAYERS = 256, 64, 128, 8, 2


class SelectiveScan(nnx.Module):
    """A diagonal linear recurrence whose step size, input and output depend on the input (Gu and Dao, 2023)."""

    def __init__(self, rngs: nnx.Rngs):
        self.into = nnx.Linear(WIDTH, 2 * INNER, use_bias=False, rngs=rngs)
        self.short = nnx.Conv(INNER, INNER, (4,), padding="CAUSAL", feature_group_count=INNER, rngs=rngs)
        self.select = nnx.Linear(INNER, 2 * STATES + INNER, rngs=rngs)
        self.decay = nnx.Param(jnp.log(jnp.broadcast_to(jnp.arange(1.0, STATES + 1), (INNER, STATES))))
        self.skip = nnx.Param(jnp.ones(INNER))
        self.out = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mixes `[batch, time, width]` over time."""
        u, gate = jnp.split(self.into(x), 2, axis=-1)
        u = nnx.silu(self.short(u))
        step, read, write = jnp.split(self.select(u), [INNER, INNER + STATES], axis=-1)
        step = nnx.softplus(step)
        factors = jnp.exp(-step[..., None] * jnp.exp(self.decay[...]))
        terms = (step * u)[..., None] * write[..., None, :]

        def combine(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, states = jax.lax.associative_scan(combine, (factors, terms), axis=1)
        y = jnp.einsum("btds,bts->btd", states, read) + self.skip[...] * u
        return self.out(y * nnx.silu(gate))


class Block(nnx.Module):
    """A residual layer with norm and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mixer = SelectiveScan(rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape."""
        return x + self.dropout(self.mixer(self.norm(x)))


class Language(nnx.Module):
    """Embeds tokens, mixes them in equal layers and predicts the next ones."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = make_blocks(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits for each of the tokens `[batch, time]`."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through_blocks(x, block):
            return block(x)

        return self.embed.attend(self.norm(through_blocks(self.embed(tokens), self.blocks)))


def make() -> TrainingStep:
    """Makes a language model of two layers, on random tokens."""

    def train_step(model, optimizer, tokens):
        def loss_fn(model):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    model = Language(nnx.Rngs(params=0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    tokens = jax.random.randint(jax.random.key(2), (16, 33), 0, VOCABULARY)
    return TrainingStep(train_step, (model, optimizer), (tokens,), jit=nnx.jit)
