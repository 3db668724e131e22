"""What replicas that run with bounded staleness, as in HetPipe, would gain over replicas in step.

    python -m experiments.pipelines.bounded_staleness

Two replicas of unequal devices take waves of micro-batches. In step, all gradients are added up before the next wave.
With a staleness of D a replica may begin a wave when all have brought the gradients of the wave D + 1 before it. The
seconds of many waves are simulated, with times of waves that vary at random. What gradients of the weights of one step
ago do to a loss `experiments.pipelines.delayed_gradients` measures.

Source: Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration of
Pipelined Model Parallelism and Data Parallelism" (2020), section 5.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.tables import print_table

COUNT = 32
"""Micro-batches of a wave of both replicas together."""
NUM_WAVES = 400


class Replicas(NamedTuple):
    """A fast replica that keeps the weights, and a slow one.

    Attributes:
      micro_s: seconds of a micro-batch on each.
      weights_s: until the slow one has the weights.
      sums_s: until its gradients are added on the fast one.
    """

    name: str
    micro_s: tuple[float, float]
    weights_s: float
    sums_s: float


SETTINGS = [
    Replicas("A100, V100", (0.0635, 0.130), 0.194, 0.129),
    Replicas("H100, A100", (0.0225, 0.0635), 0.135, 0.129),
    Replicas("A100, T4", (0.0635, 0.642), 0.223, 0.129),
]
"""From the plans of `experiments.pipelines.unequal_devices`: a host of each kind, one stage for each replica."""


def wave_s(replicas: Replicas, shares: Sequence[int], staleness: int, spread: float) -> float:
    """Returns the seconds of a wave in the mean of many.

    Args:
      shares: the micro-batches of each replica.
      staleness: D.
      spread: the standard deviation of the logarithm of a replica's seconds for a wave.
    """
    noise = np.exp(spread * np.random.default_rng(0).normal(size=(NUM_WAVES, 2)) - spread**2 / 2)
    takes = noise * np.array(shares) * replicas.micro_s
    delays = np.array([0.0, replicas.weights_s]), np.array([0.0, replicas.sums_s])
    brought: list[np.ndarray] = []
    end = np.zeros(2)
    for wave in range(NUM_WAVES):
        needed = wave - 1 - staleness
        free = brought[needed].max() if needed >= 0 else 0.0
        end = np.maximum(end, free + delays[0]) + takes[wave]
        brought.append(end + delays[1])
    return float(brought[-1].max() / NUM_WAVES)


def best_wave_s(replicas: Replicas, staleness: int, spread: float) -> tuple[float, int]:
    """Returns the seconds of a wave with the best shares, and the micro-batches of the slow replica."""
    return min((wave_s(replicas, (COUNT - n, n), staleness, spread), n) for n in range(1, COUNT))


def seconds_rows(spreads: Sequence[float]) -> list[list[Any]]:
    """Returns a row for each setting and spread."""
    rows = []
    for replicas in SETTINGS:
        for spread in spreads:
            even_s = [wave_s(replicas, (COUNT // 2, COUNT // 2), d, spread) for d in (0, 4)]
            found = [best_wave_s(replicas, d, spread) for d in (0, 1, 2, 4)]
            least_s = COUNT / sum(1 / s for s in replicas.micro_s)
            words = [f"{s:.3f} ({n})" for s, n in found]
            rows.append([replicas.name, f"{spread:.0%}", *(f"{s:.3f}" for s in even_s), *words, f"{least_s:.3f}"])
    return rows


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    options = parser.parse_args(args)
    head = ["replicas", "spread", "even, in step", "even, D = 4", "in step", "D = 1", "D = 2", "D = 4", "arithmetic"]
    title = f"Seconds of a wave of {COUNT} micro-batches; in brackets those of the slow replica"
    print_table(title, head, seconds_rows(options.spreads))


if __name__ == "__main__":
    main()
