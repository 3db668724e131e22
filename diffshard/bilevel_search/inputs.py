"""What the functions of a search are called with, checked before anything is traced."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cost.base import Problem, num_strategies
from diffshard.bilevel_search.prove import CandidatesData
from diffshard.bilevel_search.scalars import as_whole
from diffshard.bilevel_search.space import Batch, Params
from diffshard.bilevel_search.state import BilevelState
from diffshard.bilevel_search.step import Settings

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def checked_steps(order: Any, choice_every: Any) -> tuple[int, int]:
    """The order of a step and how often the choice takes one, as integers.

    Raises:
      ValueError: an order that is not 1 or 2, or a number of steps that is no positive integer.
    """
    found, every = as_whole(order), as_whole(choice_every)
    if found not in (1, 2):
        raise ValueError(f"`order` must be 1 or 2, got {order!r}.")
    if every is None or every < 1:
        raise ValueError(f"`choice_every` must be a positive integer, got {choice_every!r}.")
    return found, every


def check_mesh(mesh: Any) -> None:
    """Refuses what is neither a mesh nor None.

    Raises:
      ValueError: says what it is.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a Mesh or an AbstractMesh, got {mesh!r}; a space takes a dict of axes.")


def check_optimizer(name: str, optimizer: Any) -> None:
    """Refuses what is no optimiser of optax's.

    Raises:
      ValueError: names the argument.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"`{name}` must be an optax gradient transformation, as adamw(3e-4) is (of MultiSteps take its "
            f"`gradient_transformation()`); got {optimizer!r}."
        )


def check_update(name: str, optimizer: optax.GradientTransformation, params: Params) -> None:
    """Refuses optimisers that need the loss itself, as line searches do.

    Raises:
      ValueError: names the argument and what it lacks.
    """
    try:
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    except TypeError as error:
        raise ValueError(
            f"`{name}` must take a step from gradients, its state and parameters alone, as adamw does; {error}"
        ) from None


def check_state(state: Any, problem: Problem) -> None:
    """Refuses what is no state of a search of a problem, as one that was saved elsewhere may not be.

    Raises:
      ValueError: it is no state, or its rows are of other lengths.
    """
    if isinstance(state, tuple) and state and isinstance(state[0], BilevelState):
        raise ValueError(
            "`state` must be a BilevelState, got a tuple that begins with one; `update` returns two things: "
            "`state, metrics = search.update(state, train_batch, val_batch)`."
        )
    if not isinstance(state, BilevelState):
        raise ValueError(
            f"`state` must be a BilevelState, as `init` and `update` give, and comes before batches; "
            f"got {type(state).__name__}."
        )
    sizes, found = num_strategies(problem).tolist(), [jnp.shape(row) for row in state.logits]
    if found != [(size,) for size in sizes]:
        raise ValueError(
            f"`state` is of another search: its rows have shapes {found}, where `space` has {sizes} strategies; "
            f"build the space as it was, or begin with `init`."
        )


def check_kept(state: BilevelState, settings: Settings) -> None:
    """Refuses a state that keeps other things for its optimisers than a search's own do.

    Raises:
      ValueError: names the first optimiser.
    """
    for name, optimizer, kept, params in (
        ("weights_optimizer", settings.weights_optimizer, state.weights_state, state.params),
        ("choice_optimizer", settings.choice_optimizer, state.choice_state, state.logits),
    ):
        expected = jax.tree.structure(jax.eval_shape(optimizer.init, params))
        if jax.tree.structure(kept) != expected:
            raise ValueError(
                f"`state` is of another search: what it keeps for `{name}` is not what this one keeps, {expected}; "
                f"take the same optimiser, or begin with `init`."
            )


def check_data(data: CandidatesData, state: BilevelState, known: Sequence[Any]) -> None:
    """Refuses candidates' data of other shapes than a search was made with.

    Args:
      data: to train candidates on.
      state: of the search.
      known: shapes of batches that `init` got, each as `shapes_of` has them; of none nothing is known.

    Raises:
      ValueError: names the first that differs.
    """
    params, expected = (jax.tree.map(_aval, tree) for tree in (data.params, state.params))
    if params != expected:
        raise ValueError(f"`candidates_data.params` must have the shapes of the search's, {expected}; got {params}.")
    for name in ("train_batches", "test_batches"):
        for i, batch in enumerate(getattr(data, name)):
            check_known(f"{name}[{i}]", shapes_of(f"{name}[{i}]", batch), known)


def check_known(name: str, shapes: Any, known: Sequence[Any]) -> None:
    """Refuses shapes of batches that `init` did not get, if it got any.

    Raises:
      ValueError: names the argument and the shapes.
    """
    if known and shapes not in known:
        raise ValueError(f"`{name}` must have the shapes that `init` got, {known[-1]}; got {shapes}.")


def shapes_of(name: str, batch: Batch) -> Any:
    """Shape and type of each array of a batch.

    Raises:
      ValueError: an array has no rows.
    """
    shapes = jax.tree.map(_aval, batch)
    if any(jnp.shape(leaf)[:1] == (0,) for leaf in jax.tree.leaves(batch)):
        raise ValueError(f"`{name}` must have at least one row in each of its arrays; got {shapes}.")
    return shapes


def _aval(leaf: Any) -> tuple[tuple[int, ...], str]:
    return jnp.shape(leaf), str(jnp.result_type(leaf))
