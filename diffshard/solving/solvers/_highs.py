"""HiGHS in a process of its own, so that `exact` can stop it at any moment: its presolve ignores the clock for seconds.

The script reads pickled dictionaries from stdin, one after the other until stdin ends. For each one it writes pickled
pairs to stdout, of the values of the integer variables or None and of a lower bound, whenever either improves and at
the end, and then None. It imports nothing of ours, so that it starts quickly.
"""

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

import highspy
import numpy as np


def main() -> None:
    """Solves the programs on stdin."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # HiGHS prints who made it before any option can forbid it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one answers Ctrl-C
    parent = os.getppid()
    while True:
        try:
            program = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _solve(program, out, parent)
        pickle.dump(None, out)
        out.flush()


def _solve(program: dict[str, Any], out: BinaryIO, parent: int) -> None:
    num_integers, best_bound = program["num_integers"], -np.inf

    def answer(values: Any, bound: float) -> None:
        pickle.dump((None if values is None else np.asarray(values)[:num_integers], float(bound)), out)
        out.flush()

    def on_solution(event: Any) -> None:
        answer(event.data_out.mip_solution, event.data_out.mip_dual_bound)

    def on_check(event: Any) -> None:
        nonlocal best_bound
        if os.getppid() != parent:
            event.interrupt()  # the process that listened is gone
        if event.data_out.mip_dual_bound > best_bound:
            best_bound = event.data_out.mip_dual_bound
            answer(None, best_bound)

    solver = highspy.Highs()
    for name, value in program["options"].items():
        solver.setOptionValue(name, value)
    solver.cbMipImprovingSolution += on_solution
    solver.cbMipInterrupt += on_check
    solver.passModel(_model(program))
    solver.run()
    info = solver.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    answer(solver.getSolution().col_value if feasible else None, info.mip_dual_bound)


def _model(program: dict[str, Any]) -> highspy.HighsLp:
    model = highspy.HighsLp()
    columns = len(program["cost"])
    model.num_col_, model.num_row_ = columns, len(program["lower"])
    model.col_cost_, model.col_lower_, model.col_upper_ = (
        program["cost"],
        program["column_lower"],
        program["column_upper"],
    )
    model.row_lower_, model.row_upper_ = program["lower"], program["upper"]
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = program["rows"]
    kinds = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    model.integrality_ = [kinds[0]] * program["num_integers"] + [kinds[1]] * (columns - program["num_integers"])
    return model


if __name__ == "__main__":
    main()
