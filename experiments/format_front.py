"""What formats could gain over simple rules at most, if the increase of each group were known from trainings.

    python -m experiments.format_front --models gpt [--steps 60] [--seeds 5] [--budgets 0.002 0.005 0.02]

A small model is trained with all products in float8, and then with each group of products in float4 and all others in
float8, each time with several seeds. These increases, and not those of looks ahead, are given to the search of the wide
model on 8 B200s. So what it finds within a budget, and its bound, show what is left to gain over the fastest rule
whose own trainings are within the budget: no search that has to estimate increases can be expected to find more. What
is found is trained with as well, which says how well increases add up.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np

from diffshard.base import Deadline
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.format_rounds import stand_ins
from diffshard.sharding_search.format_rules import simple_rules
from diffshard.sharding_search.format_search import FoundFormats, fastest_within, first_start, plan_with
from diffshard.sharding_search.number_formats import ProductGroup, all_groups, offered_groups
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.format_models import MODELS, Setting
from experiments.formats import options_of, rules_of_parts
from experiments.host_devices import parse_mesh
from experiments.models.model import abstract_arguments
from experiments.tables import print_table

WIDE, NARROW = "float8", "float4"
"""The formats of products."""


def trained_increases(losses: MeasuredLosses, groups: Sequence[ProductGroup]) -> dict[str, np.ndarray]:
    """Returns by how much each group raises the late loss of each training, `[seeds]`, by its name; sums do not.

    What all products in float8 add together is shared equally. One in float4 adds besides what the loss rises by if it
    alone is in float4 and all others are in float8.
    """
    own = [losses.groups[group.name] for group in groups if group.kind == "product"]
    widest = frozenset().union(*(group.members for group in losses.groups.values() if group.format == WIDE))
    exact, in_widest = (np.array(losses.late_losses(products)) for products in (frozenset(), widest))
    share = (in_widest - exact) / max(1, sum(group.format == WIDE for group in own))
    increases = {group.name: np.zeros(len(exact)) for group in groups if group.kind != "product"}
    for group in own:
        added = losses.late_losses(group.without(widest) | group.members) - in_widest if group.format == NARROW else 0.0
        increases[group.name] = share + added
        mean, error = mean_and_error(increases[group.name])
        print(f"{group.name:<70} {mean:+.4f} ± {error:.4f}", flush=True)
    return increases


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean over seeds and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else np.nan


def front_table(setting: Setting, steps: int, seeds: int, budgets: Sequence[float], time_limit_s: float | None) -> None:
    """Prints for each budget the fastest rule, and what is found with the increases that trainings have."""
    losses = setting.losses(steps, seeds, products=[WIDE, NARROW], sums=["bfloat16"])
    options = options_of(setting.wide, setting.mesh, setting.hardware)
    traced = trace_function(options, abstract_arguments(setting.wide))
    request = PlanRequest(options, traced, space_of(options, traced), time.perf_counter())
    every = all_groups(request.space, losses.formats)
    groups = [group for group in offered_groups(request.space, losses.formats) if group.name in losses.groups]
    increases = {n: max(0.0, float(v.mean())) for n, v in trained_increases(losses, groups).items()}
    exact = np.array(losses.late_losses(frozenset()))

    def trained(products: frozenset) -> np.ndarray:
        return losses.late_losses(stand_ins(losses, groups, products)) - exact

    start = first_start(request, groups, Deadline.from_now(time_limit_s))
    offered = frozenset().union(*(group.members for group in groups))
    rules = {}
    for name, products in {"nothing": frozenset(), **simple_rules(every), **rules_of_parts(every)}.items():
        plan, rounded, _ = plan_with(request, offered & products, Deadline.from_now(time_limit_s), start)
        rules[name] = plan.step_s, trained(rounded)
        print(f"{name:<70} {plan.step_s:.6f} {rules[name][1].mean():+.4f}", flush=True)
    rows = []
    for budget in budgets:
        within = {name: step_s for name, (step_s, of_seeds) in rules.items() if of_seeds.mean() <= budget}
        rule = min(within, key=within.__getitem__)
        found = fastest_within(request, groups, increases, budget, Deadline.from_now(time_limit_s), start)
        rows.append([f"{budget:g}", rule, *numbers_of(found, within[rule], trained(found.products))])
        print(*rows[-1], sep="  ", flush=True)
    columns = ["budget", "rule", "its ms", "found over it", "bound over it", "trained", "error", "in float4"]
    print_table(f"{setting.small.name}: with the increases of trainings", columns, rows)


def numbers_of(found: FoundFormats, rule_s: float, trained: np.ndarray) -> list[str]:
    """Returns the cells of what was found against the fastest rule within the budget."""
    mean, error = mean_and_error(trained)
    ratios = [f"{found.plan.step_s / rule_s:.3f}", f"{found.bound_s / rule_s:.3f}"]
    narrow = sum(key[1] == NARROW for key in found.products)
    return [f"{1e3 * rule_s:.2f}", *ratios, f"{mean:+.4f}", f"{error:.4f}", str(narrow)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt"])
    parser.add_argument("--steps", type=int, default=60, help="of each training")
    parser.add_argument("--seeds", type=int, default=5, help="of the trainings")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.002, 0.005, 0.02])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--mesh", default="8")
    parser.add_argument("--time-limit", type=float, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    for model in options.models:
        setting = Setting.of(model, options.sizes, "b200", parse_mesh(options.mesh))
        front_table(setting, options.steps, options.seeds, options.budgets, options.time_limit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
