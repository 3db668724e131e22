"""Commands on plans: they are searched, shown, run once, compared, and written as JSON or as a page."""

import argparse
import math
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from cost.base import Hardware
from cost.clusters import Cluster
from cost.presets import preset
from diffshard.base import InfeasibleError, NumbersError, PlanError
from diffshard.bilevel_search.plans import base as bilevel_file
from diffshard.bilevel_search.plans.plan import BilevelPlan
from diffshard.command.arguments import (
    FailedError,
    UsageError,
    check_needs_nothing,
    check_solver,
    check_writable,
    named_function,
    named_value,
    show_progress,
    writing,
)
from diffshard.command.pipeline_options import cluster_of, pipeline_of
from diffshard.comparison.checked_search import Check
from diffshard.comparison.compare import compare
from diffshard.files import write_whole
from diffshard.front_end import search
from diffshard.hardware import load_hardware
from diffshard.pipelines.pipelined_function import PipelinedFunction
from diffshard.pipelines.plan import PipelinePlan
from diffshard.pipelines.plans import consistency as pipeline_file
from diffshard.plans import file
from diffshard.plans.documents import BILEVEL, PIPELINE, kind_of, read
from diffshard.plans.printing import format_s
from diffshard.sharding_search.argument_names import checked_arguments
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction

_DEVICES_FLAG = "xla_force_host_platform_device_count"


def make_devices(options: argparse.Namespace, cluster: Cluster | None) -> None:
    """Sees to it that this process has as many devices as the plan will be for, before JAX makes any."""
    num_devices = options.devices if cluster is None else cluster.num_devices
    if options.mesh:
        num_devices = math.prod(options.mesh.values())
    if "JAX_PLATFORMS" not in os.environ and _DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", num_devices)


def arrays_of(make: Callable[[], Any]) -> tuple[Any, ...]:
    """Returns the arguments of the step, as the function of `--args` makes them."""
    made = make()
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(made)):
        raise UsageError("--check numbers runs the function, so that --args has to return arrays, not shapes")
    return tuple(made) if type(made) in (tuple, list) else (made,)


