"""How the model trains while its choice is searched, and how its loss depends on the relaxed choice.

Where every choice has the same loss there is nothing to estimate (`ExactModel`); where strategies change the loss, an
estimator answers them (`LossyModel`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from cost.base import num_strategies
from diffshard.bilevel_search.base import BilevelState, Increase, LossFn, TrainingProgress
from diffshard.bilevel_search.candidates import propose
from diffshard.bilevel_search.inputs import check_arguments
from diffshard.bilevel_search.plans.base import ValidationRuns
from diffshard.bilevel_search.plans.plan import (
    BilevelPlan,
    Outcome,
    exact_plan,
    mean_prediction,
    proposed_plan,
    validated_plan,
)
from diffshard.bilevel_search.relaxation import best_of, largest_weights, marginal_logits
from diffshard.bilevel_search.validation_runs import CandidatesData, check_data, validate
from search_spaces.base import (
    Batch,
    Choice,
    LossAndGradients,
    LossySpace,
    Params,
    PerStrategy,
    RelaxedChoice,
    Residuals,
    SearchSpace,
    check_is_loss,
    traced_loss,
)

_HEAD_START = 0.01
"""By how much the logits of exact strategies begin above others: ten times the noise with which logits begin."""


class StepKeys(NamedTuple):
    """Random keys of one step: of the strategies' noise in training, and of validation."""

    noise: jax.Array
    validation: jax.Array


class Model(Protocol):
    """A model whose parameters train while a choice is searched.

    Attributes:
      baseline_choice: the choice that others are compared with, `[V]`.
      baseline_seconds: seconds that cost ratios are formed with.
    """

    @property
    def space(self) -> SearchSpace[Any]: ...  # noqa: D102
    @property
    def baseline_choice(self) -> Choice: ...  # noqa: D102
    @property
    def baseline_seconds(self) -> float: ...  # noqa: D102

    def check_arguments(self, params: Params, batch: Batch) -> None:
        """Raises `ValueError` where arrays have other shapes or types than the model was built for."""
        ...

    def check_loss(self, params: Params, batch: Batch, key: jax.Array) -> None:
        """Raises `ValueError` where what would train is not the loss that is meant."""
        ...

    def init_residuals(self, params: Params) -> Residuals:
        """Returns the residuals before the first step."""
        ...

    def init_logits(self) -> PerStrategy:
        """Returns the logits that the search starts near, V arrays `[S_v]`."""
        ...

    def train(
        self, state: BilevelState, relaxed_choice: RelaxedChoice, batch: Batch, keys: StepKeys
    ) -> LossAndGradients:
        """Returns the training loss at the state's parameters, its gradients and the next residuals."""
        ...

    def increase(
        self,
        state: BilevelState,
        relaxed_choice: RelaxedChoice,
        gradients: Params,
        val_batch: Batch,
        keys: StepKeys,
    ) -> tuple[jax.Array, PerStrategy]:
        """Returns by how much the relaxed choice raises the validation loss, and the slopes of this in it."""
        ...

    def plan(self, outcome: Outcome, data: CandidatesData | None) -> BilevelPlan:
        """Returns the plan that a search ends with.

        Args:
          data: to train candidates on, where the loss depends on the choice; None takes the search's proposal.
        """
        ...

    def validate(self, outcome: Outcome, data: CandidatesData) -> ValidationRuns:
        """Trains the search's proposal and simpler choices from the start.

        Raises:
          ValueError: the loss does not depend on the choice, or the data have other shapes than the search.
        """
        ...


@dataclass(frozen=True)
class ExactModel:
    """A model whose loss does not depend on the choice: it trains on the user's loss."""

    space: SearchSpace[Any]
    baseline_choice: Choice
    baseline_seconds: float
    loss_fn: LossFn

    def check_arguments(self, params: Params, batch: Batch) -> None:
        """Checks nothing: the user's loss says itself what it takes."""

    def check_loss(self, params: Params, batch: Batch, key: jax.Array) -> None:
        """Raises `ValueError` where the user's loss is not a scalar."""
        check_is_loss(traced_loss(lambda *arguments: jax.eval_shape(self.loss_fn, *arguments), params, batch))

    def init_residuals(self, params: Params) -> Residuals:
        """Returns an empty pytree."""
        del params
        return ()

    def init_logits(self) -> PerStrategy:
        """Returns the logits of the solver's marginals."""
        return marginal_logits(self.space.problem)

    def train(
        self, state: BilevelState, relaxed_choice: RelaxedChoice, batch: Batch, keys: StepKeys
    ) -> LossAndGradients:
        """See `Model`."""
        del relaxed_choice, keys
        return LossAndGradients(*jax.value_and_grad(self.loss_fn)(state.params, batch), state.residuals)

    def increase(
        self,
        state: BilevelState,
        relaxed_choice: RelaxedChoice,
        gradients: Params,
        val_batch: Batch,
        keys: StepKeys,
    ) -> tuple[jax.Array, PerStrategy]:
        """Returns zeros."""
        del state, gradients, val_batch, keys
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, relaxed_choice)

    def plan(self, outcome: Outcome, data: CandidatesData | None) -> BilevelPlan:
        """Returns the plan of the largest weights; no data are needed, because the loss is the same for all choices."""
        del data
        return exact_plan(self.space, best_of(self.space.problem, {largest_weights(outcome.relaxed_choice): 0.0}, None))

    def validate(self, outcome: Outcome, data: CandidatesData) -> ValidationRuns:
        """Raises `ValueError`: there is nothing to compare."""
        raise ValueError("`validate` compares losses, and in this space every choice has the same.")


