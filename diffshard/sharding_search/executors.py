"""What runs a function with its plan: a function of flat arrays, and the shardings between which it runs.

The three executors differ in how much they leave to XLA's partitioner: nothing, what a sharding constraint at every
place does not say, or everything inside the function.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
from jax import export
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from diffshard.base import PlanError
from diffshard.plans.base import Executor, PlanData, Tensor
from diffshard.sharding_search.call import array_types
from diffshard.sharding_search.layout import layout_of
from diffshard.sharding_search.options import has_explicit_axes, with_automatic_axes
from diffshard.sharding_search.tracing import TracedFunction
from search_spaces.sharding.base import Layout
from search_spaces.sharding.custom_calls.operations import CUSTOM_CALL_TARGETS, runs_on_parts
from search_spaces.sharding.execution import PropagatedExecution
from search_spaces.sharding.explaining import sources_of
from search_spaces.sharding.graph import Graph
from search_spaces.sharding.replicated_operations import (
    impossible_operations,
    replicated_operations,
    wrongly_partitioned,
)
from search_spaces.sharding.space import ShardingSpace

PlanT = TypeVar("PlanT", bound=PlanData)

# A program for each device says itself what runs beside what: the gathers for the next window, the reductions of the
# last one, and a window's own collectives are under way together. By default XLA for GPU has one under way at a time.
_PROGRAM_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


class FlatFunction(NamedTuple):
    """A planned function of flat arguments, ready for `jax.jit`.

    Attributes:
      run: takes the flat arguments without the static ones and returns the flat results.
      donate_argnums: positions of flat arguments whose memory may be used for results.
      compiler_options: for `jax.jit`; XLA ignores those for other backends.
      residuals: what it takes after its arguments and returns after its results: `PlanData.residuals`.
    """

    run: Callable[..., list[Any]]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    donate_argnums: tuple[int, ...]
    compiler_options: dict[str, Any]
    residuals: tuple[jax.ShapeDtypeStruct, ...] = ()

    def jit(self, name: str = "function", *, is_nested: bool = False) -> Any:
        """Returns the function under `jax.jit`, with a name for its traces.

        Under another trace (`is_nested`) it has no compiler options: only the outermost `jax.jit` may have them.
        """

        def run(*arrays: Any) -> list[Any]:  # a new function each time: `jax.jit` caches by function
            return self.run(*arrays)

        run.__name__ = name
        return jax.jit(
            run,
            in_shardings=self.in_shardings,
            out_shardings=list(self.out_shardings),
            donate_argnums=self.donate_argnums or None,
            compiler_options=None if is_nested else self.compiler_options,
        )

    def export_for(self, platform: str, args: Sequence[jax.ShapeDtypeStruct]) -> bytes:
        """Returns the function lowered for a platform, such as "cuda", as `jax.export` writes it."""
        checks = [export.DisabledSafetyCheck.custom_call(target) for target in CUSTOM_CALL_TARGETS]
        exported = export.export(self.jit(), platforms=[platform], disabled_checks=checks)(*args, *self.residuals)
        return bytes(exported.serialize())


def flat_function(
    plan: PlanData, traced_function: TracedFunction, space: ShardingSpace, mesh: Mesh | AbstractMesh
) -> FlatFunction:
    """Returns a traced function as the plan's executor runs it on a mesh."""
    evaluate = _evaluator(plan, traced_function, space, with_automatic_axes(mesh))
    residuals = tuple(jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in plan.residuals)
    types = array_types((*traced_function.call.arrays, *residuals))

    def run(*arrays: Any) -> list[Any]:  # is traced once; other arrays need another plan
        if array_types(arrays) != types:
            raise PlanError("These arguments are not those that the plan was made for.")
        with jax.sharding.use_abstract_mesh(with_automatic_axes(jax.sharding.get_abstract_mesh())):
            return list(evaluate(*arrays))

    def run_on_explicit_axes(*arrays: Any) -> list[Any]:
        pairs = zip(mesh.axis_names, mesh.axis_types or (), strict=True)
        axes = tuple(name for name, kind in pairs if kind is AxisType.Explicit)
        specs = [_spec_over(tensor, axes) for tensor in (*plan.outputs, *plan.residuals)]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            run_on_automatic_axes: Any = jax.sharding.auto_axes(run, axes=axes, out_sharding=specs)
            return run_on_automatic_axes(*arrays)

    def shardings(tensors: Sequence[Tensor]) -> tuple[NamedSharding, ...]:
        return tuple(tensor.sharding_on(mesh) for tensor in tensors)

    donated = tuple(i for i, is_donated in enumerate(traced_function.call.donated) if is_donated)
    if donated:  # the state is
        donated += tuple(range(len(plan.arguments), len(plan.arguments) + len(residuals)))
    options = _PROGRAM_OPTIONS if plan.executor == "program" else {}
    run_on_mesh = run_on_explicit_axes if has_explicit_axes(mesh) else run
    arguments, results = shardings((*plan.arguments, *plan.residuals)), shardings((*plan.outputs, *plan.residuals))
    return FlatFunction(run_on_mesh, arguments, results, donated, dict(options), residuals)


