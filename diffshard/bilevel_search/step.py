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
from diffshard.bilevel_search.estimators import Estimator, Moment, unrolled
from diffshard.bilevel_search.objective import CostWeight, MaxLossIncrease, Objective
from diffshard.bilevel_search.space import (
    Batch,
    Choice,
    Params,
    Residuals,
    Rows,
    allowed,
    check_arguments,
    cost_ratio,
    is_lossless,
    problem_of,
    reference_choice,
    reference_cost,
    softmax_rows,
)
from diffshard.bilevel_search.state import BilevelMetrics, BilevelState
from diffshard.bilevel_search.step_sizes import step_sizes

LossFn = Callable[[Params, Batch], jax.Array]

_DECIDED = 0.01  # of the entropy of uniform rows, from which on no gradient moves a row any more
_CHEAPER = 0.01  # of the exact choice's cost, which would be worth a change
_FORGET = 0.005  # of the mean slopes at least, each step of the choice: what a schedule does shows over training


@dataclass(frozen=True)
class Settings:
    """What the user of a search has chosen; see `bilevel`."""

    loss_fn: LossFn | None
    weights_optimizer: optax.GradientTransformation
    choice_optimizer: optax.GradientTransformation
    objective: Objective | None
    estimator: Estimator
    order: int
    choice_every: int


class _Trained(NamedTuple):
    """A training step as the estimator runs it: the loss before it, gradients, what strategies carry on."""

    loss: jax.Array
    gradients: Params
    residuals: Residuals


class _Choosing(NamedTuple):
    """What a step of the choice changes, in the terms of `BilevelState`."""

    logits: Rows
    choice_state: optax.OptState
    multiplier: jax.Array
    offset: jax.Array
    slopes: Rows


class _Seen(NamedTuple):
    """What a step of the choice saw: the increase, norms of the weighed slopes of loss and of cost."""

    increase: jax.Array
    loss_slope: jax.Array
    cost_slope: jax.Array


