"""Replicas of a pipeline on unequal devices, beside pipelines without them, even splits, and the fast devices alone.

    python -m experiments.pipelines.unequal_devices --model gpt --hosts 2xa100,2xt4 --batch 256 --microbatches 32

All are priced by the same engine and simulator. The even splits are the best of these: a stage with as many layers as
the others for each kind or each host, and a replica with as many micro-batches as the others for each kind.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import diffshard
from cost.base import Link
from diffshard.live_progress import LiveLine
from diffshard.pipelines.cutting import uncut_step
from diffshard.pipelines.decisions import ChosenPipeline
from diffshard.pipelines.options import PipelineOptions, donated_arrays
from diffshard.pipelines.planned_pipeline import FoundPipeline, planned_pipeline, with_bound
from diffshard.pipelines.plans.base import PipelinePlanData
from diffshard.pipelines.plans.consistency import simulated
from diffshard.pipelines.replica_search import choose_replicas, replicas_bound_s
from diffshard.pipelines.replicated_pipeline import planned_replicas
from diffshard.pipelines.search import find_pipeline
from diffshard.pipelines.stage_dynamic_program import Stage
from diffshard.pipelines.step_search import StepSearch
from diffshard.processes import Processes
from experiments.pipelines.gpt_step import GptSize, shapes, train_step
from experiments.pipelines.residual_step import residual_shapes, residual_step
from experiments.tables import print_table

_DEVICES_IN_HOST = {"v100": 8, "a100": 8, "t4": 4, "h100": 8}
_ETHERNET = Link(30e-6, 8 / 100e9)
"""Between hosts: 100 Gbit/s."""
_SCHEDULE = "1f1b"


def main(args: Sequence[str] | None = None) -> None:
    """Searches, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "residual"), default="gpt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024, help="words of an example of the GPT")
    parser.add_argument("--hosts", default="2xa100,2xt4", help="the fast kind first")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--max-stages", type=int, default=4)
    options = parser.parse_args(args)
    step, of_batch = _model(options)
    hosts = [_hosts(text) for text in options.hosts.split(",")]
    without, own_s = _found(step, of_batch, hosts, options)
    rows = [["no replicas", *_numbers(without.plan), _words(without.plan), f"{own_s:.0f}"]]
    fast, own_s = _found(step, of_batch, hosts[:1], options)
    rows.append([f"{hosts[0].name} alone", *_numbers(fast.plan), _words(fast.plan), f"{own_s:.0f}"])
    rows += _replicas_and_even_splits(step, of_batch, hosts, options, without)
    head = ["devices", "step s", "bound s", "gap", "bubble", "layers of stages, micro-batches", "CPU s"]
    title = (
        f"{options.model}: {options.layers} layers, width {options.width}, batch {options.batch}, on {options.hosts}"
    )
    print_table(title, head, rows)


