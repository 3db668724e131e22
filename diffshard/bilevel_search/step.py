"""One step of a bilevel search: θ on training data, A on validation data and cost, both from where the state is."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.base import Problem
from diffshard.bilevel_search.base import BilevelMetrics, BilevelState, Increase, LossFn, Objective
from diffshard.bilevel_search.inputs import Mesh, checked_exact_space, checked_lossy_space
from diffshard.bilevel_search.model import ExactModel, LossyModel, Model, StepKeys, params_after_step
from diffshard.bilevel_search.objective import CostWeight
from diffshard.bilevel_search.relaxation import (
    allowed_strategies,
    exact_cost,
    first_allowed,
    mean_cost,
    relaxed_seconds,
    softmax_choice,
)
from search_spaces.base import Batch, PerStrategy, RelaxedChoice, SearchSpace

_DECIDED_ENTROPY = 0.01
"""Share of uniform weights' entropy; below it the softmax is so flat that no gradient moves the logits any more."""
_WORTHWHILE_SAVING = 0.01  # of the exact choice's cost: a saving for which a change of the choice would be worth it
_LEAST_UPDATE_SHARE = 0.005
"""Least share of the mean slopes that a step of the choice replaces, so that slopes of later training count, too."""


@dataclass(frozen=True)
class Settings:
    """The settings of a search, as its user gave them; see `bilevel`."""

    loss_fn: LossFn | None
    weights_optimizer: optax.GradientTransformation
    choice_optimizer: optax.GradientTransformation
    objective: Objective | None
    estimator: Increase
    choice_every: int


class _ChoiceState(NamedTuple):
    """The fields of `BilevelState` that a step of the choice changes."""

    logits: PerStrategy
    choice_state: optax.OptState
    multiplier: jax.Array
    offset: jax.Array
    slopes: PerStrategy


class _ChoiceMetrics(NamedTuple):
    """The measurements of a step of the choice: the increase, and norms of the scaled slopes of loss and of cost."""

    increase: jax.Array
    loss_slope: jax.Array
    cost_slope: jax.Array


