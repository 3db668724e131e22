"""Number formats chosen by the loss, against rules: training in float8, and the time of compiled programs with it.

    python -m experiments.formats --models gpt --mesh 8 --hardware b200 --products float8 float4 [--searches 3]
    python -m experiments.formats --joint --models gpt
    python -m experiments.formats --compile decoder --mesh 2x4 [--products float8 float8_delayed] [--sums int8]

The first searches for each model and budget with several seeds, for the calls as for the solver. Increases are measured
on a small model by two looks ahead and two validation runs, and priced on a model of the same code that is wide enough
for its products to pay, on 8 GPUs. What is found stands against the simple rules, in predicted seconds and in what
training the small model adds to the loss, with seeds and batches that no search had. Formats are emulated exactly on
one device. The second holds the search for both at once against shardings first and formats afterwards, on slower and
faster links and with less memory. The last compiles a model of `experiments.timeline_models` for H100s (the extra
`gpu-compile`) with exact products and with all products, and sums of gradients, that gain by a format in it, and plays
the programs back.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import diffshard
from cost.base import Hardware
from cost.evaluation import evaluate
from cost.lines import Line
from diffshard.base import Deadline, InfeasibleError
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.plans.printing import format_bytes, format_s
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.format_rounds import (
    Trial,
    fastest_trial,
    increases_at,
    measured_trials,
    stand_ins,
)
from diffshard.sharding_search.format_rules import simple_rules
from diffshard.sharding_search.format_search import (
    Start,
    best_groups,
    fastest_within,
    first_start,
    predicted_increase,
)
from diffshard.sharding_search.number_formats import GRADIENTS, ProductGroup, all_groups, offered_groups, product_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.planning import fastest_choice
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import step_s
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.format_estimates import one_each
from experiments.format_models import MODELS, Setting
from experiments.host_devices import parse_mesh
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES
from search_spaces.sharding.base import FormatKey
from search_spaces.sharding.codes import CODES
from search_spaces.sharding.format_gains import gains_s, in_formats
from search_spaces.sharding.product_formats import FORMATS
from search_spaces.sharding.space import ShardingSpace

ANY_LOSS = 1e9
"""A limit that no increase reaches."""
FASTER = 1e-3
"""The share of the time from which on a plan counts as faster than a rule; the solver's gap is less."""
PARTS = ("attention", "feed_forward", "token_", "channel_")
"""What names of modules have that are a part of a layer in the models."""
ROUNDS = 4
"""Rounds of a search, at most."""
SETTINGS = [*((links, share) for links in (1 / 16, 1 / 4, 1) for share in (None, 0.75, 0.55)), (4, None)]
"""Factors of the rates of links, and the memory as a share of what the fastest sharding takes; None for all of it."""


def groups_of(model: Model, mesh: Any, hardware: Hardware, products: Sequence[str] = ("float8",)) -> list[ProductGroup]:
    """Returns the groups of products that may gain in formats."""
    options = options_of(model, mesh, hardware)
    return product_groups(space_of(options, trace_function(options, abstract_arguments(model))), products)


