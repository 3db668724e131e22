"""Traces a loss as one device computes it, lists its operations, and puts those that share a strategy into groups."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from search_spaces.base import check_are_parameters, check_is_loss, traced_loss
from search_spaces.communication.base import (
    CallSite,
    CollectiveOp,
    CollectiveStrategy,
    Direction,
    Group,
    Operation,
    Path,
)
from search_spaces.communication.call_sites import Interpreter, find_call_sites
from search_spaces.communication.collectives import run_exact
from search_spaces.communication.costs import as_sent, operation_bytes
from search_spaces.communication.strategies import DEFAULT
from search_spaces.partition_specs import axes_of, broadcast_specs, local_shape


@dataclass(frozen=True)
class TracedLoss:
    """A loss as every device computes it.

    Attributes:
      param_specs: for each parameter leaf how the mesh splits it.
      batch_specs: for each array of the batch how the mesh splits it.
      param_names: the path of each parameter leaf.
      param_avals: the shape and type of each parameter leaf on one device.
      batch_avals: the shape and type of each array of the batch on one device.
    """

    jaxpr: core.ClosedJaxpr
    structure: Any
    call_sites: tuple[CallSite, ...]
    notes: tuple[str, ...]
    param_specs: tuple[PartitionSpec, ...]
    batch_specs: tuple[PartitionSpec, ...]
    param_names: tuple[str, ...]
    param_avals: tuple[jax.ShapeDtypeStruct, ...]
    batch_avals: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def call_site_numbers(self) -> dict[Path, int]:
        """The number of each call site by its path."""
        return {call_site.path: c for c, call_site in enumerate(self.call_sites)}

    def loss(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        at_collective: Callable[..., Any],
        at_alternatives: Callable[..., Any],
        at_custom_vjp: Callable[..., Any] | None = None,
    ) -> jax.Array:
        """Returns this device's loss with other functions at its call sites (see `call_sites.Interpreter`)."""
        interpreter = Interpreter(self.call_site_numbers, at_collective, at_alternatives, at_custom_vjp)
        return interpreter.run(self.jaxpr, jax.tree.leaves((params, batch)), key)[0]


def trace_loss(
    loss_fn: Callable[..., Any],
    mesh_axes: Mapping[str, int],
    params: Any,
    batch: Any,
    param_specs: Any,
    batch_specs: Any,
) -> TracedLoss:
    """Traces a loss for one device's part of its arguments; arguments and errors are those of `CommunicationSpace`."""
    params_parts = _local_parts("params", params, param_specs, mesh_axes)
    batch_parts = _local_parts("batch", batch, batch_specs, mesh_axes)
    dtypes = (aval.dtype for aval in params_parts.avals)
    check_are_parameters(dict(zip(params_parts.names, dtypes, strict=True)))
    structure = jax.tree.structure((params, batch))
    local_arguments = jax.tree.unflatten(structure, [*params_parts.avals, *batch_parts.avals])
    try:
        trace = jax.make_jaxpr(loss_fn, axis_env=list(mesh_axes.items()), return_shape=True)
        jaxpr, out = traced_loss(trace, *local_arguments)
    except NameError as error:
        if not (match := re.search(r"unbound axis name: (\w+)", str(error))):
            raise
        raise ValueError(
            f"`loss_fn` uses a mesh axis {match[1]!r}, but `mesh_axes` has {tuple(mesh_axes)}; name it there."
        ) from error
    check_is_loss(out)
    call_sites, notes = find_call_sites(jaxpr.jaxpr, mesh_axes)
    return TracedLoss(
        jaxpr=jaxpr,
        structure=structure,
        call_sites=tuple(call_sites),
        notes=tuple(notes),
        param_specs=params_parts.specs,
        batch_specs=batch_parts.specs,
        param_names=params_parts.names,
        param_avals=params_parts.avals,
        batch_avals=batch_parts.avals,
    )


def find_operations(traced_loss: TracedLoss, mesh_axes: Mapping[str, int]) -> tuple[Operation, ...]:
    """Returns all operations of a loss: forward ones in program order, backward ones, then gradients of parameters."""
    call_sites_with_gradients = _call_sites_with_gradients(traced_loss, mesh_axes)
    counts: Counter[str] = Counter()
    operations = []
    for direction in ("forward", "backward"):
        for c, call_site in enumerate(traced_loss.call_sites):
            if direction == "forward" or (not call_site.is_alternatives and c in call_sites_with_gradients):
                operations.append(_operation_at(traced_loss, c, direction, counts))
    return *operations, *_gradient_operations(traced_loss, mesh_axes)


