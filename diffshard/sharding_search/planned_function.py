"""A function that is planned for the shapes of its arguments, compiled with the plan, and run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from diffshard.base import PlanError, Progress
from diffshard.live_progress import ProgressDisplay, live_line
from diffshard.plans.base import PlanData
from diffshard.plans.formats import format_bytes, format_count, format_devices, format_s, short_name
from diffshard.plans.notebook import planned_function_element
from diffshard.plans.page import format_page
from diffshard.sharding_search.executors import FlatFunction, flat_function
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import (
    TracedFunction,
    abstract_arguments,
    abstract_array,
    space_of,
    trace_function,
)

PlanT = TypeVar("PlanT", bound=PlanData)
MakePlan = Callable[[PlanRequest], PlanT]


class PlannedFunction(Generic[PlanT]):
    """A function that runs as its plan says; made by `diffshard.search` and by `Plan.apply`.

    Args:
      options: what was asked for.
      make_plan: gives the plan for a traced function.
    """

    def __init__(self, options: Options, make_plan: MakePlan[PlanT]):
        self.options = options
        self._make_plan = make_plan
        self._plans: dict[Any, tuple[PlanT, Any]] = {}  # by signature of the arguments: the plan, and what runs it
        self._last: tuple[Any, Any] | None = None  # signature of the last arguments, and what runs them

    def plan(self, *args: Any, progress: Progress | None = None) -> PlanT:
        """Returns the plan for arguments (arrays or `jax.ShapeDtypeStruct`), searched once for each set of shapes.

        Args:
          *args: as for the function itself.
          progress: called as `progress(seconds, cost, lower_bound)` while the solver runs, in place of what `search`
            shows.

        Raises:
          InfeasibleError: no plan fits the memory limit; the error says how much would be needed.
          ValueError: a given sharding does not fit its argument.
        """
        return self._prepare(args, progress)[0]

    def __call__(self, *args: Any) -> Any:
        """Runs the function with the plan for these arguments.

        Raises:
          ValueError: the mesh is abstract, or an argument is committed to another sharding than the plan's.
        """
        if self._last is not None:
            try:
                return self._last[1](*args)
            except Exception:  # the arguments have other types than the last ones, or the function itself fails
                if self._signature(args) == self._last[0]:
                    raise
        if not isinstance(self.options.mesh, Mesh):
            raise ValueError(
                f"`mesh` {dict(self.options.mesh.shape)} is abstract: it can be planned and lowered for, not run on. "
                "Give `diffshard.search` (or `Plan.load`) a jax.sharding.Mesh of devices."
            )
        plan, run = self._prepare(args, None)
        self._check_placed(plan, args)
        result = run(*args)
        self._last = self._signature(args), run
        return result

    def lower(self, *args: Any) -> Any:
        """Lowers the planned function, as `jax.jit(...).lower` does; the result has `compile()` and `as_text()`.

        For an abstract mesh it is lowered for the default backend's platform, and cannot be compiled.
        """
        run = self._prepare(args, None)[1]
        if isinstance(self.options.mesh, Mesh):
            return run.lower(*args)
        return run.trace(*abstract_arguments(self.options, args)).lower(lowering_platforms=(jax.default_backend(),))

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} {self._headline()}, {format_count(len(self._plans), 'plan')}>"

    def _repr_html_(self) -> str:
        if not self._plans:
            advice = "Not planned yet: call plan(*args) with arrays or jax.ShapeDtypeStructs, or the function itself."
            return planned_function_element(self._headline(), advice, ())
        plans = [plan for plan, _ in self._plans.values()]
        return planned_function_element(
            self._headline(), "", [(_page_title(plan), format_page(plan)) for plan in plans]
        )

    def _headline(self) -> str:
        options = self.options
        return f"{short_name(options.function_name)} on {format_devices(options.mesh.shape)}, {options.hardware.name}"

    def _prepare(self, args: Sequence[Any], progress: Progress | None) -> tuple[PlanT, Any]:
        signature = self._signature(args)
        if signature not in self._plans:
            with live_line(f"searching {self.options.function_name}", self._display(progress)) as line:
                start_s = time.perf_counter()
                line.step("tracing")
                traced_function = trace_function(self.options, args)
                space = space_of(self.options, traced_function)
                line.step("listing strategies")
                plan = self._make_plan(
                    PlanRequest(self.options, traced_function, space, start_s, progress or line.progress)
                )
            if plan.logical_axis_rules != self.options.logical_axis_rules:  # an expert's plan was found to be the best
                options = replace(self.options, logical_axis_rules=plan.logical_axis_rules)
                traced_function = trace_function(options, args)
                space = space_of(options, traced_function)
            flat = flat_function(plan, traced_function, space, self.options.mesh)
            self._plans[signature] = plan, self._jit(traced_function, flat)
        return self._plans[signature]

    def _display(self, progress: Progress | None) -> ProgressDisplay:
        """Returns where the search shows how it goes, where it may be given a function that is told."""
        return self.options.progress if progress is None else "none"

    def _jit(self, traced_function: TracedFunction, flat: FlatFunction) -> Any:
        options = self.options
        signature = _types(jax.tree.leaves(traced_function.args)), _with_types(traced_function.static)

        def run(*args: Any) -> Any:  # traced once; other arguments need another plan
            leaves = jax.tree.leaves(options.dynamic(args))
            if (_types(leaves), _with_types(options.static(args))) != signature:
                raise PlanError("These arguments are not those that the plan was made for.")
            return jax.tree.unflatten(traced_function.out_tree, flat.run(*leaves))

        run.__name__ = getattr(options.fn, "__name__", "function")
        return jax.jit(
            run,
            in_shardings=jax.tree.unflatten(jax.tree.structure(traced_function.args), flat.in_shardings),
            out_shardings=jax.tree.unflatten(traced_function.out_tree, flat.out_shardings),
            static_argnums=options.static_argnums or None,
            donate_argnums=options.donate_argnums or None,
            compiler_options=flat.compiler_options,
        )

    def _check_placed(self, plan: PlanT, args: Sequence[Any]) -> None:
        """Names the array that is committed to another sharding; JAX's own error would not."""
        for tensor, leaf in zip(plan.arguments, jax.tree.leaves(self.options.dynamic(args)), strict=True):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
                sharding = jax.sharding.NamedSharding(self.options.mesh, tensor.partition_spec)
                if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                    raise ValueError(
                        f"`{tensor.path}` is placed as {leaf.sharding}, but the plan wants {tensor.partition_spec} "
                        f"on the mesh {dict(plan.mesh_axes)}. Use `plan.shard(...)`, or place it so before planning to "
                        "keep it."
                    )

    def _signature(self, args: Sequence[Any]) -> Any:
        leaves, structure = jax.tree.flatten(self.options.dynamic(args))
        return _with_types(self.options.static(args)), structure, _types(leaves)


def _page_title(plan: PlanData) -> str:
    arrays, size = format_count(len(plan.arguments), "array"), format_bytes(sum(t.num_bytes for t in plan.arguments))
    return f"Plan for arguments of {size} in {arrays}: {format_s(plan.step_s)} predicted"


def _types(leaves: Sequence[Any]) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    """Returns shape, dtype and weakness of each array, on which the traced function depends."""
    arrays = map(abstract_array, leaves)
    return tuple((a.shape, str(a.dtype), a.weak_type) for a in arrays)


def _with_types(values: Sequence[Any]) -> tuple[tuple[type, Any], ...]:
    """Returns static values with their types: 1 and 1.0 are equal, but different constants."""
    return tuple((type(value), value) for value in values)
