"""`diffshard solve`: an instance of the IOPDDL contest is solved, and the search may be plotted."""

import argparse
import io
import json
import math
import os
import sys
import time
from typing import Any

from cost.base import Problem
from cost.evaluation import format_excess, violations
from diffshard.base import Solution
from diffshard.command.arguments import FailedError, UsageError, check_solver, check_writable, show_progress
from diffshard.files import write_whole
from diffshard.solving import contest
from diffshard.solving.solve import solve


def solve_instance(options: argparse.Namespace) -> int:
    """Solves an instance, writes the solution and perhaps a plot, and returns the exit code."""
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
    solution, seconds = _solve(problem, options)
    _write_solution(solution, seconds, options.output)
    if figure is not None:
        try:
            _draw(figure, solution, options)
        except OSError as error:
            raise FailedError(f"--plot {options.plot}: {error.strerror or error}") from None
    return _say_result(problem, solution)


def _solve(problem: Problem, options: argparse.Namespace) -> tuple[Solution, float]:
    """Returns the solution, and how many seconds it took."""
    with show_progress(f"solving {options.instance}", lambda cost: f"{cost:,.0f}") as progress:
        solver = {} if options.solver is None else {"solver": options.solver}
        start = time.perf_counter()
        try:
            solution = solve(problem, time_limit_s=options.time_limit, key=options.seed, progress=progress, **solver)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return solution, time.perf_counter() - start


def _write_solution(solution: Solution, seconds: float, output: str | None) -> None:
    text = json.dumps(_document(solution, seconds), allow_nan=False) + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    try:
        write_whole(output, text)
    except OSError as error:  # what minutes of search have found goes to stdout instead
        sys.stdout.write(text)
        raise FailedError(f"--output {output}: {error.strerror or error}") from None


def _say_result(problem: Problem, solution: Solution) -> int:
    """Prints on stderr how good a solution is, and returns the exit code."""
    if not solution.feasible:
        found = "" if solution.status == "infeasible" else " without a feasible choice"
        excess = format_excess(solution.excess)
        print(f"{solution.status}{found}: the best choice exceeds the limit by {excess}", file=sys.stderr)
        print(*violations(problem, solution.choice), sep="\n", file=sys.stderr)
        return 1
    bound = f"lower bound {solution.lower_bound:,.0f}" if math.isfinite(solution.lower_bound) else "no bound"
    gap = f", gap {solution.gap:.2%}" if math.isfinite(solution.gap) else ""
    print(f"{solution.status}: cost {solution.cost:,.0f}, {bound}{gap}", file=sys.stderr)
    return 0


def _document(solution: Solution, seconds: float) -> dict[str, Any]:
    bound = solution.lower_bound  # may be the cost itself: as a float it could be above an integer cost
    return {
        "choice": solution.choice,
        "cost": _number(solution.cost),
        "lower_bound": _number(min(bound, solution.cost) if solution.feasible else bound),
        "feasible": bool(solution.feasible),
        "excess": float(solution.excess),
        "status": solution.status,
        "seconds": seconds,
    }


def _number(number: float) -> float | None:
    """Returns a whole number as an integer, and None for an infinite one."""
    if not math.isfinite(number):
        return None
    return int(number) if float(number).is_integer() else float(number)


def _figure(path: str) -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UsageError("--plot needs matplotlib: `pip install '.[plot]'` in a clone of diffshard") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in formats:
        raise UsageError(f"--plot {path}: the name must end in one of {', '.join(f'.{k}' for k in sorted(formats))}")
    return figure


def _draw(figure: Any, solution: Solution, options: argparse.Namespace) -> None:
    axes, path = figure.add_subplot(), options.plot
    for column, label in ((1, "cost of the best choice"), (2, "lower bound")):
        points = [(entry[0], entry[column]) for entry in solution.history if math.isfinite(entry[column])]
        if points:
            axes.step(*zip(*points, strict=True), where="post", marker=".", label=label)
    bounds = [bound for _, _, bound in solution.history if math.isfinite(bound)]
    if solution.feasible and bounds and solution.cost > bounds[-1]:
        gap = solution.cost - bounds[-1]
        axes.set_ylim(bounds[-1] - 2 * gap, solution.cost + 2 * gap)  # the first choices would hide the end
    axes.set_title(os.path.basename(options.instance))
    axes.set_xlabel("seconds")
    axes.set_ylabel("cost")
    if axes.lines:
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format=os.path.splitext(path)[1][1:].lower())
    write_whole(path, image.getvalue())
