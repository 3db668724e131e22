"""`bilevel` on a training step: formats that gradients choose while it trains, against rules, and what that costs.

    python -m experiments.bilevel_step --models gpt --updates 400 [--budgets 0.002 0.005 0.02] [--seeds 5]

A small model trains, and formats are planned for a wide one of the same code on 8 GPUs. Found formats and simple rules
are trained with from the start, with seeds and batches that no search had, and held against exact trainings. *frozen*
has the looks of a training in which nothing is ever drawn, so that what is chosen cannot change what is measured. Also
printed are the seconds of an update, the compiler's time and the bytes of temporary arrays over those of the step.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import diffshard
from diffshard.base import Deadline
from diffshard.bilevel_search.step_formats import StepState, TrainingSearch
from diffshard.plans.printing import format_s
from diffshard.sharding_search.format_losses import MeasuredLosses
from diffshard.sharding_search.format_rounds import stand_ins
from diffshard.sharding_search.format_rules import simple_rules
from diffshard.sharding_search.format_search import fastest_within, first_start, plan_with
from diffshard.sharding_search.number_formats import all_groups, offered_groups
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.tracing import space_of, trace_function
from experiments.format_models import MODELS, Setting
from experiments.host_devices import parse_mesh
from experiments.models.model import abstract_arguments
from experiments.tables import print_table

FROZEN = 1e-12
"""A limit on the loss within which no format is drawn."""


def trained_with(
    searching: TrainingSearch, setting: Setting, updates: int, seed: int
) -> tuple[StepState, list[float], list[float]]:
    """Returns the state after some updates, and the seconds of those without and with a look, compiled ones."""
    calls, validation = setting.training(seed, updates), setting.training(500 + seed, updates)
    planned_for = abstract_arguments(setting.wide)
    state = searching.init(jax.random.key(seed), *calls[0], planned_for=planned_for)
    plain_s, look_s = [], []
    for (_, train), (_, val) in zip(calls, validation, strict=True):
        start_s = time.perf_counter()
        state, metrics = searching.update(state, train, val)
        (look_s if metrics.has_looked else plain_s).append(time.perf_counter() - start_s)
    return state, plain_s[1:], look_s[1:]


def step_s_of(setting: Setting, updates: int) -> list[float]:
    """Returns the seconds of the small model's own compiled steps, after the first."""
    step, calls, seconds = jax.jit(setting.small.step), setting.training(0, updates), []
    state = calls[0][0]
    for _, batch in calls:
        start_s = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - start_s)
        del loss
    return seconds[1:]


