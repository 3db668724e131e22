"""Runs a training step on whole arrays: on one device that simulates a mesh, or on the devices of a real one.

Simulated SPMD is one `jax.vmap` for each mesh axis, with the axis's name: collectives of `jax.lax` find the name there
as they find it in `jax.shard_map`.

The loss of many devices is compared with the loss of one, before anything trains. A loss that is written for each
device can lack a sum over devices, and then trains another model without any error. On a mesh with one device along
each axis collectives do nothing, so that the same function with whole arguments computes the loss that is meant.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from search_spaces.base import Batch, LossAndGradients, Params, PerStrategy, Residuals, Selection
from search_spaces.communication.device_step import DeviceStep, combine, partition_selection
from search_spaces.communication.loss_increases import local_loss_increases, random_direction
from search_spaces.partition_specs import axes_of, broadcast_specs

_WHOLE = PartitionSpec()


@dataclass(frozen=True)
class WholeStep:
    """A training step on whole arrays; `CommunicationSpace` describes the arguments of its methods.

    Attributes:
      param_specs: for each parameter how the mesh splits it, as the parameters.
      batch_specs: for each array of the batch how the mesh splits it, as the batch.
      run: `run(fn, in_specs=..., out_specs=...)` returns a function of whole arrays: `simulate` or `on_devices`.
    """

    device: DeviceStep
    axes: tuple[str, ...]
    param_specs: Any
    batch_specs: Any
    run: Callable[..., Callable[..., Any]]

    def loss(
        self, params: Params, batch: Batch, selection: Selection, key: jax.Array, step: jax.Array | int
    ) -> jax.Array:
        """Returns the training loss."""
        static, dynamic = partition_selection(self.device.groups, selection)
        numbers = [None if x is None or x.ndim else x for x in dynamic]
        weights = [None if x is None or not x.ndim else x for x in dynamic]
        in_specs = (self.param_specs, self.batch_specs, *[_WHOLE] * 4)

        def local(params: Any, weights: Any, batch: Any, numbers: Any, key: jax.Array, step: jax.Array) -> jax.Array:
            return self.device.loss(params, batch, key, step, combine(combine(static, numbers), weights))

        def value(params: Any, batch: Any, weights: Any, *others: Any) -> jax.Array:
            return lax.psum(local(params, weights, batch, *others), self.axes)

        def value_and_gradients(params: Any, batch: Any, weights: Any, *others: Any) -> Any:
            loss, (of_params, of_weights) = jax.value_and_grad(local, (0, 1))(params, weights, batch, *others)
            return lax.psum((loss, of_weights), self.axes), self.device.sum_gradients(of_params)

        # The gradient is taken on the devices: from outside, a simulated device's backward pass has no axes.
        @jax.custom_vjp
        def total(params: Any, weights: Any, others: Any) -> jax.Array:
            return self.run(value, in_specs=in_specs, out_specs=_WHOLE)(params, others[0], weights, *others[1:])

        def forward(params: Any, weights: Any, others: Any) -> Any:
            run = self.run(value_and_gradients, in_specs=in_specs, out_specs=(_WHOLE, self.param_specs))
            (loss, of_weights), of_params = run(params, others[0], weights, *others[1:])
            return loss, (of_params, of_weights)

        def backward(gradients: Any, cotangent: jax.Array) -> Any:
            return *jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), gradients), None

        total.defvjp(forward, backward)
        return total(params, weights, (batch, numbers, key, jnp.asarray(step)))

    def loss_and_gradients(
        self,
        params: Params,
        batch: Batch,
        selection: Selection,
        residuals: Residuals,
        key: jax.Array,
        step: jax.Array | int,
    ) -> LossAndGradients:
        """Returns the training loss, its gradients as they arrive, and the residuals for the next step."""
        static, dynamic = partition_selection(self.device.groups, selection)

        def fn(params: Any, batch: Any, residuals: Any, key: jax.Array, step: jax.Array, dynamic: Any) -> Any:
            selection = combine(static, dynamic)
            loss, gradients = jax.value_and_grad(self.device.loss)(params, batch, key, step, selection)
            return lax.psum(loss, self.axes), *self.device.send_gradients(gradients, residuals, key, step, selection)

        by_device = PartitionSpec(self.axes)
        in_specs = (self.param_specs, self.batch_specs, by_device, _WHOLE, _WHOLE, _WHOLE)
        run = self.run(fn, in_specs=in_specs, out_specs=(_WHOLE, self.param_specs, by_device))
        return LossAndGradients(*run(params, batch, residuals, key, jnp.asarray(step), dynamic))

    def loss_increases(
        self,
        params: Params,
        batch: Batch,
        validation: Batch,
        step_sizes: Params,
        key: jax.Array,
        step: jax.Array | int,
    ) -> PerStrategy:
        """Returns the predicted increases of the loss for all strategies, `[S]` for each group."""
        step_sizes, direction = random_direction(params, step_sizes, key)

        def fn(*arguments: Any) -> list[jax.Array]:
            return lax.psum(local_loss_increases(self.device, *arguments), self.axes)

        by_argument = (self.param_specs, *[self.batch_specs] * 2, *[self.param_specs] * 2, _WHOLE, _WHOLE)
        run = self.run(fn, in_specs=by_argument, out_specs=_WHOLE)
        return run(params, batch, validation, step_sizes, direction, key, jnp.asarray(step))


def simulate(
    fn: Callable[..., Any], mesh_axes: Mapping[str, int], in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Returns `jax.shard_map(fn, ..., check_vma=False)`, a function of whole arrays, for one device.

    Arrays that no axis splits are stored once, not once for each device. Of results that an axis does not split, those
    of its first device are returned.

    Args:
      fn: what every device computes, with collectives over the names of axes.
      in_specs: for each argument a `PartitionSpec`, or a pytree of them that is a prefix of the argument.
      out_specs: a `PartitionSpec` for the result, or a pytree of them that is a prefix of it.
    """

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = broadcast_specs(tuple(in_specs), arguments)
        parts = [_split(x, spec, mesh_axes) for x, spec in zip(leaves, specs, strict=True)]

        def mapped_fn(*flat: Any) -> Any:
            return fn(*jax.tree.unflatten(structure, flat))

        for axis in reversed(list(mesh_axes)):
            in_axes = tuple(0 if any(axis in axes for axes in axes_of(s, len(s))) else None for s in specs)
            mapped_fn = jax.vmap(mapped_fn, in_axes=in_axes, axis_name=axis, axis_size=mesh_axes[axis])
        results = mapped_fn(*parts)
        flat, structure_out = jax.tree.flatten(results)
        specs_out = broadcast_specs(out_specs, results)
        whole = [_join(x, spec, mesh_axes) for x, spec in zip(flat, specs_out, strict=True)]
        return jax.tree.unflatten(structure_out, whole)

    return run


