"""A GPT training step searched, explained and run in parallel on 8 host devices: `make demo`.

    python -m experiments.demo [--layers 4] [--width 256] [--steps 20] [--output out]

Searches a plan for a 2x4 mesh, prints it, trains with it on real text, compares losses and parameters with a run on one
device, times the plan against data parallelism written by hand, and writes plan.json and plan.html.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import diffshard
from experiments import hand_plans
from experiments.equal_results import RunDifference, compare
from experiments.host_devices import host_mesh
from experiments.models import gpt, text
from experiments.models.model import Model, abstract_arguments, arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; 1 if the planned run differs from the one on one device."""
    options = _options(argv)
    mesh = host_mesh((2, 4))
    model = gpt.make(
        layers=options.layers, width=options.width, sequence=options.sequence, batch=options.batch,
        vocabulary=text.VOCABULARY,
    )  # fmt: skip
    batches = list(_batches(options.steps, options.batch, options.sequence))

    print(f"Searching how to run {model.name} ({_num_parameters(model):,} parameters) on a 2x4 mesh of host devices.\n")
    step = diffshard.search(model.step, mesh, solver=options.solver, time_limit_s=options.time_limit, donate_argnums=0)
    plan = step.plan(*abstract_arguments(model))
    print(plan)

    print(f"\nTraining {options.steps} steps on text, with the plan and on one device.")
    state, _ = plan.shard(*arguments(model))
    planned = train(step, state, batches)
    reference = train(jax.jit(model.step, donate_argnums=0), arguments(model)[0], batches)
    difference = compare(reference, planned)
    _print_training(reference[1], planned[1], difference)

    print("\nTiming the plan against data parallelism, in turns.")
    _print_ratio(*time_in_turns(step, data_parallel_step(model, mesh), model, batches[0], plan, mesh, options.rounds))

    options.output.mkdir(parents=True, exist_ok=True)
    plan.save(options.output / "plan.json")
    (options.output / "plan.html").write_text(plan.html())
    print(f"\nWrote {options.output / 'plan.json'} and {options.output / 'plan.html'}.")
    return 0 if difference.equal else 1


def train(step: Callable[..., Any], state: Any, batches: Sequence[jax.Array]) -> tuple[Any, list[float]]:
    """Returns the state after a step on each batch, and the losses; the given state is donated."""
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return jax.device_get(state), losses


def data_parallel_step(model: Model, mesh: Mesh) -> Callable[..., Any]:
    """Returns the step under `jax.jit` with the batch split over all devices and the state on each."""
    by_hand = hand_plans.data_parallel(*abstract_arguments(model), mesh)
    out = (by_hand.state, NamedSharding(mesh, PartitionSpec()))
    return jax.jit(model.step, in_shardings=by_hand.in_shardings, out_shardings=out, donate_argnums=0)


def time_in_turns(
    planned: Callable[..., Any],
    by_hand: Callable[..., Any],
    model: Model,
    batch: jax.Array,
    plan: diffshard.Plan,
    mesh: Mesh,
    rounds: int,
    steps: int = 3,
) -> tuple[list[float], list[float]]:
    """Measures the seconds of a step in each round, of the planned step and of the data-parallel one.

    The two take turns, so that other work of the machine slows down both.
    """
    shardings = hand_plans.data_parallel(*abstract_arguments(model), mesh).in_shardings
    # Each run has a state of its own, as steps donate it, and `device_put` may not copy arrays that are in place.
    runs = [
        (planned, *plan.shard(arguments(model)[0], batch)),
        (by_hand, *jax.device_put((arguments(model)[0], batch), shardings)),
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_index in range(rounds + 1):
        for index, (step, state, placed) in enumerate(runs):
            start = time.perf_counter()
            for _ in range(steps):
                state, _ = step(state, placed)
            jax.block_until_ready(state)
            runs[index] = (step, state, placed)
            if round_index:  # the first round compiles
                seconds[index].append((time.perf_counter() - start) / steps)
    return seconds


def _batches(steps: int, batch: int, sequence: int) -> Iterator[jax.Array]:
    tokens = text.load()
    for key in jax.random.split(jax.random.key(1), steps):
        yield text.sample(tokens, key, batch, sequence)


def _num_parameters(model: Model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_arguments(model)[0].params))


def _print_training(reference: Sequence[float], planned: Sequence[float], difference: RunDifference) -> None:
    print(f"{'step':>6}{'one device':>14}{'plan':>14}")
    for index in sorted({0, *range(4, len(planned), 5), len(planned) - 1}):
        print(f"{index + 1:>6}{reference[index]:>14.6f}{planned[index]:>14.6f}")
    print(
        f"{'Equal' if difference.equal else 'NOT EQUAL'}: losses differ by at most {difference.loss:.1e} of their "
        f"size, parameters and optimiser state by at most {difference.state:.1e} of each tensor's largest entry."
    )


def _print_ratio(planned: Sequence[float], by_hand: Sequence[float]) -> None:
    ratios = [b / a for a, b in zip(planned, by_hand, strict=True)]
    for name, seconds in (("plan", planned), ("data parallel", by_hand)):
        print(f"{name:>14}: {1e3 * statistics.median(seconds):.1f} ms a step")
    print(
        f"The plan is {statistics.median(ratios):.2f} times as fast as data parallelism "
        f"({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds); 8 devices share this machine's cores."
    )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7, help="how often the two steps are timed in turns")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver")
    parser.add_argument("--solver", default=None, help="as in diffshard.search; the default is diffshard's")
    parser.add_argument("--output", type=Path, default=Path("out"), help="directory of plan.json and plan.html")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