@dataclass(frozen=True, eq=False)
class Step:
    """A step in one space: a pure function of the state and two batches.

    Attributes:
      settings: of the user.
      space: where the choice is made.
      problem: its nodes and costs.
      reference: the exact choice.
      reference_cost: in seconds.
      objective: how loss and cost are weighed here.
    """

    settings: Settings
    space: Any
    problem: Problem
    reference: Choice
    reference_cost: float
    objective: Objective

    def __call__(
        self, state: BilevelState, train_batch: Batch, val_batch: Batch
    ) -> tuple[BilevelState, BilevelMetrics]:
        """The state after the step, or the one before it where a number is not finite."""
        check_arguments(self.space, params=state.params, batch=train_batch)
        key, run_key, val_key = jax.random.split(state.key, 3)
        draw_key, noise_key = jax.random.split(run_key)
        rows = softmax_rows(self.problem, state.logits)
        trained = self._train(state, rows, train_batch, draw_key, noise_key)
        params, weights_state = self._moved(state, trained.gradients)
        cost, cost_slopes = jax.value_and_grad(lambda p: cost_ratio(self.problem, p, self.reference_cost))(rows)
        before = _Choosing(state.logits, state.choice_state, state.multiplier, state.offset, state.slopes)

        def choose() -> tuple[_Choosing, _Seen]:
            value, slopes = self._increase(state, rows, trained, train_batch, val_batch, (draw_key, noise_key, val_key))
            return self._chosen(state, rows, value, slopes, cost_slopes)

        def wait() -> tuple[_Choosing, _Seen]:
            return before, _Seen(self._mean_increase(before, rows), jnp.zeros(()), jnp.zeros(()))

        if self.settings.choice_every == 1:
            choosing, seen = choose()
        else:
            choosing, seen = jax.lax.cond(state.step % self.settings.choice_every == 0, choose, wait)
        after = BilevelState(
            params=params,
            weights_state=weights_state,
            residuals=trained.residuals,
            **choosing._asdict(),
            step=state.step + 1,
            num_refused=state.num_refused,
            key=key,
        )
        fine = _all_finite((trained.loss, seen, cost)) & _stays_finite(state._replace(key=0), after._replace(key=0))
        refused = state._replace(key=key, num_refused=state.num_refused + 1)
        entropy, undershoot, collapsed = self._collapse(rows, self._mean_increase(choosing, rows), cost_slopes)
        metrics = BilevelMetrics(
            train_loss=trained.loss,
            loss_increase=seen.increase,
            cost_ratio=cost,
            multiplier=state.multiplier,
            loss_slope=seen.loss_slope,
            cost_slope=seen.cost_slope,
            entropy=entropy,
            undershoot=undershoot,
            collapsed=collapsed,
            refused=~fine,
        )
        return jax.lax.cond(fine, lambda: after, lambda: refused), metrics

    def _train(
        self, state: BilevelState, rows: Rows, batch: Batch, draw_key: jax.Array, noise_key: jax.Array
    ) -> _Trained:
        if is_lossless(self.space):
            assert self.settings.loss_fn is not None
            loss, gradients = jax.value_and_grad(self.settings.loss_fn)(state.params, batch)
            return _Trained(loss, gradients, state.residuals)
        running = self.settings.estimator.running
        selection = self.reference if running is None else running(rows, draw_key)
        return _Trained(
            *self.space.loss_and_gradients(state.params, batch, selection, state.residuals, noise_key, state.step)
        )

    def _increase(
        self,
        state: BilevelState,
        rows: Rows,
        trained: _Trained,
        train_batch: Batch,
        val_batch: Batch,
        keys: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, Rows]:
        """The increase that the estimator sees, and its slopes in the rows."""
        if is_lossless(self.space):
            return jnp.zeros(()), jax.tree.map(jnp.zeros_like, rows)
        (draw_key, noise_key, val_key), settings = keys, self.settings
        val_key, sizes_key = jax.random.split(val_key)
        optimizer, gradients = settings.weights_optimizer, trained.gradients
        sizes = step_sizes(optimizer, state.weights_state, state.params, gradients, sizes_key)
        moment = Moment(state.step, sizes)

        def increase(params: Params, rows: Rows) -> jax.Array:
            return settings.estimator.increase(self.space, params, val_batch, rows, val_key, moment)

        weights = settings.estimator.weights
        if settings.order == 1 or weights is None:
            return jax.value_and_grad(increase, argnums=1)(state.params, rows)

        def train_loss(params: Params, rows: Rows) -> jax.Array:
            return self.space.mixed_loss(params, train_batch, weights(rows, draw_key), noise_key, state.step)

        return unrolled(increase, train_loss, lambda g: self._moved(state, g)[0], state.params, rows, gradients)

    def _chosen(
        self, state: BilevelState, rows: Rows, value: jax.Array, slopes: Rows, cost_slopes: Rows
    ) -> tuple[_Choosing, _Seen]:
        """A step of the choice."""
        value = value.astype(state.offset.dtype)  # whatever the loss is computed in
        # The first look is forgotten at the second: adam's first step does not tell the size of those to come.
        share = jnp.maximum(_FORGET, 1.0 / jnp.maximum(state.step // self.settings.choice_every, 1))
        seen_offset = value - optax.tree.vdot(slopes, rows)
        offset, means = jax.tree.map(
            lambda old, new: old + share * (new - old), (state.offset, state.slopes), (seen_offset, slopes)
        )
        increase = offset + optax.tree.vdot(means, rows)  # the noise of one batch would bias the multiplier
        weights = self.objective.weights(state.multiplier, increase, state.step)
        _, pull_back = jax.vjp(functools.partial(softmax_rows, self.problem), state.logits)
        (of_loss,) = pull_back(jax.tree.map(lambda slope: weights.loss * slope, slopes))
        (of_cost,) = pull_back(jax.tree.map(lambda slope: weights.cost * slope, cost_slopes))
        updates, choice_state = self.settings.choice_optimizer.update(
            jax.tree.map(jnp.add, of_loss, of_cost), state.choice_state, state.logits
        )
        logits: Any = optax.apply_updates(state.logits, updates)
        multiplier = self.objective.next_multiplier(state.multiplier, increase)
        seen = _Seen(value, optax.tree.norm(of_loss), optax.tree.norm(of_cost))
        return _Choosing(logits, choice_state, multiplier, offset, means), seen

    def _mean_increase(self, choosing: _Choosing, rows: Rows) -> jax.Array:
        return choosing.offset + optax.tree.vdot(choosing.slopes, rows)

    def _moved(self, state: BilevelState, gradients: Params) -> tuple[Params, optax.OptState]:
        updates, weights_state = self.settings.weights_optimizer.update(gradients, state.weights_state, state.params)
        return optax.apply_updates(state.params, updates), weights_state

    def _collapse(self, rows: Rows, increase: jax.Array, cost_slopes: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Entropy, undershoot and whether the rows have collapsed, as `BilevelMetrics` has them."""
        entropy = jnp.mean(jnp.stack([_entropy(row) for row in rows if row.size > 1]))
        # By how much the linearised cost could still fall (the Frank-Wolfe gap), as a ratio to the exact choice's.
        could_fall = sum(
            row @ slope - jnp.min(jnp.where(mask, slope, jnp.inf))
            for row, slope, mask in zip(rows, cost_slopes, allowed(self.problem), strict=True)
        )
        undershoot = jnp.zeros(())
        if isinstance(self.objective, MaxLossIncrease):
            undershoot = 1.0 - increase / self.objective.most
        return entropy, undershoot, (entropy < _DECIDED) & (undershoot > 0.5) & (could_fall > _CHEAPER)


def step_in(space: Any, settings: Settings) -> Step:
    """Checks a space against the settings.

    Raises:
      ValueError: see `bilevel`.
    """
    problem, objective = problem_of(space), settings.objective
    if is_lossless(space):
        if settings.loss_fn is None:
            raise ValueError("`loss_fn` must be given where `space` is a Problem or has no method `loss`; got None.")
        if objective is not None:
            given = "max_loss_increase" if isinstance(objective, MaxLossIncrease) else "cost_weight"
            raise ValueError(
                f"`space` is a Problem or has no method `loss`, so every choice has the same loss; leave out `{given}`."
            )
        objective = CostWeight(1.0)
    elif objective is None:
        raise ValueError("give `max_loss_increase` or `cost_weight`: this space trades loss for cost.")
    elif not hasattr(space, settings.estimator.needs):
        raise ValueError(f"`estimator` needs a method `{settings.estimator.needs}`, which `space` does not have.")
    reference, reference_s = reference_choice(space, problem), reference_cost(space, problem)
    return Step(settings, space, problem, reference, reference_s, objective)


def _entropy(row: jax.Array) -> jax.Array:
    """As a share of uniform weights'."""
    return -jnp.sum(row * jnp.log(jnp.maximum(row, 1e-30))) / np.log(row.size)


def _all_finite(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))


def _stays_finite(before: Any, after: Any) -> jax.Array:
    """Whether all is finite that was; an optimiser may keep an infinity as the least of nothing, say."""
    return _all_finite(
        jax.tree.map(lambda old, new: jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new)), before, after)
    )
