"""The least largest load of the graphs of a published benchmark of device placement, beside the published ones.

    python -m experiments.pipelines.device_placement

Each graph has 6 accelerators with 16 GiB and one processor. A forward layer and its backward layer are on one device.
The load of an accelerator is the time of its layers and of every result that crosses its border, once; a processor does
not pay for results. The unit is the benchmark's own: milliseconds of a profile.

Source: Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (2020); inputs from
github.com/msr-fiddle/dnn-partitioning, throughput-inputs/LayerGraphs.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.pipelines.layer_graphs import LayerGraph, least_load
from experiments.tables import print_table

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "pipelines"
GRAPHS = DATA / "dnn-partitioning"
PUBLISHED = {"bert24_inference": 17.7899, "bert24_training": 41.7458, "resnet50_training": 78.6318}
"""The largest load that the authors' program prints, by graph."""


class Instance(NamedTuple):
    """A graph of the benchmark and the devices that it may take.

    Attributes:
      graph: with two kinds of devices: accelerators, then processors.
      devices: how many of each kind.
      memory_bytes: of each kind.
    """

    graph: LayerGraph
    devices: tuple[int, int]
    memory_bytes: tuple[float, float]


def read(path: Path) -> Instance:
    """Reads a graph; nodes of one color, a forward and a backward one, become one layer."""
    data = json.loads(path.read_text())
    colors = sorted({node["colorClass"] for node in data["nodes"]})
    layer_of = {node["id"]: colors.index(node["colorClass"]) for node in data["nodes"]}
    backward = {node["id"] for node in data["nodes"] if node["isBackwardNode"]}
    layer_s, layer_bytes = np.zeros((len(colors), 2)), np.zeros(len(colors))
    for node in data["nodes"]:
        accelerator_s = node["fpgaLatency"] if node["supportedOnFpga"] else np.inf
        layer_s[layer_of[node["id"]]] += (accelerator_s, node["cpuLatency"])
        layer_bytes[layer_of[node["id"]]] += node["size"]
    send_s: dict[int, float] = {}
    readers: dict[int, set[int]] = {}
    edges = set()
    for edge in data["edges"]:
        source, target = edge["sourceId"], edge["destId"]
        send_s[source] = edge["cost"]  # the same for all edges of a node
        readers.setdefault(source, set()).add(layer_of[target])
        if source not in backward and target not in backward:
            edges.add((layer_of[source], layer_of[target]))
    sends: list[list[tuple[float, frozenset[int]]]] = [[] for _ in colors]
    for source, seconds in send_s.items():
        sends[layer_of[source]].append((seconds, frozenset(readers[source])))
    graph = LayerGraph(len(colors), np.array(sorted(edges)), layer_s, layer_bytes, sends)
    return Instance(graph, (data["maxFPGAs"], data["maxCPUs"]), (data["maxSizePerFPGA"], np.inf))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; graphs that are not there are skipped and named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    options = parser.parse_args(arguments)
    rows, missing = [], []
    for name in options.graphs:
        path = GRAPHS / f"{name}.json"
        if not path.exists():
            missing.append(name)
            continue
        instance = read(path)
        start = time.perf_counter()
        division = least_load(
            instance.graph, instance.devices, pays_transfers=(True, False), memory_bytes=instance.memory_bytes
        )
        seconds = time.perf_counter() - start
        if division is None:
            raise RuntimeError(f"{name} fits no devices, although the benchmark has a division of it.")
        kinds = [sum(part.kind == kind for part in division.parts) for kind in (0, 1)]
        sizes = (instance.graph.num_layers, len(instance.graph.edges))
        loads = (f"{PUBLISHED[name]:.4f}", f"{division.load_s:.4f}")
        rows.append((name, *sizes, *loads, kinds[0], kinds[1], f"{seconds:.1f}"))
    columns = ("graph", "layers", "edges", "published", "largest load", "accelerators", "processors", "seconds")
    print_table("Least largest load of a device", columns, rows)
    if missing:
        print(f"Skipped: {GRAPHS} lacks {', '.join(missing)}.")


if __name__ == "__main__":
    main()
