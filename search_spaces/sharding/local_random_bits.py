"""Random bits of one device's block: those that the whole array would have there."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p


def bits_of_block(
    key: Any, whole_shape: Sequence[int], shape: Sequence[int], positions: Sequence[Any], bit_width: int
) -> jax.Array:
    """Draws the bits of a block: element i of an array is threefry of the key and the counter i.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011); the counters are JAX's for
    `jax_threefry_partitionable`, of arrays of less than 2^32 elements.

    Args:
      key: random keys of threefry; an array of keys has the leading dimensions of the block.
      positions: for each dimension where the block's elements lie along the whole one, `[shape[d]]` uint32.
      bit_width: 8, 16, 32 or 64.
    """
    if key.shape:
        return jax.vmap(lambda k: bits_of_block(k, whole_shape[1:], shape[1:], positions[1:], bit_width))(key)
    counter = jnp.zeros(tuple(shape), jnp.uint32)
    for dim, position in enumerate(positions):
        counter = counter * whole_shape[dim] + lax.broadcast_in_dim(position, tuple(shape), (dim,))
    first, second = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(counter), counter)
    if bit_width == 64:
        return high.astype(jnp.uint64) << 32 | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{bit_width}")
