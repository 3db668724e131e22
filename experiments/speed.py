"""How long planning takes, how much memory it needs, and what a searched step adds to `jax.jit`'s own dispatch.

    python -m experiments.speed

Each plan is made in a process of its own, without JAX's compilation cache, so that its peak memory is its own.
"""

import argparse
import json
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
from experiments.models import gpt
from experiments.models.model import abstract_arguments
from experiments.tables import print_table

SIZES = {"width": 256, "heads": 8, "key_value_heads": 8, "sequence": 128, "vocabulary": 512, "batch": 16}
CASES = ((12, "unrolled", 30), (48, "unrolled", 90), (12, "scanned", 15), (96, "scanned", 15))


def plan_gpt(layers: int, stack: str, **sizes: int) -> dict[str, float]:
    """Plans a GPT training step on an abstract 2x4 mesh of H100s.

    Returns:
      Numbers of equations and nodes, seconds of tracing and searching, predicted step and gap, peak RSS in bytes.
    """
    arguments: dict[str, Any] = {**SIZES, **sizes, "layers": layers, "stack": getattr(gpt, stack)}
    model = gpt.make(**arguments)
    state, batch = abstract_arguments(model)
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    start = time.perf_counter()
    plan = diffshard.search(model.step, mesh, hardware="h100", donate_argnums=0).plan(state, batch)
    return {
        "operations": len(plan.operations),
        "seconds": time.perf_counter() - start,
        "gap": plan.gap,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def dispatch_s(repeats: int = 2000, rounds: int = 9) -> tuple[list[float], list[float]]:
    """Measures the seconds of a call of a searched step and of the same jitted function alone, in turns.

    The function is small and on one device, so that a call is dispatch and little else; its state has 100 arrays.
    """

    def step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [s + 1 for s in state], x * 2

    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    searched = diffshard.search(step, mesh, hardware="cpu")
    state, x = [jnp.zeros(()) for _ in range(100)], jnp.zeros(())
    state, x = searched.plan(state, x).shard(state, x)
    plain = jax.jit(step)
    times_s: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for i, run in enumerate((searched, plain)):
            seconds = _loop_s(run, state, x, repeats)
            if round_:  # the first compiles
                times_s[i].append(seconds)
    return times_s


def _loop_s(run: Callable[..., Any], state: Any, x: Any, repeats: int) -> float:
    out = jax.block_until_ready(run(state, x))
    start = time.perf_counter()
    for _ in range(repeats):
        out = run(state, x)
    seconds = (time.perf_counter() - start) / repeats
    jax.block_until_ready(out)
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="LAYERS,STACK: plan this one here and print it as JSON")
    parser.add_argument("--quick", action="store_true", help="2 layers and few repeats, to see that it works")
    options = parser.parse_args(argv)
    if options.case:
        layers, stack = options.case.split(",")
        print(json.dumps(plan_gpt(int(layers), stack)))
        return
    cases = ((2, "unrolled", 30), (2, "scanned", 15)) if options.quick else CASES
    rows = []
    for layers, stack, wanted_s in cases:
        command = [sys.executable, "-m", "experiments.speed", "--case", f"{layers},{stack}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            (f"GPT {layers} layers, {stack}", f"{result['operations']:,.0f}", f"{result['seconds']:.1f}", wanted_s,
             f"{result['gap']:.2%}", f"{result['peak_rss_bytes'] / 2**30:.2f}")
        )  # fmt: skip
    print_table(
        "Planning a training step on a 2x4 mesh",
        ("step", "vertices", "seconds", "asked", "gap to the bound", "peak RSS GiB"),
        rows,
    )
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