def on_devices(fn: Callable[..., Any], mesh: Mesh, in_specs: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
    """Returns `fn` under `jax.shard_map` without checks of replication; its arguments may have any sharding."""
    mapped_fn = jax.shard_map(fn, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
    if AxisType.Explicit not in mesh.axis_types:
        return mapped_fn

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = broadcast_specs(tuple(in_specs), arguments)
        resharded_leaves = [jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)]
        return mapped_fn(*jax.tree.unflatten(structure, resharded_leaves))

    return run


def _split(x: Any, spec: PartitionSpec, mesh_axes: Mapping[str, int]) -> Any:
    """Returns `[axes that split the array, in the mesh's order..., local shape...]`."""
    positions, order, shape = [], [], []
    for size, axes in zip(jnp.shape(x), axes_of(spec, jnp.ndim(x)), strict=True):
        for axis in axes:
            positions.append((list(mesh_axes).index(axis), len(shape)))
            shape.append(mesh_axes[axis])
        order.append(len(shape))
        shape.append(size // math.prod(mesh_axes[axis] for axis in axes))
    if not positions:
        return x
    return jnp.reshape(x, shape).transpose([*(position for _, position in sorted(positions)), *order])


def _join(x: jax.Array, spec: PartitionSpec, mesh_axes: Mapping[str, int]) -> jax.Array:
    """Returns the whole array for `[all axes in the mesh's order..., local shape...]`."""
    dimensions = axes_of(spec, x.ndim - len(mesh_axes))
    used_axes = {axis for axes in dimensions for axis in axes}
    x = x[tuple(slice(None) if axis in used_axes else 0 for axis in mesh_axes)]
    splitting = [axis for axis in mesh_axes if axis in used_axes]
    order, shape = [], []
    for d, axes in enumerate(dimensions):
        order += [*(splitting.index(axis) for axis in axes), len(splitting) + d]
        shape.append(x.shape[len(splitting) + d] * math.prod(mesh_axes[axis] for axis in axes))
    return x.transpose(order).reshape(shape) if used_axes else x


OneDeviceLoss = Callable[[Any, Any], jax.Array] | Literal["loss_fn"] | None
"""The loss that many devices must compute: see `CommunicationSpace`."""

_ROUNDING_EXPONENT = 0.6
"""Losses may differ by this power of the rounding of one number, relative to them: 7e-5 for float32, 0.05 for bfloat16.
That lies between the rounding itself and its root, where half of the digits are gone; sums of a deep network in another
order differ by some 1e-6 in float32."""
_NOISE = 0.02, 0.1
"""Standard deviation of what is added to parameters: a usual one of first parameters, and a share of their own size."""


@dataclass(frozen=True)
class OneDeviceCheck:
    """The loss of many devices, and what it is compared with.

    Attributes:
      param_specs: for each parameter how the mesh splits it, as the parameters.
      batch_specs: for each array of the batch how the mesh splits it, as the batch.
      epsilon: the rounding of a number, in the shortest floating-point format that the loss computes in.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    one_device_loss: OneDeviceLoss
    mesh_axes: Mapping[str, int]
    param_specs: Any
    batch_specs: Any
    epsilon: float

    def check(
        self, exact_loss: Callable[[Params, Batch], jax.Array], params: Params, batch: Batch, key: jax.Array
    ) -> None:
        """Compares at some parameters, and with noise added to them: the zeros of first parameters hide much."""
        if self.one_device_loss is None:
            return
        of_one, of_all = self._one_device(), jax.jit(exact_loss)
        for where, at in (("", params), (" with some noise added to `params`", with_noise(params, key))):
            expected, loss = self._loss_of_one(of_one, at, batch), float(of_all(at, batch))
            if not self._is_same(loss, expected):
                raise ValueError(self._message(loss, expected, where, at, batch))

    def _one_device(self) -> Callable[[Params, Batch], jax.Array]:
        if callable(self.one_device_loss):
            return jax.jit(self.one_device_loss)
        return jax.jit(self._mean_over(dict.fromkeys(self.mesh_axes, 1)))

    def _loss_of_one(self, of_one: Callable[[Params, Batch], jax.Array], params: Params, batch: Batch) -> float:
        try:
            return float(of_one(params, batch))
        except Exception as error:
            if callable(self.one_device_loss):
                raise
            raise ValueError(
                "`loss_fn` must also run with one device along each mesh axis and whole arguments, because its loss is "
                f"compared with that; there it raises {type(error).__name__}: {error} Take sizes from the shapes of "
                "arrays and from `jax.lax.axis_size`. Or give `CommunicationSpace` the loss of one device as "
                "`one_device_loss`, and None if there is none."
            ) from error

    def _mean_over(self, mesh_axes: Mapping[str, int]) -> Callable[[Params, Batch], jax.Array]:
        """Returns the mean of all devices' losses on a mesh of the same axes with other sizes."""

        def mean(params: Params, batch: Batch) -> jax.Array:
            return lax.pmean(self.loss_fn(params, batch), tuple(mesh_axes))

        return simulate(mean, mesh_axes, (self.param_specs, self.batch_specs), PartitionSpec())

    def _is_same(self, loss: float, expected: float) -> bool:
        if not math.isfinite(loss) or not math.isfinite(expected):
            return math.isfinite(loss) == math.isfinite(expected)
        allowed = self.epsilon**_ROUNDING_EXPONENT * max(abs(loss), abs(expected)) + self.epsilon
        return abs(loss - expected) <= allowed

    def _message(self, loss: float, expected: float, where: str, params: Params, batch: Batch) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh_axes.items())
        devices = f"{math.prod(self.mesh_axes.values())} devices ({axes})"
        digits = 6 if f"{loss:.6g}" != f"{expected:.6g}" else 12
        advice = [self._advice(axis, params) for axis in self._wrong_axes(expected, params, batch)]
        return (
            f"`loss_fn` must give the same loss on many devices as on one. Its mean over {devices} is "
            f"{loss:.{digits}g}, but with one device along each "
            f"axis and whole arguments it is {expected:.{digits}g}{where}, so that another model would train. "
            f"{' '.join(advice)} If the loss is meant to depend on the number of devices, as with random numbers or a "
            "capacity of each device, give `CommunicationSpace` `one_device_loss=None`."
        )

    def _wrong_axes(self, expected: float, params: Params, batch: Batch) -> list[str]:
        """Returns the mesh axes along which the loss changes where the others have one device; else all axes."""
        if callable(self.one_device_loss):
            return list(self.mesh_axes)
        wrong = []
        for axis, size in self.mesh_axes.items():
            try:
                loss = float(jax.jit(self._mean_over({**dict.fromkeys(self.mesh_axes, 1), axis: size}))(params, batch))
            except Exception:  # the loss needs the sizes that it was written for; nothing is known of this axis
                continue
            if not self._is_same(loss, expected):
                wrong.append(axis)
        return wrong or [axis for axis, size in self.mesh_axes.items() if size > 1]

    def _advice(self, axis: str, params: Params) -> str:
        split = _names_split_over(axis, params, self.param_specs)
        if split:
            return (
                f"The parameters {_listed(split)} are split over {axis!r}: add up what devices compute with their "
                f"parts, once, by `jax.lax.psum(x, {axis!r})`, or gather it."
            )
        if any(axis in axes for spec in jax.tree.leaves(self.batch_specs) for axes in axes_of(spec, len(spec))):
            return (
                f"The batch is split over {axis!r}, and the mean of devices' losses is taken: take statistics and "
                f"weights of the whole batch, by `jax.lax.psum` or `jax.lax.pmean` over {axis!r}, and a mean, not a "
                "sum, over the examples."
            )
        return (
            f"Nothing is split over {axis!r}: all its devices compute the same, so that a sum over it is too large by "
            f"their number; take `jax.lax.pmean(x, {axis!r})`, or none."
        )


def with_noise(params: Params, key: jax.Array) -> Params:
    """Returns floating-point parameters with normal noise added, of the size of usual first ones or of their own."""
    leaves, structure = jax.tree.flatten(params)
    least, share = _NOISE

    def noisy(leaf: Any, key: jax.Array) -> jax.Array:
        values = jnp.asarray(leaf)
        size = least + share * jnp.sqrt(jnp.mean(jnp.square(values.astype(jnp.float32))))
        return (values + size * jax.random.normal(key, values.shape)).astype(values.dtype)

    keys = jax.random.split(key, max(len(leaves), 1))
    return jax.tree.unflatten(structure, [noisy(leaf, k) for leaf, k in zip(leaves, keys, strict=False)])


def largest_epsilon(jaxpr: core.Jaxpr) -> float:
    """Returns the rounding of a number in the shortest floating-point format that a function computes in."""
    own = [_epsilon(v.aval) for equation in jaxpr.eqns for v in equation.outvars]
    inner = [largest_epsilon(j) for equation in jaxpr.eqns for j in core.jaxprs_in_params(equation.params)]
    return max([*own, *inner, 0.0])


def _epsilon(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)
    return float(jnp.finfo(dtype).eps) if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else 0.0


def _names_split_over(axis: str, params: Params, param_specs: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = broadcast_specs(param_specs, params)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, _), spec in zip(leaves, specs, strict=True)
        if any(axis in axes for axes in axes_of(spec, len(spec)))
    ]


def _listed(names: Sequence[str], most: int = 3) -> str:
    """Returns some names, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