def run_once(plan: Plan, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Runs a plan once, and says that the results are right."""
    num_devices = math.prod(plan.mesh_axes.values())
    devices = jax.devices()
    if len(devices) < num_devices:
        raise FailedError(
            f"--check numbers needs {num_devices} devices, and there are {len(devices)}. For host devices set "
            f"JAX_PLATFORMS=cpu XLA_FLAGS=--{_DEVICES_FLAG}={num_devices}."
        )
    grid = np.array(devices[:num_devices]).reshape(tuple(plan.mesh_axes.values()))
    mesh = Mesh(grid, tuple(plan.mesh_axes), axis_types=(AxisType.Auto,) * grid.ndim)
    try:
        plan.apply(function, mesh, check="numbers")(*args)
    except NumbersError as error:
        raise FailedError(str(error)) from None
    print(f"numbers  right: by {plan.executor} the first call gives what another run gives, but for rounding")


def search_plan(options: argparse.Namespace) -> int:
    """Searches a plan, prints it, writes it to the files of `--output` and `--html`, and returns the exit code."""
    check_solver(options.solver)
    check_writable("--output", options.output)
    check_writable("--html", options.html)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # a search needs no accelerator, and JAX would reserve its memory
    pipeline, cluster = pipeline_of(options), cluster_of(options)
    runs_once = "numbers" in (options.check or ()) and pipeline is None
    if runs_once:
        make_devices(options, cluster)
    mesh, hardware = _mesh_and_hardware(options)
    function = named_function("MODULE:FUNCTION", options.function)
    donated, static = _of_kind("donate", options.donate), _of_kind("static", options.static)
    try:
        by_kind = checked_arguments(function, {"static": (static["static_argnums"], static["static_argnames"])})
    except ValueError as error:
        raise UsageError(str(error)) from None
    make_args = named_function("--args", options.args)
    args = _arguments_of(make_args, by_kind["static"].argnums)
    arrays = arrays_of(make_args) if runs_once else ()
    in_shardings = None if options.in_shardings is None else named_value("--in-shardings", options.in_shardings)
    more: dict[str, Any] = {
        "devices": cluster or options.devices, "hardware": hardware, "memory_limit_bytes": options.memory_limit,
        "solver": options.solver, "time_limit_s": options.time_limit, "key": options.seed,
        "in_shardings": in_shardings, "logical_axis_rules": options.logical_axis_rules, "executor": options.executor,
        **donated, **static,
        "check": _compiler_of(options.check) if runs_once else options.check,
        "target": options.target, "cache": options.cache, "remat": options.remat,
        "state": options.state,
    }  # fmt: skip
    try:
        planned_function: PlannedFunction[Plan] | PipelinedFunction
        if pipeline is None:
            planned_function = search(function, mesh, **more)
        else:
            planned_function = search(function, pipeline=pipeline, **more)
    except (RuntimeError, TypeError, ValueError) as error:  # no compiler, or an option that does not fit another
        raise UsageError(str(error)) from None
    plan = _plan(planned_function, args, options.function)
    print(plan, flush=True)  # first, so that a full disk does not lose what minutes of search have found
    if options.output:
        with writing("--output", options.output):
            plan.save(options.output)
    if options.html:
        with writing("--html", options.html):
            write_whole(options.html, plan.html())
    if runs_once:
        assert isinstance(plan, Plan)
        run_once(plan, function, arrays)
    return 0


def _compiler_of(checks: Sequence[Check]) -> Check | None:
    """Returns the check of a command that is not of numbers."""
    return next((check for check in checks if check != "numbers"), None)


def _mesh_and_hardware(options: argparse.Namespace) -> tuple[AbstractMesh | None, Hardware | str | None]:
    """Returns the mesh, None where its shape is to be found, and its hardware, then by name; None for a cluster's."""
    if (options.hardware is None) == (options.cluster is None):
        raise UsageError("give --hardware, or --cluster, which names the hardware of its hosts")
    if options.cluster is not None:
        return None, None
    try:
        is_file = options.hardware.endswith(".json")
        hardware = load_hardware(options.hardware) if is_file else preset(options.hardware, options.mesh or {})
    except OSError as error:
        raise UsageError(f"--hardware {options.hardware}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"--hardware: {str(error).removesuffix(' Or give a `Hardware`.')}") from None
    if options.mesh is None:
        return None, hardware if is_file else options.hardware
    types = (AxisType.Auto,) * len(options.mesh)
    return AbstractMesh(tuple(options.mesh.values()), tuple(options.mesh), axis_types=types), hardware


def _plan(
    planned_function: PlannedFunction[Plan] | PipelinedFunction, args: tuple[Any, ...], name: str
) -> Plan | PipelinePlan:
    with show_progress(f"searching {name}", format_s) as progress:
        try:
            if isinstance(planned_function, PipelinedFunction):
                return planned_function.plan(*args)
            return planned_function.plan(*args, progress=progress)
        except (InfeasibleError, PlanError):
            raise
        except TimeoutError as error:
            raise FailedError(str(error)) from None
        except Exception as error:
            _fail(f"{name} could not be planned", error)


def show_plan(options: argparse.Namespace) -> int:
    """Prints a saved plan, or writes it as a page, and returns the exit code."""
    check_writable("--html", options.html)
    plan = _read(options.plan)
    if options.html:
        with writing("--html", options.html):
            write_whole(options.html, plan.html())
    else:
        print(plan)
    return 0


def diff_plans(options: argparse.Namespace) -> int:
    """Prints what differs between two saved plans of one kind, and returns the exit code."""
    plan, other = _read(options.plan), _read(options.other)
    if isinstance(plan, PipelinePlan) and isinstance(other, PipelinePlan):
        print(plan.diff(other) or "Both plans are the same, but for how they were found.")
    else:
        print(_plan_of_search(options.plan).diff(_plan_of_search(options.other)))
    return 0


def compare_plans(options: argparse.Namespace) -> int:
    """Compiles saved plans of a function, prints them side by side, and returns the exit code."""
    plans = {path: _plan_of_search(path) for path in dict.fromkeys(options.plans)}
    first = next(iter(plans.values()))
    for path, plan in plans.items():
        if plan.mesh_axes != first.mesh_axes:
            raise UsageError(f"{path} is for the mesh {dict(plan.mesh_axes)}, others for {dict(first.mesh_axes)}")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    function = named_function("MODULE:FUNCTION", options.function)
    args = _arguments_of(named_function("--args", options.args), first.static_argnums)
    axes = first.mesh_axes
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    try:
        print(compare(function, mesh, *args, plans=plans, target=options.target))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return 0


def _read(path: str) -> Plan | PipelinePlan | BilevelPlan:
    """Reads a plan of any kind.

    Raises:
      UsageError: the file cannot be read.
      PlanError: it is no plan.
    """
    try:
        document = read(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if kind_of(document) == BILEVEL:
        return bilevel_file.from_json(document, path, BilevelPlan)
    if kind_of(document) == PIPELINE:
        return pipeline_file.from_json(document, path, PipelinePlan)
    return file.from_json(document, path, Plan)


def _plan_of_search(path: str) -> Plan:
    plan = _read(path)
    if not isinstance(plan, Plan):
        raise UsageError(
            f"{path} is a plan of another kind; plans of `search` are compared on one mesh, or as pipelines"
        )
    return plan


def _of_kind(kind: str, arguments: Sequence[int | str]) -> dict[str, tuple[Any, ...]]:
    """Returns the options of `search` for arguments of a kind that are given by number or name."""
    numbers, names = (tuple(a for a in arguments if isinstance(a, form)) for form in (int, str))
    return {f"{kind}_argnums": numbers, f"{kind}_argnames": names}


def _arguments_of(function: Callable[[], Any], static: Sequence[int]) -> tuple[Any, ...]:
    """Returns the results of a function without parameters, as shapes if these can be found without running it.

    Arguments at positions of `static` are the values themselves.
    """
    values: dict[int, Any] = {}

    def arrays() -> Any:
        made = function()
        if not static or type(made) not in (tuple, list):
            return made
        values.update({i: made[i] for i in static if i < len(made)})
        return tuple(0 if i in values else argument for i, argument in enumerate(made))

    check_needs_nothing("--args", function)
    try:
        result = jax.eval_shape(arrays)
    except TypeError:  # it returns shapes itself, or Python values for static arguments
        try:
            result = function()
        except Exception as error:
            _fail("--args failed", error)
    except Exception as error:
        _fail("--args failed", error)
    result = tuple(result) if type(result) in (tuple, list) else (result,)
    for position, argument in enumerate(result):
        if isinstance(argument, str | bytes) and position not in static:
            raise UsageError(
                f"--args gives {argument!r} as argument {position}, which is no array; or add --static {position}"
            )
    return tuple(values.get(i, argument) for i, argument in enumerate(result))


def _fail(what: str, error: Exception) -> NoReturn:
    """Prints the traceback, which says where the user's code failed; the message says what could not be done."""
    traceback.print_exception(error)
    raise FailedError(f"{what}: {type(error).__name__}: {error}") from None
