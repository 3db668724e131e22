"""A GPT whose feed-forward layers are mixtures of experts with einsum dispatch and a capacity.

Source: Lepikhin et al., GShard (arXiv:2006.16668), algorithm 1: top-2 gating, capacity, load-balancing loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint as named

from experiments.models import decoder, gpt
from experiments.models.model import Model

EXPERTS = 8
CAPACITY_FACTOR = 2.0
BALANCE_WEIGHT = 1e-2


def top2_gating(probabilities: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns combine weights `[G, S, E, C]` and balance loss from gate probabilities `[G, S, E]`.

    Each of G groups sends its S tokens to their two best experts, which take at most C tokens of a group, the first
    choices first; a token that finds no room is dropped by that expert.
    """
    experts = probabilities.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(probabilities, -1), experts)
    second = jax.nn.one_hot(jnp.argmax(probabilities * (1 - first), -1), experts)
    balance = experts * jnp.mean(jnp.mean(first, 1) * jnp.mean(probabilities, 1)) * experts

    first_place = (jnp.cumsum(first, 1) - 1) * first
    second_place = (jnp.cumsum(second, 1) - 1 + jnp.sum(first, 1, keepdims=True)) * second
    first = first * (first_place < capacity)
    second = second * (second_place < capacity)

    def weights(chosen: jax.Array, place: jax.Array) -> jax.Array:
        gate = jnp.sum(probabilities * chosen, -1, keepdims=True)
        slot = jax.nn.one_hot(jnp.sum(place * chosen, -1).astype(jnp.int32), capacity)
        return (gate * chosen)[..., None] * slot[:, :, None, :]

    combine = weights(first, first_place) + weights(second, second_place)
    return combine / (jnp.sum(combine, (-2, -1), keepdims=True) + 1e-9), balance


class MixtureOfExperts(nn.Module):
    """Expert feed-forward layers behind a top-2 gate, `[G, S, M] -> [G, S, M]`; the batch rows are the groups.

    They compute in the dtype of what they get; the gate is in float32.
    """

    sizes: gpt.Sizes

    @nn.compact
    def __call__(self, x):
        """Dispatches tokens to experts, applies them and combines; sows the balance loss."""
        width, hidden = self.sizes.width, 4 * self.sizes.width
        capacity = int(CAPACITY_FACTOR * x.shape[1] / EXPERTS)
        probabilities = jax.nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="gate")(x))
        combine, balance = top2_gating(probabilities, capacity)
        self.sow("losses", "balance", BALANCE_WEIGHT * balance)

        initializer = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", initializer, (EXPERTS, width, hidden)).astype(x.dtype)
        down = self.param("down", initializer, (EXPERTS, hidden, width)).astype(x.dtype)
        combine = combine.astype(x.dtype)
        dispatched = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
        dispatched = named(dispatched, ("experts", "expert_batch", "slot", "width"))
        inside = nn.gelu(jnp.einsum("egcm,emh->egch", dispatched, up))
        outside = jnp.einsum("egch,ehm->egcm", inside, down)
        outside = named(outside, ("experts", "expert_batch", "slot", "width"))
        return jnp.einsum("gsec,egcm->gsm", combine, outside)


class _Block(gpt.Block):
    feed_forward: type[nn.Module] = MixtureOfExperts


def make(*, batch: int = 16, stack: gpt.Stack = gpt.unrolled, **sizes: Any) -> Model:
    """Makes a mixture-of-experts GPT training step with adamw; sizes are those of `gpt.Sizes`."""
    network = gpt.GPT(gpt.Sizes(**sizes), _Block, stack)
    return gpt.training(network, batch, optax.adamw(1e-3), f"moe-{network.sizes.layers}-{stack.__name__}")


class _DecoderBlock(decoder.Block):
    feed_forward: type[nn.Module] = MixtureOfExperts


def make_decoder(*, batch: int = 16, **sizes: Any) -> Model:
    """Makes the training step of `experiments.models.decoder` with mixtures of experts; sizes are those of its `Sizes`.

    Experts are four times as wide inside; `hidden` is not used.
    """
    network = decoder.Decoder(decoder.Sizes(**sizes), block=_DecoderBlock)
    return gpt.training(network, batch, optax.adamw(1e-3), f"moe-decoder-{network.sizes.layers}")
