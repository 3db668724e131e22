"""Training with the choice of a bilevel plan: a pure step, to be jitted or searched like any other."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diffshard.base import PlanError
from diffshard.bilevel_search.scalars import as_whole
from diffshard.bilevel_search.space import (
    Batch,
    Params,
    Residuals,
    Selection,
    check_arguments,
    check_key,
    is_lossless,
    node_names,
    problem_of,
)

if TYPE_CHECKING:
    from diffshard.bilevel_search.plan import BilevelPlan


Gradients = tuple[jax.Array, Params, Residuals]
"""The loss, its gradients and what strategies carry to the next step."""


class TrainingState(NamedTuple):
    """What training carries from step to step; a pytree of arrays, so it can be saved and restored.

    Attributes:
      params: whole arrays.
      optimizer_state: of the optimiser.
      residuals: what strategies have not sent yet, `[devices, ...]` for each parameter that may have some.
      key: a random key; step n takes `jax.random.fold_in(key, n)`.
      step: how many steps were taken, int32.
    """

    params: Params
    optimizer_state: optax.OptState
    residuals: Residuals
    key: jax.Array
    step: jax.Array


class Training(NamedTuple):
    """Two pure functions.

    Attributes:
      init: `init(params, key) -> state`.
      step: `step(state, batch) -> (state, loss)`, the loss of the parameters before the step.
    """

    init: Callable[[Params, jax.Array], TrainingState]
    step: Callable[[TrainingState, Batch], tuple[TrainingState, jax.Array]]


def training(
    plan: "BilevelPlan", space: Any, optimizer: optax.GradientTransformation, num_steps: int | None = None
) -> Training:
    """How a model trains with a plan; see `BilevelPlan.training`."""
    if is_lossless(space):
        raise ValueError("`space` has no loss to train on; give the space of strategies that the plan was made for.")
    chosen = choice_in(plan, plan.strategies, space)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"`optimizer` must be an optax optimiser, as adamw(3e-4); got {optimizer!r}.")
    late, exact = 0, chosen
    if plan.exact_share:
        if (whole := as_whole(num_steps)) is None or whole < 1:
            raise ValueError(
                f"`num_steps` must be how many steps training takes: its first {plan.exact_share:.0%} run the exact "
                f"choice; got {num_steps!r}."
            )
        late = math.ceil(plan.exact_share * whole)
        exact = choice_in(plan, [group.exact_strategy for group in plan.groups], space)

    def init(params: Params, key: jax.Array) -> TrainingState:
        check_key(key)
        check_arguments(space, params=params)
        return TrainingState(params, optimizer.init(params), space.state(params), key, jnp.zeros((), jnp.int32))

    def step(state: TrainingState, batch: Batch) -> tuple[TrainingState, jax.Array]:
        check_arguments(space, params=state.params, batch=batch)

        def run(choice: Sequence[int]) -> Gradients:
            return gradients_of(space, state, batch, choice)

        # Of a schedule both whole steps are compiled, rather than every strategy at every site.
        found = jax.lax.cond(state.step < late, lambda: run(exact), lambda: run(chosen)) if late else run(chosen)
        return stepped(optimizer, state, found), found[0]

    return Training(init, step)


def gradients_of(space: Any, state: TrainingState, batch: Batch, choice: Selection) -> Gradients:
    """The loss before a step, its gradients with a choice, and what strategies carry on."""
    key = jax.random.fold_in(state.key, state.step)
    return space.loss_and_gradients(state.params, batch, choice, state.residuals, key, state.step)


def stepped(optimizer: optax.GradientTransformation, state: TrainingState, found: Gradients) -> TrainingState:
    """The state after a step with what `gradients_of` found."""
    _, gradients, residuals = found
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    return TrainingState(params, optimizer_state, residuals, state.key, state.step + 1)


def choice_in(plan: "BilevelPlan", strategies: Sequence[str], space: Any) -> tuple[int, ...]:
    """The numbers in a space of strategies that are named for the groups of a plan.

    Groups are found by name, and those of equal names (a type's sites in several branches, say) in their order.

    Args:
      plan: names the groups.
      strategies: one for each group.
      space: where they are looked for.

    Raises:
      PlanError: the space is for another mesh, or lacks a group or a strategy, or has a group more; names the first.
    """
    if plan.mesh_axes != (axes := dict(getattr(space, "mesh_axes", {}))):
        raise PlanError(f"The plan is for a mesh of axes {dict(plan.mesh_axes)}, and `space` for {axes}.")
    nodes = [g.name for g in space.groups] if hasattr(space, "groups") else node_names(space, problem_of(space))
    places: dict[str, list[int]] = {}
    for v, name in enumerate(nodes):
        places.setdefault(name, []).append(v)
    found: dict[int, int] = {}
    for group, strategy in zip(plan.groups, strategies, strict=True):
        if not places.get(group.name):
            raise PlanError(
                f"The plan has a group {group.name!r}, which `space` has not; "
                "give it the space that the plan was made for, or search again."
            )
        v = places[group.name].pop(0)
        names = list(space.strategy_names(v))
        if strategy not in names:
            raise PlanError(
                f"The plan takes {strategy!r} for {group.name!r}, where `space` has {names}; "
                "build the space with that strategy, or search again."
            )
        found[v] = names.index(strategy)
    for v, name in enumerate(nodes):
        if v not in found:
            raise PlanError(f"`space` has a group {name!r}, which the plan does not choose for; search again.")
    return tuple(found[v] for v in range(len(found)))
