"""`baseline_plans` completes baselines' shardings to plans, whose predictions stand beside those of a found plan."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cost.base import Hardware
from diffshard.base import InfeasibleError
from diffshard.baselines.base import (
    BASELINES,
    Argument,
    BaselineMesh,
    BaselineShardings,
    DoesNotApplyError,
    describe_arguments,
)
from diffshard.plans.base import LogicalAxisRules
from diffshard.plans.file import from_json, to_json
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.argument_names import positions
from diffshard.sharding_search.fingerprints import facts_of, run_facts
from diffshard.sharding_search.logical_axes import checked_rules
from diffshard.sharding_search.options import Options, options_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planning import find_plan
from diffshard.sharding_search.program_text import value_text
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import TracedFunction, space_of, trace_call, trace_function
from diffshard.solving.solve import SolverOptions, solver_options
from search_spaces.replay import function_source

BY_RULES = "logical axis rules"
"""The name of the plan that follows a user's own rules."""
_NO_NAMES = "the function names no logical axes, so XLA's partitioner alone decides how activations are split."


@dataclass(frozen=True)
class BaselinePlans(Mapping[str, Plan]):
    """Baselines' plans by name, and why others are missing.

    Attributes:
      plans: those that apply.
      left_out: by the name of a baseline, a sentence that says why there is no plan.
    """

    plans: Mapping[str, Plan]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Plan:
        return self.plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)


def baseline_plans(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    *args: Any,
    names: Sequence[str] | None = None,
    hardware: Hardware | str | None = None,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] | None = (),
    static_argnums: int | Sequence[int] | None = (),
    state_argnums: int | Sequence[int] | None = None,
    logical_axis_rules: Sequence[tuple[str, Any]] | None = None,
    tensor_dimensions: Mapping[tuple[str, ...], int | None] | None = None,
    **options: Unpack[SolverOptions],
) -> BaselinePlans:
    """Makes plans by hand for comparison: data parallel, FSDP, Megatron, and mixtures of them.

    >>> plans = diffshard.baselines.baseline_plans(train_step, mesh, state, batch, hardware="h100", donate_argnums=0)
    >>> print(diffshard.compare(train_step, mesh, state, batch, plans=plans))

    A baseline gives shardings of arguments, and rules for flax's logical names of activations. The search completes
    them to the fastest plan that has these shardings, which is what the prediction is for. The plan runs as baselines'
    plans do, by propagation: XLA's partitioner is told nothing else. With `jax.distributed` all processes of the mesh
    call this alike, the first one makes the plans, and the others get them.

    State is what the function updates: arguments that come back with equal structure and shapes, and donated ones;
    where there is neither, the first argument. All others are batch, and are split along their leading dimension.
    Which dimension of a parameter Megatron splits follows from flax's metadata, else from the words that models use
    (query, up, down, ...), else from shapes. It splits over the inner axis, the one with the fastest links.

    Args:
      fn: as for `search`.
      mesh: as for `search`.
      *args: as for the function itself: arrays or `jax.ShapeDtypeStruct`.
      names: some of "data parallel", "fsdp", "hybrid fsdp", "megatron", "megatron fsdp" and "megatron sequence"; None
        takes all.
      hardware: as in `search`.
      memory_limit_bytes: as in `search`.
      donate_argnums: as in `search`.
      static_argnums: as in `search`.
      state_argnums: positions of arguments that are state; None takes those that the function updates.
      logical_axis_rules: rules of your own, pairs of a logical axis and mesh axes as flax takes them. They give one
        more plan, "logical axis rules", for arguments with flax's metadata (`nn.with_logical_partitioning`).
      tensor_dimensions: exceptions to the dimension that Megatron splits, by the last names of a path and counted from
        the end: `{("experts", "up"): -3}`; None leaves a parameter whole.
      **options: `SolverOptions`; the time limit is that of each plan, which the solver completes.

    Returns:
      Plans by name; a baseline whose plan does not divide the batch or does not fit the memory is in `left_out`.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
      ProcessesError: the processes ask for different plans, or another one failed.
    """
    with errors_for_all(mesh, "make plans of baselines"):
        unknown = [name for name in names or () if name not in BASELINES]
        if unknown:
            raise ValueError(f"`names` must be some of {', '.join(BASELINES)}, not {unknown[0]!r}.")
        of_both = {
            "donate_argnums": donate_argnums,
            "static_argnums": static_argnums,
            **solver_options(options, function=baseline_plans),
        }
        asked_for = options_of(fn, mesh, hardware, memory_limit_bytes, executor="propagation", **of_both)
        wanted = {
            "names": tuple(BASELINES) if names is None else names,
            "state_argnums": None if state_argnums is None else positions(state_argnums),
            "rules": checked_rules(logical_axis_rules or (), asked_for.axis_names),
            "dimensions": tensor_dimensions or {},
        }
        return _plans_of_first_process(asked_for, args, wanted)