def group_operations(
    operations: Sequence[Operation],
    strategies: Mapping[str, tuple[CollectiveStrategy, ...]],
    tie: Literal["type"] | None,
) -> tuple[Group, ...]:
    """Groups operations by type, mesh axes and type of data (or each by itself), with the strategies worth choosing.

    Operations of a type in several branches of alternatives share a strategy. Only one of these branches runs, so no
    choice is lost; the predicted increase of the loss is measured in the first branch and stands for all.
    """
    members: dict[Any, list[int]] = {}
    for o, operation in enumerate(operations):
        members.setdefault(
            (operation.type, operation.axes, operation.labels, operation.dtype) if tie else o, []
        ).append(o)
    groups: list[Group] = []
    num_of_name: Counter[str] = Counter()
    for numbers in members.values():
        first = operations[numbers[0]]
        options = () if first.is_alternatives else _worthwhile_strategies([operations[o] for o in numbers], strategies)
        names = first.labels or tuple(strategy.name for strategy in options)
        name = first.type if tie else first.name
        num_of_name[name] += 1
        number = f" {num_of_name[name]}" if num_of_name[name] > 1 else ""
        groups.append(Group(f"{name}{number}", tuple(numbers), options, names))
    return tuple(groups)


def checked_strategies(
    strategies: Mapping[str, Sequence[CollectiveStrategy]],
) -> dict[str, tuple[CollectiveStrategy, ...]]:
    """Returns the strategies of each direction, the user's or the default ones; raises as `CommunicationSpace`."""
    for direction, options in strategies.items():
        if direction not in DEFAULT:
            raise ValueError(f"`strategies` has a direction {direction!r}; directions are {tuple(DEFAULT)}.")
        if words := [strategy for strategy in options if isinstance(strategy, str)]:
            raise ValueError(
                f"`strategies[{direction!r}]` has {words}; give strategies, such as `diffshard.formats.Exact()` and "
                f"`diffshard.formats.Encode(diffshard.formats.INT8)`."
            )
        names = [strategy.name for strategy in options]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`strategies[{direction!r}]` must be at least one, each with its own name, got {names}.")
        with_residual = [strategy.name for strategy in options if strategy.keeps_residual]
        if with_residual and direction != "gradient":
            raise ValueError(
                f"`strategies[{direction!r}]` has {with_residual}, which keep residuals; these are for gradients only."
            )
    return {**DEFAULT, **{direction: tuple(options) for direction, options in strategies.items()}}


@dataclass(frozen=True)
class _Parts:
    """One device's part of the leaves of a pytree."""

    specs: tuple[PartitionSpec, ...]
    names: tuple[str, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]


def _local_parts(label: str, tree: Any, prefix: Any, mesh_axes: Mapping[str, int]) -> _Parts:
    try:
        specs = broadcast_specs(prefix, tree)
    except ValueError as error:
        raise ValueError(
            f"The specs of `{label}` must be a PartitionSpec or a pytree of them that is a prefix of it: {error}. "
            "Parameters come without the state of an optimiser."
        ) from error
    for spec in specs:
        if not isinstance(spec, PartitionSpec):
            raise ValueError(f"The specs of `{label}` must be `jax.sharding.PartitionSpec`, got {spec!r}.")
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(lambda tree: tree, tree))
    names = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
    avals = tuple(
        jax.ShapeDtypeStruct(local_shape(x.shape, spec, mesh_axes, f"`{label}` {name!r}"), x.dtype)
        for (_, x), spec, name in zip(leaves, specs, names, strict=True)
    )
    return _Parts(tuple(specs), names, avals)


