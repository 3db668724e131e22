"""Pipelines of a GPT with each schedule alone: how long stages wait, beside closed formulas, and what they keep.

    python -m experiments.pipelines.schedules --size 1.3B --hosts 1xv100 --batch 64 --microbatches 16
    python -m experiments.pipelines.schedules --size 1.3B --hosts 1xa100 --batch 64 --microbatches 16 --no-remat

Equal stages are simulated first. "kept" are micro-batches that the fullest device keeps at one time, of all its stages.

Each schedule is searched alone (unless `--together` is given), so that it has the number of devices, stages and
shardings that suit it. All prices are the engine's. `--split` shows what splitting backward programs costs in their
place: products of both halves, and the arrays that wait between them.

"Formula" is how long stages of equal times without transfers would wait, relative to what they compute: (D - 1)/M with
1F1B, (D - 1)/(v·M) interleaved, (D - 1)(F + B - W)/(M(F + B + W)) with ZB-H1, and with ZB-V the way of the first
micro-batch to the last device, (D - 1)·F/(2M(F + B + W)). F, B and W are those of a device's stages.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import diffshard
from cost.compute import equation_work, inner_jaxprs
from cost.pipeline_schedules import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Schedule,
    checked_stages_per_device,
    graph_of,
    splits_backward,
)
from cost.pipeline_times import StageTimes, simulate
from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.layer_chain import layer_chain
from diffshard.pipelines.microbatches import BatchArguments
from experiments.pipelines.found_pipelines import hosts_of
from experiments.pipelines.gpt_step import GptSize, add_size_options, shapes, size_from, step_of
from experiments.tables import print_table
from search_spaces.pipelines.divided_program import is_between, with_split_backward
from search_spaces.pipelines.stage_labels import Label
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.pipelines.step_parts import num_bytes

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "eager", "interleaved", "zb-h1", "zb-v")

_SIMULATED: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("eager", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
)


def main(args: Sequence[str] | None = None) -> None:
    """Searches, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size_options(parser)
    parser.add_argument("--hosts", default="1xv100", help="such as 1xv100 or 2xa100")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--most-devices", type=int, default=4, help="the largest number of parts of the cluster")
    parser.add_argument("--no-remat", action="store_true", help="without `jax.checkpoint` around each layer")
    parser.add_argument("--together", action="store_true", help="one search that chooses among the schedules")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--split", action="store_true", help="the halves of the backward programs of a small GPT")
    options = parser.parse_args(args)
    if options.split:
        rows = [row for remat in (False, True) for row in split_rows(GptSize(4, 64, 4, words=256, length=32), remat)]
        head = ["jax.checkpoint", "stage", "backward", "first half", "weights", "residuals", "between", "still read"]
        print_table("A GPT of 4 layers in 2 stages, a micro-batch: Mflop of products, and MB", head, rows)
        return
    print_table(
        "Equal stages, simulated: forward, backward and weights take a device 1 s each",
        ["D", "M", "transfer s", "schedule", "step s", "waits", "formula", "kept"],
        [row for setting in ((4, 8, 0.0), (4, 8, 0.1), (8, 32, 0.0), (8, 32, 0.1)) for row in simulated_rows(*setting)],
    )
    size = size_from(options)
    step = step_of(size, remat=not options.no_remat)
    cluster = diffshard.Cluster([hosts_of(options.hosts)])
    rows = []
    for schedules in [options.schedules] if options.together else [[schedule] for schedule in options.schedules]:
        each = max(checked_stages_per_device(schedule, None) for schedule in schedules)
        pipeline = diffshard.Pipeline(
            microbatches=options.microbatches, schedules=schedules, max_stages=each * options.most_devices
        )
        begin_s = time.process_time()
        try:
            function = diffshard.search(step, cluster, pipeline=pipeline, donate_argnums=0)
            plan = function.plan(*shapes(size, options.batch))
        except diffshard.InfeasibleError:
            rows.append([", ".join(schedules), "fits not", *[""] * 8])
            continue
        rows.append([plan.schedule, *_cells(plan), f"{time.process_time() - begin_s:.0f}"])
    head = ["schedule", "stages", "devices", "step s", "waits", "formula", "GiB", "residuals", "bound s", "CPU s"]
    remat = "without" if options.no_remat else "with"
    print_table(
        f"GPT of {size.layers} layers, width {size.width}, {remat} jax.checkpoint, batch {options.batch} in "
        f"{options.microbatches} micro-batches, on {options.hosts}",
        head,
        rows,
    )


