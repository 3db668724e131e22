"""What users hand to a search, checked at its boundary, before anything is traced."""

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from cost.base import Problem, num_strategies
from diffshard.bilevel_search.base import BilevelState
from search_spaces.base import Batch, Params

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


# Numbers: of Python, numpy or JAX, and no booleans.


def as_real(number: Any) -> float | None:
    """Returns a real scalar as a float; None for anything else."""
    if isinstance(number, bool | np.bool):
        return None
    if isinstance(number, Real):
        return float(number)
    is_scalar = isinstance(number, np.generic | np.ndarray | jax.Array) and number.ndim == 0
    if is_scalar and any(jnp.issubdtype(number.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return float(number)
    return None


def as_whole(number: Any) -> int | None:
    """Returns an integer scalar as an int; None for anything else."""
    if isinstance(number, bool | np.bool):
        return None
    try:
        return operator.index(number)
    except TypeError:
        return None


def checked_steps(choice_every: Any) -> int:
    """Returns how often the choice takes a step, as an integer."""
    every = as_whole(choice_every)
    if every is None or every < 1:
        raise ValueError(f"`choice_every` must be a positive integer, got {choice_every!r}.")
    return every


# Keys, meshes and optimisers.


def check_key(key: Any) -> None:
    """Checks that `key` is a JAX random key. Old-style uint32 keys are accepted."""
    try:
        jax.eval_shape(jax.random.split, key)
    except (TypeError, ValueError):
        raise ValueError(f"`key` must be a random key, as `jax.random.key(0)` is; got {key!r}.") from None


def check_mesh(mesh: Any) -> None:
    """Checks that `mesh` is a mesh of one process, or None."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a Mesh or an AbstractMesh, got {mesh!r}; a space takes a dict of axes.")
    if isinstance(mesh, jax.sharding.Mesh) and (count := len({d.process_index for d in mesh.devices.flat})) > 1:
        raise ValueError(
            f"`mesh` has devices of {count} processes, and `bilevel` runs in one. Search with an AbstractMesh of these "
            "axes, which is emulated on one device, save the plan, and train with it in all processes."
        )


def check_optimizer(name: str, optimizer: Any) -> None:
    """Checks that an argument is an optimiser of optax."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"`{name}` must be an optax gradient transformation, as adamw(3e-4) is (of MultiSteps take its "
            f"`gradient_transformation()`); got {optimizer!r}."
        )


def check_update(name: str, optimizer: optax.GradientTransformation, params: Params) -> None:
    """Checks that an optimiser needs only gradients, its state and parameters; line searches need the loss itself."""
    try:
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    except TypeError as error:
        raise ValueError(
            f"`{name}` must take a step from gradients, its state and parameters alone, as adamw does; {error}"
        ) from None


# States and batches.


def check_state(state: Any, problem: Problem) -> None:
    """Checks that `state` is a state of a search of a problem; one that was saved elsewhere may not be."""
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
    sizes, shapes = num_strategies(problem).tolist(), [jnp.shape(logits) for logits in state.logits]
    if shapes != [(size,) for size in sizes]:
        raise ValueError(
            f"`state` is of another search: its logits have shapes {shapes}, where `space` has {sizes} strategies; "
            f"build the space as it was, or begin with `init`."
        )


def check_optimizer_states(
    state: BilevelState, weights_optimizer: optax.GradientTransformation, choice_optimizer: optax.GradientTransformation
) -> None:
    """Checks that a state holds what these optimisers keep."""
    for name, optimizer, optimizer_state, params in (
        ("weights_optimizer", weights_optimizer, state.params_state, state.params),
        ("choice_optimizer", choice_optimizer, state.choice_state, state.logits),
    ):
        structure = jax.tree.structure(jax.eval_shape(optimizer.init, params))
        if jax.tree.structure(optimizer_state) != structure:
            raise ValueError(
                f"`state` is of another search: what it keeps for `{name}` is not what this one keeps, {structure}; "
                f"take the same optimiser, or begin with `init`."
            )


def check_known(name: str, shapes: Any, known_shapes: Sequence[Any]) -> None:
    """Checks that `init` got batches of these shapes, if it got any."""
    if known_shapes and shapes not in known_shapes:
        raise ValueError(f"`{name}` must have the shapes that `init` got, {known_shapes[-1]}; got {shapes}.")


def batch_shapes(name: str, batch: Batch) -> Any:
    """Returns the shape and type of each array of a batch."""
    shapes = shapes_of(batch)
    if any(jnp.shape(leaf)[:1] == (0,) for leaf in jax.tree.leaves(batch)):
        raise ValueError(f"`{name}` must have at least one row in each of its arrays; got {shapes}.")
    return shapes


def is_abstract(tree: Batch | Params) -> bool:
    """Tells whether some leaf has no numbers, because it is traced or only a shape."""
    return any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def shapes_of(tree: Any) -> Any:
    """Returns a pytree's structure with the shape and the type's name instead of each array."""
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), str(jnp.result_type(leaf))), tree)
