"""What pipelines keep, make again and offload where memory is short, beside `jax.checkpoint` around each layer by hand.

    python -m experiments.pipelines.residuals --layers 8 --width 1024 --gpu v100 --memory 16 8 6 4

A GPT without `jax.checkpoint` is planned for one host of GPUs that have less and less memory, with residuals that may
be kept, made again or offloaded; and the same GPT with `jax.checkpoint` around each layer, whose residuals are kept.
"""

import argparse
import time
from collections.abc import Sequence

import diffshard
from diffshard.plans.printing import format_bytes
from experiments.pipelines.gpt_step import GptSize, shapes, step_of
from experiments.tables import print_table

_CHOICES = {
    "all kept": (False, ("keep",)),
    "recomputed": (False, ("keep", "recompute")),
    "offloaded": (False, ("keep", "offload")),
    "both": (False, ("keep", "recompute", "offload")),
    "jax.checkpoint": (True, ("keep",)),
}
"""By the name of a row: whether each layer has `jax.checkpoint`, and what residuals may be."""


def main(args: Sequence[str] | None = None) -> None:
    """Plans, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--words", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--gpu", default="v100", help="the name of a preset")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--max-stages", type=int, default=2)
    parser.add_argument("--memory", type=float, nargs="+", default=[16.0, 8.0, 6.0, 4.0], help="GiB of a GPU")
    parser.add_argument("--choices", nargs="+", choices=list(_CHOICES), default=list(_CHOICES))
    options = parser.parse_args(args)
    size = GptSize(options.layers, options.width, options.width // 64, options.words, options.length)
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=options.gpus, hardware=options.gpu)])
    rows = []
    for memory in options.memory:
        for choice in options.choices:
            remat, residuals = _CHOICES[choice]
            step = step_of(size, remat=remat)
            pipeline = diffshard.Pipeline(
                microbatches=options.microbatches,
                schedules=("1f1b",),
                max_stages=options.max_stages,
                residuals=residuals,
            )
            begin_s = time.process_time()
            search = diffshard.search(
                step, cluster, pipeline=pipeline, donate_argnums=0, memory_limit_bytes=memory * 2**30
            )
            try:
                plan = search.plan(*shapes(size, options.batch))
            except diffshard.InfeasibleError:
                rows.append([f"{memory:g}", choice, "none fits", "", "", "", "", _cpu_s(begin_s)])
                continue
            rows.append([f"{memory:g}", choice, *_cells(plan), _cpu_s(begin_s)])
    head = ["GiB", "residuals", "step s", "bound s", "stages", "made again", "offloaded", "search CPU s"]
    print_table(
        f"GPT of {size.layers} layers, width {size.width}, batch {options.batch} in {options.microbatches} "
        f"micro-batches, on {options.gpus} x {options.gpu}",
        head,
        rows,
    )


def _cells(plan: diffshard.PipelinePlan) -> list[str]:
    stages = [f"{s.last_layer - s.first_layer + 1} on {'x'.join(map(str, s.mesh_axes.values()))}" for s in plan.stages]
    again = [
        f"{s.recomputed_operations} op, {format_bytes(s.recomputed_bytes)}" if s.recomputed_operations else "-"
        for s in plan.stages
    ]
    away = [f"{format_bytes(s.offloaded_bytes)}" if s.num_offloaded else "-" for s in plan.stages]
    return [f"{plan.step_s:.4f}", f"{plan.lower_bound_s:.4f}", *("; ".join(cells) for cells in (stages, again, away))]


def _cpu_s(begin_s: float) -> str:
    return f"{time.process_time() - begin_s:.0f}"


if __name__ == "__main__":
    main()
