"""Runs a training step on whole arrays: on one device that emulates a mesh, or on the devices of a real one.

The emulation is one `jax.vmap` for each mesh axis, with the axis's name: collectives of `jax.lax` find the name there
as they find it in `jax.shard_map`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
      run: `run(fn, in_specs=..., out_specs=...)` returns a function of whole arrays: `emulate` or `on_devices`.
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

        # The gradient is taken on the devices: from outside, an emulated device's backward pass has no axes.
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


def emulate(
    fn: Callable[..., Any], mesh_axes: Mapping[str, int], in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Returns what `jax.shard_map(fn, ..., check_vma=False)` returns, a function of whole arrays, for one device.

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
