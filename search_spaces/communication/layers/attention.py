"""Causal attention whose sequence is split over devices, where the search chooses how far back a token sees.

Source: Beltagy et al., Longformer (arXiv:2004.05150), section 3.1, sliding windows, here of whole blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.communication.places import alternatives


def windowed_attention(
    name: str, query: jax.Array, key: jax.Array, value: jax.Array, axis: str, *, windows: Sequence[int] = (2, 1)
) -> jax.Array:
    """Computes causal self-attention of a sequence that is split into blocks, one for each device along a mesh axis.

    The exact choice sees the whole past: keys and values are all-gathered. A window of k blocks sees the device's own
    block and the k - 1 before it, each of which a collective permute brings. With k = 1 nothing is sent; with k of at
    least the number of devices the result is that of the whole past.

    Args:
      name: of the place where the window is chosen.
      query: of this device's block, `[B, L, H, D]`.
      key: of this device's block, shaped as `query`.
      value: of this device's block, shaped as `query`.
      axis: the mesh axis over which the sequence is split.
      windows: numbers of blocks to choose from, beside the whole past; without any there is no choice.

    Returns:
      The result for this device's block, `[B, L, H, D]`.

    Raises:
      ValueError: shapes differ or do not have four dimensions, or windows are not distinct positive whole numbers.
    """
    if query.ndim != 4 or not query.shape == key.shape == value.shape:
        raise ValueError(
            f"`query`, `key` and `value` must have one shape [B, L, H, D], got {query.shape}, {key.shape} and "
            f"{value.shape}."
        )
    whole = isinstance(windows, Sequence) and all(isinstance(k, (int, np.integer)) and k >= 1 for k in windows)
    if not whole or len(set(windows)) < len(windows):
        raise ValueError(f"`windows` must be positive and distinct whole numbers of blocks, as (2, 1); got {windows}.")
    functions: dict[str, Callable[..., jax.Array]] = {"whole": partial(_attend_to_all, axis)}
    functions |= {f"{k} blocks" if k > 1 else "1 block": partial(_attend_to_window, axis, k) for k in windows}
    operands = query, jnp.stack([key, value])
    return alternatives(name, functions, *operands) if windows else _attend_to_all(axis, *operands)


def _attend_to_all(axis: str, query: jax.Array, key_value: jax.Array) -> jax.Array:
    key, value = lax.all_gather(key_value, axis, axis=2, tiled=True)
    return _attention(axis, query, key, value, jnp.arange(key.shape[1]))


def _attend_to_window(axis: str, num_blocks: int, query: jax.Array, key_value: jax.Array) -> jax.Array:
    num_devices, length = lax.axis_size(axis), query.shape[1]
    distances = range(min(num_blocks, num_devices))  # in blocks; the device's own block comes first
    blocks = [
        key_value,
        *(lax.ppermute(key_value, axis, [(i - b, i) for i in range(b, num_devices)]) for b in distances[1:]),
    ]
    starts = (lax.axis_index(axis) - jnp.array(distances)) * length
    key, value = jnp.concatenate(blocks, axis=2)
    return _attention(axis, query, key, value, (starts[:, None] + jnp.arange(length)).ravel())


def _attention(axis: str, query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns attention of this device's block to keys at positions `[S]`; negative positions are not attended to."""
    length = query.shape[1]
    query_positions = lax.axis_index(axis) * length + jnp.arange(length)
    visible = (positions >= 0) & (positions <= query_positions[:, None])
    scores = jnp.einsum("blhd,bshd->bhls", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bhls,bshd->blhd", weights, value)