def _plans_of_first_process(options: Options, args: Sequence[Any], wanted: Mapping[str, Any]) -> BaselinePlans:
    """Returns the baselines' plans that the first process of the mesh makes; all processes trace the function.

    Raises:
      ProcessesError: the processes ask for different things, or another one failed.
    """

    def facts(traced_function: TracedFunction) -> dict[str, str]:
        arguments = {f"`{name}`": value_text(value) for name, value in wanted.items()}
        return {**facts_of(options, traced_function), **run_facts(options), **arguments}

    processes, what = processes_of(options.mesh), f"make plans of baselines for {options.function_name}"
    traced_function = processes.alike(what, lambda: trace_function(options, args), facts)

    def pack(plans: BaselinePlans) -> bytes:
        documents = {name: to_json(plan) for name, plan in plans.items()}
        return json.dumps({"plans": documents, "left_out": dict(plans.left_out)}).encode()

    def unpack(content: bytes) -> BaselinePlans:
        document, structures = json.loads(content), (traced_function.call.structure, traced_function.result)
        plans = {
            name: replace(from_json(plan, name, Plan, options.mesh), structures=structures)
            for name, plan in document["plans"].items()
        }
        return BaselinePlans(plans, document["left_out"])

    return processes.shared(
        what, lambda: plans_of_baselines(options, traced_function, **wanted), pack=pack, unpack=unpack
    )


def plans_of_baselines(
    options: Options,
    traced_function: TracedFunction,
    *,
    names: Sequence[str] = tuple(BASELINES),
    state_argnums: tuple[int, ...] | None = None,
    rules: LogicalAxisRules = (),
    dimensions: Mapping[tuple[str, ...], int | None] | None = None,
) -> BaselinePlans:
    """Returns `baseline_plans` for checked options and a function that is traced already, without rules."""
    call, is_state = traced_function.call, traced_function.is_state
    if state_argnums is not None:
        is_state = [number in state_argnums for number in call.numbers]
    arguments = describe_arguments(call, is_state)
    baseline_mesh = baseline_mesh_of(options)
    plans: dict[str, Plan] = {}
    left_out: dict[str, str] = {}
    for name in (*names, *([BY_RULES] if rules else [])):
        try:
            if name == BY_RULES:
                shardings = _by_rules(arguments, rules)
            else:
                shardings = BASELINES[name](arguments, baseline_mesh, dimensions or {})
            plans[name] = _completed(name, shardings, options, traced_function)
        except DoesNotApplyError as error:
            left_out[name] = str(error)
        except InfeasibleError as error:  # its first sentence says how much memory is needed, the next what to do
            left_out[name] = f"{str(error).partition('. ')[0]}."
    return BaselinePlans(plans, left_out)


def baseline_mesh_of(options: Options) -> BaselineMesh:
    """Returns the mesh as baselines see it; of equally fast axes the last is the inner one."""
    sizes = dict(zip(options.axis_names, options.axis_sizes, strict=True))
    longer = [axis for axis, size in sizes.items() if size > 1] or list(sizes)
    seconds = {axis: options.hardware.link(axis).s_per_byte if sizes[axis] > 1 else 0.0 for axis in longer}
    return BaselineMesh(sizes, min(reversed(longer), key=lambda axis: seconds[axis]))


def _completed(name: str, shardings: BaselineShardings, options: Options, traced_function: TracedFunction) -> Plan:
    """Returns the fastest plan that has a baseline's shardings of arguments and activations."""
    start_s = time.perf_counter()
    by_rules = replace(options, logical_axis_rules=shardings.rules)
    try:
        traced_by_rules = trace_call(by_rules, traced_function.call) if shardings.rules else traced_function
    except ValueError as error:  # such as a dimension of an activation that its axes do not divide
        raise DoesNotApplyError(f"Its rules for activations do not fit the function: {error}") from error
    has_names = _num_constraints(traced_by_rules) > _num_constraints(traced_function)
    if has_names:
        options, traced_function = by_rules, traced_by_rules
    elif name == "megatron sequence":
        raise DoesNotApplyError("The function names no logical axes, so there is no sequence to split.")
    space = space_of(options, traced_function, shardings.specs)
    plan = find_plan(PlanRequest(options, traced_function, space, start_s))
    return plan if has_names else replace(plan, notes=(*plan.notes, f"{function_source(options.fn)}: {_NO_NAMES}"))


def _num_constraints(traced_function: TracedFunction) -> int:
    return sum(vertex.primitive == "sharding_constraint" for vertex in traced_function.graph.vertices)


def _by_rules(arguments: Sequence[Argument], rules: LogicalAxisRules) -> BaselineShardings:
    """Splits what has flax's metadata by a user's rules: the first that fits a dimension, and no mesh axis twice."""
    if not any(argument.logical_axes for argument in arguments):
        raise DoesNotApplyError("No argument has flax's logical metadata (`nn.with_logical_partitioning`).")
    from flax.linen import spmd  # imported here, because only users of flax get here

    pairs = [(name, axes or None) for name, axes in rules]
    batch_axes = next((axes for name, axes in rules if name == "batch"), ())
    specs = []
    for argument in arguments:
        if argument.logical_axes is not None:
            specs.append(spmd.logical_to_mesh_axes(argument.logical_axes, pairs) or PartitionSpec())
        elif argument.is_state or argument.is_key or not argument.shape or not batch_axes:
            specs.append(PartitionSpec())
        else:
            specs.append(PartitionSpec(batch_axes))
    return BaselineShardings(tuple(specs), rules)
