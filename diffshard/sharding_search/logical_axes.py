"""Names of dimensions that flax's metadata give to arrays."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

LogicalAxes = tuple[str | None, ...]
"""A name for each dimension of an array, None where it has none."""


def logical_axes_of(tree: Any) -> list[LogicalAxes | None]:
    """Returns for each leaf the logical axes that flax's metadata name, or None."""
    meta = sys.modules.get("flax.core.meta")  # arguments have such metadata only where flax is imported
    if meta is None:
        return [None] * len(jax.tree.leaves(tree))
    axes: list[LogicalAxes | None] = []
    for box in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, meta.Partitioned)):
        names = tuple(box.names) if isinstance(box, meta.Partitioned) else ()
        axes += [names if names and len(names) == len(jnp.shape(leaf)) else None for leaf in jax.tree.leaves(box)]
    return axes
