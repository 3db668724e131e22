"""Runs collectives, exactly or on codes, and encodes their operands.

A code is narrow, and each block of codes has a scale. The scale adapts the narrow range of the codes to the block, so
that the rounding error is in proportion to the block's largest element.

A collective whose operand is encoded is made of `jax.lax` collectives on the codes, so that it runs under
`jax.shard_map` and under `jax.vmap(axis_name=...)` alike. Sums cannot be formed of codes. An encoded all-reduce is
therefore a reduce-scatter (an all-to-all of encoded parts, which are decoded and summed in float32) and an all-gather
of the encoded sums: every number is rounded twice on one axis, and once more on each further axis.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.communication.base import CollectiveOp, Precision

ELEMENTS_PER_SCALE = 128
"""The most elements that share a scale; a row is cut into equal blocks. Its 4 bytes add 3% to the codes of int8."""


def run_exact(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    """Runs the plain `jax.lax` collective; its derivatives of any order pass transposed collectives."""
    return _run_differentiable(collective, x) if jnp.issubdtype(x.dtype, jnp.floating) else _run_plain(collective, x)


def run_encoded(
    collective: CollectiveOp, x: jax.Array, precision: Precision, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Runs a collective whose operand is sent as codes; `key` may be None if these are rounded to the nearest.

    Returns:
      The result in the type of `x`; and for a reduction this device's residual, float32, shaped as `x`: the sum of the
      residuals over the devices is the exact sum minus the result. None for the other kinds.
    """
    key = _folded(key, lax.axis_index(collective.axes))
    axes, sizes, n = collective.axes, collective.sizes, collective.num_devices
    residual = None
    match collective.kind:
        case "all_reduce":
            y, residual = _sum_everywhere(x.ravel().astype(jnp.float32), axes, sizes, precision, key)
            y, residual = y.reshape(x.shape), residual.reshape(x.shape)
        case "all_gather":
            rows = _gather(encode(x.ravel(), precision, key), axes)
            rows = decode(rows, precision, x.size).reshape(n, *x.shape)
            y = _join_parts(rows, collective.dimensions[0], collective.tiled)
        case "reduce_scatter":
            rows = _cut_into_parts(x, collective.dimensions[0], n, collective.tiled)
            y, residual = _sum_and_scatter(rows.reshape(n, -1), axes, sizes, precision, key)
            y = y.reshape(rows.shape[1:])
            residual = _join_parts(residual.reshape(rows.shape), collective.dimensions[0], collective.tiled)
        case "all_to_all":
            rows = _cut_into_parts(x, collective.dimensions[0], n, collective.tiled)
            flat = rows.reshape(n, -1)
            codes = _exchange(encode(flat, precision, key), axes)
            rows = decode(codes, precision, flat.shape[1]).reshape(rows.shape)
            y = _join_parts(rows, collective.dimensions[1], collective.tiled)
        case "collective_permute":
            codes = _permute(collective, encode(x.ravel(), precision, key))
            y = decode(codes, precision, x.size).reshape(x.shape)
    return y.astype(x.dtype), residual


def encode(x: jax.Array, precision: Precision, key: jax.Array | None = None) -> jax.Array:
    """Encodes the numbers along the last dimension, which is padded and cut into equal blocks of an even size.

    Args:
      x: `[..., elements]` real numbers.
      key: a random key, which stochastic rounding needs.

    Returns:
      `[..., blocks, bytes]` uint8, the codes of a block followed by its scale; or `[..., elements]` in the codes' type
      where they have no scales.
    """
    if precision.rounding == "stochastic" and key is None:
        raise ValueError(f"`key` is None, but {precision.name!r} rounds stochastically; give a `jax.random.key`.")
    codes, scales = to_codes(x, precision, key)
    if math.isinf(precision.largest):
        return codes
    packed = lax.bitcast_convert_type(codes, jnp.uint8)
    return jnp.concatenate([packed, lax.bitcast_convert_type(scales, jnp.uint8)], axis=-1)


