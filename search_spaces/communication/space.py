"""The space itself: a loss with a choice of strategies at each of its collectives."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cost.base import Hardware, Problem
from cost.presets import preset
from search_spaces.base import Batch, Choice, LossAndGradients, Params, Part, PerStrategy, Residuals, Selection
from search_spaces.communication.base import CollectiveStrategy, Operation
from search_spaces.communication.costs import GroupCosts, explain, group_costs, group_seconds, operation_bytes
from search_spaces.communication.device_step import DeviceStep, choice_as_indices
from search_spaces.communication.operations import checked_strategies, find_operations, group_operations, trace_loss
from search_spaces.communication.simulated_spmd import (
    OneDeviceCheck,
    OneDeviceLoss,
    WholeStep,
    largest_epsilon,
    on_devices,
    simulate,
)
from search_spaces.communication.strategies import DEFAULT, Exact, LastGradient


class CommunicationSpace:
    """A loss, written as every device computes it, with a choice of strategies at each of its collectives.

    The training loss is the mean of `loss_fn` over all devices. Everything runs on one device that simulates the mesh
    until `on_mesh` moves it onto real ones; the numbers are the same.

    Example, with hidden units split over the axis "model" and rows over "data"::

        def loss_fn(params, batch):
            x, target = batch
            with jax.named_scope("mlp"):
                x = x + jax.lax.psum(jax.nn.gelu(x @ params["up"]) @ params["down"], "model")
            return jnp.square(x - target).mean()

        specs = {"up": P(None, "model"), "down": P("model")}
        space = CommunicationSpace(loss_fn, {"data": 2, "model": 4}, params, batch, specs, P("data"), hardware=h100)
        choice = [space.strategy_names(v).index("bfloat16") for v in range(len(space.node_names))]
        step = jax.jit(space.decode(choice))
        loss, gradients, residuals = step(params, batch, space.init_residuals(params), key, 0)

    Args:
      loss_fn: `loss_fn(params, batch)`, this device's loss, with `jax.lax` collectives over the mesh's axes as in the
        body of a `jax.shard_map` that does not check replication. There the cotangents of a sum are summed, so that
        column- and row-parallel layers need no operators with derivatives of their own. Maxima stay exact, and so do
        collectives in functions with custom derivatives; `notes` names these.
      mesh_axes: devices along each mesh axis, the fastest axis last.
      params: pytree of floating-point arrays, or `jax.ShapeDtypeStruct`s, of whole shapes.
      batch: pytree of arrays, or `jax.ShapeDtypeStruct`s, of whole shapes.
      param_specs: a `PartitionSpec` for each leaf of `params`, or for each sub-tree. Gradients are summed over the axes
        that do not split the parameter.
      batch_specs: a `PartitionSpec` for each leaf of `batch`, or for each sub-tree.
      strategies: by direction ("forward", "backward", "gradient") the strategies to choose from; for directions that
        are missing `strategies.DEFAULT`. Lossy strategies that send as much as an exact one, and not while the device
        computes, are left out, and so are lossy ones for integers.
      tie: "type" where operations of one type share a strategy, None where each has its own. Gradients that share one
        are sent as one vector.
      hardware: what the seconds are for, or the name of a preset; `problem` and `explain` need it.
      one_device_loss: the loss that the devices must compute together, with which `check_loss` compares it: "loss_fn"
        is `loss_fn` itself on a mesh with one device along each axis; a function of whole `(params, batch)` is for a
        `loss_fn` that needs the sizes of its mesh; None is for a loss that depends on the number of devices by design,
        as with random numbers or a capacity of each device, so that there is nothing to compare.

    Attributes:
      operations: all operations, see `operations.find_operations`.
      groups: the operations that share a strategy, in the order of the problem's nodes.
      notes: on collectives that stay as they are.
      arguments: `(params, batch)` as `jax.ShapeDtypeStruct`s of whole shapes.

    Raises:
      ValueError: specs do not fit the arrays or the mesh, parameters are not floating-point, the loss is not a scalar,
        a direction is unknown, strategies share a name, or one with residuals is not for gradients.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], jax.Array],
        mesh_axes: Mapping[str, int],
        params: Any,
        batch: Any,
        param_specs: Any,
        batch_specs: Any,
        *,
        strategies: Mapping[str, Sequence[CollectiveStrategy]] | None = None,
        tie: Literal["type"] | None = "type",
        hardware: Hardware | str | None = None,
        one_device_loss: OneDeviceLoss = "loss_fn",
    ):
        if one_device_loss not in ("loss_fn", None) and not callable(one_device_loss):
            raise ValueError(f"`one_device_loss` must be 'loss_fn', a function or None, not {one_device_loss!r}.")
        if tie not in ("type", None):
            raise ValueError(f"`tie` must be 'type' or None, not {tie!r}.")
        if not mesh_axes or min(mesh_axes.values()) < 1:
            raise ValueError(f"`mesh_axes` must name an axis, each with at least one device, got {dict(mesh_axes)}.")
        self.mesh_axes = dict(mesh_axes)
        self.hardware = preset(hardware, mesh_axes) if isinstance(hardware, str) else hardware
        self.num_devices = int(np.prod(list(mesh_axes.values())))
        self.arguments = jax.eval_shape(lambda *whole: whole, params, batch)
        self._traced_loss = trace_loss(loss_fn, self.mesh_axes, params, batch, param_specs, batch_specs)
        self.notes = self._traced_loss.notes
        self.operations: tuple[Operation, ...] = find_operations(self._traced_loss, self.mesh_axes)
        self.groups = group_operations(self.operations, checked_strategies(strategies or {}), tie)
        params_structure, batch_structure = self._traced_loss.structure.children()
        self._whole = WholeStep(
            device=DeviceStep(self._traced_loss, self.operations, self.groups, self.num_devices),
            axes=tuple(mesh_axes),
            param_specs=jax.tree.unflatten(params_structure, self._traced_loss.param_specs),
            batch_specs=jax.tree.unflatten(batch_structure, self._traced_loss.batch_specs),
            run=partial(simulate, mesh_axes=self.mesh_axes),
        )
        self._one_device = OneDeviceCheck(
            loss_fn,
            one_device_loss,
            self.mesh_axes,
            self._whole.param_specs,
            self._whole.batch_specs,
            largest_epsilon(self._traced_loss.jaxpr.jaxpr),
        )

    def on_mesh(self, mesh: Mesh) -> "CommunicationSpace":
        """Returns the same space, running on the devices of a mesh.

        Raises:
          ValueError: the mesh's axes are not `mesh_axes`.
        """
        if dict(mesh.shape) != self.mesh_axes:
            raise ValueError(f"`mesh` has axes {dict(mesh.shape)}, but the space is for {self.mesh_axes}.")
        space = copy.copy(self)
        space._whole = replace(self._whole, run=partial(on_devices, mesh=mesh))
        return space

    # What there is to choose, and what a choice costs.

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of the groups, no two alike."""
        return tuple(group.name for group in self.groups)

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns the names of the strategies that a group chooses from."""
        return self.groups[node].names

    def exact_choice(self) -> Choice:
        """Returns the first exact strategy of each group.

        Raises:
          ValueError: a group has none.
        """
        for group in self.groups:
            if not group.exact.any():
                raise ValueError(
                    f"The operations {group.name!r} have no exact strategy among {group.names}; "
                    f"add `diffshard.formats.Exact()` to `strategies`."
                )
        return tuple(int(group.exact.argmax()) for group in self.groups)

    @property
    def problem(self) -> Problem:
        """The problem, with one node for each group; built once.

        An operation inside a branch of alternatives costs something only if that branch is chosen: an edge between the
        group of the alternatives and the group of the operation.

        Raises:
          ValueError: the space has no hardware.
        """
        return self._problem

    def decode(self, choice: Sequence[int]) -> "ChosenStep":
        """Returns the loss and gradients of a training step with a choice, as a function.

        Raises:
          ValueError: the choice has the wrong length or an index that its group does not have.
        """
        return ChosenStep(self, choice_as_indices(self.groups, choice))

    def explain(self, choice: Sequence[int]) -> tuple[Part, ...]:
        """Returns one part for each group: its seconds in one step, and what its operations send.

        Raises:
          ValueError: the choice does not fit the space, or the space has no hardware.
        """
        choice = choice_as_indices(self.groups, choice)
        return explain(self.operations, self.groups, choice, self._seconds, self._sent_bytes)

    @cached_property
    def _problem(self) -> Problem:
        nodes, edges = self._seconds
        return Problem(nodes, np.array(list(edges), np.int64).reshape(-1, 2), list(edges.values()))

    @cached_property
    def _seconds(self) -> GroupCosts:
        if self.hardware is None:
            raise ValueError("`hardware` is None; give the space hardware with a link for each mesh axis.")
        return group_seconds(self.operations, self.groups, self.hardware)

    @cached_property
    def _sent_bytes(self) -> GroupCosts:
        return group_costs(self.operations, self.groups, operation_bytes)

    # What a selection computes.

    def check_loss(self, params: Params, batch: Batch, key: jax.Array) -> None:
        """Checks that the exact choice's loss is that of one device, here and with some noise added to parameters.

        A `loss_fn` that lacks a sum over devices would train another model. Each call compiles both losses.

        Args:
          params: whole arrays.
          batch: whole arrays.
          key: of the noise.

        Raises:
          ValueError: the losses differ by more than rounding, or `loss_fn` does not run on one device.
        """
        exact = self.exact_choice()
        self._one_device.check(lambda params, batch: self.loss(params, batch, exact, key), params, batch, key)

    def init_residuals(self, params: Params) -> Residuals:
        """Returns zero residuals for all parameters that may have one.

        On a mesh their first dimension is split over all axes.
        """
        del params  # shapes are known since tracing
        return {
            self._traced_loss.param_names[operation.leaf]: jnp.zeros((self.num_devices, *operation.shape), jnp.float32)
            for group in self.groups
            for operation in (self.operations[o] for o in group.operations)
            if operation.leaf is not None and any(strategy.keeps_residual for strategy in group.strategies)
        }

    def loss(
        self, params: Params, batch: Batch, selection: Selection, key: jax.Array, step: jax.Array | int = 0
    ) -> jax.Array:
        """Returns the training loss, a scalar; differentiable once in `params` and in weights, not in `batch`.

        Its derivatives pass the backward operations as selected; gradients of parameters are summed exactly. With
        weights w the result of an operation is Σ_j w_j · op_j(x). The loss does not depend on the weights of backward
        and gradient operations.

        Args:
          params: whole arrays.
          batch: whole arrays.
          selection: for each group the index of a strategy (an `int` is compiled in, a traced one branches), or
            weights `[S]`.
          key: a random key, for strategies that round stochastically.
          step: number of the training step, for schedules.
        """
        return self._whole.loss(params, batch, selection, key, step)

    def loss_and_gradients(
        self,
        params: Params,
        batch: Batch,
        selection: Selection,
        residuals: Residuals,
        key: jax.Array,
        step: jax.Array | int = 0,
    ) -> LossAndGradients:
        """Returns the training loss, its gradients as they arrive, and the residuals for the next step.

        The arguments are those of `loss`, and `residuals` as `init_residuals` or the step before returned them.
        """
        return self._whole.loss_and_gradients(params, batch, selection, residuals, key, step)

    def loss_increases(
        self,
        params: Params,
        batch: Batch,
        key: jax.Array,
        *,
        validation: Batch | None = None,
        step_sizes: Params = 1.0,
        step: jax.Array | int = 0,
    ) -> PerStrategy:
        """Returns by how much each strategy is predicted to increase the loss, `[S]` for each group; 0 where exact.

        The prediction is of second order in the error of the strategy; `loss_increases.py` has the formulas and their
        source. It takes two backward passes, and two more for each branch of alternatives with operations that are
        nowhere else.

        Args:
          params: whole arrays.
          batch: whole arrays.
          key: a random key.
          validation: a batch of the same shapes for forward operations and alternatives; `batch` where it is None.
          step_sizes: η >= 0, how far a unit of a parameter's gradient moves it: one number, or arrays that broadcast to
            the parameters.
          step: number of the training step.
        """
        validation = batch if validation is None else validation
        return self._whole.loss_increases(params, batch, validation, step_sizes, key, step)


@dataclass(frozen=True)
class ChosenStep:
    """The loss and the gradients of a training step with one choice.

    Attributes:
      space: whose groups are chosen for.
      choice: the index of a strategy for each group, `[V]`.
    """

    space: CommunicationSpace
    choice: Choice

    def __call__(
        self, params: Params, batch: Batch, residuals: Residuals, key: jax.Array, step: jax.Array | int = 0
    ) -> LossAndGradients:
        """Returns the loss, its gradients and the next residuals; see `CommunicationSpace.loss_and_gradients`."""
        return self.space.loss_and_gradients(params, batch, self.choice, residuals, key, step)


def _example_loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(batch @ params["up"])
    return jnp.square(lax.psum(hidden @ params["down"], "model") - batch).mean()


EXAMPLE = partial(
    CommunicationSpace,
    _example_loss,
    {"data": 2, "model": 2},
    {"up": jax.ShapeDtypeStruct((8, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 8), jnp.float32)},
    jax.ShapeDtypeStruct((16, 8), jnp.float32),
    {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")},
    PartitionSpec("data"),
    strategies={"gradient": (Exact(), LastGradient(1e-6), *DEFAULT["gradient"][1:])},
    hardware="h100",
)
