"""Pipelines that `search` finds for a GPT: beside one stage over all devices, and on clusters of unequal devices.

    python -m experiments.pipelines.found_pipelines --size 1.3B --hosts 1xv100 --batch 64 --microbatches 16
    python -m experiments.pipelines.found_pipelines --layers 12 --width 1024 --hosts 1xa100,1xt4 --batch 64

The found pipeline stands beside one stage over all devices of each kind, and beside pipelines on each kind alone. All
are priced by the same engine and simulator.
"""

import argparse
import time
from collections.abc import Sequence

import diffshard
from cost.base import Link
from experiments.pipelines.gpt_step import add_size_options, shapes, size_from, step_of
from experiments.tables import print_table

_DEVICES_IN_HOST = {"v100": 8, "a100": 8, "t4": 4, "h100": 8}
_ETHERNET = Link(30e-6, 8 / 100e9)
"""Between hosts of different kinds: 100 Gbit/s."""


def main(args: Sequence[str] | None = None) -> None:
    """Searches, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size_options(parser)
    parser.add_argument("--hosts", default="1xv100", help="such as 1xv100 or 1xa100,2xt4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16])
    parser.add_argument("--max-stages", type=int, default=8)
    options = parser.parse_args(args)
    size = size_from(options)
    hosts = [hosts_of(text) for text in options.hosts.split(",")]
    step = step_of(size)
    clusters = [("all", hosts, options.max_stages)]
    clusters += [(f"{h.name} alone, one stage", [h], 1) for h in hosts]
    clusters += [(f"{h.name} alone", [h], options.max_stages) for h in hosts if len(hosts) > 1]
    rows = []
    for name, part, max_stages in clusters:
        cluster = diffshard.Cluster(part, between=_ETHERNET if len(part) > 1 else None)
        pipeline = diffshard.Pipeline(
            microbatches=tuple(options.microbatches), schedules=("1f1b",), max_stages=max_stages
        )
        begin_s = time.process_time()
        try:
            plan = diffshard.search(step, cluster, pipeline=pipeline, donate_argnums=0).plan(
                *shapes(size, options.batch)
            )
        except diffshard.InfeasibleError:
            rows.append([name, "fits not", "", "", "", "", ""])
            continue
        stages = "; ".join(
            f"{s.last_layer - s.first_layer + 1} on {'x'.join(map(str, s.mesh_axes.values()))} {s.hardware}"
            for s in plan.stages
        )
        numbers = f"{plan.step_s:.3f}", f"{plan.lower_bound_s:.3f}", f"{plan.gap:.1%}", f"{plan.bubble:.1%}"
        rows.append([name, *numbers, stages, f"{time.process_time() - begin_s:.0f}"])
    head = ["devices", "step s", "bound s", "gap", "bubble", "layers of stages", "search CPU s"]
    print_table(
        f"GPT of {size.layers} layers, width {size.width}, batch {options.batch}, on {options.hosts}", head, rows
    )


def hosts_of(text: str) -> diffshard.Hosts:
    """Returns hosts of one kind, by their number and hardware, such as `2xa100`."""
    count, _, kind = text.partition("x")
    return diffshard.Hosts(int(count), devices=_DEVICES_IN_HOST[kind], hardware=kind)


if __name__ == "__main__":
    main()
