"""A flax layer of experts that lie where an `ExpertLayout` says, and a training step of it.

The layer routes each token to its two best experts, which take a limited number of tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import diffshard

EXPERT_NAMES = ("up", "down")
"""The parameters of experts, for `ExpertLayout.move`."""


class PlacedExperts(nn.Module):
    """Feed-forward experts behind a gate, `[T, M] -> [T, M]`; sows how many tokens chose each, and were dropped.

    Attributes:
      layout: where the experts lie.
      hidden: numbers inside of an expert.
      capacity_factor: as for `ExpertLayout.apply`.
    """

    layout: diffshard.experts.ExpertLayout
    hidden: int
    capacity_factor: float = 2.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the experts' results of tokens `[T, M]`."""
        num_experts, width = self.layout.num_experts, x.shape[-1]
        logits = nn.Dense(num_experts, use_bias=False, name="gate")(x)
        shapes = {"up": (num_experts, width, self.hidden), "down": (num_experts, self.hidden, width)}
        # Drawn for all experts in their order, so that equal keys give equal experts in every layout.
        params = {name: self.param(name, self._held, shape) for name, shape in shapes.items()}
        routed = self.layout.apply(feed_forward, params, x, logits, capacity_factor=self.capacity_factor)
        self.sow("routing", "num_chosen", routed.num_chosen)
        self.sow("routing", "num_dropped", routed.num_dropped)
        return routed.results

    def _held(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return self.layout.hold(nn.initializers.lecun_normal(batch_axis=0)(key, shape))


def feed_forward(params: Any, tokens: jax.Array) -> jax.Array:
    """Applies one expert to its tokens."""
    return nn.gelu(tokens @ params["up"]) @ params["down"]


class Network(nn.Module):
    """Two dense layers around experts, `[T, M] -> [T, M]`."""

    layout: diffshard.experts.ExpertLayout
    hidden: int
    capacity_factor: float = 2.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns predictions for tokens `[T, M]`."""
        x = nn.Dense(x.shape[-1], name="before")(x)
        x = x + PlacedExperts(self.layout, self.hidden, self.capacity_factor, name="experts")(x)
        return nn.Dense(x.shape[-1], name="after")(nn.gelu(x))


class StepResult(NamedTuple):
    """The metrics of a training step.

    Attributes:
      loss: mean squared error.
      num_chosen: of each expert, `[X]`.
      num_dropped: choices that found no room.
    """

    loss: jax.Array
    num_chosen: jax.Array
    num_dropped: jax.Array


class Training(NamedTuple):
    """A model's training.

    Attributes:
      init: `(key, tokens) -> state`.
      step: `(state, (tokens, targets)) -> (state, StepResult)`.
    """

    init: Any
    step: Any


def training(
    layout: diffshard.experts.ExpertLayout,
    hidden: int,
    optimizer: optax.GradientTransformation,
    *,
    capacity_factor: float = 2.0,
) -> Training:
    """Makes the training of a network."""
    network = Network(layout, hidden, capacity_factor)

    def init(key: jax.Array, tokens: jax.Array) -> Any:
        params = network.init(key, tokens)["params"]
        return params, optimizer.init(params)

    def loss_fn(params: Any, batch: Any) -> Any:
        results, sown = network.apply({"params": params}, batch[0], mutable=["routing"])
        return jnp.square(results - batch[1]).mean(), sown["routing"]["experts"]

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        (loss, routing), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        result = StepResult(loss, *routing["num_chosen"], *routing["num_dropped"])
        return (optax.apply_updates(params, updates), moments), result

    return Training(init, step)
