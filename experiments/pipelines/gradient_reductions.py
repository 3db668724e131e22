"""Gradients reduced in each micro-batch, or once a step: predicted seconds and memory, and XLA's programs for H100s.

    python -m experiments.pipelines.gradient_reductions --layers 4 --width 1024 --hosts 2x2 --batch 64 --microbatches 4

A pipeline of H100s is searched with each way alone. With --compile all programs of its stages are compiled for H100s:
what they reduce over devices in a step is counted, in micro-batches and at the end, and a timeline of the programs of
the stage that takes longest stands beside the prediction. That needs the extra `gpu-compile`.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import diffshard
from diffshard.checks.collectives import hlo_collectives
from diffshard.checks.kernel_work import H100_HOST, achievable_rates
from diffshard.checks.targets import gpu_mesh
from diffshard.checks.timeline import simulate
from diffshard.pipelines.pipelined_function import PipelinedFunction
from experiments.pipelines.gpt_step import GptSize, shapes, step_of
from experiments.pipelines.stage_memory import compiled_program, stage_memory
from experiments.tables import print_table

_LATENCY_S, _BYTES_PER_S = 30e-6, 100e9 / 8
"""Of the network between hosts, 100 Gbit/s for all devices of a host together."""
_WAYS = ("each_microbatch", "once")
_HEAD = ["gradients", "step s", "bound s", "CPU s", "groups", "GiB"]
_COMPILED_HEAD = ["XLA step s", "XLA GiB", "GB in micro-batches", "summed", "GB at the end"]


class CompiledPipeline(NamedTuple):
    """A pipeline as XLA compiled it for H100s.

    Attributes:
      step_s: by the timeline of the slowest stage: all micro-batches one after the other, then the end.
      peak_bytes: of the fullest device.
      microbatch_bytes: of all collectives of forward and backward programs in all micro-batches, the most of a stage.
      summed_bytes: the part of them that backward programs sum over devices.
      end_bytes: of all collectives at the end of the step, the most of a stage.
    """

    step_s: float
    peak_bytes: int
    microbatch_bytes: float
    summed_bytes: float
    end_bytes: float


def main(args: Sequence[str] | None = None) -> None:
    """Searches with each way, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--words", type=int, default=8192)
    parser.add_argument("--hosts", default="2x2", help="hosts x H100s of each, linked by 100 Gbit/s")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--max-stages", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile for H100s")
    options = parser.parse_args(args)
    size = GptSize(options.layers, options.width, options.width // 64, options.words, options.length)
    step = step_of(size)
    num_hosts, in_host = map(int, options.hosts.split("x"))
    arguments = shapes(size, options.batch)
    rows = []
    for way in _WAYS:
        pipeline = diffshard.Pipeline(
            microbatches=options.microbatches,
            schedules=("1f1b",),
            max_stages=options.max_stages,
            gradient_reductions=(way,),
        )
        begin_s = time.process_time()
        cluster = _cluster(num_hosts, in_host, with_devices=options.compile)
        function = diffshard.search(step, cluster, pipeline=pipeline, donate_argnums=0)
        assert isinstance(function, PipelinedFunction)
        try:
            plan = function.plan(*arguments)
        except diffshard.InfeasibleError:
            rows.append([way, "fits not", *[""] * (len(_HEAD) - 2 + len(_COMPILED_HEAD) * options.compile)])
            continue
        peak_bytes = max(stage.peak_bytes for stage in plan.stages)
        row = [way, f"{plan.step_s:.4f}", f"{plan.lower_bound_s:.4f}", f"{time.process_time() - begin_s:.0f}"]
        row += [str(plan.num_groups), f"{peak_bytes / 2**30:.2f}"]
        if options.compile:
            found = compiled(function, arguments)
            row += [f"{found.step_s:.4f}", f"{found.peak_bytes / 2**30:.2f}"]
            sent = found.microbatch_bytes, found.summed_bytes, found.end_bytes
            row += [f"{num_bytes / 1e9:.3f}" for num_bytes in sent]
        rows.append(row)
    title = (
        f"GPT of {size.layers} layers, width {size.width}, {size.words} words, batch {options.batch} x {size.length}, "
        f"{options.microbatches} micro-batches, {options.hosts} H100s"
    )
    print_table(title, [*_HEAD, *(_COMPILED_HEAD if options.compile else [])], rows)


def compiled(function: PipelinedFunction, arguments: Sequence[Any]) -> CompiledPipeline:
    """Compiles the programs of a pipeline for the devices of its cluster, without running them."""
    execution = function.execution(*arguments)
    calls, staged = execution.calls, execution.calls.staged
    in_host = function.options.cluster.kinds[0].devices
    host = replace(H100_HOST, num_devices=in_host, network_bytes_per_s=_BYTES_PER_S, network_hop_s=_LATENCY_S)
    hardware = [function.options.cluster.hardware(0, dict(mesh.shape)) for mesh in calls.meshes]
    step_s, sent, summed, at_end = np.zeros((4, staged.num_stages))
    for label, call in calls.calls.items():
        stage, mesh = label.stage, calls.meshes[label.stage]
        text = compiled_program(calls, call).as_text()
        count = staged.num_microbatches if label.kind in ("forward", "backward") else 1
        step_s[stage] += count * simulate(text, mesh.shape, achievable_rates(hardware[stage], host=host)).step_s
        for record in hlo_collectives(text, mesh.shape):
            num_bytes = count * record.num_bytes * record.count
            if label.kind in ("forward", "backward"):
                sent[stage] += num_bytes
                is_sum = record.kind in ("all_reduce", "reduce_scatter")
                summed[stage] += num_bytes if label.kind == "backward" and is_sum else 0.0
            else:
                at_end[stage] += num_bytes
    memory = stage_memory(calls, execution.graph)
    return CompiledPipeline(step_s.max(), max(m.peak_bytes for m in memory), sent.max(), summed.max(), at_end.max())


def _cluster(num_hosts: int, in_host: int, *, with_devices: bool) -> diffshard.Cluster:
    """Returns hosts of H100s, with devices that XLA compiles for, or described only."""
    hosts = [diffshard.Hosts(num_hosts, devices=in_host, hardware="h100")]
    between = diffshard.Link(_LATENCY_S, 1 / _BYTES_PER_S) if num_hosts > 1 else None
    if not with_devices:
        return diffshard.Cluster(hosts, between=between)
    devices = gpu_mesh({"host": num_hosts, "device": in_host}, gpus_per_host=in_host).devices
    return diffshard.Cluster(hosts, between=between, devices=(tuple(tuple(host) for host in devices),))


if __name__ == "__main__":
    main()
