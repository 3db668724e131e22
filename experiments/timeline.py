"""Found plans against baselines' by the time that their compiled programs take on the GPUs.

    python -m experiments.timeline [--models decoder unet] [--meshes 2x4 4x8] [--traces FOLDER] [-o rows.jsonl]

Models of several kinds (`experiments.timeline_models`) are planned, their steps are compiled for H100s that need not be
there (the extra `gpu-compile`), and `diffshard.checks.timeline` plays the scheduled programs back: matrix products at
70% of the datasheet's rate, memory at 80%, NVLink at 360 GB/s and InfiniBand at 45 GB/s for each GPU. A found plan runs
by its default executor, a baseline's by XLA's propagation. The prediction for a baseline is that of the best plan with
the baseline's shardings of state and batch. Rows that the output file has already are not made again.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

import diffshard
from cost.networks import links_of
from diffshard.baselines.base import DoesNotApplyError
from diffshard.checks.kernel_work import H100_HOST, achievable_rates
from diffshard.checks.timeline import Timeline, simulate
from diffshard.checks.timeline_lanes import write_perfetto
from diffshard.checks.verify import verify
from diffshard.plans.timeline import PredictedWait
from experiments import hand_plans
from experiments.host_devices import parse_mesh
from experiments.models.model import Model, abstract_arguments
from experiments.schedule import AT_ONCE
from experiments.targets import MESHES
from experiments.timeline_models import CASES
from experiments.timeline_table import FOUND, Row, append_row, cells, print_rows, read_rows

PUBLISHED = ("fsdp", "hybrid fsdp", "data parallel", "megatron fsdp", "megatron")


def achievable(mesh: Mesh) -> diffshard.Hardware:
    """Returns H100s with the links at whose rates the timeline runs, for plans whose cost knows them."""
    links = links_of(H100_HOST, mesh.shape)
    return replace(diffshard.preset("h100", {}), name="H100-80GB, achievable links", links=links)


HARDWARE: dict[str, Callable[[Mesh], diffshard.Hardware]] = {
    "datasheet": lambda mesh: diffshard.preset("h100", dict(mesh.shape)),
    "achievable": achievable,
}


class Setting(NamedTuple):
    """A case to plan: a model with its name in the table and its batch, on a mesh of some hardware."""

    name: str
    batch: int
    model: Model
    mesh: Mesh
    hardware: diffshard.Hardware


def time_plan(
    setting: Setting, plan_name: str, time_limit_s: float, by_hand: hand_plans.HandPlan | None = None, at_once: int = 1
) -> tuple[Row, Timeline]:
    """Plans, compiles and plays back the found plan, a baseline's, or one that is given.

    Programs by hand may have `at_once` collectives under way together, as found ones have four.
    """
    _, _, model, mesh, hardware = setting
    args = abstract_arguments(model)
    if by_hand is None and plan_name != FOUND:
        by_hand = hand_plans.HAND_PLANS[plan_name](*args, mesh)
    step = diffshard.search(
        model.step, mesh, hardware=hardware, time_limit_s=time_limit_s, donate_argnums=0,
        in_shardings=by_hand.in_shardings if by_hand else None,
    )  # fmt: skip
    start = time.perf_counter()
    try:
        plan = step.plan(*args)
    except diffshard.InfeasibleError:
        plan = None
    searched = time.perf_counter()
    lowered = hand_plans.lower_by_hand(model.step, *args, by_hand, donate_argnums=0) if by_hand else step.lower(*args)
    compiled = lowered.compile(compiler_options={AT_ONCE: at_once} if by_hand and at_once > 1 else None)
    compile_s = time.perf_counter() - searched
    rates = achievable_rates(diffshard.preset("h100", dict(mesh.shape)))
    timeline = simulate(compiled.as_text() or "", mesh.shape, rates)
    predicted = (plan.collectives, plan.peak_bytes) if plan else ((), float("nan"))
    verification = verify(lowered, mesh.shape, *predicted, compiled=compiled)
    memory = verification.memory
    played = plan.timeline if plan and not by_hand else None
    row = Row(
        model=setting.name,
        batch=setting.batch,
        mesh="x".join(map(str, mesh.shape.values())),
        plan=named(plan_name, at_once),
        executor="propagation" if by_hand or plan is None else plan.executor,
        predicted_s=plan.step_s if plan else float("nan"),
        timeline_s=timeline.step_s,
        busy_s=timeline.busy_s,
        waited_s={" ".join(reason): seconds for reason, seconds in timeline.waited_s.items()},
        sent_bytes=[
            sum(sent.predicted for sent in verification.sent),
            sum(sent.compiled for sent in verification.sent),
        ],
        peak_bytes=[memory.predicted, memory.compiled] if memory else [],
        collectives=[vars(compared) for compared in verification.collectives],
        notes=timeline.notes,
        search_s=searched - start,
        compile_s=compile_s,
        played_s=played.seconds if played else None,
        played_waits_s=_waits_by_reason(played.waits) if played else {},
    )
    return row, timeline


def named(plan_name: str, at_once: int) -> str:
    """Returns the name of a plan in tables."""
    return plan_name if plan_name == FOUND or at_once == 1 else f"{plan_name}, {at_once} at once"


def _waits_by_reason(waits: Sequence[PredictedWait]) -> dict[str, float]:
    """Returns the seconds of a plan's waits by kind and axes, as those of compiled programs are added up."""
    total: dict[str, float] = defaultdict(float)
    for wait in waits:
        total[f"{wait.kind} {'+'.join(wait.axes)}"] += wait.seconds
    return dict(total)


