"""Placements of embedding tables beside those of others, with bounds, on generated tasks and on MLPerf's tables.

    python -m experiments.embedding_tables [--tasks 100] [--few-tasks 6] [--devices 4 8 16]

Seconds are of the processor, of this process; HiGHS has its own.
"""

import argparse
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from diffshard.base import Solution
from diffshard.solving.solve import solve
from diffshard.tables.solving import solve_space
from experiments.embedding_tables import tasks, torchrec
from experiments.embedding_tables.baselines import SCORES, beam_s, greedy_s, random_s
from experiments.tables import print_table
from search_spaces.embedding_tables.base import EVERY_DEVICE, EmbeddingTable, TableDevices
from search_spaces.embedding_tables.space import EmbeddingTableSpace
from search_spaces.embedding_tables.strategies import TableStrategies

OURS, BEAM, RANDOM = "diffshard", "beam search", "random"
COLUMNS = "diffshard, columns only"
_EXACT_TIME_LIMIT_S = 120.0


class Outcome(NamedTuple):
    """The outcome of one way of placing on one task.

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
      exact_s: seconds of the clock that HiGHS took.
      space: the search space, for what our choice means.
      solution: of our search.
    """

    outcomes: dict[str, Outcome]
    lower_bound_s: float
    gap: float
    exact: Solution | None
    exact_s: float
    space: EmbeddingTableSpace
    solution: Solution


def run_task(
    tables: Sequence[EmbeddingTable], devices: TableDevices, seed: int, *, depth: int = 10, find_optimum: bool = False
) -> TaskResult:
    """Places the tables of one task in all ways; also by HiGHS, if the optimum is wanted."""
    outcomes = {RANDOM: _timed(lambda: random_s(tables, devices, seed))}
    for name, score in SCORES.items():
        outcomes[name] = _timed(lambda score=score: greedy_s(tables, devices, score))
    for name, planner in torchrec.WAYS.items():
        outcomes[name] = _timed(lambda planner=planner: planner.step_s(tables, devices))
    outcomes[BEAM] = _timed(lambda: beam_s(tables, devices, depth))
    _solved(ColumnsOnlySpace(tables, devices), seed, outcomes, COLUMNS)
    space, solution = _solved(EmbeddingTableSpace(tables, devices), seed, outcomes, OURS)
    exact, begin = None, time.perf_counter()
    if find_optimum:
        exact = solve(space.problem, solver="exact", time_limit_s=_EXACT_TIME_LIMIT_S)
    exact_s = time.perf_counter() - begin
    return TaskResult(outcomes, solution.lower_bound, solution.gap, exact, exact_s, space, solution)


class ColumnsOnlySpace(EmbeddingTableSpace):
    """The strategies that beam search has, too: whole tables and pieces of columns."""

    @functools.cached_property
    def strategies(self) -> tuple[TableStrategies, ...]:
        """The strategies of each table, T sequences of S_t."""
        return tuple(
            TableStrategies(
                kind
                for kind in strategies.kinds
                if all(piece.device != EVERY_DEVICE and piece.rows == table.rows for piece in kind.pieces)
            )
            for table, strategies in zip(self.tables, super().strategies, strict=True)
        )


def _solved(
    space: EmbeddingTableSpace,
    seed: int,
    outcomes: dict[str, Outcome],
    name: str,
) -> tuple[EmbeddingTableSpace, Solution]:
    """Solves a task in a space whose strategies are not yet priced, and adds the outcome to `outcomes`."""
    begin = time.process_time()
    solution = solve_space(space, key=seed)
    seconds = time.process_time() - begin
    outcomes[name] = Outcome(float(solution.cost) if solution.feasible else math.inf, seconds)
    return space, solution


def _timed(place: Callable[[], float]) -> Outcome:
    begin = time.process_time()
    return Outcome(place(), time.process_time() - begin)


def _print_generated(results: Sequence[TaskResult]) -> None:
    others = [name for name in results[0].outcomes if not name.startswith(OURS)]
    columns = ("way", "fits", "mean/bound", "worst/bound", "mean/diffshard", "worst/diffshard", "mean s", "most s")
    rows = []
    for name in (*others, COLUMNS, OURS):
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
    print_table("diffshard's step time to that of others", ("other", "mean", "worst", "tasks won"), rows)
    by_size: dict[int, list[float]] = defaultdict(list)
    for result in results:
        by_size[len(result.space.tables) // 10 * 10].append(result.gap)
    rows = [
        (f"{n} to {n + 9}", len(gaps), f"{np.mean(gaps):.4f}", f"{np.max(gaps):.4f}")
        for n, gaps in sorted(by_size.items())
    ]
    print_table("Gap between diffshard and its bound", ("tables", "tasks", "mean", "most"), rows)


def _print_optima(results: Sequence[TaskResult]) -> None:
    rows = []
    for seed, result in enumerate(results):
        exact, ours_s = result.exact, result.outcomes[OURS].step_s
        if exact is None:
            continue
        if exact.feasible:  # HiGHS says so; the placement is priced again
            assert math.isclose(result.space.step_s(exact.choice), float(exact.cost), rel_tol=1e-9)
        ratio = f"{ours_s / float(exact.cost):.4f}" if exact.feasible else "none"
        to_bounds = (f"{ours_s / bound_s:.4f}" for bound_s in (exact.lower_bound, result.lower_bound_s))
        times = f"{result.exact_s:.1f}", f"{1e3 * ours_s:.4f}"
        rows.append((seed, len(result.space.tables), exact.status, *times, ratio, *to_bounds))
    columns = ("task", "tables", "HiGHS", "HiGHS s", "diffshard ms", "to HiGHS", "to HiGHS's bound", "to our bound")
    print_table("Few tables, beside HiGHS's placements", columns, rows)


def _print_mlperf(results: Sequence[tuple[int, TaskResult]]) -> None:
    rows = [
        (
            num_devices, name, f"{1e3 * outcome.step_s:.3f}", f"{outcome.step_s / result.lower_bound_s:.4f}",
            f"{outcome.processor_s:.2f}",
        )
        for num_devices, result in results
        for name, outcome in result.outcomes.items()
    ]  # fmt: skip
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
    parser.add_argument("--few-tasks", type=int, default=6, help="that HiGHS solves, too")
    parser.add_argument("--few-tables", type=int, default=10, help="of each of these tasks, at most")
    parser.add_argument("--depth", type=int, default=10, help="of the beam search")
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8, 16], help="for MLPerf's tables")
    options = parser.parse_args(arguments)
    results = [
        run_task(*tasks.generated(seed, options.most_tables), seed, depth=options.depth)
        for seed in range(options.seed, options.seed + options.tasks)
    ]
    if results:
        _print_generated(results)
    few = [
        run_task(*tasks.few(seed, options.few_tables), seed, depth=options.depth, find_optimum=True)
        for seed in range(options.few_tasks)
    ]
    if few:
        _print_optima(few)
    mlperf = [(n, run_task(*tasks.mlperf(n), options.seed, depth=options.depth)) for n in options.devices]
    if mlperf:
        _print_mlperf(mlperf)


if __name__ == "__main__":
    main()
