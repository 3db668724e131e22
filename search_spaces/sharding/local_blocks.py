"""Reshards and reductions of one device's block, with the collectives written out, inside a `jax.shard_map`.

A block is what one device has of an array with a spec. Every step of a reshard is one collective over one mesh axis
(see `resharding.py`), and because only the minor-most axis of a dimension enters or leaves, each step is a tiled
collective of `jax.lax` on that dimension: no step permutes elements within a block.

A dimension that its parts do not divide is padded at its end: all blocks have the size of the largest, and what lies
beyond the array's own size is arbitrary and has to be masked before it is summed (`mask`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.extend import core
from jax.extend.random import threefry2x32_p

from search_spaces.partition_specs import IndexedSpec
from search_spaces.replay import source_of
from search_spaces.sharding.base import ReshardStep
from search_spaces.sharding.spec import parts_of

REDUCERS: dict[str, Callable[..., Any]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
    "finished": lambda block, names: block,
}
"""Collectives that finish partial results, by what combines them; an operation may have finished its own."""


@dataclass(frozen=True)
class Blocks:
    """One device's view of the arrays on a mesh; the methods run inside a mapping over all of its axes."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def shape(self, shape: Sequence[int], spec: IndexedSpec) -> tuple[int, ...]:
        """Returns the shape of a block of an array of the given shape."""
        return tuple(-(-size // parts) for size, parts in zip(shape, parts_of(spec, self.axis_sizes), strict=True))

    def index(self, axes: Sequence[int]) -> jax.Array:
        """Returns the position of this device along some mesh axes together, the first one major; 0 for none."""
        position = jnp.int32(0)
        for axis in axes:
            position = position * self.axis_sizes[axis] + lax.axis_index(self.axis_names[axis])
        return position

    def position(self, axes: Sequence[int], size: int, local: Any, run: int = 1) -> Any:
        """Returns where elements of this block lie along a whole dimension that is split over some axes.

        Args:
          run: for blocks that are not contiguous (see `pipelines.microbatches`); it makes no difference here.
        """
        del run
        return local + (self.index(axes) * size).astype(local.dtype)

    def local_position(self, axes: Sequence[int], size: int, position: Any, run: int = 1) -> tuple[Any, Any]:
        """Returns where elements of a whole dimension lie in this block, and whether they do; undoes `position`."""
        del run
        local = position - (self.index(axes) * size).astype(jnp.result_type(position))
        return local, (local >= 0) & (local < size)

    def reshard(self, block: Any, shape: Sequence[int], source: IndexedSpec, steps: Sequence[ReshardStep]) -> Any:
        """Returns the block after some steps."""
        if steps and 0 in shape:  # nothing is sent, and collectives refuse empty dimensions
            return block.reshape(self.shape(shape, steps[-1].spec))
        spec = source
        for step in steps:
            block = self._step(block, shape, spec, step)
            spec = step.spec
        return block

    def reduce(self, block: Any, unreduced: IndexedSpec, steps: Sequence[ReshardStep], combine: str = "sum") -> Any:
        """Returns the block with its partial results combined over the devices that share it.

        Scatters over several axes are one collective over all of them: one axis after the other, the fast one first,
        would leave the parts in another order than the spec has.

        Args:
          steps: reductions ("all_reduce", "reduce_scatter"), those of one kind next to each other.
          combine: a key of `REDUCERS`; scattered results are always sums.
        """
        spec = unreduced
        for kind, group in groupby(steps, key=lambda step: step.kind):
            members = list(group)
            names = tuple(self.axis_names[axis] for axis in sorted(step.axis for step in members))
            if kind == "all_reduce":
                block = _all_reduce(block, names, combine)
            elif kind == "reduce_scatter":
                dim = next(d for d, axes in enumerate(members[-1].spec) if axes != spec[d])
                block = lax.psum_scatter(block, names, scatter_dimension=dim, tiled=True)
            else:
                raise ValueError(f"`steps` must be reductions, not {kind!r}.")
            spec = members[-1].spec
        return block

    def mask(self, block: Any, shape: Sequence[int], spec: IndexedSpec, dims: Sequence[int], fill: Any) -> Any:
        """Returns the block with `fill` instead of the padding of some dimensions."""
        for dim in dims:
            parts = parts_of((spec[dim],), self.axis_sizes)[0]
            if shape[dim] % parts:
                size = block.shape[dim]
                position = self.index(spec[dim]) * size + lax.broadcasted_iota(jnp.int32, block.shape, dim)
                block = jnp.where(position < shape[dim], block, jnp.asarray(fill, block.dtype))
        return block

    def _step(self, block: Any, shape: Sequence[int], spec: IndexedSpec, step: ReshardStep) -> Any:
        name = self.axis_names[step.axis]
        grown = [d for d, (before, after) in enumerate(zip(spec, step.spec, strict=True)) if len(after) > len(before)]
        shrunk = [d for d, (before, after) in enumerate(zip(spec, step.spec, strict=True)) if len(after) < len(before)]
        match step.kind:
            case "slice":
                return self._slice(block, shape, step.spec, grown[0], step.axis)
            case "all_gather":
                result = lax.all_gather(block, name, axis=shrunk[0], tiled=True)
                return self._trim(result, shape, step.spec, shrunk[0])
            case "all_to_all":
                block = self._pad(block, shape, step.spec, grown[0], step.axis)
                result = lax.all_to_all(block, name, split_axis=grown[0], concat_axis=shrunk[0], tiled=True)
                return self._trim(result, shape, step.spec, shrunk[0])
            case "collective_permute":
                return lax.ppermute(block, self.axis_names, _permutation(spec, step.spec, self.axis_sizes))
        raise ValueError(f"`steps` must not hold a reduction, but one is {step.kind!r}.")

    def _slice(self, block: Any, shape: Sequence[int], spec: IndexedSpec, dim: int, axis: int) -> Any:
        size = self.shape(shape, spec)[dim]
        block = self._pad(block, shape, spec, dim, axis)
        return lax.dynamic_slice_in_dim(block, lax.axis_index(self.axis_names[axis]) * size, size, dim)

    def _pad(self, block: Any, shape: Sequence[int], spec: IndexedSpec, dim: int, axis: int) -> Any:
        """Pads the end of a dimension by as much as splitting it evenly over one more axis takes."""
        missing = self.shape(shape, spec)[dim] * self.axis_sizes[axis] - block.shape[dim]
        return jnp.pad(block, [(0, missing if d == dim else 0) for d in range(block.ndim)]) if missing else block

    def _trim(self, block: Any, shape: Sequence[int], spec: IndexedSpec, dim: int) -> Any:
        """Cuts off the padding that gathering uneven blocks leaves at the end."""
        size = self.shape(shape, spec)[dim]
        return block if block.shape[dim] == size else lax.slice_in_dim(block, 0, size, axis=dim)


def _all_reduce(block: Any, names: tuple[str, ...], combine: str) -> Any:
    if block.dtype != jnp.bool:
        return REDUCERS[combine](block, names)
    return REDUCERS[combine](block.astype(jnp.int8), names).astype(jnp.bool)  # XLA combines numbers only


@contextmanager
def context_of_blocks(equation: core.JaxprEqn) -> Iterator[None]:
    """Restores, for what is computed on blocks, the line, name scope, random numbers and place of an equation.

    Its mesh is not restored: blocks have none.
    """
    context = equation.ctx
    with ExitStack() as contexts:
        contexts.enter_context(source_of(equation))
        contexts.enter_context(jax.threefry_partitionable(context.threefry_partitionable))
        if context.compute_type is not None:
            contexts.enter_context(compute_on(context.compute_type))
        yield


@lru_cache(maxsize=10_000)
def _permutation(source: IndexedSpec, target: IndexedSpec, axis_sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns (from, to) pairs of devices, numbered row-major, that give every device the block of `target`.

    Where several devices hold a block, a device that needs the block which it has keeps it, and the others are served
    in order.
    """
    before, after = _blocks_of_devices(source, axis_sizes), _blocks_of_devices(target, axis_sizes)
    stays = before == after
    holders: dict[int, list[int]] = {}
    for device in np.flatnonzero(~stays).tolist():
        holders.setdefault(int(before[device]), []).append(device)
    pairs = [(device, device) for device in np.flatnonzero(stays).tolist()]
    return pairs + [(holders[int(after[device])].pop(0), device) for device in np.flatnonzero(~stays).tolist()]


def _blocks_of_devices(spec: IndexedSpec, axis_sizes: tuple[int, ...]) -> np.ndarray:
    """Returns the number of the block that each device has, `[devices]`."""
    coordinates = np.unravel_index(np.arange(prod(axis_sizes)), axis_sizes)
    number = np.zeros(prod(axis_sizes), np.int64)
    for axes in spec:
        for axis in axes:
            number = number * axis_sizes[axis] + coordinates[axis]
    return number


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