def _spec_over(tensor: Tensor, axes: Sequence[str]) -> PartitionSpec:
    """Returns a tensor's spec with these axes only: the others are no part of its type."""
    return PartitionSpec(*(tuple(axis for axis in split if axis in axes) or None for split in tensor.spec))


def with_executor(plan: PlanT, executor: Executor, space: ShardingSpace) -> PlanT:
    """Returns a plan that was made for "constraints" or "propagation" with another executor and its notes."""
    notes = executor_notes(executor, space, layout_of(plan, space))
    return replace(plan, executor=executor, notes=(*plan.notes, *notes))


def default_executor(space: ShardingSpace) -> tuple[Executor, tuple[str, ...]]:
    """Returns the executor of a space's plans where the user names none, and notes on it for the reader of a plan."""
    resharding = [v for v in space.graph.operations() if v.primitive == "reshard"]  # over explicit axes of another mesh
    impossible = sources_of([*impossible_operations(space.graph), *resharding])
    return "constraints" if impossible else "program", tuple(
        f"{name} ({sources}) has no form on one device's part, so XLA partitions the function, by constraints that it "
        "does not always follow."
        for name, sources in impossible
    )


def executor_notes(executor: Executor, space: ShardingSpace, layout: Layout) -> tuple[str, ...]:
    """Names the operations that a layout splits but an explicit program for each device cannot."""
    if executor != "program":
        return ()
    return tuple(
        f"{name} ({sources}) is split by the plan, but has no form on one device's part: it runs whole on every "
        "device, and the price does not say so."
        for name, sources in sources_of(replicated_operations(space.graph, layout.strategies, space.axis_sizes))
    )


def _evaluator(
    plan: PlanData, traced_function: TracedFunction, space: ShardingSpace, mesh: Mesh | AbstractMesh
) -> Callable[..., Sequence[Any]]:
    layout = layout_of(plan, space)
    if layout.in_fewer_bits and plan.executor != "program":
        raise PlanError(
            f"The plan has {len(layout.rounded)} products and {len(layout.coded)} sums, kept arrays or exchanges in "
            f'fewer bits, which `executor` "{plan.executor}" does not keep to. Take `executor="program"`, or search '
            "without `formats`."
        )
    has_own_form = plan.host_bytes > 0 or any(runs_on_parts(v) for v in space.graph.operations())
    if plan.executor == "propagation" and has_own_form:
        return PropagatedExecution(space.graph, layout, mesh, space.reshard_costs.path)
    if plan.executor == "propagation":
        return core.jaxpr_as_fun(traced_function.jaxpr)
    if plan.executor == "constraints":
        _check_partitioned_rightly(space.graph, layout)
        return space.execution(layout, mesh)
    program = space.device_program(layout, mesh)
    if [residual.shape for residual in program.residuals.values()] != [tensor.shape for tensor in plan.residuals]:
        raise PlanError(
            "The plan has other residuals than its sums with error feedback and its delayed scales need: search again."
        )
    return program


def _check_partitioned_rightly(graph: Graph, layout: Layout) -> None:
    """Checks that XLA's partitioner is not known to compute a layout's operations wrongly."""
    for name, sources in sources_of(wrongly_partitioned(graph, layout.strategies)):
        raise PlanError(
            f'`executor` is "constraints", by which XLA\'s partitioner would compute {name} ({sources}) wrongly: the '
            "plan splits its batch over mesh axes that it contracts over, and contracts over others as well. Take "
            '`executor="program"`.'
        )
