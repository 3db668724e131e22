"""Lookups and updates of a whole table on one device: what a plan computes, in the plainest form.

Letters for sizes: B examples, P ids of each at most, R rows, C columns.
"""

import jax
import jax.numpy as jnp
import numpy as np

NO_ID = -1
"""In the place of an id: there is none."""


def pooled(array: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums the weighted rows of each example, `[B, C]` in float32; ids that are not rows add nothing.

    Args:
      array: a table or a part of it, `[R, C]`.
      ids: `[B, P]` integers.
      weights: `[B, P]` float32.
    """
    is_row = (ids >= 0) & (ids < array.shape[0])
    return summed_rows(jnp.take(array, jnp.where(is_row, ids, 0), axis=0), jnp.where(is_row, weights, 0.0))


def summed_rows(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums weighted rows `[B, P, C]` of each example, `[B, C]` in float32; weights are `[B, P]` float32."""
    return jnp.einsum("bp,bpc->bc", weights, rows.astype(jnp.float32), precision="highest")


def pooling_weights(ids: jax.Array, weights: jax.Array | None, num_rows: int, pooling: str) -> jax.Array:
    """Returns what each looked up row is multiplied by, `[B, P]` float32: 0 for ids that are not rows.

    Args:
      ids: `[B, P]` integers.
      weights: `[B, P]`, or None for ones.
      num_rows: of the table.
      pooling: "sum", or "mean", which divides by the sum of the weights of each example.
    """
    ones = jnp.ones(ids.shape, jnp.float32)
    own = jnp.where((ids >= 0) & (ids < num_rows), ones if weights is None else weights.astype(jnp.float32), 0.0)
    if pooling == "sum":
        return own
    total = own.sum(axis=1, keepdims=True)
    return own / jnp.where(total == 0, 1.0, total)


def row_gradients(
    ids: jax.Array, weights: jax.Array, gradient: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of each looked up row, without an array of the table's size.

    Args:
      ids: `[B, P]` integers.
      weights: `[B, P]` float32.
      gradient: of the pooled rows, `[B, C]`.
      num_rows: of the table or the part of it.

    Returns:
      Rows `[B * P]`, each once, followed by `num_rows`, and their gradients `[B * P, C]`.
    """
    flat = jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows).ravel()
    order = jnp.argsort(flat, stable=True)
    ordered = flat[order]
    is_new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) if len(flat) else jnp.zeros(0, bool)
    segment = jnp.cumsum(is_new) - 1
    weighted = (weights[:, :, None] * gradient[:, None, :].astype(jnp.float32)).reshape(len(flat), -1)
    sums = jax.ops.segment_sum(weighted[order], segment, len(flat), indices_are_sorted=True)
    rows = jnp.full(len(flat), num_rows, flat.dtype).at[segment].min(ordered)
    return rows, sums


def adagrad_changes(
    state: jax.Array, sums: jax.Array, squares: jax.Array, rate: jax.Array | float, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """Returns what row-wise Adagrad subtracts from rows, rate · g / (√s + epsilon), and their state s += mean(g²).

    Args:
      state: s of these rows, `[n]` float32.
      sums: their gradients g, `[n, C]`.
      squares: the mean of g² over the columns of the whole table, `[n]`.
      rate: the learning rate.
      epsilon: against division by zero.
    """
    state = state + squares
    return (rate / (jnp.sqrt(state) + epsilon))[:, None] * sums, state


def padded_ids(values: np.ndarray, lengths: np.ndarray, most: int | None = None) -> np.ndarray:
    """Returns ragged ids, or their weights, as a matrix `[B, P]` with -1, for weights 0, where there are none.

    >>> padded_ids(np.array([7, 8, 9]), np.array([2, 0, 1]))
    array([[ 7,  8],
           [-1, -1],
           [ 9, -1]])

    Args:
      values: ids or float weights of all examples, one after the other, `[N]`.
      lengths: how many each example has, `[B]`.
      most: P; None takes the largest length.

    Raises:
      ValueError: lengths are not whole, are negative, do not add up to N, or one is above `most`.
    """
    values, lengths = np.asarray(values), np.asarray(lengths)
    if lengths.size and not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"`lengths` must be whole numbers, not {lengths.dtype}; cast them to integers.")
    if values.ndim != 1 or lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != len(values):
        raise ValueError(
            f"`lengths` must be `[B]`, not negative, and add up to the {values.shape} `values`; got shape "
            f"{lengths.shape} with the sum {lengths.sum()}."
        )
    longest = int(lengths.max(initial=0))
    most = longest if most is None else most
    if longest > most:
        raise ValueError(f"`most` is {most}, but an example has {longest} ids.")
    is_there = np.arange(most) < lengths[:, None]
    padded = np.full((len(lengths), most), NO_ID if np.issubdtype(values.dtype, np.integer) else 0, values.dtype)
    padded[is_there] = values
    return padded
