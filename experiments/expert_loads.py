"""Loads of experts from routing, fed back to their assignment in the middle of a training: makespans and moves.

    python -m experiments.expert_loads [--steps 60] [--every 20]

A network with a layer of experts is trained on tokens of clusters of very unequal size, on 2 x 4 host devices, of which
the four of a group are workers of unequal speed. Experts begin assigned as if all had the same work. Every few steps an
exponential average of the tokens that chose each expert is their new work; experts, with their moments of Adam, move
to the new assignment. Makespans are predicted, in tokens of the slowest worker's time: what the loads of the last
steps take with the assignment so far, with the new one, and at least. Beside it the same training never moves an
expert; both have the same losses.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffshard
from experiments.host_devices import host_mesh
from experiments.models.placed_experts import EXPERT_NAMES, training
from experiments.tables import print_table

SPEEDS = (4.0, 2.0, 1.0, 1.0)
NUM_CLUSTERS = 32
HIDDEN = 64
_AXIS = "model"


def clustered_batch(seed: int, num_tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes tokens near centres that are chosen with probability 1 / rank, and targets that depend on the centre."""
    centres = np.random.default_rng(0).normal(size=(2, NUM_CLUSTERS, width)).astype(np.float32)
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, NUM_CLUSTERS + 1)
    cluster = rng.choice(NUM_CLUSTERS, num_tokens, p=weight / weight.sum())
    noise = rng.normal(size=(num_tokens, width)).astype(np.float32)
    return centres[0, cluster] + 0.3 * noise, centres[1, cluster]


def moved_experts(layout: diffshard.experts.ExpertLayout, target: diffshard.experts.ExpertLayout) -> int:
    """Returns how many experts of a group change their device."""
    places = zip(layout.places[0], target.places[0], strict=True)
    return sum(old.device != new.device for old, new in places)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains twice, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--room", type=int, default=8, help="experts that a worker has room for")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args(arguments)
    mesh = host_mesh((2, 4))
    first = diffshard.experts.assign_experts([1.0] * options.experts, SPEEDS, options.room).layout(mesh, _AXIS)
    losses = np.zeros((2, options.steps))
    rows: list[tuple[Any, ...]] = []
    for moving in (False, True):
        layout, loads = first, diffshard.experts.ExpertLoads.init(options.experts)
        init, step = training(layout, HIDDEN, optax.adam(3e-3))
        run = jax.jit(step)
        state = jax.jit(init)(jax.random.key(0), jnp.zeros((options.tokens, options.width)))
        for number in range(options.steps):
            state, result = run(state, clustered_batch(number + 1, options.tokens, options.width))
            loads = loads.update(result.num_chosen)
            losses[int(moving), number] = result.loss
            if not moving or (number + 1) % options.every or number + 1 == options.steps:
                continue
            work = loads.work() * 2 * options.tokens / options.experts
            assignment = diffshard.experts.assign_experts(work, SPEEDS, options.room)
            target = assignment.layout(mesh, _AXIS)
            old_makespan = max(work[list(own)].sum() / speed for own, speed in zip(layout.experts, SPEEDS, strict=True))
            rows.append(
                (
                    number + 1,
                    f"{work.max() / work.mean():.1f}",
                    f"{old_makespan:.0f}",
                    f"{assignment.step_s:.0f}",
                    f"{assignment.lower_bound_s:.0f}",
                    moved_experts(layout, target),
                    f"{int(result.num_dropped) / (2 * options.tokens):.1%}",
                )
            )
            state = layout.move(state, target, names=EXPERT_NAMES)
            layout = target
            run = jax.jit(training(layout, HIDDEN, optax.adam(3e-3)).step)
    print_table(
        f"{options.experts} experts on workers of speeds {SPEEDS}, tokens of the slowest worker's time",
        ("step", "largest / mean load", "makespan before", "after", "bound", "experts moved", "choices dropped"),
        rows,
    )
    difference = float(np.abs(losses[0] / losses[1] - 1).max())
    print(f"Loss {losses[0, 0]:.4f} to {losses[1, -1]:.4f}; with and without moves {difference:.1e} apart at most.")


if __name__ == "__main__":
    main()
