"""A found plan against four baselines: predicted times, and what the compiler makes of each.

    python -m experiments.peers [--models gpt moe mlp] [--mesh 2x4] [--hardware h100] [--target h100]

The prediction for a baseline is that of the best plan with the baseline's shardings of state and batch. A baseline's
compiled program is what `jax.jit` makes of these shardings and of the baseline's rules for activations.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import diffshard
from diffshard.checks.verify import Verification, verify
from experiments import hand_plans
from experiments.host_devices import parse_mesh
from experiments.models import gpt, mlp, moe
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES


def _sized(make: Callable[..., Model]) -> Model:
    return make(batch=16, layers=2, width=1024, heads=16, sequence=512, vocabulary=8192)


MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: _sized(gpt.make),
    "moe": lambda: _sized(moe.make),
    "mlp": lambda: mlp.make(layers=4, width=4096, batch=4096),
}
BASELINES = ("data parallel", "fsdp", "megatron", "megatron fsdp")
# The search ends before its gap is closed: a found plan is no worse within this share of a baseline's prediction.
TOLERANCE = 1e-3


class PeerPlan(NamedTuple):
    """A plan of a model: the one that was found, or that of a baseline.

    Attributes:
      model: its name.
      name: "found", or the baseline's name.
      plan: the search's plan, for a baseline with its shardings given; None if nothing fits the memory limit.
      compiled: what Shardy and XLA make of the program that would run.
    """

    model: str
    name: str
    plan: diffshard.Plan | None
    compiled: Verification


def compare(name: str, model: Model, mesh: Any, **search_options: Any) -> list[PeerPlan]:
    """Returns the found plan, then each baseline's."""
    args = abstract_arguments(model)
    step = diffshard.search(model.step, mesh, donate_argnums=0, **search_options)
    plan = step.plan(*args)
    rows = [PeerPlan(name, "found", plan, verify(step.lower(*args), mesh.shape, plan.collectives, plan.peak_bytes))]
    for baseline in BASELINES:
        by_hand = hand_plans.HAND_PLANS[baseline](*args, mesh)
        with_shardings = diffshard.search(
            model.step, mesh, donate_argnums=0, in_shardings=by_hand.in_shardings, **search_options
        )
        try:
            plan = with_shardings.plan(*args)
        except diffshard.InfeasibleError:
            plan = None
        lowered = hand_plans.lower_by_hand(model.step, *args, by_hand, donate_argnums=0)
        predicted = (plan.collectives, plan.peak_bytes) if plan else ((), float("nan"))
        rows.append(PeerPlan(name, baseline, plan, verify(lowered, mesh.shape, *predicted)))
    return rows


def best_is_found(rows: Sequence[PeerPlan]) -> bool:
    """Tells whether no baseline's plan is predicted to be faster than the found one, which is the first of the rows."""
    plan, *by_hand = (row.plan for row in rows)
    return plan is not None and all(p is None or plan.step_s <= (1 + TOLERANCE) * p.step_s for p in by_hand)


def cells(row: PeerPlan, axes: Sequence[str]) -> tuple[object, ...]:
    """Returns the cells of a plan's row in the table; bytes sent are those of one device, in MB."""
    sent = {r.axis: r for r in row.compiled.sent}
    predicted = [f"{sent[axis].predicted / 1e6:.1f}" if row.plan and axis in sent else "0.0" for axis in axes]
    compiled = [f"{sent[axis].compiled / 1e6:.1f}" if axis in sent else "0.0" for axis in axes]
    memory = row.compiled.memory
    return (
        row.model,
        row.name,
        f"{row.plan.step_s * 1e3:.3f} ms" if row.plan else "does not fit",
        f"{row.plan.compute_s * 1e3:.3f} ms" if row.plan else "",
        *predicted,
        f"{row.plan.peak_bytes / 1e6:.0f}" if row.plan else "",
        *compiled,
        f"{row.compiled.num_collectives:.0f}",
        f"{memory.compiled / 1e6:.0f}" if memory else "",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if a baseline's plan is predicted to be faster than the found one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mesh", default="2x4", help="data x model")
    parser.add_argument("--hardware", default="h100", help="the preset that plans are made for")
    parser.add_argument("--target", choices=MESHES, default="host", help="what the programs are compiled for")
    parser.add_argument("--memory-limit", type=float, default=None, help="bytes of each device")
    parser.add_argument("--solver", default=None, help="as in diffshard.search; the default is diffshard's")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    mesh = MESHES[options.target](parse_mesh(options.mesh))
    groups = [
        compare(
            name, MODELS[name](), mesh, hardware=options.hardware, memory_limit_bytes=options.memory_limit,
            solver=options.solver, time_limit_s=options.time_limit,
        )
        for name in options.models
    ]  # fmt: skip
    axes = mesh.axis_names
    columns = (
        "model", "plan", "predicted step", "computing", *(f"sent on {axis}" for axis in axes), "peak",
        *(f"XLA: sent on {axis}" for axis in axes), "collectives", "peak",
    )  # fmt: skip
    title = f"Plans for {options.hardware} on {options.mesh}, compiled for {options.target}; bytes of one device in MB"
    print_table(title, columns, [cells(row, axes) for rows in groups for row in rows])
    return 0 if all(map(best_is_found, groups)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