def to_codes(x: jax.Array, precision: Precision, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of the numbers along the last dimension, and the scales apart from them.

    Args:
      x: `[..., elements]` real numbers.

    Returns:
      `[..., blocks, codes]`, two codes of 4 bits in one; and the scales `[..., blocks]`, float32. Or `[..., elements]`
      in the codes' type and no scales.
    """
    x = x.astype(jnp.float32)
    if math.isinf(precision.largest):
        return _round(x, precision, key).astype(precision.dtype), jnp.zeros(0)
    blocks = _blocks(x)
    scales = jnp.max(jnp.abs(blocks), axis=-1) / precision.largest
    scaled_blocks = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    numbers = _round(jnp.clip(scaled_blocks, -precision.largest, precision.largest), precision, key)
    codes = numbers.astype(precision.dtype)
    if precision.bits == 4:
        codes = (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)
    return codes, scales


def decode(encoded_numbers: jax.Array, precision: Precision, num_elements: int) -> jax.Array:
    """Decodes what `encode` returned; returns `[..., num_elements]` float32."""
    if math.isinf(precision.largest):
        return encoded_numbers.astype(jnp.float32)
    codes, scales = encoded_numbers[..., :-4], lax.bitcast_convert_type(encoded_numbers[..., -4:], jnp.float32)
    return from_codes(lax.bitcast_convert_type(codes, precision.dtype), scales, precision, num_elements)


def from_codes(codes: jax.Array, scales: jax.Array, precision: Precision, num_elements: int) -> jax.Array:
    """Decodes what `to_codes` returned; returns `[..., num_elements]` float32."""
    if math.isinf(precision.largest):
        return codes.astype(jnp.float32)
    if precision.bits == 4:
        low = (codes << 4) >> 4  # with the sign of the low half
        codes = jnp.stack([low, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    values = codes.astype(jnp.float32) * scales[..., None]
    return values.reshape(*values.shape[:-2], -1)[..., :num_elements]


def encoded_bytes(precision: Precision, num_elements: int) -> int:
    """Returns the bytes of a number of encoded elements, with padding and scales."""
    if math.isinf(precision.largest):
        return num_elements * precision.bits // 8
    num_blocks, block = _num_blocks_and_size(num_elements)
    return num_blocks * (block * precision.bits // 8 + 4)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_differentiable(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    """Runs the plain collective with its own transpose: JAX's are wrong under `jax.vmap` (see `_run_plain`)."""
    return _run_plain(collective, x)


_run_differentiable.defvjp(
    lambda collective, x: (_run_plain(collective, x), None),
    lambda collective, _, cotangent: (run_exact(collective.transpose(), cotangent),),
)


def _run_plain(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    match collective.kind:
        case "all_reduce":
            return lax.psum(x, collective.axes)
        case "all_gather":
            return _join_parts(_gather(x, collective.axes), collective.dimensions[0], collective.tiled)
        case "reduce_scatter":
            rows = _cut_into_parts(x, collective.dimensions[0], collective.num_devices, collective.tiled)
            rows = rows.reshape(*collective.sizes, *rows.shape[1:])
            for i in reversed(range(len(collective.axes))):  # `jax.vmap` is right for the first dimension only
                rows = lax.psum_scatter(jnp.moveaxis(rows, i, 0), collective.axes[i])
            return rows
        case "all_to_all":
            split_dimension, concatenated_dimension = collective.dimensions
            x = _as_varying(x, collective.axes)
            return lax.all_to_all(x, collective.axes, split_dimension, concatenated_dimension, tiled=collective.tiled)
        case "collective_permute":
            return _permute(collective, x)


def _permute(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    """Runs a permute; devices that receive from nobody get zeros, as with `lax.ppermute`.

    `jax.vmap` takes complete permutations only: devices without a target send to those without a source, which then
    discard what they received.
    """
    sources, targets = zip(*collective.permutation, strict=True)
    others = [[i for i in range(collective.num_devices) if i not in ends] for ends in (sources, targets)]
    pairs = [*collective.permutation, *zip(*others, strict=True)]
    y = lax.ppermute(_as_varying(x, collective.axes), collective.axes, pairs)
    receives = np.isin(np.arange(collective.num_devices), targets)
    return jnp.where(jnp.asarray(receives)[lax.axis_index(collective.axes)], y, jnp.zeros_like(y))


def _as_varying(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns `x` as an array that may differ between devices; `jax.vmap` is wrong for one that it does not batch.

    The condition always holds, but depends on the device.
    """
    return jnp.where(lax.axis_index(axes) >= 0, x, x)


def _exchange(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """Sends row i of each device to device i, `[n, ...]` to `[n, ...]`."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return lax.all_to_all(_as_varying(x, names), names, 0, 0, tiled=True)


def _gather(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Gathers the arrays of all devices in order, `[n, ...]`."""
    shape = x.shape
    for i, axis in enumerate(axes):  # `jax.vmap` cannot gather over several axes at once
        x = lax.all_gather(x, axis, axis=i)
    return x.reshape(-1, *shape)


def _sum_and_scatter(
    rows: jax.Array, axes: Sequence[str], sizes: Sequence[int], precision: Precision, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sums rows `[n, elements]` over devices, each sum on the device of its row; the last axis goes first.

    Returns:
      The sum `[elements]`, and the residuals of the rows. What a further axis loses of a sum is a residual of the
      device that formed this sum, in the row of the sum.
    """
    *outer, axis = axes
    n = sizes[-1]
    by_device = jnp.moveaxis(rows.reshape(-1, n, rows.shape[1]), 1, 0).reshape(n, -1)
    codes = encode(by_device, precision, key)
    width = by_device.shape[1]
    residual = by_device - decode(codes, precision, width)
    sums = decode(_exchange(codes, axis), precision, width).sum(axis=0)
    if outer:
        sums, residual_of_sums = _sum_and_scatter(
            sums.reshape(-1, rows.shape[1]), outer, sizes[:-1], precision, _folded(key, 0)
        )
        residual = residual.at[lax.axis_index(axis)].add(residual_of_sums.ravel())
    return sums, jnp.moveaxis(residual.reshape(n, -1, rows.shape[1]), 0, 1).reshape(rows.shape)


def _sum_everywhere(
    x: jax.Array, axes: Sequence[str], sizes: Sequence[int], precision: Precision, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sums `[elements]` over devices; returns the sum and this device's residual.

    What the gathering of a sum loses is a residual of the device that formed this sum.
    """
    num_devices = math.prod(sizes)
    rows = jnp.pad(x, (0, -x.size % num_devices)).reshape(num_devices, -1)
    sums, residual = _sum_and_scatter(rows, axes, sizes, precision, key)
    codes = encode(sums, precision, _folded(key, 1))
    residual = residual.at[lax.axis_index(tuple(axes))].add(sums - decode(codes, precision, sums.size))
    whole = decode(_gather(codes, axes), precision, sums.size)
    return whole.ravel()[: x.size], residual.ravel()[: x.size]


def _folded(key: jax.Array | None, data: Any) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, data)


def _cut_into_parts(x: jax.Array, dimension: int, count: int, tiled: bool) -> jax.Array:
    """Cuts a dimension into `[count, ...]` parts, which keep the dimension if tiled."""
    if not tiled:
        return jnp.moveaxis(x, dimension, 0)
    shape = (*x.shape[:dimension], count, x.shape[dimension] // count, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x.reshape(shape), dimension, 0)


def _join_parts(rows: jax.Array, dimension: int, tiled: bool) -> jax.Array:
    """Joins parts `[count, ...]` along a dimension, which they have already if tiled and which is new if not."""
    x = jnp.moveaxis(rows, 0, dimension)
    if not tiled:
        return x
    return x.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 2 :])


def _num_blocks_and_size(num_elements: int) -> tuple[int, int]:
    num_blocks = max(1, math.ceil(num_elements / ELEMENTS_PER_SCALE))
    block = math.ceil(num_elements / num_blocks)
    return num_blocks, block + block % 2


def _blocks(x: jax.Array) -> jax.Array:
    num_blocks, block = _num_blocks_and_size(x.shape[-1])
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_blocks * block - x.shape[-1])]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], num_blocks, block)


def _round(x: jax.Array, precision: Precision, key: jax.Array | None) -> jax.Array:
    """Rounds to numbers that the codes can hold, unless the cast to the codes' type does so itself."""
    if precision.rounding == "nearest":
        return x if precision.mantissa_bits else jnp.round(x)
    assert key is not None
    spacing = jnp.ones_like(x)
    if precision.mantissa_bits:
        exponent = jnp.maximum(jnp.frexp(x)[1] - 1, precision.least_exponent)
        spacing = jnp.ldexp(spacing, exponent - precision.mantissa_bits)
    return jnp.floor(x / spacing + jax.random.uniform(key, x.shape)) * spacing
