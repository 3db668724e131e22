"""The command `diffshard`: search a plan, show one, solve a contest's instance.

Results go to stdout and to files, progress and errors to stderr. Exit codes: 0, 1 for infeasible or failed, 2 for
usage.
"""

import argparse
import io
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, AxisType

from cost.presets import PRESET_NAMES, preset
from diffshard.base import InfeasibleError, PlanError, Solution
from diffshard.bilevel_search import plan_file as bilevel_file
from diffshard.bilevel_search import plan_page as bilevel_page
from diffshard.command.progress import shown
from diffshard.command.words import (
    UsageError,
    check_solver,
    check_writable,
    indices,
    mesh_axes,
    named_function,
    num_bytes,
    positive_seconds,
)
from diffshard.plans import file
from diffshard.plans.documents import BILEVEL, kind_of, read, write_whole
from diffshard.plans.formats import format_s
from diffshard.plans.page import save_page
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.search import search
from diffshard.solving import contest
from diffshard.solving.solve import solve, solver_names
from diffshard.solving.violations import violations


class _FailedError(Exception):
    """The work could not be done; the message is all that a user needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these words (None: the process's) and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except UsageError as error:
        print(f"diffshard {options.command}: {error}", file=sys.stderr)
        return 2
    except (_FailedError, InfeasibleError, PlanError) as error:
        print(f"diffshard {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"diffshard {options.command}: interrupted before there was anything to show", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `diffshard show plan.json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diffshard", description="Automatic parallelisation for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("search", help="find how to run a function on a mesh; no devices are needed")
    one.add_argument("function", metavar="MODULE:FUNCTION", help="the function: a whole training step, say")
    one.add_argument(
        "--args",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function without parameters that returns its arguments",
    )
    one.add_argument("--mesh", required=True, type=mesh_axes, metavar="AXIS=N[,AXIS=N...]", help="slowest axis first")
    one.add_argument("--hardware", required=True, metavar="NAME", help=", ".join(PRESET_NAMES))
    one.add_argument("--memory-limit", type=num_bytes, metavar="SIZE", help="of a device, such as 80GiB")
    one.add_argument(
        "--donate", type=indices, default=(), metavar="I[,I...]", help="arguments whose memory may be reused"
    )
    one.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
    one.add_argument("--html", metavar="FILE", help="write the plan as a page")
    _add_solver_options(one)
    one.set_defaults(run=_search)

    two = commands.add_parser("show", help="print a plan that was saved, of `search` or of `bilevel`")
    two.add_argument("plan", metavar="PLAN.json")
    two.add_argument("--html", metavar="FILE", help="write it as a page instead")
    two.set_defaults(run=_show)

    three = commands.add_parser("solve", help="solve an instance in the format of the IOPDDL contest")
    three.add_argument("instance", metavar="INSTANCE.json[.gz]")
    three.add_argument("--output", metavar="FILE", help="write the solution there instead of stdout")
    three.add_argument(
        "--plot", metavar="FILE", help="draw cost and bound over time (.png, .svg, .pdf); needs matplotlib"
    )
    _add_solver_options(three)
    three.set_defaults(run=_solve)
    return parser


def _add_solver_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time-limit", type=positive_seconds, metavar="SECONDS", help="for the solver")
    parser.add_argument("--solver", metavar="NAME", help=f"{', '.join(solver_names())}")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


# The three commands.


def _search(options: argparse.Namespace) -> int:
    check_solver(options.solver)
    check_writable("--output", options.output)
    check_writable("--html", options.html)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # planning touches no accelerator and shall not take its memory
    try:
        hardware = preset(options.hardware, options.mesh)
    except ValueError as error:
        raise UsageError(f"--hardware: {error}") from None
    function = named_function("MODULE:FUNCTION", options.function)
    args = _arguments(named_function("--args", options.args))
    mesh = AbstractMesh(
        tuple(options.mesh.values()), tuple(options.mesh), axis_types=(AxisType.Auto,) * len(options.mesh)
    )
    searched = search(
        function, mesh, hardware=hardware, memory_limit_bytes=options.memory_limit, solver=options.solver,
        time_limit_s=options.time_limit, key=options.seed, donate_argnums=options.donate,
    )  # fmt: skip
    with shown(f"searching {options.function}", format_s) as progress:
        try:
            plan = searched.plan(*args, progress=progress)
        except (InfeasibleError, PlanError):
            raise
        except Exception as error:
            _fail(f"{options.function} could not be planned", error)
    if options.output:
        plan.save(options.output)
        _say_written(options.output)
    if options.html:
        save_page(plan, options.html)
        _say_written(options.html)
    print(plan)
    return 0


def _arguments(function: Callable[[], Any]) -> tuple[Any, ...]:
    """What a function without parameters returns, as shapes where that can be had without computing anything."""
    try:
        found = jax.eval_shape(function)
    except TypeError:  # it returns shapes itself, or Python values for static arguments
        try:
            found = function()
        except Exception as error:
            _fail("--args failed", error)
    except Exception as error:
        _fail("--args failed", error)
    return tuple(found) if type(found) in (tuple, list) else (found,)


def _fail(what: str, error: Exception) -> NoReturn:
    """The user's own traceback says where; the last line what."""
    traceback.print_exception(error)
    raise _FailedError(f"{what}: {type(error).__name__}: {error}") from None