@dataclass(frozen=True, eq=False)
class Step:
    """A step in one space: a pure function of the state and two batches.

    Attributes:
      model: how θ trains, and how its loss depends on the choice.
      objective: how loss and cost are weighed here.
    """

    settings: Settings
    model: Model
    objective: Objective

    @property
    def problem(self) -> Problem:
        """The problem of the space."""
        return self.model.space.problem

    def __call__(
        self, state: BilevelState, train_batch: Batch, val_batch: Batch
    ) -> tuple[BilevelState, BilevelMetrics]:
        """Returns the state after the step, or the one before it where a number is not finite."""
        self.model.check_arguments(state.params, train_batch)
        key, noise_key, val_key = jax.random.split(state.key, 3)
        keys = StepKeys(noise_key, val_key)
        relaxed_choice = softmax_choice(self.problem, state.logits)
        training_result = self.model.train(state, relaxed_choice, train_batch, keys)
        params, params_state = params_after_step(self.settings.weights_optimizer, state, training_result.gradients)
        cost, cost_slopes = jax.value_and_grad(self._cost_ratio)(relaxed_choice)

        def choose() -> tuple[_ChoiceState, _ChoiceMetrics]:
            value, slopes = self.model.increase(state, relaxed_choice, training_result.gradients, val_batch, keys)
            return self._choose(state, relaxed_choice, value, slopes, cost_slopes)

        next_choice, choice_metrics = self._choose_or_wait(state, relaxed_choice, choose)
        accepted_state = BilevelState(
            params=params,
            params_state=params_state,
            residuals=training_result.residuals,
            **next_choice._asdict(),
            step=state.step + 1,
            num_refused=state.num_refused,
            key=key,
        )
        is_finite = _all_finite((training_result.loss, choice_metrics, cost))
        is_finite = is_finite & _stays_finite(state._replace(key=0), accepted_state._replace(key=0))
        refused_state = state._replace(key=key, num_refused=state.num_refused + 1)
        entropy, undershoot, is_collapsed = self._collapse(
            relaxed_choice, _mean_increase(next_choice, relaxed_choice), cost_slopes
        )
        metrics = BilevelMetrics(
            train_loss=training_result.loss,
            loss_increase=choice_metrics.increase,
            cost_ratio=cost,
            multiplier=state.multiplier,
            loss_slope=choice_metrics.loss_slope,
            cost_slope=choice_metrics.cost_slope,
            entropy=entropy,
            undershoot=undershoot,
            collapsed=is_collapsed,
            refused=~is_finite,
        )
        return jax.lax.cond(is_finite, lambda: accepted_state, lambda: refused_state), metrics

    def _choose_or_wait(
        self,
        state: BilevelState,
        relaxed_choice: RelaxedChoice,
        choose: Callable[[], tuple[_ChoiceState, _ChoiceMetrics]],
    ) -> tuple[_ChoiceState, _ChoiceMetrics]:
        """Takes a step of the choice in each `choice_every`-th step of θ; the others leave the choice as it is."""
        choice_before = _ChoiceState(state.logits, state.choice_state, state.multiplier, state.offset, state.slopes)

        def wait() -> tuple[_ChoiceState, _ChoiceMetrics]:
            return choice_before, _ChoiceMetrics(
                _mean_increase(choice_before, relaxed_choice), jnp.zeros(()), jnp.zeros(())
            )

        if self.settings.choice_every == 1:
            return choose()
        return jax.lax.cond(state.step % self.settings.choice_every == 0, choose, wait)

    def _cost_ratio(self, relaxed_choice: RelaxedChoice) -> jax.Array:
        """Returns the relaxed cost as a ratio to the baseline's, so that nothing depends on the unit of time."""
        return relaxed_seconds(self.problem, relaxed_choice) / self.model.baseline_seconds

    def _choose(
        self,
        state: BilevelState,
        relaxed_choice: RelaxedChoice,
        value: jax.Array,
        slopes: PerStrategy,
        cost_slopes: PerStrategy,
    ) -> tuple[_ChoiceState, _ChoiceMetrics]:
        """Takes a step of the choice."""
        value = value.astype(state.offset.dtype)  # whatever the loss is computed in
        # The first step's slopes are replaced in the second: adam's first step does not tell the size of later ones.
        share = jnp.maximum(_LEAST_UPDATE_SHARE, 1.0 / jnp.maximum(state.step // self.settings.choice_every, 1))
        new_offset = value - optax.tree.vdot(slopes, relaxed_choice)
        offset, means = jax.tree.map(
            lambda old, new: old + share * (new - old), (state.offset, state.slopes), (new_offset, slopes)
        )
        increase = offset + optax.tree.vdot(means, relaxed_choice)  # the noise of one batch would bias the multiplier
        scales = self.objective.scales(state.multiplier, increase, state.step)
        _, pull_back = jax.vjp(functools.partial(softmax_choice, self.problem), state.logits)
        (loss_gradient,) = pull_back(jax.tree.map(lambda slope: scales.loss * slope, slopes))
        (cost_gradient,) = pull_back(jax.tree.map(lambda slope: scales.cost * slope, cost_slopes))
        updates, choice_state = self.settings.choice_optimizer.update(
            jax.tree.map(jnp.add, loss_gradient, cost_gradient), state.choice_state, state.logits
        )
        logits: Any = optax.apply_updates(state.logits, updates)
        multiplier = self.objective.next_multiplier(state.multiplier, increase)
        metrics = _ChoiceMetrics(value, optax.tree.norm(loss_gradient), optax.tree.norm(cost_gradient))
        return _ChoiceState(logits, choice_state, multiplier, offset, means), metrics

    def _collapse(
        self, relaxed_choice: RelaxedChoice, increase: jax.Array, cost_slopes: PerStrategy
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns entropy, undershoot and whether the relaxed choice has collapsed; see `BilevelMetrics`."""
        entropy = jnp.mean(jnp.stack([_entropy(weights) for weights in relaxed_choice if weights.size > 1]))
        # By how much the linearised cost could still fall (the Frank-Wolfe gap), as a ratio to the exact choice's.
        possible_saving = sum(
            weights @ slope - jnp.min(jnp.where(mask, slope, jnp.inf))
            for weights, slope, mask in zip(relaxed_choice, cost_slopes, allowed_strategies(self.problem), strict=True)
        )
        undershoot = jnp.zeros(())
        if self.objective.limit is not None:
            undershoot = 1.0 - increase / self.objective.limit
        is_collapsed = (entropy < _DECIDED_ENTROPY) & (undershoot > 0.5) & (possible_saving > _WORTHWHILE_SAVING)
        return entropy, undershoot, is_collapsed


def step_in(space: SearchSpace[Any] | Problem, settings: Settings, mesh: Mesh | None) -> Step:
    """Returns the step in a space, on the devices of a mesh if it has some.

    The user says whether the loss depends on the choice: with an objective the space must be a `LossySpace`, without
    one every choice must have the same loss.
    """
    if settings.objective is None:
        return _exact_step(space, settings)
    lossy = checked_lossy_space(space)
    if isinstance(mesh, jax.sharding.Mesh):
        lossy = lossy.on_mesh(mesh)
    exact = tuple(int(strategy) for strategy in lossy.exact_choice())
    model = LossyModel(
        space=lossy,
        baseline_choice=exact,
        baseline_seconds=exact_cost(lossy.problem, exact),
        estimator=settings.estimator,
        optimizer=settings.weights_optimizer,
    )
    return Step(settings, model, settings.objective)


def _exact_step(space: SearchSpace[Any] | Problem, settings: Settings) -> Step:
    exact = checked_exact_space(space)
    if settings.loss_fn is None:
        raise ValueError("`loss_fn` must be given where `space` is a Problem or has no loss of its own; got None.")
    problem = exact.problem
    model = ExactModel(exact, first_allowed(problem), mean_cost(problem), settings.loss_fn)
    return Step(settings, model, CostWeight(1.0))


def _mean_increase(choice: _ChoiceState, relaxed_choice: RelaxedChoice) -> jax.Array:
    """Returns the increase of the loss by the mean slopes."""
    return choice.offset + optax.tree.vdot(choice.slopes, relaxed_choice)


def _entropy(weights: jax.Array) -> jax.Array:
    """Returns the entropy as a share of uniform weights'."""
    return -jnp.sum(weights * jnp.log(jnp.maximum(weights, 1e-30))) / np.log(weights.size)


def _all_finite(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))


def _stays_finite(before: Any, after: Any) -> jax.Array:
    """Returns whether everything is finite that was before; an optimiser may keep an infinite least value."""
    return _all_finite(
        jax.tree.map(lambda old, new: jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new)), before, after)
    )
