"""A function that is planned for the shapes of its arguments, compiled with the plan, and run."""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import jax
import jax.core
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from diffshard.base import InfeasibleError, Progress
from diffshard.checks.hlo import with_host_memory
from diffshard.garbage_collection import rare_collections
from diffshard.live_progress import live_line
from diffshard.plans.base import PlanData
from diffshard.plans.page import format_page
from diffshard.plans.page_elements import NOT_PLANNED, planned_function_element
from diffshard.plans.printing import format_bytes, format_count, format_devices, format_s, short_name
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.call import (
    Call,
    Structure,
    array_types,
    bound_arguments,
    call_of,
    jax_settings,
    split,
)
from diffshard.sharding_search.carried import residuals_for_call, with_residuals, without_residuals
from diffshard.sharding_search.executors import FlatFunction, flat_function
from diffshard.sharding_search.fingerprints import facts_of, run_facts
from diffshard.sharding_search.numbers_check import TwoRuns, numbers_check
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.predictions import warn_of_whole_work
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import TracedFunction, space_of, trace_call
from search_spaces.sharding.space import ShardingSpace

PlanT = TypeVar("PlanT", bound=PlanData)
MakePlan = Callable[[PlanRequest], PlanT]


@dataclass
class _Prepared(Generic[PlanT]):
    """A planned function that runs calls of one structure, with arrays of some types.

    Attributes:
      settings: of JAX, for which the function was traced.
      make_check: makes what the first call is held against; None where it is not, or was.
      compiled: what runs calls, where it was compiled before them.
    """

    plan: PlanT
    call: Call
    make_flat: Callable[[], FlatFunction]
    result: Structure
    settings: tuple[Any, ...]
    name: str
    make_check: Callable[[], TwoRuns] | None = None
    compiled: Any = None

    @cached_property
    def _flat(self) -> FlatFunction:
        with jax.core.eval_context():  # the first use may be under a trace
            return self.make_flat()

    @property
    def residuals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The residuals that the function takes after its flat arrays."""
        return self._flat.residuals

    @cached_property
    def jitted(self) -> Any:
        """The function of flat arrays."""
        return self._flat.jit(self.name)

    @cached_property
    def nested(self) -> Any:
        """The same for use under another trace."""
        return self._flat.jit(self.name, is_nested=True)

    def run(self, arrays: Iterable[Any], residuals: Mapping[str, Any] | None = None) -> Any:
        """Runs the function on flat arrays, and on residuals where the plan has some; returns its result."""
        arrays = tuple(arrays)
        if self.make_check is not None:
            results = self.make_check().results(self.jitted, self._flat.donate_argnums, arrays)
            self.make_check = None
            return self.result.unflatten(results)
        is_traced = any(isinstance(array, Tracer) for array in arrays)
        jitted = self.nested if is_traced else self.compiled or self.jitted
        if not self.plan.residuals and not residuals:
            return self.result.unflatten(jitted(*arrays))
        results = jitted(*arrays, *residuals_for_call(self.plan, self.plan.mesh, residuals, arrays))
        result, after = self.result.unflatten(results[: len(self.plan.outputs)]), results[len(self.plan.outputs) :]
        return with_residuals(self.plan, result, after)


class PlannedFunction(Generic[PlanT]):
    """A function that runs as its plan says; made by `diffshard.search` and by `Plan.apply`.

    Args:
      options: what was asked for.
      make_plan: gives the plan for a traced function.
      is_searched: whether that takes a search; a plan that is given fits or does not.
    """

    def __init__(self, options: Options, make_plan: MakePlan[PlanT], *, is_searched: bool = True):
        self.options = options
        self._is_searched = is_searched
        self._make_plan = make_plan
        self._prepared: dict[Any, _Prepared[PlanT]] = {}  # by structure and types of the arguments
        self._last: _Prepared[PlanT] | None = None
        self._resharded: set[str] = set()  # paths of arguments of which the user knows that each call moves them

    def checked_by(self, check: Callable[[PlanRequest], None]) -> "PlannedFunction[PlanT]":
        """Returns the same function that makes no plan for what a check refuses, by the error that it raises."""

        def make_plan(request: PlanRequest) -> PlanT:
            check(request)
            return self._make_plan(request)

        return PlannedFunction(self.options, make_plan, is_searched=self._is_searched)

    def with_options(self, options: Options) -> "PlannedFunction[PlanT]":
        """Returns the same function with other options, planned in the same way; it does not warn of its plan."""
        return PlannedFunction(options, self._make_plan, is_searched=False)

    def plan(self, *args: Any, progress: Progress | None = None, **kwargs: Any) -> PlanT:
        """Returns the plan for arguments (arrays or `jax.ShapeDtypeStruct`), searched once for each set of shapes.

        There is one for each set of static values and other constants, too, as `jax.jit` compiles for each.

        Args:
          *args: as for the function itself.
          progress: called as `progress(seconds, cost, lower_bound)` while the solver runs, in place of what `search`
            shows. An argument of the function with this name has to be given by position.
          **kwargs: as for the function itself.

        Raises:
          InfeasibleError: no plan fits the memory limit; the error says how much would be needed.
          TypeError: the function does not take these arguments, or a leaf is neither an array nor hashable.
          ValueError: a given sharding does not fit its argument.
        """
        return self._prepare(args, kwargs, progress)[0].plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function with the plan for these arguments.

        Where the plan has residuals, as of sums with error feedback, the state that is returned is a `formats.Carried`,
        which the next call takes. A state without residuals begins with none.

        An array that is committed to another sharding than the plan's is moved, with a warning for the first time.

        Raises:
          ValueError: the mesh is abstract.
        """
        args, kwargs, residuals = without_residuals(args, kwargs)
        last, arrays = self._last, None
        if last is not None and last.settings == jax_settings():
            arrays = last.call.structure.arrays_of(bound_arguments(self.options, args, kwargs))
        if last is not None and arrays is not None:
            try:
                return last.run(arrays, residuals)
            except Exception:  # arrays of other types or at other places than the last ones, or the function itself
                if _have_types(arrays, last.call) and not self._misplaced(last.plan, arrays):
                    raise
        if not isinstance(self.options.mesh, Mesh):
            raise ValueError(
                f"`mesh` {dict(self.options.mesh.shape)} is abstract: it can be planned and lowered for, not run on. "
                "Give `diffshard.search` (or `Plan.load`) a jax.sharding.Mesh of devices."
            )
        prepared, arrays = self._prepare(args, kwargs, None, is_expected=not self._prepared)
        result = prepared.run(self._placed(prepared, arrays), residuals)
        self._last = prepared
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the planned function of flat arrays, as `jax.jit(...).lower` does.

        The result has `compile()` and `as_text()`. What it compiles to takes the arrays of the arguments one by one,
        as `jax.tree.leaves` lists them. For an abstract mesh it is lowered for the default backend's platform, and
        cannot be compiled.
        """
        prepared, _ = self._prepare(args, kwargs, None)
        traced, plan = prepared.jitted.trace(*prepared.call.arrays, *prepared.residuals), prepared.plan
        is_here = isinstance(self.options.mesh, Mesh)
        lowered = traced.lower() if is_here else traced.lower(lowering_platforms=(jax.default_backend(),))
        if not plan.host_bytes:
            return lowered
        return with_host_memory(
            lowered,
            *([tensor.on_host for tensor in (*tensors, *plan.residuals)] for tensors in (plan.arguments, plan.outputs)),
        )

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles the planned function for arguments of these shapes now, which its first call would do otherwise.

        Returns:
          What `lower(...).compile()` does; calls use it.
        """
        prepared, _ = self._prepare(args, kwargs, None)
        prepared.compiled = prepared.compiled or self.lower(*args, **kwargs).compile()
        return prepared.compiled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._headline()}, {format_count(len(self._prepared), 'plan')}>"

    def _repr_html_(self) -> str:
        if not self._prepared:
            return planned_function_element(self._headline(), NOT_PLANNED, ())
        plans = [prepared.plan for prepared in self._prepared.values()]
        pages = [(_page_title(plan), format_page(plan)) for plan in plans]
        return planned_function_element(self._headline(), "", pages)

    def _headline(self) -> str:
        options = self.options
        is_open = options.candidates and not self._prepared
        devices = format_count(options.mesh.size, "device") if is_open else format_devices(options.mesh.shape)
        return f"{short_name(options.function_name)} on {devices}, {options.hardware.name}"

    def _prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], progress: Progress | None, *, is_expected: bool = True
    ) -> tuple[_Prepared[PlanT], list[Any]]:
        """Returns the function that runs a call, and its flat arrays. A search that the user may not expect is told."""
        args, kwargs, _ = without_residuals(args, kwargs)
        with errors_for_all(self.options.mesh, f"plan {self.options.function_name} together"):
            arrays, structure = split(bound_arguments(self.options, args, kwargs))
            key = structure, array_types(arrays), jax_settings()
            if key not in self._prepared:
                # Not of a trace that this may be under, which is another matter.
                with jax.core.eval_context(), rare_collections():
                    call = call_of(self.options, args, kwargs)
                    if not is_expected:
                        self._tell_difference(call)
                    self._prepared[key] = self._search(call, progress)
            return self._prepared[key], arrays

    def _search(self, call: Call, progress: Progress | None) -> _Prepared[PlanT]:
        options = self.options
        display = options.progress if progress is None else "none"
        with live_line(f"searching {options.function_name}", display) as line:
            start_s = time.perf_counter()
            line.step("tracing")
            traced_function = self._traced(call)
            options, space = _with_space(options, traced_function)
            line.step("listing strategies" if processes_of(options.mesh).is_first else "waiting for the first process")
            request = PlanRequest(options, traced_function, space, start_s, progress or line.progress)
            plan = self._make_plan(request)
        if self._is_searched and not plan.stored_in and processes_of(options.mesh).is_first:
            warn_of_whole_work(plan)
        if options.candidates:  # the first plan chooses the mesh: state that lives there is not moved by later plans
            request = request.on(options.candidate_with(plan.mesh_axes))
            self.options = options = request.options
        if plan.logical_axis_rules != options.logical_axis_rules:  # a baseline's plan was found to be the best
            options = replace(options, logical_axis_rules=plan.logical_axis_rules)
            request = request.of_function(options, trace_call(options, call))
        traced_function, space = request.with_recomputed(plan)[1:3]
        make_flat = partial(flat_function, plan, traced_function, space, options.mesh)
        if not plan.stored_in:  # the space is listed anyway, and a plan that is applied is checked so
            flat = make_flat()
            make_flat = lambda: flat  # noqa: E731
        name = getattr(options.fn, "__name__", "function")
        prepared = _Prepared(plan, call, make_flat, traced_function.result, jax_settings(), name)
        if isinstance(options.mesh, Mesh) and (options.checks_numbers or plan.executor == "propagation"):
            prepared.make_check = partial(numbers_check, plan, traced_function, space, options.mesh)
        if options.checks_numbers and prepared.make_check is not None:
            prepared.make_check()  # says now what would be wrong with it
        return prepared

    def _traced(self, call: Call) -> TracedFunction:
        """Returns the traced function, which is the same in all processes that own devices of the mesh.

        Raises:
          ProcessesError: it is not, or something else differs on which the plan depends.
        """
        options = self.options

        def facts(traced_function: TracedFunction) -> dict[str, str]:
            return {**facts_of(options, traced_function), **run_facts(options)}

        what = f"plan {options.function_name} together"
        return processes_of(options.mesh).alike(what, lambda: trace_call(options, call), facts)

    def _placed(self, prepared: _Prepared[PlanT], arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays where the plan wants them; the first time that some have to be moved, it is told."""
        result, paths = list(arrays), prepared.call.paths
        shardings = self._misplaced(prepared.plan, arrays)
        new = [i for i in shardings if paths[i] not in self._resharded]
        if new:
            self._resharded.update(paths[i] for i in new)
            first, others = new[0], f", and {len(new) - 1} more arrays" if len(new) > 1 else ""
            warnings.warn(
                f"`{paths[first]}` is placed as {arrays[first].sharding}, but the plan wants {shardings[first].spec} "
                f"on the mesh {dict(shardings[first].mesh.shape)}: it is moved at every call{others}. Place it by "
                "`plan.shard(...)`, or place it so before planning to keep it.",
                stacklevel=3,
            )
        for i, sharding in shardings.items():
            result[i] = jax.device_put(arrays[i], sharding)
        return result

    def _misplaced(self, plan: PlanT, arrays: Sequence[Any]) -> dict[int, NamedSharding]:
        """Returns the shardings that the plan wants for arrays that are committed to others, by their numbers."""
        misplaced = {}
        for i, (tensor, array) in enumerate(zip(plan.arguments, arrays, strict=True)):
            if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.committed:
                sharding = tensor.sharding_on(self.options.mesh)
                if not array.sharding.is_equivalent_to(sharding, array.ndim):
                    misplaced[i] = sharding
        return misplaced

    def _tell_difference(self, call: Call) -> None:
        """Warns of a search that nobody asked for, such as that for a last batch that is smaller than the others."""
        earlier_calls = [
            prepared.call
            for prepared in self._prepared.values()
            if prepared.call.structure == call.structure and prepared.settings == jax_settings()
        ]
        if not earlier_calls:
            return
        differing = min((_differences(call, earlier) for earlier in earlier_calls), key=len)  # from the nearest plan
        if differing and self._is_searched:
            others = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
            advice = (
                "Give arrays of Python numbers a dtype, as in `jnp.full(shape, 0.25, jnp.float32)`."
                if "of a weak type" in differing[0]
                else "Pad or drop a last, partial batch, or call `plan(...)` for each set of shapes first."
            )
            warnings.warn(
                f"These arguments of {self.options.function_name} are not those of an earlier plan: {differing[0]}"
                f"{others}. A new plan is searched. {advice}",
                stacklevel=4,
            )


def _differences(call: Call, earlier: Call) -> list[str]:
    """Returns a sentence for each array that has another type than in an earlier call.

    Whether the type of a scalar is weak is left out: a call may give a Python number where another gives an array.
    """
    return [
        f"`{path}` is {_type_text(new)}, not {_type_text(old)}"
        for path, new, old in zip(call.paths, call.arrays, earlier.arrays, strict=True)
        if (new.shape, new.dtype) != (old.shape, old.dtype) or (new.shape and new.weak_type != old.weak_type)
    ]


def _type_text(array: jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}{list(array.shape)}{' of a weak type' * array.weak_type}"


def _with_space(options: Options, traced_function: TracedFunction) -> tuple[Options, ShardingSpace]:
    """Returns the space of a function on a mesh; of several meshes on the first that can divide arguments as given."""
    for candidate in options.candidates:
        on_mesh = replace(options, mesh=candidate.mesh, hardware=candidate.hardware)
        try:
            return on_mesh, space_of(on_mesh, traced_function)
        except InfeasibleError:
            continue
    return options, space_of(options, traced_function)


def _have_types(arrays: Sequence[Any], call: Call) -> bool:
    try:
        return array_types(arrays) == array_types(call.arrays)
    except TypeError:  # one of them is an array no more, but a constant
        return False


def _page_title(plan: PlanData) -> str:
    arrays, size = format_count(len(plan.arguments), "array"), format_bytes(sum(t.num_bytes for t in plan.arguments))
    return f"Plan for arguments of {size} in {arrays}: {format_s(plan.step_s)} predicted"
