"""How the model trains while its choice is searched, and how its loss depends on the relaxed choice.

Both questions have no answer but training itself where strategies are exact (`ExactModel`); where they change the loss,
an estimator answers them (`LossyModel`). Two things need derivatives through the optimiser of the parameters: how far
a unit of each gradient moves its parameter, and the step of order 2, which looks at the loss after one step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from diffshard.bilevel_search.base import (
    BilevelState,
    Estimator,
    LossAndGradients,
    LossFn,
    StrategyIndices,
    TrainingProgress,
)
from diffshard.bilevel_search.inputs import check_arguments
from search_spaces.base import Batch, LossySpace, Params, RelaxedChoice, Residuals

_STEPS = 8
"""Steps of the optimiser that are followed; momentum of 0.9 has shown more than half of an impulse by then."""


class StepKeys(NamedTuple):
    """Random keys of one step: of the estimator's draw, of the strategies' noise in training, and of validation."""

    draw: jax.Array
    noise: jax.Array
    validation: jax.Array


class Model(Protocol):
    """A model whose parameters train while a choice is searched."""

    def check_arguments(self, params: Params, batch: Batch) -> None:
        """Raises `ValueError` where arrays have other shapes or types than the model was built for."""
        ...

    def init_residuals(self, params: Params) -> Residuals:
        """Returns the residuals before the first step."""
        ...

    def train(self, state: BilevelState, relaxed: RelaxedChoice, batch: Batch, keys: StepKeys) -> LossAndGradients:
        """Returns the training loss at the state's parameters, its gradients and the next residuals."""
        ...

    def increase(
        self,
        state: BilevelState,
        relaxed: RelaxedChoice,
        gradients: Params,
        train_batch: Batch,
        val_batch: Batch,
        keys: StepKeys,
    ) -> tuple[jax.Array, RelaxedChoice]:
        """Returns by how much the relaxed choice raises the validation loss, and the slopes of this in it."""
        ...


@dataclass(frozen=True)
class ExactModel:
    """A model whose loss does not depend on the choice: it trains on the user's loss."""

    loss_fn: LossFn

    def check_arguments(self, params: Params, batch: Batch) -> None:
        """Checks nothing: the user's loss says itself what it takes."""

    def init_residuals(self, params: Params) -> Residuals:
        """Returns an empty pytree."""
        del params
        return ()

    def train(self, state: BilevelState, relaxed: RelaxedChoice, batch: Batch, keys: StepKeys) -> LossAndGradients:
        """See `Model`."""
        del relaxed, keys
        return LossAndGradients(*jax.value_and_grad(self.loss_fn)(state.params, batch), state.residuals)

    def increase(
        self,
        state: BilevelState,
        relaxed: RelaxedChoice,
        gradients: Params,
        train_batch: Batch,
        val_batch: Batch,
        keys: StepKeys,
    ) -> tuple[jax.Array, RelaxedChoice]:
        """Returns zeros."""
        del state, gradients, train_batch, val_batch, keys
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, relaxed)


@dataclass(frozen=True)
class LossyModel:
    """A model whose loss depends on the choice.

    Attributes:
      space: its strategies.
      exact_choice: the choice that leaves the loss as it is.
      estimator: see `Estimator`.
      optimizer: of the parameters.
      order: 1 looks at the loss at the parameters, 2 at the loss after one step of them.
    """

    space: LossySpace
    exact_choice: StrategyIndices
    estimator: Estimator
    optimizer: optax.GradientTransformation
    order: int

    def check_arguments(self, params: Params, batch: Batch) -> None:
        """See `Model`."""
        check_arguments(self.space, params=params, batch=batch)

    def init_residuals(self, params: Params) -> Residuals:
        """See `Model`."""
        return self.space.init_residuals(params)

    def train(self, state: BilevelState, relaxed: RelaxedChoice, batch: Batch, keys: StepKeys) -> LossAndGradients:
        """See `Model`."""
        select = self.estimator.selection
        selection = self.exact_choice if select is None else select(relaxed, keys.draw)
        return LossAndGradients(
            *self.space.loss_and_gradients(state.params, batch, selection, state.residuals, keys.noise, state.step)
        )

    def increase(
        self,
        state: BilevelState,
        relaxed: RelaxedChoice,
        gradients: Params,
        train_batch: Batch,
        val_batch: Batch,
        keys: StepKeys,
    ) -> tuple[jax.Array, RelaxedChoice]:
        """See `Model`."""
        val_key, sizes_key = jax.random.split(keys.validation)
        sizes = step_sizes(self.optimizer, state.weights_state, state.params, gradients, sizes_key)
        progress = TrainingProgress(state.step, sizes)

        def increase(params: Params, relaxed: RelaxedChoice) -> jax.Array:
            return self.estimator.increase(self.space, params, val_batch, relaxed, val_key, progress)

        weigh = self.estimator.weights
        if self.order == 1 or weigh is None:
            return jax.value_and_grad(increase, argnums=1)(state.params, relaxed)

        def train_loss(params: Params, relaxed: RelaxedChoice) -> jax.Array:
            return self.space.loss(params, train_batch, weigh(relaxed, keys.draw), keys.noise, state.step)

        def step(gradients: Params) -> Params:
            return updated(self.optimizer, state, gradients)[0]

        return unrolled(increase, train_loss, step, state.params, relaxed, gradients)