def divides(model: Model, mesh: Mesh, plan_name: str) -> bool:
    """Tells whether a baseline's plan splits the model's batch evenly; a found plan always does."""
    if plan_name == FOUND:
        return True
    try:
        hand_plans.HAND_PLANS[plan_name](*abstract_arguments(model), mesh)
    except DoesNotApplyError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table for each model and mesh, and the found plans over the best baselines'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--meshes", nargs="+", default=["2x4", "4x8", "8x8"], help="data x model, in hosts of 8")
    parser.add_argument("--batch", type=int, help="rows in a batch, instead of the published ones for the mesh")
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--baselines", nargs="*", choices=hand_plans.HAND_PLANS, default=list(PUBLISHED))
    parser.add_argument("--at-once", type=int, default=1, help="collectives under way together in baselines' programs")
    parser.add_argument("--hardware", choices=HARDWARE, default="datasheet", help="the rates that plans are made for")
    parser.add_argument("--target", choices=MESHES, default="h100", help="what the programs are compiled for")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    parser.add_argument("--traces", type=Path, help="a folder for a trace of each plan, for ui.perfetto.dev")
    parser.add_argument("-o", "--output", type=Path, help="also add each row to this file, and keep those it has")
    options = parser.parse_args(argv)
    for mesh_text in options.meshes:
        parse_mesh(mesh_text)
        for name in options.models:
            if options.batch is None and mesh_text not in CASES[name].batches:
                parser.error(f"`--batch` must be given for a mesh without a published one; got {mesh_text}.")
    known = {row.key: row for row in (read_rows(options.output) if options.output else [])}
    rows = [
        row for name in options.models for mesh_text in options.meshes
        for row in time_plans(name, mesh_text, known, options)
    ]  # fmt: skip
    print_rows(rows, f"plans for {options.hardware} rates, compiled for {options.target}")
    return 0


def time_plans(
    name: str, mesh_text: str, known: dict[tuple[str, str, int, str], Row], options: argparse.Namespace
) -> Iterator[Row]:
    """Times all plans of one model on one mesh, and prints, keeps and traces each as soon as it is there."""
    case = CASES[name]
    batch = options.batch or case.batches[mesh_text]
    model = case.make(batch=batch, **(case.full if options.sizes == "full" else case.small))
    mesh = MESHES[options.target](parse_mesh(mesh_text))
    setting = Setting(name, batch, model, mesh, HARDWARE[options.hardware](mesh))
    for plan_name in (FOUND, *options.baselines):
        key = name, mesh_text, batch, named(plan_name, options.at_once)
        if key in known:
            yield known[key]
            continue
        if not divides(model, mesh, plan_name):
            print(f"{name} {mesh_text} {plan_name} is left out: its plan does not split a batch of {batch} evenly")
            continue
        try:
            row, timeline = time_plan(setting, plan_name, options.time_limit, at_once=options.at_once)
        except jax.errors.JaxRuntimeError as error:
            print(f"{name} {mesh_text} {plan_name} is not compiled: {error}", flush=True)
            continue
        print(name, mesh_text, *cells(row), f"+{row.compile_s:.0f} s", *row.notes, sep="  ", flush=True)
        if options.output:
            append_row(row, options.output)
        if options.traces:
            options.traces.mkdir(parents=True, exist_ok=True)
            write_perfetto(timeline, options.traces / f"{name} {mesh_text} {plan_name}.json")
        yield row


if __name__ == "__main__":
    raise SystemExit(main())
