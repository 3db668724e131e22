"""The plans that Alpa's authors published for GPT on V100s, beside ours under the same prices.

    python -m experiments.pipelines.alpa_plans [--models 2.6B 15B 39B]

Both are priced by `gpt_costs.py` and simulated; theirs with the better of 1F1B and eager 1F1B. The batch is 1024.

Source: Zheng et al., "Alpa" (2022); plans from github.com/alpa-projects/alpa, benchmark/alpa/suite_auto_gpt.py.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from diffshard.pipelines.stage_dynamic_program import Stage, Submesh
from experiments.pipelines.chain_search import SCHEDULES, PipelinePlan, search, simulated
from experiments.pipelines.gpt_costs import MODELS, stage_tables, submeshes_of
from experiments.tables import print_table

BATCH = 1024


class PublishedPlan(NamedTuple):
    """A plan of Alpa.

    Attributes:
      num_devices: V100s, 8 in a host.
      num_microbatches: M.
      blocks: transformer blocks of each stage.
      meshes: for each stage, replicas times devices that split a layer.
    """

    num_devices: int
    num_microbatches: int
    blocks: tuple[int, ...]
    meshes: tuple[tuple[int, int], ...]


PLANS = {
    "2.6B": PublishedPlan(8, 128, (8, 8, 16), ((2, 1), (2, 1), (4, 1))),
    "6.7B": PublishedPlan(16, 64, (16, 16), ((2, 4),) * 2),
    "15B": PublishedPlan(32, 128, (12,) * 4, ((2, 4),) * 4),
    "39B": PublishedPlan(64, 1024, (3,) * 16, ((1, 4),) * 16),
}
"""By model. Alpa groups the blocks into 8 or 16 equal layers, and its stages are some of these."""


def priced(name: str, plan: PublishedPlan) -> PipelinePlan:
    """Returns a published plan with its simulated step time; the embedding and the head are in the outer stages."""
    submeshes = [Submesh(0, replicas * split, (replicas, split)) for replicas, split in plan.meshes]
    tables = stage_tables(MODELS[name], submeshes, BATCH // plan.num_microbatches)
    cuts = [0]
    for blocks in plan.blocks:
        cuts.append(cuts[-1] + blocks + (cuts[-1] == 0))
    cuts[-1] += 1
    stages = [Stage(start, end, p) for p, (start, end) in enumerate(pairwise(cuts))]
    plans = [simulated(stages, submeshes, tables, plan.num_microbatches, schedule) for schedule in SCHEDULES]
    return min(plans, key=lambda found: found.step_s)


def described(plan: PipelinePlan, submeshes: Sequence[Submesh]) -> str:
    """Returns the layers and meshes of the stages of a plan, equal neighbours together."""
    parts: list[list] = []
    for stage in plan.stages:
        replicas, split = submeshes[stage.submesh].shape
        text = f"{stage.end - stage.start} on {replicas}x{split}"
        if parts and parts[-1][1] == text:
            parts[-1][0] += 1
        else:
            parts.append([1, text])
    return ", ".join(text if count == 1 else f"{count} of {text}" for count, text in parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PLANS, default=list(PLANS))
    options = parser.parse_args(arguments)
    rows = []
    for name in options.models:
        published, model = PLANS[name], MODELS[name]
        theirs = priced(name, published)
        submeshes = submeshes_of(published.num_devices)
        counts = [BATCH >> i for i in range(7)]
        ours = search(
            model.num_blocks + 2,
            published.num_devices,
            submeshes,
            lambda samples, model=model, submeshes=submeshes: stage_tables(model, submeshes, samples),
            BATCH,
            counts,
            max_stages=min(published.num_devices, 16),
        )
        if ours.plan is None:
            raise RuntimeError(f"No plan of {name} fits {published.num_devices} devices, although Alpa's does.")
        gap = ours.plan.step_s / ours.bound_s - 1
        cells = (
            f"{theirs.step_s:.2f}",
            f"{ours.plan.step_s:.2f}",
            f"{theirs.step_s / ours.plan.step_s:.3f}",
            f"{gap:.1%}",
        )
        kind = (ours.plan.num_microbatches, ours.plan.schedule, described(ours.plan, submeshes))
        rows.append((name, published.num_devices, *cells, *kind, f"{ours.search_s:.0f}"))
    columns = (
        "model",
        "GPUs",
        "Alpa's s",
        "ours s",
        "ratio",
        "gap",
        "M",
        "schedule",
        "layers on replicas x split",
        "processor s",
    )
    print_table("Steps of 1024 samples, predicted", columns, rows)


if __name__ == "__main__":
    main()
