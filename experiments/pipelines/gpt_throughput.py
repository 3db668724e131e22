"""Planned pipelines of GPT on 8 to 64 V100s beside the best of Megatron's hand-tuned grid, under the same prices.

    python -m experiments.pipelines.gpt_throughput [--models 1.3B 2.6B 6.7B 13B]

Megatron's grid has all replicas x splits x stages in powers of two with equal stages, all sizes of micro-batches, 1F1B
and full recomputation. Our stages may have different meshes and numbers of layers. Both are priced by `gpt_costs.py`
and simulated; the batch is 1024 samples of 1024 tokens. The grid is priced with eager 1F1B too, which Megatron does not
have, to tell what the schedule brings from what the stages bring.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from cost.pipeline_schedules import Schedule
from diffshard.pipelines.stage_dynamic_program import Stage, Submesh
from experiments.pipelines.alpa_plans import BATCH, described
from experiments.pipelines.chain_search import PipelinePlan, SearchResult, equal_cuts, search, simulated
from experiments.pipelines.gpt_costs import MODELS, Gpt, stage_tables, submeshes_of
from experiments.tables import print_table

DEVICES = {"1.3B": 8, "2.6B": 16, "6.7B": 32, "13B": 64}
MAX_STAGES = 16
"""The most stages of our plans. More were never used, and each takes another run over the tables."""


def grid(
    model: Gpt, num_devices: int, batch: int, schedule: Schedule = "1f1b"
) -> Iterator[tuple[PipelinePlan, Submesh]]:
    """Yields all plans of Megatron's grid with the mesh of their stages."""
    for submesh in submeshes_of(num_devices):
        num_stages = num_devices // submesh.num_devices
        if model.num_blocks % num_stages:
            continue
        stages = [Stage(start, end, 0) for start, end in pairwise(equal_cuts(model.num_blocks + 2, num_stages))]
        samples = submesh.shape[0]
        while samples <= batch:
            tables = stage_tables(model, [submesh], samples)
            yield simulated(stages, [submesh], tables, batch // samples, schedule), submesh
            samples *= 2


def best_of_grid(model: Gpt, num_devices: int, batch: int, schedule: Schedule = "1f1b") -> tuple[PipelinePlan, Submesh]:
    """Returns the fastest plan of the grid.

    Raises:
      ValueError: none fits the memory.
    """
    best = min(grid(model, num_devices, batch, schedule), key=lambda found: found[0].step_s)
    if math.isinf(best[0].step_s):
        raise ValueError(f"`model` fits {num_devices} devices with no plan of the grid; take more.")
    return best


def planned(model: Gpt, num_devices: int, batch: int, max_stages: int = MAX_STAGES) -> SearchResult:
    """Searches our plan over all numbers of micro-batches that are powers of two."""
    submeshes = submeshes_of(num_devices)
    return search(
        model.num_blocks + 2,
        num_devices,
        submeshes,
        lambda samples: stage_tables(model, submeshes, samples),
        batch,
        [batch >> i for i in range(int(math.log2(batch)) + 1)],
        max_stages=min(num_devices, max_stages),
    )


def flops_of_step(model: Gpt, batch: int) -> float:
    """Returns the floating-point operations of a step without recomputation."""
    tokens = batch * model.num_tokens
    blocks = model.num_blocks * (24 * model.width**2 + 4 * model.num_tokens * model.width)
    return 3.0 * tokens * (blocks + 2 * model.width * model.vocabulary)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DEVICES, default=list(DEVICES))
    options = parser.parse_args(arguments)
    rows, plans = [], []
    for name in options.models:
        model, num_devices = MODELS[name], DEVICES[name]
        theirs, mesh = best_of_grid(model, num_devices, BATCH)
        eager, _ = best_of_grid(model, num_devices, BATCH, "eager")
        ours = planned(model, num_devices, BATCH)
        if ours.plan is None:
            raise RuntimeError(f"No plan of {name} fits {num_devices} devices, although one of the grid does.")
        rates = [flops_of_step(model, BATCH) / plan.step_s / num_devices / 1e12 for plan in (theirs, ours.plan)]
        ratio = f"{theirs.step_s / ours.plan.step_s:.3f}"
        gap = f"{ours.plan.step_s / ours.bound_s - 1:.1%}"
        seconds = (f"{theirs.step_s:.2f}", f"{eager.step_s:.2f}", f"{ours.plan.step_s:.2f}")
        rows.append(
            (name, num_devices, *seconds, ratio, gap, *(f"{rate:.1f}" for rate in rates), f"{ours.search_s:.0f}")
        )
        shape = described(ours.plan, submeshes_of(num_devices))
        plans.append((name, "Megatron", theirs.num_microbatches, theirs.schedule, described(theirs, [mesh])))
        plans.append((name, "ours", ours.plan.num_microbatches, ours.plan.schedule, shape))
    columns = (
        "model",
        "GPUs",
        "Megatron s",
        "eager s",
        "ours s",
        "throughput",
        "gap",
        "TFLOP/s",
        "ours",
        "processor s",
    )
    print_table("Steps of 1024 samples, predicted; eager: the grid with eager 1F1B", columns, rows)
    print_table("Their plans", ("model", "plan", "M", "schedule", "layers on replicas x split"), plans)


if __name__ == "__main__":
    main()
