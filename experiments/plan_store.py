"""How long the second start of a job plans, when the first one has left its plan in a store.

    python -m experiments.plan_store

Each start is a process of its own, without JAX's compilation cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import diffshard
from experiments.models import decoder
from experiments.models.model import Model, abstract_arguments
from experiments.speed import DECODER
from experiments.tables import print_table

LAYERS = (12, 32)
SMALL = {
    "width": 64, "heads": 8, "key_value_heads": 4, "hidden": 128, "sequence": 32, "vocabulary": 256, "batch": 256
}  # fmt: skip
STARTS = 3
"""Second starts of which the median is shown."""


def start(layers: int, folder: str, sizes: dict[str, int]) -> dict[str, float]:
    """Plans a training step of an unrolled decoder for 32 x 8 H100s, with a store; returns what the table shows."""
    model = _decoder(layers, sizes)
    arguments = abstract_arguments(model)
    mesh = jax.sharding.AbstractMesh((32, 8), ("data", "model"))
    step = diffshard.search(model.step, mesh, hardware="h100", donate_argnums=0, cache=folder)
    plan, seconds, cpu_s = _timed(lambda: step.plan(*arguments))
    size = os.path.getsize(plan.stored_in) if plan.stored_in else 0
    return {"seconds": seconds, "cpu_s": cpu_s, "num_bytes": size, "operations": len(plan.operations)}


def tracing(layers: int, sizes: dict[str, int]) -> dict[str, float]:
    """Measures what `jax.jit` alone takes to trace the same step, which it does at every start of a job."""
    model = _decoder(layers, sizes)
    arguments = abstract_arguments(model)
    _, seconds, cpu_s = _timed(lambda: jax.jit(model.step).trace(*arguments))
    return {"seconds": seconds, "cpu_s": cpu_s}


def _decoder(layers: int, sizes: dict[str, int]) -> Model:
    options: dict[str, Any] = {**sizes, "layers": layers}
    return decoder.make(**options)


def _timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - start_s, time.process_time() - start_cpu_s


def _apart(*words: str) -> dict[str, float]:
    """Runs a case in a process of its own."""
    command = [sys.executable, "-m", "experiments.plan_store", *words]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def _row(layers: int, more: Sequence[str]) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        words = ("--layers", str(layers), *more)
        first = _apart("--start", folder, *words)
        starts = [_apart("--start", folder, *words) for _ in range(STARTS)]
        second = sorted(starts, key=lambda result: result["cpu_s"])[STARTS // 2]
        traced = sorted((_apart("--tracing", *words) for _ in range(STARTS)), key=lambda result: result["cpu_s"])
    if not second["num_bytes"]:
        raise RuntimeError("The second start searched again.")
    return (
        f"{layers}", f"{first['operations']:,.0f}", f"{first['seconds']:.1f}", f"{first['cpu_s']:.1f}",
        f"{second['seconds']:.2f}", f"{second['cpu_s']:.2f}", f"{traced[STARTS // 2]['cpu_s']:.2f}",
        f"{second['num_bytes'] / 2**20:.2f}",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", metavar="FOLDER", help="plan here with this store, print it as JSON")
    parser.add_argument("--tracing", action="store_true", help="only trace here, print it as JSON")
    parser.add_argument("--layers", type=int, default=LAYERS[0], help="for the two options before this")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    options = parser.parse_args(argv)
    sizes = SMALL if options.quick else DECODER
    if options.start or options.tracing:
        result = start(options.layers, options.start, sizes) if options.start else tracing(options.layers, sizes)
        print(json.dumps(result))
        return
    columns = (
        "layers", "vertices", "first start s", "CPU s", "second start s", "CPU s", "of which tracing, CPU s", "file MiB"
    )  # fmt: skip
    rows = [_row(layers, ("--quick",) if options.quick else ()) for layers in ((1,) if options.quick else LAYERS)]
    print_table("Planning a training step of a decoder on a 32x8 mesh with a store of plans", columns, rows)


if __name__ == "__main__":
    main()
