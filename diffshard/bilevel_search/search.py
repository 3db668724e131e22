"""The entry `bilevel`: one jitted step trains the parameters and updates the choice.

Small errors act on the loss through its second derivatives, which the exact model's gradients give: the mean of g gᵀ
over the data stands for the Hessian, as it may for log-likelihoods, so that one backward pass of the exact model
predicts the increase of every strategy at once.
"""

from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.base import Problem, num_strategies
from diffshard.bilevel_search import inputs
from diffshard.bilevel_search.base import BilevelMetrics, BilevelState, Increase, LossFn, TrainingProgress
from diffshard.bilevel_search.inputs import Mesh, Space, as_space_fn
from diffshard.bilevel_search.objective import objective_of
from diffshard.bilevel_search.plans.base import ValidationRuns
from diffshard.bilevel_search.plans.plan import BilevelPlan, Outcome
from diffshard.bilevel_search.relaxation import softmax_choice
from diffshard.bilevel_search.step import Settings, Step, step_in
from diffshard.bilevel_search.step_formats import TrainingSearch
from diffshard.bilevel_search.validation_runs import CandidatesData
from diffshard.sharding_search.number_formats import Formats
from search_spaces.base import Batch, LossySpace, Params, RelaxedChoice, SearchSpace


def curvature(
    space: LossySpace,
    params: Params,
    batch: Batch,
    relaxed_choice: RelaxedChoice,
    key: jax.Array,
    progress: TrainingProgress,
) -> jax.Array:
    """Returns Σ_v ⟨p_v, increases_v⟩: the space's predicted increases, linear in the relaxed choice p; see `Increase`.

    An error e of a result is predicted to increase the loss by ½ E[(g·e)²], an error of a gradient by ¼ Σ η e², with η
    the optimiser's step sizes. For cross-entropy the first is right to second order. Of other losses, such as a mean
    square, it can be far too small: it then ranks strategies, but only training (`validate`) can keep a bound.
    """
    increases = space.loss_increases(params, batch, key, step_sizes=progress.step_sizes, step=progress.step)
    terms = zip(relaxed_choice, jax.lax.stop_gradient(increases), strict=True)
    return sum((weights @ increase for weights, increase in terms), start=jnp.zeros(()))


CHOICE_EVERY = 8
"""Steps of the parameters to one of the choice, by default: looking at the choice costs several training steps."""


@overload
def bilevel(
    fn: Callable[..., Any], mesh: Mesh, *, formats: Formats, choice_every: int | None = None, **options: Any
) -> TrainingSearch: ...


@overload
def bilevel(
    fn: LossFn | None,
    mesh: Mesh | None = None,
    *,
    space: Space,
    weights_optimizer: optax.GradientTransformation,
    choice_optimizer: optax.GradientTransformation | None = None,
    max_loss_increase: float | None = None,
    cost_weight: float | Callable[[jax.Array], jax.Array] | None = None,
    estimator: Increase = curvature,
    choice_every: int | None = None,
) -> "BilevelSearch": ...


