"""An engine of its own beside the shared solver, on the same problems: placements of embedding tables.

    python -m experiments.engines [--tasks 10] [--devices 4 8] [--time-limit 2]

A step of a recommendation model takes the longest lookups of a device and the longest rest of a device: two groups of
loads. The engine of `diffshard.tables.shard_tables` anneals chains of placements and has bounds of its own. The shared
solver gets the problem as it is, once for a time limit and once with the descents alone that level loads.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from diffshard.base import Solution
from diffshard.experts.assignment import LEVELLING
from diffshard.solving.solve import solve
from diffshard.tables.solving import solve_space
from experiments.embedding_tables.tasks import generated, mlperf
from experiments.tables import print_table
from search_spaces.embedding_tables.space import EmbeddingTableSpace


class Outcome(NamedTuple):
    """The result of an engine, not feasible if arrays are longer than the memory, and its processor seconds."""

    solution: Solution
    cpu_s: float


def compare(space: EmbeddingTableSpace, time_limit_s: float) -> dict[str, Outcome]:
    """Returns the placements of each engine."""
    return {
        "own": _timed(space, lambda: solve_space(space, key=0)),
        "shared": _timed(space, lambda: solve(space.problem, time_limit_s=time_limit_s, key=0)),
        "descents": _timed(space, lambda: solve(space.problem, solver=LEVELLING, key=0)),
    }


def _timed(space: EmbeddingTableSpace, run: Callable[[], Solution]) -> Outcome:
    begin_s = time.process_time()
    found = run()
    fits = found.feasible and not space.arrays.excess(found.choice)
    return Outcome(found._replace(feasible=bool(fits)), time.process_time() - begin_s)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the engines' steps, gaps and seconds for each task, and the mean ratios of steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=10, help="generated tasks of 4 devices")
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8], help="devices for the tables of MLPerf")
    parser.add_argument("--time-limit", type=float, default=2.0, help="seconds of the shared solver for each task")
    options = parser.parse_args(argv)
    tasks = [(f"generated {seed}", generated(seed)) for seed in range(options.tasks)]
    tasks += [(f"MLPerf, {number} devices", mlperf(number)) for number in options.devices]
    rows, ratios = [], []
    for name, (tables, devices) in tasks:
        space = EmbeddingTableSpace(tables, devices)
        own, *others = compare(space, options.time_limit).values()
        ratios.append([o.solution.cost / own.solution.cost if o.solution.feasible else math.nan for o in others])
        row = [name, len(tables), sum(map(len, space.strategies)), f"{1e3 * own.solution.cost:.3f}"]
        row += [f"{own.solution.gap:.1%}", f"{own.cpu_s:.1f}"]
        for other, ratio in zip(others, ratios[-1], strict=True):
            found = f"{ratio:.3f}" if math.isfinite(ratio) else "does not fit"
            row += [found, f"{other.solution.gap:.1%}", f"{other.cpu_s:.1f}"]
        rows.append(tuple(row))
    columns = ("task", "tables", "strategies", "own, ms", "gap", "CPU s", "shared / own", "gap", "CPU s")
    columns += ("descents / own", "gap", "CPU s")
    print_table("Embedding tables by their own engine and by the shared solver", columns, rows)
    means = np.exp(np.nanmean(np.log(ratios), axis=0))
    print(f"Geometric means of the ratios where placements fit: {means[0]:.3f}, and {means[1]:.3f} by descents alone")


if __name__ == "__main__":
    main()
