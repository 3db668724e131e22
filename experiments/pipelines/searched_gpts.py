"""Pipelines that `search` finds for GPT 1.3B to 13B on 8 to 64 V100s, beside the best one of equal stages.

    python -m experiments.pipelines.searched_gpts
    python -m experiments.pipelines.searched_gpts --sizes 1.3B --microbatches 64 128 --schedules 1f1b eager gpipe

All prices are the engine's. Equal stages are what Megatron's users tune by hand: the same number of layers and of
devices in each stage and 1F1B, for each number of stages that divides both. Each of these stages has its best sharding
here too, so that the difference is what unequal stages, unequal meshes and other schedules bring.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import diffshard
from diffshard.pipelines.cutting import uncut_step
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.step_search import StepSearch
from experiments.pipelines.gpt_step import SIZES, GptSize, shapes, train_step
from experiments.tables import print_table

HOSTS = {"1.3B": 1, "2.6B": 2, "6.7B": 4, "13B": 8}
"""How many hosts each model gets, of 8 V100s as in Alpa, Zheng et al. (2022), figure 7."""

_EQUAL_STAGE_LIMIT_S = 120.0
"""For the solver, for one of the equal stages: so long that a busy machine cuts none of them off."""


class EqualStages(NamedTuple):
    """The best pipeline of equal stages.

    Attributes:
      num_stages: S.
      devices: of each.
      step_s: simulated.
    """

    num_stages: int
    devices: int
    step_s: float


def main(args: Sequence[str] | None = None) -> None:
    """Searches, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=list(SIZES), nargs="+", default=list(SIZES))
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[128])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "eager"])
    parser.add_argument("--layers", type=int, help="in place of the size's own")
    parser.add_argument("--max-stages", type=int, default=8)
    parser.add_argument("--devices-each", type=int, default=8, help="of a host")
    parser.add_argument("--equal-only", action="store_true", help="prices the best equal stages alone")
    options = parser.parse_args(args)
    rows, stages = [], []
    for name in options.sizes:
        size = SIZES[name] if options.layers is None else SIZES[name]._replace(layers=options.layers)
        cluster = diffshard.Cluster([diffshard.Hosts(HOSTS[name], devices=options.devices_each, hardware="v100")])
        pipeline = diffshard.Pipeline(
            microbatches=options.microbatches, schedules=options.schedules, max_stages=options.max_stages
        )
        step = functools.partial(train_step, heads=size.heads)
        functools.update_wrapper(step, train_step)
        options_of_search = PipelineOptions(
            fn=step, cluster=cluster, pipeline=pipeline, donate_argnums=(0,), time_limit_s=_EQUAL_STAGE_LIMIT_S
        )
        if options.equal_only:
            equal = equal_stages(options_of_search, size, options.batch)
            row = "fits not" if equal is None else f"{equal.num_stages} on {equal.devices}, {equal.step_s:.2f} s"
            print(f"{name}: equal stages {row}", flush=True)
            continue
        begin_s = time.process_time()
        function = diffshard.search(step, cluster, pipeline=pipeline, donate_argnums=0)
        plan = function.plan(*shapes(size, options.batch))
        search_s = time.process_time() - begin_s
        equal = equal_stages(options_of_search, size, options.batch)
        tried_s = min(seconds for _, _, seconds in plan.tried)
        beside = ["fits not", "", ""]
        if equal is not None:
            beside = [f"{equal.num_stages} on {equal.devices}", f"{equal.step_s:.2f}", f"{equal.step_s / tried_s:.3f}"]
        rows.append(
            [
                *(name, cluster.num_devices, *beside, f"{tried_s:.2f}", f"{plan.step_s:.2f}"),
                *(f"{plan.lower_bound_s:.2f}", f"{plan.gap:.1%}", f"{search_s:.0f}"),
            ]
        )
        stages.append([name, plan.num_microbatches, plan.schedule, f"{plan.bubble:.1%}", _text(plan)])
    if options.equal_only:
        return
    head = ["model", "GPUs", "equal stages", "step s", "throughput", "found s", "planned s", "bound s", "gap", "CPU s"]
    print_table(f"Steps of {options.batch} samples, predicted", head, rows)
    print_table("Their plans", ["model", "M", "schedule", "bubble", "layers of stages on meshes"], stages)


def equal_stages(options: PipelineOptions, size: GptSize, batch_size: int) -> EqualStages | None:
    """Returns the best pipeline of equal stages on equal meshes with 1F1B; None where none fits the memory.

    Args:
      options: of the search, whose numbers of micro-batches are tried.
      size: of the GPT.
      batch_size: B.
    """
    found, pipeline, num_devices = [], options.pipeline, options.cluster.num_devices
    arguments = shapes(size, batch_size)
    donated = donated_arrays(options, arguments, {})
    for count in pipeline.microbatch_counts:
        search = StepSearch(options, uncut_step(options.fn, count, pipeline.batch, arguments, {}), donated)
        layer_of_trip = {cut.trip: layer for layer, cut in enumerate(search.chain.cuts, 1) if cut.trip}
        for num_stages in range(1, pipeline.max_stages + 1):
            submeshes = [p for p, s in enumerate(search.submeshes) if s.num_devices * num_stages == num_devices]
            if size.layers % num_stages or not submeshes:
                continue
            trips = range(size.layers // num_stages, size.layers, size.layers // num_stages)
            bounds = np.array([0, *(layer_of_trip[trip] for trip in trips), len(search.chain)])
            stages = tuple(Stage(int(a), int(b), submeshes[0]) for a, b in itertools.pairwise(bounds))
            division = search.divisions.solved_division(stages, "1f1b")
            if division is not None:
                devices = num_devices // num_stages
                found.append(EqualStages(num_stages, devices, search.divisions.simulated_s("1f1b", division)))
    return min(found, key=lambda equal: equal.step_s, default=None)


def _text(plan: diffshard.PipelinePlan) -> str:
    """Returns the layers and meshes of the stages, equal ones after each other together."""
    texts: list[list] = []
    for stage in plan.stages:
        text = f"{stage.last_layer - stage.first_layer + 1} on {'x'.join(map(str, stage.mesh_axes.values()))}"
        if texts and texts[-1][1] == text:
            texts[-1][0] += 1
        else:
            texts.append([1, text])
    return ", ".join(text if count == 1 else f"{count} of {text}" for count, text in texts)


if __name__ == "__main__":
    main()