def _cells(plan: diffshard.PipelinePlan) -> list[str]:
    """Returns the stages and devices, the step, the waits beside the formula, and the memory of the fullest device."""
    memory: dict[tuple[int, ...], list[float]] = {}
    for stage in plan.stages:
        own = memory.setdefault(stage.devices, [0.0, 0.0])
        own[0] += stage.peak_bytes / 2**30
        own[1] += stage.in_flight * stage.residual_bytes / 2**30
    peak, residuals = max(memory.values())
    sizes = sorted({len(devices) for devices in memory})
    return [
        f"{len(plan.stages)}",
        f"{len(memory)} of {' or '.join(map(str, sizes))}",
        f"{plan.step_s:.3f}",
        f"{plan.bubble / (1 - plan.bubble):.1%}",
        f"{formula(plan):.1%}",
        f"{peak:.1f}",
        f"{residuals:.1f}",
        f"{plan.lower_bound_s:.3f}",
    ]


def formula(plan: diffshard.PipelinePlan) -> float:
    """Returns how long stages of equal times without transfers would wait, relative to what they compute."""
    size = len(plan.stages)
    seconds = (
        sum(getattr(stage, name) for stage in plan.stages) / size for name in ("forward_s", "backward_s", "weights_s")
    )
    return _waits(
        plan.schedule, size // plan.stages_per_device, plan.num_microbatches, plan.stages_per_device, *seconds
    )


def _waits(
    schedule: Schedule, num_devices: int, count: int, each: int, forward: float, backward: float, weights: float
) -> float:
    whole = forward + backward + weights
    shares = {"interleaved": 1 / each, "zb-h1": (whole - 2 * weights) / whole, "zb-v": forward / whole / each}
    return (num_devices - 1) / count * shares.get(schedule, 1.0)


def simulated_rows(num_devices: int, count: int, send_s: float) -> list[list[str]]:
    """Returns a row for each schedule of equal stages whose forward, backward and weights take 1 s each on a device.

    Args:
      num_devices: D.
      count: M.
      send_s: of an activation or its gradient between two devices.
    """
    rows = []
    for schedule, each in _SIMULATED:
        size, is_split = num_devices * each, splits_backward(schedule)
        graph = graph_of(schedule, size, count, each)
        sends = [send_s * (graph.device[i] != graph.device[i + 1]) for i in range(size - 1)]
        backward = [(1 if is_split else 2) / each] * size
        times = StageTimes([1 / each] * size, backward, sends, sends, [1 / each] * size if is_split else None)
        found = simulate(times, graph)
        last = WEIGHTS if is_split else BACKWARD
        change = ((graph.kind == FORWARD).astype(int) - (graph.kind == last)) / each
        kept = max(np.cumsum(change[graph.device[graph.stage] == d]).max() for d in range(num_devices))
        waits = found.bubble / (1 - found.bubble)
        expected = _waits(schedule, num_devices, count, each, 1.0, 1.0 if is_split else 2.0, float(is_split))
        name = f"{schedule}, {each} on each" if schedule == "interleaved" else schedule
        rows.append(
            [num_devices, count, send_s, name, f"{found.step_s:.2f}", f"{waits:.1%}", f"{expected:.1%}", f"{kept:g}"]
        )
    return rows


def split_rows(size: GptSize, is_remat: bool) -> list[list[str]]:
    """Returns a row for each of two stages: products of its backward program and of its halves, and what waits."""
    step = step_of(size, remat=is_remat, dtype=jnp.float32)
    uncut = uncut_step(step, 4, BatchArguments((1,), ()), shapes(size, 16), {})
    chain = layer_chain(uncut, most_layers=48)
    cut = cut_step(uncut, chain.cuts_before([len(chain) // 2]))
    staged = staged_step(cut.parts, cut.cuts)
    split, rows = with_split_backward(staged), []
    for stage in range(2):
        halves = [split.programs.get(Label(kind, stage)) for kind in ("backward", "weights")]
        programs = [staged.programs[Label("backward", stage)], *halves]
        flops = [0.0 if p is None else _product_flops(p.program.jaxpr) / 1e6 for p in programs]
        read = [set() if p is None else set(p.reads) for p in programs]
        residuals = {k for k in read[0] if k in staged.makers and staged.makers[k].kind == "forward"}
        between = {key for key in read[2] if is_between(key)}
        sizes = [
            sum(num_bytes(split.avals[k]) for k in keys) / 1e6 for keys in (residuals, between, residuals & read[2])
        ]
        rows.append(["with" if is_remat else "without", stage, *(f"{x:.2f}" for x in (*flops, *sizes))])
    return rows


def _product_flops(jaxpr: Any, trips: int = 1) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += trips * equation_work(equation).flops
        for inner in inner_jaxprs(equation):
            total += _product_flops(getattr(inner, "jaxpr", inner), trips * equation.params.get("length", 1))
    return total


if __name__ == "__main__":
    main()
