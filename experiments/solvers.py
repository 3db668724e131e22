"""Every solver against every other at equal time, on sharding problems and on instances of the IOPDDL contest.

    python -m experiments.solvers [--seconds 10] [--problems "gpt 4" G] [--solvers gradient exact] [--quick]
    python -m experiments.solvers --exact [--seconds 60]

With --exact, the default solver beside HiGHS alone: their costs, lower bounds, gaps and seconds.

All get the presolved problem and the same seconds, presolve and compilation included, one after the other in one
process. "ratio" is a cost as a ratio to the least that any of them found, "bound" a lower bound as a ratio to the same.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.sharding import AbstractMesh

from cost.base import Problem
from diffshard.base import Solution
from diffshard.front_end import search
from diffshard.sharding_search.tracing import space_of, trace_function
from diffshard.solving import contest
from diffshard.solving.solve import solve, solver_names
from experiments.host_devices import AXIS_NAMES
from experiments.models import gpt, mlp
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table

INSTANCES = Path(__file__).resolve().parents[2] / "shared" / "data" / "iopddl"
NEAR = 0.01  # of the final cost
ORACLES = ("exhaustive",)  # of a few nodes only


class SolverRun(NamedTuple):
    """One solver's answer to one problem.

    Attributes:
      problem, solver: their names.
      solution: None where the solver does not take the problem.
      seconds: until it ended.
      refusal: why the solver does not take the problem, else empty.
    """

    problem: str
    solver: str
    solution: Solution | None
    seconds: float
    refusal: str = ""


def sharding_problem(model: Model, shape: Sequence[int]) -> Problem:
    """Returns the problem behind the plan of a training step on a mesh of H100s."""
    mesh = AbstractMesh(tuple(shape), AXIS_NAMES[len(shape)])
    options = search(model.step, mesh, hardware="h100", donate_argnums=0).options
    return space_of(options, trace_function(options, abstract_arguments(model))).problem


def contest_problem(name: str) -> Problem | None:
    """Reads an instance of the contest; returns None where its file is not here."""
    path = INSTANCES / f"{name}.json.gz"
    return contest.read(path) if path.exists() else None


PROBLEMS: dict[str, Callable[[], Problem | None]] = {
    "mlp 4": lambda: sharding_problem(mlp.make(layers=6, batch=512, width=1024), (4,)),
    "mlp 2x2": lambda: sharding_problem(mlp.make(layers=6, batch=512, width=1024), (2, 2)),
    "gpt 4": lambda: sharding_problem(gpt.make(layers=2, width=256, batch=16), (4,)),
    "gpt 2x2": lambda: sharding_problem(gpt.make(layers=2, width=256, batch=16), (2, 2)),
    "gpt 12 layers 2x4": lambda: sharding_problem(gpt.make(layers=12, width=256, batch=16, stack=gpt.unrolled), (2, 4)),
    "G": lambda: contest_problem("G"),
    "V": lambda: contest_problem("V"),
}
QUICK = {"mlp small": lambda: sharding_problem(mlp.make(layers=2, batch=64, width=64), (2,))}


def compare(name: str, problem: Problem, solvers: Sequence[str], seconds: float) -> list[SolverRun]:
    """Runs each solver on a problem, in their order."""
    runs = []
    for solver in solvers:
        start = time.perf_counter()
        try:
            solution, refusal = solve(problem, solver=solver, time_limit_s=seconds), ""
        except ValueError as error:  # too large for this solver
            solution, refusal = None, str(error)
        runs.append(SolverRun(name, solver, solution, time.perf_counter() - start, refusal))
    return runs


def best_cost(runs: Sequence[SolverRun]) -> float:
    """Returns the least feasible cost of the runs, inf if there is none."""
    return min((float(r.solution.cost) for r in runs if r.solution and r.solution.feasible), default=math.inf)


def near_s(solution: Solution) -> float:
    """Returns the seconds until the cost was within 1% of the final one."""
    last = solution.history[-1][1]
    return next(s for s, cost, _ in solution.history if cost <= last + NEAR * abs(last))


def cells(run: SolverRun, best: float) -> tuple[object, ...]:
    """Returns a row of the table: problem, solver, ratio, bound, seconds to 1%, seconds and status."""
    if run.solution is None:
        return (run.problem, run.solver, "not taken", "", "", f"{run.seconds:.1f}", run.refusal[:60])
    solution = run.solution
    bound = f"{solution.lower_bound / best:.4f}" if math.isfinite(solution.lower_bound) and best else ""
    ratio = f"{solution.cost / best:.4f}" if solution.feasible and best else f"infeasible by {solution.excess:.3g}"
    if not best:
        ratio = f"{solution.cost:.4g}"
    near = f"{near_s(solution):.1f}" if solution.feasible else ""
    return (run.problem, run.solver, ratio, bound, near, f"{run.seconds:.1f}", solution.status)


def side_by_side(runs: Sequence[SolverRun]) -> list[tuple[object, ...]]:
    """Returns a row for each run: its cost, the ratio to the least cost, its bound, gap, seconds and status."""
    rows = []
    for run in runs:
        best = best_cost([other for other in runs if other.problem == run.problem])
        solution = run.solution
        if solution is None:
            rows.append((run.problem, run.solver, "not taken", "", "", "", f"{run.seconds:.1f}", run.refusal[:60]))
            continue
        cost = f"{float(solution.cost):.6g}" if solution.feasible else f"infeasible by {solution.excess:.3g}"
        ratio = f"{solution.cost / best:.4f}" if solution.feasible and best else ""
        bound = f"{solution.lower_bound:.6g}" if math.isfinite(solution.lower_bound) else "none"
        gap = f"{solution.gap:.2%}" if math.isfinite(solution.gap) else "none"
        rows.append((run.problem, run.solver, cost, ratio, bound, gap, f"{run.seconds:.1f}", solution.status))
    return rows


def main(arguments: Sequence[str] | None = None) -> list[SolverRun]:
    """Prints the table; returns the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in solver_names() if name not in ORACLES]
    parser.add_argument("--seconds", type=float, help="for each solver and problem; 10, or 1 with --quick")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--solvers", nargs="+", choices=solver_names(), default=names)
    parser.add_argument("--exact", action="store_true", help="the default solver beside HiGHS, with bounds and gaps")
    parser.add_argument("--quick", action="store_true", help="one small problem")
    options = parser.parse_args(arguments)
    solvers = ("gradient", "exact") if options.exact else options.solvers
    default_s = 1.0 if options.quick else 10.0
    seconds = default_s if options.seconds is None else options.seconds
    problems = QUICK if options.quick else {name: PROBLEMS[name] for name in options.problems}
    runs: list[SolverRun] = []
    rows = []
    for name, make in problems.items():
        problem = make()
        if problem is None:
            print(f"{name} is left out: there is no {INSTANCES / name}.json.gz.")
            continue
        problem_runs = compare(name, problem, solvers, seconds)
        runs += problem_runs
        rows += [cells(run, best_cost(problem_runs)) for run in problem_runs]
    if options.exact:
        columns = ("problem", "solver", "cost", "ratio", "lower bound", "gap", "seconds", "status")
        print_table(f"The default beside HiGHS at {seconds:g} s each", columns, side_by_side(runs))
    else:
        columns = ("problem", "solver", "ratio", "bound", "s to 1%", "seconds", "status")
        print_table(f"Solvers at {seconds:g} s each", columns, rows)
    return runs


if __name__ == "__main__":
    main()
