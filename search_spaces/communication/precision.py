"""Number formats for collectives: narrow codes, with one scale for each block of elements.

The scale adapts the narrow range of the codes to each block, so that the rounding error is in proportion to the
block's largest element.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.communication.base import Precision

ELEMENTS_PER_SCALE = 128
"""The most elements that share a scale; a row is cut into equal blocks. Its 4 bytes add 3% to the codes of int8."""

FLOAT32 = Precision("float32", "float32", 32, math.inf, 23, -126)
BFLOAT16 = Precision("bfloat16", "bfloat16", 16, math.inf, 7, -126)
FLOAT8 = Precision("float8_e4m3", "float8_e4m3fn", 8, 448.0, 3, -6)
INT8 = Precision("int8", "int8", 8, 127.0)
INT4 = Precision("int4", "int8", 4, 7.0)
PRECISIONS = (FLOAT32, BFLOAT16, FLOAT8, INT8, INT4)


def encode(x: jax.Array, precision: Precision, key: jax.Array | None = None) -> jax.Array:
    """Encodes the numbers along the last dimension, which is padded and cut into equal blocks of an even size.

    Args:
      x: `[..., elements]` real numbers.
      precision: of the codes.
      key: a random key, which stochastic rounding needs.

    Returns:
      `[..., blocks, bytes]` uint8, the codes of a block followed by its scale; or `[..., elements]` in the codes' type
      where they have no scales.

    Raises:
      ValueError: `precision` rounds stochastically and `key` is None.
    """
    if precision.rounding == "stochastic" and key is None:
        raise ValueError(f"`key` is None, but {precision.name!r} rounds stochastically; give a `jax.random.key`.")
    x = x.astype(jnp.float32)
    if math.isinf(precision.largest):
        return _rounded(x, precision, key).astype(precision.dtype)
    blocks = _blocks(x)
    scales = jnp.max(jnp.abs(blocks), axis=-1) / precision.largest
    scaled = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    codes = _rounded(jnp.clip(scaled, -precision.largest, precision.largest), precision, key).astype(precision.dtype)
    codes = lax.bitcast_convert_type(codes, jnp.uint8)
    if precision.bits == 4:
        codes = (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)
    return jnp.concatenate([codes, lax.bitcast_convert_type(scales, jnp.uint8)], axis=-1)


def decode(encoded: jax.Array, precision: Precision, num_elements: int) -> jax.Array:
    """Decodes what `encode` returned; returns `[..., num_elements]` float32."""
    if math.isinf(precision.largest):
        return encoded.astype(jnp.float32)
    codes, scales = encoded[..., :-4], lax.bitcast_convert_type(encoded[..., -4:], jnp.float32)
    if precision.bits == 4:
        codes = jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        codes = jnp.where(codes > 7, codes | 0xF0, codes)
    values = lax.bitcast_convert_type(codes, precision.dtype).astype(jnp.float32) * scales[..., None]
    return values.reshape(*values.shape[:-2], -1)[..., :num_elements]


def encoded_bytes(precision: Precision, num_elements: int) -> int:
    """Returns the bytes of a number of encoded elements, with padding and scales."""
    if math.isinf(precision.largest):
        return num_elements * precision.bits // 8
    num_blocks, block = _num_blocks_and_size(num_elements)
    return num_blocks * (block * precision.bits // 8 + 4)


def _num_blocks_and_size(num_elements: int) -> tuple[int, int]:
    num_blocks = max(1, math.ceil(num_elements / ELEMENTS_PER_SCALE))
    block = math.ceil(num_elements / num_blocks)
    return num_blocks, block + block % 2


def _blocks(x: jax.Array) -> jax.Array:
    num_blocks, block = _num_blocks_and_size(x.shape[-1])
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_blocks * block - x.shape[-1])]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], num_blocks, block)


def _rounded(x: jax.Array, precision: Precision, key: jax.Array | None) -> jax.Array:
    """Rounds to numbers that the codes can hold, unless the cast to the codes' type does so itself."""
    if precision.rounding == "nearest":
        return x if precision.mantissa_bits else jnp.round(x)
    assert key is not None
    spacing = jnp.ones_like(x)
    if precision.mantissa_bits:
        exponent = jnp.maximum(jnp.frexp(x)[1] - 1, precision.least_exponent)
        spacing = jnp.ldexp(spacing, exponent - precision.mantissa_bits)
    return jnp.floor(x / spacing + jax.random.uniform(key, x.shape)) * spacing
