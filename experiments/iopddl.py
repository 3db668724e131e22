"""The contest on intra-operator parallelism: our cost and bound against the best known, ablation, and scaling.

    python -m experiments.iopddl [--instances A B D G K M N S V] [--seeds 3] [--share 1.0] [--jobs 2] [--records FOLDER]
    python -m experiments.iopddl --processor-time [--instances V] [--share 0.15]
    python -m experiments.iopddl --ablation [--instances G V]
    python -m experiments.iopddl --scaling [--nodes 1000 10000 100000 1000000]

Each run is in a process of its own, so that its peak memory is its own; its time limit is the contest's (for 8 cores)
times `--share`, presolve and compilation included. With `--processor-time` limits are of the processor: on a busy
machine seconds of the clock say how busy it is.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from diffshard.base import Solution
from diffshard.files import write_whole
from diffshard.solving import contest
from diffshard.solving.presolve.pipeline import merge_ties, presolve
from diffshard.solving.solve import solve
from experiments.layered import layered_problem
from experiments.solver_variants import SHORT_SEARCH, VARIANTS
from experiments.tables import print_table

INSTANCES = Path(__file__).resolve().parents[2] / "shared" / "data" / "iopddl"
# Seconds and the best known cost: the contest's limit and the best of its entries.
CONTEST = {
    "A": (60, 6_548_641_531),
    "B": (60, 532_843),
    "D": (60, 313_613_524_736),
    "G": (120, 217_039),
    "K": (180, 2_274_276_676),
    "M": (180, 49_928_460_991),
    "N": (180, 202_739_586_553),
    "S": (240, 1_534_613_444),
    "V": (300, 1_632_051),
}
NEAR = 0.01  # of the final cost


def run(name: str, seconds: float, seed: int, variant: str = "all") -> dict[str, Any]:
    """Solves an instance without the part of the solver that `variant` names, and returns what the tables show.

    Raises:
      FileNotFoundError: the instance is not there.
    """
    problem = contest.read(INSTANCES / f"{name}.json.gz")
    start = time.perf_counter()
    reduce = merge_ties if variant == "presolve" else presolve
    return _facts(solve(problem, solver=VARIANTS[variant], time_limit_s=seconds, key=seed, reduce=reduce), start)


def run_by_processor(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Returns the same as `run`, in a process of its own, where time limits and seconds are of the processor."""
    time.perf_counter = time.process_time
    return run(name, seconds, seed)


