"""Ragged products of which a device makes the matrices of some groups.

The weight gradient of a layer of experts contracts the rows of each group by themselves, and has a matrix for each
group. A device with a part of the matrices needs no other operation: it rolls the rows until its own groups come first
and gives the sizes of these alone, because rows beyond all groups count nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def ragged_contraction(numbers: lax.RaggedDotDimensionNumbers) -> bool:
    """Returns whether a ragged product contracts the rows of each group, so that its first dimension has the groups."""
    return set(numbers.lhs_ragged_dimensions) <= set(numbers.dot_dimension_numbers[0][0])


def groups_of_block(
    operands: Sequence[Any], numbers: lax.RaggedDotDimensionNumbers, position: Any, num_groups: int
) -> list[Any]:
    """Returns the operands of a ragged contraction that makes some of its groups only.

    Args:
      operands: both arrays of rows, and the sizes of all groups, [G].
      position: which part of the groups, from 0.
    """
    lhs, rhs, sizes = operands
    start = position * num_groups
    own_sizes = lax.dynamic_slice_in_dim(sizes, start, num_groups)
    rows_before = jnp.sum(jnp.where(jnp.arange(sizes.shape[0]) < start, sizes, 0))
    (lhs_contracting, rhs_contracting), _ = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    rhs_ragged = rhs_contracting[tuple(lhs_contracting).index(ragged)]
    return [jnp.roll(lhs, -rows_before, ragged), jnp.roll(rhs, -rows_before, rhs_ragged), own_sizes]
