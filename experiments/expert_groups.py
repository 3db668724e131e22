"""Expert-parallel groups on irregular clusters: diffshard beside merging pairs, equal groups, and the lower bound.

    python -m experiments.expert_groups [--workers 8 16 32] [--few 10 12] [--seeds 3]

Clusters are random: nodes of unequal size, workers of three speeds and with room for 2 to 8 experts, links that differ
by up to 60%. On few workers, whose links differ tenfold without any nodes, the default, which is exact, is held against
the solver that larger clusters get. Assignments are of experts of unequal work to unequal workers. Seconds are
processor seconds.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import diffshard
from cost.expert_groups import ExpertStep, ExpertWorkers, step_s
from experiments.tables import print_table

EXPERT_FLOPS = 16 * 4 * 2048 * 1024**2
FLOPS_PER_S = 0.43 * 312e12
STEP: Mapping[str, Any] = {
    "exchange_bytes": 16e6,
    "num_exchanges": 4.0,
    "all_reduce_bytes": 512e6,
    "num_layers": 24,
    "layer_spacing": 2,
    "recomputation": 1,
    "mini_batch": 4,
}


def irregular_cluster(num_workers: int, seed: int) -> ExpertWorkers:
    """Makes a cluster of unequal workers on nodes of unequal size, five workers to a node on average."""
    rng = np.random.default_rng(seed)
    node = np.sort(rng.integers(0, max(num_workers // 5, 2), num_workers))
    same_node = node[:, None] == node
    noise = rng.uniform(0.8, 1.3, (num_workers, num_workers))
    noise = np.maximum(noise, noise.T)
    return ExpertWorkers(
        FLOPS_PER_S * rng.choice([1.0, 0.5, 0.25], num_workers),
        rng.integers(2, 9, num_workers),
        np.where(same_node, 0.009e-3, 0.03e-3) * noise,
        np.where(same_node, 0.014e-9, 0.054e-9) * noise,
    )


def random_cluster(num_workers: int, seed: int) -> ExpertWorkers:
    """Makes a cluster of unequal workers without nodes: links differ tenfold, in both directions."""
    rng = np.random.default_rng(seed)
    return ExpertWorkers(
        FLOPS_PER_S * rng.choice([1.0, 0.5, 0.25], num_workers),
        rng.integers(2, 9, num_workers),
        rng.uniform(0.009e-3, 0.09e-3, (num_workers, num_workers)),
        rng.uniform(0.014e-9, 0.14e-9, (num_workers, num_workers)),
    )


def group(workers: ExpertWorkers, num_experts: int, solver: str | None = None) -> diffshard.experts.GroupPlan:
    """Plans groups for the step of this experiment, with 16 examples for each worker."""
    return diffshard.experts.group_experts(
        [EXPERT_FLOPS] * num_experts,
        workers.flops_per_s,
        workers.capacity,
        workers.latency_s,
        workers.s_per_byte,
        global_batch=16 * workers.num_workers,
        solver=solver,
        **STEP,
    )


def equal_groups_s(workers: ExpertWorkers, num_experts: int) -> float:
    """Returns the seconds of the best division into equally many neighbouring workers."""
    num_workers = workers.num_workers
    step = ExpertStep((EXPERT_FLOPS,) * num_experts, global_batch=16 * num_workers, **STEP)
    counts = [count for count in range(1, num_workers + 1) if num_workers % count == 0]
    return min(step_s(workers, step, np.arange(num_workers).reshape(count, -1).tolist()) for count in counts)


def irregular_rows(counts: Sequence[int], num_experts: int, seeds: int) -> list[tuple]:
    """Returns a row for each irregular cluster: seconds of all ways of grouping, the bound, and seconds."""
    rows = []
    for num_workers, seed in itertools.product(counts, range(seeds)):
        workers = irregular_cluster(num_workers, seed)
        plan, seconds = _timed(group, workers, num_experts)
        times = (plan.step_s, plan.merging_s, equal_groups_s(workers, num_experts), plan.lower_bound_s)
        printed = (*(f"{1e3 * s:.1f}" for s in times), f"{plan.gap:.1%}", f"{seconds:.1f}")
        rows.append((num_workers, seed, len(plan.groups), *printed))
    return rows


def few_rows(counts: Sequence[int], experts: Sequence[int], seeds: int) -> list[tuple]:
    """Returns a row for each cluster of few workers: the exact groups beside those of the solver."""
    rows = []
    for num_workers, num_experts, seed in itertools.product(counts, experts, range(seeds)):
        workers = random_cluster(num_workers, seed)
        exact, exact_s = _timed(group, workers, num_experts)
        solved, solved_s = _timed(group, workers, num_experts, "gradient")
        times = (exact.step_s, solved.step_s, exact.lower_bound_s)
        ratio = solved.step_s / exact.step_s
        printed = (*(f"{1e3 * s:.1f}" for s in times), f"{ratio:.3f}", f"{exact_s:.2f}", f"{solved_s:.2f}")
        rows.append((num_workers, num_experts, seed, len(exact.groups), *printed))
    return rows


def assignment_rows(sizes: Sequence[str], seeds: int) -> list[tuple]:
    """Returns a row for each random assignment of experts of unequal work; sizes are such as "8x4"."""
    rows = []
    for size, seed in itertools.product(sizes, range(seeds)):
        num_experts, num_workers = map(int, size.split("x"))
        rng = np.random.default_rng(seed)
        capacity = rng.integers(num_experts // num_workers, 2 * num_experts // num_workers + 1, num_workers)
        works, speeds = rng.uniform(1, 4, num_experts), rng.choice([1e3, 2e3, 4e3], num_workers)
        assignment, seconds = _timed(diffshard.experts.assign_experts, works, speeds, capacity)
        times = (assignment.step_s, assignment.greedy_s, assignment.lower_bound_s)
        printed = (*(f"{1e3 * s:.3f}" for s in times), f"{assignment.gap:.2%}", f"{seconds:.1f}")
        rows.append((num_experts, num_workers, seed, *printed))
    return rows


def _timed(plan: Callable, *arguments: Any) -> tuple[Any, float]:
    start_s = time.process_time()
    return plan(*arguments), time.process_time() - start_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 12, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--few", type=int, nargs="*", default=[10, 12], help="workers of the exact search")
    parser.add_argument("--few-experts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--assignments", nargs="*", default=["8x4", "16x8", "32x8"], help="experts x workers")
    options = parser.parse_args(arguments)
    group(irregular_cluster(2, 0), 2)  # so that seconds are without what the first plan of a process loads
    tables = (
        (
            f"Groups for {options.experts} experts on irregular clusters, ms",
            ("workers", "seed", "groups", "diffshard", "merging", "equal groups", "bound", "gap", "seconds"),
            irregular_rows(options.workers, options.experts, options.seeds),
        ),
        (
            "Groups of few workers with random links: the exact default beside the solver, ms",
            (
                "workers",
                "experts",
                "seed",
                "groups",
                "exact",
                "solver",
                "bound",
                "solver / exact",
                "exact s",
                "solver s",
            ),
            few_rows(options.few, options.few_experts, options.seeds),
        ),
        (
            "Experts of unequal work on unequal workers, ms",
            ("experts", "workers", "seed", "diffshard", "greedy", "bound", "gap", "seconds"),
            assignment_rows(options.assignments, options.seeds),
        ),
    )
    for table in tables:
        if table[2]:
            print_table(*table)


if __name__ == "__main__":
    main()
