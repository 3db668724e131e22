"""The space that users give a search: whether its loss depends on the choice, checked before anything is traced.

The user says so with the objective. A bound on the loss or a weight of the cost needs a space with every member of
`LossySpace`; without either the space must have none of the methods that only a `LossySpace` has.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cost.base import Problem, is_forbidden
from cost.validation import validate
from search_spaces.base import LossySpace, SearchSpace
from search_spaces.numbered import NumberedSpace

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
