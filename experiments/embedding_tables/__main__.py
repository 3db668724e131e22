"""Placements of embedding tables beside those of others, with bounds, on generated tasks and on MLPerf's tables.

    python -m experiments.embedding_tables [--tasks 100] [--exact-tables 15] [--devices 4 8 16]

Seconds are of the processor, of this process; HiGHS has its own.
"""

import argparse
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cost.base import Problem
from diffshard.base import Solution
from diffshard.embedding_tables.search import BALANCED
from diffshard.solving.phases.balancing import Balancing
from diffshard.solving.phases.climb import DualClimb
from diffshard.solving.solve import solve
from diffshard.solving.solvers import gradient
from experiments.embedding_tables import tasks
from experiments.embedding_tables.baselines import SCORES, beam_s, greedy_s, random_s
from experiments.tables import print_table
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, TableDevices
from search_spaces.embedding_tables.space import EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import TableStrategy

OURS, BEAM, RANDOM = "diffshard", "beam search", "random"
COLUMNS, SHORT = "diffshard, columns only", "diffshard, single moves only"
_EXACT_TIME_LIMIT_S = 10.0
_SHORT_SOLVER = functools.partial(
    gradient.solve, climb=DualClimb(num_sweeps=60), phases=lambda problem: (Balancing(most_pairs=0, num_kicks=0),)
)


class Outcome(NamedTuple):
    """What one way of placing does on one task.

    Attributes:
      step_s: predicted; inf where it finds no placement that fits.
      processor_s: that it took.
    """

    step_s: float
    processor_s: float


class TaskResult(NamedTuple):
    """All outcomes of a task.

    Attributes:
      outcomes: by the name of the way.
      lower_bound_s: of our search.
      gap: of our search.
      exact: HiGHS's solution, or None.
      space: the search space, for what our choice means.
      solution: of our search.
    """

    outcomes: dict[str, Outcome]
    lower_bound_s: float
    gap: float
    exact: Solution | None
    space: EmbeddingTableSpace
    solution: Solution


def run_task(
    tables: Sequence[EmbeddingTable], devices: TableDevices, seed: int, *, exact_tables: int, depth: int = 10
) -> TaskResult:
    """Places the tables of one task in all ways; exactly, too, where there are at most `exact_tables`."""
    outcomes = {RANDOM: _timed(lambda: random_s(tables, devices, seed))}
    for name, score in SCORES.items():
        outcomes[name] = _timed(lambda score=score: greedy_s(tables, devices, score))
    outcomes[BEAM] = _timed(lambda: beam_s(tables, devices, depth))
    _solved(tables, devices, seed, outcomes, COLUMNS, restrict=_columns_only)
    _solved(tables, devices, seed, outcomes, SHORT, solver=_SHORT_SOLVER)
    space, solution = _solved(tables, devices, seed, outcomes, OURS)
    exact = None
    if len(tables) <= exact_tables:
        exact = solve(space.problem, solver="exact", time_limit_s=_EXACT_TIME_LIMIT_S)
    return TaskResult(outcomes, solution.lower_bound, solution.gap, exact, space, solution)


def _solved(
    tables: Sequence[EmbeddingTable],
    devices: TableDevices,
    seed: int,
    outcomes: dict[str, Outcome],
    name: str,
    restrict: Callable[[EmbeddingTableSpace], Problem] = lambda space: space.problem,
    solver: Any = BALANCED,
) -> tuple[EmbeddingTableSpace, Solution]:
    """Solves a task in our space, which is built anew, and adds the outcome to `outcomes`."""
    begin = time.process_time()
    space = EmbeddingTableSpace(tables, devices)
    solution = solve(restrict(space), solver=solver, key=seed)
    seconds = time.process_time() - begin
    outcomes[name] = Outcome(float(solution.cost) if solution.feasible else math.inf, seconds)
    return space, solution


def _columns_only(space: EmbeddingTableSpace) -> Problem:
    """Returns the problem with the strategies that beam search has, too: whole tables and pieces of columns."""

    def is_allowed(table: EmbeddingTable, strategy: TableStrategy) -> bool:
        return all(piece.device != EVERY_DEVICE and piece.rows == table.rows for piece in strategy.pieces)

    node_cost = [
        np.array([0.0 if is_allowed(table, strategy) else np.inf for strategy in strategies])
        for table, strategies in zip(space.tables, space.strategies, strict=True)
    ]
    return space.problem._replace(node_cost=node_cost)


def _timed(place: Callable[[], float]) -> Outcome:
    begin = time.process_time()
    return Outcome(place(), time.process_time() - begin)