@dataclass(frozen=True)
class LossyModel:
    """A model whose loss depends on the choice."""

    space: LossySpace
    baseline_choice: Choice
    baseline_seconds: float
    estimator: Increase
    optimizer: optax.GradientTransformation

    def check_arguments(self, params: Params, batch: Batch) -> None:
        """See `Model`."""
        check_arguments(self.space, params=params, batch=batch)

    def check_loss(self, params: Params, batch: Batch, key: jax.Array) -> None:
        """See `LossySpace.check_loss`."""
        self.space.check_loss(params, batch, key)

    def init_residuals(self, params: Params) -> Residuals:
        """See `Model`."""
        return self.space.init_residuals(params)

    def init_logits(self) -> PerStrategy:
        """Returns logits near 0, for uniform weights, of which the exact strategies' are the largest."""
        sizes = num_strategies(self.space.problem).tolist()
        return [_HEAD_START * jax.nn.one_hot(s, size) for s, size in zip(self.baseline_choice, sizes, strict=True)]

    def train(
        self, state: BilevelState, relaxed_choice: RelaxedChoice, batch: Batch, keys: StepKeys
    ) -> LossAndGradients:
        """Trains with the strategies of largest weight, so that what is chosen changes what is measured."""
        selection = [weights.argmax() for weights in relaxed_choice]
        return self.space.loss_and_gradients(state.params, batch, selection, state.residuals, keys.noise, state.step)

    def increase(
        self,
        state: BilevelState,
        relaxed_choice: RelaxedChoice,
        gradients: Params,
        val_batch: Batch,
        keys: StepKeys,
    ) -> tuple[jax.Array, PerStrategy]:
        """See `Model`."""
        val_key, sizes_key = jax.random.split(keys.validation)
        sizes = step_sizes(self.optimizer, state.params_state, state.params, gradients, sizes_key)
        progress = TrainingProgress(state.step, sizes)

        def increase(relaxed_choice: RelaxedChoice) -> jax.Array:
            return self.estimator(self.space, state.params, val_batch, relaxed_choice, val_key, progress)

        return jax.value_and_grad(increase)(relaxed_choice)

    def plan(self, outcome: Outcome, data: CandidatesData | None) -> BilevelPlan:
        """Returns the plan of the search's proposal, or with data the plan of the candidate that trained best."""
        if data is None:
            return proposed_plan(self.space, self.baseline_choice, outcome)
        return validated_plan(self.space, self.baseline_seconds, self.validate(outcome, data), outcome.objective.limit)

    def validate(self, outcome: Outcome, data: CandidatesData) -> ValidationRuns:
        """See `Model`."""
        check_data(data, outcome.state, outcome.batch_shapes)
        prediction = mean_prediction(outcome.state, self.baseline_choice)
        proposal = proposed_plan(self.space, self.baseline_choice, outcome).choice
        return validate(
            self.space,
            propose(self.space, proposal, prediction, max_candidates=data.num_candidates),
            data,
            optimizer=self.optimizer,
            objective=outcome.objective.frozen_at(outcome.state.step),
            prediction=prediction,
        )


_NUM_STEPS = 8
"""Steps of the optimiser that are followed; momentum of 0.9 has shown more than half of an impulse by then."""


def params_after_step(
    optimizer: optax.GradientTransformation, state: BilevelState, gradients: Params
) -> tuple[Params, optax.OptState]:
    """Returns the parameters after a step of their optimiser, and its state."""
    updates, params_state = optimizer.update(gradients, state.params_state, state.params)
    return optax.apply_updates(state.params, updates), params_state


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
    """
    signs: Any = optax.tree.random_like(key, gradients, sampler=jax.random.rademacher)

    def total_update(first: Params) -> Params:
        def follow(carry: tuple[Params, optax.OptState], number: jax.Array) -> Any:
            total, state = carry
            gradient = jax.tree.map(lambda one, other: jnp.where(number == 0, one, other), first, gradients)
            updates, state = optimizer.update(gradient, state, params)
            return (jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, updates), state), None

        begin = jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.float32), gradients), state
        return jax.lax.scan(follow, begin, jnp.arange(_NUM_STEPS))[0][0]

    total, along = jax.jvp(total_update, (gradients,), (signs,))

    def size(gradient: jax.Array, sign: jax.Array, total: jax.Array, along: jax.Array) -> jax.Array:
        # The root in adam-like optimisers has no derivative where a gradient is exactly 0.
        slope = -along * sign.astype(jnp.float32)
        slope = jnp.where((slope > 0) & jnp.isfinite(slope), slope, 0.0)
        rms, step_rms = (jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean()) for x in (gradient, total / _NUM_STEPS))
        by_steps = jnp.where(rms > 0, step_rms / jnp.where(rms > 0, rms, 1.0), 0.0)
        return jnp.where((slope > 0).mean() > 0.5, slope, by_steps)

    return jax.tree.map(size, gradients, signs, total, along)
