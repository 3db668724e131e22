"""A plan: how a function is parallelised on a mesh, what that costs, and how far from optimal it is at most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cost.base import Hardware
from diffshard.base import PlanError

Spec = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that split it, major to minor."""


@dataclass(frozen=True)
class Tensor:
    """An argument or result.

    Attributes:
      path: where it is in the arguments, as `jax.tree_util.keystr` writes it, or in the result.
      shape, dtype: of the whole array.
      spec: how it is split.
      given: whether the user fixed it.
      next_best_spec: the next best way to split it with everything else unchanged, or None.
      next_best_s: what that would add to the step, in seconds.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    given: bool = False
    next_best_spec: Spec | None = None
    next_best_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        size = jax.numpy.dtype(self.dtype).itemsize if "<" not in self.dtype else 8
        for n in self.shape:
            size *= n
        return size

    @property
    def partition_spec(self) -> PartitionSpec:
        """`spec` as JAX writes it."""
        return partition_spec(self.spec)


@dataclass(frozen=True)
class Operation:
    """A vertex of the function's graph with its strategy, from which the constraints inside the function follow.

    Attributes:
      kind: "operation", or what else holds an array: "input", "constant", "carry", "slice", "stack", "join".
      signature: primitive and types, by which a plan recognises the function that it was made for.
      source: file and line of the user's code.
      scope: the name stack: modules and transformations.
      operands: the spec that each operand is brought to.
      kept: the spec that each result has before it is gathered or its reduction is finished.
      results: the spec that each result is left with.
      held: the spec that each result's readers find.
      count: executions in one step.
      compute_s: seconds of arithmetic and memory traffic in one step.
      next_best_spec: the next best way to leave the first result, everything else unchanged, or None.
      next_best_s: what that would add to the step, in seconds.
    """

    kind: str
    signature: str
    source: str
    scope: str
    operands: tuple[Spec, ...]
    kept: tuple[Spec, ...]
    results: tuple[Spec, ...]
    held: tuple[Spec, ...]
    count: float
    compute_s: float
    next_best_spec: Spec | None = None
    next_best_s: float = 0.0


@dataclass(frozen=True)
class PredictedCollective:
    """Communication of one operation.

    Attributes:
      kind, axis: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "collective_permute" along a mesh axis.
      num_bytes: the full size along the axis in one group of devices: what is gathered, scattered or reduced.
      count: executions in one step.
      seconds: of all of them.
      operation: index into `Plan.operations`.
    """

    kind: str
    axis: str
    num_bytes: float
    count: float
    seconds: float
    operation: int


@dataclass(frozen=True)
class Plan:
    """How a function runs on a mesh. Made by `diffshard.search(fn, mesh).plan(*args)`; `print` shows it.

    Attributes:
      function: the function's name.
      mesh_axes: devices along each mesh axis, in order.
      hardware: what the predictions are for.
      memory_limit_bytes: of each device; inf for none.
      arguments, outputs: the flat arguments and results.
      operations: every vertex of the function's graph.
      compute_s: predicted seconds of arithmetic and memory traffic in one step.
      collectives: predicted communication; the predicted step takes `step_s` = `compute_s` + their seconds.
      peak_bytes: predicted peak memory of a device.
      lower_bound_s: no plan in the search space is predicted to take less.
      gap: (step_s - lower_bound_s) / step_s.
      status: how the search ended: "optimal", "finished", "time limit" or "interrupted".
      solver: its name.
      search_s: seconds that tracing and searching took.
      history: (seconds, cost, lower bound) at each improvement of the solver.
      notes: what a reader should know: operations without a sharding rule, loops of unknown length.
      static_argnums, donate_argnums: as in `jax.jit`.
      mesh: the mesh; after loading an abstract one unless `load` was given one.
    """

    function: str
    mesh_axes: Mapping[str, int]
    hardware: Hardware
    memory_limit_bytes: float
    arguments: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    compute_s: float
    collectives: tuple[PredictedCollective, ...]
    peak_bytes: float
    lower_bound_s: float
    gap: float
    status: str
    solver: str
    search_s: float
    history: tuple[tuple[float, float, float], ...]
    notes: tuple[str, ...]
    static_argnums: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    mesh: Mesh | AbstractMesh | None = field(default=None, compare=False, repr=False)

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return self.compute_s + sum(c.seconds for c in self.collectives)

    @property
    def collective_bytes(self) -> dict[tuple[str, str], float]:
        """Predicted bytes of one step by (kind, axis)."""
        total: dict[tuple[str, str], float] = {}
        for c in self.collectives:
            total[c.kind, c.axis] = total.get((c.kind, c.axis), 0.0) + c.num_bytes * c.count
        return total

    def __str__(self) -> str:
        from diffshard.plans.text import format_plan

        return format_plan(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced whole or not at all."""
        from diffshard.plans.file import save

        save(self, path)

    @staticmethod
    def load(path: str | PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> "Plan":
        """Reads a plan back.

        Args:
          path: a file that `save` wrote.
          mesh: the devices to use it on; without it the plan can be shown but not run.

        Raises:
          PlanError: the file is no plan, damaged, or newer than this version; or the mesh has other axes.
        """
        from diffshard.plans.file import load

        return load(path, mesh)

    def shard(self, *args: Any) -> Any:
        """The arguments put on the mesh as the plan wants them; one argument alone comes back alone.

        Raises:
          PlanError: the arguments have other shapes than the plan's, or the plan's mesh has no devices.
        """
        mesh = self.placed_mesh
        dynamic = [a for i, a in enumerate(args) if i not in self.static_argnums]
        leaves, structure = jax.tree.flatten(tuple(dynamic))
        self.check_arguments(tuple(dynamic))
        shardings = [NamedSharding(mesh, t.partition_spec) for t in self.arguments]
        placed = iter(jax.tree.unflatten(structure, jax.device_put(leaves, shardings)))
        found = tuple(a if i in self.static_argnums else next(placed) for i, a in enumerate(args))
        return found[0] if len(found) == 1 else found

    def apply(self, fn: Any, mesh: Mesh | AbstractMesh | None = None) -> Any:
        """The function with this plan, nothing searched: a callable as `diffshard.search` returns it.

        Raises:
          PlanError: the plan was made for another function or mesh; names the first difference.
        """
        from diffshard.sharding_search.search import apply

        return apply(self, fn, mesh)

    @property
    def placed_mesh(self) -> Mesh:
        """The mesh of devices, with automatic axes.

        Raises:
          PlanError: it is abstract.
        """
        if not isinstance(self.mesh, Mesh):
            raise PlanError(
                f"The plan's mesh {dict(self.mesh_axes)} is abstract, it has no devices to put arrays on. "
                "Make the plan with a jax.sharding.Mesh, or load it with `Plan.load(path, mesh)`."
            )
        return automatic(self.mesh)

    def check_arguments(self, args: Sequence[Any]) -> None:
        """Holds arguments (without the static ones) against the plan's.

        Raises:
          PlanError: names the first argument that differs.
        """
        found = jax.tree_util.tree_leaves_with_path(tuple(args))
        for tensor, (path, leaf) in zip(self.arguments, found, strict=False):
            shape, dtype = tuple(jax.numpy.shape(leaf)), dtype_name(leaf)
            if (tensor.shape, tensor.dtype) != (shape, dtype) or not tensor.path.endswith(_below(path)):
                raise PlanError(
                    f"The plan was made for `{tensor.path}` of {tensor.dtype}{list(tensor.shape)}, and was given "
                    f"argument {path[0].idx}{_below(path)} of {dtype}{list(shape)}. Search again for these shapes."
                )
        if len(found) != len(self.arguments):
            raise PlanError(f"The plan was made for {len(self.arguments)} arrays in its arguments, not {len(found)}.")


def argument_paths(args: Sequence[Any], names: Sequence[str]) -> list[str]:
    """A name for each leaf of the arguments: the parameter's name, then the place inside."""
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    return [f"{names[path[0].idx]}{_below(path)}" for path, _ in leaves]


def _below(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path[1:]))


def partition_spec(spec: Spec) -> PartitionSpec:
    """Axis names for each dimension as a `PartitionSpec`."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec))


def dtype_name(array: Any) -> str:
    """The name of the dtype that JAX makes of an array or a Python number."""
    return str(array.dtype if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array).dtype)


def automatic(mesh: Mesh | AbstractMesh) -> Any:
    """The mesh with automatic axes: with explicit ones JAX wants shardings in the types, and a plan's are not there."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape.keys()), axis_types=types)
