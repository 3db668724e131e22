"""A plan as users have it: data that can be shown, saved, loaded, and applied to a function and its arguments."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from diffshard.base import PlanError, checked_mesh
from diffshard.files import checked_path
from diffshard.plans.base import Executor, PlanData, Tensor
from diffshard.plans.difference import PlanDifference, difference_of
from diffshard.plans.file import load, save
from diffshard.plans.page import format_page
from diffshard.plans.page_elements import Paged
from diffshard.plans.text import format_in_line, format_plan
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.call import Call, Static, Structure, abstract_array, array_paths, split
from diffshard.sharding_search.carried import (
    Carried,
    overflows_of,
    placed_residuals,
    residual_key,
    with_residuals,
    without_residuals,
)
from diffshard.sharding_search.executors import with_executor
from diffshard.sharding_search.fingerprints import plan_facts
from diffshard.sharding_search.logical_axes import LogicalRules, logical_rules_of
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.placing_arrays import (
    FreshState,
    LocalPart,
    PlaceArrays,
    check_arrays,
    fitting_tensors,
    local_part,
    named_arguments,
    parameter_of,
    place_local,
    place_whole,
)
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.request import PlanRequest


@dataclass(frozen=True)
class Plan(PlanData, Paged):
    """How a function runs on a mesh. Made by `diffshard.search(fn, mesh).plan(*args)`; `print` shows it.

    Its fields are those of `PlanData`.
    """

    def __str__(self) -> str:
        return format_plan(self)

    def __repr__(self) -> str:
        return format_in_line(self)

    def html(self) -> str:
        """Returns the plan as a self-contained page for a browser; in a notebook a plan shows itself as this page."""
        return format_page(self)

    def diff(self, other: PlanData) -> PlanDifference:
        """Returns the differences from another plan, which may be of another mesh, hardware or function.

        >>> print(plan.diff(other))

        The result has what differs as data, is printed as tables, and shows itself as a page in notebooks.

        Raises:
          TypeError: `other` is no plan.
        """
        if not isinstance(other, PlanData):
            raise TypeError(
                f"`other` must be a Plan, which is compared with its own kind, not a {type(other).__name__}; "
                "`Plan.load(path)` reads a saved one."
            )
        return difference_of(self, other)

    def logical_rules(self) -> LogicalRules:
        """Returns the plan as flax's logical axis rules: the mesh axes that split the dimensions of each logical name.

        >>> rules, disagreements = plan.logical_rules()

        Arguments with metadata of flax have such names. Rules cannot say everything: where arrays with the same name
        are split in different ways, a sentence says so. Names of mesh axes need no rule and have none.
        """
        return logical_rules_of(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced whole or not at all.

        Of several processes the first one writes. The others that call this wait until it has, so that all can load it,
        and raise `ProcessesError` if it does not write a plan that runs as theirs.
        """
        path = checked_path(path)
        act = partial(save, self, path)
        processes_of(self.mesh).in_first("save a plan", os.path.abspath(path), act, plan_facts(self))

    @staticmethod
    def load(path: str | PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> "Plan":
        """Reads a plan back.

        Args:
          path: a file that `save` wrote.
          mesh: the devices to use it on; without it the plan can be shown but not run.

        Raises:
          TypeError: `mesh` is no mesh.
          PlanError: the file is not a plan file, damaged, or newer than this version; or the mesh has other axes.
        """
        return load(path, Plan, mesh)

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """Puts arguments on the mesh as the plan wants them, and returns them; a single one without a tuple.

        >>> state = plan.shard(state)
        >>> batch = plan.shard(batch=batch)

        Where the plan sends sums with error feedback, or has products with delayed scales, the state comes with
        residuals, as a `formats.Carried`: those of one that is given, also if another plan of the function made them,
        else zeros.

        With `jax.distributed` every process gives the whole arrays, and puts its own blocks of them on its devices.
        When arguments are sharded for the first time, samples of their values are compared between the processes.
        Arrays that are over the devices of all processes already, as input pipelines make them, are taken as they are.
        Processes that have a part of the batch each call `shard_local`.

        Args:
          *args: the first arguments of the function; the others may be missing.
          **kwargs: further arguments by name.

        Raises:
          PlanError: an argument is unknown or has other shapes than the plan's, or the plan's mesh has no devices.
          ProcessesError: the processes give different values.
        """
        with errors_for_all(self.mesh, "shard the same arrays"):
            return self._placed(args, kwargs, place_whole)

    def shard_local(self, *args: Any, **kwargs: Any) -> Any:
        """Makes arguments over the devices of all processes from the part that each process has, and returns them.

        >>> batch = plan.shard_local(batch=rows_of_this_process)

        This is not an option of `shard`, because every argument has a name of its own, and because one process's rows
        could be a whole, smaller batch: which of both is meant has to be said. `local_parts` says what to load. In one
        process its part is everything. Of several, each waits for all others when an argument is sharded for the first
        time.

        Args:
          *args: the first arguments of the function; the others may be missing.
          **kwargs: further arguments by name.

        Raises:
          PlanError: as `shard`; or an array has another shape than this process's part, which the error says.
          ProcessesError: that is so in another process, where an argument is sharded for the first time.
        """
        with errors_for_all(self.mesh, "shard the parts of the same arrays"):
            return self._placed(args, kwargs, place_local)

    def init(self, init: Callable[..., Any], *args: Any, argument: str | None = None) -> Any:
        """Makes an argument, such as a training state, split as the plan wants it from the start, and returns it.

        >>> state = plan.init(init_state, jax.random.key(0))

        Each device computes its own part, so that nothing has to fit one device or the host. With `jax.distributed` all
        processes of the mesh call this alike.

        Args:
          init: makes the argument, with operations of JAX.
          *args: what `init` takes.
          argument: which argument of the planned function it makes; None for the only one that it fits.

        Raises:
          PlanError: it makes no argument of the function, or one that fits several; or the plan's mesh has no devices.
        """
        with errors_for_all(self.mesh, "make an argument"):
            mesh, fresh = self.placed_mesh, FreshState(init, *args)
            tensors = self._tensors_for(fresh.paths, fresh.arrays, argument)
            made = fresh.make([tensor.sharding_on(mesh) for tensor in tensors])
            return self._carried(made, {}) if tensors and self._carries(parameter_of(tensors[0])) else made

    def tensors_of(self, tree: Any, argument: str | None = None, *, cast: bool = False) -> tuple[Tensor, ...]:
        """Returns how the plan splits the arrays of a tree that is an argument of its function.

        Args:
          tree: arrays or `jax.ShapeDtypeStruct`.
          argument: its name; None for the only one that it fits.
          cast: whether floating arrays may have other floating dtypes than the plan's.

        Raises:
          PlanError: it is no such argument, or fits several.
        """
        arrays, _ = split(tree)
        return self._tensors_for(
            lambda name: array_paths(name, tree), [abstract_array(a) for a in arrays], argument, cast
        )

    def _tensors_for(
        self,
        paths_of: Callable[[str], tuple[str, ...]],
        arrays: Sequence[jax.ShapeDtypeStruct],
        argument: str | None,
        cast: bool = False,
    ) -> tuple[Tensor, ...]:
        of_argument = {name: self._tensors_of(name) for name in self.parameters if not self._is_static(name)}
        return fitting_tensors(of_argument, self.function, paths_of, arrays, argument, cast)

    def local_parts(self, name: str) -> dict[str, LocalPart]:
        """Returns which part of each array of an argument this process holds, and has to load for `shard_local`.

        >>> rows, *_ = plan.local_parts("batch")["batch['tokens']"]
        >>> batch = plan.shard_local(batch={"tokens": tokens[rows]})

        Args:
          name: the argument's name.

        Returns:
          For each array, by its path, an index for each dimension: a slice, or the indices where the part is not in one
          piece.

        Raises:
          PlanError: there is no such argument, or the plan's mesh has no devices.
        """
        mesh = self.placed_mesh
        if name not in self.parameters:
            raise PlanError(f"The plan was made for the arguments {', '.join(self.parameters)}, not {name!r}.")
        return {t.path: local_part(NamedSharding(mesh, t.partition_spec), t.shape) for t in self._tensors_of(name)}

    def _placed(self, args: Sequence[Any], kwargs: Mapping[str, Any], place: PlaceArrays) -> Any:
        args, kwargs, residuals = without_residuals(args, kwargs)
        mesh, placed_arguments = self.placed_mesh, []
        if residuals and not self.residuals:
            placed_residuals(self, mesh, residuals)  # warns that they are left out
        for name, argument in named_arguments(self.parameters, self.static_argnames, args, kwargs):
            if self._is_static(name):
                placed_arguments.append(argument)
                continue
            arrays, structure = split(argument)
            is_first = name not in self._seen_arguments
            placed = place(self._tensors_of(name), array_paths(name, argument), arrays, mesh, is_first)
            self._seen_arguments.add(name)
            argument = structure.unflatten(placed)
            placed_arguments.append(self._carried(argument, residuals or {}) if self._carries(name) else argument)
        return placed_arguments[0] if len(placed_arguments) == 1 else tuple(placed_arguments)

    def overflows(self, state: Carried) -> dict[str, int]:
        """Returns how often operands had numbers that their delayed scales cut off, by name, the most often first.

        Args:
          state: as the planned step returns it.

        Raises:
          PlanError: the state is of another plan.
        """
        return overflows_of(self, state)

    def _carries(self, name: str) -> bool:
        """Returns whether residuals go with an argument."""
        return bool(self.residuals) and parameter_of(self.residuals[0]) == name

    def _carried(self, state: Any, residuals: Mapping[str, Any]) -> Carried:
        return Carried(state, placed_residuals(self, self.placed_mesh, residuals))

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """A pytree of `NamedSharding` for each positional argument without the static ones, as `jax.jit` takes them.

        Raises:
          PlanError: the plan was loaded, so that it does not know the pytrees; `apply` it, and take the plan that
            `plan(...)` of the result returns.
        """
        args, _ = self._structure(0).unflatten_beside_constants(self._named_shardings(self.arguments))
        shardings = self._named_shardings(self.residuals)
        carried = [
            Carried(argument, dict(zip(map(residual_key, self.residuals), shardings, strict=True)))
            if self._carries(name)
            else argument
            for name, argument in zip(self.parameters, args, strict=False)
        ]
        return tuple(argument for argument in carried if not isinstance(argument, Static))

    @property
    def out_shardings(self) -> Any:
        """The result with a `NamedSharding` in place of each array, as `jax.jit` takes it.

        Raises:
          PlanError: as `in_shardings`.
        """
        result = self._structure(1).unflatten_beside_constants(self._named_shardings(self.outputs))
        return with_residuals(self, result, self._named_shardings(self.residuals)) if self.residuals else result

    def apply(
        self,
        fn: Callable[..., Any],
        mesh: Mesh | AbstractMesh | None = None,
        *,
        executor: Executor | None = None,
        check: Literal["numbers"] | None = None,
    ) -> "PlannedFunction[Plan]":
        """Gives a function this plan without a search; returns a callable as `diffshard.search` does.

        Args:
          fn: the function that the plan was made for.
          mesh: of devices or abstract, with the plan's axes; None takes the plan's own.
          executor: as in `diffshard.search`; None takes the one that the plan is meant for.
          check: "numbers" holds the first call against another run, as in `diffshard.search`; None does so by the
            executor "propagation" only.

        Raises:
          TypeError, ValueError: `mesh` is no mesh; there is no such executor or check.
          PlanError: the plan was made for another function or mesh; names the first difference.
        """
        mesh = self.mesh if mesh is None else mesh
        with errors_for_all(self.mesh or mesh, "apply a plan"):
            if check is not None and self.residuals:
                raise ValueError(
                    "`check` cannot be given for a plan with error feedback or delayed scales, which change numbers."
                )
            if check not in ("numbers", None):
                raise ValueError(f'`check` must be "numbers" or None, not {check!r}: the plan is made.')
            mesh = checked_mesh(mesh, self.mesh_axes)
            try:
                options = Options(
                    fn=fn,
                    mesh=mesh,
                    hardware=self.hardware,
                    memory_limit_bytes=self.memory_limit_bytes,
                    donate_argnums=self.donate_argnums,
                    static_argnums=self.static_argnums,
                    donate_argnames=self.donate_argnames,
                    static_argnames=self.static_argnames,
                    executor=self.executor if executor is None else executor,
                    checks_numbers=check is not None,
                    logical_axis_rules=self.logical_axis_rules,
                    state="offload" if self.offloads_state else None,
                )
            except ValueError as error:
                if "_argn" not in str(error):
                    raise
                advice = " Give it to a function of modules by `diffshard.nnx.apply`." * ("nnx_graph" in str(error))
                raise PlanError(f"The plan does not fit the function: {error}{advice}") from None
        return PlannedFunction(options, self._checked_for, is_searched=False)

    def _checked_for(self, request: PlanRequest) -> "Plan":
        """Returns this plan for a traced function that it fits; what `PlannedFunction` calls in place of a search."""
        traced_function, executor = request.traced_function, request.options.executor
        self.check_call(traced_function.call)
        processes_of(request.options.mesh).alike("apply the same plan", lambda: self, plan_facts)
        space = request.with_recomputed(self).space
        plan = self if executor in (None, self.executor) else with_executor(self, executor, space)
        return request.complete(replace(plan, parameters=traced_function.call.parameters))

    @property
    def placed_mesh(self) -> Mesh:
        """The mesh of devices.

        Raises:
          PlanError: the plan's mesh is abstract.
        """
        if not isinstance(self.mesh, Mesh):
            raise PlanError(
                f"The plan's mesh {dict(self.mesh_axes)} is abstract, it has no devices to put arrays on. "
                "Make the plan with a jax.sharding.Mesh, or load it with `Plan.load(path, mesh)`."
            )
        return self.mesh

    def check_call(self, call: Call) -> None:
        """Checks that the arguments of a call have the shapes and types of the plan's, at the same places.

        Raises:
          PlanError: names the first argument that differs.
        """
        check_arrays(self.arguments, call.paths, call.arrays)

    @cached_property
    def _seen_arguments(self) -> set[str]:
        """Names of arguments that were sharded before."""
        return set()

    def _is_static(self, name: str) -> bool:
        return name in self.static_argnames or (
            name in self.parameters and self.parameters.index(name) in self.static_argnums
        )

    def _tensors_of(self, name: str) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.arguments if tensor.is_of(name))

    def _named_shardings(self, tensors: Sequence[Tensor]) -> list[NamedSharding]:
        assert self.mesh is not None
        return [tensor.sharding_on(self.mesh) for tensor in tensors]

    def _structure(self, number: int) -> Structure:
        if self.structures is None:
            raise PlanError(
                "A loaded plan does not know the pytrees that its arrays belong to. Give it the function: "
                "`plan = plan.apply(fn, mesh).plan(*args)`, where shapes (`jax.eval_shape`) are enough."
            )
        return self.structures[number]
