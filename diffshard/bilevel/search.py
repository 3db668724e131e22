"""`bilevel`: parameters on training data and the choice on validation data and cost, one jitted step for both."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.problem import num_strategies
from diffshard.bilevel.candidates import CandidatesData, Proof, propose, prove
from diffshard.bilevel.estimators import Estimator, Increase, resolve, unrolled
from diffshard.bilevel.objective import CostWeight, MaxLossIncrease, Objective
from diffshard.bilevel.plan import BilevelPlan, Prediction, plan_of, proposals
from diffshard.bilevel.space import (
    Batch,
    HasLossless,
    Params,
    Residuals,
    Rows,
    allowed,
    cost_ratio,
    is_function,
    is_lossless,
    problem_of,
    reference_choice,
    reference_cost,
    softmax_rows,
)

LossFn = Callable[[Params, Batch], jax.Array]

_DECIDED = 0.01  # of the entropy of uniform rows, from which on no gradient moves a row any more
_CHEAPER = 0.01  # of the exact choice's cost, which would be worth a change
_FORGET = 0.05  # of the mean slopes, each step


class BilevelState(NamedTuple):
    """What a search carries from step to step; a pytree of arrays, so it can be checkpointed.

    Attributes:
      params: θ, trained as they are searched with.
      weights_state: of the optimiser of θ.
      residuals: what the exact choice's strategies carry.
      logits: A, V arrays `[S_v]`.
      choice_state: of the optimiser of A.
      multiplier: of the bound on the loss, 0 without one.
      offset: running mean of the loss increase less ⟨slopes, rows⟩.
      slopes: V arrays `[S_v]`, running mean of the increase's slope in the rows: what a strategy adds to the loss.
      step: how many steps were taken.
      num_refused: how many were refused.
      key: consumed by every step.
    """

    params: Params
    weights_state: optax.OptState
    residuals: Residuals
    logits: Rows
    choice_state: optax.OptState
    multiplier: jax.Array
    offset: jax.Array
    slopes: Rows
    step: jax.Array
    num_refused: jax.Array
    key: jax.Array


class BilevelMetrics(NamedTuple):
    """What one step saw; scalars.

    Attributes:
      train_loss: of θ before the step, as training runs under the estimator.
      loss_increase: what the rows add to the loss of this validation batch, by the estimator; 0 in a lossless space.
      cost_ratio: relaxed cost of the rows to the exact choice's.
      multiplier: of the bound on the loss.
      loss_slope: norm of the weighed slope of the loss in A.
      cost_slope: norm of the weighed slope of the cost: beside `loss_slope` it tells which of the two decides.
      entropy: mean over nodes, as a share of uniform rows': 1 is undecided, 0 is decided.
      undershoot: share of the allowed loss increase that the mean of late steps does not use, negative above it; 0
        without a bound.
      collapsed: the rows are decided, so that no gradient moves them, with over half of the allowed loss unused
        although there is a cheaper choice.
      refused: the step gave a number that is not finite; the state stayed what it was, but for its key.
    """

    train_loss: jax.Array
    loss_increase: jax.Array
    cost_ratio: jax.Array
    multiplier: jax.Array
    loss_slope: jax.Array
    cost_slope: jax.Array
    entropy: jax.Array
    undershoot: jax.Array
    collapsed: jax.Array
    refused: jax.Array


class _Seen(NamedTuple):
    """What both steps are made of: losses, and slopes of the increase in the rows."""

    train_loss: jax.Array
    gradients: Params
    residuals: Residuals
    increase: jax.Array
    slopes: Rows


def bilevel(
    loss_fn: LossFn | None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    *,
    space: Any,
    weights_optimizer: optax.GradientTransformation,
    choice_optimizer: optax.GradientTransformation | None = None,
    max_loss_increase: float | None = None,
    cost_weight: float | Callable[[jax.Array], jax.Array] | None = None,
    estimator: str | Estimator | Increase = "curvature",
    order: int = 1,
) -> "BilevelSearch":
    """Searches strategies that change the loss as well as the cost, while the model trains.

    >>> search = bilevel(loss_fn, mesh, space=space, weights_optimizer=optax.adamw(3e-4), max_loss_increase=0.005)
    >>> state = search.init(key, params, batch)
    >>> for train_batch, val_batch in batches:
    ...     state, metrics = search.update(state, train_batch, val_batch)
    >>> plan, params = search.finish(state)

    Args:
      loss_fn: `loss_fn(params, batch) -> scalar`: what `space` is built of, and what trains where the space is
        lossless. A space that is built already brings its own loss.
      mesh: names the axes that a function `space` builds for. A `Mesh` of devices also runs a space there that has a
        method `on_mesh`; without, and with an `AbstractMesh`, the space runs as it is built: emulated, on one device.
      space: a `diffshard.bilevel.space.Space`; or a function `(loss_fn, mesh_axes, params, batch)` that makes one,
        called by the first `init`; or a `Problem`, or an object with a method `problem()` and no losses, whose choice
        cannot change the loss: A follows the cost alone.
      weights_optimizer: of θ.
      choice_optimizer: of A; None is adam(1e-2). Rows are softmax(A), so steps of adam on A are steps of a row's odds.
      max_loss_increase: the cheapest choice whose validation loss is at most this much above the exact choice's, in
        units of the loss.
      cost_weight: or instead: units of loss that the exact choice's whole cost is worth; a number or a schedule.
      estimator: "curvature", "mixture", "sampled"; one with options, as `curvature(learning_rate=3e-4)` from
        `diffshard.bilevel.estimators`; or a function `Increase`.
      order: 2 lets A see what forward strategies do to training, through one step of θ, for two more gradients.
        Strategies of backward and gradient collectives do not show in it; `curvature` and `prove` see those.

    Raises:
      ValueError: an unknown estimator or one that the space cannot serve, an order that is not 1 or 2, an order of 2
        where training does not depend on the choice, both or neither of `max_loss_increase` and `cost_weight`, numbers
        out of range, or a space without anything to choose.
    """
    if order not in (1, 2):
        raise ValueError(f"`order` must be 1 or 2, got {order!r}.")
    chosen = resolve(estimator)
    if order == 2 and chosen.weights is None:
        raise ValueError(
            f"`order` 2 needs an estimator under which training depends on the choice (mixture, sampled); "
            f"with {estimator!r} it does not. Take order 1."
        )
    if max_loss_increase is not None and cost_weight is not None:
        raise ValueError("give `max_loss_increase` or `cost_weight`, not both: a bound finds its own weight.")
    make_space = None
    if is_function(space):
        if loss_fn is None or mesh is None:
            raise ValueError("`space` is a function that makes a space, which needs `loss_fn` and `mesh`; got None.")
        make_space = functools.partial(space, loss_fn, dict(mesh.shape))
    search = BilevelSearch(
        loss_fn=loss_fn,
        make_space=make_space,
        mesh=mesh,
        weights_optimizer=weights_optimizer,
        choice_optimizer=optax.adam(1e-2) if choice_optimizer is None else choice_optimizer,
        objective=_objective(max_loss_increase, cost_weight),
        estimator=chosen,
        order=order,
    )
    if make_space is None:
        search.settle(space)
    return search


def _objective(most: float | None, weight: float | Callable[[jax.Array], jax.Array] | None) -> Objective | None:
    if most is not None:
        return MaxLossIncrease(most)
    return None if weight is None else CostWeight(weight)


class BilevelSearch:
    """A search of one space: `init`, `update` and `finish`; made by `bilevel`."""

    def __init__(
        self,
        *,
        loss_fn: LossFn | None,
        make_space: Callable[[Params, Batch], Any] | None,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
        weights_optimizer: optax.GradientTransformation,
        choice_optimizer: optax.GradientTransformation,
        objective: Objective | None,
        estimator: Estimator,
        order: int,
    ):
        self.space: Any = None  # until `settle`
        self._loss_fn, self._make_space, self._mesh = loss_fn, make_space, mesh
        self._weights_optimizer, self._choice_optimizer = weights_optimizer, choice_optimizer
        self._objective, self._estimator, self._order = objective, estimator, order
        self._step = jax.jit(self._one_step)

    def settle(self, space: Any) -> None:
        """Checks a space against the settings and takes it.

        Raises:
          ValueError: see `bilevel`.
        """
        self._problem = problem_of(space)
        self._reference = reference_choice(space, self._problem)
        self._reference_cost = reference_cost(space, self._problem)
        if is_lossless(space):
            if self._loss_fn is None:
                raise ValueError("`loss_fn` must be given where `space` has no loss of its own, got None.")
            self._objective = CostWeight(1.0)
        elif self._objective is None:
            raise ValueError("give `max_loss_increase` or `cost_weight`: this space trades loss for cost.")
        elif not hasattr(space, self._estimator.needs):
            raise ValueError(f"`estimator` needs a method `{self._estimator.needs}`, which `space` does not have.")
        on_devices = isinstance(self._mesh, jax.sharding.Mesh) and hasattr(space, "on_mesh")
        self.space = space.on_mesh(self._mesh) if on_devices else space

    def init(self, key: jax.Array, params: Params, batch: Batch) -> BilevelState:
        """Rows near uniform; the same key gives the same search.

        Args:
          key: a JAX random key.
          params: θ to start from.
          batch: of the shapes of training and validation batches.
        """
        if self.space is None:
            assert self._make_space is not None
            self.settle(self._make_space(params, batch))
        key, noise_key = jax.random.split(key)
        sizes = num_strategies(self._problem).tolist()
        keys = jax.random.split(noise_key, len(sizes))
        logits = [1e-3 * jax.random.normal(k, (size,)) for k, size in zip(keys, sizes, strict=True)]
        space: Any = self.space
        return BilevelState(
            params=params,
            weights_state=self._weights_optimizer.init(params),
            residuals=() if is_lossless(space) else space.state(params),
            logits=logits,
            choice_state=self._choice_optimizer.init(logits),
            multiplier=jnp.zeros(()),
            offset=jnp.zeros(()),
            slopes=[jnp.zeros(size) for size in sizes],
            step=jnp.zeros((), jnp.int32),
            num_refused=jnp.zeros((), jnp.int32),
            key=key,
        )

    def update(self, state: BilevelState, train_batch: Batch, val_batch: Batch) -> tuple[BilevelState, BilevelMetrics]:
        """One step of θ on `train_batch` and one of A on `val_batch` and the cost, both from where the state is.

        Pure, and compiled once for each set of shapes.

        Raises:
          ValueError: validation data of other shapes than training data, or no `init` before.
        """
        if self.space is None:
            raise ValueError("`update` needs a space; call `init(key, params, batch)` first, which makes it.")
        train, val = (jax.tree.map(_aval, batch) for batch in (train_batch, val_batch))
        if train != val:
            raise ValueError(f"`val_batch` must have the shapes of `train_batch`, {train}; got {val}.")
        return self._step(state, train_batch, val_batch)

    def rows(self, state: BilevelState) -> list[np.ndarray]:
        """V arrays `[S_v]`: the weights of each node's strategies."""
        return [np.asarray(row) for row in softmax_rows(self._problem, state.logits)]

    def finish(
        self, state: BilevelState, *, candidates_data: CandidatesData | None = None
    ) -> tuple[BilevelPlan, Params]:
        """The discrete choice, and the parameters that training goes on from.

        Under a bound on the loss the choice is the cheapest one of predicted increase within it that is found: the rows
        rounded, or the solver's answer to the cost with mean slopes as a budget; if none is within it, the one that
        exceeds it least, and the plan says so. Predictions are linear in the rows: good for `curvature`, which is
        linear itself, and rough for `mixture` and `sampled`, which training (`candidates_data`) should decide.

        Args:
          state: after some `update`s.
          candidates_data: trains the proposal and simpler choices from the start and returns the winner, with the table
            in `plan.proof`. None returns the proposal.
        """
        most = self._objective.most if isinstance(self._objective, MaxLossIncrease) else None
        exact = self._reference if isinstance(self.space, HasLossless) else None
        found = proposals(self._problem, self.rows(state), self._prediction(state), exact, most)
        plan = plan_of(self.space, self._problem, found, most)
        if candidates_data is None or is_lossless(self.space):
            return plan, state.params
        proof = self.prove(state, candidates_data)
        proven = plan_of(self.space, self._problem, {proof.winner.choice: proof.winner.loss_increase}, most)
        winner = proof.winner
        proven = proven._replace(seconds=winner.seconds, cost_ratio=winner.seconds / self._reference_cost)
        return proven._replace(exact_share=winner.exact_share, proof=proof), state.params

    def prove(self, state: BilevelState, data: CandidatesData) -> Proof:
        """Trains the proposal, every uniform and by-type choice, and schedules from the start; see `candidates.prove`.

        Raises:
          ValueError: the space is lossless, so that there is nothing to prove, or the data are too short.
        """
        if is_lossless(self.space):
            raise ValueError("`prove` compares losses, and in this space every choice has the same.")
        plan, _ = self.finish(state)
        objective = self._objective
        if isinstance(objective, CostWeight):  # where its schedule has come to
            objective = CostWeight(float(objective.weights(state.multiplier, state.offset, state.step).cost))
        assert objective is not None
        found = propose(
            self.space, self._problem, plan.choice, self._prediction(state), self._reference, most=data.num_candidates
        )
        return prove(self.space, found, self._reference, data, optimizer=self._weights_optimizer, objective=objective)

    def _prediction(self, state: BilevelState) -> Prediction:
        slopes = [np.asarray(slope, float) for slope in state.slopes]
        seen = Prediction(float(state.offset), slopes)
        if not isinstance(self.space, HasLossless):
            return seen
        return seen._replace(offset=seen.offset - seen.increase(self._reference))  # the exact choice adds nothing

    def _one_step(
        self, state: BilevelState, train_batch: Batch, val_batch: Batch
    ) -> tuple[BilevelState, BilevelMetrics]:
        assert self._objective is not None
        key, step_key = jax.random.split(state.key)
        rows, pull_back = jax.vjp(functools.partial(softmax_rows, self._problem), state.logits)
        seen = self._see(state, rows, train_batch, val_batch, step_key)
        params, weights_state = self._moved(state, seen.gradients)
        cost, cost_slopes = jax.value_and_grad(lambda p: cost_ratio(self._problem, p, self._reference_cost))(rows)

        share = jnp.maximum(_FORGET, 1.0 / (state.step + 1.0))
        seen_offset = seen.increase - optax.tree.vdot(seen.slopes, rows)
        offset, slopes = jax.tree.map(
            lambda old, new: old + share * (new - old), (state.offset, state.slopes), (seen_offset, seen.slopes)
        )
        increase = offset + optax.tree.vdot(slopes, rows)  # the noise of one batch would bias the multiplier
        weights = self._objective.weights(state.multiplier, increase, state.step)
        (of_loss,) = pull_back(jax.tree.map(lambda slope: weights.loss * slope, seen.slopes))
        (of_cost,) = pull_back(jax.tree.map(lambda slope: weights.cost * slope, cost_slopes))
        updates, choice_state = self._choice_optimizer.update(
            jax.tree.map(jnp.add, of_loss, of_cost), state.choice_state, state.logits
        )
        logits: Any = optax.apply_updates(state.logits, updates)
        after = BilevelState(
            params=params,
            weights_state=weights_state,
            residuals=seen.residuals,
            logits=logits,
            choice_state=choice_state,
            multiplier=self._objective.next_multiplier(state.multiplier, increase),
            offset=offset,
            slopes=slopes,
            step=state.step + 1,
            num_refused=state.num_refused,
            key=key,
        )
        fine = _all_finite((seen.train_loss, seen.increase, cost, after._replace(key=state.step)))
        refused = state._replace(key=key, num_refused=state.num_refused + 1)
        entropy, undershoot, collapsed = self._collapse(rows, increase, cost_slopes)
        metrics = BilevelMetrics(
            train_loss=seen.train_loss,
            loss_increase=seen.increase,
            cost_ratio=cost,
            multiplier=state.multiplier,
            loss_slope=optax.tree.norm(of_loss),
            cost_slope=optax.tree.norm(of_cost),
            entropy=entropy,
            undershoot=undershoot,
            collapsed=collapsed,
            refused=~fine,
        )
        return jax.lax.cond(fine, lambda: after, lambda: refused), metrics

    def _see(self, state: BilevelState, rows: Rows, train_batch: Batch, val_batch: Batch, key: jax.Array) -> _Seen:
        nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, rows)
        if is_lossless(self.space):
            assert self._loss_fn is not None
            loss, gradients = jax.value_and_grad(self._loss_fn)(state.params, train_batch)
            return _Seen(loss, gradients, state.residuals, *nothing)
        run_key, val_key = jax.random.split(key)

        def increase(params: Params, rows: Rows) -> jax.Array:
            return self._estimator.increase(self.space, params, val_batch, rows, val_key)

        running, weights = self._estimator.running, self._estimator.weights
        draw_key, noise_key = jax.random.split(run_key)
        selection = self._reference if running is None else running(rows, draw_key)
        loss, gradients, residuals = self.space.loss_and_gradients(
            state.params, train_batch, selection, state.residuals, noise_key, state.step
        )
        if self._order == 1 or weights is None:
            value, slopes = jax.value_and_grad(increase, argnums=1)(state.params, rows)
        else:

            def train_loss(params: Params, rows: Rows) -> jax.Array:
                return self.space.mixed_loss(params, train_batch, weights(rows, draw_key), noise_key)

            value, slopes = unrolled(
                increase, train_loss, lambda g: self._moved(state, g)[0], state.params, rows, gradients
            )
        return _Seen(loss, gradients, residuals, value, slopes)

    def _moved(self, state: BilevelState, gradients: Params) -> tuple[Params, optax.OptState]:
        updates, weights_state = self._weights_optimizer.update(gradients, state.weights_state, state.params)
        return optax.apply_updates(state.params, updates), weights_state

    def _collapse(self, rows: Rows, increase: jax.Array, cost_slopes: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Entropy, undershoot and whether the rows have collapsed, as `BilevelMetrics` has them."""
        entropy = jnp.mean(jnp.stack([_entropy(row) for row in rows if row.size > 1]))
        # By how much the linearised cost could still fall (the Frank-Wolfe gap), as a ratio to the exact choice's.
        could_fall = sum(
            row @ slope - jnp.min(jnp.where(mask, slope, jnp.inf))
            for row, slope, mask in zip(rows, cost_slopes, allowed(self._problem), strict=True)
        )
        undershoot = jnp.zeros(())
        if isinstance(self._objective, MaxLossIncrease):
            undershoot = 1.0 - increase / self._objective.most
        return entropy, undershoot, (entropy < _DECIDED) & (undershoot > 0.5) & (could_fall > _CHEAPER)


def _entropy(row: jax.Array) -> jax.Array:
    """As a share of uniform weights'."""
    return -jnp.sum(row * jnp.log(jnp.maximum(row, 1e-30))) / np.log(row.size)


def _all_finite(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))


def _aval(leaf: Any) -> tuple[tuple[int, ...], str]:
    return jnp.shape(leaf), str(jnp.result_type(leaf))