def rules_tables(
    setting: Setting, searches: int, budgets: Sequence[float], steps: int, seeds: int, kinds: Mapping[str, Any]
) -> None:
    """Prints the simple rules, and what searches with several seeds find within each budget against them.

    All are trained with from the beginning, with other seeds and batches than the searches measured by.
    """
    held_out, name = setting.losses(steps, seeds, **kinds), setting.small.name
    exact = np.array(held_out.late_losses(frozenset()))
    print(f"{name}: exact losses", *(f"{loss:.4f}" for loss in exact), flush=True)
    found: dict[float, list[tuple[float, float, float]]] = {budget: [] for budget in budgets}
    rules, rows = {}, []
    for seed, budget, groups, trials in searches_of(setting, held_out, searches, budgets):
        ruled = [trial for trial in trials if "round" not in trial.name]
        for trial in ruled:
            if trial.name not in rules:
                trained = held_out.late_losses(stand_ins(held_out, groups, trial.found.products)) - exact
                rules[trial.name] = trial.found.plan.step_s, trained.mean()
                row = [trial.name, format_s(trial.found.plan.step_s), f"{len(trial.found.products)}"]
                rows.append([*row, *(f"{number:+.4f}" for number in (trained.mean(), *trained))])
                print(*rows[-1], f"{trial.measured:+.4f}", sep="  ", flush=True)
        for trial in trials:
            if trial not in ruled:
                numbers = [f"{number:+.4f}" for number in (trial.predicted, trial.measured)]
                print(budget, seed, trial.name, format_s(trial.found.plan.step_s), *numbers, sep="  ", flush=True)
        best, rule = fastest_trial(trials, budget), fastest_trial(ruled, budget)
        trained = held_out.late_losses(stand_ins(held_out, groups, best.found.products)) - exact
        seconds = best.found.plan.step_s
        found[budget].append((seconds, seconds / rule.found.plan.step_s, trained.mean()))
        numbers = [f"{number:.4f}" for number in (*found[budget][-1], best.measured)]
        print(budget, seed, *numbers, best.name, rule.name, sep="  ", flush=True)
    columns = ["rule", "step", "in fewer bits", "trained", *(f"seed {seed}" for seed in range(seeds))]
    print_table(f"{name}: rules", columns, rows)
    rows = []
    for budget in budgets:
        step, ratios, trained = np.array(found[budget]).T
        rule = min((rule for rule in rules if rules[rule][1] <= budget), key=lambda rule: rules[rule][0])
        row = [f"{budget}", format_s(float(np.median(step)))]
        row += [f"{ratio:.3f}" for ratio in (ratios.min(), np.median(ratios), ratios.max())]
        row += [f"{np.sum(ratios < 1 - FASTER)} of {searches}", f"{trained.mean():+.4f}", f"{trained.max():+.4f}"]
        rows.append([*row, rule, format_s(rules[rule][0])])
    of_ratios, of_increases = ["over best rule", "median", "most", "faster"], ["trained", "most"]
    columns = ["budget", "step", *of_ratios, *of_increases, "rule within, trained", "its step"]
    print_table(f"{name}: found within budgets by {searches} searches", columns, rows)


def searches_of(
    setting: Setting, losses: MeasuredLosses, searches: int, budgets: Sequence[float]
) -> Iterator[tuple[int, float, list[ProductGroup], list[Trial]]]:
    """Returns for each seed and budget the groups of the wide model, and what a search measures.

    The searches of a seed share the looks at the exact choice, and equal validation runs; rounds after the first scale
    the increases of these looks by what validation runs measure. All searches share the plans of rules.
    """
    options = options_of(setting.wide, setting.mesh, setting.hardware)
    traced = trace_function(options, abstract_arguments(setting.wide))
    space = space_of(options, traced)
    groups, every = offered_groups(space, losses.formats), all_groups(space, losses.formats)
    rules, planned = {**simple_rules(every), **rules_of_parts(every)}, {}
    for seed in range(searches):
        measures = setting.measures(seed)
        runs, calls = measures["validation_runs"], measures["calls"]
        judged = losses.on(dataclasses.replace(losses.formats, calls=(), validation_runs=runs))
        looked = losses.on(dataclasses.replace(losses.formats, calls=calls, validation_runs=()))
        increases = increases_at(looked, groups, frozenset())
        for budget in budgets:
            formats = dataclasses.replace(judged.formats, max_loss_increase=budget, increases=increases, rounds=ROUNDS)
            request = PlanRequest(
                dataclasses.replace(options, formats=formats, key=seed), traced, space, time.perf_counter()
            )
            yield seed, budget, groups, measured_trials(request, groups, judged, increases, rules, planned)