def _print_generated(results: Sequence[TaskResult]) -> None:
    others = [name for name in results[0].outcomes if not name.startswith(OURS)]
    columns = ("way", "fits", "mean/bound", "worst/bound", "mean/diffshard", "worst/diffshard", "mean s", "most s")
    rows = []
    for name in (*others, SHORT, COLUMNS, OURS):
        fitting = [(r.outcomes[name], r) for r in results if math.isfinite(r.outcomes[name].step_s)]
        to_bound = [o.step_s / r.lower_bound_s for o, r in fitting]
        to_ours = [o.step_s / r.outcomes[OURS].step_s for o, r in fitting]
        seconds = [r.outcomes[name].processor_s for r in results]
        ratios = [f"{of(ratio):.4f}" for ratio in (to_bound, to_ours) for of in (np.mean, np.max) if fitting]
        times = f"{np.mean(seconds):.3f}", f"{np.max(seconds):.3f}"
        rows.append((name, f"{len(fitting)}/{len(results)}", *(ratios or ("none",) * 4), *times))
    print_table(f"{len(results)} generated tasks, step time as a ratio", columns, rows)
    rows = []
    for label, best_of in (("the best baseline", others), (BEAM, [BEAM])):
        ratios = [r.outcomes[OURS].step_s / min(r.outcomes[n].step_s for n in best_of) for r in results]
        rows.append((label, f"{np.mean(ratios):.4f}", f"{np.max(ratios):.4f}", sum(x < 1 for x in ratios)))
    exact = [r for r in results if r.exact is not None and r.exact.status == "optimal"]
    if exact:
        ratios = [r.outcomes[OURS].step_s / float(r.exact.cost) for r in exact if r.exact is not None]
        rows.append((f"the optimum ({len(exact)} tasks)", f"{np.mean(ratios):.4f}", f"{np.max(ratios):.4f}", 0))
    print_table("diffshard's step time to that of others", ("other", "mean", "worst", "tasks won"), rows)
    by_size: dict[int, list[float]] = defaultdict(list)
    for result in results:
        by_size[len(result.space.tables) // 10 * 10].append(result.gap)
    rows = [
        (f"{n} to {n + 9}", len(gaps), f"{np.mean(gaps):.4f}", f"{np.max(gaps):.4f}")
        for n, gaps in sorted(by_size.items())
    ]
    print_table("Gap between diffshard and its bound", ("tables", "tasks", "mean", "most"), rows)


def _print_mlperf(results: Sequence[tuple[int, TaskResult]]) -> None:
    rows = [
        (
            num_devices, name, f"{1e3 * outcome.step_s:.3f}", f"{outcome.step_s / result.lower_bound_s:.4f}",
            f"{outcome.processor_s:.2f}",
        )
        for num_devices, result in results
        for name, outcome in result.outcomes.items()
    ]  # fmt: skip
    for num_devices, result in results:
        if result.exact is not None:
            cost = float(result.exact.cost)
            row = (
                num_devices,
                f"exact, {result.exact.status}",
                f"{1e3 * cost:.3f}",
                f"{cost / result.lower_bound_s:.4f}",
                "",
            )
            rows.append(row)
    print_table(
        "MLPerf's tables on H100s", ("devices", "way", "step ms", "to bound", "s"), sorted(rows, key=lambda r: r[0])
    )
    _, result = results[0]
    decoded = result.space.decode(result.solution.choice)
    rows = [
        (d, f"{1e3 * forward:.3f}", f"{1e3 * rest:.3f}", f"{num_bytes / 2**30:.1f}")
        for d, (forward, rest, num_bytes) in enumerate(
            zip(decoded.forward_s, decoded.rest_s, decoded.device_bytes, strict=True)
        )
    ]
    print_table("diffshard's devices", ("device", "lookups ms", "rest ms", "GiB"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first task; the others follow")
    parser.add_argument("--most-tables", type=int, default=60)
    parser.add_argument(
        "--exact-tables", type=int, default=15, help="tables of a task up to which HiGHS solves it, too"
    )
    parser.add_argument("--depth", type=int, default=10, help="of the beam search")
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8, 16], help="for MLPerf's tables")
    options = parser.parse_args(arguments)
    results = [
        run_task(
            *tasks.generated(seed, options.most_tables), seed, exact_tables=options.exact_tables, depth=options.depth
        )
        for seed in range(options.seed, options.seed + options.tasks)
    ]
    if results:
        _print_generated(results)
    mlperf = [
        (n, run_task(*tasks.mlperf(n), options.seed, exact_tables=26 if n <= 4 else 0, depth=options.depth))
        for n in options.devices
    ]
    if mlperf:
        _print_mlperf(mlperf)


if __name__ == "__main__":
    main()
