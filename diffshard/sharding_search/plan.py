"""A plan as users have it: data that can be shown, saved, loaded, and applied to a function and its arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from diffshard.base import PlanError
from diffshard.plans.base import Executor, PlanData
from diffshard.plans.file import load, save
from diffshard.plans.notebook import framed
from diffshard.plans.page import format_page
from diffshard.plans.text import format_plan
from diffshard.sharding_search.executors import with_executor
from diffshard.sharding_search.options import Options, with_automatic_axes
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import abstract_array, path_inside


@dataclass(frozen=True)
class Plan(PlanData):
    """How a function runs on a mesh. Made by `diffshard.search(fn, mesh).plan(*args)`; `print` shows it.

    Its fields are those of `PlanData`.
    """

    def __str__(self) -> str:
        return format_plan(self)

    def html(self) -> str:
        """Returns the plan as a self-contained page for a browser; in a notebook a plan shows itself as this page."""
        return format_page(self)

    def _repr_html_(self) -> str:
        return framed(self.html())

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced whole or not at all."""
        save(self, path)

    @staticmethod
    def load(path: str | PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> "Plan":
        """Reads a plan back.

        Args:
          path: a file that `save` wrote.
          mesh: the devices to use it on; without it the plan can be shown but not run.

        Raises:
          PlanError: the file is not a plan file, damaged, or newer than this version; or the mesh has other axes.
        """
        return load(path, Plan, mesh)

    def shard(self, *args: Any) -> Any:
        """Puts the arguments on the mesh as the plan wants them, and returns them; a single one without a tuple.

        Raises:
          PlanError: the arguments have other shapes than the plan's, or the plan's mesh has no devices.
        """
        mesh = self.placed_mesh
        dynamic = [a for i, a in enumerate(args) if i not in self.static_argnums]
        leaves, structure = jax.tree.flatten(tuple(dynamic))
        self.check_arguments(tuple(dynamic))
        shardings = [NamedSharding(mesh, t.partition_spec) for t in self.arguments]
        placed_arguments = iter(jax.tree.unflatten(structure, jax.device_put(leaves, shardings)))
        result = tuple(a if i in self.static_argnums else next(placed_arguments) for i, a in enumerate(args))
        return result[0] if len(result) == 1 else result

    def apply(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None = None, *, executor: Executor | None = None
    ) -> "PlannedFunction[Plan]":
        """Gives a function this plan without a search; returns a callable as `diffshard.search` does.

        Args:
          fn: the function that the plan was made for.
          mesh: of devices or abstract, with the plan's axes; None takes the plan's own.
          executor: as in `diffshard.search`, or "propagation", which tells XLA's partitioner the shardings of arguments
            and results only; None takes the one that the plan is meant for.

        Raises:
          PlanError: the plan was made for another function or mesh; names the first difference.
        """
        mesh = self.mesh if mesh is None else mesh
        if mesh is None or dict(mesh.shape) != dict(self.mesh_axes):
            axes = None if mesh is None else dict(mesh.shape)
            raise PlanError(f"The plan was made for the mesh {dict(self.mesh_axes)}, not {axes}.")
        options = Options(
            fn=fn,
            mesh=mesh,
            hardware=self.hardware,
            memory_limit_bytes=self.memory_limit_bytes,
            donate_argnums=self.donate_argnums,
            static_argnums=self.static_argnums,
            executor=self.executor if executor is None else executor,
            logical_axis_rules=self.logical_axis_rules,
        )
        return PlannedFunction(options, self._checked_for)

    def _checked_for(self, request: PlanRequest) -> "Plan":
        """Returns this plan for a traced function that it fits; what `PlannedFunction` calls in place of a search."""
        self.check_arguments(request.traced_function.args)
        executor = request.options.executor
        return self if executor in (None, self.executor) else with_executor(self, executor, request.space)

    @property
    def placed_mesh(self) -> Mesh:
        """The mesh of devices, with automatic axes.

        Raises:
          PlanError: the plan's mesh is abstract.
        """
        if not isinstance(self.mesh, Mesh):
            raise PlanError(
                f"The plan's mesh {dict(self.mesh_axes)} is abstract, it has no devices to put arrays on. "
                "Make the plan with a jax.sharding.Mesh, or load it with `Plan.load(path, mesh)`."
            )
        return with_automatic_axes(self.mesh)

    def check_arguments(self, args: Sequence[Any]) -> None:
        """Checks that arguments, without the static ones, have the shapes, types and structure of the plan's.

        Raises:
          PlanError: names the first argument that differs.
        """
        leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
        for tensor, (path, leaf) in zip(self.arguments, leaves, strict=False):
            array = abstract_array(leaf)
            shape, dtype = array.shape, str(array.dtype)
            if (tensor.shape, tensor.dtype) != (shape, dtype) or not tensor.path.endswith(path_inside(path)):
                raise PlanError(
                    f"The plan was made for `{tensor.path}` of {tensor.dtype}{list(tensor.shape)}, and was given "
                    f"argument {path[0].idx}{path_inside(path)} of {dtype}{list(shape)}. Search again for these shapes."
                )
        if len(leaves) != len(self.arguments):
            raise PlanError(f"The plan was made for {len(self.arguments)} arrays in its arguments, not {len(leaves)}.")
