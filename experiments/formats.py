"""Number formats chosen by the loss, against rules: training in float8, and the time of compiled programs with it.

    python -m experiments.formats [--model gpt] [--products float8] [--hardware h100] [--budgets 0.002 0.005 0.02]
    python -m experiments.formats --searches 10 [--model mixer]
    python -m experiments.formats --joint [--model gpt]
    python -m experiments.formats --compile decoder --mesh 2x4

The first trains a small model on one device that emulates float8: exactly, with all products in each format, with all
but the head's, and with what `search` finds within budgets of the loss. Increases are measured on this model by looks
ahead and two validation runs, and priced on a model of the same code that is wide enough for its products to pay, on 8
GPUs. The trainings of the table have other seeds and batches. The second repeats the search with other seeds, for the
calls as for the solver, and compares each plan with the fastest simple rule within the budget. The third holds the
search for both at once against shardings first and formats afterwards, on slower and faster links and with less memory.
The last compiles a model of `experiments.timeline_models` for H100s (the extra `gpu-compile`) with no product in float8
and with all that gain by it, and plays both programs back.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import diffshard
from cost.base import Hardware
from cost.lines import Line
from cost.memory import least_memory
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.deadline import Deadline
from diffshard.plans.formats import format_bytes, format_s
from diffshard.sharding_search.format_search import best_groups
from diffshard.sharding_search.number_formats import ProductGroup, product_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.planning import fastest_choice, make_plan
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import step_s
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.format_models import MODELS, Setting, search
from experiments.host_devices import parse_mesh
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES
from search_spaces.sharding.format_gains import gains_s, in_formats
from search_spaces.sharding.product_formats import FORMATS

ANY_LOSS = 1e9
"""A limit that no increase reaches."""
HEAD = re.compile(r"embed\.attend|head")
SETTINGS = [(links, is_tight) for links in (1 / 16, 1 / 8, 1 / 4, 1, 4) for is_tight in (False, True)]
"""Factors of the rates of links, and whether the memory is all of the device or as tight as a plan can be."""
TIGHT = 1.15
"""The memory limit that counts as tight, as a multiple of a bound on what every plan needs."""


def groups_of(model: Model, mesh: Any, hardware: Hardware, products: Sequence[str] = ("float8",)) -> list[ProductGroup]:
    """Returns the groups of products that may gain in formats."""
    options = Options(fn=model.step, mesh=mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes)
    return product_groups(space_of(options, trace_function(options, abstract_arguments(model))), products)


def without_overheads(mesh: Any) -> Hardware:
    """Returns B200s on which every product gains by formats, so that a small model runs in them as it is told."""
    hardware = diffshard.preset("b200", dict(mesh.shape))
    return diffshard.Hardware(
        "b200 without overheads", hardware.flops_per_s, 1e18, hardware.memory_bytes, {}, kernel_launch_s=0.0
    )


def trained(step: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> float:
    """Returns the mean loss of the last fifth of a training."""
    state, losses = calls[0][0], []
    for _, batch in calls:
        state, loss = step(state, batch)
        losses.append(loss)
    return float(np.mean(losses[-max(1, len(losses) // 5) :]))


def training_table(setting: Setting, steps: int, seeds: int, budgets: Sequence[float], products: Sequence[str]) -> None:
    """Trains with each rule and with what is found, and prints losses beside predictions."""
    one = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    free, measures = without_overheads(one), setting.measures(0)
    groups = groups_of(setting.wide, setting.mesh, setting.hardware, products)
    rules: dict[str, Collection[str]] = {"exact": ()}
    for name in products:
        own = [group.name for group in groups if group.format == name]
        rules[f"{name}, all"] = own
        rules[f"{name}, but not the head"] = [group for group in own if not HEAD.search(group)]
    if len(products) > 1:
        head = [group for group in rules[f"{products[0]}, all"] if HEAD.search(group)]
        others = rules[f"{products[-1]}, but not the head"]
        rules[f"{products[-1]}, the head in {products[0]}"] = [*others, *head]
    plans = {
        name: setting.plan(ANY_LOSS, increases=dict.fromkeys(inside, 0.0), products=products)
        for name, inside in rules.items()
    }
    plans |= {f"found for {budget}": setting.plan(budget, products=products, **measures) for budget in budgets}
    rows, exact = [], []
    there = {group.name for group in groups_of(setting.small, one, free, products)}  # blocks may not fit small products
    for name, plan in plans.items():
        rounded = {g.name: 0.0 for g in plan.formats.groups if g.num_rounded and g.name in there}
        run = search(setting.small, one, free, ANY_LOSS, increases=rounded, products=products)
        losses = [trained(run, setting.training(seed, steps)) for seed in range(seeds)]
        exact, measured = exact or losses, plan.formats.measured_increase
        rows.append(
            [name, f"{len(rounded)}", format_s(plan.step_s), format_s(plan.lower_bound_s)]
            + (["", ""] if measured is None else [f"{plan.formats.loss_increase:+.4f}", f"{measured:+.4f}"])
            + [f"{loss - other:+.4f}" for loss, other in zip(losses, exact, strict=True)]
        )
        print(*rows[-1], sep="  ", flush=True)
    seed_columns = [f"seed {seed}" for seed in range(seeds)]
    columns = ["products", "groups", "step", "bound", "predicted", "measured", *seed_columns]
    print_table(f"{setting.small.name} on {setting.hardware.name}: losses after {steps} steps", columns, rows)
    print("exact losses:", *(f"{loss:.4f}" for loss in exact))


def searches_table(setting: Setting, searches: int, budgets: Sequence[float]) -> None:
    """Searches with several seeds, and prints each plan's time over that of the best rule within the budget."""
    rows = []
    for budget in budgets:
        ratios, beaten = [], 0
        for seed in range(searches):
            plan = setting.plan(budget, key=seed, rounds=1, **setting.measures(seed, looks=1))
            trials = [t for t in plan.formats.trials if t.measured_increase <= budget and "round" not in t.name]
            ratios.append(plan.step_s / min(trial.step_s for trial in trials))
            beaten += ratios[-1] < 1 - 1e-6
            print(budget, seed, f"{ratios[-1]:.3f}", plan.formats.measured_increase, flush=True)
        row = [np.min(ratios), np.median(ratios), np.max(ratios)]
        rows.append([f"{budget}", *(f"{ratio:.3f}" for ratio in row), f"{beaten} of {searches}"])
    columns = ["budget", "least", "median", "largest", "faster"]
    print_table(f"{setting.small.name}: the found step over the best rule's within the budget", columns, rows)


