"""`bilevel`: parameters on training data and the choice on validation data and cost, one jitted step for both."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.base import num_strategies
from diffshard.bilevel_search import inputs
from diffshard.bilevel_search.candidates import propose
from diffshard.bilevel_search.estimators import Estimator, Increase, resolve
from diffshard.bilevel_search.inputs import Mesh
from diffshard.bilevel_search.marginals import marginal_logits
from diffshard.bilevel_search.objective import CostWeight, MaxLossIncrease, objective_of
from diffshard.bilevel_search.plan import BilevelPlan
from diffshard.bilevel_search.proof import Proof
from diffshard.bilevel_search.prove import CandidatesData, prove
from diffshard.bilevel_search.rounding import Prediction, dominates, plan_of, proposals, unseen
from diffshard.bilevel_search.space import (
    Batch,
    HasLossless,
    Params,
    check_arguments,
    check_key,
    is_function,
    is_lossless,
    softmax_rows,
)
from diffshard.bilevel_search.state import BilevelMetrics, BilevelState
from diffshard.bilevel_search.step import LossFn, Settings, Step, step_in

CHOICE_EVERY = 8
"""Steps of the parameters to one of the choice, by default: looking at the choice costs several training steps."""


def bilevel(
    loss_fn: LossFn | None,
    mesh: Mesh | None = None,
    *,
    space: Any,
    weights_optimizer: optax.GradientTransformation,
    choice_optimizer: optax.GradientTransformation | None = None,
    max_loss_increase: float | None = None,
    cost_weight: float | Callable[[jax.Array], jax.Array] | None = None,
    estimator: str | Estimator | Increase = "curvature",
    order: int = 1,
    choice_every: int = CHOICE_EVERY,
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
      space: a `diffshard.bilevel_search.space.Space`; or a function `(loss_fn, mesh_axes, params, batch)` of one,
        called by the first `init`; or a `Problem`, or an object with a attribute `problem` and no losses, whose choice
        cannot change the loss: A follows the cost alone.
      weights_optimizer: of θ.
      choice_optimizer: of A; None is adam(1e-2). Rows are softmax(A), so steps of adam on A are steps of a row's odds.
      max_loss_increase: the cheapest choice whose validation loss is at most this much above the exact choice's, in
        units of the loss. Neither this nor `cost_weight` can be given where the loss does not depend on the choice.
      cost_weight: or instead: units of loss that the exact choice's whole cost is worth; a number or a schedule.
      estimator: "curvature", "mixture", "sampled"; one with options, as `sampled(temperature=0.5)` from
        `diffshard.bilevel_search.estimators`; or a function `Increase`.
      order: 2 lets A see what forward strategies do to training, through one step of θ, for two more gradients.
        Strategies of backward and gradient collectives do not show in it; `curvature` and `prove` see those.
      choice_every: A takes a step in every so many steps of θ, the first included; looking at the choice costs several
        training steps, so that 1 is several times slower than training.

    Raises:
      ValueError: an unknown estimator or one that the space cannot serve, an order that is not 1 or 2, an order of 2
        where training does not depend on the choice, both or neither of `max_loss_increase` and `cost_weight`, one of
        them where they have no effect, numbers out of range, or a space without anything to choose.
    """
    order, choice_every = inputs.checked_steps(order, choice_every)
    choice_optimizer = optax.adam(1e-2) if choice_optimizer is None else choice_optimizer
    inputs.check_optimizer("weights_optimizer", weights_optimizer)
    inputs.check_optimizer("choice_optimizer", choice_optimizer)
    inputs.check_mesh(mesh)
    chosen = resolve(estimator)
    if order == 2 and chosen.weights is None:
        raise ValueError(
            f"`order` 2 needs an estimator under which training depends on the choice (mixture, sampled); "
            f"with {estimator!r} it does not. Take order 1."
        )
    objective = objective_of(max_loss_increase, cost_weight)
    if is_function(space) and (loss_fn is None or mesh is None):
        raise ValueError("`space` is a function that makes a space, which needs `loss_fn` and `mesh`; got None.")
    settings = Settings(
        loss_fn=loss_fn,
        weights_optimizer=weights_optimizer,
        choice_optimizer=choice_optimizer,
        objective=objective,
        estimator=chosen,
        order=order,
        choice_every=choice_every,
    )
    return BilevelSearch(settings, mesh, space)