def _show(options: argparse.Namespace) -> int:
    check_writable("--html", options.html)
    try:
        document = read(options.plan)
    except OSError as error:
        raise UsageError(f"{options.plan}: {error.strerror or error}") from None
    if kind_of(document) == BILEVEL:
        plan = bilevel_file.from_json(document, options.plan)
        if options.html:
            bilevel_page.save_page(plan, options.html)
    else:
        plan = file.from_json(document, options.plan, Plan)
        if options.html:
            save_page(plan, options.html)
    if options.html:
        _say_written(options.html)
    else:
        print(plan)
    return 0


def _say_written(path: str) -> None:
    print(f"wrote {path}", file=sys.stderr)


def _solve(options: argparse.Namespace) -> int:
    check_solver(options.solver)
    check_writable("--output", options.output)
    check_writable("--plot", options.plot)
    if options.output and options.plot and os.path.realpath(options.output) == os.path.realpath(options.plot):
        raise UsageError(f"--output and --plot are the same file, {options.plot}")
    figure = _figure(options.plot) if options.plot else None
    try:
        problem = contest.read(options.instance)
    except OSError as error:
        raise UsageError(f"{options.instance}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    with shown(f"solving {options.instance}", lambda cost: f"{cost:,.0f}") as progress:
        more = {} if options.solver is None else {"solver": options.solver}
        start = time.perf_counter()
        try:
            found = solve(problem, time_limit_s=options.time_limit, key=options.seed, progress=progress, **more)
        except ValueError as error:
            raise UsageError(str(error)) from None
    text = json.dumps(_solution(found, time.perf_counter() - start), allow_nan=False) + "\n"
    if options.output:
        try:
            write_whole(options.output, text)
        except OSError as error:  # the search is not lost
            sys.stdout.write(text)
            raise _FailedError(f"--output {options.output}: {error.strerror or error}") from None
    else:
        sys.stdout.write(text)
    if figure is not None:
        try:
            _draw(figure, found, options)
        except OSError as error:
            raise _FailedError(f"--plot {options.plot}: {error.strerror or error}") from None
    if not found.feasible:
        print(f"{found.status}: the best choice exceeds the limit by {found.excess:,.0f}", file=sys.stderr)
        print(*violations(problem, found.choice), sep="\n", file=sys.stderr)
        return 1
    bound = f"lower bound {found.lower_bound:,.0f}" if math.isfinite(found.lower_bound) else "no bound"
    gap = f", gap {found.gap:.2%}" if math.isfinite(found.gap) else ""
    print(f"{found.status}: cost {found.cost:,.0f}, {bound}{gap}", file=sys.stderr)
    return 0


def _solution(found: Solution, seconds: float) -> dict[str, Any]:
    bound = found.lower_bound  # an integer where it is the cost itself: a float could be above it
    return {
        "choice": [int(strategy) for strategy in found.choice],
        "cost": _number(found.cost),
        "lower_bound": _number(min(bound, found.cost) if found.feasible else bound),
        "feasible": bool(found.feasible),
        "excess": float(found.excess),
        "status": found.status,
        "seconds": seconds,
    }


def _number(number: float) -> float | None:
    """Whole numbers as integers, None for infinities."""
    if not math.isfinite(number):
        return None
    return int(number) if float(number).is_integer() else float(number)


def _figure(path: str) -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UsageError("--plot needs matplotlib: pip install 'diffshard[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in known:
        raise UsageError(f"--plot {path}: the name must end in one of {', '.join(f'.{k}' for k in sorted(known))}")
    return figure


def _draw(figure: Any, found: Solution, options: argparse.Namespace) -> None:
    axes, path = figure.add_subplot(), options.plot
    for column, label in ((1, "cost of the best choice"), (2, "lower bound")):
        points = [(entry[0], entry[column]) for entry in found.history if math.isfinite(entry[column])]
        if points:
            axes.step(*zip(*points, strict=True), where="post", marker=".", label=label)
    bounds = [bound for _, _, bound in found.history if math.isfinite(bound)]
    if found.feasible and bounds and found.cost > bounds[-1]:
        gap = found.cost - bounds[-1]
        axes.set_ylim(bounds[-1] - 2 * gap, found.cost + 2 * gap)  # the end, not the first choices, is what matters
    axes.set_title(os.path.basename(options.instance))
    axes.set_xlabel("seconds")
    axes.set_ylabel("cost")
    if axes.lines:
        axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=os.path.splitext(path)[1][1:].lower())
    write_whole(path, drawn.getvalue())


if __name__ == "__main__":
    sys.exit(main())
