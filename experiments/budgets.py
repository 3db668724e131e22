"""Plans chosen together for devices that change over time, beside each phase planned alone.

    python -m experiments.budgets [--models mlp gpt] [--steps 1 10 100 10000]

A training step runs on 8 H100s, then on the first 4 of them, then on 8 again, for the same number of steps in each
phase. Seconds are predicted, for all steps and moves.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import AbstractMesh

import diffshard
from diffshard.plans.printing import format_percent, format_s
from experiments.models import gpt, mlp
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table

MODELS: Mapping[str, Callable[[], Model]] = {
    "mlp": lambda: mlp.make(layers=4, width=1024, batch=4096),
    "gpt": lambda: gpt.make(batch=64, layers=2, width=512, heads=8, vocabulary=1024, sequence=256),
}
COLUMNS = ("model", "steps", "together", "its moves", "alone", "its moves", "saved", "bound", "gap", "search")


def row_of(name: str, num_steps: int, link: diffshard.Link | None) -> tuple[str, ...]:
    """Plans one model for three phases; returns the cells of its row."""
    model = MODELS[name]()
    eight, four = AbstractMesh((2, 4), ("data", "model")), AbstractMesh((1, 4), ("data", "model"))
    phases = [diffshard.elastic.Phase(mesh=mesh, num_steps=num_steps, hardware="h100") for mesh in (eight, four, eight)]
    budget = diffshard.elastic.budget(model.step, phases, *abstract_arguments(model), donate_argnums=0, move_link=link)
    chosen, alone = budget.chosen, budget.alone
    return (
        name, f"{num_steps:,}", format_s(chosen.total_s), format_s(chosen.moves_s), format_s(alone.total_s),
        format_s(alone.moves_s), format_percent(1 - chosen.total_s / alone.total_s), format_s(budget.bound),
        format_percent(budget.gap), format_s(budget.search_s),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 10, 100, 10000], help="of each phase")
    parser.add_argument("--link-gb-per-s", type=float, help="state moves over a link of this rate, not over NVLink")
    options = parser.parse_args(argv)
    link = None if options.link_gb_per_s is None else diffshard.Link(1e-5, 1e-9 / options.link_gb_per_s)
    rows = []
    for name in options.models:
        for num_steps in options.steps:
            rows.append(row_of(name, num_steps, link))
            print(*rows[-1], sep=" | ", flush=True)
    print_table("8, 4 and 8 H100s", COLUMNS, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