class BilevelSearch:
    """A search of one space: `init`, `update` and `finish`; made by `bilevel`."""

    def __init__(self, settings: Settings, mesh: Mesh | None, space: Any):
        self._settings, self._mesh, self._space = settings, mesh, space
        self._shapes: list[Any] = []
        self._structures: set[Any] = set()
        self._step: Step | None = None
        if not is_function(space):
            self._take(space)

    @property
    def space(self) -> Any:
        """What is searched; a function makes it by the first `init`."""
        return self._settled().space

    def _take(self, space: Any) -> None:
        """Checks a space, and makes the step in it."""
        on_devices = isinstance(self._mesh, jax.sharding.Mesh) and hasattr(space, "on_mesh")
        self._step = step_in(space.on_mesh(self._mesh) if on_devices else space, self._settings)
        self._jitted = jax.jit(self._step)

    def init(self, key: jax.Array, params: Params, batch: Batch) -> BilevelState:
        """Rows near uniform, or in a lossless space near the solver's marginals; the same key gives the same search.

        Args:
          key: a JAX random key.
          params: θ to start from.
          batch: of the shapes of training and validation batches.

        Raises:
          ValueError: `key` is no random key, `batch` has no rows, arrays are not what the space was built for, or the
            optimiser of θ or of A needs more than gradients, state and parameters, as line searches do; and, where a
            function makes the space, see `bilevel`.
        """
        check_key(key)
        shapes = inputs.shapes_of("batch", batch)
        if self._step is None:
            assert self._mesh is not None
            self._take(self._space(self._settings.loss_fn, dict(self._mesh.shape), params, batch))
        step = self._settled()
        check_arguments(step.space, params=params, batch=batch)
        if shapes not in self._shapes:
            self._shapes.append(shapes)
        key, noise_key = jax.random.split(key)
        sizes = num_strategies(step.problem).tolist()
        keys = jax.random.split(noise_key, len(sizes))
        logits = [1e-3 * jax.random.normal(k, (size,)) for k, size in zip(keys, sizes, strict=True)]
        if is_lossless(step.space):
            logits = jax.tree.map(jnp.add, logits, marginal_logits(step.problem))
        inputs.check_update("weights_optimizer", self._settings.weights_optimizer, params)
        inputs.check_update("choice_optimizer", self._settings.choice_optimizer, logits)
        return BilevelState(
            params=params,
            weights_state=self._settings.weights_optimizer.init(params),
            residuals=() if is_lossless(step.space) else step.space.state(params),
            logits=logits,
            choice_state=self._settings.choice_optimizer.init(logits),
            multiplier=jnp.zeros(()),
            offset=jnp.zeros(()),
            slopes=[jnp.zeros(size) for size in sizes],
            step=jnp.zeros((), jnp.int32),
            num_refused=jnp.zeros((), jnp.int32),
            key=key,
        )

    def update(self, state: BilevelState, train_batch: Batch, val_batch: Batch) -> tuple[BilevelState, BilevelMetrics]:
        """One step of θ on `train_batch`, and in each `choice_every`-th one of A on `val_batch` and the cost.

        Pure, and compiled once for each set of shapes.

        Raises:
          ValueError: batches without rows, validation data of other shapes than training data, shapes that no `init`
            of this search got, what is no state or one of another search (rows of other lengths), or no space yet.
        """
        self._check(state)
        train, val = inputs.shapes_of("train_batch", train_batch), inputs.shapes_of("val_batch", val_batch)
        if train != val:
            raise ValueError(f"`val_batch` must have the shapes of `train_batch`, {train}; got {val}.")
        inputs.check_known("train_batch", train, self._shapes)
        return self._jitted(state, train_batch, val_batch)

    def rows(self, state: BilevelState) -> list[np.ndarray]:
        """V arrays `[S_v]`: the weights of each node's strategies."""
        return [np.asarray(row) for row in softmax_rows(self._check(state).problem, state.logits)]

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

        Raises:
          ValueError: `state` is none of this search; or no update was accepted, so that nothing is known of the loss,
            and the space does not say which choice is exact. Where it does, that is returned and the message says why.
        """
        if not isinstance(candidates_data, CandidatesData | None):
            raise ValueError(f"`candidates_data` must be a CandidatesData or None, got {candidates_data!r}.")
        step = self._check(state)
        if candidates_data is None or is_lossless(step.space):
            return self._proposed(step, state), state.params
        proof = self.prove(state, candidates_data)
        winner = proof.winner
        plan = plan_of(step.space, step.problem, {winner.choice: winner.loss_increase}, _bound(step))
        plan = plan._replace(seconds=winner.seconds, cost_ratio=winner.seconds / step.reference_cost)
        return plan._replace(exact_share=winner.exact_share, proof=proof), state.params

    def _proposed(self, step: Step, state: BilevelState) -> BilevelPlan:
        """What the search itself has found."""
        most = _bound(step)
        exact = step.reference if isinstance(step.space, HasLossless) else None
        if is_lossless(step.space) or int(state.step):
            found, note = proposals(step.problem, self.rows(state), self._prediction(state), exact, most), ""
            if exact is not None and all(dominates(step.problem, exact, *pair) for pair in found.items()):
                note = "what the search proposed costs no less than the exact choice and loses no less; this is exact"
                found = {exact: 0.0}
        else:
            note = f"nothing was learnt: 0 updates were accepted, {int(state.num_refused)} refused"
            if exact is None:
                raise ValueError(f"`state`: {note}, and `space` names no exact choice; call `update` on finite losses.")
            found, note = {exact: 0.0}, f"{note}; this is the exact choice"
        plan = plan_of(step.space, step.problem, found, most, note)
        if exact is not None and (nodes := unseen(plan, exact, state.slopes)):
            note = (
                f"not measured: the estimator's loss does not depend on {', '.join(nodes)}; training can tell (`prove`)"
            )
            plan = plan._replace(message="; ".join(filter(None, (plan.message, note))))
        return plan

    def prove(self, state: BilevelState, data: CandidatesData) -> Proof:
        """Trains the proposal, every uniform and by-type choice, and schedules from the start; see `prove.prove`.

        Raises:
          ValueError: the space is lossless, so that there is nothing to prove, or the data are of other shapes.
        """
        step = self._check(state)
        if is_lossless(step.space):
            raise ValueError("`prove` compares losses, and in this space every choice has the same.")
        inputs.check_data(data, state, self._shapes)
        plan, objective = self._proposed(step, state), step.objective
        if isinstance(objective, CostWeight):  # where its schedule has come to
            objective = CostWeight(float(objective.weights(state.multiplier, state.offset, state.step).cost))
        prediction, most = self._prediction(state), data.num_candidates
        candidates = propose(step.space, step.problem, plan.choice, prediction, step.reference, most=most)
        optimizer = self._settings.weights_optimizer
        return prove(
            step.space,
            candidates,
            step.reference,
            data,
            optimizer=optimizer,
            objective=objective,
            prediction=prediction,
        )

    def _prediction(self, state: BilevelState) -> Prediction:
        step = self._settled()
        seen = Prediction(float(state.offset), [np.asarray(slope, float) for slope in state.slopes])
        if not isinstance(step.space, HasLossless):
            return seen
        return seen._replace(offset=seen.offset - seen.increase(step.reference))  # the exact choice adds nothing

    def _check(self, state: BilevelState) -> Step:
        """The step, if the state is one of this search, as one that was saved elsewhere may not be."""
        step = self._settled()
        inputs.check_state(state, step.problem)
        if (structure := jax.tree.structure(state)) not in self._structures:
            inputs.check_kept(state, self._settings)
            self._structures.add(structure)
        return step

    def _settled(self) -> Step:
        if self._step is None:
            raise ValueError("the search has no space yet; call `init(key, params, batch)` first, which makes it.")
        return self._step


def _bound(step: Step) -> float | None:
    return step.objective.most if isinstance(step.objective, MaxLossIncrease) else None
