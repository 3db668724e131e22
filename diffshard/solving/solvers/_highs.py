"""HiGHS on one mixed-integer programme, as a script of its own that `exact` can stop at any moment.

HiGHS looks at the clock seldom: its presolve can go on for seconds. Reads a pickled dictionary from stdin, writes
pickled (values of the whole variables or None, lower bound) to stdout whenever either improves, and at the end. It
imports nothing of ours, so that it starts quickly.
"""

import os
import pickle
import signal
import sys
from typing import Any

import highspy
import numpy as np


def main() -> None:
    """Solves what stdin holds."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    parent = os.getppid()
    given = pickle.load(sys.stdin.buffer)
    whole, best = given["num_whole"], -np.inf

    def tell(values: Any, bound: float) -> None:
        pickle.dump((None if values is None else np.asarray(values)[:whole], float(bound)), out)
        out.flush()

    def found(event: Any) -> None:
        tell(event.data_out.mip_solution, event.data_out.mip_dual_bound)

    def checked(event: Any) -> None:
        nonlocal best
        if os.getppid() != parent:
            event.interrupt()  # nobody listens any more
        if event.data_out.mip_dual_bound > best:
            best = event.data_out.mip_dual_bound
            tell(None, best)

    solver = highspy.Highs()
    for name, value in given["options"].items():
        solver.setOptionValue(name, value)
    solver.cbMipImprovingSolution += found
    solver.cbMipInterrupt += checked
    solver.passModel(_model(given))
    solver.run()
    info = solver.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    tell(solver.getSolution().col_value if feasible else None, info.mip_dual_bound)


def _model(given: dict[str, Any]) -> highspy.HighsLp:
    model = highspy.HighsLp()
    columns = len(given["cost"])
    model.num_col_, model.num_row_ = columns, len(given["lower"])
    model.col_cost_, model.col_lower_, model.col_upper_ = given["cost"], np.zeros(columns), given["column_upper"]
    model.row_lower_, model.row_upper_ = given["lower"], given["upper"]
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = given["rows"]
    kinds = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    model.integrality_ = [kinds[0]] * given["num_whole"] + [kinds[1]] * (columns - given["num_whole"])
    return model


if __name__ == "__main__":
    main()