def rules_of_parts(groups: Sequence[ProductGroup]) -> dict[str, frozenset[FormatKey]]:
    """Returns rules with a part of each layer in the format of fewest bits, and all else in the other format if any."""
    groups = [group for group in groups if group.kind == "product"]
    *wider, narrowest = dict.fromkeys(group.format for group in groups)
    others = frozenset().union(*(group.members for group in groups if group.format in wider))
    rules = {}
    for part in PARTS:
        own = [group.members for group in groups if group.format == narrowest and part in group.place]
        if own:
            rules[", others in ".join([f"{part} in {narrowest}", *wider])] = others.union(*own)
    return rules


def options_of(model: Model, mesh: Any, hardware: Hardware) -> Options:
    """Returns the options of a space and a search of a model."""
    return Options(fn=model.step, mesh=mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes)


def joint_table(setting: Setting, budgets: Sequence[float], kinds: Mapping[str, Any], time_limit_s: float) -> None:
    """Prints the step of the search for both at once over that of shardings first and formats afterwards."""
    losses, rows = setting.losses(2, 1, **kinds), []
    groups = list(losses.groups.values())
    increases = dict(zip(losses.groups, losses.increases_at(frozenset(), groups), strict=True))
    for links, share in SETTINGS:
        own = setting.hardware.links.items()
        hardware = dataclasses.replace(setting.hardware, links={name: faster(link, links) for name, link in own})
        options = options_of(setting.wide, setting.mesh, hardware)
        traced = trace_function(options, abstract_arguments(setting.wide))
        request = PlanRequest(options, traced, space_of(options, traced), time.perf_counter())
        if share is not None:
            fastest = fastest_choice(request, Deadline.from_now(time_limit_s)).choice
            peak = float(np.max(evaluate(request.space.problem, fastest).peak))
            options = dataclasses.replace(options, memory_limit_bytes=share * peak)
            request = PlanRequest(options, traced, space_of(options, traced), time.perf_counter())
        offered = [
            group
            for group in offered_groups(request.space, diffshard.formats.Formats(1.0, increases=increases, **kinds))
            if group.name in increases
        ]
        row = [f"{links:g}", "all" if share is None else f"{share:.0%}", format_bytes(options.memory_limit_bytes)]
        try:
            start = first_start(request, offered, Deadline.from_now(time_limit_s))
        except InfeasibleError:
            print(*row, "no plan", sep="  ", flush=True)
            rows.append([*row, *["no plan", ""] * len(budgets), ""])
            continue
        for budget in budgets:
            first_s = afterwards_s(request.space, offered, increases, budget, start)
            deadline = Deadline.from_now(time_limit_s)
            joint = fastest_within(request, offered, increases, budget, deadline, start)
            row += [format_s(first_s), f"{joint.plan.step_s / first_s:.3f}"]
        rows.append([*row, f"{len(start.kept)}"])
        print(*rows[-1], sep="  ", flush=True)
    columns = ["links", "memory", "limit", *(word for b in budgets for word in (f"afterwards, {b}", "both"))]
    print_table(f"{setting.wide.name}: both searched at once over formats afterwards", [*columns, "kept"], rows)


def afterwards_s(
    space: ShardingSpace, groups: Sequence[ProductGroup], increases: Mapping[str, float], budget: float, start: Start
) -> float:
    """Returns the seconds of a choice in the formats that gain most there within a budget."""
    free = space.with_formats({member: 0.0 for group in groups for member in sorted(group.members)})
    choice = in_formats(free, start.choice, start.kept)
    of, fast = gains_s(free, choice), [group for group in groups if group.kind != "kept"]
    gains = np.array([sum(max(0.0, of[member]) for member in group.members) for group in fast])
    rest = budget - predicted_increase(groups, increases, start.kept)
    kinds = [group.vertices[0].index for group in fast]
    chosen = one_each(
        best_groups(gains, np.array([increases[group.name] for group in fast]), rest, kinds), gains, kinds
    )
    members = [member for i in chosen for member in fast[i].members if of[member] > 0]
    return step_s(free.predict(in_formats(free, choice, members).tolist()))


