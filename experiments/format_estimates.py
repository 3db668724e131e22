"""How well estimates of what formats do to the loss agree with trainings, and which formats they lead to.

    python -m experiments.format_estimates [--model gpt] [--products float4] [--steps 100] [--seeds 4]

Each group of products of a small model is trained with throughout, from the beginning, and the late loss held against
that without it, on the same batches: what is to be predicted. The estimates are paired looks ahead, the hypergradient,
and controls: the hypergradient without the factor to whole trainings, with shuffled groups, and what one use does to
the loss. How well half of the trainings' seeds rank groups for the other half says how well anything could. Each
estimate runs twice, and compiles the first time only. Each chooses groups within a budget by a knapsack, with what they
gain in the wide model on 8 B200s, sharded as is best without them; what it has chosen is trained with, too.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import kendalltau

from diffshard.base import Deadline
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.format_search import best_groups
from diffshard.sharding_search.number_formats import ProductGroup, product_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.planning import fastest_choice
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import step_s
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.format_models import MODELS, Setting
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from search_spaces.sharding.format_gains import gains_s
from search_spaces.sharding.product_formats import FORMATS

_SOLVER_S = 10.0


def wide_gains(model: Model, setting: Setting, products: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Returns seconds of the wide model's step, and what each group of products gains in it."""
    hardware = setting.hardware
    options = Options(fn=model.step, mesh=setting.mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes)
    traced = trace_function(options, abstract_arguments(model))
    space = space_of(options, traced)
    choice = fastest_choice(
        PlanRequest(options, traced, space, time.perf_counter()), Deadline.from_now(_SOLVER_S)
    ).choice
    groups = product_groups(space, products)
    free = space.with_formats({member: 0.0 for group in groups for member in sorted(group.members)})
    of = gains_s(free, np.asarray(choice))
    gains = {group.name: sum(max(0.0, of[member]) for member in group.members) for group in groups}
    return step_s(space.predict(choice)), gains


def one_use(losses: MeasuredLosses, groups: Sequence[ProductGroup]) -> list[float]:
    """Returns by how much each group raises the loss of the first step of a look, where nothing was trained with it."""
    increases = np.zeros(len(groups))
    for state, window in losses.points(frozenset()):
        exact = losses.run(state, window[:1], frozenset())[1][0]
        increases += [losses.run(state, window[:1], group.members)[1][0] - exact for group in groups]
    return (losses.formats.factor * np.maximum(increases, 0) / len(losses.formats.look_starts)).tolist()


class Estimate(NamedTuple):
    """The predictions of an estimate for each group, and its processor seconds, the first time and the second."""

    increases: list[float]
    first_s: float
    second_s: float


def estimates_of(losses: MeasuredLosses, groups: Sequence[ProductGroup]) -> dict[str, Estimate]:
    """Returns estimates by their names."""
    ways: dict[str, Callable[[], list[float]]] = {
        "paired looks": lambda: losses.increases_by_looks(frozenset(), groups),
        "hypergradient": lambda: losses.increases_by_gradients(frozenset(), groups),
        "loss of one use": lambda: one_use(losses, groups),
    }
    found = {}
    for name, measure in ways.items():
        start = time.process_time()
        measure()
        middle = time.process_time()
        found[name] = Estimate(measure(), middle - start, time.process_time() - middle)
    own = found["hypergradient"]
    slopes = np.array(own.increases)
    found["hypergradient, no factor"] = own._replace(increases=(slopes / losses.formats.factor).tolist())
    shuffled = np.random.default_rng(1).permutation(slopes)
    found["hypergradient, shuffled"] = own._replace(increases=shuffled.tolist())
    return found


def estimates_table(
    setting: Setting, products: Sequence[str], steps: int, seeds: int, budgets: Sequence[float]
) -> None:
    """Prints how well each estimate ranks groups, and the time and the measured loss of what it chooses."""
    losses = setting.losses(steps, seeds, products=products)
    exact_s, gains = wide_gains(setting.wide, setting, products)
    groups = [group for group in losses.groups.values() if group.name in gains]
    exact = losses.late_losses(frozenset())
    of_seeds = np.subtract([losses.late_losses(group.members) for group in groups], exact)
    trained = of_seeds.mean(axis=1)
    found = {"trainings": Estimate(trained.tolist(), 0.0, 0.0), **estimates_of(losses, groups)}
    print("group", *found, *(f"seed {seed}" for seed in range(seeds)), sep="  ", flush=True)
    for index, group in enumerate(groups):
        own = [estimate.increases[index] for estimate in found.values()] + of_seeds[index].tolist()
        print(group.name, *(f"{value:+.4f}" for value in own), sep="  ", flush=True)
    gain, kinds = np.array([gains[group.name] for group in groups]), [group.vertices[0].index for group in groups]
    everything = frozenset().union(*(group.members for group in groups if group.format == products[-1]))
    print(f"all in {products[-1]}: {losses.increase_of(everything).mean:+.4f}")
    if seeds > 1:
        of_halves = rank(of_seeds[:, ::2].mean(1), of_seeds[:, 1::2].mean(1))
        print(f"half of the seeds against the others: rank {of_halves:.2f}")
    rows = []
    for name, estimate in found.items():
        values = estimate.increases
        row = [name, f"{estimate.first_s:.0f}", f"{estimate.second_s:.0f}", f"{rank(values, trained):.2f}"]
        row.append(f"{sum(values):+.3f}")
        for budget in budgets:
            chosen = one_each(best_groups(gain, np.array(values), budget, kinds), gain, kinds)
            members = frozenset().union(*(groups[i].members for i in chosen))
            faster_s = sum(gain[i] for i in chosen)
            row += [f"{1 - faster_s / exact_s:.3f}", f"{losses.increase_of(members).mean:+.4f}"]
        rows.append(row)
        print(*row, sep="  ", flush=True)
    columns = ["estimate", "CPU s", "again", "rank", "sum"]
    columns += [word for budget in budgets for word in (f"step for {budget:g}", "trained")]
    print_table(f"{setting.small.name}: estimates of what {' and '.join(products)} do", columns, rows)


def rank(values: Any, others: Any) -> float:
    """Returns Kendall's rank correlation."""
    return float(np.asarray(kendalltau(values, others))[0])


def one_each(chosen: Sequence[int], gains: np.ndarray, kinds: Sequence[int]) -> list[int]:
    """Returns of groups of the same products the one that gains most."""
    best: dict[int, int] = {}
    for i in sorted(chosen, key=lambda i: gains[i]):
        best[kinds[i]] = i
    return sorted(best.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--products", nargs="+", choices=FORMATS, default=["float4"])
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.005, 0.02])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    options = parser.parse_args(argv)
    setting = Setting.of(options.model, options.sizes, "b200")
    estimates_table(setting, options.products, options.steps, options.seeds, options.budgets)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