def scale(nodes: int, seconds: float | None) -> dict[str, Any]:
    """Solves a generated problem of equal layers with about this many nodes; without a limit by `SHORT_SEARCH`."""
    start = time.perf_counter()
    problem = layered_problem(0, max(nodes // 40, 1), binding=0.7)
    made_s = time.perf_counter() - start
    start, start_processor_s = time.perf_counter(), time.process_time()
    solver = "gradient" if seconds else SHORT_SEARCH
    solution = solve(problem, solver=solver, time_limit_s=seconds)
    return {
        **_facts(solution, start),
        "processor_s": time.process_time() - start_processor_s,
        "nodes": len(problem.node_cost),
        "made_s": made_s,
    }


def _facts(solution: Solution, start: float) -> dict[str, Any]:
    seconds = time.perf_counter() - start
    cost = float(solution.cost)
    return {
        "cost": cost,
        "bound": solution.lower_bound,
        "feasible": solution.feasible,
        "seconds": seconds,
        "near_s": next((s for s, c, _ in solution.history if c <= cost * (1 + NEAR)), None),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _apart(call: tuple[Any, ...], records: Path | None) -> dict[str, Any]:
    """Runs a call of this module in a process of its own, or takes its record up where there is one."""
    record = records and records / f"{'-'.join(str(part) for part in call)}.json"
    if record and record.exists():
        return json.loads(record.read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "experiments.iopddl", "--call", json.dumps(call)]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    if record:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, done)
    return json.loads(done)


def _side_by_side(calls: Sequence[tuple[Any, ...]], jobs: int, records: Path | None) -> list[dict[str, Any]]:
    """Runs calls of this module, `jobs` at a time; a run keeps one core busy."""
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda call: _apart(call, records), calls)
        return list(track(results, total=len(calls), console=Console(stderr=True)))


def contest_table(
    names: Sequence[str], seeds: int, share: float, jobs: int, records: Path | None, call: str = "run"
) -> None:
    """Prints our cost and bound as ratios to the best known cost, over seeds; `call` is a run's name in `main`."""
    calls = [(call, name, CONTEST[name][0] * share, seed) for name in names for seed in range(seeds)]
    results = _side_by_side(calls, jobs, records)
    rows = []
    for i, name in enumerate(names):
        limit, best = CONTEST[name]
        runs = results[i * seeds : (i + 1) * seeds]
        ratios = [run["cost"] / best if run["feasible"] else np.inf for run in runs]
        gaps = [1 - run["bound"] / run["cost"] for run in runs]
        rows.append((
            name, f"{limit * share:.0f}", f"{np.median(ratios):.6f}", f"{max(ratios):.6f}",
            f"{np.median(gaps):.2%}", f"{max(gaps):.2%}",
            f"{np.median([run['near_s'] for run in runs]):.0f}",
            f"{max(run['seconds'] for run in runs):.1f}",
            f"{max(run['peak_rss_bytes'] for run in runs) / 2**30:.2f}",
        ))  # fmt: skip
    columns = ("instance", "limit s", "cost / best known", "worst", "gap", "worst gap", "s to 1%", "s", "RSS GiB")
    print_table(f"IOPDDL, {seeds} seeds, median and worst", columns, rows)


def ablation_table(names: Sequence[str], seeds: int, share: float, jobs: int, records: Path | None) -> None:
    """Prints what each part of the solver is worth, as ratios to the best known cost."""
    keys = [(name, variant) for name in names for variant in VARIANTS]
    calls = [("run", name, CONTEST[name][0] * share, seed, variant) for name, variant in keys for seed in range(seeds)]
    results = _side_by_side(calls, jobs, records)
    rows = []
    for i, (name, variant) in enumerate(keys):
        runs, best = results[i * seeds : (i + 1) * seeds], CONTEST[name][1]
        ratios = [run["cost"] / best if run["feasible"] else np.inf for run in runs]
        bound = np.median([run["bound"] / best for run in runs])
        left_out = variant if variant == "all" else f"without {variant}"
        rows.append((name, left_out, f"{np.median(ratios):.5f}", f"{max(ratios):.5f}", f"{bound:.4f}"))
    print_table("Without each part", ("instance", "search", "cost / best known", "worst", "bound"), rows)


def scaling_table(sizes: Sequence[int], seconds: float | None) -> None:
    """Prints seconds, of the clock and of the processor, and memory against size."""
    rows = []
    for nodes in sizes:
        result = _apart(("scale", nodes, seconds), None)
        rows.append((
            f"{result['nodes']:,}", f"{result['seconds']:.1f}", f"{result['processor_s']:.1f}",
            f"{result['processor_s'] / result['nodes'] * 1e3:.2f}",
            f"{1 - result['bound'] / result['cost']:.2%}", result["feasible"],
            f"{result['peak_rss_bytes'] / 2**30:.2f}",
        ))  # fmt: skip
    columns = ("nodes", "seconds", "processor s", "ms a node", "gap", "feasible", "RSS GiB")
    print_table("Generated layers", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", nargs="+", choices=list(CONTEST), default=list(CONTEST))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the contest's time limits")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each keeps one core busy")
    parser.add_argument("--records", type=Path, help="a folder for the runs' records: those already there are taken up")
    parser.add_argument("--ablation", action="store_true", help="the solver without each of its parts")
    parser.add_argument("--scaling", action="store_true", help="generated problems instead")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--seconds", type=float, help="time limit of each generated problem")
    parser.add_argument("--processor-time", action="store_true", help="limits are of the processor, not of the clock")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.call:
        name, *values = json.loads(options.call)
        calls: dict[str, Callable[..., dict[str, Any]]] = {
            "run": run,
            "run by processor": run_by_processor,
            "scale": scale,
        }
        print(json.dumps(calls[name](*values)))
        return
    if options.scaling:
        scaling_table(options.nodes, options.seconds)
        return
    here = [name for name in options.instances if (INSTANCES / f"{name}.json.gz").exists()]
    if len(here) < len(options.instances):
        print(f"Skipped: {INSTANCES} lacks {', '.join(sorted(set(options.instances) - set(here)))}.")
    if here and options.ablation:
        ablation_table(here, options.seeds, options.share, options.jobs, options.records)
    elif here:
        call = "run by processor" if options.processor_time else "run"
        contest_table(here, options.seeds, options.share, options.jobs, options.records, call)


if __name__ == "__main__":
    main()
