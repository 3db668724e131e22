"""Where the gaps on generated layers come from: the plan, the ascent of the dual, or the relaxation that bounds it.

    python -m experiments.layer_gaps [--nodes 80 1000]

The ascent converges to the optimum of a linear program, which HiGHS solves here. Small problems are solved
exactly, too. The last column leaves the memory limit out and adds what memory costs at the last prices to the nodes
instead. What lies between a plan and the bound there is not due to the limit: it is due to cycles, and to what the
search misses. Needs the extra `exact`.
"""

import argparse
import math
from collections.abc import Sequence

import highspy
import numpy as np

from cost.base import Problem
from diffshard.base import Solution
from diffshard.solving.csr import to_csr, with_ceiling
from diffshard.solving.dual.ascent import Ascent, cost_at_prices, credit
from diffshard.solving.presolve.pipeline import presolve
from diffshard.solving.solve import solve
from diffshard.solving.solvers._mixed_integer_program import window
from experiments.layered import layered_problem
from experiments.solver_variants import SHORT_SEARCH
from experiments.tables import print_table

_NUM_SWEEPS = 60, 400
_MOST_EXACT_NODES = 100  # that HiGHS solves to optimality in some ten seconds
_EXACT_LIMIT_S = 300.0


def relaxed_optimum(problem: Problem) -> float:
    """Returns the optimum of the linear program that bounds the dual, by HiGHS's interior points."""
    reduction = presolve(problem)
    here = window(reduction.problem, math.inf)
    if here is None:
        return math.inf
    program, rows = here.program, here.program.rows.tocsr()
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = rows.shape
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.column_lower, program.column_upper
    model.row_lower_, model.row_upper_ = program.lower, program.upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = rows.indptr, rows.indices, rows.data
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("solver", "ipm")
    highs.passModel(model)
    highs.run()
    return here.least + highs.getInfo().objective_function_value * here.unit + reduction.constant


def ascended(problem: Problem, sweeps: int) -> Ascent:
    """Returns the dual after a number of sweeps."""
    ascent = Ascent(with_ceiling(to_csr(problem)))
    for i in range(sweeps):
        ascent.step(i / sweeps)
    return ascent


def gap_at_prices(problem: Problem, ascent: Ascent) -> float:
    """Returns the gap that is left without the memory limit, where memory costs what it does at the last prices."""
    csr, prices = ascent.csr, ascent.best[1]
    none = np.zeros(0, np.int64)
    unlimited = problem._replace(
        node_cost=np.split(cost_at_prices(csr, prices), csr.start[1:-1]),
        usage_node=none,
        usage=[],
        usage_interval=none.reshape(0, 2),
        memory_limit=math.inf,
    )
    solution = solve(unlimited, solver=SHORT_SEARCH)
    cost, bound = (float(value) + credit(csr, prices) for value in (solution.cost, solution.lower_bound))
    return 1 - bound / cost


def _optimum_share(problem: Problem, plan: Solution) -> str:
    """Returns the optimum as a share of a plan's cost, where HiGHS proves it."""
    if len(problem.node_cost) > _MOST_EXACT_NODES:
        return "unknown"
    exact = solve(problem, solver="exact", time_limit_s=_EXACT_LIMIT_S, start=plan.choice)
    return f"{exact.cost / plan.cost:.3f}" if exact.status == "optimal" else "not proven"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the bounds of each size as shares of a plan's cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[80, 1_000])
    options = parser.parse_args(arguments)
    rows = []
    for nodes in options.nodes:
        problem = layered_problem(0, max(nodes // 40, 1), binding=0.7)
        plan = solve(problem, solver=SHORT_SEARCH)
        ascents = [ascended(problem, sweeps) for sweeps in _NUM_SWEEPS]
        bounds = [*(ascent.certified_bound() for ascent in ascents), relaxed_optimum(problem)]
        rows.append((
            f"{len(problem.node_cost):,}", f"{plan.cost:.6f}", _optimum_share(problem, plan),
            *(f"{bound / plan.cost:.3f}" for bound in bounds),
            f"{gap_at_prices(problem, ascents[-1]):.1%}",
        ))  # fmt: skip
    sweeps = tuple(f"{count} sweeps" for count in _NUM_SWEEPS)
    columns = ("nodes", "plan", "optimum", *sweeps, "linear program", "gap at prices, no limit")
    print_table("Bounds as shares of the short search's plan", columns, rows)


if __name__ == "__main__":
    main()