def joint_table(setting: Setting, budgets: Sequence[float], time_limit_s: float) -> None:
    """Prints the step of the search for both at once over that of shardings first and formats afterwards."""
    measures = setting.measures(0)
    increases = setting.plan(budgets[0], rounds=0, **{**measures, "validation_runs": ()}).formats.increases
    rows = []
    for links, is_tight in SETTINGS:
        own = setting.hardware.links.items()
        hardware = dataclasses.replace(setting.hardware, links={name: faster(link, links) for name, link in own})
        options = Options(
            fn=setting.wide.step, mesh=setting.mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes
        )
        traced = trace_function(options, abstract_arguments(setting.wide))
        space = space_of(options, traced)
        limit_bytes = TIGHT * float(np.max(least_memory(space.problem)[1])) if is_tight else hardware.memory_bytes
        options = dataclasses.replace(options, memory_limit_bytes=limit_bytes)
        request = PlanRequest(options, traced, space, time.perf_counter())
        exact = fastest_choice(request, Deadline.from_now(time_limit_s))
        groups = [group for group in product_groups(space) if group.name in increases]
        free = space.with_formats({m: 0.0 for group in groups for m in sorted(group.members)})
        of = gains_s(free, exact.choice)
        gains = np.array([sum(max(0.0, of[m]) for m in group.members) for group in groups])
        exact_s, ratios = make_plan(request, exact).step_s, []
        for budget in budgets:
            losses = np.array([increases[group.name] for group in groups])
            chosen = [m for i in best_groups(gains, losses, budget) for m in groups[i].members]
            afterwards = in_formats(free, np.array(exact.choice), [m for m in chosen if of[m] > 0])
            afterwards_s = step_s(free.predict(afterwards.tolist()))
            formats = diffshard.formats.Formats(budget, increases=increases)
            joint = diffshard.search(
                setting.wide.step,
                setting.mesh,
                hardware=hardware,
                memory_limit_bytes=limit_bytes,
                time_limit_s=time_limit_s,
                formats=formats,
                progress="none",
            ).plan(*abstract_arguments(setting.wide))
            ratios.append(joint.step_s / afterwards_s)
        rows.append([f"{links:g}", "tight" if is_tight else "all", format_s(exact_s), *(f"{r:.3f}" for r in ratios)])
        print(*rows[-1], sep="  ", flush=True)
    columns = ["links", "memory", "exact step", *(f"{budget}" for budget in budgets)]
    print_table(f"{setting.wide.name}: the step of both searched at once over formats afterwards", columns, rows)


