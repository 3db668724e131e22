"""How long planning takes, how much memory it needs, and what a searched step adds to `jax.jit`'s own dispatch.

    python -m experiments.speed

Each plan is made in a process of its own, without JAX's compilation cache, so that its peak memory is its own.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diffshard
from diffshard.plans.base import PlanData
from experiments.models import decoder, gpt
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table

SIZES = {"width": 256, "heads": 8, "key_value_heads": 8, "sequence": 128, "vocabulary": 512, "batch": 16}
CASES = ((12, "unrolled", 30), (48, "unrolled", 90), (12, "scanned", 15), (96, "scanned", 15))
# Source: Llama 3.1 8B (Dubey et al., arXiv:2407.21783, table 3).
DECODER = {
    "width": 4096, "heads": 32, "key_value_heads": 8, "hidden": 14336, "sequence": 2048, "vocabulary": 128256,
    "batch": 256,
}  # fmt: skip
DECODER_CASES = ((8, 0.0), (32, 0.0), (32, 30.0))  # layers; GiB of the memory limit, 0 for the device's memory


def plan_gpt(layers: int, stack: str, **sizes: int) -> dict[str, float]:
    """Plans a GPT training step on an abstract 2x4 mesh of H100s; returns what the table shows."""
    arguments: dict[str, Any] = {**SIZES, **sizes, "layers": layers, "stack": getattr(gpt, stack)}
    return _plan(gpt.make(**arguments), (2, 4), None)


def plan_decoder(layers: int, limit_gib: float, **sizes: int) -> dict[str, float]:
    """Plans a training step of an unrolled decoder on an abstract 32x8 mesh of H100s; returns what the table shows."""
    arguments: dict[str, Any] = {**DECODER, **sizes, "layers": layers}
    return _plan(decoder.make(**arguments), (32, 8), limit_gib * 2**30 or None)


def _plan(model: Model, mesh_shape: tuple[int, int], memory_limit_bytes: float | None) -> dict[str, float]:
    """Plans a step.

    Returns:
      The number of operations, seconds of tracing and searching by the clock and of the processor, the gap, how many
      layers' arguments are split otherwise than those of the first, and the peak RSS in bytes.
    """
    state, batch = abstract_arguments(model)
    mesh = jax.sharding.AbstractMesh(mesh_shape, ("data", "model"))
    start, start_cpu = time.perf_counter(), time.process_time()
    step = diffshard.search(model.step, mesh, hardware="h100", donate_argnums=0, memory_limit_bytes=memory_limit_bytes)
    plan = step.plan(state, batch)
    return {
        "operations": len(plan.operations),
        "seconds": time.perf_counter() - start,
        "cpu_s": time.process_time() - start_cpu,
        "gap": plan.gap,
        "unlike_layers": unlike_layers(plan),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def unlike_layers(plan: PlanData) -> int:
    """Counts the layers, by the numbers in the names of arguments, that are split otherwise than layer 0."""
    specs: dict[int, dict[str, Any]] = {}
    for argument in plan.arguments:
        name = re.search(r"layer_(\d+)", argument.path)
        if name is not None:
            specs.setdefault(int(name[1]), {})[argument.path.replace(name[0], "layer")] = argument.spec
    return sum(own != specs[0] for own in specs.values())


def dispatch_s(repeats: int = 2000, rounds: int = 9) -> tuple[list[float], list[float]]:
    """Measures the seconds of a call of a searched step and of the same jitted function alone, in turns.

    The function is small and on one device, so that a call is dispatch and little else; its state has 100 arrays.
    """

    def step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [s + 1 for s in state], x * 2

    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    planned_step = diffshard.search(step, mesh, hardware="cpu")
    state, x = [jnp.zeros(()) for _ in range(100)], jnp.zeros(())
    state, x = planned_step.plan(state, x).shard(state, x)
    plain_step = jax.jit(step)
    times_s: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for i, run in enumerate((planned_step, plain_step)):
            seconds = _loop_s(run, state, x, repeats)
            if round_:  # the first compiles
                times_s[i].append(seconds)
    return times_s


def _apart(case: str) -> dict[str, float]:
    """Plans a case in a process of its own."""
    command = [sys.executable, "-m", "experiments.speed", "--case", case]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def _cells(result: dict[str, float], wanted_s: str) -> tuple[str, ...]:
    return (
        f"{result['operations']:,.0f}", f"{result['seconds']:.1f}", f"{result['cpu_s']:.1f}", wanted_s,
        f"{result['gap']:.3%}", f"{result['unlike_layers']:.0f}", f"{result['peak_rss_bytes'] / 2**30:.2f}",
    )  # fmt: skip


def _loop_s(run: Callable[..., Any], state: Any, x: Any, repeats: int) -> float:
    out = jax.block_until_ready(run(state, x))
    start = time.perf_counter()
    for _ in range(repeats):
        out = run(state, x)
    seconds = (time.perf_counter() - start) / repeats
    jax.block_until_ready(out)
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="gpt,LAYERS,STACK or decoder,LAYERS,GIB: plan this one here, print it as JSON")
    parser.add_argument("--quick", action="store_true", help="2 layers and few repeats, to see that it works")
    options = parser.parse_args(argv)
    if options.case:
        plan, layers, detail = options.case.split(",")
        result = plan_gpt(int(layers), detail) if plan == "gpt" else plan_decoder(int(layers), float(detail))
        print(json.dumps(result))
        return
    cases = ((2, "unrolled", 30), (2, "scanned", 15)) if options.quick else CASES
    rows = []
    for layers, stack, wanted_s in cases:
        result = _apart(f"gpt,{layers},{stack}")
        rows.append((f"GPT {layers} layers, {stack}", *_cells(result, f"{wanted_s}")))
    columns = ("vertices", "seconds", "CPU s", "asked", "gap to the bound", "unlike layers", "peak RSS GiB")
    print_table("Planning a training step on a 2x4 mesh", ("step", *columns), rows)
    rows = []
    for layers, limit_gib in ((1, 0.0),) if options.quick else DECODER_CASES:
        limit = f"at most {limit_gib:.0f} GiB" if limit_gib else "80 GB"
        result = _apart(f"decoder,{layers},{limit_gib}")
        rows.append(
            (f"decoder of 8B, {layers} layers, unrolled, {limit}", *_cells(result, "12" if layers == 32 else ""))
        )
    print_table("Planning a training step on a 32x8 mesh", ("step", *columns), rows)
    searched, plain = dispatch_s(*((100, 3) if options.quick else (2000, 9)))
    added = (np.array(searched) - np.array(plain)) * 1e6
    print_table(
        "A call of a step with 100 arrays of state, one device",
        ("searched µs", "jax.jit µs", "added µs (median, least, most)"),
        [(f"{np.median(searched) * 1e6:.1f}", f"{np.median(plain) * 1e6:.1f}",
          f"{np.median(added):.1f}, {added.min():.1f}, {added.max():.1f}")],
    )  # fmt: skip


if __name__ == "__main__":
    main()
