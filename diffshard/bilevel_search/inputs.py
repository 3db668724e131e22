"""What users hand to a search, checked at its boundary, before anything is traced."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from cost.base import Problem, is_forbidden, num_strategies
from cost.real_numbers import real_number, whole_number
from cost.validation import validate
from diffshard.bilevel_search.base import BilevelState
from search_spaces.base import Batch, LossySpace, Params, SearchSpace
from search_spaces.numbered import NumberedSpace

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


# Numbers: of Python, numpy or JAX, and no booleans.


def as_real(number: Any) -> float | None:
    """Returns a real scalar as a float; None for anything else."""
    return real_number(_of_python(number))


def as_whole(number: Any) -> int | None:
    """Returns an integer scalar as an int; None for anything else."""
    return whole_number(_of_python(number))


def _of_python(number: Any) -> Any:
    """Returns a scalar of numpy or JAX as a number of Python; anything else as it is."""
    is_scalar = isinstance(number, np.generic | np.ndarray | jax.Array) and number.ndim == 0
    is_number = is_scalar and jnp.issubdtype(number.dtype, np.number)
    return number.item() if is_number else number


def checked_steps(choice_every: Any) -> int:
    """Returns how often the choice takes a step, as an integer."""
    every = as_whole(choice_every)
    if every is None or every < 1:
        raise ValueError(f"`choice_every` must be a positive integer, got {choice_every!r}.")
    return every


# The two ways to call `bilevel`.


def check_alone(name: str, others: Mapping[str, Any]) -> None:
    """Raises `TypeError` where an option is given together with others that mean another way to search."""
    if given := [other for other, value in others.items() if value is not None]:
        raise TypeError(
            f"`{name}` is for a training step, which has its own optimiser and limit, and `{given[0]}` for a loss that "
            f"is written for each device: give one of them."
        )


def check_space(space: Any, options: Mapping[str, Any]) -> None:
    """Raises `TypeError` where there is no space, or options of `search` are given to a search of one."""
    if space is None:
        raise TypeError(
            "`bilevel` needs `formats=diffshard.formats.Formats(...)` for a training step as `search` takes it, or "
            "`space` for a loss that is written for each device; got neither."
        )
    if options:
        raise TypeError(f"`{next(iter(options))}` is no option for a `space`; those of `search` go with `formats`.")


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
            "axes, which is simulated on one device, save the plan, and train with it in all processes."
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
    """Returns whether some leaf has no numbers, because it is traced or only a shape."""
    return any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def shapes_of(tree: Any) -> Any:
    """Returns a pytree's structure with the shape and the type's name instead of each array."""
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), str(jnp.result_type(leaf))), tree)


SpaceFn = Callable[..., SearchSpace[Any] | Problem]
"""`make(loss_fn, mesh_axes, params, batch)`: a function that makes a space."""
Space = SearchSpace[Any] | Problem | SpaceFn
"""What users give as a space. Whether the loss depends on the choice is said by the objective: a bound on the loss or a
weight of the cost needs a `LossySpace`; without either, every choice must have the same loss."""


def as_space_fn(space: Space) -> SpaceFn | None:
    """Returns `space` if it makes a space rather than being one; a class of spaces makes them."""
    make: Any = space
    space_fn: SpaceFn = make
    makes_space = callable(make) and (isinstance(make, type) or bool(_missing(make, SearchSpace)))
    return space_fn if makes_space else None


def checked_exact_space(space: SearchSpace[Any] | Problem) -> SearchSpace[Any]:
    """Returns the space in which the loss is the same for every choice: the argument, or a space around a `Problem`."""
    checked_space = _as_space(space)
    if methods := lossy_methods(checked_space):
        raise ValueError(
            f"give `max_loss_increase` or `cost_weight`: this space trades loss for cost, because it has "
            f"{', '.join(methods)} of `search_spaces.base.LossySpace`."
        )
    check_problem(checked_space.problem, {})
    return checked_space


def checked_lossy_space(space: SearchSpace[Any] | Problem) -> LossySpace:
    """Returns the argument as the space in which the loss depends on the choice."""
    checked_space = _as_space(space)
    lossy = as_lossy(checked_space)
    if lossy is None:
        raise ValueError(
            f"`space` has no loss of its own (it lacks {', '.join(missing_for_loss(checked_space))} of "
            f"`search_spaces.base.LossySpace`). If every choice has the same loss, leave out `max_loss_increase` and "
            f"`cost_weight`; otherwise add what it lacks."
        )
    check_problem(lossy.problem, lossy.mesh_axes)
    return lossy


def as_lossy(space: SearchSpace[Any]) -> LossySpace | None:
    """Returns the space itself if it has all members of `LossySpace`, otherwise None."""
    lossy: Any = space
    return None if missing_for_loss(space) else lossy


def missing_for_loss(space: SearchSpace[Any]) -> list[str]:
    """Returns the members of `LossySpace` that a space lacks, in alphabetical order."""
    return _missing(space, LossySpace)


def lossy_methods(space: SearchSpace[Any]) -> list[str]:
    """Returns the methods of a space that only a `LossySpace` has, in alphabetical order.

    Attributes do not count: other spaces too have notes, hardware or a mesh.
    """
    methods = {name for name, member in vars(LossySpace).items() if inspect.isfunction(member) and name[0] != "_"}
    return sorted(methods.intersection(dir(space)))


def check_problem(problem: Problem, mesh_axes: Mapping[str, int]) -> None:
    """Checks that the relaxed choice of a problem can be searched.

    Args:
      mesh_axes: devices along each mesh axis; empty where the space has no mesh.
    """
    validate(problem)
    if any(is_forbidden(cost).any() for cost in problem.edge_cost):
        raise ValueError(
            "`space` forbids pairs of strategies (infinite edge costs), which a relaxed choice cannot respect; "
            "tie these nodes, or use `diffshard.solve`."
        )
    if any(is_forbidden(cost).all() for cost in problem.node_cost):
        raise ValueError("`space` has a node whose strategies are all forbidden; allow one.")
    if all((~is_forbidden(cost)).sum() < 2 for cost in problem.node_cost):
        if mesh_axes and math.prod(mesh_axes.values()) == 1:
            raise ValueError(
                f"`mesh` is of one device, {dict(mesh_axes)}: nothing is communicated, so there is nothing to "
                f"choose; give a mesh of more, which may be an AbstractMesh."
            )
        raise ValueError(
            "`space` has no node with two strategies that are allowed, so there is nothing to choose; give it some."
        )


def check_arguments(space: LossySpace, **arguments: Any) -> None:
    """Checks that parameters and batches have the shapes and types that a space was built for.

    Args:
      space: says what these are in its attribute `arguments`, `(params, batch)`.
    """
    for name, shapes in zip(("params", "batch"), space.arguments, strict=True):
        if name not in arguments:
            continue
        structures = [jax.tree.structure(tree) for tree in (shapes, arguments[name])]
        if structures[0] != structures[1]:
            raise ValueError(
                f"`{name}` must have the structure that `space` was built for, {structures[0]}; got {structures[1]}."
            )
        leaves = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(arguments[name]), strict=True)
        for (path, target), leaf in leaves:
            shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
            if (shape, dtype) != (target.shape, target.dtype):
                raise ValueError(
                    f"`{name}{jax.tree_util.keystr(path)}` must be {target.dtype}{list(target.shape)}, which `space` "
                    f"was built for, got {dtype}{list(shape)}; pass arrays of that shape, or rebuild the space."
                )


def _as_space(space: SearchSpace[Any] | Problem) -> SearchSpace[Any]:
    """Returns the argument itself, or a space of numbered nodes around a `Problem`."""
    search_space = NumberedSpace(space) if isinstance(space, Problem) else space
    if members := _missing(search_space, SearchSpace):
        raise ValueError(
            f"`space` must be a Problem, follow `search_spaces.base.SearchSpace`, or be a function that makes a space "
            f"of (loss_fn, mesh_axes, params, batch); got {type(space).__name__}, which lacks {', '.join(members)}."
        )
    return search_space


def _missing(space: Any, protocol: type) -> list[str]:
    """Lists the public members of a protocol that an object lacks, in alphabetical order.

    `isinstance` would evaluate the properties, `problem` among them, which may be slow or raise.
    """
    members = {name for name in dir(protocol) if not name.startswith("_")}
    return sorted(members.difference(dir(space)))
