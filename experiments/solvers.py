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
from diffshard.sharding_search.search import search
from diffshard.sharding_search.traced import space_of, trace_function
from diffshard.solving import contest
from diffshard.solving.solve import solve, solver_names
from experiments.host_devices import AXIS_NAMES
from experiments.models import gpt, mlp
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table

INSTANCES = Path(__file__).resolve().parents[2] / "shared" / "data" / "iopddl"
NEAR = 0.01  # of the final cost
ORACLES = ("exhaustive",)  # of a few nodes only


class Row(NamedTuple):
    """What a solver made of a problem.

    Attributes:
      problem, solver: their names.
      solution: what was found; None where the solver does not take the problem, which `refusal` says why.
      seconds: until it ended.
    """

    problem: str
    solver: str
    solution: Solution | None
    seconds: float
    refusal: str = ""


def sharding_problem(model: Model, shape: Sequence[int]) -> Problem:
    """The problem behind the plan of a training step on a mesh of H100s."""
    mesh = AbstractMesh(tuple(shape), AXIS_NAMES[len(shape)])
    options = search(model.step, mesh, hardware="h100", donate_argnums=0).options
    return space_of(options, trace_function(options, abstract_arguments(model))).problem


def contest_problem(name: str) -> Problem | None:
    """An instance of the contest, None where its file is not here."""
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


def compare(name: str, problem: Problem, solvers: Sequence[str], seconds: float) -> list[Row]:
    """One row for each solver, in their order."""
    rows = []
    for solver in solvers:
        start = time.perf_counter()
        try:
            solution, refusal = solve(problem, solver=solver, time_limit_s=seconds), ""
        except ValueError as error:  # too large for this solver
            solution, refusal = None, str(error)
        rows.append(Row(name, solver, solution, time.perf_counter() - start, refusal))
    return rows


def best_cost(rows: Sequence[Row]) -> float:
    """The least feasible cost of the rows, inf if there is none."""
    return min((float(r.solution.cost) for r in rows if r.solution and r.solution.feasible), default=math.inf)


def near_s(solution: Solution) -> float:
    """Seconds until the cost was within 1% of the final one."""
    last = solution.history[-1][1]
    return next(s for s, cost, _ in solution.history if cost <= last + NEAR * abs(last))


def cells(row: Row, best: float) -> tuple[object, ...]:
    """The row for people."""
    if row.solution is None:
        return (row.problem, row.solver, "not taken", "", "", f"{row.seconds:.1f}", row.refusal[:60])
    found = row.solution
    bound = f"{found.lower_bound / best:.4f}" if math.isfinite(found.lower_bound) and best else ""
    ratio = f"{found.cost / best:.4f}" if found.feasible and best else f"infeasible by {found.excess:.3g}"
    if not best:
        ratio = f"{found.cost:.4g}"
    near = f"{near_s(found):.1f}" if found.feasible else ""
    return (row.problem, row.solver, ratio, bound, near, f"{row.seconds:.1f}", found.status)


def side_by_side(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    """For each problem and solver its cost, bound, gap and seconds, and its cost as a ratio to the least found."""
    shown = []
    for row in rows:
        best = best_cost([other for other in rows if other.problem == row.problem])
        found = row.solution
        if found is None:
            shown.append((row.problem, row.solver, "not taken", "", "", "", f"{row.seconds:.1f}", row.refusal[:60]))
            continue
        cost = f"{float(found.cost):.6g}" if found.feasible else f"infeasible by {found.excess:.3g}"
        ratio = f"{found.cost / best:.4f}" if found.feasible and best else ""
        bound = f"{found.lower_bound:.6g}" if math.isfinite(found.lower_bound) else "none"
        gap = f"{found.gap:.2%}" if math.isfinite(found.gap) else "none"
        shown.append((row.problem, row.solver, cost, ratio, bound, gap, f"{row.seconds:.1f}", found.status))
    return shown


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Prints the table; returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = [name for name in solver_names() if name not in ORACLES]
    parser.add_argument("--seconds", type=float, default=10.0, help="for each solver and problem")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--solvers", nargs="+", choices=solver_names(), default=named)
    parser.add_argument("--exact", action="store_true", help="the default solver beside HiGHS, with bounds and gaps")
    parser.add_argument("--quick", action="store_true", help="one small problem, one second each")
    options = parser.parse_args(arguments)
    solvers = ("gradient", "exact") if options.exact else options.solvers
    seconds = 1.0 if options.quick else options.seconds
    chosen = QUICK if options.quick else {name: PROBLEMS[name] for name in options.problems}
    rows: list[Row] = []
    shown = []
    for name, make in chosen.items():
        problem = make()
        if problem is None:
            print(f"{name} is left out: there is no {INSTANCES / name}.json.gz.")
            continue
        found = compare(name, problem, solvers, seconds)
        rows += found
        shown += [cells(row, best_cost(found)) for row in found]
    if options.exact:
        columns = ("problem", "solver", "cost", "ratio", "lower bound", "gap", "seconds", "status")
        print_table(f"The default beside HiGHS at {seconds:g} s each", columns, side_by_side(rows))
    else:
        columns = ("problem", "solver", "ratio", "bound", "s to 1%", "seconds", "status")
        print_table(f"Solvers at {seconds:g} s each", columns, shown)
    return rows


if __name__ == "__main__":
    main()