def faster(link: diffshard.Link, factor: float) -> diffshard.Link:
    """Returns a link with that many times the bandwidth."""
    by_kind = {kind: tuple(Line(a, b / factor) for a, b in lines) for kind, lines in link.by_kind.items()}
    return dataclasses.replace(link, s_per_byte=link.s_per_byte / factor, by_kind=by_kind)


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
            formats=diffshard.formats.Formats(ANY_LOSS, increases=increases),
        )  # fmt: skip
        arguments = abstract_arguments(model)
        plan = step.plan(*arguments)
        hlo = step.lower(*arguments).compile().as_text() or ""
        float8 = set(re.findall(r"(%[\w.-]+) = f8\w+\[", hlo))
        products = [re.findall(r"%[\w.-]+", operands) for operands in re.findall(r" dot\(([^)]*)\)", hlo)]
        kernels = f"{sum(float8.issuperset(operands) for operands in products)} of {len(products)}"
        timeline = simulate(hlo, mesh.shape, rates)
        sent = sum(num_bytes for (kind, _), num_bytes in plan.collective_bytes.items() if kind == "all_gather")
        coded = len(re.findall(r"f8\w+\[[^=]*all-gather(?:-start)?\(", hlo))
        row = [format_s(plan.step_s), format_s(plan.lower_bound_s), format_s(timeline.step_s), kernels]
        rows.append([label, *row, format_bytes(sent), str(coded)])
        print(*rows[-1], *timeline.notes, sep="  ", flush=True)
    columns = ["products", "predicted", "bound", "timeline", "in float8", "gathered", "as codes"]
    print_table(f"{name} on {mesh_text} H100s, compiled", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--searches", type=int, default=0, help="with how many seeds to repeat the search instead")
    parser.add_argument("--joint", action="store_true", help="compare with formats that are chosen afterwards instead")
    parser.add_argument("--products", nargs="+", choices=FORMATS, default=["float8"], help="formats of the first table")
    parser.add_argument(
        "--hardware", choices=("h100", "b200"), default="h100", help="that the wide model is priced for"
    )
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.002, 0.005, 0.02])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--compile", choices=CASES, help="compile this model instead")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    if options.compile:
        compiled_table(options.compile, options.mesh, options.sizes, options.time_limit)
        return 0
    setting = Setting.of(options.model, options.sizes, options.hardware)
    if options.searches:
        searches_table(setting, options.searches, options.budgets)
    elif options.joint:
        joint_table(setting, options.budgets, options.time_limit)
    else:
        training_table(setting, options.steps, options.seeds, options.budgets, options.products)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
