"""Sites: every collective of a training step, forward, backward and of gradients, with what names and prices it."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from search_spaces.communication.collectives import CollectiveOp
from search_spaces.communication.emulation import axes_of, broadcast_specs, local_shape
from search_spaces.communication.interpreter import Interpreter, Path, Place, find_places

Direction = Literal["forward", "backward", "gradient"]


@dataclass(frozen=True)
class Site:
    """A collective of the training step, or a place with alternatives.

    Attributes:
      name: unique, from the name scopes around it or from the parameter's path.
      kind: of the collective, or "alternatives".
      direction: of values, of cotangents, or of parameter gradients.
      axes: the mesh axes over which it goes; none for alternatives.
      shape: of the operand on one device.
      dtype: of the operand.
      type: what sites share that should be treated alike: name scopes without numbers, kind and direction.
      trips: executions in one step.
      collective: what runs; None for alternatives.
      place: the number of its place in the function, or of its parameter's leaf.
      labels: of alternatives.
      branch: where it lies in a branch of alternatives, their place and the number of the branch.
    """

    name: str
    kind: str
    direction: Direction
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    type: str
    trips: int
    collective: CollectiveOp | None
    place: int
    labels: tuple[str, ...] = ()
    branch: tuple[int, int] | None = None


@dataclass(frozen=True)
class TracedLoss:
    """A loss as every device computes it.

    Attributes:
      jaxpr: of the flat parameters and batch.
      structure: of `(params, batch)`.
      places: where strategies can be chosen.
      notes: on collectives that are no places.
      param_specs: of each flat parameter.
      batch_specs: of each flat array of the batch.
      param_names: the path of each flat parameter.
      param_avals: the part of each flat parameter on one device.
      batch_avals: the part of each flat array of the batch.
    """

    jaxpr: core.ClosedJaxpr
    structure: Any
    places: tuple[Place, ...]
    notes: tuple[str, ...]
    param_specs: tuple[PartitionSpec, ...]
    batch_specs: tuple[PartitionSpec, ...]
    param_names: tuple[str, ...]
    param_avals: tuple[jax.ShapeDtypeStruct, ...]
    batch_avals: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def path_numbers(self) -> dict[Path, int]:
        """The number of each place by its path."""
        return {place.path: p for p, place in enumerate(self.places)}

    def loss(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        at_collective: Callable[..., Any],
        at_alternatives: Callable[..., Any],
        at_own_way_back: Callable[..., Any] | None = None,
    ) -> jax.Array:
        """This device's loss with operations at the places' stead (see `Interpreter`)."""
        interpreter = Interpreter(self.path_numbers, at_collective, at_alternatives, at_own_way_back)
        return interpreter.run(self.jaxpr, jax.tree.leaves((params, batch)), key)[0]


def trace_loss(
    loss_fn: Callable[..., Any],
    mesh_axes: Mapping[str, int],
    params: Any,
    batch: Any,
    param_specs: Any,
    batch_specs: Any,
) -> TracedLoss:
    """Traces a loss for one device's parts of its arguments; see `CommunicationSpace` for arguments and errors."""
    avals, specs, names = [], [], []
    for label, tree, prefix in (("params", params, param_specs), ("batch", batch, batch_specs)):
        whole = jax.eval_shape(lambda tree: tree, tree)
        leaves = jax.tree_util.tree_leaves_with_path(whole)
        specs.append(tuple(_specs(prefix, tree, label)))
        names.append(tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves))
        parts = [
            jax.ShapeDtypeStruct(local_shape(x.shape, spec, mesh_axes, f"`{label}` {name!r}"), x.dtype)
            for (_, x), spec, name in zip(leaves, specs[-1], names[-1], strict=True)
        ]
        avals.append(tuple(parts))
    for name, aval in zip(names[0], avals[0], strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            raise ValueError(
                f"`params` {name!r} is {aval.dtype}; parameters must be floating-point, put it in `batch`."
            )
    structure = jax.tree.structure((params, batch))
    local = jax.tree.unflatten(structure, [*avals[0], *avals[1]])
    try:
        closed, out = jax.make_jaxpr(loss_fn, axis_env=list(mesh_axes.items()), return_shape=True)(*local)
    except NameError as error:
        if not (found := re.search(r"unbound axis name: (\w+)", str(error))):
            raise
        raise ValueError(
            f"`loss_fn` uses a mesh axis {found[1]!r}, but `mesh_axes` has {tuple(mesh_axes)}; name it there."
        ) from error
    if not hasattr(out, "shape") or out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(f"`loss_fn` must return one floating-point scalar, this device's loss; it returns {out}.")
    places, notes = find_places(closed.jaxpr, mesh_axes)
    return TracedLoss(closed, structure, tuple(places), tuple(notes), specs[0], specs[1], names[0], avals[0], avals[1])


def find_sites(traced: TracedLoss, mesh_axes: Mapping[str, int]) -> tuple[Site, ...]:
    """All sites of a traced loss: forward ones in program order, their backward ones, then parameters' gradients."""
    back = _places_with_gradients(traced, mesh_axes)
    numbers = traced.path_numbers
    counts: Counter[str] = Counter()

    def name_of(stem: str, direction: Direction) -> str:
        counts[f"{stem} {direction}"] += 1
        number = counts[f"{stem} {direction}"]
        return f"{stem}{f' {number}' if number > 1 else ''} {direction}"

    sites = []
    for direction in ("forward", "backward"):
        for p, place in enumerate(traced.places):
            if direction == "backward" and (place.collective is None or p not in back):
                continue
            collective, shape = place.collective, place.shape
            if collective is not None and direction == "backward":
                collective, shape = collective.transposed(), collective.result_shape(shape)
            kind = "alternatives" if collective is None else collective.kind
            stem = "/".join(part for part in (place.stack, kind) if part)
            site_type = f"{re.sub(r'[0-9]+', '*', stem)} {direction}"
            branch = None if place.branch is None else (numbers[place.branch[0]], place.branch[1])
            axes = () if collective is None else collective.axes
            sites.append(Site(name_of(stem, direction), kind, direction, axes, shape, place.dtype, site_type,
                              place.trips, collective, p, place.labels, branch))  # fmt: skip
    for leaf, (name, aval, spec) in enumerate(
        zip(traced.param_names, traced.param_avals, traced.param_specs, strict=True)
    ):
        split = {axis for axes in axes_of(spec, len(aval.shape)) for axis in axes}
        axes = tuple(axis for axis, size in mesh_axes.items() if axis not in split and size > 1)
        if axes:
            collective = CollectiveOp("all_reduce", axes, tuple(mesh_axes[axis] for axis in axes))
            site_type = f"{'matrices' if len(aval.shape) > 1 else 'vectors'} over {' and '.join(axes)} gradient"
            sites.append(Site(f"{name} gradient", "all_reduce", "gradient", axes, aval.shape, aval.dtype, site_type,
                              1, collective, leaf))  # fmt: skip
    return tuple(sites)


def _specs(prefix: Any, tree: Any, label: str) -> list[PartitionSpec]:
    try:
        specs = broadcast_specs(prefix, tree)
    except ValueError as error:
        raise ValueError(
            f"The specs of `{label}` must be a PartitionSpec or a pytree of them that is a prefix of it: {error}"
        ) from error
    for spec in specs:
        if not isinstance(spec, PartitionSpec):
            raise ValueError(f"The specs of `{label}` must be `jax.sharding.PartitionSpec`, got {spec!r}.")
    return specs


def _places_with_gradients(traced: TracedLoss, mesh_axes: Mapping[str, int]) -> set[int]:
    """Places whose cotangent the parameters' gradients need, by tracing them."""
    found: set[int] = set()

    def at_collective(p: int, x: jax.Array, key: jax.Array) -> jax.Array:
        collective = traced.places[p].collective
        assert collective is not None
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return collective.exact(x)
        op = jax.custom_vjp(collective.exact)

        def backward(p: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
            found.add(p)
            return (collective.transposed().exact(cotangent),)

        op.defvjp(lambda x: (collective.exact(x), None), partial(backward, p))
        return op(x)

    def at_alternatives(p: int, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
        return jax.lax.switch(jax.lax.optimization_barrier(jnp.int32(0)), branches, *operands)

    def loss(params: Any, batch: Any) -> jax.Array:
        return traced.loss(params, batch, jax.random.key(0), at_collective, at_alternatives)

    jax.make_jaxpr(jax.grad(loss), axis_env=list(mesh_axes.items()))(traced.param_avals, traced.batch_avals)
    return found