def updated(
    optimizer: optax.GradientTransformation, state: BilevelState, gradients: Params
) -> tuple[Params, optax.OptState]:
    """Returns the parameters after a step of their optimiser, and its state."""
    updates, weights_state = optimizer.update(gradients, state.weights_state, state.params)
    return optax.apply_updates(state.params, updates), weights_state


def step_sizes(
    optimizer: optax.GradientTransformation,
    state: optax.OptState,
    params: Params,
    gradients: Params,
    key: jax.Array,
) -> Params:
    """Returns how far a unit of each parameter's gradient moves it in all, with an optimiser as it stands.

    This is minus the diagonal of the derivative of the next updates' sum with respect to the next gradient, or 0 where
    that is negative. For gradient descent it is the rate, with momentum the rate over 1 - momentum as far as the steps
    show it, for adam about the rate over the root of the mean square. It is estimated with random signs z as
    z ⊙ (derivative along z), which is exact for optimisers that treat each parameter by itself.

    Optimisers that take the gradient's sign have no such derivative, nor has adam in its first step: where half a leaf
    has none, all of its sizes are the root mean square of a step, decay of weights included, over that of the gradient,
    which for adam is about the same.

    Args:
      optimizer: of the parameters.
      state: of the optimiser.
      params: where it stands.
      gradients: which it gets in each of the steps.
      key: of the signs.
    """
    signs: Any = optax.tree.random_like(key, gradients, sampler=jax.random.rademacher)

    def total_update(first: Params) -> Params:
        def follow(carry: tuple[Params, optax.OptState], number: jax.Array) -> Any:
            total, state = carry
            gradient = jax.tree.map(lambda one, other: jnp.where(number == 0, one, other), first, gradients)
            updates, state = optimizer.update(gradient, state, params)
            return (jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, updates), state), None

        begin = jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), gradients), state
        return jax.lax.scan(follow, begin, jnp.arange(_STEPS))[0][0]

    total, along = jax.jvp(total_update, (gradients,), (signs,))

    def size(gradient: jax.Array, sign: jax.Array, total: jax.Array, along: jax.Array) -> jax.Array:
        # The root in adam-like optimisers has no derivative where a gradient is exactly 0.
        slope = -along * sign.astype(jnp.float32)
        slope = jnp.where((slope > 0) & jnp.isfinite(slope), slope, 0.0)
        rms, step_rms = (jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean()) for x in (gradient, total / _STEPS))
        by_steps = jnp.where(rms > 0, step_rms / jnp.where(rms > 0, rms, 1.0), 0.0)
        return jnp.where((slope > 0).mean() > 0.5, slope, by_steps)

    return jax.tree.map(size, gradients, signs, total, along)


def unrolled(
    increase: Callable[[Params, RelaxedChoice], jax.Array],
    train_loss: Callable[[Params, RelaxedChoice], jax.Array],
    step: Callable[[Params], Params],
    params: Params,
    relaxed: RelaxedChoice,
    gradients: Params,
) -> tuple[jax.Array, RelaxedChoice]:
    """Returns the increase after the step that θ is about to take, and its slope in the relaxed choice through it.

    With θ' = step(g(θ, p)), g = ∇θ L_train, the slope is ∂p L_val(θ', p) + ∂p ⟨g(θ, p), u⟩, u = (∂step/∂g)ᵀ ∇θ' L_val.
    For gradient descent u = -ξ ∇θ' L_val. The second term is a difference of two slopes of the training loss, taken at
    θ + εu and θ - εu.

    Source: Liu, Simonyan and Yang, "DARTS" (ICLR 2019), equations 7 and 8, ε = 0.01 / |u|; here for any optimiser.

    Args:
      increase: of parameters and the relaxed choice.
      train_loss: of parameters and the relaxed choice, whose gradient in the parameters is `gradients` at `params`.
      step: new parameters of gradients.
      params: θ.
      relaxed: p.
      gradients: g(θ, p).
    """
    next_params, pull_back = jax.vjp(step, gradients)
    value, (params_slope, slope) = jax.value_and_grad(increase, argnums=(0, 1))(next_params, relaxed)
    (direction,) = pull_back(params_slope)
    # The root in adam-like optimisers has no derivative where a gradient is exactly 0.
    direction = jax.tree.map(lambda u: jnp.where(jnp.isfinite(u), u, 0.0), direction)
    norm = optax.tree.norm(direction)
    size = 0.01 / jnp.where(norm > 0, norm, 1.0)
    train_slope = jax.grad(train_loss, argnums=1)
    above = train_slope(_shifted(params, size, direction), relaxed)
    below = train_slope(_shifted(params, -size, direction), relaxed)
    return value, jax.tree.map(lambda s, a, b: s + (a - b) / (2 * size), slope, above, below)


def _shifted(params: Params, size: jax.Array, direction: Params) -> Params:
    return jax.tree.map(lambda p, u: p + (size * u).astype(p.dtype), params, direction)
