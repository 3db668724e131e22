"""Collectives whose operands travel encoded, and what each sends.

They are made of `jax.lax` collectives on codes, so that they run under `jax.shard_map` and under
`jax.vmap(axis_name=...)` alike. An all-reduce is a reduce-scatter (an all-to-all of encoded parts, summed in float32)
and an all-gather of the encoded sums: every number is rounded twice on one axis and once more on each further axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cost.base import CollectiveKind
from cost.collectives import collective_sent_bytes
from search_spaces.communication.precision import Precision, bytes_of, decode, encode


@dataclass(frozen=True)
class Stage:
    """A step of a collective along one mesh axis.

    Attributes:
      kind: what it does.
      axis: the mesh axis.
      num_devices: along the axis.
      num_bytes: the full size within a group of devices (see `cost.collectives`).
      num_coded: elements that each device encodes or decodes for it.
      precision: of the codes; None where the data travels as it is.
      count: executions in one training step.
    """

    kind: CollectiveKind
    axis: str
    num_devices: int
    num_bytes: float
    num_coded: float = 0.0
    precision: Precision | None = None
    count: float = 1.0

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in one training step."""
        return float(collective_sent_bytes(self.kind, self.num_bytes, self.num_devices)) * self.count


@dataclass(frozen=True)
class CollectiveOp:
    """A linear collective as one device takes part in it.

    Attributes:
      kind: what it does.
      axes: the mesh axes over which it goes, major to minor.
      sizes: devices along each.
      dimensions: of an all-gather or a reduce-scatter the gathered or scattered dimension, of an all-to-all the split
        and the concatenated one.
      tiled: as `jax.lax` means it: whether the dimensions stay, multiplied or divided, or come and go.
      permutation: of a collective permute, pairs of source and target.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    dimensions: tuple[int, ...] = ()
    tiled: bool = False
    permutation: tuple[tuple[int, int], ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices in a group."""
        return math.prod(self.sizes)

    @property
    def num_copies(self) -> int:
        """How many devices of a group hold the same result."""
        return self.num_devices if self.kind in ("all_reduce", "all_gather") else 1

    def transposed(self) -> "CollectiveOp":
        """The collective that carries cotangents back."""
        kinds: dict[CollectiveKind, CollectiveKind] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
        back = tuple((target, source) for source, target in self.permutation)
        return replace(self, kind=kinds.get(self.kind, self.kind), dimensions=self.dimensions[::-1], permutation=back)

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the result on one device."""
        shape, n = list(shape), self.num_devices
        if self.kind in ("reduce_scatter", "all_to_all"):
            cut = self.dimensions[0]
            shape[cut : cut + 1] = [shape[cut] // n] if self.tiled else []
        if self.kind in ("all_gather", "all_to_all"):
            joined = self.dimensions[-1]
            shape[joined : joined + self.tiled] = [shape[joined] * n] if self.tiled else [n]
        return tuple(shape)

    def exact(self, x: jax.Array) -> jax.Array:
        """The plain `jax.lax` collective; cotangents go back through `transposed`, as often as it is differentiated."""
        return _exact(self, x) if jnp.issubdtype(x.dtype, jnp.floating) else self._plain(x)

    def _plain(self, x: jax.Array) -> jax.Array:
        match self.kind:
            case "all_reduce":
                return lax.psum(x, self.axes)
            case "all_gather":
                return _merged(_gathered(x, self.axes), self.dimensions[0], self.tiled)
            case "reduce_scatter":
                rows = _parts(x, self.dimensions[0], self.num_devices, self.tiled)
                rows = rows.reshape(*self.sizes, *rows.shape[1:])
                for i in reversed(range(len(self.axes))):  # `jax.vmap` scatters other dimensions than the first wrongly
                    rows = lax.psum_scatter(jnp.moveaxis(rows, i, 0), self.axes[i])
                return rows
            case "all_to_all":
                return lax.all_to_all(_held(x, self.axes), self.axes, *self.dimensions, tiled=self.tiled)
            case "collective_permute":
                return self._permuted(x)

    def encoded(self, x: jax.Array, precision: Precision, key: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The same with codes travelling instead of numbers.

        Returns:
          The result in the type of `x`; and for an all-reduce what rounding left of this device's operand, float32:
          the sum of it over the devices is the exact sum minus the result. None for the other kinds.
        """
        key = jax.random.fold_in(key, lax.axis_index(self.axes))
        left = None
        match self.kind:
            case "all_reduce":
                y, left = _reduced(x.ravel().astype(jnp.float32), self.axes, self.sizes, precision, key)
                y, left = y.reshape(x.shape), left.reshape(x.shape)
            case "all_gather":
                rows = _gathered(encode(x.ravel(), precision, key), self.axes)
                rows = decode(rows, precision, x.size).reshape(self.num_devices, *x.shape)
                y = _merged(rows, self.dimensions[0], self.tiled)
            case "reduce_scatter":
                rows = _parts(x, self.dimensions[0], self.num_devices, self.tiled)
                y = _scattered(rows.reshape(self.num_devices, -1), self.axes, self.sizes, precision, key)[0]
                y = y.reshape(rows.shape[1:])
            case "all_to_all":
                rows = _parts(x, self.dimensions[0], self.num_devices, self.tiled)
                flat = rows.reshape(self.num_devices, -1)
                codes = _exchanged(encode(flat, precision, key), self.axes)
                y = _merged(decode(codes, precision, flat.shape[1]).reshape(rows.shape), self.dimensions[1], self.tiled)
            case "collective_permute":
                codes = self._permuted(encode(x.ravel(), precision, key))
                y = decode(codes, precision, x.size).reshape(x.shape)
        return y.astype(x.dtype), left

    def stages(self, shape: Sequence[int], dtype: np.dtype, precision: Precision | None) -> list[Stage]:
        """The steps for an operand of a shape and type on each device, exact where `precision` is None.

        Over several axes the whole size goes along the last one, the fastest by convention, and what is left of it
        along those before; an exact all-reduce is one step on each axis, an encoded one two.
        """
        sizes, size = self.sizes, math.prod(shape)

        def nbytes(elements: int) -> float:
            return elements * np.dtype(dtype).itemsize if precision is None else bytes_of(precision, elements)

        if self.kind == "collective_permute":
            found, coded = [self._stage("collective_permute", 0, nbytes(size))], 2 * size
        elif self.kind == "all_to_all":
            whole = self.num_devices * nbytes(size // self.num_devices)
            found, coded = [self._stage("all_to_all", i, whole * n) for i, n in enumerate(sizes)], 2 * size
        elif self.kind == "all_gather":
            found, coded = self._gathering(nbytes(size)), size * (1 + self.num_devices)
        else:
            found, coded, left = [], 0, size
            for i in reversed(range(len(sizes))):
                part = math.ceil(left / sizes[i])
                exact = self._stage(self.kind, i, nbytes(left))
                encoded = self._stage("all_to_all", i, sizes[i] ** 2 * nbytes(part))
                found.append(exact if precision is None else encoded)
                coded, left = coded + 2 * left, part
            if self.kind == "all_reduce" and precision is not None:
                found, coded = found + self._gathering(nbytes(left)), coded + left + size
        if precision is None:
            return found
        return [replace(found[0], num_coded=coded, precision=precision), *found[1:]]

    def _permuted(self, x: jax.Array) -> jax.Array:
        """A permute of which who has no source gets zeros; `jax.vmap` takes whole permutations only."""
        sources, targets = zip(*self.permutation, strict=True)
        idle = [[i for i in range(self.num_devices) if i not in used] for used in (sources, targets)]
        y = lax.ppermute(_held(x, self.axes), self.axes, [*self.permutation, *zip(*idle, strict=True)])
        receives = np.isin(np.arange(self.num_devices), targets)
        return jnp.where(jnp.asarray(receives)[lax.axis_index(self.axes)], y, jnp.zeros_like(y))

    def _stage(self, kind: CollectiveKind, i: int, num_bytes: float) -> Stage:
        return Stage(kind, self.axes[i], self.sizes[i], num_bytes)

    def _gathering(self, num_bytes: float) -> list[Stage]:
        ends = range(1, len(self.axes) + 1)
        return [self._stage("all_gather", i - 1, num_bytes * math.prod(self.sizes[:i])) for i in ends]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exact(collective: CollectiveOp, x: jax.Array) -> jax.Array:
    """Under `jax.vmap` JAX's own transposes of these are wrong: see `_held` and `CollectiveOp._plain`."""
    return collective._plain(x)


_exact.defvjp(
    lambda collective, x: (collective._plain(x), None),
    lambda collective, _, cotangent: (collective.transposed().exact(cotangent),),
)


def _held(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The array as each device's own: `jax.vmap` exchanges what it does not batch wrongly."""
    return jnp.where(lax.axis_index(axes) >= 0, x, x)


def _exchanged(x: jax.Array, axes: str | Sequence[str]) -> jax.Array:
    """Row i of each device goes to device i, `[devices, ...]` to `[devices, ...]`."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return lax.all_to_all(_held(x, names), names, 0, 0, tiled=True)


def _gathered(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Everybody's arrays in order, `[devices, ...]`."""
    shape = x.shape
    for i, axis in enumerate(axes):  # `jax.vmap` cannot gather over several axes at once
        x = lax.all_gather(x, axis, axis=i)
    return x.reshape(-1, *shape)


def _scattered(
    rows: jax.Array, axes: Sequence[str], sizes: Sequence[int], precision: Precision, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sums of rows `[devices, elements]`, each at its device; the last axis first.

    Returns:
      `[elements]`, and what rounding left of the rows (of the sums, for further axes, at the row of their device).
    """
    *outer, axis = axes
    n = sizes[-1]
    by_device = jnp.moveaxis(rows.reshape(-1, n, rows.shape[1]), 1, 0).reshape(n, -1)
    codes = encode(by_device, precision, key)
    width = by_device.shape[1]
    left = by_device - decode(codes, precision, width)
    sums = decode(_exchanged(codes, axis), precision, width).sum(axis=0)
    if outer:
        sums, of_sums = _scattered(
            sums.reshape(-1, rows.shape[1]), outer, sizes[:-1], precision, jax.random.fold_in(key, 0)
        )
        left = left.at[lax.axis_index(axis)].add(of_sums.ravel())
    return sums, jnp.moveaxis(left.reshape(n, -1, rows.shape[1]), 0, 1).reshape(rows.shape)


def _reduced(
    x: jax.Array, axes: Sequence[str], sizes: Sequence[int], precision: Precision, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sum of `[elements]` over devices, and what rounding left of this device's part of it.

    What is left of a sum belongs to the device that made it.
    """
    num_devices = math.prod(sizes)
    rows = jnp.pad(x, (0, -x.size % num_devices)).reshape(num_devices, -1)
    sums, left = _scattered(rows, axes, sizes, precision, key)
    codes = encode(sums, precision, jax.random.fold_in(key, 1))
    left = left.at[lax.axis_index(tuple(axes))].add(sums - decode(codes, precision, sums.size))
    whole = decode(_gathered(codes, axes), precision, sums.size)
    return whole.ravel()[: x.size], left.ravel()[: x.size]


def _parts(x: jax.Array, dimension: int, count: int, tiled: bool) -> jax.Array:
    """A dimension cut into `[count, ...]` parts, which keep the dimension if tiled."""
    if not tiled:
        return jnp.moveaxis(x, dimension, 0)
    shape = (*x.shape[:dimension], count, x.shape[dimension] // count, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x.reshape(shape), dimension, 0)


def _merged(rows: jax.Array, dimension: int, tiled: bool) -> jax.Array:
    """Parts `[count, ...]` side by side along a dimension, which they have already if tiled."""
    x = jnp.moveaxis(rows, 0, dimension)
    if not tiled:
        return x
    return x.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 2 :])
