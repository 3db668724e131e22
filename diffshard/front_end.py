"""`search` takes a JAX function and a mesh, or devices, and returns the function parallelised.

It is the only file that knows both the search for shardings and that for pipelines.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack, get_args, overload

from jax.sharding import AbstractMesh, Mesh

from cost.base import Hardware
from cost.clusters import Cluster
from diffshard.checks.targets import Target, target_for
from diffshard.comparison.checked_search import Check, checks_of, plan_by_compiling, plan_by_shardy
from diffshard.comparison.compare import TIMEOUT_S
from diffshard.live_progress import ProgressDisplay
from diffshard.pipelines.base import Pipeline
from diffshard.pipelines.options import checked_cluster, pipeline_options, with_remat
from diffshard.pipelines.pipelined_function import PipelinedFunction
from diffshard.pipelines.plan import PipelinePlan
from diffshard.plans.base import Executor
from diffshard.plans.documents import checked_folder
from diffshard.processes import errors_for_all
from diffshard.sharding_search.advising import find_with_advice
from diffshard.sharding_search.logical_axes import checked_rules
from diffshard.sharding_search.mesh_candidates import Devices, LevelNames, mesh_candidates, mesh_of_all
from diffshard.sharding_search.number_formats import Formats
from diffshard.sharding_search.option_pairs import check_pairs
from diffshard.sharding_search.options import (
    Remat,
    State,
    hardware_for,
    in_one_form,
    options_of,
)
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import plan_of_first_process, plan_or_search, plan_store
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.shape_search import plan_of_best_shape
from diffshard.sharding_search.step_objective import StepCost
from diffshard.solving.solve import SolverOptions, solver_options


@overload
def search(
    fn: Callable[..., Any], mesh: Cluster | None = None, *, pipeline: Pipeline, **options: Any
) -> PipelinedFunction[PipelinePlan]: ...


@overload
def search(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh | Cluster | None = None,
    *,
    pipeline: None = None,
    **options: Any,
) -> PlannedFunction[Plan]: ...


def search(  # pyright: ignore[reportInconsistentOverload]  # the overloads leave out what is alike
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh | Cluster | None = None,
    *,
    devices: Devices | None = None,
    hardware: Hardware | str | None = None,
    memory_limit_bytes: float | None = None,
    remat: Remat | None = None,
    state: State | None = None,
    in_shardings: Any = None,
    logical_axis_rules: Sequence[tuple[str, Any]] | None = None,
    donate_argnums: int | Sequence[int] | None = (),
    static_argnums: int | Sequence[int] | None = (),
    donate_argnames: str | Sequence[str] | None = (),
    static_argnames: str | Sequence[str] | None = (),
    executor: Executor | None = None,
    check: Check | Sequence[Check] | None = None,
    target: Target | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    start: Plan | PipelinePlan | None = None,
    pipeline: Pipeline | None = None,
    objective: StepCost | None = None,
    formats: Formats | None = None,
    progress: ProgressDisplay = "terminal",
    **options: Unpack[SolverOptions],
) -> PlannedFunction[Plan] | PipelinedFunction[PipelinePlan]:
    """Finds how to run a function on a mesh. Like `jax.jit` it returns a callable, and searches when that is called.

    >>> step = diffshard.search(train_step, mesh)
    >>> print(step.plan(state, batch))
    >>> state, loss = step(state, batch)

    A result with the structure and shapes of an argument, such as a training state, is assumed to replace it in the
    next call: it comes out sharded as the argument goes in.

    With `jax.distributed`, each process that owns devices of the mesh calls the same function with the same arguments.
    The first of them searches, and the others wait for its plan. They raise `ProcessesError` if they ask for different
    things or one of them asks for something impossible, and the first one's error, such as `InfeasibleError`, in all.
    Only its `time_limit_s` and `cache` are used.

    Args:
      fn: a function, usually a whole training step; arguments and results are pytrees of arrays. Leaves that are no
        arrays, such as functions, are constants; so are numbers in Equinox's modules.
      mesh: a `Mesh`, or an `AbstractMesh` to plan for devices that are not here. A `Cluster` counts as `devices`.
      devices: in place of a mesh, whose shape is then found as well: how many, for devices that are not here; JAX
        devices, such as `jax.devices()`; or a `Cluster` of one kind. Each physically distinct shape of up to three axes
        is searched, and `plan.shapes` says what became of it; the plan's bound holds for all of them. The first plan
        chooses the mesh (`plan.mesh`), and plans for other arguments are for the same one.
      hardware: how fast the devices compute and communicate: a `Hardware`, the name of a preset, or None for the preset
        of the mesh's devices. With `devices` it cannot be a `Hardware`, whose links belong to axes.
      memory_limit_bytes: of each device; None takes the memory of the hardware.
      remat: "search" also chooses what is kept from the forward pass for the backward pass, and what is computed again
        there: less memory for more arithmetic. It takes several searches, one for each choice that is tried. The bound
        holds for all choices. "offload" may also copy arrays to pinned memory of the host until the backward pass reads
        them; the hardware has to say how fast (`Hardware.host_memory_bytes_per_s`). None keeps everything. What the
        function wraps in `jax.checkpoint` stays as it is.
      state: "offload" also lets arrays of the state be in pinned memory of the host between steps, where the memory
        limit asks for it: those that nothing reads but their own update, as an optimiser's moments. They are copied to
        the device and back in each step, beside the backward pass, and `plan.shard` puts them there; the hardware has
        to say how fast, as for `remat`. It does not go with `pipeline`, `formats` and `check="compile"`. None keeps
        the state on devices.
      in_shardings: shardings to keep: for each positional argument a pytree prefix of `PartitionSpec`, `NamedSharding`
        or None (free); None leaves all free. With `devices` specs name levels of hosts: "hosts", "local" and "mixed"
        stand for all axes of the level, and for nothing where a mesh has none. Arguments that carry a `NamedSharding`
        on this mesh keep it, too.
      logical_axis_rules: keeps the partitioning metadata of flax: pairs of a name and the mesh axes (a name, several,
        or None) that split the dimensions of this name, the first of several that fits. Names of mesh axes need no
        rule, so that `()` keeps metadata of mesh axes. Arguments in boxes of linen (`nn.with_partitioning`,
        `nn.with_logical_partitioning`) and nnx variables (`nnx.with_partitioning`) are split so, unless `in_shardings`
        says otherwise; linen's logical constraints inside the function follow the rules, too. None leaves the choice to
        the search, and names are only names: `plan.logical_rules()` says what they would have to mean.
      donate_argnums: positions of arguments whose memory may be used for results, as in `jax.jit`.
      static_argnums: positions of arguments that are compile-time constants, as in `jax.jit`.
      donate_argnames: the same as `donate_argnums` by name. It makes no difference whether a call gives such an
        argument by position or by keyword.
      static_argnames: the same as `static_argnums` by name.
      executor: how the planned function runs; the plan says which it is. With "program" every device runs an explicit
        program (one `jax.shard_map`) whose collectives are the plan's. With "constraints" XLA partitions it, told by a
        sharding constraint at every place that the plan names; it does not always follow them, and what it is known to
        compute wrongly is not planned, and refused in plans from elsewhere. With "propagation" XLA's partitioner is
        told the shardings of arguments and results only, as most plans by hand run; nobody knows the inside, and so the
        first call is held against the program, as by `check="numbers"`. None takes "program" unless an operation cannot
        be part of one (an `io_callback`, a `shard_map` that checks what varies), else "constraints".
        Operations that could be split but have no form on one device's part run whole in a program; notes name them.
      check: which compiler judges the plan, None for none, or "numbers", or both in a tuple. "shardy" runs Shardy's
        partitioner, which takes a second or more, and notes in the plan where it would send other bytes. "compile"
        compiles the found plan under each executor, and baselines, in processes of their own; it returns the one
        whose program is the fastest by its timeline and fits the memory limit by XLA's number, with a table of all in
        `plan.comparison`. That takes a few minutes, and needs the extra `gpu-compile`. With `remat` it goes on to
        choices that keep less until one fits. "numbers" runs the first call for each set of shapes in two ways: as its
        executor runs it, and as the program, or on one device if the executor is the program. Results that differ by
        more than rounding raise `NumbersError`; the arguments, donated ones too, can still be used then. That call
        compiles two functions, holds the results twice and donated arguments until its end, and runs `jax.debug.print`
        twice; one device needs room for all arguments and results.
      target: for `check="compile"` what is compiled for, as in `compare`; None takes the hardware's.
      cache: a folder that keeps plans, for the next start of the same program: a plan that was searched for the same
        function, shapes, shardings, mesh axes, hardware and options is taken from there. Constants that the function
        closes over may have other values. None keeps nothing.
      start: an earlier plan of the function. Where it was made for the same traced function, mesh, hardware, memory
        limit and options, whichever solver found it, it is taken as it is; `cache` does not keep it. Else the search
        begins with its shardings, as far as the mesh has their axes, and finds nothing slower than these. The plan may
        be loaded, be of other sizes of the mesh or arrays, and of a function that was edited: one with other operations
        is searched from the beginning.
      pipeline: cuts a training step into stages on parts of the devices, which may be of several kinds, and chooses the
        stages, their meshes and shardings, the number of micro-batches and the schedule together. None runs all of the
        function on all devices. The result is a `PipelinedFunction`. `in_shardings` and `logical_axis_rules` then name
        the axes "x" and "y" of the stages' meshes: hosts and the devices in each, or parts of one host; an axis that a
        mesh does not have counts as one device. `remat` adds to `Pipeline.residuals`. Compilers of `check` judge the
        programs of the stages one by one, and "numbers" holds the first call against one device.
      objective: what is made small in place of the seconds of a step: a function that takes a `RelaxedStep` (seconds
        of arithmetic and of each link, bytes over time) and returns a scalar, such as joules or a price. JAX
        differentiates it. The plan's bound on it holds where it is convex in the fields of the step. With
        `devices` the shape of the mesh with the least objective is taken; the objective then cannot read axes by name.
        It does not go with `remat`, `check="compile"`, `cache` and `pipeline`.
      formats: rounds products to float8, where that gains time, as far as the loss allows: a `Formats`, which says how
        far and has calls of the step to measure it by. Shardings and formats are searched together, and the plan's
        bound holds for all of both. It may also send partial sums in fewer bits (`Formats.sums`), keep arrays for the
        backward pass in fewer (`Formats.kept`), and exchange activations in fewer (`Formats.exchanges`). None leaves
        all numbers as they are. It takes the executor "program", hardware with a rate for the formats of products, and
        none of `remat`, `check`, `objective` and `pipeline`. With `devices` each shape of the mesh is such a search,
        which measures anew. A plan of `start` is taken as it is if its formats were chosen within the same limit of the
        same groups, whatever the calls.
      progress: "terminal" shows the best cost and the bound in one live line on stderr once a search lasts over two
        seconds, but only on a terminal; "none" shows nothing. `plan(..., progress=...)` takes a function instead, but
        not with `pipeline`.
      **options: `solver`, `time_limit_s` and `key` of `SolverOptions`. The time limit is that of all problems that the
        search solves together; of several shapes of the mesh each has an equal part of what is left. Tracing and
        listing strategies come before and are not limited: milliseconds for each operation, longer on meshes of four
        and five axes. With `devices` that holds for the first shape only. With `pipeline` the limit is that of the
        whole search, tracing included. After it go on: tracing itself; for ten seconds the search for a first pipeline;
        and the solver for 0.1 s in each stage and program that is still to be planned.

    Raises:
      TypeError, ValueError: an argument breaks a rule; the error names it and its value.
      RuntimeError: the compiler of the target is not installed; names the extra that brings it.
    """
    check_pairs(locals())
    compiler, checks_numbers = checks_of(check)
    of_both: dict[str, Any] = {  # searches, for shardings and for pipelines
        **solver_options(options, function=search),
        "in_shardings": in_shardings,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "executor": executor,
        "start": start,
        "progress": progress,
        "checks_numbers": checks_numbers,
    }
    if pipeline is not None:
        if (mesh is None) == (devices is None):
            given = "neither" if mesh is None else "both"
            raise TypeError(f"Give a `Cluster` or `devices` together with `pipeline`, not {given}.")
        cluster = checked_cluster(mesh if devices is None else devices, hardware)
        kinds = [hosts.device for hosts in cluster.kinds]
        judge, judged_by = _judge(compiler, check, target, kinds, ("program", "constraints"))
        asked_for = pipeline_options(
            fn,
            cluster,
            with_remat(pipeline, remat),
            None,
            memory_limit_bytes=memory_limit_bytes,
            logical_axis_rules=logical_axis_rules,
            cache=None if cache is None else checked_folder(cache),
            judge=judge,
            judged_by=judged_by,
            **in_one_form(of_both),
        )
        return PipelinedFunction(asked_for, PipelinePlan)
    if isinstance(mesh, Cluster) and devices is None:
        mesh, devices = None, mesh
    with errors_for_all(mesh if devices is None else mesh_of_all(devices), "search a plan"):
        if (mesh is None) == (devices is None) or isinstance(mesh, Cluster):
            given = "neither" if mesh is None else "both"
            raise TypeError(f"Give `mesh` or `devices`, not {given}: a mesh, or devices whose mesh is to be found.")
        candidates = None if devices is None else mesh_candidates(devices, hardware)
        if candidates is not None:
            mesh, hardware = candidates[0]
        assert mesh is not None
    with errors_for_all(mesh, "search a plan"):
        priced_for = hardware_for(hardware, mesh)
        names = tuple(mesh.axis_names) if candidates is None else LevelNames.names
        rules = None if logical_axis_rules is None else checked_rules(logical_axis_rules, names)
        judge, judged_by = _judge(compiler, check, target, [priced_for], get_args(Executor))
        find = functools.partial(find_with_advice, functools.partial(plan_of_best_shape, judge))
        if cache is not None:
            find = functools.partial(plan_or_search, plan_store(checked_folder(cache)), find)
        asked_for = options_of(
            fn,
            mesh,
            priced_for,
            memory_limit_bytes,
            logical_axis_rules=(rules or ()) if candidates is None else (),
            metadata_rules=rules,
            judged_by=judged_by,
            candidates=candidates or (),
            names_levels=candidates is not None,
            remat=remat,
            state=state,
            objective=objective,
            formats=formats,
            **of_both,
        )
    return PlannedFunction(asked_for, functools.partial(plan_of_first_process, find))


def _judge(
    compiler: str | None,
    check: Any,
    target: Target | str | None,
    kinds: Sequence[Hardware],
    executors: Sequence[Executor],
) -> tuple[Callable[[PlanRequest], Plan] | None, str]:
    """Returns a function that finds plans which a compiler judges, and the compiler with its targets in words.

    Args:
      compiler: which one judges plans; None for none.
      target: what "compile" compiles for; None takes that of the hardware.
    """
    if compiler == "compile":
        targets = {hardware.name: target_for(target, hardware) for hardware in kinds}
        for compiled_for in targets.values():
            compiled_for.check()

        def judge(request: PlanRequest) -> Plan:
            return plan_by_compiling(targets[request.options.hardware.name], TIMEOUT_S, request, executors)

        return judge, "compile for " + " and ".join(dict.fromkeys(map(str, targets.values())))
    if target is not None:
        raise ValueError(f'`target` is for `check="compile"`, not {check!r}.')
    return (plan_by_shardy, compiler) if compiler == "shardy" else (None, "")