def tables(setting: Setting, updates: int, budgets: Sequence[float], steps: int, seeds: int, kinds: Any) -> None:
    """Prints what is found within each budget, the rules, and what searching costs."""
    held_out, name = setting.losses(steps, seeds, **kinds), setting.small.name
    exact = np.array(held_out.late_losses(frozenset()))
    formats = diffshard.formats.Formats(1.0, steps=4, measured_fn=setting.small.step, **kinds)
    searching = diffshard.bilevel(setting.wide.step, setting.mesh, formats=formats, hardware=setting.hardware)
    frozen, *_ = trained_with(searching := searching.with_limit(FROZEN), setting, updates, 0)
    request = _request(setting)
    groups = offered_groups(request.space, formats)

    def held(products: Any) -> tuple[float, float]:
        trained = np.array(held_out.late_losses(stand_ins(held_out, groups, products))) - exact
        return float(trained.mean()), float(trained.std(ddof=1) / len(trained) ** 0.5)

    start, rows, rules = first_start(request, groups, Deadline.from_now(30.0)), [], []
    offered = frozenset(member for group in groups for member in group.members)
    for rule, products in {"nothing": frozenset(), **simple_rules(all_groups(request.space, formats))}.items():
        plan, rounded, _ = plan_with(request, offered & products, Deadline.from_now(30.0), start)
        rules.append((plan.step_s, *held(rounded)))
        rows.append([rule, format_s(plan.step_s), "{:+.4f} ± {:.4f}".format(*rules[-1][1:])])
        print(*rows[-1], sep="  ", flush=True)
    print_table(f"{name}: rules", ["rule", "step", "trained"], rows)
    rows, plain_s, look_s = [], [], []
    for budget in budgets:
        within = searching.with_limit(budget)
        state, plain_s, look_s = trained_with(within, setting, updates, 0)
        best_rule = min(seconds for seconds, increase, _ in rules if increase <= budget)
        for label, increases in (("found", within.increases(state)), ("frozen", searching.increases(frozen))):
            found = fastest_within(request, groups, increases, budget, Deadline.from_now(60.0), start)
            own = [f"{number:+.4f}" for number in (sum(increases.values()),)]
            row = [f"{budget}", label, format_s(found.plan.step_s), f"{found.plan.step_s / best_rule:.3f}"]
            bound = f"{found.bound_s / found.plan.step_s:.3f}"
            rows.append([*row, bound, "{:+.4f} ± {:.4f}".format(*held(found.products)), *own])
            print(*rows[-1], sep="  ", flush=True)
    columns = ["budget", "looks", "step", "over best rule", "bound", "trained", "all increases"]
    print_table(f"{name}: found within budgets in {updates} updates", columns, rows)
    own_s = float(np.median(step_s_of(setting, 60)))
    every = len(look_s) * float(np.median(look_s)) if look_s else 0.0
    update_s = (float(np.median(plain_s)) * len(plain_s) + every) / (len(plain_s) + len(look_s))
    print(
        f"{name}: step {1e3 * own_s:.1f} ms, update {1e3 * float(np.median(plain_s)):.1f} ms, with looks in the mean "
        f"{1e3 * update_s:.1f} ms: {update_s / own_s:.2f} times the step"
    )
    print_costs(setting, held_out)


def print_costs(setting: Setting, losses: MeasuredLosses) -> None:
    """Prints the compiler's processor time and the temporary bytes of a step, of one with formats, and of a look."""
    call, look, weights = setting.training(0, 1)[0], losses.look, losses.no_weights
    flat = jax.tree.leaves(call)
    for label, lower in (
        ("step", lambda: jax.jit(lambda *args: setting.small.step(*args)).lower(*call)),
        ("with formats", lambda: look.lower_step(weights, flat)),
        ("look", lambda: look.lower_slopes(weights, {}, [flat] * 4)),
    ):
        start_s = time.process_time()
        compiled = lower().compile()
        compile_s = time.process_time() - start_s
        memory = compiled.memory_analysis()
        assert memory is not None
        print(f"{label}: compiled in {compile_s:.1f} CPU s, {memory.temp_size_in_bytes:,} temporary bytes", flush=True)


def _request(setting: Setting) -> PlanRequest:
    hardware = setting.hardware
    options = Options(
        fn=setting.wide.step, mesh=setting.mesh, hardware=hardware, memory_limit_bytes=hardware.memory_bytes
    )
    traced = trace_function(options, abstract_arguments(setting.wide))
    return PlanRequest(options, traced, space_of(options, traced), time.perf_counter())


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt"])
    parser.add_argument("--products", nargs="*", default=["float8", "float4"])
    parser.add_argument("--hardware", choices=("h100", "b200"), default="b200")
    parser.add_argument("--mesh", default="8")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60, help="of each held-out training")
    parser.add_argument("--seeds", type=int, default=5, help="of the held-out trainings")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.002, 0.005, 0.02])
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    options = parser.parse_args(argv)
    kinds = {"products": options.products, "sums": ["bfloat16"]}
    for model in options.models:
        setting = Setting.of(model, options.sizes, options.hardware, parse_mesh(options.mesh))
        tables(setting, options.updates, options.budgets, options.steps, options.seeds, kinds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
