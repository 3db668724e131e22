"""Plans change where numbers are computed, not the numbers: each example model on each mesh against one device.

    python -m experiments.equal_results [--models gpt moe] [--meshes 8 2x4]

Plans are made for hardware with slow arithmetic, so that they split everything that can be split.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

import diffshard
from diffshard import Hardware, Link
from experiments.host_devices import host_mesh, parse_mesh
from experiments.models import dlrm, gpt, gpt_nnx, mlp, moe, resnet
from experiments.models.model import Model, abstract_arguments, arguments
from experiments.tables import print_table

MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: mlp.make(optimizer=optax.adamw(1e-3)),
    "gpt": gpt.make,
    "gpt-scanned": lambda: gpt.make(stack=gpt.scanned),
    "gpt-remat": lambda: gpt.make(block=nn.remat(gpt.Block)),
    "gpt-odd": lambda: gpt.make(key_value_heads=2, vocabulary=257),
    "gpt-nnx": gpt_nnx.make,
    "moe": moe.make,
    "resnet": resnet.make,
    "dlrm": dlrm.make,
}
MESHES = ("8", "2x4", "4x2", "2x2x2")
STEPS = 2
# float32 sums in another order differ in rounding. Adam divides a gradient by its own size, so an element whose
# gradient is rounding noise moves by up to a learning rate (1e-3) either way: the share of such elements is bounded.
LOSS_TOLERANCE = 1e-5
STATE_TOLERANCE = 1e-4
NOISY_SHARE = 1e-4


class RunDifference(NamedTuple):
    """How far the planned run is from the run on one device.

    Attributes:
      loss: largest relative difference of the losses.
      state: largest difference of an element of the state, relative to the largest element of its tensor; the noisy
        share of the elements does not count.
      noisy: share of the state's elements that differ by more than `STATE_TOLERANCE`.
    """

    loss: float
    state: float
    noisy: float

    @property
    def equal(self) -> bool:
        """Whether all differences can be those of rounding."""
        return self.loss <= LOSS_TOLERANCE and self.noisy <= NOISY_SHARE


class PlannedRun(NamedTuple):
    """A model on a mesh: its plan, and how a run with it compares with the run on one device."""

    model: str
    mesh: str
    plan: diffshard.Plan
    search_s: float
    difference: RunDifference


def slow_arithmetic(mesh: Mesh) -> Hardware:
    """Makes hardware so slow at arithmetic that splitting it pays for any communication."""
    links = {str(axis): Link(1e-7, 1e-7) for axis in mesh.axis_names}
    return Hardware("slow arithmetic", flops_per_s=1e7, memory_bytes_per_s=1e9, memory_bytes=1e10, links=links)


def compare(reference: tuple[Any, Sequence[Any]], planned: tuple[Any, Sequence[Any]]) -> RunDifference:
    """Compares `(state, losses)` of two runs."""
    losses = [np.asarray(run[1], np.float64) for run in (reference, planned)]
    differences = [
        np.abs(np.asarray(b, np.float64) - np.asarray(a, np.float64)).ravel() / max(np.abs(np.asarray(a)).max(), 1e-6)
        for a, b in zip(jax.tree.leaves(reference[0]), jax.tree.leaves(planned[0]), strict=True)
        if np.size(a)
    ]
    everything = np.sort(np.concatenate(differences))
    quiet = everything[: len(everything) - int(NOISY_SHARE * len(everything))]
    loss = float(np.max(np.abs(losses[1] - losses[0]) / np.abs(losses[0])))
    return RunDifference(loss, float(quiet[-1]), float(np.mean(~(everything <= STATE_TOLERANCE))))


def run_steps(step: Callable[..., Any], state: Any, batch: Any, steps: int) -> tuple[Any, list[Any]]:
    """Returns the state after some steps on one batch, and the losses."""
    losses = []
    for _ in range(steps):
        state, loss = step(state, batch)
        losses.append(np.asarray(loss))
    return jax.device_get(state), losses


def check(
    name: str, mesh_text: str, reference: tuple[Any, Any], *, solver: str | None, time_limit_s: float
) -> PlannedRun:
    """Searches a plan for the model, runs it, and compares with the reference run."""
    model, mesh = MODELS[name](), host_mesh(parse_mesh(mesh_text))
    step = diffshard.search(model.step, mesh, hardware=slow_arithmetic(mesh), solver=solver, time_limit_s=time_limit_s)
    start = time.perf_counter()
    plan = step.plan(*abstract_arguments(model))
    search_s = time.perf_counter() - start
    state, batch = plan.shard(*arguments(model))
    return PlannedRun(name, mesh_text, plan, search_s, compare(reference, run_steps(step, state, batch, STEPS)))


def cells(row: PlannedRun) -> tuple[object, ...]:
    """Returns the cells of a run's row in the table."""
    difference = row.difference
    return (
        row.model,
        row.mesh,
        f"{row.search_s:.1f} s",
        f"{sum(any(tensor.spec) for tensor in row.plan.arguments)} of {len(row.plan.arguments)}",
        len(row.plan.collectives),
        f"{difference.loss:.1e}",
        f"{difference.state:.1e}",
        "equal" if difference.equal else f"DIFFERS ({difference.noisy:.1%} of elements)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if any result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--solver", default=None, help="as in diffshard.search; the default is diffshard's")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)

    rows = []
    for name in options.models:
        host_mesh(parse_mesh(options.meshes[0]))
        model = MODELS[name]()
        reference = run_steps(jax.jit(model.step), *arguments(model), STEPS)
        rows += [
            check(name, m, reference, solver=options.solver, time_limit_s=options.time_limit) for m in options.meshes
        ]
    columns = ("model", "mesh", "search", "arguments split", "collectives", "loss differs", "state differs", "verdict")
    print_table(f"Equal results: {STEPS} steps with the plan against one device", columns, map(cells, rows))
    return 0 if all(row.difference.equal for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
