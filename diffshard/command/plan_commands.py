"""`diffshard search` and `diffshard show`: a plan is searched, printed, and written as JSON or as a page."""

import argparse
import os
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, AxisType

from cost.presets import preset
from diffshard.base import InfeasibleError, PlanError
from diffshard.bilevel_search.plans import file as bilevel_file
from diffshard.bilevel_search.plans.plan import BilevelPlan
from diffshard.command.arguments import UsageError, check_solver, check_writable, named_function
from diffshard.command.terminal import FailedError, say_written, show_progress
from diffshard.files import write_whole
from diffshard.plans import file
from diffshard.plans.documents import BILEVEL, kind_of, read
from diffshard.plans.formats import format_s
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction
from diffshard.sharding_search.search import search


def search_plan(options: argparse.Namespace) -> int:
    """Searches a plan, writes it to the files of `--output` and `--html`, prints it, and returns the exit code."""
    check_solver(options.solver)
    check_writable("--output", options.output)
    check_writable("--html", options.html)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # a search needs no accelerator, and JAX would reserve its memory
    try:
        hardware = preset(options.hardware, options.mesh)
    except ValueError as error:
        raise UsageError(f"--hardware: {error}") from None
    function = named_function("MODULE:FUNCTION", options.function)
    args = _arguments_of(named_function("--args", options.args))
    mesh = AbstractMesh(
        tuple(options.mesh.values()), tuple(options.mesh), axis_types=(AxisType.Auto,) * len(options.mesh)
    )
    try:
        planned_function = search(
            function, mesh, hardware=hardware, memory_limit_bytes=options.memory_limit, solver=options.solver,
            time_limit_s=options.time_limit, key=options.seed, donate_argnums=options.donate,
            check=options.check, target=options.target,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:  # no compiler, or no target for the hardware
        raise UsageError(str(error)) from None
    plan = _plan(planned_function, args, options.function)
    if options.output:
        plan.save(options.output)
        say_written(options.output)
    if options.html:
        write_whole(options.html, plan.html())
        say_written(options.html)
    print(plan)
    return 0


def _plan(planned_function: PlannedFunction[Plan], args: tuple[Any, ...], name: str) -> Plan:
    with show_progress(f"searching {name}", format_s) as progress:
        try:
            return planned_function.plan(*args, progress=progress)
        except (InfeasibleError, PlanError):
            raise
        except Exception as error:
            _fail(f"{name} could not be planned", error)


def show_plan(options: argparse.Namespace) -> int:
    """Prints a saved plan, or writes it as a page, and returns the exit code."""
    check_writable("--html", options.html)
    try:
        document = read(options.plan)
    except OSError as error:
        raise UsageError(f"{options.plan}: {error.strerror or error}") from None
    if kind_of(document) == BILEVEL:
        plan = bilevel_file.from_json(document, options.plan, BilevelPlan)
    else:
        plan = file.from_json(document, options.plan, Plan)
    if options.html:
        write_whole(options.html, plan.html())
        say_written(options.html)
    else:
        print(plan)
    return 0


def _arguments_of(function: Callable[[], Any]) -> tuple[Any, ...]:
    """Returns what a function without parameters returns, as shapes if these can be result without running it."""
    try:
        result = jax.eval_shape(function)
    except TypeError:  # it returns shapes itself, or Python values for static arguments
        try:
            result = function()
        except Exception as error:
            _fail("--args failed", error)
    except Exception as error:
        _fail("--args failed", error)
    return tuple(result) if type(result) in (tuple, list) else (result,)


def _fail(what: str, error: Exception) -> NoReturn:
    """Prints the traceback, which says where the user's code failed; the message says what could not be done."""
    traceback.print_exception(error)
    raise FailedError(f"{what}: {type(error).__name__}: {error}") from None
