"""Layers on devices and on pipeline stages: solvers against known optima.

    python -m experiments.placement [--solvers dynamic-program gradient exact mcmc] [--quick]

"dynamic-program" is the one that `place` takes for pipelines.
"""

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diffshard.pipelines import Placement, place
from experiments.tables import print_table


class Case(NamedTuple):
    """A placement with a known optimum.

    Attributes:
      name: as in the table.
      layer_times: `[L]` seconds.
      transfer: `[D, D]` seconds.
      num_microbatches: of a pipeline; None if layers may be anywhere.
      optimum: seconds of the best placement, by exhaustive search or dynamic programming.
    """

    name: str
    layer_times: np.ndarray
    transfer: np.ndarray
    num_microbatches: int | None
    optimum: float


def _unit_pipeline(layers: int, stages: int, optimum: float) -> Case:
    cut = 2.0 * (1 - np.eye(stages))
    return Case(f"{layers} unit layers, {stages} stages, 3 micro-batches", np.ones(layers), cut, 3, optimum)


WORKED = Case(
    "6 layers, 3 devices",
    np.array([3.0, 3, 3, 2, 4, 4]),
    np.array([[0.0, 2, 4], [2, 0, 3], [4, 3, 0]]),
    None,
    12.0,
)
PIPELINES = tuple(
    _unit_pipeline(*sizes) for sizes in ((12, 4, 12.0), (24, 4, 18.0), (24, 8, 20.0), (24, 12, 26.0), (36, 8, 24.0))
)


DYNAMIC_PROGRAM = "dynamic-program"


def place_case(case: Case, solver: str, time_limit_s: float | None = None) -> Placement:
    """Places the layers of a case by a solver; "dynamic-program" is for pipelines."""
    return place(
        case.layer_times,
        case.transfer,
        num_microbatches=case.num_microbatches,
        solver=None if solver == DYNAMIC_PROGRAM else solver,
        time_limit_s=time_limit_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solvers", nargs="+", default=[DYNAMIC_PROGRAM, "gradient", "exact", "mcmc"])
    parser.add_argument("--quick", action="store_true", help="the two smallest cases")
    options = parser.parse_args(arguments)
    rows = []
    for case in (WORKED, *PIPELINES)[: 2 if options.quick else None]:
        for solver in options.solvers:
            if solver == DYNAMIC_PROGRAM and case.num_microbatches is None:
                continue
            start = time.perf_counter()
            result = place_case(case, solver)
            seconds = time.perf_counter() - start
            bound = result.lower_bound_s
            costs = (case.optimum, result.step_s, result.transfer_s, result.compute_s)
            limit = f"{bound:.2f}" if np.isfinite(bound) else "none"
            rows.append((case.name, solver, *(f"{cost:g}" for cost in costs), limit, f"{seconds:.2f}"))
    columns = ("layers", "solver", "optimum", "cost", "transfer", "compute", "bound", "seconds")
    print_table("Placement, in seconds of the model", columns, rows)


if __name__ == "__main__":
    main()