def _model(options: argparse.Namespace) -> tuple[Callable[..., Any], Any]:
    if options.model == "residual":
        return residual_step, residual_shapes(options.layers, options.width, options.batch)
    size = GptSize(options.layers, options.width, options.width // 64, length=options.length)
    step = functools.partial(train_step, heads=size.heads)
    functools.update_wrapper(step, train_step)
    return step, shapes(size, options.batch)


def _options(
    step: Callable[..., Any], hosts: Sequence[Any], options: argparse.Namespace, max_replicas: int
) -> PipelineOptions:
    pipeline = diffshard.Pipeline(
        microbatches=options.microbatches,
        schedules=(_SCHEDULE,),
        max_stages=options.max_stages,
        max_replicas=max_replicas,
    )
    cluster = diffshard.Cluster(hosts, between=_ETHERNET)
    return PipelineOptions(fn=step, cluster=cluster, pipeline=pipeline, donate_argnums=(0,))


def _found(
    step: Callable[..., Any], of_batch: Any, hosts: Sequence[Any], options: argparse.Namespace
) -> tuple[FoundPipeline, float]:
    begin_s = time.process_time()
    asked = _options(step, hosts, options, 1)
    found = find_pipeline(asked, of_batch, {}, Processes((0,)), LiveLine("", None))
    return found, time.process_time() - begin_s


def _replicas_and_even_splits(
    step: Callable[..., Any], of_batch: Any, hosts: Sequence[Any], options: argparse.Namespace, without: FoundPipeline
) -> list[list[str]]:
    """Returns the rows of the best replicas, whether they are faster or not, and of even splits."""
    begin_s = time.process_time()
    asked = _options(step, hosts, options, len(hosts))
    count, cluster = options.microbatches, asked.cluster
    donated = donated_arrays(asked, of_batch, {})
    search = StepSearch(asked, uncut_step(step, count, asked.pipeline.batch, of_batch, {}), donated)
    rows = []
    best = choose_replicas([search], lambda: False)
    if best is None:
        rows.append(["replicas", "fit not", "", "", "", "", ""])
    else:
        plan = planned_replicas(search, best, without.plan, Processes((0,))).plan
        plan = with_bound(plan, min(without.plan.lower_bound_s, replicas_bound_s(search)))
        own_s = time.process_time() - begin_s
        rows.append(["replicas", *_numbers(plan), _words(plan), f"{own_s:.0f}"])
        others = tuple(replace(r, num_microbatches=count // (1 + len(plan.replicas))) for r in plan.replicas)
        even = replace(plan, replicas=others)
        step_s = simulated(even).step_s
        rows.append(["even replicas", f"{step_s:.3f}", "", "", "", _words(even), ""])
    of_kind = [max(range(len(search.submeshes)), key=lambda p: (search.submeshes[p].kind == k,
               search.submeshes[p].num_devices)) for k in range(len(hosts))]  # fmt: skip
    of_host = [p for k, h in enumerate(cluster.kinds) for _ in range(h.count) for p, s in enumerate(search.submeshes)
               if s.kind == k and s.num_devices == h.devices]  # fmt: skip
    divisions = {tuple(of_kind): "even layers, a stage for each kind", tuple(of_host): "a stage for each host"}
    for submeshes, name in divisions.items():
        bounds = [round(i * len(search.chain) / len(submeshes)) for i in range(len(submeshes) + 1)]
        stages = tuple(Stage(a, b, p) for a, b, p in zip(bounds, bounds[1:], submeshes, strict=False))
        in_flight = tuple(min(count, len(stages) - i) for i in range(len(stages)))
        chosen = ChosenPipeline(count, _SCHEDULE, stages, in_flight, 0.0, ())
        try:
            plan = planned_pipeline(search, chosen, Processes((0,))).plan
            rows.append([name, f"{plan.step_s:.3f}", "", "", f"{plan.bubble:.1%}", _words(plan), ""])
        except diffshard.InfeasibleError:
            rows.append([name, "fits not", "", "", "", "", ""])
    return rows


def _numbers(plan: PipelinePlanData) -> tuple[str, ...]:
    return f"{plan.step_s:.3f}", f"{plan.lower_bound_s:.3f}", f"{plan.gap:.1%}", f"{plan.bubble:.1%}"


def _words(plan: PipelinePlanData) -> str:
    replicas = [(plan.main_microbatches, plan.stages, "")]
    replicas += [
        (r.num_microbatches, r.stages, f" (weights {r.weights_s:.3f} s, sums {r.sums_s:.3f} s)") for r in plan.replicas
    ]
    return "; and ".join(f"{count} in {_stages(stages)}{exchange}" for count, stages, exchange in replicas)


def _stages(stages: Sequence[Any]) -> str:
    return ", ".join(
        f"{s.last_layer - s.first_layer + 1} on {'x'.join(map(str, s.mesh_axes.values()))} {s.hardware}" for s in stages
    )


def _hosts(text: str) -> diffshard.Hosts:
    count, _, kind = text.partition("x")
    return diffshard.Hosts(int(count), devices=_DEVICES_IN_HOST[kind], hardware=kind)


if __name__ == "__main__":
    main()