def bilevel(
    fn: Callable[..., Any] | None,
    mesh: Mesh | None = None,
    *,
    formats: Formats | None = None,
    space: Space | None = None,
    weights_optimizer: optax.GradientTransformation | None = None,
    choice_optimizer: optax.GradientTransformation | None = None,
    max_loss_increase: float | None = None,
    cost_weight: float | Callable[[jax.Array], jax.Array] | None = None,
    estimator: Increase | None = None,
    choice_every: int | None = None,
    **options: Any,
) -> "BilevelSearch | TrainingSearch":
    """Searches what changes the loss as well as the time of a step, while the model trains.

    Of a whole training step, the function that `search` takes, it chooses number formats together with shardings:

    >>> search = bilevel(train_step, mesh, formats=Formats(max_loss_increase=0.005, steps=4), hardware="h100")
    >>> state = search.init(key, params, batch)
    >>> for train_batch, val_batch in batches:
    ...     state, metrics = search.update(state, train_batch, val_batch)
    >>> plan, params = search.finish(state)

    Of a loss that is written for each device it chooses the communication, or whatever a `space` has:

    >>> search = bilevel(loss_fn, mesh, space=space, weights_optimizer=optax.adamw(3e-4), max_loss_increase=0.005)
    >>> state = search.init(key, params, batch)

    Args:
      fn: with `formats` a training step; else `loss_fn(params, batch) -> scalar`, a loss and not a training step: what
        a function `space` builds a space of, and what trains where the space has no loss of its own. A space that is
        built already brings its own loss.
      mesh: with `formats` what the step is planned for. Else it names the axes that a function `space` builds for. On
        a `Mesh` of devices a `LossySpace` also runs there; without, and with an `AbstractMesh`, it runs as it is built:
        simulated, on one device. A step with `formats` always trains on one device, which emulates them.
      formats: the limit on the loss, the formats, and the `steps` of a look ahead, a few: these are differentiated
        through. Its `calls` and `increases` stay empty. None takes a `space`.
      space: a `search_spaces.base.LossySpace`; or a `SearchSpace` or a `Problem`, whose choice cannot change the loss,
        so that A follows the cost alone; or a function that makes one of these from `(loss_fn, mesh_axes, params,
        batch)`, called by the first `init`.
      weights_optimizer: of θ, with a space; a training step has its own.
      choice_optimizer: of A, with a space; None is adam(1e-2). The relaxed choice is softmax(A), so that steps of adam
        on A are steps of each node's log odds.
      max_loss_increase: the cheapest choice whose validation loss is at most this much above the exact choice's, in
        units of the loss. This and `cost_weight` also say that the loss depends on the choice: with either, `space`
        must be a `LossySpace`; without both, it must not have a loss of its own.
      cost_weight: or instead: units of loss that the exact choice's whole cost is worth; a number or a schedule.
      estimator: predicts by how much the relaxed choice raises the validation loss: a function that follows
        `diffshard.bilevel_search.base.Increase`. None takes `curvature`, which is good at ranking; `validate` tells
        the size.
      choice_every: how many steps of θ there are to one of A, which comes with the first of them; looking at the
        choice costs several training steps, so that 1 is several times slower than training. None takes 8, and with
        `formats` 8 times the steps of a look.
      **options: with `formats` those of `search`, but `devices`, `pipeline` and what does not go with formats.

    Returns:
      A `TrainingSearch` with `formats`, else a `BilevelSearch`.

    Raises:
      TypeError: options that the other way alone takes, or a lack of those that it needs.
      ValueError: an estimator that is no function, both or neither of `max_loss_increase` and `cost_weight`, one of
        them where they have no effect, numbers out of range, or a space without anything to choose.
    """
    of_spaces = {
        "space": space,
        "weights_optimizer": weights_optimizer,
        "choice_optimizer": choice_optimizer,
        "max_loss_increase": max_loss_increase,
        "cost_weight": cost_weight,
        "estimator": estimator,
    }
    inputs.check_mesh(mesh)
    if formats is not None:
        inputs.check_alone("formats", of_spaces)
        return TrainingSearch(fn, mesh, formats, choice_every, options)
    inputs.check_space(space, options)
    assert space is not None
    choice_every = inputs.checked_steps(CHOICE_EVERY if choice_every is None else choice_every)
    choice_optimizer = optax.adam(1e-2) if choice_optimizer is None else choice_optimizer
    inputs.check_optimizer("weights_optimizer", weights_optimizer)
    inputs.check_optimizer("choice_optimizer", choice_optimizer)
    assert weights_optimizer is not None
    estimator = curvature if estimator is None else estimator
    if not callable(estimator):
        where = "diffshard.bilevel_search.base.Increase"
        raise ValueError(f"`estimator` must be a function that follows `{where}`; got {estimator!r}.")
    objective = objective_of(max_loss_increase, cost_weight)
    if as_space_fn(space) is not None and (fn is None or mesh is None):
        raise ValueError("`space` is a function that makes a space, which needs `fn` and `mesh`; got None.")
    settings = Settings(
        loss_fn=fn,
        weights_optimizer=weights_optimizer,
        choice_optimizer=choice_optimizer,
        objective=objective,
        estimator=estimator,
        choice_every=choice_every,
    )
    return BilevelSearch(settings, mesh, space)


