"""Number formats chosen by the loss, against rules: training in float8, and the time of compiled programs with it.

    python -m experiments.formats [--steps 300] [--seeds 2] [--budgets 0.002 0.005 0.02]
    python -m experiments.formats --compile decoder --mesh 2x4

The first trains a byte GPT of two layers on the Python reference, on one device that emulates float8: exactly, with all
products in float8, with all but the head's, and with what `search` finds within budgets of the loss. Increases are
measured on this model by looks ahead, and priced on a model of the same code that is wide enough for its products to
pay, on 8 H100s. The second compiles a model of `experiments.timeline_models` for H100s (the extra `gpu-compile`) with
no product in float8 and with all that gain by it, and plays both programs back.
"""

import argparse
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import diffshard
from cost.base import Hardware
from diffshard.checks.achievable_rates import achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.plans.formats import format_s
from diffshard.sharding_search.number_formats import ProductGroup, product_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.host_devices import parse_mesh
from experiments.models import gpt, text
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES

ANY_LOSS = 1e9
"""A limit that no increase reaches."""
HEAD = "embed.attend"
SMALL = {"batch": 8, "width": 64, "sequence": 64}
WIDE = {"batch": 64, "width": 4096, "heads": 32, "sequence": 1024, "vocabulary": 32768}
LOOK_STEPS = 20


def groups_of(model: Model, mesh: Any, hardware: Hardware) -> list[ProductGroup]:
    """Returns the groups of products that may gain in float8."""
    options = Options(fn=model.step, mesh=mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes)
    return product_groups(space_of(options, trace_function(options, abstract_arguments(model))))


def without_overheads(mesh: Any) -> Hardware:
    """Returns H100s on which every product gains by float8, so that all of a small model are measured."""
    hardware = diffshard.preset("h100", dict(mesh.shape))
    return diffshard.Hardware(
        "h100 without overheads", hardware.flops_per_s, 1e18, hardware.memory_bytes, {}, kernel_launch_s=0.0
    )


def trained(step: Callable[..., Any], state: Any, batches: Sequence[jax.Array]) -> float:
    """Returns the mean loss of the last fifth of a training."""
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(loss)
    return float(np.mean(losses[-max(1, len(losses) // 5) :]))


def search(model: Model, mesh: Any, hardware: Any, limit: float, **formats: Any) -> Any:
    """Searches shardings and formats together."""
    limits = {"max_loss_increase": limit, **formats}
    return diffshard.search(model.step, mesh, hardware=hardware, formats=diffshard.Formats(**limits), progress="none")


def training_table(
    steps: int, seeds: int, budgets: Sequence[float], small: dict[str, Any], wide: dict[str, Any]
) -> None:
    """Trains with each rule and with what is found, and prints losses beside predictions."""
    model, priced_model = gpt.make(**small), gpt.make(**wide)
    one = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    hardware, free = diffshard.preset("h100", dict(mesh.shape)), without_overheads(one)
    tokens = text.load("python_reference")

    def batches(seed: int, count: int) -> list[jax.Array]:
        return [
            text.sample(tokens, jax.random.fold_in(jax.random.key(seed), i), small["batch"], small["sequence"])
            for i in range(count)
        ]

    init = jax.jit(model.init)
    first = init(jax.random.key(100))
    measured = search(
        model, one, free, ANY_LOSS, calls=[(first, b) for b in batches(100, 3 * LOOK_STEPS)], steps=LOOK_STEPS
    ).plan(*abstract_arguments(model))
    increases = measured.formats.increases
    candidates: dict[str, tuple[Collection[str], float]] = {
        "exact": ((), 1.0),
        "float8, all": (increases, ANY_LOSS),
        "float8, but not the head": ([name for name in increases if HEAD not in name], ANY_LOSS),
        **{f"found for {budget}": (increases, budget) for budget in budgets},
    }
    rows, exact = [], []
    for name, (offered, limit) in candidates.items():
        allowed = {group: increases[group] for group in offered}
        priced = search(priced_model, mesh, hardware, limit, increases=allowed)
        plan = priced.plan(*abstract_arguments(priced_model))
        rounded = {group.name: 0.0 for group in plan.formats.groups if group.num_float8}
        run = search(model, one, free, ANY_LOSS, increases=rounded)
        losses = [trained(run, init(jax.random.key(seed)), batches(seed, steps)) for seed in range(seeds)]
        exact = exact or losses
        rows.append(
            [name, f"{len(rounded)}", format_s(plan.step_s), format_s(plan.lower_bound_s)]
            + [f"{plan.formats.loss_increase:+.4f}"]
            + [f"{loss - other:+.4f}" for loss, other in zip(losses, exact, strict=True)]
        )
        print(*rows[-1], sep="  ", flush=True)
    columns = ["products", "groups", "step", "bound", "predicted", *(f"seed {seed}" for seed in range(seeds))]
    print_table(f"float8 in a byte GPT of {small['width']}: losses after {steps} steps", columns, rows)
    print("exact losses:", *(f"{loss:.4f}" for loss in exact))


def compiled_table(name: str, mesh_text: str, sizes: str, time_limit_s: float) -> None:
    """Compiles a model without float8 and with it, and prints both timelines."""
    case = CASES[name]
    model = case.make(batch=case.batches[mesh_text], **(case.full if sizes == "full" else case.small))
    mesh = MESHES["h100"](parse_mesh(mesh_text))
    hardware = diffshard.preset("h100", dict(mesh.shape))
    every = {group.name: 0.0 for group in groups_of(model, mesh, hardware)}
    rows, rates = [], achievable_rates(hardware)
    for label, increases in (("exact", {}), ("float8", every)):
        step = diffshard.search(
            model.step, mesh, hardware=hardware, time_limit_s=time_limit_s, donate_argnums=0,
            formats=diffshard.Formats(ANY_LOSS, increases=increases),
        )  # fmt: skip
        arguments = abstract_arguments(model)
        plan = step.plan(*arguments)
        hlo = step.lower(*arguments).compile().as_text() or ""
        float8 = set(re.findall(r"(%[\w.-]+) = f8\w+\[", hlo))
        products = [re.findall(r"%[\w.-]+", operands) for operands in re.findall(r" dot\(([^)]*)\)", hlo)]
        kernels = f"{sum(float8.issuperset(operands) for operands in products)} of {len(products)}"
        timeline = simulate(hlo, mesh.shape, rates)
        rows.append([label, format_s(plan.step_s), format_s(plan.lower_bound_s), format_s(timeline.step_s), kernels])
        print(*rows[-1], *timeline.notes, sep="  ", flush=True)
    columns = ["products", "predicted", "bound", "timeline", "in float8"]
    print_table(f"{name} on {mesh_text} H100s, compiled", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.002, 0.005, 0.02])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--compile", choices=CASES, help="compile this model instead")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each compiled plan")
    options = parser.parse_args(argv)
    if options.compile:
        compiled_table(options.compile, options.mesh, options.sizes, options.time_limit)
    else:
        small = SMALL if options.sizes == "full" else {"batch": 2, "width": 16, "sequence": 16}
        training_table(options.steps, options.seeds, options.budgets, small, WIDE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