def _operation_at(traced_loss: TracedLoss, c: int, direction: Direction, counts: Counter[str]) -> Operation:
    """Returns the operation of a call site in a direction; `counts` numbers the operations of one name."""
    call_site = traced_loss.call_sites[c]
    collective, shape = call_site.collective, call_site.shape
    if collective is not None and direction == "backward":
        collective, shape = collective.transpose(), collective.result_shape(shape)
    kind = "alternatives" if collective is None else collective.kind
    stem = "/".join(part for part in (call_site.stack, kind) if part)
    counts[f"{stem} {direction}"] += 1
    number = counts[f"{stem} {direction}"]
    return Operation(
        name=f"{stem}{f' {number}' if number > 1 else ''} {direction}",
        kind=kind,
        direction=direction,
        axes=() if collective is None else collective.axes,
        shape=shape,
        dtype=call_site.dtype,
        type=f"{re.sub(r'[0-9]+', '*', stem)} {direction}",
        trips=call_site.trips,
        collective=collective,
        call_site=c,
        labels=call_site.labels,
        branch=None
        if call_site.branch is None
        else (traced_loss.call_site_numbers[call_site.branch[0]], call_site.branch[1]),
    )


def _gradient_operations(traced_loss: TracedLoss, mesh_axes: Mapping[str, int]) -> Iterator[Operation]:
    """Yields an operation for each parameter whose gradient is summed: over the axes that do not split it."""
    leaves = zip(traced_loss.param_names, traced_loss.param_avals, traced_loss.param_specs, strict=True)
    for leaf, (name, aval, spec) in enumerate(leaves):
        splitting = {axis for axes in axes_of(spec, len(aval.shape)) for axis in axes}
        axes = tuple(axis for axis, size in mesh_axes.items() if axis not in splitting and size > 1)
        if axes:
            yield Operation(
                name=f"{name} gradient",
                kind="all_reduce",
                direction="gradient",
                axes=axes,
                shape=aval.shape,
                dtype=aval.dtype,
                type=f"{'matrices' if len(aval.shape) > 1 else 'vectors'} over {' and '.join(axes)} gradient",
                trips=1,
                collective=CollectiveOp("all_reduce", axes, tuple(mesh_axes[axis] for axis in axes)),
                leaf=leaf,
            )


def _worthwhile_strategies(
    operations: Sequence[Operation], strategies: Mapping[str, tuple[CollectiveStrategy, ...]]
) -> tuple[CollectiveStrategy, ...]:
    """Leaves out lossy strategies that save no time by what they send or when; for integers, all lossy strategies."""
    options, operations = strategies[operations[0].direction], as_sent(operations)
    exact = [strategy for strategy in options if strategy.is_exact]
    if not exact:
        return options
    if not jnp.issubdtype(operations[0].dtype, jnp.floating):
        return tuple(exact)
    exact_bytes = min(sum(operation_bytes(operation, strategy) for operation in operations) for strategy in exact)
    return tuple(
        strategy
        for strategy in options
        if strategy.is_exact
        or sum(operation_bytes(operation, strategy) for operation in operations) < exact_bytes
        or any(_is_hidden(operation, strategy) for operation in operations)
    )


def _is_hidden(operation: Operation, strategy: CollectiveStrategy) -> bool:
    """Returns whether a strategy sends something while the device computes."""
    assert operation.collective is not None
    return any(stage.hidden_s for stage in strategy.stages(operation.collective, operation.shape, operation.dtype))


def _call_sites_with_gradients(traced_loss: TracedLoss, mesh_axes: Mapping[str, int]) -> set[int]:
    """Returns the call sites whose cotangents the gradients of parameters need.

    The backward pass is traced with a collective at each call site that records its own transposition.
    """
    transposed_call_sites: set[int] = set()

    def at_collective(c: int, x: jax.Array, key: jax.Array) -> jax.Array:
        collective = traced_loss.call_sites[c].collective
        assert collective is not None
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return run_exact(collective, x)
        op = jax.custom_vjp(partial(run_exact, collective))

        def backward(c: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
            transposed_call_sites.add(c)
            return (run_exact(collective.transpose(), cotangent),)

        op.defvjp(lambda x: (run_exact(collective, x), None), partial(backward, c))
        return op(x)

    def at_alternatives(c: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        return jax.lax.switch(jax.lax.optimization_barrier(jnp.int32(0)), branches, *operands)

    def loss(params: Any, batch: Any) -> jax.Array:
        return traced_loss.loss(params, batch, jax.random.key(0), at_collective, at_alternatives)

    jax.make_jaxpr(jax.grad(loss), axis_env=list(mesh_axes.items()))(traced_loss.param_avals, traced_loss.batch_avals)
    return transposed_call_sites