class BilevelSearch:
    """A search of one space: `init`, `update` and `finish`; made by `bilevel`."""

    def __init__(self, settings: Settings, mesh: Mesh | None, space: Space):
        self._settings, self._mesh = settings, mesh
        self._space_fn = as_space_fn(space)
        self._batch_shapes: list[Any] = []
        self._checked_shapes: list[Any] = []
        self._state_structures: set[Any] = set()
        self._step: Step | None = None
        if self._space_fn is None:
            search_space: Any = space
            self._set_space(search_space)

    @property
    def space(self) -> SearchSpace[Any]:
        """The space that is searched; where a function makes it, the first `init` calls that function."""
        return self._made_step().model.space

    def init(self, key: jax.Array, params: Params, batch: Batch) -> BilevelState:
        """Returns the first state; the same key gives the same search.

        The relaxed choice starts near uniform, or near the solver's marginals where the loss does not depend on it.

        Args:
          key: a JAX random key.
          params: θ to start from.
          batch: of the shapes of training and validation batches. The first one of its shapes also shows whether the
            exact choice computes the loss of one device, unless it is traced.

        Raises:
          ValueError: `key` is not a random key, `batch` has no rows, arrays are not what the space was built for,
            the loss is not that of one device (see `CommunicationSpace.check_loss`) or not a scalar, or the optimiser
            of θ or of A needs more than gradients, state and parameters, as line searches do; and, where a function
            makes the space, see `bilevel`.
        """
        inputs.check_key(key)
        shapes = inputs.batch_shapes("batch", batch)
        if self._step is None:
            assert self._mesh is not None
            assert self._space_fn is not None
            self._set_space(self._space_fn(self._settings.loss_fn, dict(self._mesh.shape), params, batch))
        step = self._made_step()
        step.model.check_arguments(params, batch)
        if shapes not in self._checked_shapes and not inputs.is_abstract((params, batch)):
            step.model.check_loss(params, batch, key)
            self._checked_shapes.append(shapes)
        if shapes not in self._batch_shapes:
            self._batch_shapes.append(shapes)
        key, noise_key = jax.random.split(key)
        sizes = num_strategies(step.problem).tolist()
        keys = jax.random.split(noise_key, len(sizes))
        logits = [1e-3 * jax.random.normal(k, (size,)) for k, size in zip(keys, sizes, strict=True)]
        logits = jax.tree.map(jnp.add, logits, step.model.init_logits())
        inputs.check_update("weights_optimizer", self._settings.weights_optimizer, params)
        inputs.check_update("choice_optimizer", self._settings.choice_optimizer, logits)
        return BilevelState(
            params=params,
            params_state=self._settings.weights_optimizer.init(params),
            residuals=step.model.init_residuals(params),
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
        """Takes one step of θ on `train_batch`, and in each `choice_every`-th one of A on `val_batch` and the cost.

        Pure, and compiled once for each set of shapes.

        Raises:
          ValueError: batches without rows, validation data of other shapes than training data, shapes that no `init`
            of this search got, something that is not a state or is one of another search, or no space yet.
        """
        self._checked_step(state)
        train, val = inputs.batch_shapes("train_batch", train_batch), inputs.batch_shapes("val_batch", val_batch)
        if train != val:
            raise ValueError(f"`val_batch` must have the shapes of `train_batch`, {train}; got {val}.")
        inputs.check_known("train_batch", train, self._batch_shapes)
        return self._run_step(state, train_batch, val_batch)

    def relaxed_choice(self, state: BilevelState) -> list[np.ndarray]:
        """Returns the relaxed choice, V arrays `[S_v]`: the weights of each node's strategies."""
        weights = softmax_choice(self._checked_step(state).problem, state.logits)
        return [np.asarray(row) for row in weights]

    def finish(
        self, state: BilevelState, *, candidates_data: CandidatesData | None = None
    ) -> tuple[BilevelPlan, Params]:
        """Returns the discrete choice, and the parameters that training goes on from.

        Under a bound on the loss the choice is the cheapest one of predicted increase within it among two: the largest
        weights, and the solver's answer to the cost with mean slopes as a budget; if neither is within it, the exact
        choice. Training (`candidates_data`) should decide how large the increase is.

        Args:
          state: after some `update`s.
          candidates_data: trains the proposal and simpler choices from the start and returns the winner, with the table
            in `plan.validation`. None returns the proposal.

        Raises:
          ValueError: `state` is not one of this search. Where no update was accepted, nothing is known of the loss: the
            exact choice is returned and the message says why.
        """
        if not isinstance(candidates_data, CandidatesData | None):
            raise ValueError(f"`candidates_data` must be a CandidatesData or None, got {candidates_data!r}.")
        return self._checked_step(state).model.plan(self._outcome(state), candidates_data), state.params

    def validate(self, state: BilevelState, data: CandidatesData) -> ValidationRuns:
        """Trains the proposal, uniform choices, choices by type and schedules; see `validation_runs.validate`.

        Raises:
          ValueError: the loss does not depend on the choice, so that there is nothing to validate, or the data have
            other shapes.
        """
        return self._checked_step(state).model.validate(self._outcome(state), data)

    def _outcome(self, state: BilevelState) -> Outcome:
        return Outcome(state, self.relaxed_choice(state), self._made_step().objective, self._batch_shapes)

    def _set_space(self, space: SearchSpace[Any] | Problem) -> None:
        """Checks a space, and makes the step in it, on the mesh's devices if there are some."""
        self._step = step_in(space, self._settings, self._mesh)
        self._run_step = jax.jit(self._step)

    def _checked_step(self, state: BilevelState) -> Step:
        """Returns the step if the state is one of this search; one that was saved elsewhere may not be."""
        step = self._made_step()
        inputs.check_state(state, step.problem)
        if (structure := jax.tree.structure(state)) not in self._state_structures:
            settings = self._settings
            inputs.check_optimizer_states(state, settings.weights_optimizer, settings.choice_optimizer)
            self._state_structures.add(structure)
        return step

    def _made_step(self) -> Step:
        if self._step is None:
            raise ValueError("the search has no space yet; call `init(key, params, batch)` first, which makes it.")
        return self._step
