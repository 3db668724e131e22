"""Reads and writes rows of pieces in a device's array of numbers `[A, U]`, in which a row of a piece is some U-rows.

A slice of the array that is changed and put back would be a copy of the whole piece, in time and in memory. So rows are
gathered from the array itself and scattered into it, which XLA does in place where the array is donated, but not inside
of a branch. On CPUs it converts arrays of 16-bit numbers whole.

Letters for sizes: A rows of U columns, n rows of C columns.
"""

import jax
import jax.numpy as jnp
from jax import lax


def gathered_rows(numbers: jax.Array, first: jax.Array, columns: int) -> jax.Array:
    """Returns rows of a piece, `[n, C]`.

    Args:
      numbers: `[A, U]`.
      first: the first U-row of each row, `[n]` integers below A.
      columns: C, a multiple of U.
    """
    unit = numbers.shape[1]
    names = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    mode = lax.GatherScatterMode.CLIP
    rows = lax.gather(numbers, first[:, None], names, (columns // unit, unit), mode=mode)
    return rows.reshape(first.shape[0], columns)


def changed_rows(numbers: jax.Array, first: jax.Array, changes: jax.Array) -> jax.Array:
    """Subtracts changes from rows of pieces.

    Args:
      numbers: `[A, U]`; changed in place where it is donated, and not in a branch.
      first: the first U-row of each row, `[n]` integers, each once; those from A on are left out.
      changes: `[n, C]` float32.
    """
    num_rows, unit = numbers.shape
    names = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    old = gathered_rows(numbers, jnp.minimum(first, num_rows - 1), changes.shape[1])
    rows = (old.astype(jnp.float32) - changes).astype(numbers.dtype)
    rows = lax.optimization_barrier(rows)  # a scatter that is fused with the gather is not done in place
    windows = rows.reshape(rows.shape[0], rows.shape[1] // unit, unit)
    return lax.scatter(numbers, first[:, None], windows, names, mode=lax.GatherScatterMode.FILL_OR_DROP)
