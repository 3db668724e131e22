"""Training with the choice of a bilevel plan: a pure step, to be jitted or searched like any other."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diffshard.base import PlanError
from diffshard.bilevel_search.inputs import as_lossy, as_whole, check_arguments, check_key, missing_for_loss
from diffshard.bilevel_search.plans.base import BilevelPlanData
from search_spaces.base import Batch, Choice, LossAndGradients, LossySpace, Params, Residuals, SearchSpace, Selection


class TrainingState(NamedTuple):
    """The state of a training between steps; a pytree of arrays, so it can be saved and restored.

    Attributes:
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
    plan: BilevelPlanData,
    space: SearchSpace[Any],
    optimizer: optax.GradientTransformation,
    num_steps: int | None = None,
) -> Training:
    """Returns how a model trains with a plan; see `BilevelPlan.training`."""
    lossy = as_lossy(space)
    if lossy is None:
        raise ValueError(
            f"`space` has no loss to train on: it lacks {', '.join(missing_for_loss(space))} of "
            f"`search_spaces.base.LossySpace`; give the space of strategies that the plan was made for."
        )
    plan_choice = choice_in(plan, plan.strategies, lossy)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"`optimizer` must be an optax optimiser, as adamw(3e-4); got {optimizer!r}.")
    num_exact_steps, first_choice = _num_exact_steps(plan, num_steps), plan_choice
    if num_exact_steps:
        first_choice = choice_in(plan, [node.exact_strategy for node in plan.nodes], lossy)

    def init(params: Params, key: jax.Array) -> TrainingState:
        check_key(key)
        check_arguments(lossy, params=params)
        return TrainingState(
            params, optimizer.init(params), lossy.init_residuals(params), key, jnp.zeros((), jnp.int32)
        )

    def step(state: TrainingState, batch: Batch) -> tuple[TrainingState, jax.Array]:
        check_arguments(lossy, params=state.params, batch=batch)

        def run(choice: Sequence[int]) -> LossAndGradients:
            return gradients_of(lossy, state, batch, choice)

        if num_exact_steps:
            # Of a schedule both whole steps are compiled, rather than every strategy at every operation.
            result = jax.lax.cond(state.step < num_exact_steps, lambda: run(first_choice), lambda: run(plan_choice))
        else:
            result = run(plan_choice)
        return next_state(optimizer, state, result), result.loss

    return Training(init, step)


def gradients_of(space: LossySpace, state: TrainingState, batch: Batch, choice: Selection) -> LossAndGradients:
    """Returns the loss before a step, its gradients with a choice, and the next residuals."""
    key = jax.random.fold_in(state.key, state.step)
    return space.loss_and_gradients(state.params, batch, choice, state.residuals, key, state.step)


def next_state(
    optimizer: optax.GradientTransformation, state: TrainingState, result: LossAndGradients
) -> TrainingState:
    """Returns the state after a step with what `gradients_of` returned."""
    updates, optimizer_state = optimizer.update(result.gradients, state.optimizer_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    return TrainingState(params, optimizer_state, result.residuals, state.key, state.step + 1)


def choice_in(plan: BilevelPlanData, strategies: Sequence[str], space: LossySpace) -> Choice:
    """Returns the indices in a space of strategies that are named for the nodes of a plan.

    Nodes are looked up by name, and those of equal names (a type's operations in several branches, say) in their order.
    """
    if list(plan.mesh_axes.items()) != list(space.mesh_axes.items()):
        raise PlanError(
            f"The plan is for a mesh of axes {dict(plan.mesh_axes)} in this order, and `space` for "
            f"{dict(space.mesh_axes)}."
        )
    unused_nodes: dict[str, list[int]] = {}
    for v, name in enumerate(space.node_names):
        unused_nodes.setdefault(name, []).append(v)
    choice: dict[int, int] = {}
    for node, strategy in zip(plan.nodes, strategies, strict=True):
        v = _next_node(unused_nodes, node.name)
        names = list(space.strategy_names(v))
        if strategy not in names:
            raise PlanError(
                f"The plan takes {strategy!r} for {node.name!r}, where `space` has {names}; "
                "build the space with that strategy, or search again."
            )
        choice[v] = names.index(strategy)
    for v, name in enumerate(space.node_names):
        if v not in choice:
            raise PlanError(f"`space` has a node {name!r}, which the plan does not choose for; search again.")
    return tuple(choice[v] for v in range(len(choice)))


def _next_node(nodes: Mapping[str, list[int]], name: str) -> int:
    """Takes the next node of a name out of the lists."""
    if not nodes.get(name):
        raise PlanError(
            f"The plan has a node {name!r}, which `space` does not have; "
            "give it the space that the plan was made for, or search again."
        )
    return nodes[name].pop(0)


def _num_exact_steps(plan: BilevelPlanData, num_steps: int | None) -> int:
    if not plan.exact_share:
        return 0
    whole = as_whole(num_steps)
    if whole is None or whole < 1:
        raise ValueError(
            f"`num_steps` must be how many steps training takes: its first {plan.exact_share:.0%} run the exact "
            f"choice; got {num_steps!r}."
        )
    return math.ceil(plan.exact_share * whole)
