"""What experts can see of a function's arguments: names, shapes, flax's metadata, and which arrays are random keys."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diffshard.experts.base import Argument
from diffshard.sharding_search.tracing import abstract_array


def describe_arguments(args: Sequence[Any], is_state: Sequence[bool], paths: Sequence[str]) -> list[Argument]:
    """Returns what experts know about each array of some arguments.

    Args:
      args: pytrees of arrays or `jax.ShapeDtypeStruct`.
      is_state: for each array whether it is state.
      paths: for each array its name in messages.
    """
    leaves = [entry for argument in args for entry in jax.tree_util.tree_leaves_with_path(argument)]
    logical = [axes for argument in args for axes in _logical_axes(argument)]
    return [
        Argument(name, _names(path), tuple(jnp.shape(leaf)), state, _is_key(leaf), axes)
        for name, (path, leaf), state, axes in zip(paths, leaves, is_state, logical, strict=True)
    ]


def _logical_axes(tree: Any) -> list[tuple[str | None, ...] | None]:
    """Returns for each leaf the logical axes that flax's metadata name, or None."""
    meta = sys.modules.get("flax.core.meta")  # arguments have such metadata only where flax is imported
    if meta is None:
        return [None] * len(jax.tree.leaves(tree))
    axes: list[tuple[str | None, ...] | None] = []
    for box in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, meta.Partitioned)):
        names = tuple(box.names) if isinstance(box, meta.Partitioned) else ()
        axes += [names if names and len(names) == len(jnp.shape(leaf)) else None for leaf in jax.tree.leaves(box)]
    return axes


def _names(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the keys of a path as text, without the attribute in which flax keeps what a variable holds."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
    is_attribute = bool(path) and not isinstance(path[-1], jax.tree_util.DictKey | jax.tree_util.SequenceKey)
    return tuple(names[:-1] if is_attribute and names[-1] == "value" else names)


def _is_key(leaf: Any) -> bool:
    """Tells whether an array is a random key: of JAX's own type, or the two words of an old-style one."""
    array = abstract_array(leaf)
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or (array.dtype == jnp.uint32 and array.shape == (2,))