def faster(link: diffshard.Link, factor: float) -> diffshard.Link:
    """Returns a link with that many times the bandwidth."""
    by_kind = {kind: tuple(Line(a, b / factor) for a, b in lines) for kind, lines in link.by_kind.items()}
    return dataclasses.replace(link, s_per_byte=link.s_per_byte / factor, by_kind=by_kind)


def compiled_table(
    name: str, mesh_text: str, sizes: str, products: Sequence[str], sums: Sequence[str], time_limit_s: float
) -> None:
    """Compiles a model as it is, and with products in each format and sums that gain, and prints the timelines."""
    case = CASES[name]
    model = case.make(batch=case.batches[mesh_text], **(case.full if sizes == "full" else case.small))
    mesh = MESHES["h100"](parse_mesh(mesh_text))
    hardware = diffshard.preset("h100", dict(mesh.shape))
    of_sums = {f"{GRADIENTS} in {name}": 0.0 for name in sums}
    every = {name: {g.name: 0.0 for g in groups_of(model, mesh, hardware, [name])} | of_sums for name in products}
    rows, rates = [], achievable_rates(hardware)
    for label, increases in (("exact", {}), *every.items()):
        own = [label] if increases else products
        formats = diffshard.formats.Formats(ANY_LOSS, increases=increases, products=own, sums=sums)
        step = diffshard.search(
            model.step, mesh, hardware=hardware, time_limit_s=time_limit_s, donate_argnums=0, formats=formats
        )
        arguments = abstract_arguments(model)
        plan = step.plan(*arguments)
        hlo = step.lower(*arguments).compile().as_text() or ""
        float8 = set(re.findall(r"(%[\w.-]+) = f8\w+\[", hlo))
        dots = [re.findall(r"%[\w.-]+", operands) for operands in re.findall(r" dot\(([^)]*)\)", hlo)]
        kernels = f"{sum(float8.issuperset(operands) for operands in dots)} of {len(dots)}"
        timeline = simulate(hlo, mesh.shape, rates)
        sent = sum(num_bytes for (kind, _), num_bytes in plan.collective_bytes.items() if kind == "all_gather")
        coded = len(re.findall(r"f8\w+\[[^=]*all-gather(?:-start)?\(", hlo))
        row = [format_s(plan.step_s), format_s(plan.lower_bound_s), format_s(timeline.step_s), kernels]
        num_sums = sum(bool(operation.sent_in) for operation in plan.operations)
        rows.append([label, *row, format_bytes(sent), str(coded), str(num_sums)])
        print(*rows[-1], *timeline.notes, sep="  ", flush=True)
    columns = ["products", "predicted", "bound", "timeline", "in float8", "gathered", "as codes", "sums"]
    print_table(f"{name} on {mesh_text} H100s, compiled", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt"])
    parser.add_argument("--joint", action="store_true", help="compare with formats that are chosen afterwards instead")
    parser.add_argument("--products", nargs="*", choices=FORMATS, default=["float8"], help="formats of products")
    parser.add_argument("--sums", nargs="*", choices=CODES, help="formats of sums; bfloat16 and int8, or none compiled")
    parser.add_argument(
        "--hardware", choices=("h100", "b200"), default="h100", help="that the wide model is priced for"
    )
    parser.add_argument("--searches", type=int, default=3, help="seeds of the search for each budget")
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, help="of the trainings")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.002, 0.005, 0.02])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--compile", choices=CASES, help="compile this model instead")
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    if options.compile:
        kinds = options.products, options.sums or ()
        compiled_table(options.compile, options.mesh, options.sizes, *kinds, options.time_limit)
        return 0
    sums = ["bfloat16", "int8"] if options.sums is None else options.sums
    kinds = {"products": options.products, "sums": sums}
    for model in options.models:
        setting = Setting.of(model, options.sizes, options.hardware, parse_mesh(options.mesh))
        if options.joint:
            joint_table(setting, options.budgets, {**kinds, "kept": ["int8"]}, options.time_limit)
        else:
            rules_tables(setting, options.searches, options.budgets, options.steps, options.seeds, kinds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
